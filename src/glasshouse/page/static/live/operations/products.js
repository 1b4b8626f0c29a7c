// Matrix products, norms and reductions, named and with arguments as in ATen. Sums are of 64 bits.

import { around, axisOf, broadcastShape, places, sizeOf, stridesOf, zeros } from "glasshouse/live/array.js";

/**
 * The product of two vectors within arrays, plus a number.
 * @param {NdArray["data"]} x
 * @param {number} a
 * @param {NdArray["data"]} w
 * @param {number} b
 * @param {number} depth
 * @param {number} [start]
 * @returns {number}
 */
function dot(x, a, w, b, depth, start = 0) {
  let sum = start;
  for (let k = 0; k < depth; k += 1) sum += w[b + k] * x[a + k];
  return sum;
}

/**
 * x [..., K] times the transpose of a weight [M, K], plus a bias [M]: four rows of x for each pass over the weight.
 * @param {NdArray} input
 * @param {NdArray} weight
 * @param {NdArray | null} [bias]
 * @returns {NdArray}
 */
export function linear(input, weight, bias) {
  const [width, depth] = weight.shape;
  const rows = input.data.length / depth;
  const made = zeros([...input.shape.slice(0, -1), width]);
  const [x, w, y] = [input.data, weight.data, made.data];
  let row = 0;
  for (; row + 4 <= rows; row += 4) {
    const [a, b, c, d] = [row * depth, (row + 1) * depth, (row + 2) * depth, (row + 3) * depth];
    let column = 0;
    // Two columns at once: each number is read, and widened to 64 bits, for several products.
    for (; column + 2 <= width; column += 2) {
      const [first, second] = [column * depth, (column + 1) * depth];
      let [p0, p1, p2, p3, q0, q1, q2, q3] = [0, 0, 0, 0, 0, 0, 0, 0];
      for (let k = 0; k < depth; k += 1) {
        const p = w[first + k];
        const q = w[second + k];
        const x0 = x[a + k];
        const x1 = x[b + k];
        const x2 = x[c + k];
        const x3 = x[d + k];
        p0 += p * x0;
        p1 += p * x1;
        p2 += p * x2;
        p3 += p * x3;
        q0 += q * x0;
        q1 += q * x1;
        q2 += q * x2;
        q3 += q * x3;
      }
      const to = row * width + column;
      const [u, v] = bias ? [bias.data[column], bias.data[column + 1]] : [0, 0];
      y[to] = p0 + u;
      y[to + width] = p1 + u;
      y[to + 2 * width] = p2 + u;
      y[to + 3 * width] = p3 + u;
      y[to + 1] = q0 + v;
      y[to + width + 1] = q1 + v;
      y[to + 2 * width + 1] = q2 + v;
      y[to + 3 * width + 1] = q3 + v;
    }
    for (; column < width; column += 1)
      for (let i = 0; i < 4; i += 1)
        y[(row + i) * width + column] = dot(x, (row + i) * depth, w, column * depth, depth, bias?.data[column]);
  }
  for (; row < rows; row += 1) {
    const a = row * depth;
    let column = 0;
    for (; column + 4 <= width; column += 4) {
      const from = column * depth;
      let [s0, s1, s2, s3] = [0, 0, 0, 0];
      for (let k = 0; k < depth; k += 1) {
        const one = x[a + k];
        s0 += one * w[from + k];
        s1 += one * w[from + depth + k];
        s2 += one * w[from + 2 * depth + k];
        s3 += one * w[from + 3 * depth + k];
      }
      const to = row * width + column;
      y[to] = s0 + (bias ? bias.data[column] : 0);
      y[to + 1] = s1 + (bias ? bias.data[column + 1] : 0);
      y[to + 2] = s2 + (bias ? bias.data[column + 2] : 0);
      y[to + 3] = s3 + (bias ? bias.data[column + 3] : 0);
    }
    for (; column < width; column += 1)
      y[row * width + column] = dot(x, a, w, column * depth, depth, bias?.data[column]);
  }
  return made;
}

/**
 * @param {NdArray} a
 * @param {NdArray} b
 * @returns {NdArray}
 */
function matmul(a, b) {
  const [rows, depth] = a.shape.slice(-2);
  const width = b.shape[b.shape.length - 1];
  const [outerA, outerB] = [a.shape.slice(0, -2), b.shape.slice(0, -2)];
  const outer = broadcastShape([outerA, outerB]);
  const [fromA, fromB] = [outerA, outerB].map((one) => places(outer, stridesOf(one, outer)));
  const made = zeros([...outer, rows, width]);
  const sums = new Float64Array(width);
  for (let block = 0; block < sizeOf(outer); block += 1)
    for (let row = 0; row < rows; row += 1) {
      sums.fill(0);
      const left = (fromA[block] * rows + row) * depth;
      for (let k = 0; k < depth; k += 1) {
        const one = a.data[left + k];
        if (one === 0) continue; // as most attention weights of a causal model are
        const right = (fromB[block] * depth + k) * width;
        for (let column = 0; column < width; column += 1) sums[column] += one * b.data[right + column];
      }
      made.data.set(sums, (block * rows + row) * width);
    }
  return made;
}

