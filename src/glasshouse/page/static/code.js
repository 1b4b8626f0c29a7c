// Python code that reproduces the page: model, inputs and edits.

import { quoted } from "glasshouse/widgets.js";

/**
 * Lines that load the model and define its inputs; `inputs` are the call arguments.
 * @param {ViewContext} context
 * @returns {{ lines: string[], inputs: string }}
 */
export function preamble(context) {
  const { text, appended, masked } = context.state;
  const lines = ["import torch, glasshouse as gh", "", context.loading];
  /** @type {(row: Token[]) => string} */
  const listed = (row) => `torch.tensor([[${row.map((one) => one.id).join(", ")}]])`;
  if (context.model.kind === "seq2seq") {
    lines.push(`source = ${listed(context.tokens.source)}`, `target = ${listed(context.tokens.target)}`);
    return { lines, inputs: "source, target" };
  }
  const more = appended.length ? ` + [${appended.join(", ")}]` : "";
  lines.push(
    `ids = ${context.model.tokenizer && text ? `torch.tensor([tok.encode(${quoted(text)})${more}])` : listed(context.row)}`,
  );
  if (!masked.length) return { lines, inputs: "ids" };
  lines.push("masked = ids.clone()", `masked[0, [${masked.join(", ")}]] = tok.special_id("mask")`);
  return { lines, inputs: "masked" };
}

/**
 * A call that returns the probabilities at the selected token or of the text, or vectors where the head has none.
 * @param {ViewContext} context
 * @param {string} inputs
 * @returns {string}
 */
export function answer(context, inputs) {
  if (!context.hasProbabilities) return `model(${inputs})`;
  return `model(${inputs})[0${context.model.head === "sequence_classification" ? "" : `, ${context.token}`}].softmax(-1)`;
}

/**
 * The edits as `gh.edit` takes them; patches come from `seen`.
 * @param {Edit[]} edits
 * @returns {string[]}
 */
function changes(edits) {
  /** @type {Map<string, string[]>} */
  const bySite = new Map();
  for (const one of edits) bySite.set(one.site, [...(bySite.get(one.site) ?? []), editCode(one)]);
  return [...bySite].map(
    ([site, values]) => `    ${quoted(site)}: ${values.length > 1 ? `[${values.join(", ")}]` : values[0]},`,
  );
}

/**
 * @param {Edit} edit
 * @returns {string}
 */
function editCode(edit) {
  if (edit.kind === "mean") return "gh.inspection.mean_ablate()";
  if (edit.kind === "patch") return `seen[${quoted(edit.site)}]`;
  return edit.factor ? `gh.inspection.scale(${edit.factor})` : "0.0";
}

/**
 * Lines that record the patched activations on the other text.
 * @param {ViewContext} context
 * @returns {Promise<string[]>}
 */
async function patches(context) {
  const sites = context.state.edits.filter((one) => one.kind === "patch").map((one) => quoted(one.site));
  if (!sites.length || !context.state.patch_from) return [];
  const tokens = await context.request("tokenize", { forward_pass: context.patchPass });
  const ids = (tokens.source ?? tokens.text).map((one) => one.id);
  const call = tokens.source ? "other, target" : "other";
  return [
    `other = torch.tensor([[${ids.join(", ")}]])`,
    `with gh.record(model, ${sites.join(", ")}) as seen:`,
    `    model(${call})`,
  ];
}

/**
 * Lines of code, within the edits if there are any.
 * @param {ViewContext} context
 * @param {string[]} work
 * @returns {Promise<string[]>}
 */
export async function within(context, work) {
  const { edits } = context.state;
  if (!edits.length) return work;
  return [
    ...(await patches(context)),
    "edits = {",
    ...changes(edits),
    "}",
    "with gh.edit(model, edits):",
    ...work.map((line) => `    ${line}`),
  ];
}
