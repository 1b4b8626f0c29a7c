// The tree of a beam search, from left to right, the most likely path on top.

import { s } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { cut } from "glasshouse/widgets.js";

const STEP = 124; // pixels from one token to the next
const LINE = 30; // and from one line to the next
export const OUTCOMES = { kept: "kept", ended: "end of text", pruned: "pruned" };

/**
 * Draw the tree; a selected hypothesis is passed to `choose`.
 * @param {BeamTree} tree
 * @param {boolean} withPruned
 * @param {(ids: number[]) => void} choose
 * @returns {SVGElement}
 */
export function drawTree({ nodes, hypotheses }, withPruned, choose) {
  const best = new Set(hypotheses[0].path);
  const useful = new Set(hypotheses.flatMap((one) => one.path));
  /** @type {Map<number | null, number[]>} */
  const children = new Map();
  nodes.forEach((one, i) => {
    if (!withPruned && one.outcome === "pruned") return;
    children.set(one.parent, [...(children.get(one.parent) ?? []), i]);
  });
  for (const some of children.values())
    some.sort((a, b) => Number(best.has(b)) - Number(best.has(a)) || nodes[b].total - nodes[a].total);
  /** @type {Map<number | null, number>} */
  const spots = new Map();
  let line = 0;
  /** @param {number | null} at */
  function place(at) {
    const below = children.get(at) ?? [];
    const mine = line;
    below.forEach((child, i) => {
      if (i) line += 1;
      place(child);
    });
    spots.set(at, mine);
  }
  place(null);
  const last = Math.max(...nodes.map((one) => one.step));
  /** @type {(step: number) => number} */
  const X = (step) => 90 + (step - 1) * STEP;
  /** @type {(at: number | null) => number} */
  const Y = (at) => 20 + (spots.get(at) ?? 0) * LINE;
  const wide = STEP - 26;
  /** @type {[number, SVGElement][]} */
  const shapes = [];
  /** @type {SVGElement[]} */
  const boxes = [];
  for (const at of spots.keys()) {
    if (at === null) continue;
    const one = nodes[at];
    const kind = best.has(at) ? "best" : one.outcome === "pruned" ? "pruned" : useful.has(at) ? "kept" : "kept lost";
    const [x, y] = [X(one.step), Y(at)];
    const before = one.parent === null ? [62, Y(null)] : [X(nodes[one.parent].step) + wide, Y(one.parent)];
    const d = `M${before[0]} ${before[1]}C${(before[0] + x) / 2} ${before[1]} ${(before[0] + x) / 2} ${y} ${x} ${y}`;
    shapes.push([kind === "best" ? 2 : kind === "pruned" ? 0 : 1, s("path", { class: `al-edge ${kind}`, d })]);
    const text = one.outcome === "ended" ? "■ end" : cut(one.text, 7);
    boxes.push(
      s(
        "g",
        {
          class: `al-node ${kind} ${one.outcome}`,
          data: { testid: `node-${at}`, value: one.logprob, outcome: one.outcome },
        },
        s(
          "title",
          {},
          `${one.text}: ${percent(Math.exp(one.logprob))}, score ${short(one.score)}, ${OUTCOMES[one.outcome]}`,
        ),
        s("rect", { x, y: y - 11, width: wide, height: 22, rx: 5 }),
        s("text", { x: x + 6, y }, text),
        s("text", { class: "al-percent", x: x + wide - 5, y }, brief(Math.exp(one.logprob))),
      ),
    );
  }
  const right = X(last) + wide + 26;
  const labels = hypotheses.map((one, i) => {
    const end = one.path.at(-1);
    if (end === undefined) return null;
    const y = Y(end);
    const from = X(nodes[end].step) + wide;
    const text = one.text || one.tokens.map((each) => each.text).join("") || "(nothing)";
    const said = cut(text, 28);
    const act = () => choose(one.ids);
    return [
      s("line", { class: "al-lead", x1: from + 3, x2: right - 6, y1: y, y2: y }),
      s(
        "g",
        {
          class: i ? "al-label" : "al-label best",
          role: "button",
          tabindex: "0",
          "aria-label": `${i + 1}. ${short(one.score)}  ${text}: use as target`,
          data: { testid: `label-${i}` },
          on: {
            click: act,
            keydown: (event) => {
              if (event.key === "Enter" || event.key === " ") {
                event.preventDefault();
                act();
              }
            },
          },
        },
        s("text", { x: right, y }, `${i + 1}. `, s("tspan", { class: "al-score" }, short(one.score)), `  ${said}`),
      ),
    ];
  });
  const start = s(
    "g",
    { class: "al-node best" },
    s("rect", { x: 8, y: Y(null) - 11, width: 54, height: 22, rx: 5 }),
    s("text", { x: 14, y: Y(null) }, "start"),
  );
  const width = right + 330;
  const height = 40 + line * LINE;
  const inOrder = shapes.sort((a, b) => a[0] - b[0]).map(([, shape]) => shape);
  return s(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}` },
    inOrder,
    labels.filter(Boolean),
    start,
    boxes,
  );
}

/**
 * @param {number} share
 * @returns {string}
 */
function brief(share) {
  return share >= 0.01 ? `${(100 * share).toFixed(0)}%` : "<1%";
}
