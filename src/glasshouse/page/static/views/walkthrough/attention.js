// Steps of one attention head and of the output projection.

import { h } from "glasshouse/dom.js";
import { count, percent, plural, short } from "glasshouse/number.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { addend, given, linear, partOf } from "glasshouse/views/walkthrough/card.js";
import {
  bracketed,
  dials,
  everywhere,
  FIRST,
  groups,
  heads,
  keyed,
  largest,
  rows,
  single,
  small,
  weighted,
} from "glasshouse/views/walkthrough/figures.js";

/** @type {Describe<"query" | "key" | "value" | "rotate" | "scores" | "softcap" | "bias" | "mask" | "softmax" | "gather" | "join" | "out">} */
export const attention = {
  query: (card, c) =>
    linear(card, c, {
      name: "Query projection",
      letters: { y: "q", W: "W_Q", x: given(c), b: "b_Q" },
      why: `The query of head ${c.found.head} in layer ${c.found.layer}, ${c.model.d_head} numbers; it is compared with the key of every token.`,
    }),

  key(card, c) {
    const { n_heads: all, n_kv_heads: shared } = c.model;
    const made = linear(card, c, {
      name: "Key projection",
      letters: { y: keyName(card, "k"), W: "W_K", x: readName(card, c), b: "b_K" },
      why: `${whose(card, c)} ${sharing(all, shared, c.found.head, card.kv)}`,
    });
    return { ...made, figure: () => [made.figure(), groups(all, shared, c.found.head)] };
  },

  value: (card, c) =>
    linear(card, c, {
      name: "Value projection",
      letters: { y: keyName(card, "v"), W: "W_V", x: readName(card, c), b: "b_V" },
      why: "Queries that attend to this token receive this vector, scaled by the attention weight.",
    }),

  rotate: (card, c) => ({
    name: "Rotary position embedding (RoPE)",
    formula: `(q_${card.layout === "pairs" ? "{2i}" : "i"}, q_{${card.layout === "pairs" ? "2i+1" : `i+${card.width / 2}`}}) rotated by θ_i = ${card.place} · ${count(card.theta)}^{-2i/${card.width}}`,
    legend: [
      [
        "θ_i",
        `the angle of pair i: the position, ${card.place}, times a frequency that decreases with i${card.scaling === "none" ? "" : `, rescaled for long contexts (${card.scaling})`}`,
      ],
    ],
    why: `Each pair ${card.width < c.model.d_head ? `of the first ${card.width} of ${c.model.d_head} ` : "of "}coordinates is rotated by an angle proportional to the position, so q · k depends on the relative distance only.`,
    figure: () => [
      dials(card),
      rows(
        [
          { name: "q", value: card.x },
          { sign: "→", name: "q'", value: card.y },
          { name: "k", value: card.x_key },
          { sign: "→", name: "k'", value: card.y_key },
        ],
        c.say,
      ),
    ],
  }),

  scores(card, c) {
    const tokens = c.keys(card);
    const made = decodeTensor(card.y).data;
    const keys = decodeTensor(card.rows);
    const most = largest(keys.data);
    const q = decodeTensor(card.q).data;
    const last = card.first + keys.shape[0] - 1;
    const own = partOf(card) === "cross" ? last : Math.min(c.found.position, last);
    const k = keys.data.subarray((own - card.first) * keys.shape[1], (own - card.first + 1) * keys.shape[1]);
    return {
      name: "Attention scores: q · k",
      formula: `s_j = ${short(card.by)} · (q [${q.length}] · k_j [${q.length}])`,
      legend: [
        ["j", `each of ${plural(made.length, "token")}`],
        [short(card.by), card.by === c.model.d_head ** -0.5 ? "1 / √d_head" : "the attention scale of this model"],
        ["q · k", "dot product"],
      ],
      why: "Scaled dot product of query and key. The scale keeps scores from growing with d_head.",
      figure: () => [
        rows([{ name: "q", value: card.q }], c.say),
        keyed(
          "keys and scores",
          tokens,
          card.first,
          keys.shape[0],
          [
            {
              title: `key, first ${Math.min(FIRST, keys.shape[1])}`,
              of: (j) =>
                small(
                  keys.data.subarray((j - card.first) * keys.shape[1], (j - card.first + 1) * keys.shape[1]),
                  most,
                  `k_${j}`,
                ),
            },
            { title: "score", of: (j) => single(made[j], largest(made), `s[${j}]`) },
          ],
          c.here(card),
        ),
        h(
          "p",
          { class: "worked" },
          `token ${own}: ${short(card.by)} · (${bracketed(q[0])}·${bracketed(k[0])} + ${bracketed(q[1])}·${bracketed(k[1])} + … ${q.length - 2} more) = `,
          h("b", {}, short(made[own])),
        ),
        everywhere("s", made, tokens, c.say, { shown: keys.shape[0] }),
      ],
    };
  },

  softcap: (card, c) =>
    change(card, c, {
      name: "Softcap",
      formula: `s'_j = ${short(card.cap)} · tanh(s_j / ${short(card.cap)})`,
      legend: [["tanh", "saturates at 1 and −1"]],
      why: `Limits scores to the range −${short(card.cap)} to ${short(card.cap)}.`,
      before: "score",
      after: "capped",
    }),

  bias: (card, c) =>
    change(card, c, {
      name: card.how === "alibi" ? "ALiBi bias" : "Relative position bias",
      formula:
        card.how === "alibi"
          ? `s'_j = s_j - ${short(card.slope)} · |${c.found.position} - j|`
          : `s'_j = s_j + B_{bucket(j - ${c.found.position})}`,
      legend:
        card.how === "alibi"
          ? [
              [short(card.slope), `the slope of head ${c.found.head}`],
              ["j", "the key position"],
            ]
          : [["B", `learned biases of head ${c.found.head}, one per distance bucket`]],
      why: "Encodes relative positions: the bias depends on the distance between query and key.",
      before: "score",
      after: "sum",
      added: card.how === "alibi" ? "bias" : "B",
    }),

  mask(card, c) {
    const seen = decodeTensor(card.seen).data;
    const near = card.window ? `, within a window of ${card.window}` : "";
    const causal = c.model.kind !== "encoder" && c.side !== "source";
    return change(card, c, {
      name: causal ? "Causal mask" : "Attention mask",
      formula: `s'_j = s_j,  -∞ where j ${causal ? `> ${c.found.position}` : "is masked"}`,
      legend: [["-∞", "softmax weight 0"]],
      why: `${causal ? `Token ${c.found.position} attends to itself and earlier tokens${near}` : `Sliding window of ${card.window}`}, ${plural(card.n_seen, "token")} of ${count(card.n_keys)}.`,
      before: "score",
      after: "masked score",
      gone: (j) => !seen[j],
    });
  },

  softmax(card, c) {
    const tokens = c.keys(card);
    const [scores, weights] = [decodeTensor(card.x).data, decodeTensor(card.y).data];
    const shown = Math.min(12, weights.length);
    const top = card.largest;
    const most = weights[top] || 1;
    const sum = weights.subarray(card.first, card.first + shown).reduce((a, b) => a + b, 0);
    return {
      name: "Softmax",
      formula: "w_j = exp(s_j) / Σ_i exp(s_i)",
      legend: [
        ["exp", "exponential function"],
        ["Σ_i", "the sum over all keys: weights sum to 1"],
      ],
      why: `Attention weights are positive and sum to 1. The largest is on token ${top}, “${tokens[top]?.text ?? top}”: ${percent(weights[top])}.`,
      figure: () => [
        keyed(
          "scores and weights",
          tokens,
          card.first,
          shown,
          [
            { title: "score", of: (j) => single(scores[j], largest(scores), `s[${j}]`) },
            { title: "weight", class: "wide", of: (j) => weighted(weights[j], `w[${j}]`, most) },
          ],
          c.here(card),
        ),
        weights.length > shown
          ? h("p", { class: "quiet" }, `The ${shown} tokens here have ${percent(sum)} of the weight.`)
          : null,
        everywhere("w", weights, tokens, c.say, { share: true, shown }),
      ],
    };
  },

  gather(card, c) {
    const tokens = c.keys(card);
    const weights = decodeTensor(card.weights).data;
    const values = decodeTensor(card.rows);
    const [high, wide] = values.shape;
    const most = largest(values.data);
    return {
      name: "Weighted sum of values",
      formula: `z [${wide}] = Σ_j w_j v_j [${wide}]`,
      legend: [
        ["w_j", "the weight of token j"],
        ["v_j", "its value"],
      ],
      why: "The head output: information from other positions moves to this one.",
      figure: () => [
        keyed(
          "weights and values",
          tokens,
          card.first,
          high,
          [
            { title: "weight", class: "wide", of: (j) => weighted(weights[j], `w[${j}]`, Math.max(...weights) || 1) },
            {
              title: `value, first ${Math.min(FIRST, wide)}`,
              of: (j) =>
                small(values.data.subarray((j - card.first) * wide, (j - card.first + 1) * wide), most, `v_${j}`),
            },
          ],
          c.here(card),
        ),
        weights.length > high
          ? h("p", { class: "quiet" }, `+ ${plural(weights.length - high, "more token")}, each with its weight`)
          : null,
        rows([{ sign: "=", name: "z", value: card.y }], c.say),
      ],
    };
  },

  join: (card, c) => ({
    name: "Concatenate heads",
    formula: `Z [${c.model.n_heads * c.model.d_head}] = (${c.model.n_heads > 4 ? `z_0, z_1, …, z_{${c.model.n_heads - 1}}` : Array.from({ length: c.model.n_heads }, (_, i) => `z_${i}`).join(", ")})`,
    legend: [["z_i", `output of head i, ${plural(c.model.d_head, "number")}`]],
    why: `All ${plural(c.model.n_heads, "head")} run in parallel with their own weights; their outputs are concatenated.`,
    figure: () => [heads(card.heads, c.found.head, c.say), rows([{ sign: "=", name: "Z", value: card.y }], c.say)],
  }),

  out: (card, c) =>
    linear(card, c, {
      name: "Output projection",
      letters: { y: addend(card), W: "W_O", x: "Z", b: "b_O" },
      why: "Maps the concatenated head outputs to the residual stream.",
    }),
};

