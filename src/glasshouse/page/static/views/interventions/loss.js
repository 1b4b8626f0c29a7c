// Loss per token before and after the edits, or the relative change of the final hidden states.

import { colouredText } from "glasshouse/coloured_text.js";
import { balance, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { plural, short } from "glasshouse/number.js";
import { panel } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function loss(context) {
  const { model } = context;
  const mean = h("p", { class: "loss", role: "status", data: { testid: "loss" } });
  const text = colouredText("tokens coloured by loss", "loss-text", (place) => context.set({ token: place }));
  const legend = h("div", { class: "legend" });
  const about =
    model.kind === "encoder"
      ? "Cross-entropy of each token at its position. If tokens are masked, only those count."
      : "Cross-entropy of each token given the tokens before it.";
  const node = model.predicts_tokens
    ? panel("Loss per token", about, mean, text, legend)
    : panel(
        "Change in final hidden states",
        "Distance between the final hidden states before and after the edits, relative to their norm.",
        mean,
        text,
        legend,
      );
  let colour = () => {};

  /**
   * @param {LossResponse} before
   * @param {LossResponse} after
   * @param {boolean} isLoss
   * @param {boolean} signed
   */
  function drawMean(before, after, isLoss, signed) {
    /** @type {(name: string, value: number | null) => HTMLElement} */
    const figure = (name, value) => h("b", { data: { testid: name, value } }, short(value));
    if (after.mean === null || before.mean === null) put(mean, "A single token has no loss; enter more text.");
    else if (!isLoss) put(mean, "mean relative change ", figure("loss-after", after.mean));
    else {
      const increase = after.mean - before.mean;
      put(
        mean,
        "mean loss ",
        figure("loss-before", before.mean),
        signed
          ? [
              " → ",
              figure("loss-after", after.mean),
              h(
                "span",
                { class: increase > 0 ? "worse" : "better", data: { testid: "loss-increase", value: increase } },
                ` (${increase > 0 ? "+" : ""}${short(increase)})`,
              ),
            ]
          : null,
        ` nats per token, over ${plural(after.count, after.counted === "masked" ? "masked token" : "token")}`,
      );
    }
  }

  /**
   * @param {LossResponse} before
   * @param {LossResponse} after
   * @param {boolean} isLoss
   * @param {boolean} signed
   */
  function drawText(before, after, isLoss, signed) {
    const old = decodeTensor(before.values).data;
    const now = decodeTensor(after.values).data;
    const shift = isLoss && model.kind !== "encoder" ? 1 : 0; // targets are shifted by one
    const differs = context.row.map((_, i) => (signed ? now[i - shift] - old[i - shift] : now[i - shift]));
    const most = Math.max(1e-9, ...differs.filter(Number.isFinite).map(Math.abs));
    text.show(context.row, {
      selected: context.token,
      signed,
      told(place) {
        const [was, is] = [old[place - shift], now[place - shift]];
        if (!Number.isFinite(is)) return { share: null, text: "no loss", data: { value: is, before: was } };
        const figures = signed
          ? `loss ${short(was)} before, ${short(is)} after`
          : `${isLoss ? "loss" : "relative change"} ${short(is)}`;
        return { share: differs[place] / most, text: figures, data: { value: is, before: was } };
      },
    });
    colour = () => {
      text.colour();
      const high = signed
        ? `loss up to ${short(most)} nats higher`
        : isLoss
          ? `loss ${short(most)} nats`
          : `relative change ${short(most)}`;
      put(
        legend,
        signed
          ? h("span", {}, h("i", { style: { background: balance(-1) } }), "lower loss")
          : h("span", {}, h("i", { class: "ringed", style: { background: shade(0) } }), "0"),
        h("span", {}, h("i", { style: { background: signed ? balance(1) : shade(1) } }), high),
      );
    };
    colour();
  }

  return {
    node,
    async draw() {
      const [before, after] = await Promise.all([
        context.request("loss", { forward_pass: context.forwardPass({ unedited: true }) }),
        context.request("loss", { forward_pass: context.forwardPass() }),
      ]);
      const isLoss = after.measure === "loss";
      const signed = isLoss && context.state.edits.length > 0; // then the difference is shown
      drawMean(before, after, isLoss, signed);
      drawText(before, after, isLoss, signed);
    },
    colour: () => colour(),
  };
}
