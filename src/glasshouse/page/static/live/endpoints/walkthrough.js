// Step through: the forward pass of one token, each step with its numbers, all of them activations of the graph.

import { argmax, largest, logSoftmax, requireWithin, rowOf, tensor } from "glasshouse/live/numbers.js";
import { logitsAt } from "glasshouse/live/endpoints/tokens.js";

const CORNER = 8; // rows and columns of a weight matrix
const SHOWN = 12; // keys whose vectors are part of a step
const STRONGEST = 12; // neurons named in a step
const TOP = 8; // tokens or labels
const TABLE_ROWS = 5;
const PARTS = {
  attention: { added: "attn_out", after: "resid_mid", prefix: "" },
  cross: { added: "cross_attn_out", after: "cross_resid_mid", prefix: "cross_" },
  feedforward: { added: "ffn_out", after: "resid_post", prefix: "" },
};

/**
 * @param {string} node
 * @param {string} kind
 * @param {string} [site]
 * @param {Record<string, unknown>} [held]
 * @returns {any}
 */
function card(node, kind, site = "", held = {}) {
  return { node, kind, site, ...held };
}

const vector = (/** @type {ArrayLike<number>} */ values) => tensor([values.length], values);

/** The stack, and the selected position, layer and head. */
class TokenPath {
  /**
   * @param {import("glasshouse/live/model.js").Trace} trace
   * @param {any} body
   */
  constructor(trace, { position = -1, layer = 0, head = 0, side = "" }) {
    const { model } = trace;
    const { about } = model;
    const isSource = side === "source";
    if (isSource && !model.isSeq2Seq)
      throw new Error("side is 'source', but only an encoder-decoder has a source; leave it out.");
    if (!about.walkthrough) throw new Error("a live page has no steps of this kind of model.");
    this.trace = trace;
    this.settings = about.walkthrough;
    this.weights = model.weights;
    this.prefix = isSource ? "encoder." : trace.prefix;
    this.isSource = isSource;
    this.path = this.prefix || "stack."; // of the stack's modules
    this.ids = isSource ? trace.source : trace.ids;
    this.depth = isSource ? about.n_encoder_layers : about.n_layers;
    this.causal = about.kind === "decoder" || (model.isSeq2Seq && !isSource);
    requireWithin("position", position, -this.ids.length, this.ids.length - 1);
    requireWithin("layer", layer, 0, this.depth - 1);
    requireWithin("head", head, 0, about.n_heads - 1);
    this.position = position < 0 ? position + this.ids.length : position;
    this.layer = layer;
    this.head = head;
    this.shared = Math.floor((head * about.n_kv_heads) / about.n_heads);
  }

  /** Whether the layer has a part. @param {string} part */
  has(part) {
    return this.trace.sites.has(`${this.prefix}${PARTS[/** @type {OverviewPart} */ (part)].added}.${this.layer}`);
  }

  /** The path of a module of the layer. @param {string} name */
  module(name) {
    return `${this.path}blocks.${this.layer}.${name}`;
  }

  /** The vector at the position of the output of a module or of a site. @param {string} name @param {number} [at] */
  row(name, at = this.position) {
    return rowOf(this.trace.at(name), at);
  }

  /** Of a site of the layer. @param {string} name */
  own(name) {
    return this.row(`${this.prefix}${name}.${this.layer}`);
  }

  /** Of a site with heads, [H, S, d]: that of one head and position. @param {NdArray} value @param {number} head @param {number} at */
  ofHead(value, head, at) {
    const [, length, width] = value.shape;
    return value.data.subarray((head * length + at) * width, (head * length + at + 1) * width);
  }

  /** The name of a site of the layer with an index. @param {string} name @param {Record<string, number>} [index] */
  site(name, index = { position: this.position }) {
    const said = Object.entries(index).map(([axis, number]) => `${axis}=${number}`);
    return `${this.prefix}${name}.${this.layer}[${said.join(", ")}]`;
  }

  /**
   * @param {string} node
   * @param {string} path of the norm
   * @param {ArrayLike<number>} x
   * @param {ArrayLike<number>} y
   * @param {string} [site]
   */
  normCard(node, path, x, y, site = "") {
    return card(node, "norm", site, { x: vector(x), y: vector(y), ...this.statistics(path, x) });
  }

