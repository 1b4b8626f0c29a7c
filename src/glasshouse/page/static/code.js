// Python that gives what the page shows: the model, what it reads, and the changes made inside.

import { quoted } from "glasshouse/parts.js";

/** Lines that load the model and say what it reads; `inputs` is how a call is then written. */
export function opening(glass) {
  const { text, added, hidden } = glass.state;
  const lines = ["import torch, glasshouse as gh", "", glass.loading];
  const listed = (row) => `torch.tensor([[${row.map((one) => one.id).join(", ")}]])`;
  if (glass.model.kind === "seq2seq") {
    lines.push(`source = ${listed(glass.tokens.source)}`, `target = ${listed(glass.tokens.target)}`);
    return { lines, inputs: "source, target" };
  }
  const more = added.length ? ` + [${added.join(", ")}]` : "";
  lines.push(`ids = ${glass.model.tokenizer && text ? `torch.tensor([tok.encode(${quoted(text)})${more}])` : listed(glass.row)}`);
  if (!hidden.length) return { lines, inputs: "ids" };
  lines.push("masked = ids.clone()", `masked[0, [${hidden.join(", ")}]] = tok.special_id("mask")`);
  return { lines, inputs: "masked" };
}

/** A call that gives what the head says at the selected token, or of the whole text; where it says nothing, vectors. */
export function answer(glass, inputs) {
  if (!glass.says) return `model(${inputs})`;
  return `model(${inputs})[0${glass.model.head === "sequence_classification" ? "" : `, ${glass.token}`}].softmax(-1)`;
}

/** The changes as `gh.edit` takes them; patches are read from `seen`. */
function changes(edits) {
  const bySite = new Map();
  for (const one of edits) bySite.set(one.site, [...(bySite.get(one.site) ?? []), valueOf(one)]);
  return [...bySite].map(([site, values]) => `    ${quoted(site)}: ${values.length > 1 ? `[${values.join(", ")}]` : values[0]},`);
}

function valueOf(edit) {
  if (edit.kind === "mean") return "gh.inspection.mean()";
  if (edit.kind === "patch") return `seen[${quoted(edit.site)}]`;
  return edit.by ? `gh.inspection.scale(${edit.by})` : "0.0";
}

/** Lines that record on the other text what patches put here. */
async function patches(glass) {
  const sites = glass.state.edits.filter((one) => one.kind === "patch").map((one) => quoted(one.site));
  if (!sites.length || !glass.state.other) return [];
  const tokens = await glass.ask("tokens", { question: glass.otherQuestion });
  const ids = (tokens.source ?? tokens.text).map((one) => one.id);
  const call = tokens.source ? "other, target" : "other";
  return [`other = torch.tensor([[${ids.join(", ")}]])`, `with gh.record(model, ${sites.join(", ")}) as seen:`, `    model(${call})`];
}

/** Lines of work, inside the changes where there are any. */
export async function within(glass, work) {
  const { edits } = glass.state;
  if (!edits.length) return work;
  return [...(await patches(glass)), "edits = {", ...changes(edits), "}", "with gh.edit(model, edits):", ...work.map((line) => `    ${line}`)];
}
