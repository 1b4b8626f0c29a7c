// One layer at the selected token: the stream before, what each head reads and adds, feed-forward, the stream after.

import { headColour } from "glasshouse/colour.js";
import { h } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { row, decodeTensor } from "glasshouse/tensor.js";
import { panel, token } from "glasshouse/widgets.js";
import { PARTS } from "glasshouse/views/overview/flow.js";
import { shown } from "glasshouse/views/overview/reading.js";

const KEYS = 4; // keys that are listed for each head

/**
 * @param {AttentionSelection} selection
 * @param {Flow} flow
 * @param {LensResponse | null} lens
 * @param {(where: Zoom) => void} zoom
 * @returns {Promise<HTMLElement>}
 */
export async function layerPanel(selection, flow, lens, zoom) {
  const { context, layer } = selection;
  const place = flow.isLast ? context.token : selection.query;
  /** @type {(row: number) => HTMLElement} */
  const stream = (row) =>
    h(
      "p",
      { class: "flow-stage" },
      h("b", {}, row === layer ? "Residual stream in" : "Residual stream out"),
      ` at `,
      token(flow.tokens[place], { class: "selected" }),
      `, length ${short(flow.length(row, place))}`,
      lens && flow.isLast
        ? [
            "; as a prediction ",
            shown(context, lens, lens.tokens[row][0][0]),
            ` ${percent(decodeTensor(lens.probability).data[row])}`,
          ]
        : null,
    );
  /** @type {HTMLElement[]} */
  const stages = [];
  for (const part of flow.parts) stages.push(await stage(context, flow, part, layer, place, zoom));
  return panel(
    `${flow.prefix ? `${flow.name[0].toUpperCase()}${flow.name.slice(1)}, layer` : "Layer"} ${layer} of ${flow.layers}`,
    "Each part reads the residual stream, and adds what it computes to it.",
    stream(layer),
    stages,
    stream(layer + 1),
  );
}

/**
 * @param {ViewContext} context
 * @param {Flow} flow
 * @param {OverviewPart} part
 * @param {number} layer
 * @param {number} place
 * @param {(where: Zoom) => void} zoom
 * @returns {Promise<HTMLElement>}
 */
async function stage(context, flow, part, layer, place, zoom) {
  const share = flow.share(part, layer, place);
  const title = h("p", {}, "+ ", h("b", {}, PARTS[part]), `, adds ${percent(share)}`);
  if (part === "feedforward")
    return h(
      "div",
      { class: "flow-stage part", data: { part } },
      title,
      h(
        "p",
        { class: "quiet" },
        `${context.model.d_ff} neurons, each of which looks for a pattern in this column and adds a vector of its own where it finds it; no other token comes in.`,
      ),
    );
  const found = await context.request("layer_heads", {
    forward_pass: context.forwardPass(),
    attention: flow.site(part),
    layer,
    position: place,
  });
  const [weights, moved] = [decodeTensor(found.weights), decodeTensor(found.moved)];
  const heads = flow.moved(part, layer, place);
  return h(
    "div",
    { class: "flow-stage part", data: { part } },
    title,
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "group", "aria-label": `heads of ${PARTS[part]}` },
      h(
        "table",
        { class: "flow-table", data: { testid: `overview-heads-${part}` } },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "head"),
            h("th", { scope: "col" }, "adds"),
            h("th", { scope: "col" }, "moves most from (token, attention weight)"),
          ),
        ),
        h(
          "tbody",
          {},
          heads.map((one) =>
            h(
              "tr",
              { data: { head: one.head } },
              h(
                "th",
                { scope: "row" },
                h(
                  "button",
                  {
                    type: "button",
                    class: "link head",
                    "aria-label": `head ${one.head}: zoom in`,
                    on: { click: () => zoom({ layer, head: one.head, key: one.key, site: flow.site(part) }) },
                  },
                  h("i", { style: { background: headColour(one.head, flow.nHeads) } }),
                  `head ${one.head}`,
                ),
              ),
              h("td", { class: "figure", data: { value: one.share } }, percent(one.share)),
              h(
                "td",
                {},
                strongest(row(moved, one.head), row(weights, one.head)).map((key) => {
                  const weight = row(weights, one.head)[key];
                  return h(
                    "span",
                    { class: "read" },
                    token(flow.keyToken(part, key), {
                      tag: "button",
                      type: "button",
                      "aria-label": `${flow.keyToken(part, key).text}, token ${key}: how its weight is computed`,
                      on: { click: () => zoom({ layer, head: one.head, key, site: flow.site(part), product: true }) },
                    }),
                    h("span", { class: "quiet" }, `${key}, `),
                    h("span", { class: "figure quiet", data: { value: weight, key } }, percent(weight)),
                  );
                }),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}

/**
 * The keys of which most is moved, by their weights, which are shown.
 * @param {Tensor["data"]} moved
 * @param {Tensor["data"]} weights
 * @returns {number[]}
 */
function strongest(moved, weights) {
  return Array.from(moved, (_, key) => key)
    .sort((a, b) => moved[b] - moved[a])
    .slice(0, KEYS)
    .filter((key) => moved[key] > 0)
    .sort((a, b) => weights[b] - weights[a]);
}
