// What is chosen: whose weights they are, one head's, the mean of a layer, or of all; and a token on each side.

export function chosen(glass) {
  const of = ["head", "layer"].includes(glass.state.alignment_of) ? glass.state.alignment_of : "all";
  const within = (value, size) => Math.max(0, Math.min(size - 1, value));
  return {
    of,
    layer: within(glass.state.layer, glass.model.n_layers),
    head: within(glass.state.head, glass.model.n_heads),
    target: glass.token,
    source: Math.min(glass.state.key, glass.tokens.source.length - 1),
  };
}
