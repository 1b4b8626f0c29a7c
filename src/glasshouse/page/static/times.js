// The moments of a run: a slider over its checkpoints, and a second one beside it.

import { ask, isSaved } from "glasshouse/asking.js";
import { h, put } from "glasshouse/dom.js";
import { slider } from "glasshouse/parts.js";

const OFTEN = 5000; // milliseconds between looks for new checkpoints

export class Times {
  constructor(page) {
    this.page = page;
    this.slider = slider("moment", { min: 0, max: 0, step: 1, shown: (at) => page.model.moments[at] ?? "", oninput: (at) => this.go(at) });
    this.slider.dataset.testid = "moments";
    this.beside = h("select", { "aria-label": "beside it", data: { testid: "beside" }, on: { change: () => page.state.set({ beside: this.beside.value }) } });
    this.node = h("section", { class: "times", "aria-label": "moments of the run" }, this.slider, h("label", { class: "slider" }, h("span", { class: "name" }, "beside it"), this.beside));
    this.node.hidden = page.model.moments.length < 2;
    if (page.model.run && !isSaved) setInterval(() => this.look(), OFTEN);
  }

  go(at) {
    clearTimeout(this.pause);
    const { moments } = this.page.model;
    this.pause = setTimeout(() => this.page.state.set({ moment: at === moments.length - 1 ? "" : moments[at] }), 150);
  }

  draw() {
    const { model, state } = this.page;
    this.node.hidden = model.moments.length < 2;
    const at = model.moments.indexOf(state.values.moment);
    this.slider.limit(Math.max(0, model.moments.length - 1));
    this.slider.show(at < 0 ? model.moments.length - 1 : at);
    const options = ["", ...model.moments].map((name) => h("option", { value: name }, name || "nothing"));
    put(this.beside, options);
    this.beside.value = state.values.beside;
  }

  /** A run that trains has new checkpoints now and then. */
  async look() {
    if (document.hidden) return;
    try {
      const { moments } = await ask("moments", {}, { fresh: true });
      if (JSON.stringify(moments) === JSON.stringify(this.page.model.moments)) return;
      const latest = !this.page.state.values.moment;
      this.page.model.moments = moments;
      this.page.changed(new Set(latest ? ["moment"] : []));
    } catch {
      // the next look may find it
    }
  }
}
