// The attention selection and the colour scales of weights.

import { decodeTensor } from "glasshouse/tensor.js";
import { clamp } from "glasshouse/number.js";

const LONG = 512; // tokens from which the logarithmic scale is the default
/** @type {Record<string, { title: string, ticks: number[], normalize: (weight: number) => number }>} */
export const SCALES = {
  linear: { title: "linear", ticks: [0, 0.25, 0.5, 0.75, 1], normalize: (weight) => weight },
  root: { title: "square root", ticks: [0, 0.05, 0.25, 0.5, 1], normalize: Math.sqrt },
  log: {
    title: "logarithm",
    ticks: [0.0001, 0.01, 0.1, 1],
    normalize: (weight) => Math.max(0, 1 + Math.log10(weight) / 4),
  },
};
/** @type {Record<HeadScore, string>} */
export const SCORES = {
  current_token: "weight on the token itself",
  previous: "weight on the previous token",
  first: "weight on the first token",
  duplicate: "weight on earlier occurrences of the same token",
  induction: "weight on tokens that followed them",
  broad: "normalized entropy near 1 (uniform attention)",
};

/**
 * The short name of a head type.
 * @type {(name: string) => string}
 */
export const typeName = (name) => name.replace("_token", "");

/** The selected attention, layer, head, query and key. */
export class Selection {
  /** @param {ViewContext} context */
  constructor(context) {
    this.context = context;
  }

  /** @returns {Attention} */
  get kind() {
    const { attentions } = this.context.model;
    return attentions.find((one) => one.site === this.context.state.attention) ?? attentions[0];
  }

  /** @returns {number} */
  get layer() {
    return clamp(this.context.state.layer, this.kind.layers - 1);
  }

  /** @returns {number} */
  get head() {
    return clamp(this.context.state.head, this.context.model.n_heads - 1);
  }

  /** @returns {Token[]} */
  get queries() {
    return this.context.tokens[this.kind.queries];
  }

  /** @returns {Token[]} */
  get keys() {
    return this.context.tokens[this.kind.keys];
  }

  // In an encoder-decoder, `token` is a target position and `key` a source position. Self-attention of the encoder
  // keeps its query apart, and self-attention of the decoder its key.

  /** @returns {number} */
  get query() {
    const { state } = this.context;
    return this.kind.queries === "source" ? within(state.attention_query ?? -1, this.queries) : this.context.token;
  }

  /** @returns {number} */
  get key() {
    const { state } = this.context;
    return within(this.kind.keys === "target" ? (state.attention_key ?? 0) : state.key, this.keys);
  }

  /** @param {{ query?: number, key?: number }} place */
  choose({ query, key }) {
    /** @type {Partial<PageState>} */
    const changes = {};
    if (query !== undefined) changes[this.kind.queries === "source" ? "attention_query" : "token"] = query;
    if (key !== undefined) changes[this.kind.keys === "target" ? "attention_key" : "key"] = key;
    this.context.set(changes);
  }

  /**
   * The colour scale: linear by default, logarithmic for long texts, where all weights are small.
   * @returns {string}
   */
  get scale() {
    const { attention_scale } = this.context.state;
    return attention_scale && attention_scale in SCALES
      ? attention_scale
      : this.keys.length > LONG
        ? "log"
        : "linear";
  }

  /** @returns {(weight: number) => number} */
  get normalize() {
    return SCALES[this.scale].normalize;
  }

  /**
   * The selected map, without query and key.
   * @returns {RequestBody}
   */
  get place() {
    return {
      forward_pass: this.context.forwardPass(),
      attention: this.kind.site,
      layer: this.layer,
      head: this.head,
    };
  }

  /** @returns {Promise<QueryKeyPair>} */
  requestQueryKey() {
    return this.context.request("query_key", { ...this.place, query: this.query, key: this.key });
  }

  /**
   * @param {number} level
   * @param {number} row
   * @param {number} column
   * @returns {Promise<Tensor>}
   */
  async requestTile(level, row, column) {
    return decodeTensor((await this.context.request("tile", { ...this.place, level, row, column })).cells);
  }
}

/**
 * @param {number} place
 * @param {Token[]} tokens
 * @returns {number}
 */
function within(place, tokens) {
  return place < 0 || place >= tokens.length ? tokens.length - 1 : place;
}
