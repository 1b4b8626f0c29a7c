// Direct logit attribution: contributions to a logit by layer, and the largest of them.

import { h, put } from "glasshouse/dom.js";
import { clamp, short, signed } from "glasshouse/number.js";
import { bars, panel, token, tokenChooser } from "glasshouse/widgets.js";
import { row, decodeTensor } from "glasshouse/tensor.js";

const CANDIDATES = 12;
const LARGEST = 10;

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function logitAttribution(context) {
  const said = tokenChooser("token", "attributed-token", (residual_token) => context.set({ residual_token }));
  const incorrect = tokenChooser("minus logit of", "incorrect-token", (residual_incorrect_token) =>
    context.set({ residual_incorrect_token }),
  );
  const chart = h("div", {
    class: "sum",
    tabindex: "0",
    role: "group",
    "aria-label": "contributions by layer; move between heads with the arrow keys",
    data: { testid: "attribution" },
    on: { keydown: walk },
  });
  const chosen = h("p", { class: "quiet", role: "status", data: { testid: "attribution-chosen" } });
  const list = h("div", { data: { testid: "largest" } });
  /** @type {(kind: string, text: string) => HTMLElement} */
  const swatch = (kind, text) => h("span", {}, h("i", { class: `sum-${kind}` }), text);
  const cross = context.model.kind === "seq2seq" ? swatch("cross", "cross-attention head") : null;
  const legend = h(
    "div",
    { class: "legend" },
    swatch("heads", "head"),
    cross,
    swatch("ffn", "feed-forward"),
    swatch("start", "embedding and biases"),
    h("span", {}, "right of the line: positive; left: negative"),
  );
  const node = panel(
    "Direct logit attribution",
    "Contribution of the embedding, every head, every feed-forward layer and the biases to this logit (normalization scales frozen).",
    h("div", { class: "controls" }, h("label", {}, "logit of ", said), h("label", {}, "minus logit of ", incorrect)),
    legend,
    h(
      "div",
      { class: "sum-both" },
      h("div", {}, chart, chosen),
      h(
        "div",
        {},
        h("h3", {}, "Largest contributions"),
        h("p", { class: "quiet sum-names" }, "Head 1.3 is head 3 of layer 1; ffn is feed-forward."),
        list,
      ),
    ),
  );

  /** @param {KeyboardEvent} event */
  function walk(event) {
    const { layer, head } = context.state;
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[event.key];
    if (!by) return;
    event.preventDefault();
    if (by[1]) context.set({ head: clamp(head + by[1], context.model.n_heads - 1) });
    else context.set({ layer: clamp(layer + by[0], context.model.n_layers - 1) });
  }

  return {
    node,
    async draw() {
      const { residual_token, residual_incorrect_token, layer, head } = context.state;
      const here = { forward_pass: context.forwardPass(), position: context.token };
      /** @type {RequestBody} */
      const body = { ...here };
      if (Number.isInteger(residual_token)) body.token = residual_token;
      if (Number.isInteger(residual_incorrect_token)) body.incorrect_token = residual_incorrect_token;
      const [{ candidates }, found] = await Promise.all([
        context.request("next", { ...here, show: CANDIDATES }),
        context.request("logit_attribution", body),
      ]);
      said.show(candidates, residual_token, `top prediction: ${candidates[0].text}`);
      incorrect.show(candidates, residual_incorrect_token, "none");
      const groups = layersOf(found);
      const parts = groups.flatMap((one) => one.parts);
      chart.classList.toggle("few", groups.length <= 7);
      put(chart, drawn(context, groups, found));
      const lit = parts.filter((one) => one.layer === layer && (one.kind === "ffn" || one.head === head));
      /** @type {(one: Contribution) => string} */
      const called = (one) =>
        one.kind === "ffn" ? "feed-forward" : `${one.kind === "cross" ? "cross-attention " : ""}head ${one.head}`;
      put(
        chosen,
        `Layer ${layer}: `,
        lit.map((one, i) => [
          i ? ", " : "",
          `${called(one)} adds `,
          h("b", { data: { value: one.value } }, signed(one.value)),
        ]),
        ".",
      );
      const largest = parts.sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, LARGEST);
      const most = Math.abs(largest[0].value) || 1;
      put(
        list,
        bars(
          largest.map((one) => ({
            name: one.name,
            share: Math.abs(one.value) / most,
            value: one.value,
            text: signed(one.value),
            class: `${one.value < 0 ? "less" : "more"}${isChosen(context, one) ? " chosen" : ""}`,
            title: one.name,
            onclick: one.layer === undefined ? undefined : () => choose(context, one),
            data: { part: one.name },
          })),
          { label: "largest contributions", full: `${short(most)}, the largest` },
        ),
      );
    },
  };
}

/**
 * @param {ViewContext} context
 * @param {Contribution} part
 * @returns {boolean}
 */
function isChosen(context, part) {
  return part.layer === context.state.layer && part.head === context.state.head;
}

/**
 * @param {ViewContext} context
 * @param {Contribution} part
 */
function choose(context, { layer, head }) {
  context.set(head === undefined ? { layer } : { layer, head });
}

