// Two checkpoints of the run: where they part on the text.

import { ink, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { placeholder, panel, token } from "glasshouse/widgets.js";
import { row, decodeTensor } from "glasshouse/tensor.js";
import { store } from "glasshouse/views/run/metrics_store.js";

export function comparison(context) {
  const one = h("select", { "aria-label": "one checkpoint", data: { testid: "compare-one" } });
  const other = h("select", { "aria-label": "another checkpoint", data: { testid: "compare-other" } });
  const go = h("button", { type: "button", class: "act first", data: { testid: "compare" }, on: { click: () => context.set({ checkpoint: one.value, compare_with: other.value }) } }, "compare");
  const stop = h("button", { type: "button", class: "act", data: { testid: "compare-stop" }, on: { click: () => context.set({ compare_with: "" }) } }, "stop comparing");
  const found = h("div", { class: "view", data: { testid: "comparison" } });
  const node = panel("Two checkpoints side by side", "Choose two checkpoints of the run: here are the places where they part on your text, and every other view then shows both, side by side.", h("div", { class: "controls" }, h("label", {}, "from ", one), h("label", {}, "to ", other), go, stop), found);
  return {
    node,
    async draw() {
      const names = store.latest.checkpoints.map((checkpoint) => checkpoint.name);
      const { compare_with: compareWith } = context.state;
      go.disabled = names.length < 2;
      stop.hidden = !compareWith;
      for (const [select, value] of [[one, compareWith ? context.checkpoint : names[0]], [other, compareWith || names.at(-1)]]) {
        put(select, names.map((name) => h("option", { value: name }, name)));
        select.value = value;
      }
      if (!compareWith) {
        put(found, names.length < 2 ? placeholder("There is but one checkpoint yet; more come with each checkpoint.") : null);
        return;
      }
      if (compareWith === context.checkpoint) {
        put(found, placeholder("Both are the same checkpoint; choose another one."));
        return;
      }
      const told = await context.request("compare_checkpoints", { forward_pass: context.forwardPass({ unedited: true }), compare_with: compareWith }, { topic: "" });
      put(found, losses(context.checkpoint, compareWith, told), words(told), apart(told));
    },
  };
}

const coloured = (share) => ({ background: shade(share), color: ink(share) });

/** What the text costs at either checkpoint. */
function losses(one, other, told) {
  const [before, after] = told.losses;
  if (before === null) return h("p", {}, "The two checkpoints are compared on the text above.");
  const figure = (name, value) => h("b", { data: { testid: name, value } }, short(value));
  return h("p", {}, "On the text above, each token costs ", figure("loss-one", before), ` nats at ${one} and `, figure("loss-other", after), ` nats at ${other}.`);
}

/** After which tokens the answers part; nothing where the model gives none at each token. */
function words(told) {
  const divergence = decodeTensor(told.kl_divergence).data;
  const real = divergence.filter(Number.isFinite);
  if (!real.length) return [];
  const most = Math.max(1e-9, ...real);
  const word = (one, i) => {
    const said = `${one.text}: ${short(divergence[i])} nats`;
    const node = token(one, { class: "run-word", data: { value: divergence[i] }, title: said, "aria-label": said, style: coloured(divergence[i] / most) });
    return h("span", { class: "run-worded" }, node, h("small", { class: "quiet" }, short(divergence[i])));
  };
  return [
    h("h3", {}, "After which tokens the answers part"),
    h("p", { class: "run-words", data: { testid: "divergence" } }, told.tokens.map(word)),
    h("p", { class: "legend" }, "Divergence of the second’s predictions from the first’s, in nats: 0 is the same answer."),
  ];
}

/** How far heads and stream are apart, layer by layer. */
function apart(told) {
  const stream = decodeTensor(told.residual_distance);
  const heads = decodeTensor(told.pattern_distance);
  const [depth, across] = heads.shape;
  const lines = Array.from({ length: depth }, (_, layer) => {
    const distances = row(stream, layer + 1);
    const mean = distances.reduce((sum, value) => sum + value, 0) / distances.length;
    const cells = Array.from(row(heads, layer), (value) => h("td", { data: { value }, style: coloured(value) }, percent(value)));
    return h("tr", {}, h("th", { scope: "row" }, `layer ${layer}`), cells, h("td", { class: "number", data: { value: mean } }, short(mean)));
  });
  const top = h("tr", {}, h("th", {}), Array.from({ length: across }, (_, head) => h("th", { scope: "col" }, `head ${head}`)), h("th", { scope: "col" }, "stream"));
  return [
    h("h3", {}, "Which heads look elsewhere"),
    h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "heads that look elsewhere" }, h("table", { class: "run-apart", data: { testid: "apart" } }, h("thead", {}, top), h("tbody", {}, lines.reverse()))),
    h("p", { class: "legend" }, "Of a head: how much of its attention moved to other tokens, 0% to 100%. Stream: how far the vectors are apart after a layer, where 1 is as far as from zero."),
  ];
}
