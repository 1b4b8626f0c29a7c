// Saliency: how much each token of the text, or of source and target, moved the logit of a prediction.

import { isAvailable } from "glasshouse/api.js";
import { balance, shade } from "glasshouse/colour.js";
import { colouredText } from "glasshouse/coloured_text.js";
import { h, put } from "glasshouse/dom.js";
import { plural, short, signed } from "glasshouse/number.js";
import { live } from "glasshouse/saved_page.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { choice, numberLabel, panel, token, tokenChooser } from "glasshouse/widgets.js";

const CANDIDATES = 12;

/** @type {[SaliencyMethod | "off", string][]} */
const METHODS = [
  ["off", "off"],
  ["integrated_gradients", "integrated gradients"],
  ["gradient_x_input", "gradient × input"],
  ["attention_rollout", "attention rollout"],
];

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function saliency(context) {
  const { model } = context;
  const isPair = model.kind === "seq2seq";
  // Rollout is defined for one stack.
  const methods = METHODS.filter(([name]) => !isPair || name !== "attention_rollout");
  const method = choice("method", methods, (value) =>
    context.set({ tokens_saliency: value === "off" ? undefined : value }),
  );
  const output = tokenChooser("logit of", "saliency-output", (tokens_output) => context.set({ tokens_output }));
  const incorrect = tokenChooser("minus logit of", "saliency-incorrect", (tokens_incorrect_token) =>
    context.set({ tokens_incorrect_token }),
  );
  const targets = h(
    "div",
    { class: "controls" },
    h("label", {}, "logit of ", output),
    model.predicts_tokens ? h("label", {}, "minus logit of ", incorrect) : null,
  );
  const source = isPair ? colouredText("source tokens coloured by saliency", "saliency-source") : null;
  const own = colouredText("tokens coloured by saliency", "saliency", (place) => context.set({ token: place }));
  const facts = h("p", { role: "status", data: { testid: "saliency-facts" } });
  const legend = h("div", { class: "legend" });
  const drawing = h(
    "div",
    { class: "saliency" },
    source ? [h("h3", {}, "source"), source, h("h3", {}, "target")] : null,
    own,
    legend,
    facts,
  );
  const node = panel(
    "Saliency",
    `How much each token moved ${model.predicts_tokens ? "the prediction at the selected one" : "the label"}.`,
    h("div", { class: "controls" }, method),
    targets,
    drawing,
  );
  let colour = () => {};

  /**
   * @param {TokenSaliency} found
   * @param {SaliencyMethod} chosen
   */
  function show(found, chosen) {
    const isSigned = chosen !== "attention_rollout";
    const scores = decodeTensor(found.scores).data;
    const ofSource = found.source_scores ? decodeTensor(found.source_scores).data : null;
    const most = Math.max(1e-9, ...[...scores, ...(ofSource ?? [])].map(Math.abs));
    /** @type {(values: Float32Array) => (place: number) => Told} */
    const telling = (values) => (place) => ({
      share: values[place] / most,
      text: isSigned ? signed(values[place]) : short(values[place]),
      data: { value: values[place] },
    });
    own.show(context.row, { selected: context.token, signed: isSigned, told: telling(scores) });
    if (source && ofSource)
      source.show(context.tokens.source, { signed: isSigned, told: telling(ofSource), selected: undefined });
    colour = () => {
      own.colour();
      source?.colour();
      const swatch = isSigned ? balance : shade;
      put(
        legend,
        isSigned ? h("span", {}, h("i", { style: { background: swatch(-1) } }), signed(-most)) : null,
        h("span", {}, h("i", { class: "ringed", style: { background: swatch(0) } }), "0"),
        h("span", {}, h("i", { style: { background: swatch(1) } }), isSigned ? signed(most) : short(most)),
      );
    };
    colour();
    const what = [
      "The logit of ",
      token(found.output),
      found.incorrect_token ? [" minus that of ", token(found.incorrect_token)] : null,
    ];
    const value = numberLabel(found.value, "saliency-value");
    if (chosen === "integrated_gradients")
      put(
        facts,
        ...what,
        " rises from ",
        numberLabel(found.baseline, "saliency-baseline"),
        ", with the mean embedding in place of every token, to ",
        value,
        ". The scores sum to that change, up to ",
        numberLabel(Math.abs(found.gap ?? 0), "saliency-gap"),
        ` (${plural(found.steps, "step")}).`,
      );
    else if (chosen === "gradient_x_input")
      put(
        facts,
        ...what,
        " is ",
        value,
        ". A score is its gradient at the token embedding times this embedding: the change to first order. The scores need not sum to it.",
      );
    else
      put(
        facts,
        "The attention of all layers multiplied, averaged over heads, half of each layer being the residual stream. It has no sign, and is the same for every output.",
      );
  }

  return {
    node,
    async draw() {
      const { tokens_saliency: chosen, tokens_output, tokens_incorrect_token } = context.state;
      method.show(chosen ?? "off");
      targets.hidden = !chosen || chosen === "attention_rollout";
      drawing.hidden = !chosen;
      const known = methods.filter(([name]) => name === "off" || isAvailable("token_saliency", asked(context, name)));
      live(node, known.map(([name]) => `[data-value=${name}]`).join(", "), "token_saliency");
      if (!chosen || !known.some(([name]) => name === chosen)) {
        drawing.hidden = true;
        return;
      }
      const here = { forward_pass: context.forwardPass(), position: context.token };
      const [{ candidates }, found] = await Promise.all([
        context.request("next", { ...here, show: CANDIDATES }),
        context.request("token_saliency", asked(context, chosen)),
      ]);
      output.show(candidates, tokens_output, `top prediction: ${candidates[0].text}`);
      incorrect.show(candidates, tokens_incorrect_token, "none");
      show(found, chosen);
    },
    colour: () => colour(),
  };
}

/**
 * @param {ViewContext} context
 * @param {SaliencyMethod | "off"} method
 * @returns {RequestBody}
 */
function asked(context, method) {
  const { tokens_output, tokens_incorrect_token } = context.state;
  return {
    forward_pass: context.forwardPass(),
    position: context.token,
    method,
    ...(Number.isInteger(tokens_output) ? { output: tokens_output } : {}),
    ...(Number.isInteger(tokens_incorrect_token) ? { incorrect_token: tokens_incorrect_token } : {}),
  };
}

/**
 * The same in Python, if it is on.
 * @param {ViewContext} context
 * @param {string} inputs
 * @returns {Promise<string[]>}
 */
export async function saliencyInPython(context, inputs) {
  const { tokens_saliency: method, tokens_output, tokens_incorrect_token } = context.state;
  if (!method || !isAvailable("token_saliency", asked(context, method))) return [];
  const { steps } = await context.request("token_saliency", asked(context, method)); // drawn before
  const { model } = context;
  const named = model.predicts_tokens ? "token" : "label";
  const given = [
    `method="${method}"`,
    ...(method === "integrated_gradients" ? [`steps=${steps}`] : []),
    ...(context.hasPositionLogits ? [`positions=[${context.token}]`] : []),
    `${named}=${Number.isInteger(tokens_output) ? tokens_output : "int(probabilities.argmax())"}`,
    ...(Number.isInteger(tokens_incorrect_token) ? [`incorrect_token=${tokens_incorrect_token}`] : []),
  ];
  return [`saliency = gh.saliency(model, ${inputs}, ${given.join(", ")}, tok=tok)`];
}
