// What flows where in one stack of blocks: the numbers of the overview, read by layer, head and position.

import { decodeTensor } from "glasshouse/tensor.js";

/** @type {Record<OverviewPart, string>} */
export const PARTS = { attention: "attention", cross: "cross-attention", feedforward: "feed-forward" };

/** One stack: an encoder, a decoder, or one of both. */
export class Flow {
  /**
   * @param {OverviewStack} found
   * @param {Model} model
   * @param {Tokens} tokens
   */
  constructor(found, model, tokens) {
    const isPair = model.kind === "seq2seq";
    this.name = found.name;
    this.prefix = isPair ? `${found.name}.` : "";
    /** @type {Side} */
    this.side = isPair ? (found.name === "encoder" ? "source" : "target") : "text";
    this.tokens = tokens[this.side];
    this.source = tokens.source;
    this.isLast = !isPair || found.name === "decoder";
    this.start = found.start;
    this.stop = found.stop;
    this.of = found.of;
    this.parts = /** @type {OverviewPart[]} */ (Object.keys(PARTS).filter((part) => part in found.added));
    this.stream = decodeTensor(found.stream);
    this.layers = this.stream.shape[0] - 1;
    this.added = Object.fromEntries(Object.entries(found.added).map(([part, one]) => [part, decodeTensor(one)]));
    this.heads = Object.fromEntries(
      Object.entries(found.heads).map(([part, { norm, source, weight }]) => [
        part,
        { norm: decodeTensor(norm), source: decodeTensor(source), weight: decodeTensor(weight) },
      ]),
    );
    this.nHeads = this.heads.attention.norm.shape[1];
  }

  /** How many positions are drawn. */
  get width() {
    return this.stop - this.start;
  }

  /**
   * The attention site of a part, without its layer.
   * @param {OverviewPart} part
   */
  site(part) {
    return `${this.prefix}${part === "cross" ? "cross_pattern" : "pattern"}`;
  }

  /**
   * The length of the stream at a position: 0 is the embedding, 1 after the first layer.
   * @param {number} row
   * @param {number} place
   */
  length(row, place) {
    return this.stream.data[row * this.width + place - this.start];
  }

  /**
   * What a part adds at a position, as a share of what it adds and what is there: |added| / (|added| + |stream|).
   * @param {OverviewPart} part
   * @param {number} layer
   * @param {number} place
   */
  share(part, layer, place) {
    const ratio = this.added[part].data[layer * this.width + place - this.start];
    return ratio === Infinity ? 1 : ratio / (1 + ratio);
  }

  /**
   * What each head of a layer moves to a position: from which key most of it comes, with which attention weight, and
   * the head's part of the share of its layer. The largest first.
   * @param {OverviewPart} part
   * @param {number} layer
   * @param {number} place
   * @returns {HeadFlow[]}
   */
  moved(part, layer, place) {
    const { norm, source, weight } = this.heads[part];
    /** @type {(tensor: Tensor, head: number) => number} */
    const at = (tensor, head) => tensor.data[(layer * this.nHeads + head) * this.width + place - this.start];
    const heads = Array.from({ length: this.nHeads }, (_, head) => head);
    const whole = heads.reduce((sum, head) => sum + at(norm, head), 0) || 1;
    const share = this.share(part, layer, place);
    return heads
      .map((head) => ({
        part,
        layer,
        head,
        key: at(source, head),
        weight: at(weight, head),
        share: (share * at(norm, head)) / whole,
      }))
      .sort((a, b) => b.share - a.share);
  }

  /**
   * The token that a part reads at a key.
   * @param {OverviewPart} part
   * @param {number} key
   * @returns {Token}
   */
  keyToken(part, key) {
    return (part === "cross" ? this.source : this.tokens)[key];
  }
}
