// Operations that make arrays, or move values without changing them, named and with arguments as in ATen.

import {
  around,
  axisOf,
  broadcastShape,
  places,
  reshaped,
  sizeOf,
  stridesOf,
  withSize,
  zeros,
} from "glasshouse/live/array.js";

/**
 * @param {number[]} shape
 * @param {number | string} value
 * @param {Dtype} dtype
 * @returns {NdArray}
 */
function full(shape, value, dtype) {
  const made = zeros(shape, dtype);
  made.data.fill(value === "-inf" ? -Infinity : value === "inf" ? Infinity : Number(value));
  return made;
}

/**
 * The values at some places, in a shape.
 * @param {NdArray} array
 * @param {number[]} shape
 * @param {Int32Array} where
 * @returns {NdArray}
 */
function gather(array, shape, where) {
  const made = zeros(shape, array.dtype);
  for (let i = 0; i < where.length; i += 1) made.data[i] = array.data[where[i]];
  return made;
}

/**
 * @param {NdArray} array
 * @param {number[]} order
 * @returns {NdArray}
 */
function permuted(array, order) {
  const strides = stridesOf(array.shape);
  const shape = order.map((axis) => array.shape[axis]);
  return gather(
    array,
    shape,
    places(
      shape,
      order.map((axis) => strides[axis]),
    ),
  );
}

/**
 * @param {NdArray} array
 * @param {number} dim
 * @param {number | null} [start]
 * @param {number | null} [end]
 * @param {number} [step]
 * @returns {NdArray}
 */
export function slice(array, dim, start, end, step = 1) {
  const axis = axisOf(array, dim);
  const size = array.shape[axis];
  const within = (/** @type {number} */ at) => Math.min(Math.max(at < 0 ? at + size : at, 0), size);
  const [first, last] = [within(start ?? 0), within(end ?? size)];
  const shape = withSize(array.shape, axis, Math.max(0, Math.ceil((last - first) / step)));
  const strides = stridesOf(array.shape);
  const own = strides[axis];
  strides[axis] *= step;
  return gather(array, shape, places(shape, strides, first * own));
}

/**
 * @param {NdArray} array
 * @param {number} dim
 * @param {number} index
 * @returns {NdArray}
 */
function select(array, dim, index) {
  const axis = axisOf(array, dim);
  const at = index < 0 ? index + array.shape[axis] : index;
  const part = slice(array, axis, at, at + 1);
  return reshaped(
    part,
    part.shape.filter((_, number) => number !== axis),
  );
}

/**
 * @param {NdArray[]} arrays
 * @param {number} dim
 * @returns {NdArray}
 */
export function concatenate(arrays, dim) {
  const axis = axisOf(arrays[0], dim);
  const size = arrays.reduce((sum, one) => sum + one.shape[axis], 0);
  const made = zeros(withSize(arrays[0].shape, axis, size), arrays[0].dtype);
  const [blocks, , inner] = around(made, axis);
  let start = 0;
  for (const one of arrays) {
    const width = one.shape[axis] * inner;
    for (let block = 0; block < blocks; block += 1)
      made.data.set(one.data.subarray(block * width, (block + 1) * width), block * size * inner + start);
    start += width;
  }
  return made;
}

/**
 * @param {NdArray} array
 * @param {number[]} sizes
 * @param {number} dim
 * @returns {NdArray[]}
 */
function parts(array, sizes, dim) {
  let start = 0;
  return sizes.map((size) => {
    start += size;
    return slice(array, dim, start - size, start);
  });
}

/**
 * Sizes of parts of the same size, but for the last.
 * @param {NdArray} array
 * @param {number} each
 * @param {number} dim
 * @returns {number[]}
 */
function evenly(array, each, dim) {
  const size = array.shape[axisOf(array, dim)];
  return Array.from({ length: Math.ceil(size / each) }, (_, number) => Math.min(each, size - number * each));
}

/**
 * Values by index arrays, which are broadcast; they stand side by side, after axes that are kept whole.
 * @param {NdArray} array
 * @param {(NdArray | null)[]} indices
 * @returns {NdArray}
 */
function indexed(array, indices) {
  const first = indices.findIndex((one) => one !== null);
  const given = /** @type {NdArray[]} */ (indices.slice(first).filter((one) => one !== null));
  const shape = broadcastShape(given.map((one) => one.shape));
  const strides = stridesOf(array.shape).map((one, axis) => (array.shape[axis] === 1 ? 0 : one));
  const where = given.map((one) => places(shape, stridesOf(one.shape, shape)));
  const [before, after] = [array.shape.slice(0, first), array.shape.slice(first + given.length)];
  const inner = sizeOf(after);
  const made = zeros([...before, ...shape, ...after], array.dtype);
  const outer = places(before, strides.slice(0, first));
  let at = 0;
  for (const start of outer)
    for (let i = 0; i < sizeOf(shape); i += 1) {
      let from = start;
      for (let k = 0; k < given.length; k += 1) {
        const index = given[k].data[where[k][i]];
        from += (index < 0 ? index + array.shape[first + k] : index) * strides[first + k];
      }
      made.data.set(array.data.subarray(from, from + inner), at);
      at += inner;
    }
  return made;
}

