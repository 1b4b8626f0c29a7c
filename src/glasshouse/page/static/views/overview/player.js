// Play: light the picture layer by layer, from the tokens to the predictions.

import { h, put } from "glasshouse/dom.js";

const BEAT = 700; // milliseconds a layer
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  constructor() {
    this.button = h("button", {
      type: "button",
      class: "act",
      data: { testid: "play" },
      on: { click: () => this.press() },
    });
    this.said = h("span", { class: "quiet", role: "status" });
    this.node = h("p", { class: "play" }, this.button, this.said);
    this.at = -1; // the layer that is lit; -1: all of them
    /** @type {SVGSVGElement | null} */
    this.drawn = null;
    /** @type {Flow[]} */
    this.flows = [];
    /** @type {HTMLElement | null} */
    this.body = null;
    /** @type {ReturnType<typeof setInterval> | undefined} */
    this.timer = undefined;
    this.light(-1);
  }

  /**
   * @param {SVGSVGElement} drawn
   * @param {Flow[]} flows
   * @param {HTMLElement} body
   */
  show(drawn, flows, body) {
    this.drawn = drawn;
    this.flows = flows;
    this.body = body;
    this.light(this.at);
  }

  /** The layers in the order in which they are computed: the encoder's first. */
  get order() {
    return this.flows.flatMap((flow) =>
      Array.from({ length: flow.layers }, (_, layer) => ({ stack: flow.name, layer, isPair: this.flows.length > 1 })),
    );
  }

  /** Start or stop; where motion is unwanted, go one layer further. */
  press() {
    if (still.matches) this.light(this.at + 1 < this.order.length ? this.at + 1 : -1);
    else if (this.timer) this.stop();
    else {
      this.light(0);
      this.timer = setInterval(() => {
        if (this.at + 1 < this.order.length) this.light(this.at + 1);
        else this.stop();
      }, BEAT);
      this.light(0);
    }
  }

  stop() {
    clearInterval(this.timer);
    this.timer = undefined;
    this.light(-1);
  }

  /** @param {number} at */
  light(at) {
    this.at = at;
    const { order } = this;
    const now = order[at];
    this.drawn?.classList.toggle("playing", at >= 0);
    this.body?.classList.toggle("playing", at >= 0 && at + 1 < order.length);
    for (const node of this.drawn?.querySelectorAll(".layer") ?? []) {
      const stack = node.closest("[data-stack]")?.dataset.stack;
      const number = order.findIndex((one) => one.stack === stack && one.layer === Number(node.dataset.layer));
      node.classList.toggle("before", number < at);
      node.classList.toggle("now", number === at);
    }
    put(this.button, still.matches ? (at < 0 ? "▸ Step" : "▸ Next layer") : this.timer ? "■ Stop" : "▶ Play");
    put(this.said, now ? `${now.isPair ? `${now.stack}, ` : ""}layer ${now.layer} adds to every column` : "");
  }
}
