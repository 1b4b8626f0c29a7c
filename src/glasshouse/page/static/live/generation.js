// Generation: greedy, or sampled with the random numbers that Python draws for a seed.

import { argmax, logSoftmax, rowOf } from "glasshouse/live/numbers.js";
import { isStable } from "glasshouse/live/sites.js";

const GOLDEN = 0x9e3779b97f4a7c15n;
const BITS = 64;
const PURPOSES = 3n; // of random numbers in generation/sampling/counter_rng.py; the first is for tokens

/**
 * SplitMix64's mixing function.
 * @param {bigint} given
 * @returns {bigint}
 */
function mix(given) {
  let z = BigInt.asUintN(BITS, given);
  z = BigInt.asUintN(BITS, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
  z = BigInt.asUintN(BITS, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
  return z ^ (z >> 31n);
}

/**
 * A uniform random number in [0, 1) for a seed and the number of tokens before.
 * @param {number} seed
 * @param {number} step
 * @returns {number}
 */
export function uniform(seed, step) {
  const stream = mix(BigInt(seed) + GOLDEN);
  return Number(mix(stream + (BigInt(step) * PURPOSES + 1n) * GOLDEN) >> 11n) * 2 ** -53;
}

/**
 * The distribution that is sampled from, after temperature, top-k and top-p.
 * @param {ArrayLike<number>} logits
 * @param {SamplingSettings} settings
 * @returns {Float64Array}
 */
export function samplingDistribution(logits, { temperature = 1, top_k: topK, top_p: topP }) {
  const best = argmax(logits);
  const weights = new Float64Array(logits.length);
  weights[best] = 1;
  if (temperature === 0) return weights;
  // In float32, as in Python, so that the same tokens tie with the limits.
  const scaled = Float32Array.from(logits, (one) => Math.fround(one - logits[best]) / temperature);
  const sorted = scaled.slice().sort().reverse();
  let limit = topK ? sorted[Math.min(topK, sorted.length) - 1] : -Infinity;
  if (topP && topP < 1) {
    let total = 0;
    for (const one of sorted) if (one >= limit) total += Math.exp(one);
    let [before, last] = [0, 0];
    while (last + 1 < sorted.length && before + Math.exp(sorted[last]) < topP * total) {
      before += Math.exp(sorted[last]);
      last += 1;
    }
    limit = Math.max(limit, sorted[last]);
  }
  let total = 0;
  for (let i = 0; i < scaled.length; i += 1) {
    weights[i] = scaled[i] < limit ? 0 : Math.exp(scaled[i]);
    total += weights[i];
  }
  return weights.map((one) => one / total);
}

/**
 * @param {Float64Array} weights
 * @param {number} number uniform in [0, 1)
 * @returns {number}
 */
function draw(weights, number) {
  const goal = number * weights.reduce((sum, one) => sum + one, 0);
  let sum = 0;
  for (let i = 0; i < weights.length; i += 1) {
    sum += weights[i];
    if (sum > goal && weights[i] > 0) return i;
  }
  return argmax(weights);
}

/**
 * Raise for edits that would change what was generated before.
 * @param {import("glasshouse/live/model.js").Trace} trace
 */
export function checkEdits(trace) {
  const found = trace.selectedEdits().find(({ edit, selection }) => !isStable(selection, edit));
  if (found)
    throw new Error(
      `the edit of ${found.edit.site} depends on rows, or on positions in a way that changes at each step of ` +
        "generation; edit whole sites, heads or dimensions, or positions such as [position=3:5] or [position=new].",
    );
}

/**
 * Continue the text of a forward pass under its edits.
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @param {SamplingSettings & { max_new_tokens: number, seed?: number }} settings
 * @returns {{ ids: number[], logprobs: number[], finish_reason: string }}
 */
export function generate(trace, settings) {
  const { model, forwardPass } = trace;
  const { end_ids: ends, suppressed, limit } = model.about;
  const most = Math.min(settings.max_new_tokens, limit - trace.ids.length);
  checkEdits(trace);
  // A patch comes from a text of a length of its own.
  const isCached = (forwardPass.edits ?? []).every((one) => one.kind !== "patch");
  /** @type {{ ids: number[], logprobs: number[], finish_reason: string }} */
  const made = { ids: [], logprobs: [], finish_reason: "length" };
  let { state } = trace;
  let logits = rowOf(trace.logits, trace.ids.length - 1);
  while (made.ids.length < most) {
    const allowed = Float32Array.from(logits);
    for (const one of suppressed) allowed[one] = -Infinity;
    const weights = samplingDistribution(allowed, settings);
    const id = settings.temperature ? draw(weights, uniform(settings.seed ?? 0, made.ids.length)) : argmax(allowed);
    if (ends.includes(id)) {
      made.finish_reason = "stop";
      break;
    }
    made.ids.push(id);
    made.logprobs.push(logSoftmax(logits)[id]);
    if (made.ids.length === most) break;
    if (isCached) {
      const first = trace.ids.length + made.ids.length - 1;
      state = model.decode(
        [id],
        state,
        trace.editing(() => {}, { first }),
      );
      logits = state.logits.data;
    } else {
      const { prompt } = forwardPass;
      const longer = { ...prompt, appended: [...(prompt.appended ?? []), ...made.ids] };
      const next = model.trace({ ...forwardPass, prompt: longer });
      logits = rowOf(next.logits, next.ids.length - 1);
    }
  }
  return made;
}