/**
 * Each row [D] of an array, as another.
 * @param {NdArray} input
 * @param {(row: NdArray["data"], made: NdArray["data"]) => void} act
 * @returns {NdArray}
 */
function byRow(input, act) {
  const made = zeros(input.shape);
  const width = input.shape[input.shape.length - 1];
  for (let start = 0; start < made.data.length; start += width)
    act(input.data.subarray(start, start + width), made.data.subarray(start, start + width));
  return made;
}

/**
 * The mean and the variance of values.
 * @param {NdArray["data"] | Float64Array} row
 * @param {number} [correction]
 * @returns {[number, number]}
 */
function moments(row, correction = 0) {
  let sum = 0;
  for (const one of row) sum += one;
  const mean = sum / row.length;
  let squares = 0;
  for (const one of row) squares += (one - mean) ** 2;
  return [mean, squares / (row.length - correction)];
}

/**
 * A reduction over some axes, or over all.
 * @param {(values: Float64Array) => number} compute
 * @returns {Operation}
 */
function reduction(compute) {
  return ({ self, dim, keepdim }, dtype) => {
    const chosen = [dim ?? []].flat().map((one) => axisOf(self, one));
    const axes = chosen.length ? chosen : [...self.shape.keys()];
    const strides = stridesOf(self.shape);
    const kept = [...self.shape.keys()].filter((axis) => !axes.includes(axis));
    const pick = (/** @type {number[]} */ from, /** @type {number[]} */ which) => which.map((axis) => from[axis]);
    const shape = keepdim
      ? self.shape.map((/** @type {number} */ size, /** @type {number} */ axis) => (axes.includes(axis) ? 1 : size))
      : pick(self.shape, kept);
    const made = zeros(shape, dtype);
    const starts = places(pick(self.shape, kept), pick(strides, kept));
    const inside = places(pick(self.shape, axes), pick(strides, axes));
    const values = new Float64Array(inside.length);
    for (let i = 0; i < starts.length; i += 1) {
      for (let k = 0; k < inside.length; k += 1) values[k] = self.data[starts[i] + inside[k]];
      made.data[i] = compute(values);
    }
    return made;
  };
}

const sum = (/** @type {Float64Array} */ values) => values.reduce((total, one) => total + one, 0);

/** @type {Record<string, Operation>} */
export const products = {
  linear: ({ input, weight, bias }) => linear(input, weight, bias),
  matmul: ({ self, other }) => matmul(self, other),
  embedding: ({ weight, indices }) => {
    const width = weight.shape[1];
    const made = zeros([...indices.shape, width]);
    for (let i = 0; i < indices.data.length; i += 1)
      made.data.set(weight.data.subarray(indices.data[i] * width, (indices.data[i] + 1) * width), i * width);
    return made;
  },
  layer_norm: ({ input, weight, bias, eps }) =>
    byRow(input, (row, made) => {
      const [mean, variance] = moments(row);
      const scale = 1 / Math.sqrt(variance + eps);
      for (let i = 0; i < row.length; i += 1)
        made[i] = (row[i] - mean) * scale * (weight ? weight.data[i] : 1) + (bias ? bias.data[i] : 0);
    }),
  rms_norm: ({ input, weight, eps }) =>
    byRow(input, (row, made) => {
      let squares = 0;
      for (const one of row) squares += one * one;
      const scale = 1 / Math.sqrt(squares / row.length + eps);
      for (let i = 0; i < row.length; i += 1) made[i] = row[i] * scale * (weight ? weight.data[i] : 1);
    }),
  softmax: ({ self, dim }) => {
    const made = zeros(self.shape);
    const [blocks, size, inner] = around(self, dim);
    for (let block = 0; block < blocks; block += 1)
      for (let k = 0; k < inner; k += 1) {
        const start = block * size * inner + k;
        let top = -Infinity;
        for (let i = 0; i < size; i += 1) top = Math.max(top, self.data[start + i * inner]);
        let total = 0;
        for (let i = 0; i < size; i += 1) total += Math.exp(self.data[start + i * inner] - top);
        for (let i = 0; i < size; i += 1)
          made.data[start + i * inner] = Math.exp(self.data[start + i * inner] - top) / total;
      }
    return made;
  },
  amax: reduction((values) => values.reduce((most, one) => Math.max(most, one), -Infinity)),
  any: reduction((values) => Number(values.some((one) => one !== 0))),
  argmax: reduction((values) => values.indexOf(values.reduce((most, one) => Math.max(most, one), -Infinity))),
  mean: reduction((values) => sum(values) / values.length),
  sum: reduction(sum),
  var: ({ self, dim, correction, keepdim }, dtype) =>
    reduction((values) => moments(values, correction ?? 1)[1])({ self, dim, keepdim }, dtype),
  cumsum: ({ self, dim }, dtype) => {
    const made = zeros(self.shape, dtype);
    const [blocks, size, inner] = around(self, dim);
    for (let block = 0; block < blocks; block += 1)
      for (let k = 0; k < inner; k += 1) {
        let total = 0;
        for (let i = 0; i < size; i += 1) {
          const at = (block * size + i) * inner + k;
          total += self.data[at];
          made.data[at] = total;
        }
      }
    return made;
  },
};
