// BPE training on a text, merge by merge: text/bpe/algorithm.py in the browser.

import { showWhitespace } from "glasshouse/live/visible.js";

const MAX_CHARS = 20_000; // of the training text
const MAX_MERGES = 400; // replayed
const RUNNERS_UP = 4;
const GPT2 =
  /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** Bytes in the order of their tokens: those that are printed, then the others, by the characters of GPT-2's table. */
const ORDER = (() => {
  const isPrinted = (/** @type {number} */ byte) =>
    (byte >= 0x21 && byte < 0x7f) || (byte >= 0xa1 && byte < 0xad) || byte >= 0xae;
  const every = [...Array(256).keys()];
  return [...every.filter(isPrinted), ...every.filter((byte) => !isPrinted(byte))];
})();

/**
 * Where each pair of neighbours occurs in words, with how often.
 * @param {{ tokens: number[], count: number }[]} words
 * @returns {Map<string, { pair: [number, number], count: number }>}
 */
function countPairs(words) {
  /** @type {Map<string, { pair: [number, number], count: number }>} */
  const pairs = new Map();
  for (const { tokens, count } of words)
    for (let i = 0; i + 1 < tokens.length; i += 1) {
      const key = `${tokens[i]} ${tokens[i + 1]}`;
      const known = pairs.get(key);
      if (known) known.count += count;
      else pairs.set(key, { pair: [tokens[i], tokens[i + 1]], count });
    }
  return pairs;
}

/**
 * @param {number[]} tokens
 * @param {[number, number]} pair
 * @param {number} made
 * @returns {number[]}
 */
function merged(tokens, pair, made) {
  const found = [];
  for (let i = 0; i < tokens.length; i += 1) {
    const isPair = tokens[i] === pair[0] && i + 1 < tokens.length && tokens[i + 1] === pair[1];
    found.push(isPair ? made : tokens[i]);
    if (isPair) i += 1;
  }
  return found;
}

/** @type {LiveEndpoint<"train_bpe">} */
function trainBpe(_, { text = "", merges = 50 }) {
  if (!(merges > 0 && merges <= MAX_MERGES))
    throw new Error(`merges is ${merges}, but it must be within 1 and ${MAX_MERGES}.`);
  const characters = [...text];
  const encoder = new TextEncoder();
  const split = (characters.slice(0, MAX_CHARS).join("").match(GPT2) ?? []).map((/** @type {string} */ one) =>
    encoder.encode(one),
  );
  const ids = new Map(ORDER.map((byte, id) => [byte, id]));
  /** @type {Uint8Array[]} */
  const spelled = ORDER.map((byte) => Uint8Array.of(byte));
  /** @type {Map<string, { tokens: number[], count: number }>} */
  const known = new Map();
  for (const word of split) {
    const tokens = [...word].map((byte) => /** @type {number} */ (ids.get(byte)));
    const one = known.get(tokens.join(" "));
    if (one) one.count += 1;
    else known.set(tokens.join(" "), { tokens, count: 1 });
  }
  const words = [...known.values()];
  const show = (/** @type {number} */ id) => showWhitespace(spelled[id]);
  const both = (/** @type {[number, number]} */ pair) => /** @type {Pair} */ (pair.map(show));
  const steps = [];
  while (steps.length < merges) {
    const order = [...countPairs(words).values()].sort(
      (a, b) => b.count - a.count || a.pair[0] - b.pair[0] || a.pair[1] - b.pair[1],
    );
    if (!order.length) break;
    const [best, ...others] = order.slice(0, 1 + RUNNERS_UP);
    spelled.push(Uint8Array.of(...spelled[best.pair[0]], ...spelled[best.pair[1]]));
    for (const word of words) word.tokens = merged(word.tokens, best.pair, spelled.length - 1);
    steps.push({
      merge: both(best.pair),
      token: show(spelled.length - 1),
      count: best.count,
      runners_up: others.map(({ pair, count }) => ({ merge: both(pair), count })),
      tokens: words.reduce((sum, { tokens, count }) => sum + tokens.length * count, 0),
    });
  }
  return {
    words: split.map((/** @type {Uint8Array} */ word) =>
      [...word].map((byte) => showWhitespace(Uint8Array.of(byte))),
    ),
    steps,
    cut: characters.length > MAX_CHARS,
  };
}

export const bpeTraining = { train_bpe: trainBpe };