  /**
   * What a norm measures of a vector, and its settings; `part` is the slice of its weights for one head.
   * @param {string} path
   * @param {ArrayLike<number>} x
   * @param {[number, number]} [part]
   */
  statistics(path, x, part = undefined) {
    const { norm, eps } = this.settings;
    const values = Float64Array.from(x);
    const mean = values.reduce((sum, one) => sum + one, 0) / values.length;
    const gain = this.weights[`${path}.weight`].data;
    const bias = this.weights[`${path}.bias`]?.data;
    const cut = (/** @type {NdArray["data"]} */ all) => vector(part ? all.subarray(...part) : all);
    if (norm === "rms") {
      const square = values.reduce((sum, one) => sum + one * one, 0) / values.length;
      return { how: "rms", square, eps, gain: cut(gain) };
    }
    const variance = values.reduce((sum, one) => sum + (one - mean) ** 2, 0) / values.length;
    return { how: "layer", mean, variance, eps, gain: cut(gain), ...(bias ? { bias: cut(bias) } : {}) };
  }

  /**
   * The card of a linear layer, whose rows from `first` on map x to y, with a corner of its matrix.
   * @param {string} node
   * @param {string} kind
   * @param {string} path
   * @param {ArrayLike<number>} x
   * @param {ArrayLike<number>} y
   * @param {{ first?: number, site?: string, held?: Record<string, unknown> }} [options]
   */
  linearCard(node, kind, path, x, y, { first = 0, site = "", held = {} } = {}) {
    const { data, shape } = this.weights[`${path}.weight`];
    const width = shape[1];
    const [rows, columns] = [Math.min(CORNER, y.length), Math.min(CORNER, width)];
    const corner = Array.from({ length: rows }, (_, row) =>
      data.subarray((first + row) * width, (first + row) * width + columns),
    );
    const bias = this.weights[`${path}.bias`];
    return card(node, kind, site, {
      x: vector(x),
      y: vector(y),
      weight: tensor(
        [rows, columns],
        corner.flatMap((one) => [...one]),
      ),
      shape: [y.length, x.length],
      ...(bias ? { bias: vector(bias.data.subarray(first, first + y.length)) } : {}),
      ...held,
    });
  }
}

/** @param {TokenPath} path */
function embeddingSteps(path) {
  const { settings, weights, ids, position } = path;
  const table = weights["token_embedding.table.weight"];
  const [size, width] = table.shape;
  const id = ids[position];
  const first = Math.max(0, Math.min(id - 2, size - TABLE_ROWS));
  const columns = Math.min(CORNER, width);
  const rows = Array.from({ length: Math.min(TABLE_ROWS, size) }, (_, i) =>
    rowOf(table, first + i).subarray(0, columns),
  );
  /** @type {Float64Array} */
  let x = Float64Array.from(rowOf(table, id));
  const shown = tensor(
    [rows.length, columns],
    rows.flatMap((one) => [...one]),
  );
  const cards = [card("embed", "embed", "", { id, first, rows: shown, shape: table.shape, y: vector(x) })];
  const to = (/** @type {Float64Array} */ y) => {
    const before = x;
    x = y;
    return { x: vector(before), y: vector(y) };
  };
  if (settings.embed_scale !== 1) {
    const by = settings.embed_scale;
    cards.push(card("embed", "scale", "", { ...to(x.map((one) => one * by)), by }));
  }
  const segment = weights["segment.table.weight"];
  if (segment) {
    const added = rowOf(segment, 0);
    cards.push(card("embed", "segment", "", { ...to(x.map((one, i) => one + added[i])), added: vector(added) }));
  }
  const { how, layout, offset } = settings.position;
  const site = `${path.prefix}embed`;
  if (how === "learned") {
    const row = position + offset;
    const added = rowOf(weights[`${path.path}position.table.weight`], row);
    cards.push(
      card("embed", "position", "", { ...to(x.map((one, i) => one + added[i])), added: vector(added), how, row }),
    );
  } else if (how === "sinusoidal") {
    const y = Float64Array.from(path.row(site));
    const added = y.map((one, i) => one - x[i]);
    cards.push(card("embed", "position", "", { ...to(y), added: vector(added), how, layout }));
  }
  if (settings.embed_norm) cards.push(path.normCard("embed", `${path.path}embed_norm`, x, path.row(site)));
  Object.assign(cards[cards.length - 1], { y: vector(path.row(site)), site: `${site}[position=${position}]` });
  return cards;
}

