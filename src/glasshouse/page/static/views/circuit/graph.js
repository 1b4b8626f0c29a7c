// A circuit as a graph: components from the embedding at the bottom to the logits at the top, edges from writers to
// readers.

import { s } from "glasshouse/dom.js";
import { clamp } from "glasshouse/number.js";
import { figure, keyOf, port, readBy, words } from "glasshouse/views/circuit/component.js";

const GUTTER = 54; // pixels of the names of the layers
const [NARROW, WIDE] = [34, 84]; // pixels of a column
const HIGH = 46; // pixels of a row of heads, and between any two rows
const FLAT = 19; // pixels of a row of feed-forward, which is beside the heads
const TALL = 18; // pixels of a node
const THICK = 8; // pixels of the largest edge; others by the square root, which keeps small ones apart
const THIN = 0.8;

/**
 * @param {Model} model
 * @param {CircuitEdge[]} edges
 * @param {GraphOptions} options
 * @returns {SVGSVGElement}
 */
export function graph(model, edges, { room, chosen, href, pick }) {
  const stacks = stacksOf(model);
  const columns = stacks.length * (model.n_heads + 1);
  const column = Math.max(NARROW, clamp((room - stacks.length * GUTTER - 8) / columns, WIDE));
  const tall = Math.max(...stacks.map((one) => one.layers * (one.kinds.length * HIGH + FLAT))) + 2 * HIGH + TALL;
  /** @type {Map<string, GraphNode>} */
  const nodes = new Map();
  /** @type {Child[]} */
  const borders = [];
  /** @type {Child[]} */
  const names = [];
  const wide = stacks.length * (GUTTER + (model.n_heads + 1) * column) + 8;
  for (const [i, { prefix, title, layers, kinds, isLast }] of stacks.entries()) {
    const left = i * (GUTTER + (model.n_heads + 1) * column) + GUTTER;
    const right = left + (model.n_heads + 1) * column;
    const middle = left + (model.n_heads * column) / 2;
    /** @type {(name: string, label: string, x: number, y: number) => void} */
    const add = (name, label, x, y) => nodes.set(name, { name, label, x, y });
    let y = tall - TALL;
    add(`${prefix}embed`, "embed", middle, y);
    if (title) names.push(s("text", { class: "stack-name", x: left - 6, y }, title));
    for (let layer = 0; layer < layers; layer += 1) {
      const start = y - (HIGH - TALL) / 2;
      for (const kind of kinds) {
        y -= HIGH;
        for (let head = 0; head < model.n_heads; head += 1)
          add(`${prefix}${kind}.${layer}[head=${head}]`, `${layer}.${head}`, left + (head + 0.5) * column, y);
        if (kinds.length > 1)
          names.push(s("text", { class: "kind", x: left - 6, y }, kind === "z" ? "self" : "cross"));
      }
      y -= FLAT;
      add(`${prefix}ffn_out.${layer}`, "ffn", right - column / 2, y);
      borders.push(s("line", { x1: left - 2, x2: right, y1: start, y2: start }));
      names.push(
        s("text", { class: "layer-name", x: left - 6, y: kinds.length > 1 ? y - 2 : y + FLAT }, `layer ${layer}`),
      );
    }
    if (isLast) {
      const start = y - (HIGH - TALL) / 2;
      borders.push(s("line", { x1: left - 2, x2: right, y1: start, y2: start }));
      add("logits", "logits", middle, y - HIGH);
    }
  }
  const largest = Math.max(...edges.map((one) => Math.abs(one.effect)), Number.MIN_VALUE);
  const isDrawn = new Set(edges.flatMap((one) => [one.writer, ...readBy(one.reader, model)]));
  return s(
    "svg",
    {
      class: "circuit-graph",
      width: wide,
      height: tall + 4,
      viewBox: `0 0 ${wide} ${tall + 4}`,
      role: "group",
      "aria-label": `${edges.length} edges between components, from the embedding at the bottom to the logits at the top`,
      data: { testid: "circuit-graph" },
    },
    s("g", { class: "borders", "aria-hidden": "true" }, borders),
    // The largest last: on top of others.
    [...edges].reverse().map((edge) => drawEdge(edge, nodes, { model, column, largest, chosen, pick })),
    s("g", { class: "names", "aria-hidden": "true" }, names),
    [...nodes.values()].map((node) => drawNode(node, isDrawn.has(node.name), { model, column, href })),
  );
}

