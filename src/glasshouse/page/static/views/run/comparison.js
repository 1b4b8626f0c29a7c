// Comparison of two checkpoints on the text.

import { ink, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { placeholder, panel, token } from "glasshouse/widgets.js";
import { row, decodeTensor } from "glasshouse/tensor.js";
import { latest } from "glasshouse/views/run/metrics_store.js";

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function comparison(context) {
  const one = h("select", { "aria-label": "first checkpoint", data: { testid: "compare-one" } });
  const other = h("select", { "aria-label": "second checkpoint", data: { testid: "compare-other" } });
  const go = h(
    "button",
    {
      type: "button",
      class: "act first",
      data: { testid: "compare" },
      on: { click: () => context.set({ checkpoint: one.value, compare_with: other.value }) },
    },
    "compare",
  );
  const stop = h(
    "button",
    {
      type: "button",
      class: "act",
      data: { testid: "compare-stop" },
      on: { click: () => context.set({ compare_with: "" }) },
    },
    "stop comparing",
  );
  const found = h("div", { class: "view", data: { testid: "comparison" } });
  const node = panel(
    "Compare two checkpoints",
    "Differences between two checkpoints on your text; the other views show both side by side.",
    h("div", { class: "controls" }, h("label", {}, "from ", one), h("label", {}, "to ", other), go, stop),
    found,
  );
  return {
    node,
    async draw() {
      const names = latest().checkpoints.map((checkpoint) => checkpoint.name);
      const { compare_with: compareWith } = context.state;
      go.disabled = names.length < 2;
      stop.hidden = !compareWith;
      const pairs = [
        { select: one, value: compareWith ? context.checkpoint : names[0] },
        { select: other, value: compareWith || names[names.length - 1] },
      ];
      for (const { select, value } of pairs) {
        put(
          select,
          names.map((name) => h("option", { value: name }, name)),
        );
        select.value = value;
      }
      if (!compareWith) {
        put(found, names.length < 2 ? placeholder("There is only one checkpoint so far.") : null);
        return;
      }
      if (compareWith === context.checkpoint) {
        put(found, placeholder("Both are the same checkpoint; choose another one."));
        return;
      }
      const told = await context.request(
        "compare_checkpoints",
        { forward_pass: context.forwardPass({ unedited: true }), compare_with: compareWith },
        { topic: "" },
      );
      put(found, losses(context.checkpoint, compareWith, told), words(told), apart(told));
    },
  };
}

/** @type {(share: number) => { background: string, color: string }} */
const coloured = (share) => ({ background: shade(share), color: ink(share) });

/**
 * The mean loss at both checkpoints.
 * @param {string} one
 * @param {string} other
 * @param {CheckpointComparison} told
 * @returns {HTMLElement}
 */
function losses(one, other, told) {
  const [before, after] = told.losses;
  if (before === null) return h("p", {}, "Compared on the text above.");
  /** @type {(name: string, value: number) => HTMLElement} */
  const figure = (name, value) => h("b", { data: { testid: name, value } }, short(value));
  return h(
    "p",
    {},
    "On the text above, the mean loss per token is ",
    figure("loss-one", before),
    ` nats at ${one} and `,
    figure("loss-other", after),
    ` nats at ${other}.`,
  );
}

/**
 * KL divergence per token; empty where the model has no per-position logits.
 * @param {CheckpointComparison} told
 * @returns {Child[]}
 */
function words(told) {
  const divergence = decodeTensor(told.kl_divergence).data;
  const real = divergence.filter(Number.isFinite);
  if (!real.length) return [];
  const most = Math.max(1e-9, ...real);
  /** @type {(one: Token, i: number) => HTMLElement} */
  const word = (one, i) => {
    const said = `${one.text}: ${short(divergence[i])} nats`;
    const node = token(one, {
      class: "run-word",
      data: { value: divergence[i] },
      title: said,
      "aria-label": said,
      style: coloured(divergence[i] / most),
    });
    return h("span", { class: "run-worded" }, node, h("small", { class: "quiet" }, short(divergence[i])));
  };
  return [
    h("h3", {}, "KL divergence per token"),
    h("p", { class: "run-words", data: { testid: "divergence" } }, told.tokens.map(word)),
    h("p", { class: "legend" }, "KL divergence of the second checkpoint’s predictions from the first’s, in nats."),
  ];
}

/**
 * Attention and residual distances by layer.
 * @param {CheckpointComparison} told
 * @returns {Child[]}
 */
function apart(told) {
  const stream = decodeTensor(told.residual_distance);
  const heads = decodeTensor(told.pattern_distance);
  const [depth, across] = heads.shape;
  const lines = Array.from({ length: depth }, (_, layer) => {
    const distances = row(stream, layer + 1);
    const mean = distances.reduce((sum, value) => sum + value, 0) / distances.length;
    const cells = Array.from(row(heads, layer), (value) =>
      h("td", { data: { value }, style: coloured(value) }, percent(value)),
    );
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, `layer ${layer}`),
      cells,
      h("td", { class: "number", data: { value: mean } }, short(mean)),
    );
  });
  const top = h(
    "tr",
    {},
    h("th", {}),
    Array.from({ length: across }, (_, head) => h("th", { scope: "col" }, `head ${head}`)),
    h("th", { scope: "col" }, "residual"),
  );
  return [
    h("h3", {}, "Change in attention per head"),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "group", "aria-label": "change in attention per head" },
      h(
        "table",
        { class: "run-apart", data: { testid: "apart" } },
        h("thead", {}, top),
        h("tbody", {}, lines.reverse()),
      ),
    ),
    h(
      "p",
      { class: "legend" },
      "Heads: total variation distance of the attention weights, 0% to 100%. Residual: relative distance of the residual stream after each layer.",
    ),
  ];
}
