// The worker of a live page: it answers the requests of the views that a server would answer.

import { attention } from "glasshouse/live/endpoints/attention.js";
import { bpeTraining } from "glasshouse/live/endpoints/bpe_training.js";
import { interventions } from "glasshouse/live/endpoints/interventions.js";
import { overviewEndpoints } from "glasshouse/live/endpoints/overview.js";
import { residual } from "glasshouse/live/endpoints/residual.js";
import { seq2seq } from "glasshouse/live/endpoints/seq2seq.js";
import { tokens } from "glasshouse/live/endpoints/tokens.js";
import { walkthroughEndpoints } from "glasshouse/live/endpoints/walkthrough.js";
import { decodeBase64, operations } from "glasshouse/live/interpreter.js";
import { LiveModel } from "glasshouse/live/model.js";

/** @type {Record<string, (model: LiveModel, body: any) => unknown>} */
const endpoints = {
  ...tokens,
  ...bpeTraining,
  ...attention,
  ...residual,
  ...interventions,
  ...overviewEndpoints,
  ...walkthroughEndpoints,
  ...seq2seq,
};
/** @type {LiveModel | undefined} */
let model;

/**
 * @param {string} name
 * @param {any} body
 * @returns {unknown}
 */
function answer(name, body) {
  if (name === "load") {
    model = new LiveModel(body.file, decodeBase64(body.weights));
    return null;
  }
  if (name === "known") return { endpoints: Object.keys(endpoints), operations: Object.keys(operations) };
  if (!model) throw new Error("the model is not loaded yet.");
  return endpoints[name](model, body);
}

addEventListener("message", ({ data: { number, name, body } }) => {
  try {
    postMessage({ number, given: answer(name, body) });
  } catch (error) {
    postMessage({ number, error: error.message });
  }
});
