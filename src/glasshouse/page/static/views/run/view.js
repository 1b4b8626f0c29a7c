// Run: live metrics of a training run, samples, head scores, a comparison of two checkpoints, and the plan.

import { isSaved } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { python, quoted } from "glasshouse/widgets.js";
import { curves } from "glasshouse/views/run/curves.js";
import { heads } from "glasshouse/views/run/heads.js";
import { layers } from "glasshouse/views/run/layers.js";
import { follow, store } from "glasshouse/views/run/metrics_store.js";
import { comparison } from "glasshouse/views/run/comparison.js";
import { plan } from "glasshouse/views/run/plan.js";
import { samples } from "glasshouse/views/run/samples.js";
import { status } from "glasshouse/views/run/status.js";

const OFTEN = 2000; // milliseconds between polls of an unfinished run

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const { checkpoint, compare_with: compareWith } = context.state;
  // With two checkpoints the page mounts each view twice, but there is one run.
  if (
    compareWith &&
    context.checkpoint === compareWith &&
    compareWith !== (checkpoint || context.model.checkpoints.at(-1))
  )
    return { draw() {} };
  const parts = [status, curves, samples, heads, layers, comparison, plan].map((part) => part(context));
  const [first, second, third, fourth, fifth, sixth, seventh] = parts.map((part) => part.node);
  const code = h("div", {});
  root.classList.add("run");
  root.append(first, second, third, h("div", { class: "columns" }, fourth, fifth), sixth, seventh, code);
  async function look() {
    if (document.hidden || store.latest?.status === "finished") return;
    try {
      await follow();
      await Promise.all(parts.map((part) => part.grow?.()));
    } catch {
      // retried at the next poll
    }
  }
  const timer = isSaved ? undefined : setInterval(look, OFTEN);
  return {
    async draw(changed) {
      put(code, python(inPython(context)));
      await follow();
      await Promise.all(parts.map((part) => part.draw(changed)));
    },
    close() {
      clearInterval(timer);
      for (const part of parts) part.close?.();
    },
  };
}

/**
 * The same in Python.
 * @param {ViewContext} context
 * @returns {string}
 */
function inPython(context) {
  const { text, appended, masked, compare_with: compareWith } = context.state;
  const isPlain = context.tokens.text && context.model.tokenizer && !appended.length && !masked.length;
  const given = isPlain
    ? quoted(text)
    : Object.values(context.tokens)
        .filter(Array.isArray)
        .map((row) => `torch.tensor([[${row.map((one) => one.id).join(", ")}]])`)
        .join(", ");
  const lines = [
    compareWith && !isPlain ? "import json, torch, glasshouse as gh" : "import json, glasshouse as gh",
    "from pathlib import Path",
    "from glasshouse.training import list_checkpoints",
    "",
    `run = Path(${quoted(context.model.name)})`,
    'metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]',
    'losses = {line["step"]: line["loss"] for line in metrics}',
    "folders = {one.name: one.folder for one in list_checkpoints(run)}",
    `model, tok = gh.load(folders[${quoted(context.checkpoint)}])`,
  ];
  if (compareWith)
    lines.push(`other, _ = gh.load(folders[${quoted(compareWith)}])`, `gh.compare(model, other, ${given}, tok=tok)`);
  return lines.join("\n");
}