/** @param {TokenPath} path */
function blockSteps(path) {
  let x = path.own("resid_pre");
  const cards = path.layer > 0 ? [card("layers", "arrive", path.site("resid_pre"), { y: vector(x) })] : [];
  for (const part of /** @type {OverviewPart[]} */ (Object.keys(PARTS).filter((one) => path.has(one)))) {
    cards.push(...sublayerSteps(path, part, x));
    x = path.own(PARTS[part].after);
  }
  return cards;
}

/**
 * @param {TokenPath} path
 * @param {OverviewPart} part
 * @param {NdArray["data"]} x
 */
function sublayerSteps(path, part, x) {
  const { placement } = path.settings;
  const names = PARTS[part];
  const [added, after] = [path.own(names.added), path.own(names.after)];
  const cards = [];
  let given = x;
  if (placement !== "post" && placement !== "output") {
    const read = placement === "parallel" ? path.own("resid_pre") : x;
    given = path.row(path.module(`${part}.norm`));
    cards.push(path.normCard(`${part}.norm`, path.module(`${part}.norm`), read, given));
  }
  const steps = part === "feedforward" ? neuronSteps(path, given) : headSteps(path, part, given);
  const last = steps[steps.length - 1];
  cards.push(...steps);
  if (placement === "sandwich" || placement === "output") {
    const norm = path.module(`${part}.norm_out`);
    const output = path.row(path.module(part === "feedforward" ? "feedforward.layer.down" : `${part}.layer.out`));
    cards.push(path.normCard(`${part}.norm_out`, norm, output, added, path.site(names.added)));
  } else Object.assign(last, { y: vector(added), site: path.site(names.added) });
  const total = Float64Array.from(x, (one, i) => one + added[i]);
  const sum = { x: vector(x), added: vector(added) };
  if (placement === "post") {
    cards.push(card(`${part}.add`, "add", "", { ...sum, y: vector(total) }));
    cards.push(path.normCard(`${part}.norm`, path.module(`${part}.norm`), total, after, path.site(names.after)));
  } else cards.push(card(`${part}.add`, "add", path.site(names.after), { ...sum, y: vector(after) }));
  return cards;
}

/**
 * @param {TokenPath} path
 * @param {NdArray["data"]} x
 */
function neuronSteps(path, x) {
  const name = (/** @type {string} */ one) => path.module(`feedforward.layer.${one}`);
  const [up, hidden] = [path.row(name("up")), path.own("hidden")];
  const cards = [];
  const isGated = path.trace.sites.has(name("gate"));
  if (isGated) cards.push(path.linearCard("feedforward", "gate", name("gate"), x, path.row(name("gate"))));
  cards.push(path.linearCard("feedforward", "up", name("up"), x, up));
  const strongest = largest(hidden.map(Math.abs), STRONGEST);
  const gate = isGated ? { gate: vector(path.row(name("gate"))) } : {};
  const held = { x: vector(up), y: vector(hidden), how: path.settings.feedforward, strongest, ...gate };
  cards.push(card("feedforward", "activate", path.site("hidden"), held));
  cards.push(path.linearCard("feedforward", "down", name("down"), hidden, path.row(name("down"))));
  return cards;
}

/**
 * @param {TokenPath} path
 * @param {"attention" | "cross"} part
 * @param {NdArray["data"]} x
 */
