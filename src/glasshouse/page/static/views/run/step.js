// Steps of the run and links to their checkpoints.

import { h } from "glasshouse/dom.js";
import { store } from "glasshouse/views/run/metrics_store.js";

/**
 * All digits of a step.
 * @param {number} step
 * @returns {string}
 */
export function whole(step) {
  return step.toLocaleString("en");
}

/**
 * A button that opens the saved checkpoint nearest to a step in all views.
 * @param {ViewContext} context
 * @param {number} step
 * @param {string} testid
 * @returns {HTMLElement}
 */
export function openCheckpoint(context, step, testid) {
  const near = nearestSaved(step);
  if (!near) return h("span", { class: "quiet" }, "no checkpoint saved yet");
  const named = near.name;
  if (near.name === context.checkpoint)
    return h(
      "span",
      { class: "quiet", data: { testid, checkpoint: near.name } },
      `all views show checkpoint ${named}`,
    );
  const away = near.step === step ? "" : " (nearest saved)";
  return h(
    "button",
    {
      type: "button",
      class: "act",
      data: { testid, checkpoint: near.name },
      on: { click: () => context.set({ checkpoint: near.name }) },
    },
    `open checkpoint ${named}${away}`,
  );
}

/**
 * The saved checkpoint nearest to a step.
 * @param {number} step
 * @returns {{ name: string, step: number } | null}
 */
function nearestSaved(step) {
  const there = store.latest?.checkpoints ?? [];
  const near = Math.min(...there.map((one) => Math.abs(one.step - step)));
  return there.find((one) => Math.abs(one.step - step) === near) ?? null;
}
