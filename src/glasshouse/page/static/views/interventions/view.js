// Interventions: ablation, scaling and activation patching, with predictions before and after.

import { answers } from "glasshouse/api.js";
import { answer, preamble, within } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { live } from "glasshouse/saved_page.js";
import { python } from "glasshouse/widgets.js";
import { editList } from "glasshouse/views/interventions/edit_list.js";
import { history } from "glasshouse/views/interventions/history.js";
import { lens } from "glasshouse/views/interventions/lens.js";
import { loss } from "glasshouse/views/interventions/loss.js";
import { patching } from "glasshouse/views/interventions/patching.js";
import { predictions } from "glasshouse/views/interventions/predictions.js";
import { ablation } from "glasshouse/views/interventions/ablation.js";

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const changes = history(context);
  const inside = [ablation(context, changes), editList(context, changes)];
  const outcome = [predictions(context), loss(context)];
  if (context.hasPositionLogits) outcome.push(lens(context));
  const second = patching(context, changes);
  const parts = [...inside, ...outcome, second];
  /** @type {(some: Part[]) => HTMLElement[]} */
  const nodes = (some) => some.map((part) => part.node);
  const top = h("div", { class: "interventions-top" }, nodes(inside));
  const code = h("div", {});
  root.classList.add("interventions");
  root.append(top, h("div", { class: "columns outcome" }, nodes(outcome)), second.node, code);
  /** @type {(event: KeyboardEvent) => void} */
  const undo = (event) => changes.key(event);
  addEventListener("keydown", undo);
  const stop = onTheme(() => {
    for (const part of parts) part.colour?.();
  });
  return {
    async draw(changed) {
      const [lines] = await Promise.all([inPython(context), ...parts.map((part) => part.draw(changed))]);
      put(code, python(lines));
      // Each edit is another forward pass; a sweep may have been done before the page was saved.
      live(top, answers("ablate_each") ? ".act.first" : "");
      const known = [
        answers("patch_each") ? "[data-testid=trace]" : "",
        answers("estimate_patches") ? "[data-testid=estimate]" : "",
      ];
      live(second.node, known.filter(Boolean).join(", "));
      const estimate = second.node.querySelector("[data-testid=estimate]");
      if (estimate) live(estimate, "", "estimate_patches");
    },
    close: () => {
      removeEventListener("keydown", undo);
      stop();
      for (const part of parts) part.close?.();
    },
  };
}

/**
 * The same in Python.
 * @param {ViewContext} context
 * @returns {Promise<string>}
 */
async function inPython(context) {
  const { lines, inputs } = preamble(context);
  const call = answer(context, inputs);
  return [...lines, "model.eval()", `before = ${call}`, ...(await within(context, [`after = ${call}`]))].join("\n");
}
