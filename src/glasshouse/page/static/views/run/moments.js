// Two moments of the run: where they part on the text.

import { ink, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { instead, panel, token } from "glasshouse/parts.js";
import { row, unpack } from "glasshouse/tensor.js";
import { log } from "glasshouse/views/run/log.js";

export function moments(glass) {
  const one = h("select", { "aria-label": "one moment", data: { testid: "compare-one" } });
  const other = h("select", { "aria-label": "another moment", data: { testid: "compare-other" } });
  const go = h("button", { type: "button", class: "act first", data: { testid: "compare" }, on: { click: () => glass.set({ moment: one.value, beside: other.value }) } }, "compare");
  const stop = h("button", { type: "button", class: "act", data: { testid: "compare-stop" }, on: { click: () => glass.set({ beside: "" }) } }, "stop comparing");
  const found = h("div", { class: "view", data: { testid: "difference" } });
  const node = panel("Two moments side by side", "Choose two moments of the run: here are the places where they part on your text, and every other view then shows both, side by side.", h("div", { class: "controls" }, h("label", {}, "from ", one), h("label", {}, "to ", other), go, stop), found);
  return {
    node,
    async draw() {
      const names = log.told.moments.map((moment) => moment.name);
      const { beside } = glass.state;
      go.disabled = names.length < 2;
      stop.hidden = !beside;
      for (const [select, value] of [[one, beside ? glass.moment : names[0]], [other, beside || names.at(-1)]]) {
        put(select, names.map((name) => h("option", { value: name }, name)));
        select.value = value;
      }
      if (!beside) {
        put(found, names.length < 2 ? instead("There is but one moment yet; more come with each checkpoint.") : null);
        return;
      }
      if (beside === glass.moment) {
        put(found, instead("Both are the same moment; choose another one."));
        return;
      }
      const told = await glass.ask("difference", { question: glass.question({ plain: true }), beside }, { topic: "" });
      put(found, losses(glass.moment, beside, told), words(told), apart(told));
    },
  };
}

const coloured = (share) => ({ background: shade(share), color: ink(share) });

/** What the text costs at either moment. */
function losses(one, other, told) {
  const [before, after] = told.losses;
  if (before === null) return h("p", {}, "The two moments are compared on the text above.");
  const figure = (name, value) => h("b", { data: { testid: name, value } }, short(value));
  return h("p", {}, "On the text above, each token costs ", figure("loss-one", before), ` nats at ${one} and `, figure("loss-other", after), ` nats at ${other}.`);
}

/** After which tokens the answers part; nothing where the model gives none at each token. */
function words(told) {
  const divergence = unpack(told.divergence).data;
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
  const stream = unpack(told.stream);
  const heads = unpack(told.heads);
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
