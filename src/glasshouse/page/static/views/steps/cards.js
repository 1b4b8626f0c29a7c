// What each step is called, its formula, its numbers and why it is there.

import { h } from "glasshouse/dom.js";
import { count, percent, plural, short } from "glasshouse/number.js";
import { bars, token } from "glasshouse/parts.js";
import { unpack } from "glasshouse/tensor.js";
import { bracketed, curve, dials, everywhere, facts, FIRST, groups, heads, keyed, largest, product, rows, single, small, weighted } from "glasshouse/views/steps/figures.js";

const PARTS = { attention: "attention", cross: "cross-attention", feedforward: "feed-forward", embed: "embedding", head: "reading" };

/** The part of the model that a step belongs to. */
export function partOf(card) {
  return card.node.split(".")[0];
}

export function partName(card) {
  return PARTS[partOf(card)] ?? "";
}

/** What tells a step from all others of the same token. */
export function keyOf(card) {
  return [card.node, card.kind, card.what].filter(Boolean).join(":");
}

/** Describe a step: {name, formula, legend, why, figure}. `c` is what the view knows of model, token and selection. */
export function describe(card, c) {
  return KINDS[card.kind](card, c);
}

const range = (from, to) => (from === to ? `layer ${from}` : `layers ${from} to ${to}`);

/** What a sublayer reads: the stream, or the norm of it. */
const given = (c) => (c.model.norm_order === "after" ? "x" : "h");

/** The letter of what is added to the stream. */
const addend = (card) => ({ attention: "a", cross: "c", feedforward: "f" })[partOf(card)];

const ACTIVATIONS = {
  relu: ["ReLU", (x) => Math.max(x, 0)],
  relu2: ["ReLU²", (x) => Math.max(x, 0) ** 2],
  gelu: ["GELU", (x) => x * normal(x)],
  silu: ["SiLU", (x) => x / (1 + Math.exp(-x))],
  swiglu: ["SiLU", (x) => x / (1 + Math.exp(-x))],
  geglu: ["GELU", (x) => x * normal(x)],
};

