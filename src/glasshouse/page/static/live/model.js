// The model of the file: its graphs and its tokenizer, and the forward passes that the page asks about.

import { zeros } from "glasshouse/live/array.js";
import { Interpreter, readWeights } from "glasshouse/live/interpreter.js";
import { applyEdit, select } from "glasshouse/live/sites.js";
import { Tokenizer } from "glasshouse/live/tokenizer.js";

const MEMORY = 2 ** 28; // bytes of the activations that are kept

/**
 * @param {number[]} ids
 * @returns {NdArray}
 */
export function idArray(ids) {
  return { shape: [1, ids.length], dtype: "int64", data: /** @type {any} */ (Int32Array.from(ids)) };
}

export class LiveModel {
  /**
   * @param {LiveFile} file
   * @param {ArrayBuffer} buffer the weights in float16
   */
  constructor({ program, about, tokenizer }, buffer) {
    this.about = about;
    this.axes = program.axes;
    this.weights = readWeights(program.weights, buffer);
    this.tokenizer = new Tokenizer(tokenizer);
    /** @type {Record<string, Interpreter>} */
    this.graphs = {};
    for (const [name, graph] of Object.entries(program.graphs))
      this.graphs[name] = new Interpreter(graph, this.weights);
    /** @type {Map<string, Trace>} */
    this.traces = new Map();
  }

  get isSeq2Seq() {
    return this.about.kind === "seq2seq";
  }

  /**
   * The ids of a prompt: of the text; of an encoder-decoder, of the source and the target.
   * @param {PagePrompt} prompt
   * @returns {{ source: number[], ids: number[] }}
   */
  inputs({ text, target = "", appended = [], masked = [] }) {
    const { about, tokenizer } = this;
    const orStart = (/** @type {number[]} */ ids) => (ids.length || about.start_id === null ? ids : [about.start_id]);
    /** @type {number[]} */
    let source = [];
    let ids;
    if (this.isSeq2Seq) {
      source = tokenizer.encode(text);
      if (about.end_ids.length && !about.end_ids.includes(source[source.length - 1])) source.push(about.end_ids[0]);
      ids = [...about.opening, ...tokenizer.encode(target, { addSpecialTokens: false }), ...appended];
    } else if (about.kind === "decoder")
      ids = orStart([...(text || !appended.length ? tokenizer.encode(text) : []), ...appended]);
    else {
      ids = [...tokenizer.encode(text), ...appended];
      for (const at of masked) if (at < ids.length && about.mask_id !== null) ids[at] = about.mask_id;
    }
    for (const row of this.isSeq2Seq ? [source, ids] : [ids]) {
      if (!row.length) throw new Error("the text has no tokens; enter some text.");
      if (row.length > about.limit)
        throw new Error(
          `the text has ${row.length.toLocaleString("en")} tokens, but the limit is ` +
            `${about.limit.toLocaleString("en")}; shorten it.`,
        );
    }
    return { source, ids };
  }

  /**
   * The forward pass that a request is about, computed once.
   * @param {ForwardPass} forwardPass
   * @returns {Trace}
   */
  trace(forwardPass) {
    const key = JSON.stringify([forwardPass.prompt, forwardPass.edits ?? [], forwardPass.patch_from ?? null]);
    const trace = this.traces.get(key) ?? new Trace(this, forwardPass);
    this.traces.delete(key);
    this.traces.set(key, trace); // the most recently used last
    let bytes = 0;
    for (const [name, one] of [...this.traces].reverse()) {
      bytes += one.bytes;
      if (bytes > MEMORY && one !== trace) this.traces.delete(name);
    }
    return trace;
  }

  /**
   * Run the stack that feeds the head on further ids, after those in a cache.
   * @param {number[]} ids
   * @param {Pick<Decoded, "keys" | "values" | "memory">} before
   * @param {(name: string, value: NdArray) => NdArray} [atSite]
   * @returns {Decoded}
   */
  decode(ids, { keys, values, memory }, atSite) {
    const made = this.graphs.final.run({ ids: idArray(ids), keys, values, memory }, atSite);
    return { logits: made.logits, keys: made.keys, values: made.values, memory };
  }

  /** An empty KV cache. @param {NdArray} [memory] */
  emptyCache(memory) {
    const { n_layers: layers, n_kv_heads: heads, d_head: width } = this.about;
    const empty = () => Array.from({ length: layers }, () => zeros([1, heads, 0, width]));
    return { keys: empty(), values: empty(), memory };
  }

