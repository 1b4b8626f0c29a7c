// Attention: small maps of all heads, one head's map, head scores, and one query-key pair.

import { largest, requireWithin, tensor } from "glasshouse/live/numbers.js";

const SMALL = 40; // cells of a small map along each side, at most
const TILE = 256; // cells of a tile along each side
const MASKED = -1; // no weight is negative
const LISTED = 8; // keys listed of a query
const ON_KEYS = ["current_token", "previous", "first", "duplicate", "induction"];
const HALFWAY = 0.5; // from uniform attention to 1: above it, a head has the type of that score

/**
 * The weights and scores of a layer.
 * @param {LiveModel} model
 * @param {RequestBody} body
 */
function layerMap(model, { forward_pass: forwardPass, attention = "pattern", layer = 0 }) {
  const trace = model.trace(/** @type {ForwardPass} */ (forwardPass));
  const weights = trace.at(`${attention}.${layer}`);
  const scores = trace.at(`${String(attention).replace(/pattern$/, "scores")}.${layer}`);
  const [heads, queries, keys] = weights.shape;
  return { trace, weights, scores, heads, queries, keys };
}

/**
 * The weights of a head, MASKED where a key is not visible.
 * @param {ReturnType<typeof layerMap>} map
 * @param {number} head
 * @returns {Float32Array}
 */
function seen({ weights, scores, queries, keys }, head) {
  const start = head * queries * keys;
  return Float32Array.from({ length: queries * keys }, (_, i) =>
    scores.data[start + i] === -Infinity ? MASKED : weights.data[start + i],
  );
}

/**
 * The largest values of squares of a map.
 * @param {Float32Array} map
 * @param {number} columns
 * @param {number} tall
 * @param {number} wide
 * @returns {Float32Array}
 */
function pooled(map, columns, tall, wide) {
  const rows = map.length / columns;
  const width = Math.ceil(columns / wide);
  const made = new Float32Array(Math.ceil(rows / tall) * width).fill(-Infinity);
  for (let row = 0; row < rows; row += 1)
    for (let column = 0; column < columns; column += 1) {
      const at = Math.floor(row / tall) * width + Math.floor(column / wide);
      made[at] = Math.max(made[at], map[row * columns + column]);
    }
  return made;
}

/** @type {LiveEndpoint<"maps">} */
function maps(model, body) {
  const map = layerMap(model, body);
  const [tall, wide] = [Math.ceil(map.queries / SMALL), Math.ceil(map.keys / SMALL)];
  const shape = [map.heads, Math.ceil(map.queries / tall), Math.ceil(map.keys / wide)];
  const data = new Uint8Array(shape[0] * shape[1] * shape[2]);
  for (let head = 0; head < map.heads; head += 1)
    pooled(seen(map, head), map.keys, tall, wide).forEach((one, i) => {
      data[head * shape[1] * shape[2] + i] = one < 0 ? 0 : 1 + Math.round(254 * Math.sqrt(one));
    });
  return { maps: { shape, data: /** @type {any} */ (data) }, pool_size: [tall, wide], stride: 1 };
}

/** @type {LiveEndpoint<"tile">} */
function tile(model, { head = 0, level = 0, row = 0, column = 0, ...body }) {
  const map = layerMap(model, body);
  requireWithin("head", head, 0, map.heads - 1);
  const side = 2 ** level;
  const cells = pooled(seen(map, head), map.keys, side, side);
  const width = Math.ceil(map.keys / side);
  const [first, last] = [row * TILE, Math.min((row + 1) * TILE, cells.length / width)];
  const [left, right] = [column * TILE, Math.min((column + 1) * TILE, width)];
  const rows = Array.from({ length: last - first }, (_, i) =>
    cells.subarray((first + i) * width + left, (first + i) * width + right),
  );
  return {
    cells: tensor(
      [last - first, right - left],
      rows.flatMap((one) => [...one]),
    ),
  };
}

