// Arrays of the interpreter: a shape, a dtype and the values in row-major order. They are never written to once made.

const TYPES = { float32: Float32Array, float64: Float64Array, int64: Int32Array, bool: Uint8Array };

/**
 * @param {number[]} shape
 * @returns {number}
 */
export function sizeOf(shape) {
  return shape.reduce((product, one) => product * one, 1);
}

/**
 * An array of zeros.
 * @param {number[]} shape
 * @param {Dtype} [dtype]
 * @returns {NdArray}
 */
export function zeros(shape, dtype = "float32") {
  return { shape, dtype, data: /** @type {Float32Array} */ (new TYPES[dtype](sizeOf(shape))) };
}

/**
 * The same values in another shape, in which one size may be -1.
 * @param {NdArray} array
 * @param {number[]} shape
 * @returns {NdArray}
 */
export function reshaped(array, shape) {
  const known = shape.reduce((product, one) => (one === -1 ? product : product * one), 1);
  return { ...array, shape: shape.map((one) => (one === -1 ? array.data.length / known : one)) };
}

/**
 * How far apart neighbours along each axis are; 0 along an axis that is broadcast to a shape.
 * @param {number[]} shape
 * @param {number[]} [to]
 * @returns {number[]}
 */
export function stridesOf(shape, to = shape) {
  const strides = Array(to.length).fill(0);
  let step = 1;
  for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
    strides[axis + to.length - shape.length] = shape[axis] === 1 ? 0 : step;
    step *= shape[axis];
  }
  return strides;
}

/**
 * The shape that shapes are broadcast to.
 * @param {number[][]} shapes
 * @returns {number[]}
 */
export function broadcastShape(shapes) {
  const rank = Math.max(...shapes.map((one) => one.length));
  return Array.from({ length: rank }, (_, axis) => {
    const sizes = shapes.map((one) => one[axis + one.length - rank] ?? 1);
    return sizes.find((one) => one !== 1) ?? 1;
  });
}

/**
 * Where in an array the values of another shape are: as many numbers as that shape has.
 * @param {number[]} shape
 * @param {number[]} strides
 * @param {number} [start]
 * @returns {Int32Array}
 */
export function places(shape, strides, start = 0) {
  const found = new Int32Array(sizeOf(shape));
  if (!found.length) return found;
  found[0] = start;
  let filled = 1;
  for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
    const block = filled;
    for (let i = 1; i < shape[axis]; i += 1)
      for (let k = 0; k < block; k += 1) found[filled + (i - 1) * block + k] = found[k] + i * strides[axis];
    filled *= shape[axis];
  }
  return found;
}

/**
 * An axis counted from the front.
 * @param {NdArray} array
 * @param {number} axis
 * @returns {number}
 */
export function axisOf(array, axis) {
  return axis < 0 ? axis + array.shape.length : axis;
}

/**
 * A view on an axis: how many blocks are before it, its size, and how many values a step along it skips.
 * @param {NdArray} array
 * @param {number} given
 * @returns {[number, number, number]}
 */
export function around(array, given) {
  const axis = axisOf(array, given);
  return [sizeOf(array.shape.slice(0, axis)), array.shape[axis], sizeOf(array.shape.slice(axis + 1))];
}

/**
 * Values in a shape of which one axis has another size.
 * @param {number[]} shape
 * @param {number} axis
 * @param {number} size
 * @returns {number[]}
 */
export function withSize(shape, axis, size) {
  return shape.map((one, number) => (number === axis ? size : one));
}

/**
 * Float16 as float32: the weights of the file.
 * @param {Uint16Array} halves
 * @returns {Float32Array}
 */
export function fromHalf(halves) {
  const wide = new Float32Array(halves.length);
  const bits = new Uint32Array(wide.buffer);
  for (let i = 0; i < halves.length; i += 1) {
    const half = halves[i];
    const exponent = (half >> 10) & 31;
    if (exponent) bits[i] = ((half & 0x8000) << 16) | ((exponent + 112) << 23) | ((half & 1023) << 13);
    else wide[i] = (half & 0x8000 ? -1 : 1) * (half & 1023) * 2 ** -24; // too small for an exponent
  }
  return wide;
}
