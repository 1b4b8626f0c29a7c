// Steps of the stream itself: norms, sums, and the layers that are passed.

import { addend, partName } from "glasshouse/views/walkthrough/card.js";
import { facts, rows } from "glasshouse/views/walkthrough/figures.js";

export const stream = {
  norm(card, c) {
    const [names, into, out] = normWords(card, c);
    const layer = card.how === "layer";
    const measured = layer ? [["μ", card.mean], ["σ^2", card.variance], ["ε", card.eps]] : [[`mean(${into}^2)`, card.square], ["ε", card.eps]];
    const shift = card.bias ? " + b" : "";
    return {
      name: names,
      formula: layer ? `${out} = (${into} - μ) / √(σ^2 + ε) ⊙ g${shift}` : `${out} = ${into} / √(mean(${into}^2) + ε) ⊙ g`,
      legend: [...(layer ? [["μ", "the mean of the coordinates"], ["σ^2", "their variance"]] : []), ["ε", "keeps the root above 0"], ["g", "learned, one for each coordinate"], ...(card.bias ? [["b", "learned"]] : []), ["⊙", "coordinate by coordinate"]],
      why: layer ? "Whatever the vector’s size, what follows gets coordinates with mean 0 and variance 1, then scaled as was learned." : "Whatever the vector’s length, what follows gets coordinates of a like size, then scaled as was learned.",
      figure: () => [facts(measured), rows([{ name: into, value: card.x }, { sign: "⊙", name: "g", value: card.gain }, ...(card.bias ? [{ sign: "+", name: "b", value: card.bias }] : []), { sign: "→", name: out, value: card.y }], c.say)],
    };
  },

  arrive: (card, c) => ({
    name: `Through ${range(0, c.found.layer - 1)}`,
    formula: `x [${c.model.d_model}] → ${c.found.layer === 1 ? "layer 0" : `layer 0 → … → layer ${c.found.layer - 1}`} → x`,
    legend: [["x", "the stream, one vector for each token"]],
    why: `Every layer adds to the same vector. This is what it has become when it reaches layer ${c.found.layer}; choose another layer above to step through that one.`,
    figure: () => rows([{ name: "x", value: card.y }], c.say),
  }),

  add: (card, c) => ({
    name: "Add it to the stream",
    formula: `x' [${c.model.d_model}] = x + ${addend(card)}`,
    legend: [["x", "the stream as it was"], [addend(card), `what ${partName(card)} adds`]],
    why: "Nothing is overwritten: each part adds its bit to the vector and leaves the rest as it was, which keeps deep models trainable.",
    figure: () => rows([{ name: "x", value: card.x }, { sign: "+", name: addend(card), value: card.added }, { sign: "=", name: "x'", value: card.y }], c.say, { alike: true }),
  }),

  leave: (card, c) => ({
    name: `Through ${range(c.found.layer + 1, c.found.n_layers - 1)}`,
    formula: `x [${c.model.d_model}] → ${c.found.layer + 2 === c.found.n_layers ? `layer ${c.found.layer + 1}` : `layer ${c.found.layer + 1} → … → layer ${c.found.n_layers - 1}`} → x`,
    legend: [["x", "the stream, one vector for each token"]],
    why: "The layers that follow do the same with weights of their own. This is the vector after the last of them.",
    figure: () => rows([{ name: "x", value: card.y }], c.say),
  }),

  memory: (card, c) => ({
    name: "Hand it to the decoder",
    formula: `e_{${c.found.position}} [${c.model.d_model}]`,
    legend: [["e", "what the encoder has made of the source, a vector for each token"]],
    why: "Every layer of the decoder makes keys and values of these vectors: it looks at the source through them.",
    figure: () => rows([{ name: `e_{${c.found.position}}`, value: card.y }], c.say),
  }),
};

const range = (from, to) => (from === to ? `layer ${from}` : `layers ${from} to ${to}`);

function normWords(card, c) {
  const out = { "attention.norm": "attention", "cross.norm": "cross-attention", "feedforward.norm": "the feed-forward layer" }[card.node];
  if (card.what === "q") return ["Normalise the query", "q", "q'"];
  if (card.what === "k") return ["Normalise the key", "k", "k'"];
  if (card.node === "embed") return ["Normalise the embedding", "x", "x'"];
  if (card.node === "final") return ["Normalise a last time", "x", c.side === "source" ? "e" : "y"];
  if (card.node === "head") return ["Normalise once more", "t'", "y"];
  if (card.node.endsWith("norm_out")) return [`Normalise what ${partName(card)} gives`, addend(card), `${addend(card)}'`];
  return c.model.norm_placement === "post" ? ["Normalise the sum", "x'", "x"] : [`Normalise before ${out}`, "x", "h"];
}
