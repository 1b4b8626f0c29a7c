// Steps of the feed-forward layer.

import { h } from "glasshouse/dom.js";
import { count, short } from "glasshouse/number.js";
import { bars } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { given, linear } from "glasshouse/views/walkthrough/card.js";
import { curve, rows } from "glasshouse/views/walkthrough/figures.js";

/** @type {Describe<"gate" | "up" | "activate" | "down">} */
export const feedforward = {
  gate: (card, c) =>
    linear(card, c, {
      name: "Gate projection",
      letters: { y: "g", W: "W_{gate}", x: given(c), b: "b_{gate}" },
      why: "One gate value per neuron.",
    }),

  up: (card, c) =>
    linear(card, c, {
      name: `Up projection to ${count(c.model.d_ff)}`,
      letters: { y: "u", W: "W_{up}", x: given(c), b: "b_{up}" },
      why: "One pre-activation per neuron. The feed-forward layer acts on each position independently.",
    }),

  activate(card, c) {
    const [name, act] = activation(card.how);
    const y = decodeTensor(card.y).data;
    const bent = decodeTensor(card.gate ?? card.x).data;
    const gated = Boolean(card.gate);
    const most = Math.abs(y[card.strongest[0]]) || 1;
    const still = y.reduce((sum, value) => sum + (Math.abs(value) < 0.01 * most ? 1 : 0), 0);
    return {
      name: "Activation function",
      formula: gated ? `m [${count(y.length)}] = ${name}(g) ⊙ u` : `m [${count(y.length)}] = ${name}(u)`,
      legend: [...(NOTES[name] ? [[name, NOTES[name]]] : []), ...(gated ? [["⊙", "coordinate by coordinate"]] : [])],
      why: `${gated ? "The activated gate multiplies the up projection." : "The nonlinearity of the layer."} ${count(still)} of ${count(y.length)} neurons are below 1% of the strongest.`,
      figure: () => [
        h(
          "div",
          { class: "pairing" },
          act
            ? curve(
                act,
                name,
                card.strongest.map((i) => bent[i]),
              )
            : null,
          bars(
            card.strongest.map((i) => ({
              name: `neuron ${i}`,
              share: Math.abs(y[i]) / most,
              value: y[i],
              text: short(y[i]),
              title: `neuron ${i}: ${short(bent[i])} becomes ${short(y[i])}`,
              class: y[i] < 0 ? "less" : "",
              data: { neuron: i },
            })),
            { label: "the strongest neurons", full: `${short(most)}, the strongest` },
          ),
        ),
        rows(
          [
            ...(card.gate ? [{ name: "g", value: card.gate }] : []),
            { name: "u", value: card.x },
            { sign: "→", name: "m", value: card.y },
          ],
          c.say,
        ),
      ],
    };
  },

  down: (card, c) =>
    linear(card, c, {
      name: `Down projection to ${count(c.model.d_model)}`,
      letters: { y: "f", W: "W_{down}", x: "m", b: "b_{down}" },
      why: "Each neuron adds its output direction, scaled by its activation.",
    }),
};

/** @type {Record<string, [string, (x: number) => number]>} */
const ACTIVATIONS = {
  relu: ["ReLU", (x) => Math.max(x, 0)],
  relu2: ["ReLU²", (x) => Math.max(x, 0) ** 2],
  gelu: ["GELU", (x) => x * normal(x)],
  silu: ["SiLU", (x) => x / (1 + Math.exp(-x))],
  swiglu: ["SiLU", (x) => x / (1 + Math.exp(-x))],
  geglu: ["GELU", (x) => x * normal(x)],
};

/** @type {Record<string, string>} */
const NOTES = {
  ReLU: "x where it is above 0, else 0",
  "ReLU²": "the square of x where it is above 0, else 0",
  GELU: "x times the normal CDF at x",
  SiLU: "x times 1 / (1 + exp(−x))",
};

/**
 * P(X < x) of the normal distribution, near enough for a curve; the numbers come from the model.
 * @param {number} x
 * @returns {number}
 */
function normal(x) {
  return 0.5 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

/**
 * Name and function of an activation; null for one that has no curve here.
 * @type {(how: string) => [string, ((x: number) => number) | null]}
 */
export const activation = (how) => ACTIVATIONS[how.replace("_tanh", "")] ?? [how, null];
