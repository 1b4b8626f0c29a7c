// What the heads learn: one figure of each, over the steps.

import { h, put, s } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { choice, placeholder, panel } from "glasshouse/widgets.js";
import { checkpointLog } from "glasshouse/views/run/metrics_store.js";
import { whole } from "glasshouse/views/run/step.js";

const FIGURES = {
  entropy: { title: "looks widely", about: "How widely each head looks, as the entropy of its weights: 0 is one token, more is many.", unit: "nats" },
  previous: { title: "looks back by one", about: "How much weight each head puts on the token just before.", unit: "share of the weight" },
  induction: { title: "looks for repetition", about: "How much weight each head puts on what followed the same token before: such heads can copy.", unit: "share of the weight" },
};

export function heads(context) {
  const pick = h("div", {});
  const about = h("p", { class: "about" });
  const grid = h("div", { class: "run-heads scroll", tabindex: "0", role: "group", "aria-label": "heads over time", data: { testid: "run-heads" } });
  const legend = h("p", { class: "legend" });
  const node = panel("What the heads learn", null, pick, about, grid, legend);
  let buttons = null;
  let offered = 0;
  async function draw() {
    const { heads: figures, steps } = await checkpointLog("probes");
    const names = Object.keys(FIGURES).filter((name) => name in figures);
    if (!names.length) {
      put(grid, placeholder("No figures of heads are written down yet; the first come with the first checkpoint."));
      return;
    }
    if (offered !== names.length) {
      buttons = choice("figure", names.map((name) => [name, FIGURES[name].title]), (name) => context.set({ run_score: name }));
      offered = names.length;
      put(pick, buttons);
    }
    const name = [context.state.run_score, "induction"].find((one) => names.includes(one)) ?? names[0];
    buttons.show(name);
    put(about, FIGURES[name].about);
    const lines = figures[name];
    const depth = lines.reduce((most, one) => Math.max(most, one?.length ?? 0), 0);
    const n = context.model.n_heads;
    const most = Math.max(1e-9, ...lines.filter(Boolean).flat(2).filter((value) => value !== null));
    const cells = [];
    for (let layer = depth - 1; layer >= 0; layer -= 1) {
      cells.push(h("span", { class: "run-layer quiet" }, `layer ${layer}`));
      for (let head = 0; head < n; head += 1) cells.push(cell(context, name, layer, head, lines.map((line) => line?.[layer]?.[head] ?? null), steps, most));
    }
    put(grid, h("div", { class: "run-grid", style: { "grid-template-columns": `max-content repeat(${n}, minmax(58px, 1fr))` } }, cells));
    put(legend, `Each box is a head over the steps ${whole(steps[0])} to ${whole(steps.at(-1))}, from 0 at the bottom to ${short(most)} at the top (${FIGURES[name].unit}); the number is the latest. Choose one, and all views show that head.`);
  }
  return { node, draw, grow: draw };
}

/** One head: its figure over the steps as a small line, and the latest as a number. */
function cell(context, name, layer, head, values, steps, most) {
  const span = Math.max(1, steps.at(-1) - steps[0]);
  const points = values.map((value, i) => (value === null ? null : [2 + (56 * (steps[i] - steps[0])) / span, 29 - (26 * value) / most])).filter(Boolean);
  const line = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  const last = values.findLast((value) => value !== null) ?? null;
  const first = values.find((value) => value !== null) ?? null;
  const on = context.state.layer === layer && context.state.head === head;
  return h(
    "button",
    { type: "button", class: on ? "run-cell on" : "run-cell", "aria-pressed": String(on), "aria-label": `layer ${layer}, head ${head}: ${name} ${short(first)} at step ${steps[0]}, ${short(last)} at step ${steps.at(-1)}`, data: { testid: `cell-${layer}-${head}`, value: last ?? "", values: JSON.stringify(values) }, on: { click: () => context.set({ layer, head, attention: "" }) } },
    s("svg", { viewBox: "0 0 60 32", preserveAspectRatio: "none", "aria-hidden": "true" }, points.length ? [s("path", { class: "run-fill", d: `M${points[0][0].toFixed(1)} 30L${line}L${points.at(-1)[0].toFixed(1)} 30Z` }), s("path", { class: "run-spark", d: `M${line}` })] : []),
    h("span", { class: "run-number" }, short(last)),
  );
}
