// The overview: what every head and feed-forward layer adds to the residual stream, and from where.

import { argmax, norm, requireWithin, rowOf, tensor } from "glasshouse/live/numbers.js";

const WINDOW = 64; // positions of a stack that are drawn at once
/** The sites of what a part of a block adds and of the stream after it, and of its attention weights. */
const PARTS = {
  attention: { added: "attn_out", after: "resid_mid", pattern: "pattern", values: "v" },
  cross: { added: "cross_attn_out", after: "cross_resid_mid", pattern: "cross_pattern", values: "cross_v" },
  feedforward: { added: "ffn_out", after: "resid_post", pattern: "", values: "" },
};

/**
 * The output projection of the attention of a layer.
 * @param {LiveModel} model
 * @param {string} prefix of the sites of the stack
 * @param {number} layer
 * @param {"attention" | "cross"} part
 */
function projectionOf(model, prefix, layer, part) {
  const path = `${prefix || "stack."}blocks.${layer}.${part}.layer.out`;
  return { weight: model.weights[`${path}.weight`], bias: model.weights[`${path}.bias`] };
}

/**
 * A vector of one head [d] through its columns of the output projection, [D].
 * @param {ArrayLike<number>} vector
 * @param {NdArray} weight
 * @param {number} head
 * @returns {Float64Array}
 */
function projected(vector, weight, head) {
  const [width, depth] = weight.shape;
  const made = new Float64Array(width);
  for (let row = 0; row < width; row += 1) {
    const start = row * depth + head * vector.length;
    let sum = 0;
    for (let i = 0; i < vector.length; i += 1) sum += weight.data[start + i] * vector[i];
    made[row] = sum;
  }
  return made;
}

/**
 * The norm of each key's value after the output projection, by head.
 * @param {NdArray} values [H_kv, K, d]
 * @param {NdArray} weight
 * @param {number} heads
 * @returns {Float64Array[]}
 */
function valueNorms(values, weight, heads) {
  const [shared, keys, width] = values.shape;
  return Array.from({ length: heads }, (_, head) => {
    const from = Math.floor((head * shared) / heads);
    return Float64Array.from({ length: keys }, (_, key) => {
      const start = (from * keys + key) * width;
      return norm(projected(values.data.subarray(start, start + width), weight, head));
    });
  });
}

/**
 * What the heads of a layer add at some queries, each [head, query].
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @param {{ prefix: string, layer: number, part: "attention" | "cross", start: number, out: Float64Array, before: Float64Array }} options
 */
function moved(trace, { prefix, layer, part, start, out, before }) {
  const { pattern, values: valuesSite } = PARTS[part];
  const weights = trace.at(`${prefix}${pattern}.${layer}`);
  const values = trace.at(`${prefix}${valuesSite}.${layer}`);
  const { weight, bias } = projectionOf(trace.model, prefix, layer, part);
  const [heads, queries, keys] = weights.shape;
  const [shared, , width] = values.shape;
  const norms = valueNorms(values, weight, heads);
  const count = out.length;
  const found = {
    norm: new Float64Array(heads * count),
    source: new Float64Array(heads * count),
    weight: new Float64Array(heads * count),
  };
  for (let i = 0; i < count; i += 1) {
    const total = Float64Array.from({ length: weight.shape[0] }, (_, row) => (bias ? bias.data[row] : 0));
    const sizes = new Float64Array(heads);
    for (let head = 0; head < heads; head += 1) {
      const at = (head * queries + start + i) * keys;
      const row = weights.data.subarray(at, at + keys);
      const source = argmax(Float64Array.from(row, (one, key) => one * norms[head][key]));
      const mixed = new Float64Array(width);
      const from = Math.floor((head * shared) / heads) * keys * width;
      for (let key = 0; key < keys; key += 1)
        if (row[key]) for (let k = 0; k < width; k += 1) mixed[k] += row[key] * values.data[from + key * width + k];
      const output = projected(mixed, weight, head);
      for (let k = 0; k < total.length; k += 1) total[k] += output[k];
      sizes[head] = norm(output);
      found.source[head * count + i] = source;
      found.weight[head * count + i] = row[source];
    }
    const scale = out[i] / norm(total) / before[i]; // a norm after the heads scales their sum to `out`
    for (let head = 0; head < heads; head += 1) found.norm[head * count + i] = sizes[head] * scale;
  }
  return found;
}

