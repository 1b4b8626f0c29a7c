// Head scores during training.

import { h, put, s } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { choice, placeholder, panel } from "glasshouse/widgets.js";
import { checkpointLog } from "glasshouse/views/run/metrics_store.js";
import { whole } from "glasshouse/views/run/step.js";

/** @type {Record<string, { title: string, about: string, unit: string }>} */
const SCORES = {
  entropy: {
    title: "entropy",
    about: "Entropy of the attention weights: 0 is a single key, higher is broader.",
    unit: "nats",
  },
  previous_token: {
    title: "previous token",
    about: "Attention weight on the previous token.",
    unit: "attention weight",
  },
  induction: {
    title: "induction",
    about: "Attention weight on the token after an earlier occurrence of the current token.",
    unit: "attention weight",
  },
};

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function heads(context) {
  const pick = h("div", {});
  const about = h("p", { class: "about" });
  const grid = h("div", {
    class: "run-heads scroll",
    tabindex: "0",
    role: "group",
    "aria-label": "head scores over steps",
    data: { testid: "run-heads" },
  });
  const legend = h("p", { class: "legend" });
  const node = panel("Head scores during training", null, pick, about, grid, legend);
  /** @type {Choice<string> | null} */
  let buttons = null;
  let offered = 0;
  async function draw() {
    const { heads: scores, steps } = await checkpointLog("probes");
    const names = Object.keys(SCORES).filter((name) => name in scores);
    if (!names.length) {
      put(grid, placeholder("No head scores yet; they are logged with each checkpoint."));
      return;
    }
    if (offered !== names.length) {
      buttons = choice(
        "score",
        names.map((name) => [name, SCORES[name].title]),
        (name) => context.set({ run_score: name }),
      );
      offered = names.length;
      put(pick, buttons);
    }
    const name = [context.state.run_score ?? "", "induction"].find((one) => names.includes(one)) ?? names[0];
    buttons?.show(name);
    put(about, SCORES[name].about);
    const lines = scores[name];
    const depth = lines.reduce((most, one) => Math.max(most, one?.length ?? 0), 0);
    const n = context.model.n_heads;
    const most = Math.max(
      1e-9,
      ...lines
        .filter(Boolean)
        .flat(2)
        .filter((value) => value !== null),
    );
    /** @type {HTMLElement[]} */
    const cells = [];
    for (let layer = depth - 1; layer >= 0; layer -= 1) {
      cells.push(h("span", { class: "run-layer quiet" }, `layer ${layer}`));
      for (let head = 0; head < n; head += 1)
        cells.push(
          cell(
            context,
            name,
            layer,
            head,
            lines.map((line) => line?.[layer]?.[head] ?? null),
            steps,
            most,
          ),
        );
    }
    put(
      grid,
      h(
        "div",
        { class: "run-grid", style: { "grid-template-columns": `max-content repeat(${n}, minmax(58px, 1fr))` } },
        cells,
      ),
    );
    put(
      legend,
      `Each box is one head over steps ${whole(steps[0])} to ${whole(steps[steps.length - 1])}, from 0 to ${short(most)} (${SCORES[name].unit}), with the latest value. Click to select the head in all views.`,
    );
  }
  return { node, draw, grow: draw };
}

/**
 * One head: its score over the steps as a sparkline, and the latest value.
 * @param {ViewContext} context
 * @param {string} name
 * @param {number} layer
 * @param {number} head
 * @param {(number | null)[]} values
 * @param {number[]} steps
 * @param {number} most
 * @returns {HTMLElement}
 */
function cell(context, name, layer, head, values, steps, most) {
  const last = steps[steps.length - 1];
  const span = Math.max(1, last - steps[0]);
  const points = values.flatMap((value, i) =>
    value === null ? [] : [{ x: 2 + (56 * (steps[i] - steps[0])) / span, y: 29 - (26 * value) / most }],
  );
  const line = points.map(({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  const newest = values.findLast((value) => value !== null) ?? null;
  const first = values.find((value) => value !== null) ?? null;
  const on = context.state.layer === layer && context.state.head === head;
  return h(
    "button",
    {
      type: "button",
      class: on ? "run-cell on" : "run-cell",
      "aria-pressed": String(on),
      "aria-label": `layer ${layer}, head ${head}: ${name} ${short(first)} at step ${steps[0]}, ${short(newest)} at step ${last}`,
      data: { testid: `cell-${layer}-${head}`, value: newest ?? "", values: JSON.stringify(values) },
      on: { click: () => context.set({ layer, head, attention: "" }) },
    },
    s(
      "svg",
      { viewBox: "0 0 60 32", preserveAspectRatio: "none", "aria-hidden": "true" },
      points.length
        ? [
            s("path", {
              class: "run-fill",
              d: `M${points[0].x.toFixed(1)} 30L${line}L${points[points.length - 1].x.toFixed(1)} 30Z`,
            }),
            s("path", { class: "run-spark", d: `M${line}` }),
          ]
        : [],
    ),
    h("span", { class: "run-number" }, short(newest)),
  );
}
