// What the table holds where a head can read each vector: the likeliest token, how sure the model is, and the true one.

import { h } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { choice } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";

const COLOURS = {
  probability: {
    text: "probability",
    share: (one) => one.probability,
    figure: (one) => percent(one.probability),
    legend: () => ["0%", "100% sure of this token"],
  },
  entropy: {
    text: "entropy",
    share: (one, outputs) => one.entropy / Math.log(outputs),
    figure: (one) => short(one.entropy),
    legend: (outputs) => ["0 nats: sure", `${short(Math.log(outputs))} nats: anything could come`],
  },
  rank: {
    text: "rank of the true token",
    share: (one, outputs) => (one.rank < 0 ? 0 : 1 - Math.log1p(one.rank) / Math.log(outputs)),
    figure: (one) => (one.rank < 0 ? "–" : one.rank.toLocaleString("en")),
    legend: () => ["far down", "0: no other is likelier"],
  },
};

/** What the table asks for, shows and is coloured by; `rescaled` is called when colours mean something else than before. */
export function logitLens(context, rescaled) {
  const kinds = Object.entries(COLOURS).filter(([name]) => name !== "rank" || context.model.predicts_tokens);
  const colours = choice("colour by", kinds.map(([name, one]) => [name, one.text]), (value) => context.set({ residual_color: value === "probability" ? undefined : value }));
  let outputs = context.model.vocab_size; // or labels
  const chosen = () => (context.state.residual_color in COLOURS ? context.state.residual_color : "probability");

  return {
    title: "What the model would say after each layer",
    about: "Read it from the bottom up: each token enters as a vector, every layer adds to it, and the top row is what the model says. In between, the same head reads the unfinished vector: this is what would be said if the model stopped there.",
    endpoint: "lens",
    controls: [h("span", { class: "quiet" }, "colour by"), colours],
    draw: () => colours.show(chosen()),
    share: (one) => COLOURS[chosen()].share(one, outputs),
    figure: (one) => COLOURS[chosen()].figure(one),
    legend: () => COLOURS[chosen()].legend(outputs),
    /** The cells of a tile, row by row. */
    cells(found, width) {
      if (found.outputs !== outputs) {
        outputs = found.outputs;
        rescaled();
      }
      const [probabilities, entropies, ranks] = ["probability", "entropy", "rank"].map((name) => decodeTensor(found[name]).data);
      return found.tokens.map((line, i) => line.map(([id], j) => {
        const at = i * width + j;
        const [word, probability, entropy, rank] = [found.token_info[id].text, probabilities[at], entropies[at], ranks[at]];
        const said = `${word}, ${percent(probability)}, entropy ${short(entropy)} nats${rank < 0 ? "" : `, rank of the true token ${rank}`}`;
        return { word, said, data: { id, probability, entropy, rank } };
      }));
    },
  };
}
