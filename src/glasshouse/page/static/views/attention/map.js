// The attention map of one head.

import { isSaved, Superseded } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { Heatmap } from "glasshouse/heatmap.js";
import { short } from "glasshouse/number.js";
import { pictureButton } from "glasshouse/picture.js";
import { numberLabel, token } from "glasshouse/widgets.js";
import { SCORES, typeName } from "glasshouse/views/attention/selection.js";

/**
 * @param {AttentionSelection} selection
 * @returns {Part}
 */
export function map(selection) {
  const { context } = selection;
  const title = h("h2", { data: { testid: "head-title" } });
  const facts = h("p", { class: "quiet facts", data: { testid: "head-facts" } });
  const status = h("p", { class: "readout", role: "status", "aria-live": "polite", data: { testid: "cell" } });
  const heatmap = new Heatmap({
    label: "map of one head; arrow keys move, Enter selects, plus and minus zoom",
    read: show,
    pick: (query, key) => selection.choose({ query, key }),
  });
  heatmap.node.dataset.testid = "map";
  /** @type {(text: string, label: string, act: () => void) => HTMLElement} */
  const button = (text, label, act) =>
    h(
      "button",
      {
        type: "button",
        class: "tool",
        "aria-label": label,
        data: { testid: label.replace(" ", "-") },
        on: { click: act },
      },
      text,
    );
  const tools = h(
    "span",
    { class: "zoom" },
    button("−", "zoom out", () => heatmap.step(-1)),
    button("+", "zoom in", () => heatmap.step(1)),
    button("close up", "close up", () => heatmap.closeUp()),
    button("whole", "whole map", () => heatmap.fit()),
  );
  const about = h("p", { class: "about" });
  /** @type {HTMLElement} */
  const node = h(
    "section",
    { class: "panel large" },
    h("div", { class: "headline" }, title, tools),
    about,
    facts,
    heatmap.node,
    status,
    pictureButton("attention map", () => node),
  );
  /** @type {number | null} */
  let known = null; // the weight of the selected pair

  /** @param {HeatmapCell | null} cell */
  function show(cell) {
    const { queries, keys } = selection;
    if (!cell) {
      if (known === null) return;
      cell = { row: selection.query, column: selection.key, side: 1, value: known };
    }
    const { row, column, side, value } = cell;
    const isMasked = value !== undefined && value < 0;
    Object.assign(status.dataset, {
      query: row,
      key: column,
      side,
      value: value === undefined || isMasked ? "" : value,
    });
    if (side > 1) {
      /** @type {(start: number, tokens: Token[]) => number} */
      const to = (start, tokens) => Math.min(start + side, tokens.length) - 1;
      put(
        status,
        `tokens ${row}–${to(row, queries)} on ${column}–${to(column, keys)}: `,
        value === undefined ? "…" : isMasked ? "masked" : ["at most ", h("b", {}, short(value))],
      );
      return;
    }
    put(
      status,
      token(queries[row], { class: "selected" }),
      ` ${row} attends to `,
      token(keys[column], { class: "compared" }),
      ` ${column}: `,
      value === undefined ? "…" : isMasked ? "masked" : ["weight ", h("b", {}, short(value))],
    );
  }

  return {
    node,
    async draw() {
      const { kind, layer, head, query, key, queries, keys } = selection;
      put(title, `Layer ${layer}, head ${head}`);
      put(
        about,
        `Rows are queries, columns are keys; each row sums to 1. ${kind.causal ? "Causal: a query attends to itself and earlier tokens." : kind.queries === kind.keys ? "Bidirectional: a query attends to all tokens." : "Target queries attend to all source keys."} Click a cell for details below.`,
      );
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
      const one = scores?.heads[layer][head];
      const names = /** @type {(HeadScore | "entropy")[]} */ ([...Object.keys(SCORES), "entropy"]);
      put(
        facts,
        names
          .filter((each) => one?.[each] !== undefined)
          .map((each) =>
            h(
              "span",
              {
                class: each === one?.label ? "chosen" : "",
                title: `uniform attention: ${short(scores?.uniform[layer][each])}`,
              },
              `${typeName(each)} `,
              numberLabel(one?.[each], `score-${each}`),
              each === "entropy" ? " nats" : "",
            ),
          ),
      );
    },
    close: () => heatmap.close(),
  };
}

/**
 * A saved page has only some tiles; the map is coarser without the others.
 * @param {Error} error
 * @returns {null}
 */
function absent(error) {
  if (isSaved && !(error instanceof Superseded)) return null;
  throw error;
}
