// Interventions: loss and predictions under edits, ablation of each component, and activation patching.

import {
  argmax,
  finiteOrNull,
  largest,
  logSoftmax,
  norm,
  requireWithin,
  rowOf,
  tensor,
} from "glasshouse/live/numbers.js";
import { targetIds } from "glasshouse/live/endpoints/residual.js";
import { logitsAt } from "glasshouse/live/endpoints/tokens.js";

const MAX_SITES = 128; // per request

/**
 * What is measured of final hidden states [S, D] at each position: the loss, or without targets the relative change.
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @param {NdArray} final
 * @returns {number[]}
 */
function measure(trace, final) {
  const { model, forwardPass, prefix } = trace;
  if (!model.about.predicts_tokens) {
    const before = model.trace({ prompt: forwardPass.prompt }).at(`${prefix}final`);
    return trace.ids.map((_, at) => {
      const [now, then] = [rowOf(final, at), rowOf(before, at)];
      return norm(Float64Array.from(now, (one, i) => one - then[i])) / norm(then);
    });
  }
  const logits = model.logits(final);
  return targetIds(trace).map((target, at) => (target < 0 ? Number.NaN : -logSoftmax(rowOf(logits, at))[target]));
}

/**
 * The positions that count in the mean: the masked ones, or all with a target.
 * @param {import("glasshouse/live/model.js").Trace} trace
 * @returns {{ counted: number[], hasMasked: boolean }}
 */
function counting(trace) {
  const { model, forwardPass } = trace;
  const masked = forwardPass.prompt.masked ?? [];
  const hasMasked = model.about.predicts_tokens && model.about.kind === "encoder" && masked.length > 0;
  const targets = targetIds(trace);
  const counted = [...targets.keys()].filter(
    (at) => (!model.about.predicts_tokens || targets[at] >= 0) && (!hasMasked || masked.includes(at)),
  );
  return { counted, hasMasked };
}

const meanOf = (/** @type {number[]} */ values, /** @type {number[]} */ counted) =>
  counted.reduce((sum, at) => sum + values[at], 0) / counted.length;

/** @type {LiveEndpoint<"loss">} */
function loss(model, { forward_pass: forwardPass }) {
  const trace = model.trace(forwardPass);
  const values = measure(trace, trace.at(`${trace.prefix}final`));
  const { counted, hasMasked } = counting(trace);
  return {
    measure: model.about.predicts_tokens ? "loss" : "relative_change",
    values: tensor([values.length], values),
    counted: hasMasked ? "masked" : "all",
    count: counted.length,
    mean: finiteOrNull(meanOf(values, counted)),
  };
}

/** @type {LiveEndpoint<"ablate_each">} */
function ablateEach(model, { forward_pass: forwardPass, sites }) {
  requireWithin("sites", sites.length, 1, MAX_SITES);
  const trace = model.trace(forwardPass);
  const { counted } = counting(trace);
  const before = meanOf(measure(trace, trace.at(`${trace.prefix}final`)), counted);
  const increase = sites.map((/** @type {string} */ site) =>
    finiteOrNull(meanOf(measure(trace, trace.finalUnder({ kind: "scale", site, factor: 0 })), counted) - before),
  );
  return { before: finiteOrNull(before), loss_increase: increase };
}

/** @type {LiveEndpoint<"compare_predictions">} */
function comparePredictions(model, { forward_pass: forwardPass, position = 0, show = 8 }) {
  const trace = model.trace(forwardPass);
  requireWithin("position", position, 0, trace.ids.length - 1);
  const unedited = model.trace({ prompt: forwardPass.prompt });
  const [before, after] = [unedited, trace].map((one) => logSoftmax(logitsAt(one, position)));
  const shown = [...new Set([before, after].flatMap((one) => largest(one, Math.max(1, show))))];
  const divergence = before.reduce((sum, one, i) => sum + Math.exp(one) * (one - after[i]), 0);
  return {
    candidates: model
      .describe(shown)
      .map((one) => ({ ...one, before: Math.exp(before[one.id]), after: Math.exp(after[one.id]) })),
    divergence: finiteOrNull(divergence),
  };
}

/** @type {LiveEndpoint<"patch_each">} */
function patchEach(model, { forward_pass: forwardPass, sites, position = 0 }) {
  requireWithin("sites", sites.length, 1, MAX_SITES);
  if (!forwardPass.patch_from) throw new Error("there is no second text to patch from; enter one.");
  const edits = (forwardPass.edits ?? []).filter((/** @type {Edit} */ one) => one.kind !== "patch");
  const here = model.trace({ ...forwardPass, edits });
  const there = model.trace({ prompt: forwardPass.patch_from });
  requireWithin("position", position, 0, Math.min(here.ids.length, there.ids.length) - 1);
  const [old, made] = [here, there].map((one) => argmax(logitsAt(one, position)));
  const [describedOld, describedNew] = model.describe([old, made]);
  if (old === made)
    throw new Error(
      `both texts predict '${describedOld.text}' there; choose another position, or a text with another prediction.`,
    );
  const [before, after] = [here, there].map((one) => logitsAt(one, position)[made] - logitsAt(one, position)[old]);
  const effect = sites.map((/** @type {string} */ site) => {
    const logits = rowOf(model.logits(here.finalUnder({ kind: "patch", site }, there)), position);
    return finiteOrNull((logits[made] - logits[old] - before) / (after - before));
  });
  return { effect, here: describedOld, there: describedNew, before, after };
}

export const interventions = {
  loss,
  ablate_each: ablateEach,
  compare_predictions: comparePredictions,
  patch_each: patchEach,
};