  /**
   * Logits [N, V] of the head for some final hidden states [N, D], or of the logit lens for others.
   * @param {NdArray} vectors
   * @param {"unembed" | "lens"} [graph]
   * @returns {NdArray}
   */
  logits(vectors, graph = "unembed") {
    const { logits } = this.graphs[graph].run({ x: { ...vectors, shape: [1, ...vectors.shape] } });
    return { ...logits, shape: logits.shape.slice(-2) };
  }

  /**
   * Outputs as the page shows them: tokens, or labels by name.
   * @param {Iterable<number>} ids
   * @returns {Token[]}
   */
  describe(ids) {
    const { labels } = this.about;
    if (!labels) return this.tokenizer.describe(ids);
    return [...ids].map((id) => ({ id, text: labels[id] ?? `label ${id}` }));
  }
}

/** One forward pass: all its activations by the names of their sites. */
export class Trace {
  /**
   * @param {LiveModel} model
   * @param {ForwardPass} forwardPass
   */
  constructor(model, forwardPass) {
    this.model = model;
    this.forwardPass = forwardPass;
    const { source, ids } = model.inputs(forwardPass.prompt);
    this.source = source;
    this.ids = ids;
    /** @type {Map<string, NdArray>} */
    this.sites = new Map();
    this.bytes = 0;
    const atSite = this.editing((name, value) => {
      this.sites.set(name, value);
      this.bytes += value.data.byteLength;
    });
    if (model.isSeq2Seq) this.memory = model.graphs.source.run({ ids: idArray(source) }, atSite).memory;
    this.state = model.decode(this.ids, model.emptyCache(this.memory), atSite);
  }

  /** The logits [S, V], or [V] of a head that pools. @returns {NdArray} */
  get logits() {
    const { logits } = this.state;
    return { ...logits, shape: logits.shape.slice(1) };
  }

  /**
   * The edits of the forward pass, and others, with the sites that they select.
   * @param {Edit[]} [further]
   */
  selectedEdits(further = []) {
    const edits = [...(this.forwardPass.edits ?? []), ...further].flatMap((edit) =>
      select(edit.site, this.model.axes).map((selection) => ({ edit, selection })),
    );
    const inside = edits.find(({ selection }) => /(scores|pattern)\.\d+$/.test(selection.site));
    if (inside) throw new Error(`${inside.edit.site} cannot be edited on the page; edit z instead.`);
    return edits;
  }

  /**
   * What an interpreter calls at each site: the edits, and then a function that reads.
   * @param {(name: string, value: NdArray) => void} read
   * @param {{ further?: Edit[], source?: Trace, first?: number }} [options] `source` is the forward pass that patches
   *   come from, `first` the position of the first token
   * @returns {(name: string, value: NdArray) => NdArray}
   */
  editing(read, { further, source, first } = {}) {
    const { model, forwardPass } = this;
    const edits = this.selectedEdits(further);
    const other = forwardPass.patch_from;
    const isPatched = edits.some(({ edit }) => edit.kind === "patch");
    const there = source ?? (other && isPatched ? model.trace({ prompt: other }) : undefined);
    return (name, value) => {
      let now = value;
      for (const { edit, selection } of edits)
        if (selection.site === name) now = applyEdit(edit, selection, now, there?.sites.get(name), first);
      read(name, now);
      return now;
    };
  }

  /**
   * The activation at a site, without the batch axis.
   * @param {string} name
   * @returns {NdArray}
   */
  at(name) {
    const value = this.sites.get(name);
    if (!value) throw new Error(`the model has no site '${name}'.`);
    return { ...value, shape: value.shape.slice(1) };
  }

  /** The prefix of the sites of the stack that feeds the head. */
  get prefix() {
    return this.model.isSeq2Seq ? "decoder." : "";
  }

  /** The sites of its residual stream: the embedding, and after each layer. @returns {string[]} */
  get residualSites() {
    const layers = Array.from(
      { length: this.model.about.n_layers },
      (_, layer) => `${this.prefix}resid_post.${layer}`,
    );
    return [`${this.prefix}embed`, ...layers];
  }

  /**
   * The final hidden states under one more edit.
   * @param {Edit} edit
   * @param {Trace} [source] the forward pass that a patch comes from
   * @returns {NdArray}
   */
  finalUnder(edit, source = undefined) {
    const last = `${this.prefix}final`;
    let found = this.at(last);
    const atSite = this.editing(
      (name, value) => {
        if (name === last) found = { ...value, shape: value.shape.slice(1) };
      },
      { further: [edit], source },
    );
    const { model } = this;
    const memory = model.isSeq2Seq
      ? model.graphs.source.run({ ids: idArray(this.source) }, atSite).memory
      : undefined;
    model.graphs.final.run({ ids: idArray(this.ids), ...model.emptyCache(memory) }, atSite, last);
    return found;
  }
}
