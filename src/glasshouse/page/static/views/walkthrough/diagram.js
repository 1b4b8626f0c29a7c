// Diagram of the block: the residual stream as a line, with the sublayers that write to it.

import { s } from "glasshouse/dom.js";
import { partOf } from "glasshouse/views/walkthrough/card.js";

/** @type {Record<string, string>} */
const WORDS = {
  embed: "embed",
  attention: "attention",
  cross: "cross-attention",
  feedforward: "feed-forward",
  final: "norm",
  head: "unembed",
  memory: "to decoder",
};

/**
 * The nodes of the diagram in order: {node, label, kind}. Kind: on (the stream), off (a branch), plus.
 * @param {WalkthroughResponse} found
 * @param {Model} model
 * @returns {DiagramNode[]}
 */
function places(found, model) {
  /** @type {DiagramNode[]} */
  const list = [];
  for (const card of found.cards) {
    if (list.some((one) => one.node === card.node)) continue;
    const [part, step] = card.node.split(".");
    const inBlock = part in { attention: 1, cross: 1, feedforward: 1 };
    list.push({
      node: card.node,
      inBlock,
      part,
      label: label(card.node, part, step, found, model),
      kind: kind(card, list, step, inBlock),
      at: 0,
      size: 0,
    });
  }
  return list;
}

/**
 * @param {string} node
 * @param {string} part
 * @param {string | undefined} step
 * @param {WalkthroughResponse} found
 * @param {Model} model
 * @returns {string}
 */
function label(node, part, step, found, model) {
  if (part === "layers") return found.layer === 1 ? "layer 0" : `layers 0–${found.layer - 1}`;
  if (part === "onward")
    return found.layer + 2 === found.n_layers
      ? `layer ${found.layer + 1}`
      : `layers ${found.layer + 1}–${found.n_layers - 1}`;
  if (step === "add") return "+";
  if (step) return "norm";
  if (node === "head" && !model.predicts_tokens) return "head";
  return WORDS[node];
}

/**
 * @param {StepCard} card
 * @param {DiagramNode[]} before
 * @param {string | undefined} step
 * @param {boolean} inBlock
 * @returns {DiagramNode["kind"]}
 */
function kind(card, before, step, inBlock) {
  if (step === "add") return "plus";
  if (!inBlock) return "on";
  return step === "norm" && before.some((one) => one.node === `${partOf(card)}.add`) ? "on" : "off";
}

const UNIT = 38; // from place to place, downwards
const CHARACTER = 7.2;

/**
 * Draw the path, downwards or (`flat`) from left to right. `go` is called with the selected node.
 * @param {WalkthroughResponse} found
 * @param {Model} model
 * @param {boolean} flat
 * @param {(node: string) => void} go
 * @returns {SVGElement}
 */
export function draw(found, model, flat, go) {
  const list = places(found, model);
  let along = flat ? 10 : 8;
  for (const [i, one] of list.entries()) {
    const wasInBlock = i > 0 && list[i - 1].inBlock;
    one.size = flat ? (one.kind === "plus" ? 22 : one.label.length * CHARACTER + 18) : 24;
    if (one.inBlock && !wasInBlock) along += flat ? 14 : 22;
    if (!one.inBlock && wasInBlock) along += flat ? 14 : 16;
    one.at = along;
    along += flat ? one.size + 12 : UNIT;
  }
  const last = list[list.length - 1];
  const end = flat ? along : along - UNIT + 24 + 10;
  const runs = branches(list, model.norm_placement === "parallel");
  return flat ? lying(list, runs, end, last, found, go) : standing(list, runs, end, last, found, go);
}

/**
 * @param {DiagramNode[]} list
 * @param {DiagramBranch[]} runs
 * @param {number} high
 * @param {DiagramNode} last
 * @param {WalkthroughResponse} found
 * @param {(node: string) => void} go
 * @returns {SVGElement}
 */
function standing(list, runs, high, last, found, go) {
  const stream = 22;
  const wide = 168;
  /** @type {SVGElement[]} */
  const shapes = [s("line", { class: "stream", x1: stream, y1: list[0].at + 12, x2: stream, y2: last.at + 12 })];
  const block = list.filter((one) => one.inBlock);
  shapes.unshift(
    s("rect", {
      class: "block",
      x: 2,
      y: block[0].at - 24,
      width: wide - 4,
      height: block[block.length - 1].at - block[0].at + 56,
      rx: 9,
    }),
    s("text", { class: "caption", x: 40, y: block[0].at - 12 }, `layer ${found.layer} of ${found.n_layers}`),
  );
  for (const { nodes, plus, from } of runs) {
    const middle = 104;
    const [first, final] = [nodes[0], nodes[nodes.length - 1]];
    shapes.push(
      s("path", {
        class: "branch",
        d: `M${stream},${from.at - 7} ${from === first ? "" : `Q${stream + 17},${from.at - 7} ${stream + 17},${from.at + 12} V${first.at - 12} `}C${stream + 30},${first.at - 7} ${middle},${first.at - 12} ${middle},${first.at}`,
      }),
    );
    for (let i = 1; i < nodes.length; i += 1)
      shapes.push(s("line", { class: "branch", x1: middle, y1: nodes[i - 1].at + 24, x2: middle, y2: nodes[i].at }));
    shapes.push(
      s("path", {
        class: "branch",
        d: `M${middle},${final.at + 24} C${middle},${plus.at + 12} ${middle},${plus.at + 12} ${stream + 11},${plus.at + 12}`,
      }),
    );
  }
  for (const one of list) {
    if (one.kind === "plus")
      shapes.push(spot(one, go, s("circle", { cx: stream, cy: one.at + 12, r: 11 }), stream, one.at + 12));
    else {
      const x = one.kind === "on" ? 8 : 46;
      const width = one.kind === "on" ? 96 : 116;
      const room = Math.max(width, one.label.length * CHARACTER + 16);
      shapes.push(
        spot(
          one,
          go,
          s("rect", { x, y: one.at, width: Math.min(room, wide - 4 - x), height: 24, rx: 6 }),
          x + Math.min(room, wide - 4 - x) / 2,
          one.at + 12,
        ),
      );
    }
  }
  return s(
    "svg",
    {
      viewBox: `0 0 ${wide} ${high}`,
      width: wide,
      height: high,
      class: "path",
      role: "group",
      "aria-label": "where in the model",
    },
    shapes,
  );
}

