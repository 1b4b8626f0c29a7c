// A step: where in the model it belongs, and what steps of many kinds share.

import { count } from "glasshouse/number.js";
import { product } from "glasshouse/views/walkthrough/figures.js";

const PARTS = { attention: "attention", cross: "cross-attention", feedforward: "feed-forward", embed: "embedding", head: "reading" };

/** The part of the model that a step belongs to. */
export function partOf(card) {
  return card.node.split(".")[0];
}

export function partName(card) {
  return PARTS[partOf(card)] ?? "";
}

/** What tells a step from all others of the same token. */
export function keyOf(card) {
  return [card.node, card.kind, card.what].filter(Boolean).join(":");
}

/** What a sublayer reads: the stream, or the norm of it. */
export const given = (c) => (c.model.norm_placement === "post" ? "x" : "h");

/** The letter of what is added to the stream. */
export const addend = (card) => ({ attention: "a", cross: "c", feedforward: "f" })[partOf(card)];

const READ = { x: "the stream", h: "the stream, normalised", e: "what the encoder made of a source token", Z: "the heads, joined", m: "the neurons", y: "the last vector" };

/** A linear map: one figure for all of them. */
export function linear(card, c, { name, letters, why }) {
  const { y, W, x, b } = letters;
  const [high, wide] = card.shape;
  return {
    name,
    formula: `${y} [${count(high)}] = ${W} [${count(high)}×${count(wide)}] ${x} [${count(wide)}]${card.bias ? ` + ${b}` : ""}`,
    legend: [[x, READ[x[0]]], [W, high === c.model.d_head && card.kv !== undefined ? "learned; the rows of this head" : "learned"], ...(card.bias ? [[b, "learned"]] : [])],
    why,
    figure: () => product(letters, card, c.say),
  };
}
