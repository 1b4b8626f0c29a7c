// One head large, as a map.

import { isSaved, Superseded } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { Heatmap } from "glasshouse/heatmap.js";
import { short } from "glasshouse/number.js";
import { numberLabel, token } from "glasshouse/widgets.js";
import { SCORES } from "glasshouse/views/attention/selection.js";

export function map(selection) {
  const { context } = selection;
  const title = h("h2", { data: { testid: "head-title" } });
  const facts = h("p", { class: "quiet facts", data: { testid: "head-facts" } });
  const status = h("p", { class: "readout", role: "status", "aria-live": "polite", data: { testid: "cell" } });
  const heatmap = new Heatmap({ label: "map of one head; arrow keys move, Enter selects, plus and minus zoom", read: show, pick: (query, key) => selection.choose({ query, key }) });
  heatmap.node.dataset.testid = "map";
  const button = (text, label, act) => h("button", { type: "button", class: "tool", "aria-label": label, data: { testid: label.replace(" ", "-") }, on: { click: act } }, text);
  const tools = h("span", { class: "zoom" }, button("−", "zoom out", () => heatmap.step(-1)), button("+", "zoom in", () => heatmap.step(1)), button("close up", "close up", () => heatmap.closeUp()), button("whole", "whole map", () => heatmap.fit()));
  const about = h("p", { class: "about" });
  const node = h("section", { class: "panel large" }, h("div", { class: "headline" }, title, tools), about, facts, heatmap.node, status);
  let known = null; // the weight of the selected pair

  function show(cell) {
    const { queries, keys } = selection;
    if (!cell) {
      if (known === null) return;
      cell = { row: selection.query, column: selection.key, side: 1, value: known };
    }
    const { row, column, side, value } = cell;
    const hides = value < 0;
    Object.assign(status.dataset, { query: row, key: column, side, value: value === undefined || hides ? "" : value });
    if (side > 1) {
      const to = (start, tokens) => Math.min(start + side, tokens.length) - 1;
      put(status, `tokens ${row}–${to(row, queries)} on ${column}–${to(column, keys)}: `, value === undefined ? "…" : hides ? "may not be seen" : ["at most ", h("b", {}, short(value))]);
      return;
    }
    put(status, token(queries[row], { class: "selected" }), ` ${row} looks at `, token(keys[column], { class: "compared" }), ` ${column}: `, value === undefined ? "…" : hides ? "may not, it comes later" : ["weight ", h("b", {}, short(value))]);
  }

  return {
    node,
    async draw() {
      const { kind, layer, head, query, key, queries, keys } = selection;
      put(title, `Layer ${layer}, head ${head}`);
      put(about, `Each row is a token that looks, and its weights add up to 1. ${kind.causal ? "It sees itself and what came before." : kind.queries === kind.keys ? "It sees the whole text, on both sides." : "It is one of the target, and sees the whole source."} Click a cell to follow it below.`);
      const name = JSON.stringify(selection.place);
      known = null;
      show(heatmap.cursor && document.activeElement === heatmap.node ? heatmap.at(query, key) : null);
      const shown = heatmap.show({
        name,
        rows: queries,
        columns: keys,
        row: query,
        column: key,
        scale: selection.scale,
        normalize: selection.normalize,
        fetch: (level, row, column) => selection.requestTile(level, row, column).catch(absent),
        isEmpty: kind.causal ? (row, column) => column > row : undefined,
      });
      const [found, scores] = await Promise.all([
        selection.requestQueryKey(),
        context.request("scores", { forward_pass: context.forwardPass(), attention: kind.site }).catch((error) => {
          if (error instanceof Superseded) throw error;
          return null;
        }),
        shown,
      ]);
      known = found.bias === null ? -1 : found.weight;
      show(null);
      const one = scores?.heads[layer][head] ?? {};
      put(facts, [...Object.keys(SCORES), "entropy"].filter((each) => one[each] !== undefined).map((each) => h("span", { class: each === one.label ? "chosen" : "", title: `a head that looks everywhere alike: ${short(scores.uniform[layer][each])}` }, `${each} `, numberLabel(one[each], `score-${each}`), each === "entropy" ? " nats" : "")));
    },
    close: () => heatmap.close(),
  };
}

/** A saved page has some tiles: without the others the map is coarser. */
function absent(error) {
  if (isSaved && !(error instanceof Superseded)) return null;
  throw error;
}