/** P(X < x) of the normal distribution, near enough for a curve; the numbers come from the model. */
function normal(x) {
  return 0.5 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

const activation = (how) => ACTIVATIONS[how.replace("_tanh", "")];

const KINDS = {
  embed(card, c) {
    const [rowsOf, wide] = card.shape;
    const table = unpack(card.rows);
    return {
      name: "Look the token up",
      formula: `x [${wide}] = onehot(${card.id}) [${count(rowsOf)}] · E [${count(rowsOf)}×${wide}]`,
      legend: [["E", "the embedding table, a learned row for each token"], ["onehot", `0 everywhere, 1 at ${card.id}`]],
      why: `A model reads numbers, not letters: token ${card.id} picks row ${card.id} of a table, and that row is where its meaning starts.${WHERE[c.model.position] ?? ""}`,
      figure: () => {
        const most = largest(table.data);
        const high = table.shape[0];
        const lines = Array.from({ length: high }, (_, i) => {
          const id = card.first + i;
          const on = id === card.id;
          return h("tr", { class: on ? "own" : "" }, h("th", { scope: "row" }, h("span", { class: "hot", data: { value: on ? 1 : 0, what: `onehot[${id}]` } }, on ? "1" : "0"), h("span", { class: "quiet" }, `row ${id}`)),
            h("td", {}, small(table.data.subarray(i * table.shape[1], (i + 1) * table.shape[1]), most, `E[${id}]`)));
        });
        return [h("table", { class: "keyed", "aria-label": "rows of E around the token" }, h("tbody", {}, lines)), rows([{ name: "x", sign: "=", value: card.y }], c.say)];
      },
    };
  },

  scale: (card, c) => ({
    name: "Lengthen the vector",
    formula: `x' = √d · x = ${short(card.by)} · x`,
    legend: [["d", `d_model = ${c.model.d_model}`]],
    why: "Rows of the table are short; times the root of their width they are as long as the positions that are added next.",
    figure: () => rows([{ name: "x", value: card.x }, { sign: "→", name: "x'", value: card.y }], c.say),
  }),

  segment: (card, c) => ({
    name: "Add the segment",
    formula: `x' [${c.model.d_model}] = x + s_0`,
    legend: [["s_0", "a learned vector for the first segment of the text"]],
    why: "Where a text has two parts, this tells them apart; here all of it is the first.",
    figure: () => rows([{ name: "x", value: card.x }, { sign: "+", name: "s_0", value: card.added }, { sign: "=", name: "x'", value: card.y }], c.say, { alike: true }),
  }),

  position(card, c) {
    const learned = card.how === "learned";
    const d = c.model.d_model;
    const half = (i) => (card.layout === "pairs" ? [Math.floor(i / 2), i % 2] : [i % (d / 2), Math.floor(i / (d / 2))]);
    const waves = Array.from({ length: FIRST }, (_, i) => {
      const [pair, cosine] = half(i);
      return `${cosine ? "cos" : "sin"} ${short(c.found.position / 10000 ** ((2 * pair) / d))}`;
    });
    const places = card.layout === "pairs" ? ["2i", "2i+1"] : ["i", "i+d/2"];
    return {
      name: "Add where the token stands",
      formula: learned ? `x' [${d}] = x + P_{${card.row}}` : `x' = x + p,  p_{${places[0]}} = sin(${c.found.position} / 10000^{2i/${d}}),  p_{${places[1]}} = cos(…)`,
      legend: learned ? [["P", `a learned table of positions; row ${card.row} is this one’s`]] : [["p", "sines and cosines of the position, fast ones first"]],
      why: learned ? "Attention alone does not know the order of tokens; a learned vector for each position tells it." : "Attention alone does not know the order of tokens; waves of many lengths give each position a pattern of its own.",
      figure: () => rows([{ name: "x", value: card.x }, { sign: "+", name: learned ? `P_{${card.row}}` : "p", value: card.added, captions: learned ? null : waves }, { sign: "=", name: "x'", value: card.y }], c.say, { alike: true }),
    };
  },

  norm(card, c) {
    const [names, into, out] = normWords(card, c);
    const layer = card.how === "layer";
    const measured = layer ? [["μ", card.mean], ["σ^2", card.variance], ["ε", card.eps]] : [[`mean(${into}^2)`, card.square], ["ε", card.eps]];
    const shift = card.bias ? " + b" : "";
    return {
      name: names,
      formula: layer ? `${out} = (${into} - μ) / √(σ^2 + ε) ⊙ g${shift}` : `${out} = ${into} / √(mean(${into}^2) + ε) ⊙ g`,
      legend: [...(layer ? [["μ", "the mean of the coordinates"], ["σ^2", "their variance"]] : []), ["ε", "keeps the root above 0"], ["g", "learned, one for each coordinate"], ...(card.bias ? [["b", "learned"]] : []), ["⊙", "coordinate by coordinate"]],
      why: layer ? "Whatever the vector’s size, what follows gets coordinates with mean 0 and variance 1, then scaled as was learned." : "Whatever the vector’s length, what follows gets coordinates of a like size, then scaled as was learned.",
      figure: () => [facts(measured), rows([{ name: into, value: card.x }, { sign: "⊙", name: "g", value: card.gain }, ...(card.bias ? [{ sign: "+", name: "b", value: card.bias }] : []), { sign: "→", name: out, value: card.y }], c.say)],
    };
  },

  arrive: (card, c) => ({
    name: `Through ${range(0, c.found.layer - 1)}`,
    formula: `x [${c.model.d_model}] → ${c.found.layer === 1 ? "layer 0" : `layer 0 → … → layer ${c.found.layer - 1}`} → x`,
    legend: [["x", "the stream, one vector for each token"]],
    why: `Every layer adds to the same vector. This is what it has become when it reaches layer ${c.found.layer}; choose another layer above to step through that one.`,
    figure: () => rows([{ name: "x", value: card.y }], c.say),
  }),

  query: (card, c) => linear(card, c, {
    name: "Query: what the token looks for",
    letters: { y: "q", W: "W_Q", x: given(c), b: "b_Q" },
    why: `Head ${c.found.head} of layer ${c.found.layer} asks a question with these ${c.model.d_head} numbers; they will be held against the key of each token.`,
  }),

  key(card, c) {
    const { n_heads: all, n_kv_heads: shared } = c.model;
    const made = linear(card, c, {
      name: "Key: what a token is found by",
      letters: { y: keyName(card, c, "k"), W: "W_K", x: readName(card, c), b: "b_K" },
      why: `${whose(card, c)} ${sharing(all, shared, c.found.head, card.kv)}`,
    });
    return { ...made, figure: () => [made.figure(), groups(all, shared, c.found.head)] };
  },

  value: (card, c) => linear(card, c, {
    name: "Value: what a token hands over",
    letters: { y: keyName(card, c, "v"), W: "W_V", x: readName(card, c), b: "b_V" },
    why: "Who looks at this token receives these numbers, more or less of them as the weights say.",
  }),

  rotate: (card, c) => ({
    name: "Turn query and key by the position",
    formula: `(q_${card.layout === "pairs" ? "{2i}" : "i"}, q_{${card.layout === "pairs" ? "2i+1" : `i+${c.model.d_head / 2}`}}) turned by θ_i = ${card.place} · ${count(card.theta)}^{-2i/${c.model.d_head}}`,
    legend: [["θ_i", `the angle of pair i: the position, ${card.place}, times a speed that falls from pair to pair${card.scaling === "none" ? "" : `, changed for long texts (${card.scaling})`}`]],
    why: "Two coordinates are one hand of a clock. After the turn, query times key depends on how far apart two tokens are, not on where they stand.",
    figure: () => [dials(card, c.say), rows([{ name: "q", value: card.x }, { sign: "→", name: "q'", value: card.y }, { name: "k", value: card.x_key }, { sign: "→", name: "k'", value: card.y_key }], c.say)],
  }),

  scores(card, c) {
    const tokens = c.keys(card);
    const made = unpack(card.y).data;
    const keys = unpack(card.rows);
    const most = largest(keys.data);
    const q = unpack(card.q).data;
    const last = card.first + keys.shape[0] - 1;
    const own = partOf(card) === "cross" ? last : Math.min(c.found.position, last);
    const k = keys.data.subarray((own - card.first) * keys.shape[1], (own - card.first + 1) * keys.shape[1]);
    return {
      name: "Score each token: query times key",
      formula: `s_j = ${short(card.by)} · (q [${q.length}] · k_j [${q.length}])`,
      legend: [["j", `each of ${plural(made.length, "token")}`], [short(card.by), card.by === c.model.d_head ** -0.5 ? "1 / √d_head" : "a scale that the model sets itself"], ["q · k", "coordinates multiplied and summed"]],
      why: "Where query and key point the same way, the score is high. The scale keeps scores from growing with d_head.",
      figure: () => [
        rows([{ name: "q", value: card.q }], c.say),
        keyed("keys and scores", tokens, card.first, keys.shape[0], [
          { title: `key, first ${Math.min(FIRST, keys.shape[1])}`, of: (j) => small(keys.data.subarray((j - card.first) * keys.shape[1], (j - card.first + 1) * keys.shape[1]), most, `k_${j}`) },
          { title: "score", of: (j) => single(made[j], largest(made), `s[${j}]`) },
        ], c.here(card)),
        h("p", { class: "worked" }, `token ${own}: ${short(card.by)} · (${bracketed(q[0])}·${bracketed(k[0])} + ${bracketed(q[1])}·${bracketed(k[1])} + … ${q.length - 2} more) = `, h("b", {}, short(made[own]))),
        everywhere("s", made, tokens, c.say, { shown: keys.shape[0] }),
      ],
    };
  },

  softcap: (card, c) => change(card, c, {
    name: "Keep scores within bounds",
    formula: `s'_j = ${short(card.cap)} · tanh(s_j / ${short(card.cap)})`,
    legend: [["tanh", "bends large numbers towards 1 and −1"]],
    why: `No score leaves −${short(card.cap)} to ${short(card.cap)}, so no single token can take all attention by a large number alone.`,
    before: "score", after: "bounded",
  }),

  bias: (card, c) => change(card, c, {
    name: card.how === "alibi" ? "Lower the score with the distance" : "Add what the distance is worth",
    formula: card.how === "alibi" ? `s'_j = s_j - ${short(card.slope)} · |${c.found.position} - j|` : `s'_j = s_j + B_{bucket(j - ${c.found.position})}`,
    legend: card.how === "alibi" ? [[short(card.slope), `the slope of head ${c.found.head}`], ["j", "the place of the other token"]] : [["B", `learned numbers of head ${c.found.head}, one for each distance; far ones share`]],
    why: "This is how the model knows where tokens stand: by how far they are from each other.",
    before: "score", after: "sum", added: card.how === "alibi" ? "for distance" : "B",
  }),

  mask(card, c) {
    const seen = unpack(card.seen).data;
    const near = card.window ? ` and nothing ${card.window} or more away` : "";
    const causal = c.model.kind !== "encoder" && c.side !== "source";
    return change(card, c, {
      name: causal ? "Hide what comes later" : "Hide what must not be seen",
      formula: `s'_j = s_j,  -∞ where j ${causal ? `> ${c.found.position}` : "is hidden"}`,
      legend: [["-∞", "a score whose weight will be 0"]],
      why: `${causal ? `The model learns to say what comes next, so it must not look ahead: token ${c.found.position} sees itself and what stands before it${near}` : `This layer sees nothing ${card.window} or more away`}, ${plural(card.n_seen, "token")} of ${count(card.n_keys)}.`,
      before: "score", after: "as seen", gone: (j) => !seen[j],
    });
  },

  softmax(card, c) {
    const tokens = c.keys(card);
    const [scores, weights] = [unpack(card.x).data, unpack(card.y).data];
    const shown = Math.min(12, weights.length);
    const top = card.largest;
    const most = weights[top] || 1;
    const sum = weights.subarray(card.first, card.first + shown).reduce((a, b) => a + b, 0);
    return {
      name: "Turn scores into weights",
      formula: "w_j = exp(s_j) / Σ_i exp(s_i)",
      legend: [["exp", "makes every score positive, large ones much larger"], ["Σ_i", "the sum over all tokens: weights add up to 1"]],
      why: `Attention is shared out: all weights are positive and add up to 1. Most goes to token ${top}, “${tokens[top]?.text ?? top}”: ${percent(weights[top])}.`,
      figure: () => [
        keyed("scores and weights", tokens, card.first, shown, [
          { title: "score", of: (j) => single(scores[j], largest(scores), `s[${j}]`) },
          { title: "weight", class: "wide", of: (j) => weighted(weights[j], `w[${j}]`, most) },
        ], c.here(card)),
        weights.length > shown ? h("p", { class: "quiet" }, `The ${shown} tokens here hold ${percent(sum)} of the weight.`) : null,
        everywhere("w", weights, tokens, c.say, { share: true, shown }),
      ],
    };
  },

  gather(card, c) {
    const tokens = c.keys(card);
    const weights = unpack(card.weights).data;
    const values = unpack(card.rows);
    const [high, wide] = values.shape;
    const most = largest(values.data);
    return {
      name: "Gather the values",
      formula: `z [${wide}] = Σ_j w_j v_j [${wide}]`,
      legend: [["w_j", "the weight of token j"], ["v_j", "its value"]],
      why: "Each token hands over its value as far as it is looked at. What was elsewhere in the text is now here.",
      figure: () => [
        keyed("weights and values", tokens, card.first, high, [
          { title: "weight", class: "wide", of: (j) => weighted(weights[j], `w[${j}]`, Math.max(...weights) || 1) },
          { title: `value, first ${Math.min(FIRST, wide)}`, of: (j) => small(values.data.subarray((j - card.first) * wide, (j - card.first + 1) * wide), most, `v_${j}`) },
        ], c.here(card)),
        weights.length > high ? h("p", { class: "quiet" }, `+ ${plural(weights.length - high, "more token")}, each with its weight`) : null,
        rows([{ sign: "=", name: "z", value: card.y }], c.say),
      ],
    };
  },

  join: (card, c) => ({
    name: "Join the heads",
    formula: `Z [${c.model.n_heads * c.model.d_head}] = (${c.model.n_heads > 4 ? `z_0, z_1, …, z_{${c.model.n_heads - 1}}` : Array.from({ length: c.model.n_heads }, (_, i) => `z_${i}`).join(", ")})`,
    legend: [["z_i", `what head i gathered, ${plural(c.model.d_head, "number")}`]],
    why: `All ${plural(c.model.n_heads, "head")} did the same with weights of their own, at the same time. Side by side they are one vector.`,
    figure: () => [heads(card.heads, c.found.head, c.say), rows([{ sign: "=", name: "Z", value: card.y }], c.say)],
  }),

  out: (card, c) => linear(card, c, {
    name: "Mix the heads",
    letters: { y: addend(card), W: "W_O", x: "Z", b: "b_O" },
    why: "What the heads found is put into the coordinates of the stream, so that it can be added there.",
  }),

  add: (card, c) => ({
    name: "Add it to the stream",
    formula: `x' [${c.model.d_model}] = x + ${addend(card)}`,
    legend: [["x", "the stream as it was"], [addend(card), `what ${partName(card)} adds`]],
    why: "Nothing is overwritten: each part adds its bit to the vector and leaves the rest as it was, which keeps deep models trainable.",
    figure: () => rows([{ name: "x", value: card.x }, { sign: "+", name: addend(card), value: card.added }, { sign: "=", name: "x'", value: card.y }], c.say, { alike: true }),
  }),

  gate: (card, c) => linear(card, c, {
    name: "The gate of each neuron",
    letters: { y: "g", W: "W_{gate}", x: given(c), b: "b_{gate}" },
    why: "For each neuron a number that will open or close it.",
  }),

  up: (card, c) => linear(card, c, {
    name: `Up to ${count(c.model.d_ff)} neurons`,
    letters: { y: "u", W: "W_{up}", x: given(c), b: "b_{up}" },
    why: "Each neuron compares the vector with a direction of its own. From here on the token is on its own: nothing comes from other tokens.",
  }),

  activate(card, c) {
    const [name, act] = activation(card.how);
    const y = unpack(card.y).data;
    const bent = unpack(card.gate ?? card.x).data;
    const gated = Boolean(card.gate);
    const most = Math.abs(y[card.strongest[0]]) || 1;
    const still = y.reduce((sum, value) => sum + (Math.abs(value) < 0.01 * most ? 1 : 0), 0);
    return {
      name: "Which neurons fire",
      formula: gated ? `m [${count(y.length)}] = ${name}(g) ⊙ u` : `m [${count(y.length)}] = ${name}(u)`,
      legend: [[name, NOTES[name]], ...(gated ? [["⊙", "coordinate by coordinate"]] : [])],
      why: `${gated ? "The gate lets a neuron through or holds it back." : "The bend makes a neuron more than a linear map: below 0 it is (nearly) silent."} ${count(still)} of ${count(y.length)} are silent here: below 1% of the strongest.`,
      figure: () => [
        h("div", { class: "pairing" }, curve(act, name, card.strongest.map((i) => bent[i])),
          bars(card.strongest.map((i) => ({ name: `neuron ${i}`, share: Math.abs(y[i]) / most, value: y[i], text: short(y[i]), title: `neuron ${i}: ${short(bent[i])} becomes ${short(y[i])}`, class: y[i] < 0 ? "less" : "", data: { neuron: i } })), { label: "the strongest neurons" })),
        rows([...(gated ? [{ name: "g", value: card.gate }] : []), { name: "u", value: card.x }, { sign: "→", name: "m", value: card.y }], c.say),
      ],
    };
  },

  down: (card, c) => linear(card, c, {
    name: `Back to ${count(c.model.d_model)} numbers`,
    letters: { y: "f", W: "W_{down}", x: "m", b: "b_{down}" },
    why: "Each neuron that fires writes its own direction, as strongly as it fires.",
  }),

  leave: (card, c) => ({
    name: `Through ${range(c.found.layer + 1, c.found.n_layers - 1)}`,
    formula: `x [${c.model.d_model}] → ${c.found.layer + 2 === c.found.n_layers ? `layer ${c.found.layer + 1}` : `layer ${c.found.layer + 1} → … → layer ${c.found.n_layers - 1}`} → x`,
    legend: [["x", "the stream, one vector for each token"]],
    why: "The layers that follow do the same with weights of their own. This is the vector after the last of them.",
    figure: () => rows([{ name: "x", value: card.y }], c.say),
  }),

  memory: (card, c) => ({
    name: "Hand it to the decoder",
    formula: `e_{${c.found.position}} [${c.model.d_model}]`,
    legend: [["e", "what the encoder has made of the source, a vector for each token"]],
    why: "Every layer of the decoder makes keys and values of these vectors: it looks at the source through them.",
    figure: () => rows([{ name: `e_{${c.found.position}}`, value: card.y }], c.say),
  }),

  transform(card, c) {
    const [name] = activation(card.how);
    const made = linear(card, c, {
      name: "Prepare to read it",
      letters: { y: "t", W: "W_T", x: "y", b: "b_T" },
      why: `A map and a bend of the head’s own, before vectors are compared with tokens: ${name}(t) goes on.`,
    });
    return { ...made, formula: `t' = ${name}(t),  ${made.formula}`, figure: () => [made.figure(), rows([{ name: "t", value: card.y }, { sign: "→", name: "t'", value: card.bent }], c.say)] };
  },

  logits(card, c) {
    const [all, wide] = card.shape;
    const table = unpack(card.rows);
    const most = largest(table.data);
    const matrix = card.tied ? "E" : "U";
    const highest = largest(card.top.map((one) => one.logit));
    const scaled = card.by === 1 ? "" : `${short(card.by)} · `;
    return {
      name: "Compare with every token",
      formula: `l [${count(all)}] = ${scaled}${matrix} [${count(all)}×${wide}] y [${wide}]${card.bias ? " + b" : ""}`,
      legend: [[matrix, card.tied ? "the embedding table once more, now read the other way" : "the unembedding, a learned row for each token"], ["l", "a logit for each token"], ...(card.by === 1 ? [] : [[short(card.by), "1 / √d_model"]])],
      why: `Each of ${count(all)} tokens has a direction; the further the vector points that way, the higher that token’s logit.`,
      figure: () => [
        rows([{ name: "y", value: card.x }], c.say),
        h("div", { class: "scroll" }, h("table", { class: "keyed", "aria-label": "the highest logits" },
          h("thead", {}, h("tr", {}, ["token", `row of ${matrix}, first ${FIRST}`, "logit"].map((one) => h("th", { scope: "col" }, one)))),
          h("tbody", {}, card.top.map((one, i) => h("tr", { data: { id: one.id } }, h("th", { scope: "row" }, token(one)),
            h("td", {}, small(table.data.subarray(i * table.shape[1], (i + 1) * table.shape[1]), most, `${matrix}[${one.id}]`)),
            h("td", {}, single(one.logit, highest, `logit of ${one.text}`))))))),
      ],
    };
  },

  probabilities: (card, c) => ({
    name: "Turn logits into probabilities",
    formula: "p_i = exp(l_i) / Σ_j exp(l_j)",
    legend: [["Σ_j", `the sum over ${plural(card.count, "token")}, here e^${short(card.total)}`]],
    why: c.model.head === "next_token" ? `This is what the model says: how likely each token is to follow “${c.found.token.text}”.` : "This is what the model says: how likely each token is to stand here.",
    figure: () => chances(card, c, (one) => token(one)),
  }),

  labels: (card, c) => ({
    name: "Compare with every label",
    formula: `l [${card.count}] = W [${card.count}×${c.model.d_model}] y + b`,
    legend: [["l", "a logit for each label; exp and a sum make them probabilities"]],
    why: card.pooled ? "The vectors of all tokens are pooled to one first: the label is the whole text’s, not this token’s." : "The label of this token.",
    figure: () => [rows([{ name: "y", value: card.x }], c.say), chances(card, c, (one) => one.text)],
  }),

  vectors: (card, c) => ({
    name: "The vector is the answer",
    formula: `y [${c.model.d_model}]`,
    legend: [["y", card.pooled ? "this token’s part of what is pooled to one vector" : "what the model gives for this token"]],
    why: "This model has no head that speaks of tokens or labels: its vectors are what is used, to compare texts for example.",
    figure: () => rows([{ name: "y", value: card.y }], c.say),
  }),
};

const WHERE = {
  rotary: " Where the token stands comes in later, when queries and keys are turned.",
  alibi: " Where the token stands comes in later, at the scores.",
  relative: " Where the token stands comes in later, at the scores.",
};

const NOTES = {
  ReLU: "x where it is above 0, else 0",
  "ReLU²": "the square of x where it is above 0, else 0",
  GELU: "x times the share of a bell curve below x",
  SiLU: "x times 1 / (1 + exp(−x))",
};

function normWords(card, c) {
  const out = { "attention.norm": "attention", "cross.norm": "cross-attention", "feedforward.norm": "the feed-forward layer" }[card.node];
  if (card.what === "q") return ["Normalise the query", "q", "q'"];
  if (card.what === "k") return ["Normalise the key", "k", "k'"];
  if (card.node === "embed") return ["Normalise the embedding", "x", "x'"];
  if (card.node === "final") return ["Normalise a last time", "x", c.side === "source" ? "e" : "y"];
  if (card.node === "head") return ["Normalise once more", "t'", "y"];
  if (card.node.endsWith("norm_out")) return [`Normalise what ${partName(card)} gives`, addend(card), `${addend(card)}'`];
  return c.model.norm_order === "after" ? ["Normalise the sum", "x'", "x"] : [`Normalise before ${out}`, "x", "h"];
}

const READ = { x: "the stream", h: "the stream, normalised", e: "what the encoder made of a source token", Z: "the heads, joined", m: "the neurons", y: "the last vector" };

/** A linear map: one figure for all of them. */
function linear(card, c, { name, letters, why }) {
  const { y, W, x, b } = letters;
  const [high, wide] = card.shape;
  return {
    name,
    formula: `${y} [${count(high)}] = ${W} [${count(high)}×${count(wide)}] ${x} [${count(wide)}]${card.bias ? ` + ${b}` : ""}`,
    legend: [[x, READ[x[0]]], [W, high === c.model.d_head && card.kv !== undefined ? "learned; the rows of this head" : "learned"], ...(card.bias ? [[b, "learned"]] : [])],
    why,
    figure: () => product(letters, card, c.say),
  };
}

/** Scores before and after a change. */
function change(card, c, { name, formula, legend, why, before, after, added, gone = () => false }) {
  const tokens = c.keys(card);
  const [x, y] = [unpack(card.x).data, unpack(card.y).data];
  const plus = card.added ? unpack(card.added).data : null;
  const most = largest(x, y);
  const shown = Math.min(12, x.length);
  return {
    name, formula, legend, why,
    figure: () => [
      keyed(name, tokens, card.first, shown, [
        { title: before, of: (j) => single(x[j], most, `s[${j}]`) },
        ...(plus ? [{ title: added, of: (j) => single(plus[j], most, `${added}[${j}]`) }] : []),
        { title: after, of: (j) => [single(y[j], most, `s'[${j}]`), gone(j) ? h("span", { class: "quiet" }, " hidden") : null] },
      ], c.here(card)),
      everywhere("s'", y, tokens, c.say, { shown }),
    ],
  };
}

function chances(card, c, name) {
  const most = Math.max(...card.top.map((one) => one.probability)) || 1;
  const rest = 1 - card.top.reduce((sum, one) => sum + one.probability, 0);
  return [
    bars(card.top.map((one) => ({ name: name(one), share: one.probability / most, value: one.probability, text: percent(one.probability), title: `logit ${short(one.logit)}`, data: { id: one.id, logit: one.logit } })), { label: "the likeliest" }),
    card.count > card.top.length ? h("p", { class: "quiet" }, `${plural(card.count - card.top.length, "other")} share ${percent(Math.max(0, rest))}.`) : null,
  ];
}

const keyName = (card, c, letter) => (partOf(card) === "cross" ? `${letter}_{${card.of}}` : letter);
const readName = (card, c) => (partOf(card) === "cross" ? `e_{${card.of}}` : given(c));

function whose(card, c) {
  const text = c.keys(card)[card.of]?.text ?? card.of;
  return partOf(card) === "cross"
    ? `Keys and values come from the encoder; this is the key of source token ${card.of}, “${text}”, which is looked at most.`
    : "Every token has a key by which others may find it; this is the selected token’s own.";
}

function sharing(all, shared, head, kv) {
  if (shared === all) return "";
  if (shared === 1) return `All ${all} heads share one head of keys and values (multi-query).`;
  return `Heads share keys and values in groups of ${all / shared}: head ${head} uses number ${kv}.`;
}
