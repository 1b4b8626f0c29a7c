// What is selected, in the words of attention, and how weights become colours.

import { decodeTensor } from "glasshouse/tensor.js";

const LONG = 512; // tokens of a text in which hardly a weight is large
export const SCALES = {
  linear: { title: "linear", ticks: [0, 0.25, 0.5, 0.75, 1], normalize: (weight) => weight },
  root: { title: "square root", ticks: [0, 0.05, 0.25, 0.5, 1], normalize: Math.sqrt },
  log: { title: "logarithm", ticks: [0.0001, 0.01, 0.1, 1], normalize: (weight) => Math.max(0, 1 + Math.log10(weight) / 4) },
};
export const SCORES = {
  self: "the token itself",
  previous: "the token just before",
  first: "the first token",
  duplicate: "other places of the same token",
  induction: "what followed other places of the same token",
  broad: "spread over most of what it may see: 1 is the same weight on all",
};

/** Which kind of attention, layer, head, query and key. */
export class Selection {
  constructor(context) {
    this.context = context;
  }

  get kind() {
    const { attentions } = this.context.model;
    return attentions.find((one) => one.site === this.context.state.attention) ?? attentions[0];
  }

  get layer() {
    return Math.max(0, Math.min(this.context.state.layer, this.kind.layers - 1));
  }

  get head() {
    return Math.max(0, Math.min(this.context.state.head, this.context.model.n_heads - 1));
  }

  get queries() {
    return this.context.tokens[this.kind.queries];
  }

  get keys() {
    return this.context.tokens[this.kind.keys];
  }

  // On the page, the token of an encoder-decoder is one of the target and the key one of the source. Where a source
  // looks at itself, or a target, the other one is kept apart.

  get query() {
    const { state } = this.context;
    return this.kind.queries === "source" ? within(state.attention_query ?? -1, this.queries) : this.context.token;
  }

  get key() {
    const { state } = this.context;
    return within(this.kind.keys === "target" ? (state.attention_key ?? 0) : state.key, this.keys);
  }

  choose({ query, key }) {
    const changes = {};
    if (query !== undefined) changes[this.kind.queries === "source" ? "attention_query" : "token"] = query;
    if (key !== undefined) changes[this.kind.keys === "target" ? "attention_key" : "key"] = key;
    this.context.set(changes);
  }

  /** How colours stand for weights: by themselves linear, or in a long text, where all weights are small, logarithmic. */
  get scale() {
    const { attention_scale } = this.context.state;
    return attention_scale in SCALES ? attention_scale : this.keys.length > LONG ? "log" : "linear";
  }

  get normalize() {
    return SCALES[this.scale].normalize;
  }

  /** Which map this is, whatever is selected in it. */
  get place() {
    return { forward_pass: this.context.forwardPass(), attention: this.kind.site, layer: this.layer, head: this.head };
  }

  requestQueryKey() {
    return this.context.request("query_key", { ...this.place, query: this.query, key: this.key });
  }

  async requestTile(level, row, column) {
    return decodeTensor((await this.context.request("tile", { ...this.place, level, row, column })).cells);
  }
}

function within(place, tokens) {
  return place < 0 || place >= tokens.length ? tokens.length - 1 : place;
}
