// The plan of the run on a GPU of choice, beside what was measured.

import { h, put } from "glasshouse/dom.js";
import { planPicture } from "glasshouse/plan.js";
import { panel, placeholder } from "glasshouse/widgets.js";
import { store } from "glasshouse/views/run/metrics_store.js";

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function plan(context) {
  const pick = h("select", {
    "aria-label": "GPU of the plan",
    data: { testid: "plan-gpu" },
    on: { change: () => context.set({ run_gpu: pick.value }) },
  });
  const picture = planPicture();
  const body = h("div", {}, picture);
  const node = panel(
    "Plan",
    "What this run takes on one GPU, by arithmetic alone (glasshouse plan).",
    h("div", { class: "controls" }, h("label", {}, "GPU ", pick)),
    body,
  );
  /** @type {Responses["plan"] | null} */
  let told = null;
  function show() {
    /** @type {(name: string) => number | undefined} */
    const last = (name) => store.curves[name]?.mean.at(-1);
    if (told) picture.show(told.plan, { tokens_per_second: last("tokens_per_second"), memory: last("peak_memory") });
  }
  return {
    node,
    async draw() {
      const gpu = context.state.run_gpu ?? "h200";
      try {
        told = await context.request("plan", { gpu }, { topic: "" });
      } catch (error) {
        put(body, placeholder(error.message)); // the other panels do not need it
        return;
      }
      put(body, picture);
      put(
        pick,
        told.gpus.map((name) => h("option", { value: name }, name)),
      );
      pick.value = gpu;
      show();
    },
    grow: show,
    close: () => picture.close(),
  };
}
