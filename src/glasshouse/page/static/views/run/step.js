// A step of the run: how it is written, and the way to the model as it was then.

import { h } from "glasshouse/dom.js";
import { store } from "glasshouse/views/run/metrics_store.js";

/** All digits of a step. */
export function whole(step) {
  return step.toLocaleString("en");
}

/** A button that lets all views show the model as it was at a step, as nearly as it was kept. */
export function lookAt(context, step, testid) {
  const near = kept(step);
  if (!near) return h("span", { class: "quiet" }, "no weights are kept yet");
  const named = near.name === "final" ? "the end" : near.name;
  if (near.name === context.checkpoint) return h("span", { class: "quiet", data: { testid, checkpoint: near.name } }, `all views show the model at ${named}`);
  const away = near.step === step ? "" : ", the nearest that is kept";
  return h("button", { type: "button", class: "act", data: { testid, checkpoint: near.name }, on: { click: () => context.set({ checkpoint: near.name }) } }, `look at the model at ${named}${away}`);
}

/** The weights that are kept nearest to a step. */
function kept(step) {
  const there = store.latest?.checkpoints ?? [];
  return there.reduce((best, one) => (best === null || Math.abs(one.step - step) < Math.abs(best.step - step) ? one : best), null);
}
