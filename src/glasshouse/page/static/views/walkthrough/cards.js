// Name, formula, numbers and explanation of each card.

import { attention } from "glasshouse/views/walkthrough/attention.js";
import { embedding } from "glasshouse/views/walkthrough/embedding.js";
import { feedforward } from "glasshouse/views/walkthrough/feedforward.js";
import { unembedding } from "glasshouse/views/walkthrough/unembedding.js";
import { stream } from "glasshouse/views/walkthrough/stream.js";

const KINDS = { ...embedding, ...stream, ...attention, ...feedforward, ...unembedding };

/** Describe a step: {name, formula, legend, why, figure}. `c` is what the view knows of model, token and selection. */
export function describe(card, c) {
  return KINDS[card.kind](card, c);
}
