// Residual stream steps: norms, residual connections and the other layers.

import { addend, partName } from "glasshouse/views/walkthrough/card.js";
import { facts, rows } from "glasshouse/views/walkthrough/figures.js";

/** @type {Describe<"norm" | "arrive" | "add" | "leave" | "memory">} */
export const stream = {
  norm(card, c) {
    const [names, into, out] = normWords(card, c);
    const layer = card.how === "layer";
    /** @type {[string, number][]} */
    const measured = layer
      ? [
          ["μ", card.mean],
          ["σ^2", card.variance],
          ["ε", card.eps],
        ]
      : [
          [`mean(${into}^2)`, card.square],
          ["ε", card.eps],
        ];
    const shift = card.bias ? " + b" : "";
    return {
      name: names,
      formula: layer
        ? `${out} = (${into} - μ) / √(σ^2 + ε) ⊙ g${shift}`
        : `${out} = ${into} / √(mean(${into}^2) + ε) ⊙ g`,
      legend: [
        ...(layer
          ? [
              ["μ", "the mean of the coordinates"],
              ["σ^2", "their variance"],
            ]
          : []),
        ["ε", "numerical stability"],
        ["g", "learned, one for each coordinate"],
        ...(card.bias ? [["b", "learned"]] : []),
        ["⊙", "coordinate by coordinate"],
      ],
      why: `${
        layer
          ? "LayerNorm: mean 0 and variance 1, then a learned gain."
          : "RMSNorm: root mean square 1, then a learned gain."
      }${
        card.heads ? ` Measured over all ${card.heads} heads together.` : ""
      }${c.model.norm_placement === "parallel" && card.node === "feedforward.norm" ? " It reads the input of the block, as attention does." : ""}`,
      figure: () => [
        facts(measured),
        rows(
          [
            { name: into, value: card.x },
            { sign: "⊙", name: "g", value: card.gain },
            ...(card.bias ? [{ sign: "+", name: "b", value: card.bias }] : []),
            { sign: "→", name: out, value: card.y },
          ],
          c.say,
        ),
      ],
    };
  },

  arrive: (card, c) => ({
    name: `Through ${range(0, c.found.layer - 1)}`,
    formula: `x [${c.model.d_model}] → ${c.found.layer === 1 ? "layer 0" : `layer 0 → … → layer ${c.found.layer - 1}`} → x`,
    legend: [["x", "the residual stream, one vector per token"]],
    why: `The residual stream at the input of layer ${c.found.layer}; select another layer above to step through it.`,
    figure: () => rows([{ name: "x", value: card.y }], c.say),
  }),

  add: (card, c) => ({
    name: "Residual connection",
    formula: `x' [${c.model.d_model}] = x + ${addend(card)}`,
    legend: [
      ["x", "the residual stream before"],
      [addend(card), `the output of ${partName(card)}`],
    ],
    why: "The sublayer output is added to the residual stream, which keeps deep models trainable.",
    figure: () =>
      rows(
        [
          { name: "x", value: card.x },
          { sign: "+", name: addend(card), value: card.added },
          { sign: "=", name: "x'", value: card.y },
        ],
        c.say,
        { alike: true },
      ),
  }),

  leave: (card, c) => ({
    name: `Through ${range(c.found.layer + 1, c.found.n_layers - 1)}`,
    formula: `x [${c.model.d_model}] → ${c.found.layer + 2 === c.found.n_layers ? `layer ${c.found.layer + 1}` : `layer ${c.found.layer + 1} → … → layer ${c.found.n_layers - 1}`} → x`,
    legend: [["x", "the residual stream, one vector per token"]],
    why: "The residual stream after the last layer.",
    figure: () => rows([{ name: "x", value: card.y }], c.say),
  }),

  memory: (card, c) => ({
    name: "Encoder output",
    formula: `e_{${c.found.position}} [${c.model.d_model}]`,
    legend: [["e", "the encoder output, one vector per source token"]],
    why: "Cross-attention of every decoder layer computes its keys and values from these vectors.",
    figure: () => rows([{ name: `e_{${c.found.position}}`, value: card.y }], c.say),
  }),
};

/** @type {(from: number, to: number) => string} */
const range = (from, to) => (from === to ? `layer ${from}` : `layers ${from} to ${to}`);

/**
 * @param {CardBase} card
 * @param {CardContext} c
 * @returns {[string, string, string]}
 */
function normWords(card, c) {
  const out = {
    "attention.norm": "attention",
    "cross.norm": "cross-attention",
    "feedforward.norm": "the feed-forward layer",
  }[card.node];
  if (card.what === "q") return ["Query norm", "q", "q'"];
  if (card.what === "k") return ["Key norm", "k", "k'"];
  if (card.node === "embed") return ["Embedding norm", "x", "x'"];
  if (card.node === "final") return ["Final norm", "x", c.side === "source" ? "e" : "y"];
  if (card.node === "head") return ["Head norm", "t'", "y"];
  if (card.node.endsWith("norm_out")) return [`Norm after ${partName(card)}`, addend(card), `${addend(card)}'`];
  return c.model.norm_placement === "post" ? ["Post-norm", "x'", "x"] : [`Norm before ${out}`, "x", "h"];
}
