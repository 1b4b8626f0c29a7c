// Checkpoint selection of a run: a slider, and a second checkpoint to compare with.

import { request, isSaved } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { live } from "glasshouse/saved_page.js";
import { slider } from "glasshouse/widgets.js";

const EARLY = 0.1; // of the planned steps
const OFTEN = 5000; // milliseconds between polls for new checkpoints

/**
 * How far the training of a checkpoint has come, in words; "" for a model that is finished, or of no run.
 * @param {string} checkpoint
 * @param {number | null} planned
 * @returns {string}
 */
export function stageOf(checkpoint, planned) {
  const step = /^step (\d+)$/.exec(checkpoint)?.[1];
  if (step === undefined) return "";
  const progress = planned === null ? `step ${step}` : `step ${step} of ${planned}`;
  if (step === "0") return `${progress}, untrained`;
  return planned !== null && Number(step) < EARLY * planned ? `${progress}, early in training` : progress;
}

export class CheckpointPicker {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.slider = slider("checkpoint", {
      min: 0,
      max: 0,
      step: 1,
      shown: (at) => page.model.checkpoints[at] ?? "",
      oninput: (at) => this.go(at),
    });
    this.slider.dataset.testid = "checkpoints";
    this.compareWith = h("select", {
      "aria-label": "compare with",
      data: { testid: "compare-with" },
      on: { change: () => page.state.set({ compare_with: this.compareWith.value }) },
    });
    this.choices = h("span", { class: "choices" }, this.slider, this.compareWith);
    this.stage = h("span", { class: "stage", role: "status", data: { testid: "stage" } });
    this.node = h("section", { class: "checkpoint-picker", "aria-label": "checkpoints" }, this.stage, this.choices);
    this.node.hidden = true; // until it is drawn
    if (page.model.run && !isSaved) setInterval(() => this.look(), OFTEN);
  }

  /** @param {number} at */
  go(at) {
    clearTimeout(this.pause);
    const { checkpoints } = this.page.model;
    this.pause = setTimeout(
      () => this.page.state.set({ checkpoint: at === checkpoints.length - 1 ? "" : checkpoints[at] }),
      150,
    );
  }

  draw() {
    const { model, state } = this.page;
    this.choices.hidden = model.checkpoints.length < 2;
    const stage = stageOf(this.page.checkpoints()[0], model.planned_steps);
    put(this.stage, stage);
    this.node.hidden = this.choices.hidden && !stage;
    const at = model.checkpoints.indexOf(state.values.checkpoint);
    this.slider.limit(Math.max(0, model.checkpoints.length - 1));
    this.slider.show(at < 0 ? model.checkpoints.length - 1 : at);
    const options = ["", ...model.checkpoints].map((name) =>
      h("option", { value: name }, name ? `with ${name}` : "compare with…"),
    );
    put(this.compareWith, options);
    this.compareWith.value = state.values.compare_with;
    live(this.choices);
  }

  /** Poll for new checkpoints of a running training. */
  async look() {
    if (document.hidden) return;
    try {
      const { checkpoints } = await request("checkpoints", {}, { fresh: true });
      if (JSON.stringify(checkpoints) === JSON.stringify(this.page.model.checkpoints)) return;
      const latest = !this.page.state.values.checkpoint;
      this.page.model.checkpoints = checkpoints;
      this.page.changed(new Set(latest ? ["checkpoint"] : []));
    } catch {
      // retried at the next poll
    }
  }
}
