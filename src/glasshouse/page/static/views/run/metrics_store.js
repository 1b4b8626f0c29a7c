// Metrics and checkpoint logs of the run, kept while the page is open.

import { request, isSaved } from "glasshouse/api.js";

/** @type {Record<string, { version: string, response: Promise<any> }>} */
const cached = {}; // checkpoint logs by name
/** @type {{ latest: RunMetrics | null, curves: Record<string, MetricCurve> }} */
export const store = { latest: null, curves: {} };
/** @type {Promise<void> | null} */
let underway = null;

/**
 * Fetch new metrics.
 * @returns {Promise<void>}
 */
export function follow() {
  underway ??= read().finally(() => {
    underway = null;
  });
  return underway;
}

async function read() {
  if (isSaved && store.latest) return;
  // The first request is cached, so that a saved page includes its response.
  const told = store.latest
    ? await request("metrics", { since: store.latest.step, version: store.latest.version }, { fresh: true })
    : await request("metrics");
  /** @type {Record<string, MetricCurve>} */
  const fresh = {};
  for (const [name, curve] of Object.entries(told.curves)) {
    const old = told.since ? store.curves[name] : undefined;
    fresh[name] = old ? joined(old, curve, told.since) : curve;
  }
  store.curves = fresh;
  store.latest = told;
}

/**
 * A curve as far as a step, and what has come from there on.
 * @param {MetricCurve} old
 * @param {MetricCurve} curve
 * @param {number} since
 * @returns {MetricCurve}
 */
function joined(old, curve, since) {
  const at = old.step.findIndex((step) => step >= since);
  const end = at < 0 ? old.step.length : at;
  const both = (/** @type {number[]} */ before, /** @type {number[]} */ after) => [...before.slice(0, end), ...after];
  return {
    step: both(old.step, curve.step),
    mean: both(old.mean, curve.mean),
    ...(old.low && curve.low ? { low: both(old.low, curve.low) } : {}),
    ...(old.high && curve.high ? { high: both(old.high, curve.high) } : {}),
  };
}

/**
 * The latest metrics; the parts of the view are drawn once they are there.
 * @returns {RunMetrics}
 */
export function latest() {
  return /** @type {RunMetrics} */ (store.latest);
}

/**
 * A checkpoint log, fetched again when it has grown.
 * @template {"probes" | "samples"} K
 * @param {K} name
 * @returns {Promise<Responses[K]>}
 */
export function checkpointLog(name) {
  const version = latest().checkpoint_log_version;
  if (cached[name]?.version !== version) {
    const response = request(name, {}, { fresh: name in cached });
    cached[name] = { version, response };
    response.catch(() => delete cached[name]);
  }
  return cached[name].response;
}
