// What the table holds where no head reads each vector: how long it is.

import { short } from "glasshouse/number.js";
import { decodeTensor } from "glasshouse/tensor.js";

/** What the table asks for, shows and is coloured by; `rescaled` is called when colours mean something else than before. */
export function norms(context, rescaled) {
  const head = context.model.head === "none" ? "This model has no head" : `The head of this model is ${context.model.head}`;
  let span = null; // the lengths so far, from the shortest to the longest

  return {
    title: "How long the vectors are after each layer",
    about: `${head}, so there are no logits at each token, and what would be said on the way cannot be shown. What can be shown, from the bottom up, is how long the vectors are, and which are alike.`,
    endpoint: "norms",
    controls: [],
    draw() {},
    /** Where a length stands between the shortest and the longest; lengths that are all alike are pale. */
    share({ norm }) {
      const [low, high] = span;
      return high > 1.001 * low ? 0.08 + 0.84 * ((norm - low) / (high - low)) : 0.25;
    },
    figure: ({ norm }) => short(norm),
    legend: () => [`the shortest here: ${short(span?.[0])}`, `the longest: ${short(span?.[1])}`],
    forget() {
      span = null;
    },
    /** The cells of a tile, row by row. */
    cells(found, width) {
      const { data } = decodeTensor(found.norms);
      const [low, high] = span ?? [Infinity, -Infinity];
      span = [Math.min(low, ...data), Math.max(high, ...data)];
      if (low !== span[0] || high !== span[1]) rescaled();
      return found.layers.map((_, i) => Array.from(data.subarray(i * width, (i + 1) * width), (norm) => ({ said: `length ${short(norm)}`, data: { norm } })));
    },
  };
}
