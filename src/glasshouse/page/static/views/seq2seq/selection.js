// The selection: weights of one head, the mean of a layer or of all layers, and a token on each side.

export function selection(context) {
  const of = ["head", "layer"].includes(context.state.seq2seq_scope) ? context.state.seq2seq_scope : "all";
  const within = (value, size) => Math.max(0, Math.min(size - 1, value));
  return {
    of,
    layer: within(context.state.layer, context.model.n_layers),
    head: within(context.state.head, context.model.n_heads),
    target: context.token,
    source: Math.min(context.state.key, context.tokens.source.length - 1),
  };
}