/**
 * Scores before and after a change.
 * @param {ScoresCard & CardBase} card
 * @param {CardContext} c
 * @param {ChangeWords} words
 * @returns {DescribedCard}
 */
function change(card, c, { name, formula, legend, why, before, after, added, gone = () => false }) {
  const tokens = c.keys(card);
  const [x, y] = [decodeTensor(card.x).data, decodeTensor(card.y).data];
  const plus = card.added ? decodeTensor(card.added).data : null;
  const most = largest(x, y);
  const shown = Math.min(12, x.length);
  return {
    name,
    formula,
    legend,
    why,
    figure: () => [
      keyed(
        name,
        tokens,
        card.first,
        shown,
        [
          { title: before, of: (j) => single(x[j], most, `s[${j}]`) },
          ...(plus
            ? [{ title: added, of: (/** @type {number} */ j) => single(plus[j], most, `${added}[${j}]`) }]
            : []),
          {
            title: after,
            of: (j) => [single(y[j], most, `s'[${j}]`), gone(j) ? h("span", { class: "quiet" }, " masked") : null],
          },
        ],
        c.here(card),
      ),
      everywhere("s'", y, tokens, c.say, { shown }),
    ],
  };
}

/** @type {(card: CardBase, letter: string) => string} */
const keyName = (card, letter) => (partOf(card) === "cross" ? `${letter}_{${card.of}}` : letter);
/** @type {(card: CardBase, c: CardContext) => string} */
const readName = (card, c) => (partOf(card) === "cross" ? `e_{${card.of}}` : given(c));

/**
 * @param {CardBase} card
 * @param {CardContext} c
 * @returns {string}
 */
function whose(card, c) {
  const text = c.keys(card)[card.of ?? -1]?.text ?? card.of;
  return partOf(card) === "cross"
    ? `Keys and values come from the encoder; this is the key of source token ${card.of}, “${text}”, which has the largest weight.`
    : "The key of the selected token; every token has one.";
}

/**
 * @param {number} all
 * @param {number} shared
 * @param {number} head
 * @param {number | undefined} kv
 * @returns {string}
 */
function sharing(all, shared, head, kv) {
  if (shared === all) return "";
  if (shared === 1) return `All ${all} heads share one key-value head (multi-query attention).`;
  return `Grouped-query attention: groups of ${all / shared} heads share a key-value head; head ${head} uses ${kv}.`;
}
