// Samples at two checkpoints, side by side.

import { h, put } from "glasshouse/dom.js";
import { plural } from "glasshouse/number.js";
import { placeholder, panel, slider } from "glasshouse/widgets.js";
import { checkpointLog } from "glasshouse/views/run/metrics_store.js";
import { openCheckpoint, whole } from "glasshouse/views/run/step.js";

const ABOUT = {
  decoder: "Completions of the same validation prompts at two checkpoints.",
  encoder: "Predictions for masked tokens of the same validation texts at two checkpoints.",
  seq2seq: "Predictions for the same validation sources at two checkpoints.",
};

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function samples(context) {
  /** @type {SampleLog | null} */
  let told = null;
  const names = /** @type {("run_left" | "run_right")[]} */ (["run_left", "run_right"]);
  const sides = names.map((name, side) => {
    const steps = slider("step", {
      min: 0,
      max: 0,
      step: 1,
      shown: (i) => (told ? whole(told.steps[i] ?? 0) : ""),
      oninput: (i) => {
        show(side, i);
        context.set({ [name]: told?.steps[i] });
      },
    });
    steps.dataset.testid = `sample-step-${side}`;
    const text = h("div", { class: "run-texts", data: { testid: `samples-${side}` } });
    const go = h("p", { class: "controls" });
    return { name, steps, text, go, node: h("div", { class: "run-side" }, steps, text, go) };
  });
  const body = h(
    "div",
    { class: "columns" },
    sides.map((side) => side.node),
  );
  const note = h("p", { class: "quiet" });
  const node = panel("Samples", ABOUT[context.model.kind], body, note);

  /**
   * @param {number} side
   * @param {number} i
   */
  function show(side, i) {
    if (!told) return;
    const { steps, text, go } = sides[side];
    steps.limit(told.steps.length - 1);
    steps.show(i);
    put(
      text,
      told.samples[i].map((one) => written(one, context.model.kind)),
    );
    text.dataset.step = String(told.steps[i]);
    put(go, openCheckpoint(context, told.steps[i], `look-at-sample-${side}`));
  }
  async function draw() {
    told = await checkpointLog("samples");
    if (!told.steps.length) {
      put(
        body,
        placeholder(
          context.model.predicts_tokens
            ? "No samples yet; they are logged with each checkpoint."
            : "This model generates no text, so there are no samples.",
        ),
      );
      return;
    }
    if (!body.contains(sides[0].node))
      put(
        body,
        sides.map((side) => side.node),
      );
    const { steps } = told;
    for (const [side, { name }] of sides.entries()) {
      const chosen = steps.indexOf(context.state[name] ?? -1);
      show(side, chosen >= 0 ? chosen : side ? steps.length - 1 : 0);
    }
    put(note, told.left_out ? `${plural(told.left_out, "checkpoint")} in between are omitted.` : "");
  }
  return { node, draw, grow: draw };
}

/**
 * Input, prediction and reference.
 * @param {RunSample} one
 * @param {Model["kind"]} kind
 * @returns {HTMLElement}
 */
function written(one, kind) {
  if (kind === "decoder" && one.reference === undefined)
    return h(
      "p",
      { class: "run-sample", dir: "auto", tabindex: "0" },
      h("span", { class: "quiet" }, one.prompt),
      one.text || h("span", { class: "quiet" }, " (nothing)"),
    );
  /** @type {(name: string, text: string, isOwn?: boolean) => HTMLElement} */
  const line = (name, text, isOwn) =>
    h("div", {}, h("dt", {}, name), h("dd", { class: isOwn ? "own" : "", dir: "auto" }, text || "(nothing)"));
  const [input, prediction, reference] = {
    decoder: ["prompt", "prediction", "reference"],
    encoder: ["masked", "prediction", "reference"],
    seq2seq: ["source", "prediction", "reference"],
  }[kind];
  return h(
    "dl",
    { class: one.text === one.reference ? "run-sample right" : "run-sample" },
    line(input, one.prompt),
    line(prediction, one.text, true),
    one.reference === undefined ? null : line(reference, one.reference),
  );
}
