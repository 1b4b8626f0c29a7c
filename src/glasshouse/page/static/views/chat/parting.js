// Where the answers of two models part, and how much the models differ along the first of them.

import { ink, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { compareAnswers } from "glasshouse/server.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { bars, token } from "glasshouse/widgets.js";

/**
 * A button for each answer beside the first, and what it finds.
 * @param {ChatAnswer[]} answers
 * @returns {HTMLElement}
 */
export function parting(answers) {
  const [first, ...others] = answers;
  const found = h("div", {});
  const buttons = others.map((other) =>
    h(
      "button",
      { type: "button", class: "link", data: { testid: "part" }, on: { click: () => show(other) } },
      others.length > 1 ? `where ${first.model.id} and ${other.model.id} part` : "where they part",
    ),
  );
  /** @param {ChatAnswer} other */
  async function show(other) {
    try {
      put(found, comparison(first, other, await compareAnswers(first.id, other.id)));
    } catch (error) {
      put(found, h("p", { class: "trouble", role: "alert" }, error.message));
    }
  }
  return h("div", { class: "parts" }, h("p", { class: "controls" }, buttons), found);
}

/**
 * @param {ChatAnswer} first
 * @param {ChatAnswer} second
 * @param {AnswerComparison} found
 * @returns {HTMLElement}
 */
function comparison(first, second, found) {
  const [a, b] = [first.model.id, second.model.id];
  /** @type {(id: number) => Token} */
  const info = (id) => found.tokens[id];
  /** @type {(answer: ChatAnswer) => number | undefined} */
  const own = (answer) => answer.opened?.output[found.parts_at ?? -1]?.id;
  const [here, there] = [own(first), own(second)];
  const node = h("section", {
    class: "parting",
    "aria-label": "where the answers part",
    data: { testid: "parting" },
  });
  if (!found.same_prompt)
    node.append(
      h(
        "p",
        {},
        "The prompts of the two answers have different tokens; the outputs are compared from their beginnings.",
      ),
    );
  if (found.parts_at === null) node.append(h("p", {}, "The two answers have the same tokens."));
  else
    node.append(
      h(
        "p",
        { data: { testid: "parts-at" } },
        `They part at token ${found.parts_at}: ${a} `,
        here === undefined ? "ends" : token(info(here)),
        `, ${b} `,
        there === undefined ? "ends" : token(info(there)),
        ".",
      ),
      odds(first, second, found.parts_at),
    );
  if (found.reason)
    node.append(h("p", { class: "quiet" }, `The models themselves cannot be compared: ${found.reason}`));
  else node.append(...differences(a, b, found));
  return node;
}

/**
 * The candidates of both models for the token at which they part.
 * @param {ChatAnswer} first
 * @param {ChatAnswer} second
 * @param {number} at
 * @returns {HTMLElement}
 */
function odds(first, second, at) {
  const sides = [first, second].flatMap((answer) => {
    const drawn = answer.opened?.output[at] ?? answer.opened?.end;
    return drawn ? [{ answer, drawn }] : [];
  });
  return h(
    "div",
    { class: "columns" },
    sides.map(({ answer, drawn }) => {
      const best = drawn.candidates.slice(0, 5).map(([id, probability]) => ({ id, probability }));
      if (!best.some(({ id }) => id === drawn.id)) best.push(drawn);
      const rows = best.map(({ id, probability }) => ({
        name: token(answer.describe(id)),
        share: probability,
        value: probability,
        text: percent(probability),
        class: id === drawn.id ? "drawn-one" : "",
      }));
      return h(
        "div",
        {},
        h("h3", {}, answer.model.id),
        bars(rows, { label: `candidates of ${answer.model.id}`, full: "100%" }),
      );
    }),
  );
}

/**
 * The KL divergence at each token of the first answer; a click shows the layers there.
 * @param {string} a
 * @param {string} b
 * @param {AnswerComparison} found
 * @returns {HTMLElement[]}
 */
function differences(a, b, found) {
  const kl = decodeTensor(found.kl_divergence).data;
  const [lossA, lossB] = [found.loss_a, found.loss_b].map((one) => decodeTensor(one).data);
  const {
    data,
    shape: [depth, length],
  } = decodeTensor(found.residual_distance);
  const from = Math.max(0, found.start - 1); // where the first token was drawn
  const most = Math.max(1e-9, ...kl.slice(from));
  const about = h("div", {});
  /** @type {(position: number) => void} */
  const show = (position) => {
    const next = found.ids[position + 1];
    const layers = Array.from({ length: depth }, (_, layer) => data[layer * length + position]);
    const top = Math.max(1e-9, ...layers);
    const loss =
      next === undefined
        ? ""
        : `; the next token ${found.tokens[next].text} has ${percent(Math.exp(-lossA[position]))} by ${a}, ${percent(Math.exp(-lossB[position]))} by ${b}`;
    put(
      about,
      h(
        "p",
        {},
        "After ",
        token(found.tokens[found.ids[position]]),
        `: KL divergence ${short(kl[position])} nats${loss}. Distance of the residual streams by layer:`,
      ),
      bars(
        layers.map((value, layer) => ({
          name: layer ? `layer ${layer - 1}` : "embed",
          share: value / top,
          value,
          text: short(value),
        })),
        { label: "distance of the residual streams", full: `${short(top)}, the largest` },
      ),
    );
  };
  const text = h(
    "p",
    { class: "said", data: { testid: "divergence" } },
    found.ids.slice(from, -1).map((id, i) => {
      const share = kl[from + i] / most;
      return h(
        "button",
        {
          type: "button",
          class: "token",
          title: `KL divergence ${short(kl[from + i])} nats`,
          style: { background: shade(share), color: ink(share) },
          data: { value: kl[from + i] },
          on: { click: () => show(from + i) },
        },
        found.tokens[id].text,
      );
    }),
  );
  const start = found.parts_at === null ? from : Math.min(from + found.parts_at, length - 1);
  show(start);
  return [
    h("h3", {}, `Both models on the answer of ${a}`),
    h(
      "p",
      { class: "about" },
      `Colour: the KL divergence of ${b}’s prediction of the next token from ${a}’s, up to ${short(most)} nats. Click a token for the layers there.`,
    ),
    text,
    about,
  ];
}
