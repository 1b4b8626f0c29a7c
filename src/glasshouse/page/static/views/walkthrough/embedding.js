// Steps from a token to the first layer.

import { h } from "glasshouse/dom.js";
import { count, short } from "glasshouse/number.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { FIRST, largest, rows, small } from "glasshouse/views/walkthrough/figures.js";

export const embedding = {
  embed(card, c) {
    const [rowsOf, wide] = card.shape;
    const table = decodeTensor(card.rows);
    return {
      name: "Look the token up",
      formula: `x [${wide}] = onehot(${card.id}) [${count(rowsOf)}] · E [${count(rowsOf)}×${wide}]`,
      legend: [["E", "the embedding table, a learned row for each token"], ["onehot", `0 everywhere, 1 at ${card.id}`]],
      why: `A model reads numbers, not letters: token ${card.id} picks row ${card.id} of a table, and that row is where its meaning starts.${WHERE[c.model.position] ?? ""}`,
      figure: () => {
        const most = largest(table.data);
        const high = table.shape[0];
        const lines = Array.from({ length: high }, (_, i) => {
          const id = card.first + i;
          const on = id === card.id;
          return h("tr", { class: on ? "own" : "" }, h("th", { scope: "row" }, h("span", { class: "hot", data: { value: on ? 1 : 0, what: `onehot[${id}]` } }, on ? "1" : "0"), h("span", { class: "quiet" }, `row ${id}`)),
            h("td", {}, small(table.data.subarray(i * table.shape[1], (i + 1) * table.shape[1]), most, `E[${id}]`)));
        });
        return [h("table", { class: "keyed", "aria-label": "rows of E around the token" }, h("tbody", {}, lines)), rows([{ name: "x", sign: "=", value: card.y }], c.say)];
      },
    };
  },

  scale: (card, c) => ({
    name: "Lengthen the vector",
    formula: `x' = √d · x = ${short(card.by)} · x`,
    legend: [["d", `d_model = ${c.model.d_model}`]],
    why: "Rows of the table are short; times the root of their width they are as long as the positions that are added next.",
    figure: () => rows([{ name: "x", value: card.x }, { sign: "→", name: "x'", value: card.y }], c.say),
  }),

  segment: (card, c) => ({
    name: "Add the segment",
    formula: `x' [${c.model.d_model}] = x + s_0`,
    legend: [["s_0", "a learned vector for the first segment of the text"]],
    why: "Where a text has two parts, this tells them apart; here all of it is the first.",
    figure: () => rows([{ name: "x", value: card.x }, { sign: "+", name: "s_0", value: card.added }, { sign: "=", name: "x'", value: card.y }], c.say, { alike: true }),
  }),

  position(card, c) {
    const learned = card.how === "learned";
    const d = c.model.d_model;
    const half = (i) => (card.layout === "pairs" ? [Math.floor(i / 2), i % 2] : [i % (d / 2), Math.floor(i / (d / 2))]);
    const waves = Array.from({ length: FIRST }, (_, i) => {
      const [pair, cosine] = half(i);
      return `${cosine ? "cos" : "sin"} ${short(c.found.position / 10000 ** ((2 * pair) / d))}`;
    });
    const places = card.layout === "pairs" ? ["2i", "2i+1"] : ["i", "i+d/2"];
    return {
      name: "Add where the token stands",
      formula: learned ? `x' [${d}] = x + P_{${card.row}}` : `x' = x + p,  p_{${places[0]}} = sin(${c.found.position} / 10000^{2i/${d}}),  p_{${places[1]}} = cos(…)`,
      legend: learned ? [["P", `a learned table of positions; row ${card.row} is this one’s`]] : [["p", "sines and cosines of the position, fast ones first"]],
      why: learned ? "Attention alone does not know the order of tokens; a learned vector for each position tells it." : "Attention alone does not know the order of tokens; waves of many lengths give each position a pattern of its own.",
      figure: () => rows([{ name: "x", value: card.x }, { sign: "+", name: learned ? `P_{${card.row}}` : "p", value: card.added, captions: learned ? null : waves }, { sign: "=", name: "x'", value: card.y }], c.say, { alike: true }),
    };
  },
};

const WHERE = {
  rotary: " Where the token stands comes in later, when queries and keys are turned.",
  alibi: " Where the token stands comes in later, at the scores.",
  relative: " Where the token stands comes in later, at the scores.",
};
