// What the model wrote at two of its checkpoints, side by side.

import { h, put } from "glasshouse/dom.js";
import { plural } from "glasshouse/number.js";
import { placeholder, panel, slider } from "glasshouse/widgets.js";
import { checkpointLog } from "glasshouse/views/run/metrics_store.js";
import { lookAt, whole } from "glasshouse/views/run/step.js";

const ABOUT = {
  decoder: "At each checkpoint the model goes on with the same held-out beginnings: on the left early, on the right late. Drag to see it learn.",
  encoder: "In the same held-out texts some tokens are hidden at each checkpoint, and the model fills them in.",
  seq2seq: "The model answers the same held-out sources at each checkpoint: on the left early, on the right late.",
};

export function samples(context) {
  let told = null;
  const sides = ["run_left", "run_right"].map((name, side) => {
    const steps = slider("step", { min: 0, max: 0, step: 1, shown: (i) => (told ? whole(told.steps[i] ?? 0) : ""), oninput: (i) => { show(side, i); context.set({ [name]: told.steps[i] }); } });
    steps.dataset.testid = `sample-step-${side}`;
    const text = h("div", { class: "run-texts", data: { testid: `samples-${side}` } });
    const go = h("p", { class: "controls" });
    return { name, steps, text, go, node: h("div", { class: "run-side" }, steps, text, go) };
  });
  const body = h("div", { class: "columns" }, sides.map((side) => side.node));
  const note = h("p", { class: "quiet" });
  const node = panel("What the model wrote", ABOUT[context.model.kind], body, note);

  function show(side, i) {
    const { steps, text, go } = sides[side];
    steps.limit(told.steps.length - 1);
    steps.show(i);
    put(text, told.samples[i].map((one) => written(one, context.model.kind)));
    text.dataset.step = told.steps[i];
    put(go, lookAt(context, told.steps[i], `look-at-sample-${side}`));
  }
  async function draw() {
    told = await checkpointLog("samples");
    if (!told.steps.length) {
      put(body, placeholder(context.model.predicts_tokens ? "No sample is written down yet; the first comes with the first checkpoint." : "This model writes no text, so there are no samples."));
      return;
    }
    if (!body.contains(sides[0].node)) put(body, sides.map((side) => side.node));
    const last = told.steps.length - 1;
    sides.forEach(({ name }, side) => {
      const chosen = told.steps.indexOf(context.state[name]);
      show(side, chosen >= 0 ? chosen : side ? last : 0);
    });
    put(note, told.left_out ? `${plural(told.left_out, "checkpoint")} in between are left out.` : "");
  }
  return { node, draw, grow: draw };
}

/** What was asked and what the model wrote. */
function written(one, kind) {
  if (kind === "decoder" && one.reference === undefined) return h("p", { class: "run-sample", dir: "auto" }, h("span", { class: "quiet" }, one.prompt), one.text || h("span", { class: "quiet" }, " (nothing)"));
  const line = (name, text, isOwn) => h("div", {}, h("dt", {}, name), h("dd", { class: isOwn ? "own" : "", dir: "auto" }, text || "(nothing)"));
  const [input, prediction, reference] = { decoder: ["prompt", "prediction", "reference"], encoder: ["masked", "prediction", "reference"], seq2seq: ["source", "prediction", "reference"] }[kind];
  return h("dl", { class: one.text === one.reference ? "run-sample right" : "run-sample" }, line(input, one.prompt), line(prediction, one.text, true), one.reference === undefined ? null : line(reference, one.reference));
}
