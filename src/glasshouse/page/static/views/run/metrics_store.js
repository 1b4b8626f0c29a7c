// Metrics and checkpoint logs of the run, kept while the page is open.

import { request, isSaved } from "glasshouse/api.js";

const cached = {}; // checkpoint logs by name
export const store = { latest: null, curves: {} };
let underway = null;

/** Fetch new metrics. */
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
  const fresh = {};
  for (const [name, curve] of Object.entries(told.curves)) {
    const old = told.since ? store.curves[name] : undefined;
    const kept = old ? old.step.findIndex((step) => step >= told.since) : 0;
    const end = kept < 0 ? old.step.length : kept;
    fresh[name] = Object.fromEntries(
      Object.entries(curve).map(([part, values]) => [part, old ? [...old[part].slice(0, end), ...values] : values]),
    );
  }
  store.curves = fresh;
  store.latest = told;
}

/** A checkpoint log, fetched again when it has grown. */
export function checkpointLog(name) {
  const version = store.latest.checkpoint_log_version;
  if (cached[name]?.version !== version) {
    const response = request(name, {}, { fresh: name in cached });
    cached[name] = { version, response };
    response.catch(() => delete cached[name]);
  }
  return cached[name].response;
}
