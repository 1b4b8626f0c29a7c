// Beam search with its tree: generation/beam/search.py in the browser, without penalties. A cache is never written to,
// so that beams share it.

import { checkEdits } from "glasshouse/live/generation.js";
import { largest, logSoftmax, rowOf } from "glasshouse/live/numbers.js";

/**
 * @typedef {{ ids: number[], total: number, node: number | null, state: Decoded }} Beam
 * @typedef {{ parent: number | null, token: number, logprob: number, total: number, score: number, step: number,
 *   outcome: "kept" | "ended" | "pruned" }} Node
 * @typedef {{ ids: number[], score: number, finish_reason: "stop" | "length", node: number | null }} Found
 */

/**
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @param {{ beams: number, lengthPenalty: number, most: number }} settings
 * @returns {{ tree: Node[], found: Found[] }}
 */
export function beamSearch(trace, { beams: width, lengthPenalty, most }) {
  const { model } = trace;
  const { end_ids: ends, suppressed } = model.about;
  checkEdits(trace);
  /** @type {Node[]} */
  const tree = [];
  /** @type {Found[]} */
  let finished = [];
  /** @type {Beam[]} */
  let beams = [{ ids: [], total: 0, node: null, state: trace.state }];
  let isDecided = false;
  let step = 0;
  const scored = (/** @type {number} */ total) => total / step ** lengthPenalty;
  while (!isDecided && step < most) {
    step += 1;
    const candidates = beams.flatMap((parent) => {
      const { logits } = parent.state;
      const logprobs = Float32Array.from(
        logSoftmax(rowOf({ ...logits, shape: logits.shape.slice(1) }, logits.shape[1] - 1)),
      );
      const allowed = logprobs.slice();
      for (const one of suppressed) allowed[one] = -Infinity;
      return largest(allowed, width + Math.max(width, ends.length))
        .filter((token) => allowed[token] > -Infinity)
        .map((token) => ({ parent, token, logprob: logprobs[token], total: parent.total + logprobs[token] }));
    });
    candidates.sort((a, b) => b.total - a.total);
    /** @type {Beam[]} */
    const kept = [];
    for (const [rank, { parent, token, logprob, total }] of candidates.entries()) {
      if (kept.length === width && rank >= 2 * width) break;
      const isEnd = ends.includes(token);
      const outcome = isEnd ? (rank < width ? "ended" : "pruned") : kept.length < width ? "kept" : "pruned";
      const score = scored(total);
      tree.push({ parent: parent.node, token, logprob, total, score, step, outcome });
      const node = tree.length - 1;
      if (outcome === "ended") finished.push({ ids: parent.ids, score, finish_reason: "stop", node });
      else if (outcome === "kept") kept.push({ ids: [...parent.ids, token], total, node, state: parent.state });
    }
    finished = finished.sort((a, b) => b.score - a.score).slice(0, width);
    const best = Math.max(...kept.map((one) => one.total));
    isDecided =
      step < most &&
      (!kept.length || (finished.length === width && scored(best) <= finished[finished.length - 1].score));
    beams = kept;
    const atSite = trace.editing(() => {}, { first: trace.ids.length + step - 1 });
    if (!isDecided && step < most)
      for (const beam of beams) beam.state = model.decode([beam.ids[beam.ids.length - 1]], beam.state, atSite);
  }
  const running = beams.map(({ ids, total, node }) => ({
    ...{ ids, score: scored(total), node },
    finish_reason: /** @type {const} */ ("length"),
  }));
  const found = isDecided ? finished : [...finished, ...running];
  return { tree, found: found.sort((a, b) => b.score - a.score).slice(0, width) };
}
