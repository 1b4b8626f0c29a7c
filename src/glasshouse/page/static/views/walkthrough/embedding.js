// Embedding steps.

import { h } from "glasshouse/dom.js";
import { count, short } from "glasshouse/number.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { FIRST, largest, rows, small } from "glasshouse/views/walkthrough/figures.js";

/** @type {Describe<"embed" | "scale" | "segment" | "position">} */
export const embedding = {
  embed(card, c) {
    const [rowsOf, wide] = card.shape;
    const table = decodeTensor(card.rows);
    return {
      name: "Token embedding",
      formula: `x [${wide}] = onehot(${card.id}) [${count(rowsOf)}] · E [${count(rowsOf)}×${wide}]`,
      legend: [
        ["E", "the embedding matrix, one learned row per token"],
        ["onehot", `0 everywhere, 1 at ${card.id}`],
      ],
      why: `Token ${card.id} selects row ${card.id} of the embedding matrix.${WHERE[c.model.position] ?? ""}`,
      figure: () => {
        const most = largest(table.data);
        const high = table.shape[0];
        const lines = Array.from({ length: high }, (_, i) => {
          const id = card.first + i;
          const on = id === card.id;
          return h(
            "tr",
            { class: on ? "own" : "" },
            h(
              "th",
              { scope: "row" },
              h("span", { class: "hot", data: { value: on ? 1 : 0, what: `onehot[${id}]` } }, on ? "1" : "0"),
              h("span", { class: "quiet" }, `row ${id}`),
            ),
            h("td", {}, small(table.data.subarray(i * table.shape[1], (i + 1) * table.shape[1]), most, `E[${id}]`)),
          );
        });
        return [
          h("table", { class: "keyed", "aria-label": "rows of E around the token" }, h("tbody", {}, lines)),
          rows([{ name: "x", sign: "=", value: card.y }], c.say),
        ];
      },
    };
  },

  scale: (card, c) => ({
    name: "Scale by √d_model",
    formula: `x' = √d · x = ${short(card.by)} · x`,
    legend: [["d", `d_model = ${c.model.d_model}`]],
    why: "Brings the embedding to the scale of the position encoding.",
    figure: () =>
      rows(
        [
          { name: "x", value: card.x },
          { sign: "→", name: "x'", value: card.y },
        ],
        c.say,
      ),
  }),

  segment: (card, c) => ({
    name: "Add segment embedding",
    formula: `x' [${c.model.d_model}] = x + s_0`,
    legend: [["s_0", "a learned vector for the first segment of the text"]],
    why: "Distinguishes the two segments of an input; here everything is segment 0.",
    figure: () =>
      rows(
        [
          { name: "x", value: card.x },
          { sign: "+", name: "s_0", value: card.added },
          { sign: "=", name: "x'", value: card.y },
        ],
        c.say,
        { alike: true },
      ),
  }),

  position(card, c) {
    const learned = card.how === "learned";
    const d = c.model.d_model;
    /** @type {(i: number) => [number, number]} */
    const half = (i) =>
      card.layout === "pairs" ? [Math.floor(i / 2), i % 2] : [i % (d / 2), Math.floor(i / (d / 2))];
    const waves = Array.from({ length: FIRST }, (_, i) => {
      const [pair, cosine] = half(i);
      return `${cosine ? "cos" : "sin"} ${short(c.found.position / 10000 ** ((2 * pair) / d))}`;
    });
    const places = card.layout === "pairs" ? ["2i", "2i+1"] : ["i", "i+d/2"];
    return {
      name: "Add position embedding",
      formula: learned
        ? `x' [${d}] = x + P_{${card.row}}`
        : `x' = x + p,  p_{${places[0]}} = sin(${c.found.position} / 10000^{2i/${d}}),  p_{${places[1]}} = cos(…)`,
      legend: learned
        ? [["P", `the learned position embeddings; row ${card.row} belongs to this position`]]
        : [["p", "sines and cosines of the position, highest frequency first"]],
      why: learned
        ? "Attention is order-invariant; a learned vector for each position encodes the order."
        : "Attention is order-invariant; sinusoids of many frequencies encode the position.",
      figure: () =>
        rows(
          [
            { name: "x", value: card.x },
            {
              sign: "+",
              name: learned ? `P_{${card.row}}` : "p",
              value: card.added,
              captions: learned ? null : waves,
            },
            { sign: "=", name: "x'", value: card.y },
          ],
          c.say,
          { alike: true },
        ),
    };
  },
};

/** @type {Record<string, string>} */
const WHERE = {
  rotary: " Positions enter later, through the rotation of queries and keys.",
  alibi: " Positions enter later, at the attention scores.",
  relative: " Positions enter later, at the attention scores.",
};