/**
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @param {string} name
 * @param {string} prefix
 * @param {number} start
 * @returns {OverviewStack}
 */
function describeStack(trace, name, prefix, start) {
  const { about } = trace.model;
  const depth = name === "encoder" && prefix ? about.n_encoder_layers : about.n_layers;
  const length = (name === "encoder" && prefix ? trace.source : trace.ids).length;
  const stop = Math.min(start + WINDOW, length);
  const normsAt = (/** @type {string} */ site) => {
    const value = trace.at(`${prefix}${site}`);
    return Float64Array.from({ length: stop - start }, (_, at) => norm(rowOf(value, start + at)));
  };
  const present = /** @type {OverviewPart[]} */ (
    Object.keys(PARTS).filter((part) =>
      trace.sites.has(`${prefix}${PARTS[/** @type {OverviewPart} */ (part)].added}.0`),
    )
  );
  const stream = [normsAt("embed")];
  /** @type {Record<string, number[]>} */
  const added = {};
  /** @type {Record<string, { norm: number[], source: number[], weight: number[] }>} */
  const heads = {};
  for (let layer = 0; layer < depth; layer += 1) {
    let before = stream[stream.length - 1];
    for (const part of present) {
      const out = normsAt(`${PARTS[part].added}.${layer}`);
      added[part] = [...(added[part] ?? []), ...out.map((one, i) => one / before[i])];
      if (part !== "feedforward") {
        const one = moved(trace, { prefix, layer, part, start, out, before });
        heads[part] ??= { norm: [], source: [], weight: [] };
        for (const key of /** @type {const} */ (["norm", "source", "weight"])) heads[part][key].push(...one[key]);
      }
      before = normsAt(`${PARTS[part].after}.${layer}`);
    }
    stream.push(before);
  }
  const shape = [depth, about.n_heads, stop - start];
  return {
    ...{ name, start, stop, of: length },
    stream: tensor(
      [depth + 1, stop - start],
      stream.flatMap((one) => [...one]),
    ),
    added: Object.fromEntries(present.map((part) => [part, tensor([depth, stop - start], added[part])])),
    heads: Object.fromEntries(
      Object.entries(heads).map(([part, one]) => [
        part,
        { norm: tensor(shape, one.norm), source: tensor(shape, one.source), weight: tensor(shape, one.weight) },
      ]),
    ),
  };
}

/** @type {LiveEndpoint<"overview">} */
function overview(model, { forward_pass: forwardPass, start = 0 }) {
  const trace = model.trace(forwardPass);
  requireWithin("start", start, 0, trace.ids.length - 1);
  const names = model.isSeq2Seq ? ["encoder", "decoder"] : [model.about.kind];
  const last = names[names.length - 1];
  return {
    stacks: names.map((name) =>
      describeStack(trace, name, names.length > 1 ? `${name}.` : "", name === last ? start : 0),
    ),
  };
}

/** @type {LiveEndpoint<"layer_heads">} */
function layerHeads(model, { forward_pass: forwardPass, attention = "pattern", layer = 0, position = 0 }) {
  const trace = model.trace(forwardPass);
  const prefix = attention.includes(".") ? `${attention.split(".")[0]}.` : "";
  const part = attention.endsWith("cross_pattern") ? "cross" : "attention";
  const weights = trace.at(`${attention}.${layer}`);
  const [heads, queries, keys] = weights.shape;
  requireWithin("position", position, 0, queries - 1);
  const { weight } = projectionOf(model, prefix, layer, part);
  const norms = valueNorms(trace.at(`${prefix}${PARTS[part].values}.${layer}`), weight, heads);
  const rows = norms.map((_, head) => weights.data.subarray((head * queries + position) * keys).subarray(0, keys));
  return {
    weights: tensor(
      [heads, keys],
      rows.flatMap((row) => [...row]),
    ),
    moved: tensor(
      [heads, keys],
      rows.flatMap((row, head) => [...row].map((one, key) => one * norms[head][key])),
    ),
  };
}

export const overviewEndpoints = { overview, layer_heads: layerHeads };
