// What each layer knows: the loss if the model had to answer after it, over the steps.

import { chart } from "glasshouse/chart.js";
import { onTheme, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { placeholder, panel } from "glasshouse/widgets.js";
import { checkpointLog } from "glasshouse/views/run/metrics_store.js";

export function layers(context) {
  const picture = chart({ title: "Loss read off after each layer", unit: "nats", height: 230, testid: "chart-lens", onmove: (step) => picture.mark(step), onpick: (step) => context.set({ run_step: step }) });
  const body = h("div", {}, picture);
  const legend = h("p", { class: "legend" });
  const node = panel("What each layer knows", "If the model had to answer after a layer, without those above, this would be its loss on held-out text. As it learns, later layers part from earlier ones.", body, legend);
  let told = null;
  function show() {
    const lines = told.layers.lens;
    const depth = lines.find(Boolean).length;
    const series = Array.from({ length: depth }, (_, layer) => {
      const points = told.steps.map((step, i) => [step, lines[i]?.[layer]]).filter(([, value]) => value !== null && value !== undefined);
      return { name: layer ? `layer ${layer - 1}` : "embedded", testid: `lens-${layer}`, colour: shade(0.3 + (0.7 * layer) / Math.max(1, depth - 1)), x: points.map(([step]) => step), y: points.map(([, value]) => value), dots: true };
    });
    picture.show({ series, log: context.state.run_scale === "log", from: 0, to: Math.max(1, told.steps.at(-1)) });
    picture.mark(context.state.run_step ?? null);
  }
  async function draw() {
    told = await checkpointLog("probes");
    if (!told.layers.lens) {
      put(body, placeholder(context.model.predicts_tokens ? "Nothing was read off the layers yet; the first figures come with the first checkpoint." : "The head of this model has no vocabulary, so nothing can be read off its layers."));
      return;
    }
    if (!body.contains(picture)) put(body, picture);
    show();
    put(legend, "“embedded” is before the first layer. The darker the line, the later the layer (in the dark theme, the lighter).");
  }
  const stop = onTheme(() => told?.layers.lens && show());
  return { node, draw, grow: draw, close: () => { stop(); picture.close(); } };
}
