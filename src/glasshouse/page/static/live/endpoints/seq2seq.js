// Cross-attention between source and target, and beam search.

import { beamSearch } from "glasshouse/live/beam_search.js";
import { requireWithin, tensor } from "glasshouse/live/numbers.js";
import { escapeControl } from "glasshouse/live/visible.js";

const MAX_TOKENS = 256; // source and target tokens per request
const [MAX_BEAMS, MAX_SEARCH_TOKENS] = [8, 128]; // per request

/** @type {LiveEndpoint<"cross_attention">} */
function crossAttention(model, { forward_pass: forwardPass, layer = null, head = null, ...spans }) {
  if (!model.isSeq2Seq) throw new Error(`the model is of kind ${model.about.kind}, which has no source.`);
  const trace = model.trace(forwardPass);
  const { source = [0, MAX_TOKENS], target = [0, MAX_TOKENS] } = spans;
  const [s1, t1] = [Math.min(source[1], trace.source.length), Math.min(target[1], trace.ids.length)];
  const [rows, columns] = [t1 - target[0], s1 - source[0]];
  const layers = layer === null ? [...Array(model.about.n_layers).keys()] : [layer];
  const sums = new Float64Array(rows * columns);
  for (const one of layers) {
    const { data, shape } = trace.at(`decoder.cross_pattern.${one}`);
    const heads = head === null ? [...Array(shape[0]).keys()] : [head];
    for (const h of heads)
      for (let row = 0; row < rows; row += 1)
        for (let column = 0; column < columns; column += 1)
          sums[row * columns + column] +=
            data[(h * shape[1] + target[0] + row) * shape[2] + source[0] + column] / heads.length / layers.length;
  }
  return {
    weights: tensor([rows, columns], sums),
    source: [source[0], s1, trace.source.length],
    target: [target[0], t1, trace.ids.length],
  };
}

/** @type {LiveEndpoint<"beams">} */
function beams(model, { forward_pass: forwardPass, beams: width = 4, length_penalty: lengthPenalty = 1, ...rest }) {
  const { max_new_tokens: most = 48 } = rest;
  requireWithin("beams", width, 2, MAX_BEAMS);
  requireWithin("max_new_tokens", most, 1, MAX_SEARCH_TOKENS);
  const trace = model.trace({ ...forwardPass, prompt: { text: forwardPass.prompt.text } });
  const room = model.about.limit - trace.ids.length;
  const { tree, found } = beamSearch(trace, { beams: width, lengthPenalty, most: Math.min(most, room) });
  const described = model.tokenizer.describe(tree.map((one) => one.token));
  return {
    nodes: tree.map(({ token: _, ...node }, number) => ({ ...described[number], ...node })),
    hypotheses: found.map(({ ids, score, finish_reason: reason, node }) => {
      const path = [];
      for (let at = node; at !== null; at = tree[at].parent) path.unshift(at);
      const text = escapeControl(model.tokenizer.decode(ids));
      return { ids, text, tokens: model.tokenizer.describe(ids), score, finish_reason: reason, path };
    }),
  };
}

export const seq2seq = { cross_attention: crossAttention, beams };