function headSteps(path, part, x) {
  const { trace, head, position, shared, layer } = path;
  const { prefix } = PARTS[part];
  const name = (/** @type {string} */ one) => path.module(`${part}.layer.${one}`);
  const kernel = (/** @type {string} */ one) => trace.at(`${path.prefix}${prefix}${one}.${layer}`);
  const [q, k, v, z] = [kernel("q"), kernel("k"), kernel("v"), kernel("z")];
  const pairs = (/** @type {string} */ one) => path.ofHead(kernel(one), head, position);
  const [scores, weights] = [pairs("scores"), pairs("pattern")];
  const isCross = part === "cross";
  const of = isCross ? argmax(weights) : position;
  const keyInput = isCross ? rowOf(/** @type {NdArray} */ (trace.memory), of) : x;
  const first = Math.max(0, Math.min(of - (isCross ? SHOWN / 2 : SHOWN - 3), weights.length - SHOWN));
  const cards = vectorSteps(path, part, { name, x, keyInput, of, q, k, v });
  cards.push(...scoreSteps(path, part, { q, k, scores, weights, first }));
  const width = v.shape[2];
  const rows = (/** @type {NdArray} */ from) => {
    const count = Math.min(SHOWN, from.shape[1] - first);
    const start = (shared * from.shape[1] + first) * width;
    return tensor([count, width], from.data.subarray(start, start + count * width));
  };
  const here = { head, position };
  const gathered = { first, weights: vector(weights), rows: rows(v), y: vector(path.ofHead(z, head, position)) };
  cards.push(card(part, "gather", path.site(`${prefix}z`, here), gathered));
  const heads = Array.from({ length: z.shape[0] }, (_, one) => path.ofHead(z, one, position));
  const joined = Float32Array.from(heads.flatMap((one) => [...one]));
  const held = { heads: tensor([heads.length, width], joined), y: vector(joined) };
  cards.push(card(part, "join", path.site(`${prefix}z`), held));
  cards.push(path.linearCard(part, "out", name("out"), joined, path.row(name("out"))));
  return cards;
}

/**
 * The query of the token, and the key and value of token `of`, as the kernel receives them.
 * @param {TokenPath} path
 * @param {"attention" | "cross"} part
 * @param {{ name: (one: string) => string, x: NdArray["data"], keyInput: NdArray["data"], of: number, q: NdArray, k: NdArray, v: NdArray }} given
 */
function vectorSteps(path, part, { name, x, keyInput, of, q, k, v }) {
  const { head, position, shared, settings, trace } = path;
  const { prefix } = PARTS[part];
  const width = q.shape[2];
  const isNormed = trace.sites.has(name("q_norm"));
  const rotates = part === "attention" && settings.rotate !== null;
  const isPlain = !(isNormed || rotates);
  const [qAt, kAt] = [
    { head, position },
    { head: shared, position: of },
  ];
  const [qLast, kLast, vLast] = [
    path.ofHead(q, head, position),
    path.ofHead(k, shared, of),
    path.ofHead(v, shared, of),
  ];
  const projection = (/** @type {string} */ one, /** @type {number} */ at) => path.row(name(one), at);
  const cut = (/** @type {NdArray["data"]} */ all, /** @type {number} */ row) =>
    all.subarray(row * width, (row + 1) * width);
  const [queries, keys] = [projection("query", position), projection("key", of)];
  let [query, key] = isPlain ? [qLast, kLast] : [cut(queries, head), cut(keys, shared)];
  const held = { of, kv: shared };
  const site = (/** @type {string} */ one, /** @type {Record<string, number>} */ at) =>
    path.site(`${prefix}${one}`, at);
  const made = [
    path.linearCard(part, "query", name("query"), x, query, {
      first: head * width,
      site: isPlain ? site("q", qAt) : "",
      held,
    }),
    path.linearCard(part, "key", name("key"), keyInput, key, {
      first: shared * width,
      site: isPlain ? site("k", kAt) : "",
      held,
    }),
    path.linearCard(part, "value", name("value"), keyInput, vLast, {
      first: shared * width,
      site: site("v", kAt),
      held,
    }),
  ];
  if (isNormed) {
    const ends = /** @type {const} */ ([
      ["q", "q_norm", queries, head, position, qAt, qLast],
      ["k", "k_norm", keys, shared, of, kAt, kLast],
    ]);
    const outputs = ends.map(([what, norm, all, row, at, index, last]) => {
      const value = trace.at(name(norm));
      const y = path.ofHead(value, row, at);
      const isJoint = settings.qk_norm_over === "projection";
      const inner = isJoint ? `${name(norm)}.norm` : name(norm);
      const told = isJoint
        ? { ...path.statistics(inner, all, [row * width, (row + 1) * width]), heads: all.length / width }
        : path.statistics(inner, cut(all, row));
      const shown = { x: vector(cut(all, row)), y: vector(rotates ? y : last), ...told, of, what };
      made.push(card(part, "norm", rotates ? "" : site(what, index), shown));
      return y;
    });
    [query, key] = outputs;
  }
  if (rotates) {
    const { frequencies, ...rotation } = /** @type {RotateSettings[]} */ (settings.rotate)[path.layer];
    const pairs = { x: vector(query), y: vector(qLast), x_key: vector(key), y_key: vector(kLast) };
    const angles = vector(frequencies.map((one) => Math.fround(one) * position));
    made.push(card(part, "rotate", site("q", qAt), { ...pairs, ...rotation, angles, place: position }));
  }
  return made;
}

