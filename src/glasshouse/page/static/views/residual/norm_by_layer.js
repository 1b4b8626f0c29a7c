// The residual norm of the selected token after each layer.

import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { bars, panel } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { chosenRow, rowName, select } from "glasshouse/views/residual/selection.js";

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function normByLayer(context) {
  const list = h("div", { class: "norm-by-layer", data: { testid: "norms" } });
  const node = panel(
    "Residual norm by layer",
    "Norm of the residual stream at the selected token, the last layer on top.",
    list,
  );
  return {
    node,
    async draw() {
      const place = context.token;
      const found = await context.request("norms", {
        forward_pass: context.forwardPass(),
        start: place,
        stop: place + 1,
      });
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
      put(
        list,
        bars(rows.reverse(), { label: "residual norm after each layer", full: `${short(most)}, the largest norm` }),
      );
    },
  };
}
