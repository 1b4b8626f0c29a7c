// The logit lens at the selected token, before and after the edits.

import { h, put } from "glasshouse/dom.js";
import { percent } from "glasshouse/number.js";
import { panel, token } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function lens(context) {
  const column = h("div", {
    class: "scroll column-box",
    tabindex: "0",
    role: "group",
    "aria-label": "logit lens before and after",
    data: { testid: "column" },
  });
  const node = panel("Logit lens before and after", "Top prediction after each layer at the selected token.", column);

  return {
    node,
    async draw() {
      /** @type {(forwardPass: ForwardPass) => RequestBody} */
      const body = (forwardPass) => ({ forward_pass: forwardPass, start: context.token, stop: context.token + 1 });
      const [before, after] = await Promise.all([
        context.request("lens", body(context.forwardPass({ unedited: true }))),
        context.request("lens", body(context.forwardPass())),
      ]);
      /** @type {(found: LensResponse, layer: number) => HTMLElement[]} */
      const side = (found, layer) => {
        const [[id]] = found.tokens[layer];
        const probability = decodeTensor(found.probability).data[layer];
        return [
          h("td", {}, context.model.predicts_tokens ? token(found.token_info[id]) : found.token_info[id].text),
          h("td", { class: "number", data: { id, value: probability } }, percent(probability)),
        ];
      };
      const rows = before.layers.map((layer) => {
        const same = before.tokens[layer][0][0] === after.tokens[layer][0][0];
        return h(
          "tr",
          { class: same ? "" : "differs", data: { row: layer } },
          h("th", { scope: "row" }, layer ? `layer ${layer - 1}` : "embed"),
          side(before, layer),
          side(after, layer),
        );
      });
      const head = h("tr", {}, h("th", {}, ""), h("th", { colspan: 2 }, "before"), h("th", { colspan: 2 }, "after"));
      put(column, h("table", { class: "column" }, h("thead", {}, head), h("tbody", {}, rows.reverse())));
    },
  };
}