/**
 * The steps from q · k to the attention weights.
 * @param {TokenPath} path
 * @param {"attention" | "cross"} part
 * @param {{ q: NdArray, k: NdArray, scores: NdArray["data"], weights: NdArray["data"], first: number }} given
 */
function scoreSteps(path, part, { q, k, scores, weights, first }) {
  const { head, position, shared, settings, trace } = path;
  const { scale, softcap } = trace.model.about;
  const { prefix } = PARTS[part];
  const query = path.ofHead(q, head, position);
  const [, length, width] = k.shape;
  /** @type {Float64Array} */
  let now = Float64Array.from({ length }, (_, at) =>
    path.ofHead(k, shared, at).reduce((sum, one, i) => sum + one * query[i] * scale, 0),
  );
  const count = Math.min(SHOWN, length - first);
  const start = (shared * length + first) * width;
  const rows = tensor([count, width], k.data.subarray(start, start + count * width));
  const made = [card(part, "scores", "", { q: vector(query), rows, by: scale, y: vector(now) })];
  const to = (/** @type {Float64Array} */ y) => {
    const before = now;
    now = y;
    return { x: vector(before), y: vector(y) };
  };
  if (softcap)
    made.push(
      card(part, "softcap", "", { ...to(now.map((one) => softcap * Math.tanh(one / softcap))), cap: softcap }),
    );
  const added = part === "attention" ? biasOf(path, length) : null;
  if (added) {
    const how = settings.slopes ? { how: "alibi", slope: settings.slopes[head] } : { how: "relative" };
    made.push(card(part, "bias", "", { ...to(now.map((one, i) => one + added[i])), added: vector(added), ...how }));
  }
  const isSeen = Uint8Array.from(scores, (one) => Number(one > -Infinity));
  const nSeen = isSeen.reduce((sum, one) => sum + one, 0);
  const causal = part === "attention" && path.causal;
  const window = part === "attention" ? settings.windows[path.layer % settings.windows.length] : 0;
  if (causal || window || nSeen < length) {
    const seen = { shape: [length], data: isSeen };
    made.push(card(part, "mask", "", { x: vector(now), seen, n_seen: nSeen, n_keys: length, window }));
  }
  const here = { head, query: position };
  Object.assign(made[made.length - 1], { y: vector(scores), site: path.site(`${prefix}scores`, here) });
  const soft = { x: vector(scores), y: vector(weights), largest: argmax(weights) };
  made.push(card(part, "softmax", path.site(`${prefix}pattern`, here), soft));
  return made.map((one) => ({ ...one, first }));
}

/**
 * What a position encoding adds to the scores of the selected query and head.
 * @param {TokenPath} path
 * @param {number} length
 * @returns {Float64Array | null}
 */
function biasOf(path, length) {
  const { settings, trace, head, position } = path;
  if (settings.slopes) {
    const slope = settings.slopes[head];
    return Float64Array.from({ length }, (_, at) => -slope * Math.abs(position - at));
  }
  if (settings.position.how !== "relative") return null;
  const { data, shape } = trace.at(`${path.path}position.table`); // [Q, K, H]
  return Float64Array.from({ length }, (_, at) => data[(position * shape[1] + at) * shape[2] + head]);
}

