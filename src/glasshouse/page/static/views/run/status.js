// Status of the run: progress and main settings.

import { request } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { panel } from "glasshouse/widgets.js";
import { latest, store } from "glasshouse/views/run/metrics_store.js";
import { whole } from "glasshouse/views/run/step.js";

/** @returns {Part} */
export function status() {
  const badge = h("span", { class: "run-state", data: { testid: "run-state" } });
  const far = h("span", { data: { testid: "run-far" } });
  const filled = h("span", { class: "filled" });
  const track = h(
    "div",
    { class: "run-track", role: "progressbar", "aria-label": "training progress", "aria-valuemin": 0 },
    filled,
  );
  const settings = h("dl", { class: "run-settings", data: { testid: "run-settings" } });
  const node = panel("Training run", null, h("p", { class: "run-line" }, badge, far), track, settings);
  /** @type {Responses["run_settings"] | null} */
  let told = null;
  async function show() {
    const { status: state, step, steps, best } = latest();
    told ??= await request("run_settings");
    put(badge, state);
    badge.dataset.state = state;
    const speed = store.curves.tokens_per_second?.mean.at(-1);
    const left =
      state === "running" && speed && steps !== null && step < steps
        ? ` · about ${duration(((steps - step) * told.batch_tokens) / speed)} left`
        : "";
    const lowest = best ? ` · best validation loss ${short(best.value)} nats at step ${whole(best.step)}` : "";
    const again = state === "stopped" ? " · rerun the same command to resume" : "";
    put(far, `step ${whole(step)}${steps ? ` of ${whole(steps)}` : ""}${lowest}${left}${again}`);
    far.dataset.step = String(step);
    filled.style.width = `${(100 * step) / Math.max(1, steps ?? 0)}%`;
    track.setAttribute("aria-valuenow", String(step));
    track.setAttribute("aria-valuemax", String(steps ?? step));
    if (!settings.children.length)
      put(
        settings,
        told.settings.map((one) =>
          h("div", { data: { name: one.name } }, h("dt", {}, one.name), h("dd", {}, one.value)),
        ),
      );
  }
  return { node, draw: show, grow: show };
}

/**
 * @param {number} seconds
 * @returns {string}
 */
function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