/**
 * @param {DiagramNode[]} list
 * @param {DiagramBranch[]} runs
 * @param {number} wide
 * @param {DiagramNode} last
 * @param {WalkthroughResponse} found
 * @param {(node: string) => void} go
 * @returns {SVGElement}
 */
function lying(list, runs, wide, last, found, go) {
  const stream = 74;
  /** @type {SVGElement[]} */
  const shapes = [s("line", { class: "stream", x1: list[0].at, y1: stream, x2: last.at + last.size, y2: stream })];
  const block = list.filter((one) => one.inBlock);
  const final = block[block.length - 1];
  shapes.unshift(
    s("rect", {
      class: "block",
      x: block[0].at - 14,
      y: 4,
      width: final.at + final.size - block[0].at + 22,
      height: 90,
      rx: 9,
    }),
    s("text", { class: "caption", x: block[0].at - 6, y: 15 }, `layer ${found.layer} of ${found.n_layers}`),
  );
  for (const { nodes, plus, from } of runs) {
    const [first, end] = [nodes[0], nodes[nodes.length - 1]];
    shapes.push(
      s("path", {
        class: "branch",
        d: `M${from.at - 8},${stream} ${from === first ? "" : `Q${from.at - 8},57 ${from.at + 10},57 H${first.at - 20} `}C${first.at - 8},${stream - 20} ${first.at - 8},38 ${first.at},38`,
      }),
    );
    for (let i = 1; i < nodes.length; i += 1)
      shapes.push(
        s("line", { class: "branch", y1: 38, x1: nodes[i - 1].at + nodes[i - 1].size, y2: 38, x2: nodes[i].at }),
      );
    shapes.push(
      s("path", {
        class: "branch",
        d: `M${end.at + end.size},38 C${plus.at + 11},38 ${plus.at + 11},38 ${plus.at + 11},${stream - 11}`,
      }),
    );
  }
  for (const one of list) {
    const y = one.kind === "off" ? 38 : stream;
    const shape =
      one.kind === "plus"
        ? s("circle", { cx: one.at + 11, cy: y, r: 11 })
        : s("rect", { x: one.at, y: y - 12, width: one.size, height: 24, rx: 6 });
    shapes.push(spot(one, go, shape, one.at + one.size / 2, y));
  }
  return s(
    "svg",
    {
      viewBox: `0 0 ${wide} 98`,
      width: wide,
      height: 98,
      class: "path",
      role: "group",
      "aria-label": "where in the model",
    },
    shapes,
  );
}

/**
 * Branches off the stream, each with the sum it ends in, and the node before which it leaves the stream: its own
 * first, or, if they are parallel, that of the block.
 * @param {DiagramNode[]} list
 * @param {boolean} parallel
 * @returns {DiagramBranch[]}
 */
function branches(list, parallel) {
  /** @type {DiagramBranch[]} */
  const runs = [];
  /** @type {DiagramNode[]} */
  let run = [];
  for (const one of list) {
    if (one.kind === "off") run.push(one);
    else if (one.kind === "plus") {
      runs.push({ nodes: run, plus: one, from: parallel && runs.length > 0 ? runs[0].nodes[0] : run[0] });
      run = [];
    }
  }
  return runs;
}

/**
 * @param {DiagramNode} one
 * @param {(node: string) => void} go
 * @param {SVGElement} shape
 * @param {number} x
 * @param {number} y
 * @returns {SVGElement}
 */
function spot(one, go, shape, x, y) {
  const said =
    one.kind === "plus"
      ? `sum after ${WORDS[one.part]}`
      : one.inBlock && one.label === "norm"
        ? `norm of ${WORDS[one.part]}`
        : one.label;
  const act = () => go(one.node);
  return s(
    "g",
    {
      class: `place ${one.kind}`,
      tabindex: 0,
      role: "button",
      "aria-label": said,
      data: { node: one.node },
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
    shape,
    s("text", { x, y }, one.label),
  );
}
