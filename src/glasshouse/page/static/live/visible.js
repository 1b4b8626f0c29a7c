// Text with visible whitespace, as Python's escaping.py shows it.

/** @type {Record<string, string>} */
const SYMBOLS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\\": "\\\\" };
const UNPRINTABLE = /[\p{C}\p{Z}␣⏎⇥¶←]/u;
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/**
 * The length of the character at a place of UTF-8 bytes; 0 for an invalid byte.
 * @param {Uint8Array} bytes
 * @param {number} at
 * @returns {number}
 */
function lengthAt(bytes, at) {
  const first = bytes[at];
  const length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  try {
    strict.decode(bytes.subarray(at, at + length));
    return at + length <= bytes.length ? length : 0;
  } catch {
    return 0;
  }
}

/**
 * @param {string} character
 * @param {Record<string, string>} [symbols]
 * @returns {string}
 */
function shown(character, symbols = SYMBOLS) {
  if (character in symbols) return symbols[character];
  if (!UNPRINTABLE.test(character)) return character;
  const code = /** @type {number} */ (character.codePointAt(0));
  const digits = code.toString(16);
  if (code < 0x80) return `\\x${digits.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

/**
 * A text with control characters escaped, and whitespace as it is.
 * @param {string} text
 * @returns {string}
 */
export function escapeControl(text) {
  return [...text].map((one) => (one === " " || !/[\p{C}\p{Z}]/u.test(one) ? one : shown(one, {}))).join("");
}

/**
 * @param {Uint8Array} bytes
 * @returns {string}
 */
export function showWhitespace(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; ) {
    const length = lengthAt(bytes, at);
    text += length
      ? shown(strict.decode(bytes.subarray(at, at + length)))
      : `\\x${bytes[at].toString(16).padStart(2, "0")}`;
    at += Math.max(length, 1);
  }
  return text;
}
