// The selection: weights of one head, the mean of a layer or of all layers, and a token on each side.

import { clamp } from "glasshouse/number.js";

/**
 * @param {ViewContext} context
 * @returns {{ of: "head" | "layer" | "all", layer: number, head: number, target: number, source: number }}
 */
export function selection(context) {
  const { seq2seq_scope: scope } = context.state;
  return {
    of: scope === "head" || scope === "layer" ? scope : "all",
    layer: clamp(context.state.layer, context.model.n_layers - 1),
    head: clamp(context.state.head, context.model.n_heads - 1),
    target: context.token,
    source: Math.min(context.state.key, context.tokens.source.length - 1),
  };
}
