// The selection: weights of one head, the mean of a layer or of all layers, and a token on each side.

import { clamp } from "glasshouse/number.js";

/**
 * @param {ViewContext} context
 * @returns {{ of: "head" | "layer" | "all", writing: boolean, layer: number, head: number, target: number, source: number }}
 */
export function selection(context) {
  const { seq2seq_scope: scope, seq2seq_moment: moment } = context.state;
  return {
    writing: moment !== "reading",
    of: scope === "head" || scope === "layer" ? scope : "all",
    layer: clamp(context.state.layer, context.model.n_layers - 1),
    head: clamp(context.state.head, context.model.n_heads - 1),
    target: context.token,
    source: Math.min(context.state.key, context.tokens.source.length - 1),
  };
}

/**
 * The token that stands for a target position: the one that was written there, or the one that was read.
 *
 * At a position the model reads a token and writes the next one; its attention there serves the one it writes.
 * @param {ViewContext} context
 * @param {number} at
 * @returns {Token}
 */
export function shownToken(context, at) {
  const { target } = context.tokens;
  return selection(context).writing ? (target[at + 1] ?? { id: -1, text: "(next)" }) : target[at];
}

/**
 * What happens at a target position, in words: “at '-', writing '23'”.
 * @param {ViewContext} context
 * @param {number} at
 * @returns {string}
 */
export function moment(context, at) {
  const { target } = context.tokens;
  const written = at + 1 < target.length ? `“${target[at + 1].text}”` : "the next token";
  return `at “${target[at].text}”, writing ${written}`;
}
