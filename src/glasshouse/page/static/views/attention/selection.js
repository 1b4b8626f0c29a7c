// What is selected, in the words of attention, and how weights become colours.

import { unpack } from "glasshouse/tensor.js";

const LONG = 512; // tokens of a text in which hardly a weight is large
export const SCALES = {
  linear: { title: "linear", ticks: [0, 0.25, 0.5, 0.75, 1], shareOf: (weight) => weight },
  root: { title: "square root", ticks: [0, 0.05, 0.25, 0.5, 1], shareOf: Math.sqrt },
  log: { title: "logarithm", ticks: [0.0001, 0.01, 0.1, 1], shareOf: (weight) => Math.max(0, 1 + Math.log10(weight) / 4) },
};
export const KINDS = {
  self: "the token itself",
  previous: "the token just before",
  first: "the first token",
  duplicate: "other places of the same token",
  induction: "what followed other places of the same token",
  broad: "spread over most of what it may see: 1 is the same weight on all",
};

/** Which kind of attention, layer, head, query and key. */
export class Selection {
  constructor(glass) {
    this.glass = glass;
  }

  get kind() {
    const { attentions } = this.glass.model;
    return attentions.find((one) => one.site === this.glass.state.attention) ?? attentions[0];
  }

  get layer() {
    return Math.max(0, Math.min(this.glass.state.layer, this.kind.layers - 1));
  }

  get head() {
    return Math.max(0, Math.min(this.glass.state.head, this.glass.model.n_heads - 1));
  }

  get queries() {
    return this.glass.tokens[this.kind.queries];
  }

  get keys() {
    return this.glass.tokens[this.kind.keys];
  }

  // On the page, the token of an encoder-decoder is one of the target and the key one of the source. Where a source
  // looks at itself, or a target, the other one is kept apart.

  get query() {
    const { state } = this.glass;
    return this.kind.queries === "source" ? within(state.attentionQuery ?? -1, this.queries) : this.glass.token;
  }

  get key() {
    const { state } = this.glass;
    return within(this.kind.keys === "target" ? (state.attentionKey ?? 0) : state.key, this.keys);
  }

  choose({ query, key }) {
    const changes = {};
    if (query !== undefined) changes[this.kind.queries === "source" ? "attentionQuery" : "token"] = query;
    if (key !== undefined) changes[this.kind.keys === "target" ? "attentionKey" : "key"] = key;
    this.glass.set(changes);
  }

  /** How colours stand for weights: by themselves linear, or in a long text, where all weights are small, logarithmic. */
  get scale() {
    const { attentionScale } = this.glass.state;
    return attentionScale in SCALES ? attentionScale : this.keys.length > LONG ? "log" : "linear";
  }

  get shareOf() {
    return SCALES[this.scale].shareOf;
  }

  /** Which map this is, whatever is selected in it. */
  get place() {
    return { question: this.glass.question(), attention: this.kind.site, layer: this.layer, head: this.head };
  }

  askPair() {
    return this.glass.ask("pair", { ...this.place, query: this.query, key: this.key });
  }

  async askTile(level, row, column) {
    return unpack((await this.glass.ask("tile", { ...this.place, level, row, column })).cells);
  }
}

function within(place, tokens) {
  return place < 0 || place >= tokens.length ? tokens.length - 1 : place;
}
