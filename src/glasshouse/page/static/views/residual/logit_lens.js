// Logit-lens content of the table: top prediction, probability, entropy and target rank.

import { h } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { choice } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";

/** @type {Record<string, LensColour>} */
const COLOURS = {
  probability: {
    text: "probability",
    share: (one) => one.probability,
    figure: (one) => percent(one.probability),
    legend: () => ["0%", "100%"],
  },
  entropy: {
    text: "entropy",
    share: (one, outputs) => one.entropy / Math.log(outputs),
    figure: (one) => short(one.entropy),
    legend: (outputs) => ["0 nats", `${short(Math.log(outputs))} nats: uniform`],
  },
  rank: {
    text: "rank of the target token",
    share: (one, outputs) => (one.rank < 0 ? 0 : 1 - Math.log1p(one.rank) / Math.log(outputs)),
    figure: (one) => (one.rank < 0 ? "–" : one.rank.toLocaleString("en")),
    legend: () => ["high rank", "0: the top prediction"],
  },
};

/**
 * The endpoint, cells and colours of the table; `rescaled` is called when the colour scale changes.
 * @param {ViewContext} context
 * @param {() => void} rescaled
 * @returns {TableContent<"lens", LensNumbers>}
 */
export function logitLens(context, rescaled) {
  const kinds = Object.entries(COLOURS).filter(([name]) => name !== "rank" || context.model.predicts_tokens);
  const colours = choice(
    "colour by",
    kinds.map(([name, one]) => [name, one.text]),
    (value) => context.set({ residual_color: value === "probability" ? undefined : value }),
  );
  let outputs = context.model.vocab_size; // or labels
  const chosen = () => {
    const { residual_color: name } = context.state;
    return name && name in COLOURS ? name : "probability";
  };

  return {
    title: "Logit lens",
    about:
      "The residual stream after each layer, passed through the final norm and the unembedding: the top prediction at every layer and position. Bottom row: the embedding; top row: the model’s output.",
    endpoint: "lens",
    controls: [h("span", { class: "name" }, "colour by"), colours],
    draw: () => colours.show(chosen()),
    share: (one) => COLOURS[chosen()].share(one, outputs),
    figure: (one) => COLOURS[chosen()].figure(one),
    legend: () => COLOURS[chosen()].legend(outputs),
    /**
     * The cells of a tile, row by row.
     * @param {LensResponse} found
     * @param {number} width
     * @returns {TableCell<LensNumbers>[][]}
     */
    cells(found, width) {
      if (found.outputs !== outputs) {
        outputs = found.outputs;
        rescaled();
      }
      const [probabilities, entropies, ranks] = [found.probability, found.entropy, found.rank].map(
        (one) => decodeTensor(one).data,
      );
      return found.tokens.map((line, i) =>
        line.map(([id], j) => {
          const at = i * width + j;
          const [word, probability, entropy, rank] = [
            found.token_info[id].text,
            probabilities[at],
            entropies[at],
            ranks[at],
          ];
          const said = `${word}, ${percent(probability)}, entropy ${short(entropy)} nats${rank < 0 ? "" : `, rank of the target token ${rank}`}`;
          return { word, said, data: { id, probability, entropy, rank } };
        }),
      );
    },
  };
}