/**
 * The stacks of a model, and the kinds of heads that their layers have.
 * @param {Model} model
 * @returns {{ prefix: string, title: string, layers: number, kinds: string[], isLast: boolean }[]}
 */
function stacksOf(model) {
  if (model.kind !== "seq2seq")
    return [{ prefix: "", title: "", layers: model.n_layers, kinds: ["z"], isLast: true }];
  return [
    { prefix: "encoder.", title: "encoder", layers: model.n_encoder_layers, kinds: ["z"], isLast: false },
    { prefix: "decoder.", title: "decoder", layers: model.n_layers, kinds: ["z", "cross_z"], isLast: true },
  ];
}

/**
 * A curve from the top of the writer to the bottom of each reader; a wider one that cannot be seen is clicked.
 * @param {CircuitEdge} edge
 * @param {Map<string, GraphNode>} nodes
 * @param {{ model: Model, column: number, largest: number, chosen: string, pick: GraphOptions["pick"] }} options
 * @returns {SVGGElement}
 */
function drawEdge(edge, nodes, { model, column, largest, chosen, pick }) {
  const { writer, reader, effect } = edge;
  const from = nodes.get(writer);
  const curves = readBy(reader, model).flatMap((name) => {
    const to = nodes.get(name);
    if (!from || !to) return [];
    const [x1, y1] = [from.x, from.y - TALL / 2];
    const [x2, y2] = [to.x + port(reader) * column * 0.22, to.y + TALL / 2];
    const rise = Math.max(HIGH / 2, 0.45 * (y1 - y2));
    // Round what lies between, if both are in one column.
    const aside = Math.abs(x1 - x2) < column / 2 && y1 - y2 > HIGH ? -0.62 * column : 0;
    return `M${x1} ${y1} C${x1 + aside} ${y1 - rise} ${x2 + aside} ${y2 + rise} ${x2} ${y2}`;
  });
  const width = Math.max(THIN, THICK * Math.sqrt(Math.abs(effect) / largest));
  return s(
    "g",
    {
      class: `edge ${effect < 0 ? "less" : "more"}${keyOf(edge) === chosen ? " chosen" : ""}`,
      data: { writer, reader, value: effect },
      on: { click: () => pick(edge) },
    },
    s("title", {}, `${words(writer, model)} → ${words(reader, model)}: estimated effect ${figure(effect)}`),
    curves.map((d) => [s("path", { class: "wide", d }), s("path", { d, "stroke-width": width.toFixed(2) })]),
  );
}

/**
 * A component that has an edge is a link to the view that shows it.
 * @param {GraphNode} node
 * @param {boolean} isDrawn
 * @param {{ model: Model, column: number, href: GraphOptions["href"] }} options
 * @returns {SVGElement}
 */
function drawNode({ name, label, x, y }, isDrawn, { model, column, href }) {
  const width = name.endsWith("embed") || name === "logits" ? 52 : Math.min(44, column - 4);
  const said = `${label}: open the view of ${words(name, model)}`; // first what is written on it
  const inside = [
    isDrawn ? s("title", {}, said) : null,
    s("rect", { x: x - width / 2, y: y - TALL / 2, width, height: TALL, rx: 5 }),
    s("text", { x, y, "text-anchor": "middle" }, label),
  ];
  if (!isDrawn) return s("g", { class: "node", "aria-hidden": "true", data: { node: name } }, inside);
  return s("a", { class: "node drawn", href: href(name), "aria-label": said, data: { node: name } }, inside);
}
