// The writers and readers of edges: their names in words, and the component in the graph that each belongs to.

import { short } from "glasshouse/number.js";

const NONE = 0.0005;

/**
 * @param {string} name
 * @returns {ComponentName}
 */
function parse(name) {
  const found = /^(encoder\.|decoder\.)?(\w+?)(?:\.(\d+))?(?:\[head=(\d+)\])?$/.exec(name);
  const [, stack = "", kind = name, layer = "0", head = "0"] = found ?? [];
  return { stack, kind, layer: Number(layer), head: Number(head) };
}

/**
 * The name of an edge, as in the URL.
 * @param {CircuitEdge} edge
 */
export function keyOf({ writer, reader }) {
  return `${writer} ${reader}`;
}

/**
 * An effect, which rounding leaves a little beside 0 where there is none.
 * @param {number | null} value
 */
export function figure(value) {
  return value !== null && Math.abs(value) < NONE ? "0" : short(value);
}

/**
 * A writer or a reader in words.
 * @param {string} name
 * @param {Model} model
 * @returns {string}
 */
export function words(name, model) {
  const { stack, kind, layer, head } = parse(name);
  const isCross = kind.startsWith("cross_");
  const own = isCross ? kind.slice("cross_".length) : kind;
  const isShared = (own === "k" || own === "v") && model.n_kv_heads < model.n_heads;
  const where = `${isCross ? "cross-attention " : ""}${isShared ? "KV head" : "head"} ${layer}.${head}`;
  const said =
    {
      embed: "embedding",
      z: where,
      q: `queries of ${where}`,
      k: `keys of ${where}`,
      v: `values of ${where}`,
      ffn: `feed-forward ${layer}`,
      ffn_out: `feed-forward ${layer}`,
    }[own] ?? own;
  return stack ? `${stack.slice(0, -1)} ${said}` : said;
}

/**
 * The components that a reader belongs to: several heads where they share keys and values.
 * @param {string} reader
 * @param {Model} model
 * @returns {string[]}
 */
export function readBy(reader, model) {
  const { stack, kind, layer, head } = parse(reader);
  if (kind === "logits") return ["logits"];
  if (kind === "ffn") return [`${stack}ffn_out.${layer}`];
  const cross = kind.startsWith("cross_") ? "cross_" : "";
  const group = kind.endsWith("q") ? 1 : model.n_heads / model.n_kv_heads;
  return Array.from({ length: group }, (_, i) => `${stack}${cross}z.${layer}[head=${head * group + i}]`);
}

/**
 * Where queries, keys and values arrive at a head, from left to right.
 * @param {string} reader
 * @returns {-1 | 0 | 1}
 */
export function port(reader) {
  const { kind } = parse(reader);
  return kind.endsWith("q") ? -1 : kind.endsWith("v") ? 1 : 0;
}

/**
 * The state in which another view shows a component.
 * @param {string} name
 * @returns {Partial<PageState>}
 */
export function shownIn(name) {
  const { stack, kind, layer, head } = parse(name);
  if (kind === "embed") return { view: "tokens" };
  if (kind === "logits") return { view: "residual" };
  if (kind === "ffn_out") return { view: "overview", overview_zoom: "layer", layer, attention: `${stack}pattern` };
  return { view: "attention", layer, head, attention: `${stack}${kind.startsWith("cross_") ? "cross_" : ""}pattern` };
}
