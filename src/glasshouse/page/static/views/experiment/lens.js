// What the model would say after each layer, at the selected token, before and after.

import { h, put } from "glasshouse/dom.js";
import { percent } from "glasshouse/number.js";
import { panel, token } from "glasshouse/parts.js";
import { unpack } from "glasshouse/tensor.js";

export function lens(glass) {
  const column = h("div", { class: "scroll column-box", tabindex: "0", role: "group", "aria-label": "the lens before and after", data: { testid: "column" } });
  const node = panel("What it would say after each layer", "The lens at the selected token, before and after.", column);

  return {
    node,
    async draw() {
      const body = (question) => ({ question, start: glass.token, stop: glass.token + 1 });
      const [before, after] = await Promise.all([glass.ask("lens", body(glass.question({ plain: true }))), glass.ask("lens", body(glass.question()))]);
      const side = (found, layer) => {
        const [[id]] = found.tokens[layer];
        const probability = unpack(found.probability).data[layer];
        return [h("td", {}, glass.model.speaks ? token(found.words[id]) : found.words[id].text), h("td", { class: "number", data: { id, value: probability } }, percent(probability))];
      };
      const rows = before.layers.map((layer) => {
        const same = before.tokens[layer][0][0] === after.tokens[layer][0][0];
        return h("tr", { class: same ? "" : "differs", data: { row: layer } }, h("th", { scope: "row" }, layer ? `layer ${layer - 1}` : "embed"), side(before, layer), side(after, layer));
      });
      const head = h("tr", {}, h("th", {}, ""), h("th", { colspan: 2 }, "before"), h("th", { colspan: 2 }, "after"));
      put(column, h("table", { class: "column" }, h("thead", {}, head), h("tbody", {}, rows.reverse())));
    },
  };
}