/** @param {TokenPath} path */
function unembeddingSteps(path) {
  const { trace, prefix, position, depth, layer, isSource, settings } = path;
  const { about } = trace.model;
  const x = path.row(`${prefix}resid_post.${depth - 1}`);
  const here = `[position=${position}]`;
  const cards =
    layer < depth - 1 ? [card("onward", "leave", `${prefix}resid_post.${depth - 1}${here}`, { y: vector(x) })] : [];
  const final = path.row(`${prefix}final`);
  if (settings.final_norm) cards.push(path.normCard("final", `${path.path}norm`, x, final, `${prefix}final${here}`));
  if (isSource) cards.push(card("memory", "memory", "", { y: vector(final) }));
  else if (about.predicts_tokens) cards.push(...vocabularySteps(path, final));
  else if (about.labels) {
    const logits = logitsAt(trace, position);
    const held = {
      x: vector(final),
      pooled: settings.pooled,
      top: topOf(path, logits, logits.length),
      count: logits.length,
    };
    cards.push(card("head", "labels", "", held));
  } else cards.push(card("head", "vectors", "", { y: vector(final), pooled: settings.pooled }));
  return cards;
}

/**
 * @param {TokenPath} path
 * @param {NdArray["data"]} final
 */
function vocabularySteps(path, final) {
  const { trace, settings, weights, position } = path;
  const cards = [];
  let x = final;
  if (weights["head.transform.0.weight"]) {
    const [y, bent] = [path.row("head.transform.0"), path.row("head.transform.1")];
    const first = path.linearCard("head", "transform", "head.transform.0", final, y);
    cards.push({ ...first, bent: vector(bent), how: settings.feedforward });
    x = path.row("head.transform.2");
    cards.push(path.normCard("head", "head.transform.2", bent, x));
  }
  const logits = logitsAt(trace, position);
  const top = topOf(path, logits, TOP);
  const matrix = weights["head.weight"] ?? weights["token_embedding.table.weight"];
  const columns = Math.min(CORNER, matrix.shape[1]);
  const rows = top.map(({ id }) => rowOf(matrix, id).subarray(0, columns));
  const bias = weights["head.bias"];
  cards.push(
    card("head", "logits", "", {
      x: vector(x),
      by: settings.head_scale,
      cap: settings.logit_softcap,
      ...(bias ? { bias: vector(top.map(({ id }) => bias.data[id])) } : {}),
      rows: tensor(
        [rows.length, columns],
        rows.flatMap((one) => [...one]),
      ),
      shape: matrix.shape,
      top,
      tied: !weights["head.weight"],
    }),
  );
  const total = logits[0] - logSoftmax(logits)[0];
  cards.push(card("head", "probabilities", "", { top, count: logits.length, total }));
  return cards;
}

/**
 * @param {TokenPath} path
 * @param {NdArray["data"]} logits
 * @param {number} count
 * @returns {TopToken[]}
 */
function topOf(path, logits, count) {
  const logprobs = logSoftmax(logits);
  const best = largest(logits, count);
  return path.trace.model
    .describe(best)
    .map((one, rank) => ({ ...one, logit: logits[best[rank]], probability: Math.exp(logprobs[best[rank]]) }));
}

/** @type {LiveEndpoint<"walkthrough">} */
function walkthrough(model, { forward_pass: forwardPass, ...body }) {
  const trace = model.trace(forwardPass);
  const path = new TokenPath(trace, body);
  const cards = [...embeddingSteps(path), ...blockSteps(path), ...unembeddingSteps(path)];
  const base = (/** @type {string} */ site) => site.split("[")[0];
  const edited = new Set((forwardPass.edits ?? []).map((/** @type {Edit} */ one) => base(one.site)));
  for (const one of cards) one.changed = edited.has(base(one.site));
  return {
    position: path.position,
    layer: path.layer,
    head: path.head,
    side: body.side ?? "",
    n_layers: path.depth,
    token: model.tokenizer.describe([path.ids[path.position]])[0],
    cards,
  };
}

export const walkthroughEndpoints = { walkthrough };