/** @type {Record<string, Operation>} */
export const shaping = {
  // Arrays of one value, and ranges
  arange: ({ start, end, step }, dtype) => {
    const [first, by] = [start ?? 0, step ?? 1];
    const made = zeros([Math.max(0, Math.ceil((end - first) / by))], dtype);
    for (let i = 0; i < made.data.length; i += 1) made.data[i] = first + i * by;
    return made;
  },
  full: ({ size, fill_value: value }, dtype) => full(size, value, dtype),
  full_like: ({ self, fill_value: value }, dtype) => full(self.shape, value, dtype),
  new_full: ({ size, fill_value: value }, dtype) => full(size, value, dtype),
  new_ones: ({ size }, dtype) => full(size, 1, dtype),
  new_zeros: ({ size }, dtype) => zeros(size, dtype),
  ones: ({ size }, dtype) => full(size, 1, dtype),
  ones_like: ({ self }, dtype) => full(self.shape, 1, dtype),
  scalar_tensor: ({ s }, dtype) => full([], s, dtype),
  zeros: ({ size }, dtype) => zeros(size, dtype),
  zeros_like: ({ self }, dtype) => zeros(self.shape, dtype),

  // The same values in another shape
  flatten: ({ self, start_dim: start, end_dim: end }) => {
    const [first, last] = [axisOf(self, start), axisOf(self, end)];
    const middle = sizeOf(self.shape.slice(first, last + 1));
    return reshaped(self, [...self.shape.slice(0, first), middle, ...self.shape.slice(last + 1)]);
  },
  reshape: ({ self, shape }) => reshaped(self, shape),
  squeeze: ({ self, dim }) => {
    const chosen = [dim ?? [...self.shape.keys()]].flat().map((one) => axisOf(self, one));
    return reshaped(
      self,
      self.shape.filter(
        (/** @type {number} */ size, /** @type {number} */ axis) => size !== 1 || !chosen.includes(axis),
      ),
    );
  },
  unflatten: ({ self, dim, sizes }) => {
    const axis = axisOf(self, dim);
    const known = sizes.filter((/** @type {number} */ one) => one !== -1);
    const rest = self.shape[axis] / sizeOf(known);
    const filled = sizes.map((/** @type {number} */ one) => (one === -1 ? rest : one));
    return reshaped(self, [...self.shape.slice(0, axis), ...filled, ...self.shape.slice(axis + 1)]);
  },
  unsqueeze: ({ self, dim }) => {
    const shape = [...self.shape];
    shape.splice(dim < 0 ? dim + shape.length + 1 : dim, 0, 1);
    return reshaped(self, shape);
  },
  view: ({ self, size }) => reshaped(self, size),
  view_as: ({ self, other }) => reshaped(self, other.shape),

  // Parts, repetitions and other orders
  cat: ({ tensors, dim }) => concatenate(tensors, dim),
  chunk: ({ self, chunks, dim }) =>
    parts(self, evenly(self, Math.ceil(self.shape[axisOf(self, dim)] / chunks), dim), dim),
  expand: ({ self, size }) => {
    const rank = size.length - self.shape.length;
    const shape = size.map((/** @type {number} */ one, /** @type {number} */ axis) =>
      one === -1 ? self.shape[axis - rank] : one,
    );
    return gather(self, shape, places(shape, stridesOf(self.shape, shape)));
  },
  expand_as: ({ self, other }) => gather(self, other.shape, places(other.shape, stridesOf(self.shape, other.shape))),
  index: ({ self, indices }) => indexed(self, indices),
  permute: ({ self, dims }) =>
    permuted(
      self,
      dims.map((/** @type {number} */ one) => axisOf(self, one)),
    ),
  repeat_interleave: ({ self, repeats, dim }) => {
    if (repeats === 1) return self;
    const [blocks, size, inner] = around(self, dim);
    const wide = { ...self, shape: [blocks, size, 1, inner] };
    const shape = [blocks, size, repeats, inner];
    const repeated = gather(wide, shape, places(shape, stridesOf(wide.shape, shape)));
    return reshaped(repeated, withSize(self.shape, axisOf(self, dim), size * repeats));
  },
  select: ({ self, dim, index }) => select(self, dim, index),
  slice: ({ self, dim, start, end, step }) => slice(self, dim, start, end, step),
  split: ({ self, split_size: size, dim }) => parts(self, evenly(self, size, dim), dim),
  split_with_sizes: ({ self, split_sizes: sizes, dim }) => parts(self, sizes, dim),
  stack: ({ tensors, dim }) =>
    concatenate(
      tensors.map((/** @type {NdArray} */ one) => shaping.unsqueeze({ self: one, dim }, one.dtype)),
      dim < 0 ? dim + tensors[0].shape.length + 1 : dim,
    ),
  transpose: ({ self, dim0, dim1 }) => {
    const order = [...self.shape.keys()];
    const [a, b] = [axisOf(self, dim0), axisOf(self, dim1)];
    [order[a], order[b]] = [b, a];
    return permuted(self, order);
  },
  unbind: ({ self, dim }) =>
    Array.from({ length: self.shape[axisOf(self, dim)] }, (_, index) => select(self, dim, index)),

  // Sizes are plain numbers
  floor_divide: ({ a, b }) => Math.floor(a / b),
  getitem: ({ list, index }) => list[index],
  minus: ({ a, b }) => a - b,
  negative: ({ a }) => -a,
  plus: ({ a, b }) => a + b,
  size: ({ self, dim }) => self.shape[axisOf(self, dim)],
  times: ({ a, b }) => a * b,
};
