// Attention: small maps of all heads, one head as a heatmap and as lines, and one query-key pair.

import { preamble, within } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { python } from "glasshouse/widgets.js";
import { heads } from "glasshouse/views/attention/heads.js";
import { lines } from "glasshouse/views/attention/lines.js";
import { map } from "glasshouse/views/attention/map.js";
import { queryKey } from "glasshouse/views/attention/query_key.js";
import { row } from "glasshouse/views/attention/row.js";
import { Selection } from "glasshouse/views/attention/selection.js";

const MANY = 8; // heads that fit next to a map

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const selection = new Selection(context);
  const [all, large, over, one, two] = [heads, map, lines, row, queryKey].map((part) => part(selection));
  const parts = [large, one, two, over, all]; // the selected head is requested before the small maps
  const code = h("div", { class: "code" });
  /** @type {(...some: Part[]) => HTMLElement} */
  const column = (...some) =>
    h(
      "div",
      { class: "column" },
      some.map((part) => part.node),
    );
  // Many heads take the full width.
  const many = context.model.n_heads > MANY;
  const columns = many ? [column(over, one), column(large)] : [column(all, over), column(large, one)];
  root.append(
    h(
      "div",
      { class: many ? "attention many" : "attention" },
      many ? all.node : null,
      h("div", { class: "side-by-side" }, columns),
      two.node,
      code,
    ),
  );
  const stopTheme = onTheme(() => Promise.resolve(two.draw(new Set())).catch(() => {})); // its cells are coloured
  return {
    async draw(changed) {
      await Promise.all(parts.map((part) => part.draw(changed)));
      put(code, python(await inPython(selection)));
    },
    close() {
      stopTheme();
      for (const part of parts) part.close?.();
    },
  };
}

/**
 * The same in Python.
 * @param {AttentionSelection} selection
 * @returns {Promise<string>}
 */
async function inPython(selection) {
  const { context, kind, layer, head, query, key } = selection;
  /** @type {(name: string) => string} */
  const site = (name) => `"${kind.site.replace("pattern", name)}.${layer}"`;
  const { lines: said, inputs } = preamble(context);
  const work = [
    `with gh.record(model, ${["q", "k", "v", "scores", "pattern", "z"].map(site).join(", ")}) as seen:`,
    `    model(${inputs})`,
    `weight = seen[${site("pattern")}][0, ${head}, ${query}, ${key}]`,
  ];
  const stack = kind.site.startsWith("encoder.") ? `, stack="encoder"` : "";
  if (!kind.site.includes("cross_"))
    work.push(
      `scores = gh.head_scores(model, ${inputs}${stack})  # current_token, previous, first, duplicate, induction, normalized_entropy; head_types`,
    );
  return [...said, ...(await within(context, work))].join("\n");
}
