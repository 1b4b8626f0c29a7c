// Tokens, predictions at a position, and generation.

import { generate, samplingDistribution } from "glasshouse/live/generation.js";
import { entropyOf, finiteOrNull, largest, logSoftmax, requireWithin, rowOf } from "glasshouse/live/numbers.js";
import { showWhitespace } from "glasshouse/live/visible.js";

const MAX_NEW_TOKENS = 256; // per request
const LONGEST = 100; // bytes of the longest word shown; of a longer one, only the token

/** @type {LiveEndpoint<"tokenize">} */
function tokenize(model, { forward_pass: { prompt } }) {
  const { source, ids } = model.inputs(prompt);
  const { tokenizer, about } = model;
  if (model.isSeq2Seq) {
    const rows = { source: tokenizer.describe(source), target: tokenizer.describe(ids) };
    return /** @type {Tokens} */ ({ ...rows, start: about.opening.length });
  }
  const text = tokenizer.describe(ids);
  for (const at of prompt.masked ?? []) if (text[at]) text[at].masked = true;
  return /** @type {Tokens} */ ({ text });
}

/**
 * The logits at a position, or of the whole text where the head pools it.
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @param {number} position
 * @returns {NdArray["data"]}
 */
export function logitsAt(trace, position) {
  const { n_outputs: outputs, head } = trace.model.about;
  if (!outputs) throw new Error(`the head is '${head}', which predicts no tokens or labels.`);
  return rowOf(trace.logits, position);
}

/** @type {LiveEndpoint<"next">} */
function next(model, { forward_pass: forwardPass, position = -1, show = 12, ...settings }) {
  const trace = model.trace(forwardPass);
  const { length } = trace.ids;
  requireWithin("position", position, -length, length - 1);
  const at = position < 0 ? position + length : position;
  const logits = logitsAt(trace, at);
  const own = logSoftmax(logits);
  const sampling = samplingDistribution(logits, settings);
  const top = largest(own, Math.max(1, show));
  const isNext = model.about.kind !== "encoder" && model.about.head === "next_token" && at + 1 < length;
  const actual = isNext ? trace.ids[at + 1] : null;
  if (actual !== null && !top.includes(actual)) top.push(actual);
  const described = model.describe(top);
  return {
    position: at,
    candidates: top.map((id, rank) => ({
      ...described[rank],
      probability: Math.exp(own[id]),
      sampling_probability: sampling[id],
      logit: logits[id],
    })),
    actual_next: actual,
    entropy: entropyOf(own),
    sampling_entropy: entropyOf(sampling.map(Math.log)),
    n_candidates: sampling.filter((one) => one > 0).length,
  };
}

/** @type {LiveEndpoint<"generate">} */
function generateText(model, { forward_pass: forwardPass, max_new_tokens: most = 20, temperature = 0, ...settings }) {
  requireWithin("max_new_tokens", most, 1, MAX_NEW_TOKENS);
  const made = generate(model.trace(forwardPass), { ...settings, temperature, max_new_tokens: most });
  return {
    tokens: model.tokenizer.describe(made.ids),
    logprobs: made.logprobs.map(finiteOrNull),
    text: model.tokenizer.decode(made.ids),
    finish_reason: made.finish_reason,
  };
}

/**
 * How a token is merged from others.
 * @param {import("glasshouse/live/tokenizer.js").Tokenizer} tokenizer
 * @param {number} id
 * @returns {MergeTree}
 */
function tree(tokenizer, id) {
  const [{ text }] = tokenizer.describe([id]);
  const steps = tokenizer.mergeSteps(tokenizer.bytes([id]));
  const last = steps[steps.length - 1];
  if (steps.length < 2 || last.tokens.length !== 1 || last.tokens[0] !== id) return { text, rank: null, parts: [] };
  return { text, rank: last.rank, parts: last.merge.map((one) => tree(tokenizer, one)) };
}

/**
 * The word that contains a token; null for special tokens and where words and tokens do not align.
 * @param {import("glasshouse/live/tokenizer.js").Tokenizer} tokenizer
 * @param {number[]} ids
 * @param {number} position
 * @returns {Uint8Array | null}
 */
function wordAt(tokenizer, ids, position) {
  if (tokenizer.special.has(ids[position])) return null;
  const plain = (/** @type {number[]} */ some) => tokenizer.bytes(some.filter((one) => !tokenizer.special.has(one)));
  const start = plain(ids.slice(0, position)).length;
  const own = tokenizer.bytes([ids[position]]);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(plain(ids));
  } catch {
    return own;
  }
  let end = 0;
  for (const word of tokenizer.split(text)) {
    end += word.length;
    if (start < end) return word.length <= LONGEST ? word : own;
  }
  return null;
}

/** @type {LiveEndpoint<"word_merges">} */
function wordMerges(model, { forward_pass: forwardPass, position = 0, side = "text" }) {
  const { tokenizer } = model;
  const { source, ids } = model.inputs(forwardPass.prompt);
  const row = side === "source" ? source : ids;
  requireWithin("position", position, 0, row.length - 1);
  const word = wordAt(tokenizer, row, position);
  if (!word) return { word: tokenizer.describe([row[position]])[0].text, steps: [], trees: [] };
  const texts = (/** @type {number[]} */ some) => tokenizer.describe(some).map((one) => one.text);
  const steps = tokenizer.mergeSteps(word);
  const { tokens } = steps[steps.length - 1];
  return {
    word: showWhitespace(word),
    steps: steps.map(({ rank, merge, tokens: made }, number) =>
      number
        ? { rank, merge: /** @type {Pair} */ (texts(merge)), tokens: texts(made) }
        : /** @type {any} */ ({ tokens: texts(made) }),
    ),
    trees: tokens.map((one) => tree(tokenizer, one)),
  };
}

export const tokens = { tokenize, next, generate: generateText, word_merges: wordMerges };