/**
 * Which keys count for a query, for each score of ON_KEYS.
 * @param {number[]} ids
 * @param {boolean} causal
 * @param {number} query
 * @param {number} key
 * @returns {boolean[]}
 */
function countsOf(ids, causal, query, key) {
  const isOther = (/** @type {number} */ at) =>
    at >= 0 && (causal ? at < query : at !== query) && ids[at] === ids[query];
  const nVisible = causal ? query + 1 : ids.length;
  return [key === query && nVisible >= 2, key === query - 1, key === 0 && query > 0, isOther(key), isOther(key - 1)];
}

/** @type {LiveEndpoint<"scores">} */
function scores(model, { attention = "pattern", ...body }) {
  const kind = String(attention);
  const crosses = kind.includes("cross_");
  const depth = kind.startsWith("encoder.") ? model.about.n_encoder_layers : model.about.n_layers;
  /** @type {LabelledScores[][]} */
  const heads = [];
  const uniform = [];
  let length = 0;
  for (let layer = 0; layer < depth; layer += 1) {
    const map = layerMap(model, { ...body, attention, layer });
    const ids = kind.startsWith("encoder.") ? map.trace.source : map.trace.ids;
    const causal = model.about.kind === "decoder" || kind.startsWith("decoder.pattern");
    length = map.queries;
    const { each, even } = scoreLayer(map, ids, causal, crosses);
    heads.push(each);
    uniform.push(even);
  }
  return { heads, uniform, scored: length, of: length };
}

/**
 * The scores of the heads of a layer, their types, and the scores of uniform attention.
 * @param {ReturnType<typeof layerMap>} map
 * @param {number[]} ids
 * @param {boolean} causal
 * @param {boolean} crosses
 */
function scoreLayer(map, ids, causal, crosses) {
  const { queries, keys, heads } = map;
  const on = () => new Float64Array(ON_KEYS.length);
  const [weight, even, counted] = [Array.from({ length: heads }, on), on(), on()];
  const [entropy, shares, gaps] = [new Float64Array(heads), new Float64Array(heads), new Float64Array(heads)];
  let [most, nChoices] = [0, 0];
  for (let query = 0; query < queries; query += 1) {
    let visible = 0;
    for (let key = 0; key < keys; key += 1) if (map.scores.data[query * keys + key] > -Infinity) visible += 1;
    most += Math.log(Math.max(visible, 1));
    if (visible >= 2) nChoices += 1;
    const any = ON_KEYS.map(() => false);
    for (let key = 0; !crosses && key < keys; key += 1) {
      const isVisible = map.scores.data[query * keys + key] > -Infinity;
      countsOf(ids, causal, query, key).forEach((counts, i) => {
        if (!counts) return;
        any[i] = true;
        if (isVisible) even[i] += 1 / visible;
        for (let head = 0; head < heads; head += 1)
          weight[head][i] += map.weights.data[(head * queries + query) * keys + key];
      });
    }
    any.forEach((one, i) => {
      if (one) counted[i] += 1;
    });
    for (let head = 0; head < heads; head += 1) {
      let sum = 0;
      for (let key = 0; key < keys; key += 1) {
        const one = map.weights.data[(head * queries + query) * keys + key];
        if (one > 0) sum -= one * Math.log(one);
      }
      entropy[head] += sum;
      if (visible >= 2) {
        shares[head] += sum / Math.log(visible);
        gaps[head] += Math.log(visible) - sum;
      }
    }
  }
  const orNull = (/** @type {number} */ one) => /** @type {number} */ (Number.isFinite(one) ? one : null);
  const named = (/** @type {ArrayLike<number>} */ sums) =>
    Object.fromEntries(ON_KEYS.map((name, i) => [name, orNull(sums[i] / counted[i])]));
  const each = weight.map((sums, head) => {
    const found = { broad: orNull(shares[head] / nChoices), entropy: orNull(entropy[head] / queries) };
    const gap = crosses ? Math.log(keys) - entropy[head] / queries : gaps[head] / nChoices;
    return { ...found, ...(crosses ? {} : named(sums)), label: labelOf(sums, even, counted, gap, crosses) };
  });
  return { each, even: { broad: 1, entropy: most / queries, ...(crosses ? {} : named(even)) } };
}

