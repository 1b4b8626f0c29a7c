// Operations on one value at a time, with broadcasting, named and with arguments as in ATen.

import { broadcastShape, places, stridesOf, zeros } from "glasshouse/live/array.js";

/**
 * A number as an array of no axes.
 * @param {NdArray | number | string} given
 * @returns {NdArray}
 */
function asArray(given) {
  if (typeof given === "object") return given;
  const number = given === "inf" ? Infinity : given === "-inf" ? -Infinity : Number(given);
  return { shape: [], dtype: "float64", data: /** @type {any} */ (Float64Array.of(number)) };
}

/**
 * @param {(x: number) => number} compute
 * @returns {Operation}
 */
function unary(compute) {
  return ({ self }, dtype) => {
    const made = zeros(self.shape, dtype);
    for (let i = 0; i < made.data.length; i += 1) made.data[i] = compute(self.data[i]);
    return made;
  };
}

/**
 * @param {(values: number[]) => number} compute
 * @param {NdArray[]} arrays
 * @param {Dtype} dtype
 * @returns {NdArray}
 */
function broadcast(compute, arrays, dtype) {
  const shape = broadcastShape(arrays.map((one) => one.shape));
  const made = zeros(shape, dtype);
  const where = arrays.map((one) => places(shape, stridesOf(one.shape, shape)));
  const values = arrays.map(() => 0);
  for (let i = 0; i < made.data.length; i += 1) {
    for (let k = 0; k < arrays.length; k += 1) values[k] = arrays[k].data[where[k][i]];
    made.data[i] = compute(values);
  }
  return made;
}

/**
 * @param {(x: number, y: number) => number} compute
 * @param {string} [first]
 * @param {string} [second]
 * @returns {Operation}
 */
function binary(compute, first = "self", second = "other") {
  return (args, dtype) => {
    const [x, y] = [asArray(args[first]), asArray(args[second])];
    const shape = broadcastShape([x.shape, y.shape]);
    const made = zeros(shape, dtype);
    const count = made.data.length;
    const [a, b, c] = [x.data, y.data, made.data];
    if (a.length === count && b.length === 1) {
      const one = b[0];
      for (let i = 0; i < count; i += 1) c[i] = compute(a[i], one);
    } else if (a.length === count && b.length === count) {
      for (let i = 0; i < count; i += 1) c[i] = compute(a[i], b[i]);
    } else {
      const [from, to] = [places(shape, stridesOf(x.shape, shape)), places(shape, stridesOf(y.shape, shape))];
      for (let i = 0; i < count; i += 1) c[i] = compute(a[from[i]], b[to[i]]);
    }
    return made;
  };
}

/** The error function, to 1e-16: its series, and far out its continued fraction. @param {number} x */
export function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  if (size < 2.5) {
    let term = size;
    let sum = size;
    for (let n = 1; Math.abs(term) > 1e-17 * sum; n += 1) {
      term *= (-size * size) / n;
      sum += term / (2 * n + 1);
      if (n > 200) break;
    }
    return (Math.sign(x) * 2 * sum) / Math.sqrt(Math.PI);
  }
  let fraction = 0;
  for (let n = 60; n > 0; n -= 1) fraction = n / 2 / (size + fraction);
  return Math.sign(x) * (1 - Math.exp(-size * size) / (size + fraction) / Math.sqrt(Math.PI));
}

const sigmoid = (/** @type {number} */ x) => 1 / (1 + Math.exp(-x));
/** @type {Record<string, (x: number) => number>} */
const GELU = {
  none: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
};
/** @type {Record<string, (x: number) => number>} */
const ROUNDED = { floor: Math.floor, trunc: Math.trunc };

/** @type {Record<string, Operation>} */
export const elementwise = {
  abs: unary(Math.abs),
  bitwise_not: ({ self }, dtype) => unary(dtype === "bool" ? (x) => 1 - x : (x) => ~x)({ self }, dtype),
  cos: unary(Math.cos),
  exp: unary(Math.exp),
  gelu: ({ self, approximate }, dtype) => unary(GELU[approximate])({ self }, dtype),
  log: unary(Math.log),
  logical_not: unary((x) => Number(!x)),
  neg: unary((x) => -x),
  reciprocal: unary((x) => 1 / x),
  relu: unary((x) => Math.max(x, 0)),
  rsqrt: unary((x) => 1 / Math.sqrt(x)),
  sigmoid: unary(sigmoid),
  silu: unary((x) => x * sigmoid(x)),
  sin: unary(Math.sin),
  sqrt: unary(Math.sqrt),
  square: unary((x) => x * x),
  tanh: unary(Math.tanh),
  to: ({ self }, dtype) => unary(dtype === "bool" ? (x) => Number(x !== 0) : (x) => x)({ self }, dtype),

  add: ({ self, other, alpha }, dtype) => binary((x, y) => x + (alpha ?? 1) * y)({ self, other }, dtype),
  bitwise_and: binary((x, y) => x & y),
  bitwise_or: binary((x, y) => x | y),
  div: ({ self, other, rounding_mode: mode }, dtype) =>
    binary(mode ? (x, y) => ROUNDED[mode](x / y) : (x, y) => x / y)({ self, other }, dtype),
  eq: binary((x, y) => Number(x === y)),
  ge: binary((x, y) => Number(x >= y)),
  gt: binary((x, y) => Number(x > y)),
  le: binary((x, y) => Number(x <= y)),
  logical_and: binary((x, y) => Number(x && y)),
  logical_or: binary((x, y) => Number(x || y)),
  lt: binary((x, y) => Number(x < y)),
  maximum: binary(Math.max),
  minimum: binary(Math.min),
  mul: binary((x, y) => x * y),
  ne: binary((x, y) => Number(x !== y)),
  pow: binary((x, y) => x ** y, "self", "exponent"),
  rsub: binary((x, y) => y - x),
  sub: ({ self, other, alpha }, dtype) => binary((x, y) => x - (alpha ?? 1) * y)({ self, other }, dtype),

  clamp: ({ self, min, max }, dtype) => {
    const [low, high] = [asArray(min ?? "-inf"), asArray(max ?? "inf")];
    return broadcast(([x, a, b]) => Math.min(Math.max(x, a), b), [self, low, high], dtype);
  },
  masked_fill: ({ self, mask, value }, dtype) =>
    broadcast(([x, hidden, other]) => (hidden ? other : x), [self, mask, asArray(value)], dtype),
  where: ({ condition, self, other }, dtype) =>
    broadcast(([is, x, y]) => (is ? x : y), [condition, asArray(self), asArray(other)], dtype),
};
