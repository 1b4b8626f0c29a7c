// Runs a graph: its nodes in order, each by one of the operations. It knows nothing of layers or models.

import { fromHalf, sizeOf } from "glasshouse/live/array.js";
import { elementwise } from "glasshouse/live/operations/elementwise.js";
import { products } from "glasshouse/live/operations/products.js";
import { shaping } from "glasshouse/live/operations/shape.js";

/** @type {Record<string, Operation>} */
export const operations = { ...elementwise, ...products, ...shaping };

/**
 * @param {string} text
 * @returns {ArrayBuffer}
 */
export function decodeBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text).buffer; // browsers since 2025
  const raw = atob(text);
  const made = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) made[i] = raw.charCodeAt(i);
  return made.buffer;
}

/**
 * The weights of a file by name, from float16 one after the other.
 * @param {Record<string, number[]>} shapes
 * @param {ArrayBuffer} buffer
 * @returns {Record<string, NdArray>}
 */
export function readWeights(shapes, buffer) {
  let start = 0;
  /** @type {Record<string, NdArray>} */
  const weights = {};
  for (const [name, shape] of Object.entries(shapes)) {
    const size = sizeOf(shape);
    weights[name] = { shape, dtype: "float32", data: fromHalf(new Uint16Array(buffer, 2 * start, size)) };
    start += size;
  }
  return weights;
}

/**
 * @param {GraphConstant} constant
 * @returns {NdArray}
 */
function readConstant({ shape, dtype, data }) {
  const buffer = decodeBase64(data);
  const kind = { float32: Float32Array, float64: Float64Array, int64: Int32Array, bool: Uint8Array }[dtype];
  return { shape, dtype, data: /** @type {any} */ (new kind(buffer)) };
}

/**
 * The references in an argument.
 * @param {unknown} value
 * @returns {string[]}
 */
function references(value) {
  if (typeof value === "string") return value.startsWith("$") ? [value] : [];
  return value !== null && typeof value === "object" ? Object.values(value).flatMap(references) : [];
}

/**
 * An argument with the values in place of its references.
 * @param {any} value
 * @param {Map<string, any>} known
 * @returns {any}
 */
function resolve(value, known) {
  if (typeof value === "string" && value.startsWith("$")) return known.get(value);
  if (Array.isArray(value)) return value.map((one) => resolve(one, known));
  return value;
}

export class Interpreter {
  /**
   * @param {GraphJson} graph
   * @param {Record<string, NdArray>} weights
   */
  constructor(graph, weights) {
    this.graph = graph;
    /** @type {Map<string, any>} */
    this.fixed = new Map();
    for (const [name, reference] of Object.entries(graph.weights)) this.fixed.set(reference, weights[name]);
    for (const [reference, one] of Object.entries(graph.constants)) this.fixed.set(reference, readConstant(one));
    const kept = new Set(references(graph.outputs));
    /** @type {Map<string, number>} */
    const last = new Map(); // the node that uses a value last
    graph.nodes.forEach((node, number) => {
      for (const one of references(node.args)) last.set(one, number);
    });
    /** @type {string[][]} */
    this.done = graph.nodes.map(() => []);
    for (const [one, number] of last) if (!kept.has(one) && !this.fixed.has(one)) this.done[number].push(one);
  }

  /**
   * The outputs for some inputs. `atSite` is given each activation with a name, and returns it, or another; after that
   * of the name `until` no node runs.
   * @param {Record<string, any>} inputs
   * @param {(name: string, value: NdArray) => NdArray} [atSite]
   * @param {string} [until]
   * @returns {Record<string, any>}
   */
  run(inputs, atSite = (_, value) => value, until = "") {
    const known = new Map(this.fixed);
    for (const [name, reference] of Object.entries(this.graph.inputs)) {
      const [references, values] = [[reference].flat(), [inputs[name]].flat()];
      for (const [number, one] of references.entries()) known.set(one, values[number]);
    }
    for (const [number, { op, args, out, dtype }] of this.graph.nodes.entries()) {
      /** @type {Record<string, any>} */
      const given = {};
      for (const [name, value] of Object.entries(args)) given[name] = resolve(value, known);
      known.set(out, op === "site" ? atSite(given.name, given.x) : operations[op](given, dtype ?? "float32"));
      for (const one of this.done[number]) known.delete(one);
      if (op === "site" && given.name === until) break;
    }
    return Object.fromEntries(
      Object.entries(this.graph.outputs).map(([name, reference]) => [name, resolve(reference, known)]),
    );
  }
}
