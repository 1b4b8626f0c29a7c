// The residual stream: logit lens, norms, cosine similarity, and direct logit attribution.

import { slice } from "glasshouse/live/operations/shape.js";
import { entropyOf, largest, logSoftmax, norm, requireWithin, rowOf, tensor } from "glasshouse/live/numbers.js";
import { logitsAt } from "glasshouse/live/endpoints/tokens.js";

const MAX_POSITIONS = 64; // per request

/**
 * The target token at each position, -1 where there is none; for a mask token, the masked one.
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @returns {number[]}
 */
export function targetIds({ model, ids, forwardPass }) {
  if (model.about.labels) return ids.map(() => -1);
  if (model.about.kind === "encoder") return model.inputs({ ...forwardPass.prompt, masked: [] }).ids;
  return ids.map((_, at) => ids[at + 1] ?? -1);
}

/**
 * The layers and positions of a request.
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @param {any} body
 * @returns {{ layers: number[], start: number, stop: number }}
 */
function windowOf(trace, { layers, start = 0, stop = 1 }) {
  const { length } = trace.ids;
  requireWithin("start", start, 0, length - 1);
  requireWithin("stop", stop, start + 1, start + MAX_POSITIONS);
  const depth = trace.residualSites.length;
  const chosen = (layers ?? [...Array(depth).keys()]).map((/** @type {number} */ one) =>
    one < 0 ? one + depth : one,
  );
  for (const one of chosen) requireWithin("layers", one, 0, depth - 1);
  return { layers: chosen, start, stop: Math.min(stop, length) };
}

/** @type {LiveEndpoint<"lens">} */
function lens(model, { forward_pass: forwardPass, top_k: count = 1, ...body }) {
  const trace = model.trace(forwardPass);
  const { layers, start, stop } = windowOf(trace, body);
  const targets = targetIds(trace).slice(start, stop);
  const shape = [layers.length, stop - start];
  /** @type {number[][][]} */
  const tokens = [];
  const [probability, entropy, rank, loss] = [[], [], [], []].map(() => /** @type {number[]} */ ([]));
  for (const layer of layers) {
    const isLast = layer === trace.residualSites.length - 1;
    const logits = isLast
      ? slice(trace.logits, 0, start, stop)
      : model.logits(slice(trace.at(trace.residualSites[layer]), 0, start, stop), "lens");
    tokens.push(
      targets.map((target, at) => {
        const row = rowOf(logits, at);
        const logprobs = logSoftmax(row);
        const top = largest(row, count);
        probability.push(...top.map((one) => Math.exp(logprobs[one])));
        entropy.push(entropyOf(logprobs));
        rank.push(target < 0 ? -1 : row.reduce((sum, one) => sum + Number(one > row[target]), 0));
        loss.push(target < 0 ? Number.NaN : -logprobs[target]);
        return top;
      }),
    );
  }
  const shown = [...new Set([...tokens.flat(2), ...targets.filter((one) => one >= 0)])].sort((a, b) => a - b);
  return {
    layers,
    outputs: model.about.n_outputs,
    tokens,
    targets: targets.map((one) => (one < 0 ? null : one)),
    token_info: Object.fromEntries(model.describe(shown).map((one) => [one.id, one])),
    probability: tensor([...shape, probability.length / (shape[0] * shape[1])], probability),
    entropy: tensor(shape, entropy),
    rank: tensor(shape, rank),
    loss: tensor(shape, loss),
  };
}

/** @type {LiveEndpoint<"norms">} */
function norms(model, { forward_pass: forwardPass, ...body }) {
  const trace = model.trace(forwardPass);
  const { layers, start, stop } = windowOf(trace, body);
  const found = layers.flatMap((layer) => {
    const stream = trace.at(trace.residualSites[layer]);
    return Array.from({ length: stop - start }, (_, at) => norm(rowOf(stream, start + at)));
  });
  return { layers, norms: tensor([layers.length, stop - start], found) };
}

/** @type {LiveEndpoint<"cosine_similarity">} */
function cosineSimilarity(model, { forward_pass: forwardPass, layer = 0, position = 0, show = 8 }) {
  const trace = model.trace(forwardPass);
  requireWithin("layer", layer, 0, trace.residualSites.length - 1);
  requireWithin("position", position, 0, trace.ids.length - 1);
  const stream = trace.at(trace.residualSites[layer]);
  const own = rowOf(stream, position);
  const cosine = trace.ids.map((_, at) => {
    const other = rowOf(stream, at);
    let product = 0;
    for (let i = 0; i < own.length; i += 1) product += own[i] * other[i];
    return product / (norm(own) * norm(other));
  });
  const order = largest(cosine, cosine.length).filter((at) => at !== position);
  const nearest = order.slice(0, Math.max(0, show));
  const described = model.tokenizer.describe(nearest.map((at) => trace.ids[at]));
  return {
    cosine: tensor([cosine.length], cosine),
    nearest: nearest.map((at, rank) => ({ ...described[rank], position: at, cosine: cosine[at] })),
  };
}

/** @type {LiveEndpoint<"logit_attribution">} */
function logitAttribution(model, { forward_pass: forwardPass, position = 0, token, incorrect_token: other = null }) {
  const trace = model.trace(forwardPass);
  requireWithin("position", position, 0, trace.ids.length - 1);
  const chosen = token ?? largest(logitsAt(trace, position), 1)[0];
  const graph = model.graphs.attribution;
  /** @type {Record<string, NdArray>} */
  const seen = {};
  for (const name of Object.keys(graph.graph.inputs).filter((one) => one !== "token")) {
    const value = trace.at(`${trace.prefix}${name}`);
    const axis = value.shape.length - 2; // of the positions
    const part = slice(value, axis, position, position + 1);
    seen[name] = { ...part, shape: [1, ...part.shape.filter((_, number) => number !== axis)] };
  }
  const split = (/** @type {number} */ id) =>
    graph.run({ ...seen, token: { shape: [1], dtype: "int64", data: /** @type {any} */ (Int32Array.of(id)) } });
  const found = split(chosen);
  // A decomposition is linear in the direction that is asked about.
  const minus = other === null ? null : split(other);
  const values = (/** @type {string} */ name) =>
    Float64Array.from(found[name].data, (one, i) => one - (minus ? minus[name].data[i] : 0));
  const as = (/** @type {string} */ name) => tensor(found[name].shape.slice(1), values(name));
  const [described, ...rest] = model.describe(other === null ? [chosen] : [chosen, other]);
  return {
    token: described,
    incorrect_token: rest[0] ?? null,
    logit: values("logit")[0],
    embedding: values("embedding")[0],
    bias: values("bias")[0],
    heads: as("heads"),
    cross_heads: found.cross_heads ? as("cross_heads") : null,
    feedforward: as("feedforward"),
  };
}

export const residual = { lens, norms, cosine_similarity: cosineSimilarity, logit_attribution: logitAttribution };
