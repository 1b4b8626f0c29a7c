// How far each head is open, a row for each layer.

import { h, put } from "glasshouse/dom.js";
import { percent } from "glasshouse/number.js";

export function mount(context, root) {
  return {
    async draw() {
      const { layers } = await context.request("gates", { forward_pass: context.forwardPass() });
      const rows = layers.map((heads, layer) => h("tr", {}, h("th", {}, `layer ${layer}`), heads.map((open) => h("td", {}, percent(open)))));
      put(root, h("p", {}, "What the gate lets through of each head, averaged over the tokens."), h("table", { class: "gates" }, rows));
    },
  };
}
