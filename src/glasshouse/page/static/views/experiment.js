// Experiment: parts of the model switched off, scaled or patched, and what it says before and after.

import { answer, opening, within } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { python } from "glasshouse/parts.js";
import { changed } from "glasshouse/views/experiment/changed.js";
import { history } from "glasshouse/views/experiment/history.js";
import { lens } from "glasshouse/views/experiment/lens.js";
import { loss } from "glasshouse/views/experiment/loss.js";
import { patching } from "glasshouse/views/experiment/patching.js";
import { said } from "glasshouse/views/experiment/said.js";
import { switches } from "glasshouse/views/experiment/switches.js";

export function mount(glass, root) {
  const { model } = glass;
  const changes = history(glass);
  const inside = [switches(glass, changes), changed(glass, changes)];
  const outcome = [said(glass), loss(glass)];
  if (model.speaks || model.head === "token_classification") outcome.push(lens(glass));
  const second = patching(glass, changes);
  const parts = [...inside, ...outcome, second];
  const nodes = (some) => some.map((part) => part.node);
  const code = h("div", {});
  root.classList.add("experiment");
  root.append(h("div", { class: "experiment-top" }, nodes(inside)), h("div", { class: "columns outcome" }, nodes(outcome)), second.node, code);
  const undo = (event) => changes.key(event);
  addEventListener("keydown", undo);
  const stop = onTheme(() => parts.forEach((part) => part.colour?.()));
  return {
    async draw() {
      const [lines] = await Promise.all([inPython(glass), ...parts.map((part) => part.draw())]);
      put(code, python(lines));
    },
    close: () => {
      removeEventListener("keydown", undo);
      stop();
      parts.forEach((part) => part.close?.());
    },
  };
}

/** The same in Python. */
async function inPython(glass) {
  const { lines, inputs } = opening(glass);
  const call = answer(glass, inputs);
  return [...lines, "model.eval()", `before = ${call}`, ...(await within(glass, [`after = ${call}`]))].join("\n");
}
