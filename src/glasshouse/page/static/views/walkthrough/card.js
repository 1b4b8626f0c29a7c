// Helpers shared by the cards.

import { count } from "glasshouse/number.js";
import { product } from "glasshouse/views/walkthrough/figures.js";

/** @type {Record<string, string>} */
const PARTS = {
  attention: "attention",
  cross: "cross-attention",
  feedforward: "feed-forward",
  embed: "embedding",
  head: "unembedding",
};

/**
 * The part of the model that a step belongs to.
 * @param {CardBase} card
 * @returns {string}
 */
export function partOf(card) {
  return card.node.split(".")[0];
}

/**
 * @param {CardBase} card
 * @returns {string}
 */
export function partName(card) {
  return PARTS[partOf(card)] ?? "";
}

/**
 * The unique key of a card.
 * @param {StepCard} card
 * @returns {string}
 */
export function keyOf(card) {
  return [card.node, card.kind, card.what].filter(Boolean).join(":");
}

/**
 * The symbol of a sublayer's input: the residual stream, or its norm.
 * @type {(c: CardContext) => string}
 */
export const given = (c) => (["post", "output"].includes(c.model.norm_placement) ? "x" : "h");

/** @type {Record<string, string>} */
const ADDENDS = { attention: "a", cross: "c", feedforward: "f" };

/**
 * The symbol of a sublayer's output.
 * @type {(card: CardBase) => string}
 */
export const addend = (card) => ADDENDS[partOf(card)] ?? "";

/** @type {Record<string, string>} */
const READ = {
  x: "the residual stream",
  h: "the normalized residual stream",
  e: "the encoder output of a source token",
  Z: "the concatenated heads",
  m: "the neuron activations",
  y: "the final vector",
};

/**
 * A linear map: one figure for all of them.
 * @param {CardBase & LinearCard} card
 * @param {CardContext} c
 * @param {{ name: string, letters: LinearLetters, why: string }} words
 * @returns {DescribedCard}
 */
export function linear(card, c, { name, letters, why }) {
  const { y, W, x, b } = letters;
  const [high, wide] = card.shape;
  return {
    name,
    formula: `${y} [${count(high)}] = ${W} [${count(high)}×${count(wide)}] ${x} [${count(wide)}]${card.bias ? ` + ${b}` : ""}`,
    legend: [
      [x, READ[x[0]]],
      [W, high === c.model.d_head && card.kv !== undefined ? "learned; the rows of this head" : "learned"],
      ...(card.bias ? [[b, "learned"]] : []),
    ],
    why,
    figure: () => product(letters, card, c.say),
  };
}
