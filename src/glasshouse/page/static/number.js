// Number formatting: few digits on the screen, all of them in data-value.

/**
 * A number in about three digits.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === Infinity) return "∞";
  if (value === -Infinity) return "−∞";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size >= 1e6 || size < 1e-3) text = value.toExponential(1);
  else if (size >= 100) text = value.toFixed(0);
  else if (size >= 10) text = value.toFixed(1);
  else text = value.toFixed(size >= 1 ? 2 : 3);
  return text.replace("-", "−");
}

/**
 * A share as a percentage.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const share = 100 * value;
  if (share === 0) return "0%";
  if (share < 0.01) return "<0.01%";
  return `${share >= 99.95 ? share.toFixed(0) : share >= 10 ? share.toFixed(1) : share.toFixed(2)}%`;
}

/**
 * A count with separators, or shortened: 124M.
 * @param {number} value
 * @returns {string}
 */
export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)}B`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e8 ? 0 : 1)}M`;
  return value.toLocaleString("en");
}

/**
 * A number within 0 and `most`.
 * @param {number} value
 * @param {number} most
 * @returns {number}
 */
export function clamp(value, most) {
  return Math.max(0, Math.min(most, value));
}

/**
 * A rounded number with its sign.
 * @param {number} value
 * @returns {string}
 */
export function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value);
}

/**
 * One of a thing, or several.
 * @param {number} n
 * @param {string} one
 * @param {string} [many]
 * @returns {string}
 */
export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
