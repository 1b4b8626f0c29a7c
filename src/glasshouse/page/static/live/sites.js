// Names of sites, such as z.3[head=1], and edits of the activations there.

import { places, stridesOf } from "glasshouse/live/array.js";

/**
 * The sites that a name matches, with the index of each axis: a number, a start and an end, or null for all.
 * @param {string} name
 * @param {Record<string, string[]>} known the axes of each site
 * @returns {SiteSelection[]}
 */
export function select(name, known) {
  const form = /^\s*([^\s[\]]+)\s*(?:\[(.*)\]\s*)?$/.exec(name);
  if (!form) throw new Error(`the site '${name}' is not a name and an index such as z.3[head=2, position=-1].`);
  const pattern = new RegExp(`^${form[1].replace(/[.+?^${}()|\\]/g, "\\$&").replaceAll("*", ".*")}$`);
  const found = Object.keys(known).filter((one) => pattern.test(one));
  if (!found.length) throw new Error(`a live page has no site '${form[1]}'; choose one of the grid.`);
  const given = (form[2] ?? "").split(",").filter((one) => one.trim());
  return found.map((site) => {
    const index = known[site].map(() => /** @type {SiteSelection["index"][number]} */ (null));
    for (const part of given) {
      const [axis, value] = part.split("=").map((one) => one.trim());
      const at = known[site].indexOf(axis);
      if (at < 0) throw new Error(`${site} has no axis '${axis}'; it has ${known[site].join(", ")}.`);
      if (!/^(-?\d+|(-?\d+)?:(-?\d+)?)$/.test(value ?? ""))
        throw new Error(`${site} is indexed by ${axis} = '${value}', which is neither an integer nor a:b.`);
      const ends = value.split(":").map((one) => (one === "" ? null : Number(one)));
      index[at] = ends.length === 2 ? [ends[0], ends[1]] : ends[0];
    }
    return { site, axes: known[site], index };
  });
}

/**
 * Whether an edit does the same to a token whatever comes after it, as it must during generation.
 * @param {SiteSelection} selection
 * @param {Edit} edit
 * @returns {boolean}
 */
export function isStable({ site, axes, index }, edit) {
  const position = index[axes.indexOf("position")] ?? null;
  const isFromEnd = [position].flat().some((end) => end !== null && end < 0);
  const isCached = /(^|[._])[kv]\.\d+$/.test(site) && position !== null;
  return edit.kind !== "mean" && !isFromEnd && !isCached;
}

/**
 * Where the values of a selection are in an array, whose first position is `first` of the text.
 * @param {SiteSelection} selection
 * @param {number[]} shape
 * @param {number} [first]
 * @returns {Int32Array}
 */
function within({ site, axes, index }, shape, first = 0) {
  const strides = stridesOf(shape);
  let start = 0;
  const sizes = index.map((one, axis) => {
    const size = shape[axis];
    if (first && axes[axis] === "position" && one !== null) {
      // Some of the tokens of a decode step, counted from the beginning of the text.
      const ends = typeof one === "number" ? [one, one + 1] : [one[0] ?? 0, one[1] ?? Infinity];
      const [from, to] = ends.map((end) => Math.min(Math.max(end - first, 0), size));
      start += from * strides[axis];
      return Math.max(0, to - from);
    }
    const from = (/** @type {number} */ at) => Math.min(Math.max(at < 0 ? at + size : at, 0), size);
    if (one === null) return size;
    if (typeof one === "number") {
      if (one < -size || one >= size)
        throw new Error(
          `${site} has ${axes[axis]} index ${one}, but that axis has size ${size}; use 0 to ${size - 1}.`,
        );
      start += from(one) * strides[axis];
      return 1;
    }
    const [low, high] = [from(one[0] ?? 0), from(one[1] ?? size)];
    start += low * strides[axis];
    return Math.max(0, high - low);
  });
  return places(sizes, strides, start);
}

/**
 * The mean of an activation over the batch and the positions, at each of its places.
 * @param {NdArray} value
 * @param {string[]} axes
 * @returns {Float64Array}
 */
function meanOver(value, axes) {
  const strides = stridesOf(value.shape).map((one, axis) => (["batch", "position"].includes(axes[axis]) ? 0 : one));
  const where = places(value.shape, strides);
  const [sums, counts] = [new Float64Array(value.data.length), new Float64Array(value.data.length)];
  for (let i = 0; i < where.length; i += 1) {
    sums[where[i]] += value.data[i];
    counts[where[i]] += 1;
  }
  return Float64Array.from(where, (at) => sums[at] / counts[at]);
}

/**
 * An activation after an edit; `there` is the same of the text that is patched from.
 * @param {Edit} edit
 * @param {SiteSelection} selection
 * @param {NdArray} value
 * @param {NdArray | undefined} there
 * @param {number} [first] the position of its first token, in a decode step
 * @returns {NdArray}
 */
export function applyEdit(edit, selection, value, there, first = 0) {
  const edited = { ...value, data: value.data.slice() };
  const where = within(selection, value.shape, first);
  if (edit.kind === "scale") {
    for (const at of where) edited.data[at] *= edit.factor ?? 0;
  } else if (edit.kind === "mean") {
    const mean = meanOver(value, selection.axes);
    for (const at of where) edited.data[at] = mean[at];
  } else {
    if (!there) throw new Error(`${edit.site} is patched, but there is no second text; enter one.`);
    const from = within(selection, there.shape);
    if (from.length !== where.length) {
      const shape = (/** @type {number[]} */ all) =>
        `[${all.filter((_, axis) => typeof selection.index[axis] !== "number").join(", ")}]`;
      throw new Error(
        `${edit.site} has shape ${shape(there.shape)} on the other text, but ${shape(value.shape)} here; give texts of ` +
          "the same length, or patch single positions that both have.",
      );
    }
    for (let i = 0; i < where.length; i += 1) edited.data[where[i]] = there.data[from[i]];
  }
  return edited;
}
