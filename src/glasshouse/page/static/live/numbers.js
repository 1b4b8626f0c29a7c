// Probabilities and norms of rows of numbers, computed in 64 bits.

/**
 * Row `index` of an array of two axes, or the only one of an array of one.
 * @param {NdArray} array
 * @param {number} index
 * @returns {NdArray["data"]}
 */
export function rowOf(array, index) {
  const width = array.shape[array.shape.length - 1];
  return array.shape.length === 1 ? array.data : array.data.subarray(index * width, (index + 1) * width);
}

/**
 * @param {ArrayLike<number>} logits
 * @returns {Float64Array}
 */
export function logSoftmax(logits) {
  let top = -Infinity;
  for (let i = 0; i < logits.length; i += 1) if (logits[i] > top) top = logits[i];
  let total = 0;
  for (let i = 0; i < logits.length; i += 1) total += Math.exp(logits[i] - top);
  const log = top + Math.log(total);
  return Float64Array.from(logits, (one) => one - log);
}

/**
 * @param {ArrayLike<number>} values
 * @returns {number}
 */
export function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i += 1) if (values[i] > values[best]) best = i;
  return best;
}

/**
 * The places of the largest values, the largest first.
 * @param {ArrayLike<number>} values
 * @param {number} count
 * @returns {number[]}
 */
export function largest(values, count) {
  const order = Array.from(values, (_, at) => at);
  return order.sort((a, b) => values[b] - values[a] || a - b).slice(0, count);
}

/**
 * @param {ArrayLike<number>} values
 * @returns {number}
 */
export function norm(values) {
  let squares = 0;
  for (let i = 0; i < values.length; i += 1) squares += values[i] * values[i];
  return Math.sqrt(squares);
}

/**
 * @param {ArrayLike<number>} logprobs
 * @returns {number}
 */
export function entropyOf(logprobs) {
  let sum = 0;
  for (let i = 0; i < logprobs.length; i += 1)
    if (logprobs[i] > -Infinity) sum -= Math.exp(logprobs[i]) * logprobs[i];
  return sum;
}

/**
 * A tensor as the page reads it.
 * @param {number[]} shape
 * @param {ArrayLike<number>} values
 * @returns {Tensor}
 */
export function tensor(shape, values) {
  return { shape, data: Float32Array.from(values) };
}

/**
 * @param {number} value
 * @returns {number | null}
 */
export function finiteOrNull(value) {
  return Number.isFinite(value) ? value : null;
}

/**
 * Raise unless a number of a request is within a range.
 * @param {string} name
 * @param {number} value
 * @param {number} first
 * @param {number} last
 */
export function requireWithin(name, value, first, last) {
  if (!(value >= first && value <= last))
    throw new Error(`${name} is ${value}, but it must be within ${first} and ${last}.`);
}
