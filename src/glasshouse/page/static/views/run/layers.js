// Logit-lens loss by layer over the steps.

import { chart } from "glasshouse/chart.js";
import { onTheme, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { placeholder, panel } from "glasshouse/widgets.js";
import { checkpointLog } from "glasshouse/views/run/metrics_store.js";

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function layers(context) {
  const picture = chart({
    title: "Logit-lens loss",
    unit: "nats",
    height: 230,
    testid: "chart-lens",
    onmove: (step) => picture.mark(step),
    onpick: (step) => context.set({ run_step: step }),
  });
  const body = h("div", {}, picture);
  const legend = h("p", { class: "legend" });
  const node = panel("Logit-lens loss by layer", "Validation loss of the logit lens after each layer.", body, legend);
  /** @type {ProbeLog | null} */
  let told = null;
  function show() {
    if (!told?.layers.logit_lens) return;
    const { layers, steps } = told;
    const lines = layers.logit_lens;
    const depth = lines.find((line) => line !== null)?.length ?? 0;
    const series = Array.from({ length: depth }, (_, layer) => {
      const points = steps.flatMap((step, i) => {
        const value = lines[i]?.[layer];
        return value === null || value === undefined ? [] : [{ step, value }];
      });
      return {
        name: layer ? `layer ${layer - 1}` : "embed",
        testid: `lens-${layer}`,
        colour: shade(0.3 + (0.7 * layer) / Math.max(1, depth - 1)),
        x: points.map(({ step }) => step),
        y: points.map(({ value }) => value),
        dots: true,
      };
    });
    picture.show({ series, log: context.state.run_scale === "log", from: 0, to: Math.max(1, ...steps) });
    picture.mark(context.state.run_step ?? null);
  }
  async function draw() {
    told = await checkpointLog("probes");
    if (!told.layers.logit_lens) {
      put(
        body,
        placeholder(
          context.model.predicts_tokens
            ? "No logit-lens loss yet; it is logged with each checkpoint."
            : "The head of this model does not predict tokens, so there is no logit lens.",
        ),
      );
      return;
    }
    if (!body.contains(picture)) put(body, picture);
    show();
    put(legend, "“embed” is the embedding. Later layers are darker (lighter in the dark theme).");
  }
  const stop = onTheme(show);
  return {
    node,
    draw,
    grow: draw,
    close: () => {
      stop();
      picture.close();
    },
  };
}
