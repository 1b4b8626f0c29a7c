// How answers are sampled, how they are steered, and which probe scores them.

import { h } from "glasshouse/dom.js";
import { choice, slider } from "glasshouse/widgets.js";

const STRONGEST = 4; // scale of a steering vector, either way
const FARTHEST = 10; // threshold of a probe, either way

/**
 * Sliders for what every request of the session says.
 * @param {ChatSession} session
 * @returns {Child[]}
 */
export function settings(session) {
  const { settings: now, most, vectors, steer } = session;
  /** @type {(label: string, name: keyof ChatSession["settings"], min: number, max: number, step: number, shown: (value: number) => string) => HTMLElement} */
  const one = (label, name, min, max, step, shown) => {
    const made = slider(label, {
      min,
      max,
      step,
      shown,
      oninput: (value) => {
        now[name] = value;
      },
    });
    made.show(now[name]);
    return made;
  };
  const sampling = [
    one("temperature", "temperature", 0, 2, 0.05, (value) => (value ? value.toFixed(2) : "greedy")),
    one("top-p", "top_p", 0.05, 1, 0.05, (value) => (value >= 1 ? "all" : value.toFixed(2))),
    one("top-k", "top_k", 0, 100, 1, (value) => (value ? String(value) : "all")),
    one("at most", "max_tokens", 1, most - 1, 1, (value) => `${value} tokens`),
  ];
  const steering = vectors.map((name) => {
    const made = slider(name, {
      min: -STRONGEST,
      max: STRONGEST,
      step: 0.1,
      shown: (value) => (value ? value.toFixed(1).replace("-", "−") : "off"),
      oninput: (value) => {
        steer[name] = value;
      },
    });
    made.show(steer[name] ?? 0);
    made.dataset.testid = `steer-${name}`;
    return made;
  });
  return [
    h("div", { class: "sampling" }, sampling),
    session.probes.length
      ? h("div", { class: "sampling", role: "group", "aria-label": "probe" }, probing(session))
      : null,
    steering.length
      ? h(
          "div",
          { class: "sampling steering", role: "group", "aria-label": "steering" },
          h("h3", {}, "Steering"),
          steering,
        )
      : null,
  ];
}

/**
 * The choice of a probe for the next answers, and the threshold that all are drawn by.
 * @param {ChatSession} session
 * @returns {Child[]}
 */
function probing(session) {
  /** @type {[string, string][]} */
  const options = [...session.probes.map((name) => /** @type {[string, string]} */ ([name, name])), ["", "none"]];
  const which = choice("probe", options, (name) => {
    session.probe = name;
    which.show(name);
  });
  which.show(session.probe);
  const threshold = slider("threshold", {
    min: -FARTHEST,
    max: FARTHEST,
    step: 0.1,
    shown: (value) => value.toFixed(1).replace("-", "−"),
    oninput: (value) => {
      session.threshold = value;
      session.redraw();
    },
  });
  threshold.show(session.threshold);
  return [h("h3", {}, "Probe"), which, threshold];
}
