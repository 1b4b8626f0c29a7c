// Predictions at the selected token, before and after the edits.

import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { placeholder, panel, token } from "glasshouse/widgets.js";

const SHOWN = 8; // candidates before, and after

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function predictions(context) {
  const { model } = context;
  const list = h("div", {
    class: "twins",
    role: "list",
    "aria-label": "probabilities before and after",
    data: { testid: "predictions" },
  });
  const apart = h("p", { class: "quiet", data: { testid: "divergence" } });
  const key = h(
    "div",
    { class: "legend" },
    h("span", {}, h("i", { class: "twin-before" }), "before"),
    h("span", {}, h("i", { class: "twin-after" }), "after"),
    h("span", {}, "full bar: 100%"),
  );
  const nothing = () =>
    placeholder(`${context.headSentence}, so it predicts no tokens: see the change in its final hidden states.`);
  const node = panel(
    context.predictionsTitle,
    "At the selected token, before and after the edits.",
    context.hasProbabilities ? [key, list, apart] : nothing(),
  );

  return {
    node,
    async draw() {
      if (!context.hasProbabilities) return;
      const { candidates, divergence } = await context.request("compare_predictions", {
        forward_pass: context.forwardPass(),
        position: context.token,
        show: SHOWN,
      });
      /** @type {(kind: string, value: number) => HTMLElement} */
      const bar = (kind, value) => h("i", { class: `twin-${kind}`, style: { width: `${100 * value}%` } });
      const order = [...candidates]
        .sort((a, b) => Math.max(b.before, b.after) - Math.max(a.before, a.after))
        .slice(0, SHOWN + 2);
      put(
        list,
        order.map((one) =>
          h(
            "div",
            {
              class: "twin",
              role: "listitem",
              data: { id: one.id, before: one.before, after: one.after },
              title: `${one.text}: ${percent(one.before)} before, ${percent(one.after)} after`,
            },
            h("span", { class: "what" }, model.predicts_tokens ? token(one) : one.text),
            h(
              "span",
              { class: "twin-track", "aria-hidden": "true" },
              bar("before", one.before),
              bar("after", one.after),
            ),
            h("span", { class: "figure quiet" }, percent(one.before)),
            h("span", { class: "twin-arrow quiet" }, "→"),
            h("span", { class: "figure" }, percent(one.after)),
          ),
        ),
      );
      put(
        apart,
        context.state.edits.length
          ? h(
              "span",
              { data: { value: divergence } },
              `KL divergence: ${short(divergence && Math.abs(divergence))} nats.`,
            )
          : "No edits: both are the same.",
      );
    },
  };
}
