// How long the vector of the selected token is after each layer.

import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { bars, panel } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { chosenRow, rowName, select } from "glasshouse/views/residual/selection.js";

export function normByLayer(context) {
  const list = h("div", { class: "norm-by-layer", data: { testid: "norms" } });
  const node = panel("How long its vector is", "The length of the selected token’s vector after each layer, the last on top.", list);
  return {
    node,
    async draw() {
      const place = context.token;
      const found = await context.request("norms", { forward_pass: context.forwardPass(), start: place, stop: place + 1 });
      const values = decodeTensor(found.norms).data;
      const most = Math.max(...values);
      const rows = found.layers.map((layer) => ({
        name: rowName(layer),
        share: values[layer] / most,
        value: values[layer],
        text: short(values[layer]),
        class: layer === chosenRow(context) ? "chosen" : "",
        onclick: () => select(context, place, layer),
        data: { row: layer },
      }));
      put(list, bars(rows.reverse(), { label: "length of the vector after each layer" }));
    },
  };
}
