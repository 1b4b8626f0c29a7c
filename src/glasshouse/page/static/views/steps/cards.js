// What each step is called, its formula, its numbers and why it is there.

import { attention } from "glasshouse/views/steps/attention.js";
import { embedding } from "glasshouse/views/steps/embedding.js";
import { feedforward } from "glasshouse/views/steps/feedforward.js";
import { reading } from "glasshouse/views/steps/reading.js";
import { stream } from "glasshouse/views/steps/stream.js";

const KINDS = { ...embedding, ...stream, ...attention, ...feedforward, ...reading };

/** Describe a step: {name, formula, legend, why, figure}. `c` is what the view knows of model, token and selection. */
export function describe(card, c) {
  return KINDS[card.kind](card, c);
}
