// Byte-level BPE: text to token ids and back, with the same ids as in Python.

/** How texts are split into words, as in text/bpe/pretokenizer.py; JavaScript's \s has other spaces than Unicode's. */
const PATTERNS = {
  gpt2: [
    "'(?:[sdmt]|ll|ve|re)",
    " ?\\p{L}+",
    " ?\\p{N}+",
    " ?[^\\p{White_Space}\\p{L}\\p{N}]+",
    "\\p{White_Space}+(?!\\P{White_Space})",
    "\\p{White_Space}+",
  ],
  gpt4: [
    "'(?:[sSſtTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])",
    "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+",
    "\\p{N}{1,3}",
    " ?[^\\p{White_Space}\\p{L}\\p{N}]+[\\r\\n]*",
    "\\p{White_Space}*[\\r\\n]+",
    "\\p{White_Space}+(?!\\P{White_Space})",
    "\\p{White_Space}+",
  ],
};
const LONE_SURROGATE = /[\uD800-\uDBFF](?![\uDC00-\uDFFF])|(?<![\uD800-\uDBFF])[\uDC00-\uDFFF]/;

export class Tokenizer {
  /** @param {TokenizerJson} json */
  constructor(json) {
    this.json = json;
    this.pattern = new RegExp(PATTERNS[json.pattern].join("|"), "gu");
    this.special = new Set(json.tokens.filter((one) => one.kind === "special").map((one) => one.id));
    /** @type {Map<number, { rank: number, id: number }>} */
    this.merges = new Map(); // by both ids
    json.merges.forEach(([left, right, id], rank) => {
      this.merges.set(this.pair(left, right), { rank, id });
    });
    /** @type {Map<string, number>} */
    this.words = new Map(); // of a vocabulary whose whole words need no merges
    if (json.ignore_merges)
      for (const one of json.tokens) if (one.bytes && !this.special.has(one.id)) this.words.set(one.bytes, one.id);
  }

  /**
   * @param {number} left
   * @param {number} right
   * @returns {number}
   */
  pair(left, right) {
    return left * this.json.tokens.length + right;
  }

  /**
   * The words of a text, which no merge crosses, each as bytes.
   * @param {string} text
   * @returns {Uint8Array[]}
   */
  split(text) {
    const lone = LONE_SURROGATE.exec(text);
    if (lone) {
      const index = [...text.slice(0, lone.index)].length;
      throw new Error(`the text has a lone surrogate at index ${index}; replace it.`);
    }
    const normal = this.json.normalizer ? text.normalize(this.json.normalizer) : text;
    const encoder = new TextEncoder();
    return (normal.match(this.pattern) ?? []).map((word) => encoder.encode(word));
  }

  /**
   * The tokens of a word, first its bytes, then after each merge.
   * @param {Uint8Array} word
   * @returns {{ rank: number, merge: [number, number], tokens: number[] }[]}
   */
  mergeSteps(word) {
    let tokens = [...word].map((byte) => this.json.bytes[byte]);
    const steps = [{ rank: -1, merge: /** @type {[number, number]} */ ([0, 0]), tokens }];
    for (;;) {
      let best;
      let merge = /** @type {[number, number]} */ ([0, 0]);
      for (let i = 0; i + 1 < tokens.length; i += 1) {
        const found = this.merges.get(this.pair(tokens[i], tokens[i + 1]));
        if (found && (!best || found.rank < best.rank)) [best, merge] = [found, [tokens[i], tokens[i + 1]]];
      }
      if (!best) return steps;
      const merged = [];
      for (let i = 0; i < tokens.length; i += 1) {
        const isPair = tokens[i] === merge[0] && i + 1 < tokens.length && tokens[i + 1] === merge[1];
        merged.push(isPair ? best.id : tokens[i]);
        if (isPair) i += 1;
      }
      tokens = merged;
      steps.push({ rank: best.rank, merge, tokens });
    }
  }

  /**
   * @param {string} text
   * @param {{ addSpecialTokens?: boolean }} [options]
   * @returns {number[]}
   */
  encode(text, { addSpecialTokens = true } = {}) {
    const ids = this.split(text).flatMap((word) => {
      const whole = this.words.size ? this.words.get(String.fromCharCode(...word)) : undefined;
      return whole === undefined ? /** @type {any} */ (this.mergeSteps(word).at(-1)).tokens : [whole];
    });
    return addSpecialTokens ? [...this.json.before, ...ids, ...this.json.after] : ids;
  }

  /**
   * @param {number[]} ids
   * @returns {Uint8Array<ArrayBuffer>}
   */
  bytes(ids) {
    const characters = ids.map((one) => this.json.tokens[one]?.bytes ?? "").join("");
    return Uint8Array.from(characters, (one) => one.charCodeAt(0));
  }

  /**
   * @param {number[]} ids
   * @returns {string}
   */
  decode(ids) {
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.bytes(ids));
  }

  /**
   * Tokens as the page shows them.
   * @param {Iterable<number>} ids
   * @returns {Token[]}
   */
  describe(ids) {
    return [...ids].map((id) => {
      const { bytes: _, ...shown } = this.json.tokens[id] ?? { id, text: String(id), bytes: "" };
      return shown;
    });
  }
}