/**
 * The type of a head: the score that stands out most from uniform attention.
 * @param {Float64Array} sums
 * @param {Float64Array} even
 * @param {Float64Array} counted
 * @param {number} gap
 * @param {boolean} crosses
 * @returns {HeadScore | null}
 */
function labelOf(sums, even, counted, gap, crosses) {
  let [best, label] = [0, /** @type {HeadScore | null} */ (null)];
  for (let i = 0; !crosses && i < ON_KEYS.length; i += 1) {
    const [score, base] = [sums[i] / counted[i], even[i] / counted[i]];
    if (score > base && base <= HALFWAY && (score - base) / (1 - base) > best)
      [best, label] = [(score - base) / (1 - base), /** @type {HeadScore} */ (ON_KEYS[i])];
  }
  return best > HALFWAY ? label : gap < Math.LN2 ? "broad" : null;
}

/** @type {LiveEndpoint<"query_key">} */
function queryKey(model, { head = 0, query = 0, key = 0, ...body }) {
  const { attention = "pattern", layer = 0 } = body;
  const map = layerMap(model, body);
  const { trace, queries, keys, heads } = map;
  requireWithin("head", head, 0, heads - 1);
  requireWithin("query", query, 0, queries - 1);
  requireWithin("key", key, 0, keys - 1);
  const input = (/** @type {string} */ name) => trace.at(`${String(attention).replace(/pattern$/, name)}.${layer}`);
  const [qs, ks, vs] = [input("q"), input("k"), input("v")];
  const width = qs.shape[2];
  const group = heads / ks.shape[0];
  const shared = Math.floor(head / group);
  const vector = (/** @type {NdArray} */ from, /** @type {number} */ h, /** @type {number} */ at) =>
    from.data.subarray((h * from.shape[1] + at) * width, (h * from.shape[1] + at + 1) * width);
  const [q, k, v] = [vector(qs, head, query), vector(ks, shared, key), vector(vs, shared, key)];
  const row = map.scores.data.subarray((head * queries + query) * keys, (head * queries + query + 1) * keys);
  const weights = map.weights.data.subarray((head * queries + query) * keys, (head * queries + query + 1) * keys);
  const there = [...row.keys()].filter((at) => row[at] > -Infinity);
  const products = Float64Array.from(q, (one, i) => one * k[i]);
  const sum = products.reduce((total, one) => total + one, 0);
  const top = Math.max(...row);
  const scale = model.about.scale;
  const cap = model.about.softcap;
  const bare = cap ? cap * Math.tanh((sum * scale) / cap) : sum * scale;
  const z = new Float64Array(width);
  for (let at = 0; at < keys; at += 1) {
    const other = vector(vs, shared, at);
    for (let i = 0; i < width; i += 1) z[i] += weights[at] * other[i];
  }
  const isSeen = row[key] > -Infinity;
  return {
    q: tensor([width], q),
    k: tensor([width], k),
    products: tensor([width], products),
    sum,
    scale,
    softcap: cap,
    bias: isSeen ? (model.about.biased ? row[key] - bare : 0) : null,
    score: isSeen ? row[key] : /** @type {any} */ (null),
    largest: top,
    total: row.reduce((total, one) => total + Math.exp(one - top), 0),
    weight: weights[key],
    weights: tensor(
      [keys],
      weights.map((one, at) => (row[at] > -Infinity ? one : MASKED)),
    ),
    seen: there.length,
    top: largest(
      there.map((at) => weights[at]),
      LISTED,
    ).map((rank) => ({ key: there[rank], weight: weights[there[rank]], score: row[there[rank]] })),
    v: tensor([width], v),
    weighted_value: tensor(
      [width],
      Float64Array.from(v, (one) => weights[key] * one),
    ),
    z: tensor([width], z),
    kv_head: shared,
    group,
  };
}

export const attention = { maps, tile, scores, query_key: queryKey };
