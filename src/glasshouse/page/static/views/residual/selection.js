// The selection: a token and a row of the table (row 0: the embedding).

import { clamp } from "glasshouse/number.js";

/**
 * How many rows the table has.
 * @param {ViewContext} context
 * @returns {number}
 */
export function depth(context) {
  return context.model.n_layers + 1;
}

/**
 * The row that is selected: 0 is the embedding.
 * @param {ViewContext} context
 * @returns {number}
 */
export function chosenRow(context) {
  return context.state.residual_embed ? 0 : Math.min(context.state.layer, context.model.n_layers - 1) + 1;
}

/**
 * @param {number} number
 * @returns {string}
 */
export function rowName(number) {
  return number ? `layer ${number - 1}` : "embed";
}

/**
 * Select a token and, where a row is given, that too.
 * @param {ViewContext} context
 * @param {number} place
 * @param {number} [number]
 */
export function select(context, place, number) {
  const last = context.row.length - 1;
  /** @type {Partial<PageState>} */
  const changes = { token: clamp(place, last) };
  if (number !== undefined)
    Object.assign(changes, { layer: Math.max(0, number - 1), residual_embed: number ? undefined : 1 });
  context.set(changes);
}
