// Direct logit attribution: contributions to a logit by layer, and the largest of them.

import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { bars, panel, token } from "glasshouse/widgets.js";
import { row, decodeTensor } from "glasshouse/tensor.js";

const CANDIDATES = 12;
const LARGEST = 10;

export function logitAttribution(context) {
  const said = chooser("token", "attributed-token", (residual_token) => context.set({ residual_token }));
  const incorrect = chooser("minus logit of", "incorrect-token", (residual_incorrect_token) =>
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

  function walk(event) {
    const { layer, head } = context.state;
    const to = {
      ArrowLeft: { head: head - 1 },
      ArrowRight: { head: head + 1 },
      ArrowUp: { layer: layer + 1 },
      ArrowDown: { layer: layer - 1 },
    }[event.key];
    if (!to) return;
    event.preventDefault();
    const clamp = (value, most) => Math.max(0, Math.min(most, value));
    if ("head" in to) context.set({ head: clamp(to.head, context.model.n_heads - 1) });
    else context.set({ layer: clamp(to.layer, context.model.n_layers - 1) });
  }

  return {
    node,
    async draw() {
      const { residual_token, residual_incorrect_token, layer, head } = context.state;
      const here = { forward_pass: context.forwardPass(), position: context.token };
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
      const called = (one) =>
        ({ ffn: "feed-forward", cross: `cross-attention head ${one.head}` })[one.kind] ?? `head ${one.head}`;
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
          { label: "largest contributions" },
        ),
      );
    },
  };
}

/** A select of candidate tokens, or none. `show(rows, id, none)` sets the options and the selection. */
function chooser(label, testid, onchange) {
  const node = h("select", {
    "aria-label": label,
    data: { testid },
    on: { change: () => onchange(node.value === "" ? undefined : Number(node.value)) },
  });
  node.show = (rows, id, none) => {
    const options = [
      h("option", { value: "" }, none),
      ...rows.map((one) => h("option", { value: one.id }, `${one.text} · ${percent(one.probability)}`)),
    ];
    if (Number.isInteger(id) && !rows.some((one) => one.id === id))
      options.push(h("option", { value: id }, `id ${id}`));
    put(node, options);
    node.value = Number.isInteger(id) ? id : "";
  };
  return node;
}

function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value);
}

function isChosen(context, part) {
  return part.layer === context.state.layer && part.head === context.state.head;
}

function choose(context, { layer, head }) {
  context.set(head === undefined ? { layer } : { layer, head });
}

/** Contributions by row, the lowest first: embedding and biases, then each layer. */
function layersOf(found) {
  const heads = decodeTensor(found.heads);
  const cross = found.cross_heads ? decodeTensor(found.cross_heads) : null;
  const each = (tensor, kind, name, layer) =>
    Array.from(row(tensor, layer), (value, head) => ({ kind, name: `${name} ${layer}.${head}`, layer, head, value }));
  const start = [
    { kind: "start", name: "embed", value: found.embedding },
    { kind: "start", name: "biases", value: found.bias },
  ];
  const layers = Array.from(decodeTensor(found.feedforward).data, (value, layer) => [
    ...each(heads, "heads", "head", layer),
    ...(cross ? each(cross, "cross", "cross head", layer) : []),
    { kind: "ffn", name: `ffn ${layer}`, layer, value },
  ]);
  const adding = (parts) => parts.reduce((total, one) => total + one.value, 0);
  return [
    { name: "start", parts: start, adds: adding(start) },
    ...layers.map((parts, layer) => ({ name: `layer ${layer}`, layer, parts, adds: adding(parts) })),
  ];
}

/** Stacked bar chart, the last layer on top: contributions of each layer and the running sum. */
function drawn(context, groups, found) {
  const reach = (side) =>
    Math.max(...groups.map(({ parts }) => parts.reduce((total, one) => total + Math.max(0, side * one.value), 0)));
  const [near, far] = [reach(-1), reach(1)];
  const span = far + near || 1;
  const zero = near / span;
  let running = 0;
  const sums = groups.map(({ adds }) => (running += adds));
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

/** Contributions of one layer: positive ones to the right of zero, negative ones to the left. */
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
      class: `segment sum-${one.kind}${on ? " chosen" : ""}${one.head % 2 ? " odd" : ""}`,
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