/**
 * Contributions by row, the lowest first: embedding and biases, then each layer.
 * @param {LogitAttribution} found
 * @returns {ContributionGroup[]}
 */
function layersOf(found) {
  const heads = decodeTensor(found.heads);
  const cross = found.cross_heads ? decodeTensor(found.cross_heads) : null;
  /** @type {(tensor: Tensor, kind: Contribution["kind"], name: string, layer: number) => Contribution[]} */
  const each = (tensor, kind, name, layer) =>
    Array.from(row(tensor, layer), (value, head) => ({ kind, name: `${name} ${layer}.${head}`, layer, head, value }));
  /** @type {Contribution[]} */
  const start = [
    { kind: "start", name: "embed", value: found.embedding },
    { kind: "start", name: "biases", value: found.bias },
  ];
  /** @type {Contribution[][]} */
  const layers = Array.from(decodeTensor(found.feedforward).data, (value, layer) => [
    ...each(heads, "heads", "head", layer),
    ...(cross ? each(cross, "cross", "cross head", layer) : []),
    { kind: "ffn", name: `ffn ${layer}`, layer, value },
  ]);
  /** @type {(parts: Contribution[]) => number} */
  const adding = (parts) => parts.reduce((total, one) => total + one.value, 0);
  return [
    { name: "start", parts: start, adds: adding(start) },
    ...layers.map((parts, layer) => ({ name: `layer ${layer}`, layer, parts, adds: adding(parts) })),
  ];
}

/**
 * Stacked bar chart, the last layer on top: contributions of each layer and the running sum.
 * @param {ViewContext} context
 * @param {ContributionGroup[]} groups
 * @param {LogitAttribution} found
 * @returns {Child[]}
 */
function drawn(context, groups, found) {
  /** @type {(side: number) => number} */
  const reach = (side) =>
    Math.max(...groups.map(({ parts }) => parts.reduce((total, one) => total + Math.max(0, side * one.value), 0)));
  const [near, far] = [reach(-1), reach(1)];
  const span = far + near || 1;
  const zero = near / span;
  let running = 0;
  const sums = groups.map(({ adds }) => {
    running += adds;
    return running;
  });
  const low = Math.min(0, ...sums);
  const whole = Math.max(0, ...sums) - low || 1;
  const lines = groups.map(({ name, layer, parts, adds }, i) => {
    const from = (Math.min(0, sums[i]) - low) / whole;
    return h(
      "div",
      { class: `sum-row${layer === context.state.layer ? " chosen" : ""}` },
      h("span", { class: "sum-name" }, name),
      h(
        "span",
        { class: "sum-track" },
        h("i", { class: "sum-zero", style: { left: `${100 * zero}%` } }),
        segments(context, parts, zero, span),
      ),
      h("span", { class: "figure", data: { value: adds } }, signed(adds)),
      h(
        "span",
        { class: "sum-so-far", "aria-hidden": "true" },
        h("i", { style: { left: `${100 * from}%`, width: `${(100 * Math.abs(sums[i])) / whole}%` } }),
      ),
      h("span", { class: "figure quiet", data: { value: sums[i] } }, short(sums[i])),
    );
  });
  const total = h(
    "div",
    { class: "sum-row sum-total" },
    h("span", { class: "sum-name" }, "total"),
    h(
      "span",
      { class: "sum-said" },
      "logit of ",
      token(found.token),
      found.incorrect_token ? [" minus logit of ", token(found.incorrect_token)] : null,
    ),
    h("span", {}),
    h("span", {}),
    h("b", { class: "figure", data: { testid: "logit", value: found.logit } }, short(found.logit)),
  );
  const top = h(
    "div",
    { class: "sum-row sum-top quiet" },
    h("span", {}),
    h("span", {}),
    h("span", { class: "figure" }, "adds"),
    h("span", {}),
    h("span", { class: "figure" }, "so far"),
  );
  return [top, total, lines.reverse()];
}

/**
 * Contributions of one layer: positive ones to the right of zero, negative ones to the left.
 * @param {ViewContext} context
 * @param {Contribution[]} parts
 * @param {number} zero
 * @param {number} span
 * @returns {HTMLElement[]}
 */
function segments(context, parts, zero, span) {
  let right = zero;
  let left = zero;
  return parts.map((one) => {
    const size = Math.abs(one.value) / span;
    const at = one.value >= 0 ? right : left - size;
    if (one.value >= 0) right += size;
    else left -= size;
    const on = isChosen(context, one);
    const properties = {
      class: `segment sum-${one.kind}${on ? " chosen" : ""}${(one.head ?? 0) % 2 ? " odd" : ""}`,
      style: { left: `${100 * at}%`, width: `${100 * size}%` },
      title: `${one.name}: ${signed(one.value)}`,
      data: { part: one.name, value: one.value },
    };
    if (one.layer === undefined) return h("span", properties);
    return h("button", {
      ...properties,
      type: "button",
      tabindex: "-1",
      "aria-label": `${one.name} adds ${signed(one.value)}`,
      "aria-pressed": on,
      on: { click: () => choose(context, one) },
    });
  });
}
