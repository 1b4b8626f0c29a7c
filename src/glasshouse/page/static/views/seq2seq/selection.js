// The selection: weights of one head, the mean of a layer or of all layers, and a token on each side.

/**
 * @param {ViewContext} context
 * @returns {{ of: "head" | "layer" | "all", layer: number, head: number, target: number, source: number }}
 */
export function selection(context) {
  const { seq2seq_scope: scope } = context.state;
  /** @type {(value: number, size: number) => number} */
  const within = (value, size) => Math.max(0, Math.min(size - 1, value));
  return {
    of: scope === "head" || scope === "layer" ? scope : "all",
    layer: within(context.state.layer, context.model.n_layers),
    head: within(context.state.head, context.model.n_heads),
    target: context.token,
    source: Math.min(context.state.key, context.tokens.source.length - 1),
  };
}
