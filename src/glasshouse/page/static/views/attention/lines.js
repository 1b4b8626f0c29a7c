// One head as lines between queries and keys, or all heads of a layer, each in its colour.

import { isSaved } from "glasshouse/api.js";
import { headColour } from "glasshouse/colour.js";
import { h, put, s } from "glasshouse/dom.js";
import { TILE } from "glasshouse/heatmap/tiles.js";
import { clamp, percent, short } from "glasshouse/number.js";
import { choice, panel, token } from "glasshouse/widgets.js";
import { row as rowOf, decodeTensor } from "glasshouse/tensor.js";

const HIGH = 24; // pixels of a token
const WINDOW = 60; // tokens between which lines are drawn
const FAINT = 0.02; // share of the strongest line below which none is drawn

/**
 * @param {AttentionSelection} selection
 * @returns {Part}
 */
export function lines(selection) {
  const { context } = selection;
  const which = choice(
    "lines",
    [
      ["one", "from the selected token"],
      ["all", "from all"],
      ["heads", "all heads of the layer"],
    ],
    (one) => context.set({ attention_lines: one === "one" ? undefined : one }),
  );
  which.dataset.testid = "lines-of";
  const left = h("div", { class: "side query-side", role: "group", "aria-label": "queries" });
  const right = h("div", { class: "side key-side", role: "group", "aria-label": "keys" });
  const web = s("svg", {
    class: "web",
    role: "img",
    "aria-label": "lines from queries to keys",
    preserveAspectRatio: "none",
  });
  const frame = h("div", { class: "frame", data: { testid: "lines" } }, left, web, right);
  const note = h("p", { class: "quiet", data: { testid: "lines-note" } });
  /** @type {Set<number>} */
  const hidden = new Set(); // heads whose lines are not drawn
  const legend = h("div", { class: "line-heads", role: "group", "aria-label": "heads that are drawn" });
  const node = panel(
    "Attention lines",
    "Queries on the left, keys on the right; opacity is the attention weight.",
    h("div", { class: "controls" }, which),
    legend,
    frame,
    note,
  );
  node.classList.add("over");
  /** @type {{ queries?: Token[], query?: number }} */
  let drawn = {};

  /** @type {(tokens: Token[], range: [number, number], chosen: number, name: string, choose: (place: number) => void) => HTMLElement[]} */
  const buttons = (tokens, [start, stop], chosen, name, choose) =>
    tokens.slice(start, stop).map((one, i) =>
      token(one, {
        tag: "button",
        type: "button",
        class: start + i === chosen ? name : "",
        data: { place: start + i },
        "aria-pressed": start + i === chosen,
        "aria-label": `${one.text}, token ${start + i}`,
        on: { click: () => choose(start + i) },
      }),
    );

  /**
   * @param {boolean} all
   * @param {[number, number]} rows
   * @param {[number, number]} columns
   * @param {QueryKeyPair} found
   * @returns {Promise<[number, (key: number) => number][]>}
   */
  async function weights(all, rows, columns, found) {
    const row = decodeTensor(found.weights).data;
    if (!all) return [[selection.query, (key) => row[key]]];
    /** @type {Map<string, Tensor>} */
    const tiles = new Map();
    /** @type {Promise<unknown>[]} */
    const requests = [];
    for (let r = Math.floor(rows[0] / TILE); r * TILE < rows[1]; r += 1) {
      for (let c = Math.floor(columns[0] / TILE); c * TILE < columns[1]; c += 1)
        requests.push(selection.requestTile(0, r, c).then((tile) => tiles.set(`${r} ${c}`, tile)));
    }
    await Promise.all(requests);
    /** @type {(query: number, key: number) => number} */
    const at = (query, key) => {
      const tile = tiles.get(`${Math.floor(query / TILE)} ${Math.floor(key / TILE)}`);
      return tile ? tile.data[(query % TILE) * tile.shape[1] + (key % TILE)] : 0;
    };
    return Array.from({ length: rows[1] - rows[0] }, (_, i) => [rows[0] + i, (key) => at(rows[0] + i, key)]);
  }

  /** The heads of the layer, each a switch for its lines. */
  function drawLegend() {
    const count = context.model.n_heads;
    put(
      legend,
      Array.from({ length: count }, (_, head) =>
        h(
          "button",
          {
            type: "button",
            class: "line-head",
            "aria-pressed": String(!hidden.has(head)),
            "aria-label": `head ${head}`,
            data: { head },
            on: {
              click: () => {
                if (!hidden.delete(head)) hidden.add(head);
                part.draw();
              },
            },
          },
          h("i", { style: { background: headColour(head, count) } }),
          String(head),
        ),
      ),
    );
  }

  /**
   * The weights of the selected query in every head that is shown.
   * @returns {Promise<{ head: number, weights: Tensor["data"] }[]>}
   */
  async function ofHeads() {
    const { forward_pass, attention, layer } = selection.place;
    const found = await context.request("layer_heads", { forward_pass, attention, layer, position: selection.query });
    const tensor = decodeTensor(found.weights);
    return Array.from({ length: tensor.shape[0] }, (_, head) => ({ head, weights: rowOf(tensor, head) })).filter(
      (one) => !hidden.has(one.head),
    );
  }

  const part = {
    node,
    async draw() {
      const { queries, keys, query, key } = selection;
      const isComplete = !isSaved || (queries.length <= TILE && keys.length <= TILE); // a saved page has the map as one tile
      const all = isComplete && context.state.attention_lines === "all";
      const heads = context.state.attention_lines === "heads" ? await ofHeads() : null;
      which.show(heads ? "heads" : all ? "all" : "one");
      which.hidden = !isComplete;
      legend.hidden = !heads;
      if (heads) drawLegend();
      const found = await selection.requestQueryKey();
      const rows = span(query, queries.length);
      // Both sides show the same window if the largest weight lies there; otherwise the keys are centred on it.
      const peak = found.top[0]?.key ?? key;
      const columns = queries === keys && peak >= rows[0] && peak < rows[1] ? rows : span(peak, keys.length);
      const many = await weights(all, rows, columns, found);
      const row = decodeTensor(found.weights).data;
      const most = all || heads ? 1 : (found.top[0]?.weight ?? 1);
      const moved = drawn.queries !== queries || drawn.query !== query;
      drawn = { queries, query };
      if (moved)
        put(
          left,
          buttons(queries, rows, query, "selected", (place) => selection.choose({ query: place })),
        );
      put(
        right,
        buttons(keys, columns, key, "compared", (place) => selection.choose({ key: place })).map((button, i) => {
          const weight = row[columns[0] + i];
          return h(
            "span",
            { class: "with" },
            button,
            h(
              "span",
              { class: "figure", data: { value: weight < 0 ? "" : weight, key: columns[0] + i } },
              weight < 0 ? "·" : most < 0.05 ? short(weight) : weight < 0.005 ? "0" : weight.toFixed(2),
            ),
          );
        }),
      );
      const height = HIGH * Math.max(rows[1] - rows[0], columns[1] - columns[0]);
      web.setAttribute("viewBox", `0 0 100 ${height}`);
      web.style.setProperty("height", `${height}px`);
      /** @type {Child[]} */
      const strands = [];
      for (const { head, weights: some } of heads ?? []) {
        const y = (query - rows[0] + 0.5) * HIGH;
        for (let other = columns[0]; other < columns[1]; other += 1) {
          if (!(some[other] >= FAINT)) continue;
          const to = (other - columns[0] + 0.5) * HIGH;
          strands.push(
            s("path", {
              class: "strand",
              d: `M0 ${y} C40 ${y} 60 ${to} 100 ${to}`,
              style: { stroke: headColour(head, context.model.n_heads) },
              "stroke-opacity": Math.min(1, some[other]).toFixed(4),
              data: { head, query, key: other, value: some[other] },
              "vector-effect": "non-scaling-stroke",
            }),
          );
        }
      }
      for (const [place, weight] of heads ? [] : many) {
        for (let other = columns[0]; other < columns[1]; other += 1) {
          const much = weight(other);
          if (!(much >= FAINT * most)) continue;
          const [y, to] = [(place - rows[0] + 0.5) * HIGH, (other - columns[0] + 0.5) * HIGH];
          const classes = ["strand", place === query ? "own" : "", place === query && other === key ? "chosen" : ""]
            .filter(Boolean)
            .join(" ");
          strands.push(
            s("path", {
              class: classes,
              d: `M0 ${y} C40 ${y} 60 ${to} 100 ${to}`,
              "stroke-opacity": Math.min(1, much / most).toFixed(4),
              data: { query: place, key: other, value: much },
              "vector-effect": "non-scaling-stroke",
            }),
          );
        }
      }
      put(web, strands);
      const inside = row.slice(...columns).reduce((sum, one) => sum + Math.max(0, one), 0);
      const said = [
        ` are the weights of `,
        token(queries[query], { class: "selected" }),
        heads ? ` in head ${selection.head}; a full line is 1.` : all ? "." : `; a full line is ${short(most)}.`,
      ];
      if (columns[1] - columns[0] < keys.length)
        said.push(
          ` ${percent(Math.max(0, 1 - inside))} of its weight is on tokens before or after these ${columns[1] - columns[0]}.`,
        );
      put(note, "The numbers", said);
      const chosen = moved && left.querySelector(".selected");
      if (chosen && frame.scrollHeight > frame.clientHeight)
        frame.scrollTop = chosen.offsetTop - frame.clientHeight / 2;
    },
  };
  return part;
}

/**
 * The window of tokens around one position.
 * @param {number} place
 * @param {number} length
 * @returns {[number, number]}
 */
function span(place, length) {
  const start = clamp(place - Math.floor((2 * WINDOW) / 3), length - WINDOW);
  return [start, Math.min(length, start + WINDOW)];
}
