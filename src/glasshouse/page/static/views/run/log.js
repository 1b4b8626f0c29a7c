// What is known of the run, however often the view is opened.

import { ask, isSaved } from "glasshouse/asking.js";

const held = {}; // what was written down at the checkpoints, by name
export const log = { told: null, curves: {} };
let underway = null;

/** Ask for what is new. */
export function follow() {
  underway ??= read().finally(() => {
    underway = null;
  });
  return underway;
}

async function read() {
  if (isSaved && log.told) return;
  // The first question is remembered, so that a page that is saved holds its answer.
  const told = log.told ? await ask("metrics", { since: log.told.step, mark: log.told.mark }, { fresh: true }) : await ask("metrics");
  const fresh = {};
  for (const [name, curve] of Object.entries(told.curves)) {
    const old = told.since ? log.curves[name] : undefined;
    const kept = old ? old.step.findIndex((step) => step >= told.since) : 0;
    const end = kept < 0 ? old.step.length : kept;
    fresh[name] = Object.fromEntries(Object.entries(curve).map(([part, values]) => [part, old ? [...old[part].slice(0, end), ...values] : values]));
  }
  log.curves = fresh;
  log.told = told;
}

/** What was written down at the checkpoints, asked for again when there is more of it. */
export function inside(name) {
  const mark = log.told.inside;
  if (held[name]?.mark !== mark) {
    const told = ask(name, {}, { fresh: name in held });
    held[name] = { mark, told };
    told.catch(() => delete held[name]);
  }
  return held[name].told;
}
