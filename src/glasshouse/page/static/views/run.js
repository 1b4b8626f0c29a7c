// Run: the curves of a training run while they grow, what the model wrote on the way, its heads, and two moments.

import { isSaved } from "glasshouse/asking.js";
import { h, put } from "glasshouse/dom.js";
import { python, quoted } from "glasshouse/parts.js";
import { curves } from "glasshouse/views/run/curves.js";
import { heads } from "glasshouse/views/run/heads.js";
import { layers } from "glasshouse/views/run/layers.js";
import { follow, log } from "glasshouse/views/run/log.js";
import { moments } from "glasshouse/views/run/moments.js";
import { samples } from "glasshouse/views/run/samples.js";
import { standing } from "glasshouse/views/run/standing.js";

const OFTEN = 2000; // milliseconds between looks at a run that is not finished

export function mount(glass, root) {
  const { moment, beside } = glass.state;
  // Beside another moment the page mounts a view twice, but the run is one.
  if (beside && glass.moment === beside && beside !== (moment || glass.model.moments.at(-1))) return { draw() {} };
  const parts = [standing, curves, samples, heads, layers, moments].map((part) => part(glass));
  const [first, second, third, fourth, fifth, sixth] = parts.map((part) => part.node);
  const code = h("div", {});
  root.classList.add("run");
  root.append(first, second, third, h("div", { class: "columns" }, fourth, fifth), sixth, code);
  async function look() {
    if (document.hidden || log.told?.state === "finished") return;
    try {
      await follow();
      await Promise.all(parts.map((part) => part.grow?.()));
    } catch {
      // the next look may find it
    }
  }
  const timer = isSaved ? null : setInterval(look, OFTEN);
  return {
    async draw(changed) {
      put(code, python(inPython(glass)));
      await follow();
      await Promise.all(parts.map((part) => part.draw(changed)));
    },
    close() {
      clearInterval(timer);
      parts.forEach((part) => part.close?.());
    },
  };
}

/** The same in Python. */
function inPython(glass) {
  const { text, added, hidden, beside } = glass.state;
  const isPlain = glass.tokens.text && glass.model.tokenizer && !added.length && !hidden.length;
  const given = isPlain ? quoted(text) : Object.values(glass.tokens).filter(Array.isArray).map((row) => `torch.tensor([[${row.map((one) => one.id).join(", ")}]])`).join(", ");
  const lines = [
    beside && !isPlain ? "import json, torch, glasshouse as gh" : "import json, glasshouse as gh",
    "from pathlib import Path",
    "from glasshouse.training import moments",
    "",
    `run = Path(${quoted(glass.model.name)})`,
    'metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]',
    'losses = {line["step"]: line["loss"] for line in metrics}',
    "folders = {one.name: one.folder for one in moments(run)}",
    `model, tok = gh.load(folders[${quoted(glass.moment)}])`,
  ];
  if (beside) lines.push(`other, _ = gh.load(folders[${quoted(beside)}])`, `gh.compare(model, other, ${given}, tok=tok)`);
  return lines.join("\n");
}
