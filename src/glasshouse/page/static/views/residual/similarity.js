// Positions with the most similar residual vectors.

import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { bars, placeholder, panel, token } from "glasshouse/widgets.js";
import { chosenRow, select } from "glasshouse/views/residual/selection.js";

const SHOWN = 6;

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function similarity(context) {
  const list = h("div", { data: { testid: "similarity" } });
  const node = panel(
    "Cosine similarity to other positions",
    "Cosine similarity of residual vectors after the selected layer.",
    list,
  );
  return {
    node,
    async draw() {
      const { nearest } = await context.request("cosine_similarity", {
        forward_pass: context.forwardPass(),
        layer: chosenRow(context),
        position: context.token,
        show: SHOWN,
      });
      if (!nearest.length) {
        put(list, placeholder("There is no other token to compare with."));
        return;
      }
      put(
        list,
        bars(
          nearest.map((one) => ({
            name: [token(one), h("span", { class: "quiet" }, ` ${one.position}`)],
            share: Math.abs(one.cosine),
            value: one.cosine,
            text: short(one.cosine),
            class: one.cosine < 0 ? "less" : "",
            title: `token ${one.position}`,
            onclick: () => select(context, one.position),
            data: { place: one.position },
          })),
          { label: "most similar positions", full: "a cosine of 1" },
        ),
      );
    },
  };
}
