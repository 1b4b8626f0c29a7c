// Steps from the last layer to the output.

import { h } from "glasshouse/dom.js";
import { count, percent, plural, short } from "glasshouse/number.js";
import { bars, token } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { linear } from "glasshouse/views/walkthrough/card.js";
import { activation } from "glasshouse/views/walkthrough/feedforward.js";
import { FIRST, largest, rows, single, small } from "glasshouse/views/walkthrough/figures.js";

/** @type {Describe<"transform" | "logits" | "probabilities" | "labels" | "vectors">} */
export const unembedding = {
  transform(card, c) {
    const [name] = activation(card.how);
    const made = linear(card, c, {
      name: "Head transform",
      letters: { y: "t", W: "W_T", x: "y", b: "b_T" },
      why: `A linear layer and ${name} in the head, before the unembedding.`,
    });
    return {
      ...made,
      formula: `t' = ${name}(t),  ${made.formula}`,
      figure: () => [
        made.figure(),
        rows(
          [
            { name: "t", value: card.y },
            { sign: "→", name: "t'", value: card.bent },
          ],
          c.say,
        ),
      ],
    };
  },

  logits(card, c) {
    const [all, wide] = card.shape;
    const table = decodeTensor(card.rows);
    const most = largest(table.data);
    const matrix = card.tied ? "E" : "U";
    const highest = largest(card.top.map((one) => one.logit));
    const scaled = card.by === 1 ? "" : `${short(card.by)} · `;
    const capped = card.cap === null ? "" : `,  l' = ${short(card.cap)} · tanh(l / ${short(card.cap)})`;
    return {
      name: "Unembedding: logits",
      formula: `l [${count(all)}] = ${scaled}${matrix} [${count(all)}×${wide}] y [${wide}]${card.bias ? " + b" : ""}${capped}`,
      legend: [
        [matrix, card.tied ? "the embedding matrix (tied)" : "the unembedding matrix, one learned row per token"],
        ["l", "a logit for each token"],
        ...(card.by === 1 ? [] : [[short(card.by), "1 / √d_model"]]),
        ...(card.cap === null ? [] : [["l'", "the soft-capped logit, which is shown"]]),
      ],
      why: `One logit for each of ${count(all)} tokens: the dot product with its row.`,
      figure: () => [
        rows([{ name: "y", value: card.x }], c.say),
        h(
          "div",
          { class: "scroll" },
          h(
            "table",
            { class: "keyed", "aria-label": "the highest logits" },
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                ["token", `row of ${matrix}, first ${FIRST}`, "logit"].map((one) => h("th", { scope: "col" }, one)),
              ),
            ),
            h(
              "tbody",
              {},
              card.top.map((one, i) =>
                h(
                  "tr",
                  { data: { id: one.id } },
                  h("th", { scope: "row" }, token(one)),
                  h(
                    "td",
                    {},
                    small(
                      table.data.subarray(i * table.shape[1], (i + 1) * table.shape[1]),
                      most,
                      `${matrix}[${one.id}]`,
                    ),
                  ),
                  h("td", {}, single(one.logit, highest, `logit of ${one.text}`)),
                ),
              ),
            ),
          ),
        ),
      ],
    };
  },

  probabilities: (card, c) => ({
    name: "Softmax over the vocabulary",
    formula: "p_i = exp(l_i) / Σ_j exp(l_j)",
    legend: [["Σ_j", `the sum over ${plural(card.count, "token")}, here e^${short(card.total)}`]],
    why:
      c.model.head === "next_token"
        ? `The probability of each token after “${c.found.token.text}”.`
        : "The probability of each token at this position.",
    figure: () => chances(card, (one) => token(one)),
  }),

  labels: (card, c) => ({
    name: "Classifier logits",
    formula: `l [${card.count}] = W [${card.count}×${c.model.d_model}] y + b`,
    legend: [["l", "one logit per label; softmax gives probabilities"]],
    why: card.pooled
      ? "The vectors of all tokens are pooled first: the label is of the whole text."
      : "The label of this token.",
    figure: () => [rows([{ name: "y", value: card.x }], c.say), chances(card, (one) => one.text)],
  }),

  vectors: (card, c) => ({
    name: "Output vector",
    formula: `y [${c.model.d_model}]`,
    legend: [["y", card.pooled ? "this token’s contribution to the pooled vector" : "the output for this token"]],
    why: "This model has no token or label head: its vectors are the output, for example as embeddings.",
    figure: () => rows([{ name: "y", value: card.y }], c.say),
  }),
};

/**
 * @param {{ top: TopToken[], count: number }} card
 * @param {(one: TopToken) => Child} name
 * @returns {Child[]}
 */
function chances(card, name) {
  const rest = 1 - card.top.reduce((sum, one) => sum + one.probability, 0);
  return [
    bars(
      card.top.map((one) => ({
        name: name(one),
        share: one.probability,
        value: one.probability,
        text: percent(one.probability),
        title: `logit ${short(one.logit)}`,
        data: { id: one.id, logit: one.logit },
      })),
      { label: "most likely", full: "100%" },
    ),
    card.count > card.top.length
      ? h(
          "p",
          { class: "quiet" },
          `${plural(card.count - card.top.length, "other")} share ${percent(Math.max(0, rest))}.`,
        )
      : null,
  ];
}
