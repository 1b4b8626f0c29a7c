// How long the vector of the selected token is after each layer.

import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { bars, panel } from "glasshouse/parts.js";
import { unpack } from "glasshouse/tensor.js";
import { chosenRow, rowName, select } from "glasshouse/views/stream/selection.js";

export function lengths(glass) {
  const list = h("div", { class: "lengths", data: { testid: "norms" } });
  const node = panel("How long its vector is", "The length of the selected token’s vector after each layer, the last on top.", list);
  return {
    node,
    async draw() {
      const place = glass.token;
      const found = await glass.ask("norms", { question: glass.question(), start: place, stop: place + 1 });
      const values = unpack(found.norms).data;
      const most = Math.max(...values);
      const rows = found.layers.map((layer) => ({
        name: rowName(layer),
        share: values[layer] / most,
        value: values[layer],
        text: short(values[layer]),
        class: layer === chosenRow(glass) ? "chosen" : "",
        onclick: () => select(glass, place, layer),
        data: { row: layer },
      }));
      put(list, bars(rows.reverse(), { label: "length of the vector after each layer" }));
    },
  };
}
