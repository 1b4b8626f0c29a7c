// Name, formula, numbers and explanation of each card.

import { attention } from "glasshouse/views/walkthrough/attention.js";
import { embedding } from "glasshouse/views/walkthrough/embedding.js";
import { feedforward } from "glasshouse/views/walkthrough/feedforward.js";
import { unembedding } from "glasshouse/views/walkthrough/unembedding.js";
import { stream } from "glasshouse/views/walkthrough/stream.js";
import { rows } from "glasshouse/views/walkthrough/figures.js";

/** @type {Describe<CardKind>} */
const KINDS = { ...embedding, ...stream, ...attention, ...feedforward, ...unembedding };

/**
 * Describe a step: {name, formula, legend, why, figure}. `c` is what the view knows of model, token and selection.
 * @param {StepCard} card
 * @param {CardContext} c
 * @returns {DescribedCard}
 */
export function describe(card, c) {
  if ("title" in card) return general(card, c);
  /** @type {Record<string, (card: any, c: CardContext) => DescribedCard>} */
  const kinds = KINDS; // each takes its own kind, which the compiler cannot follow
  return kinds[card.kind](card, c);
}

/**
 * A step that brings its own title and formula: its vectors by name.
 * @param {GeneralCard} card
 * @param {CardContext} c
 * @returns {DescribedCard}
 */
function general(card, c) {
  const vectors = Object.entries(card).filter(([, value]) => value?.shape?.length === 1);
  return {
    name: card.title,
    formula: card.formula ?? "",
    legend: [],
    why: card.why ?? "",
    figure: () =>
      rows(
        vectors.map(([name, value]) => ({ name, value })),
        c.say,
      ),
  };
}
