// Residual-norm content of the table, for models without per-position logits.

import { short } from "glasshouse/number.js";
import { decodeTensor } from "glasshouse/tensor.js";

/**
 * The endpoint, cells and colours of the table; `rescaled` is called when the colour scale changes.
 * @param {ViewContext} context
 * @param {() => void} rescaled
 * @returns {TableContent<"norms", { norm: number }>}
 */
export function norms(context, rescaled) {
  /** @type {[number, number] | null} */
  let span = null; // the smallest and the largest norm so far

  return {
    title: "Residual norms",
    about: `${context.headSentence}, so it has no per-position logits and no logit lens. Shown instead: the norm of the residual stream at every layer and position.`,
    endpoint: "norms",
    controls: [],
    draw() {},
    /** A norm relative to the smallest and the largest; pale if all are about equal. */
    share({ norm }) {
      const [low, high] = span ?? [0, 0];
      return high > 1.001 * low ? 0.08 + 0.84 * ((norm - low) / (high - low)) : 0.25;
    },
    figure: ({ norm }) => short(norm),
    legend: () => [`smallest: ${short(span?.[0])}`, `largest: ${short(span?.[1])}`],
    forget() {
      span = null;
    },
    /** The cells of a tile, row by row. */
    cells(found, width) {
      const { data } = decodeTensor(found.norms);
      const [low, high] = span ?? [Infinity, -Infinity];
      span = [Math.min(low, ...data), Math.max(high, ...data)];
      if (low !== span[0] || high !== span[1]) rescaled();
      return found.layers.map((_, i) =>
        Array.from(data.subarray(i * width, (i + 1) * width), (norm) => ({
          said: `norm ${short(norm)}`,
          data: { norm },
        })),
      );
    },
  };
}
