// Keyboard shortcuts of the page, and their list.

import { h } from "glasshouse/dom.js";
import { clamp } from "glasshouse/number.js";

const KEYS = [
  ["← →", "next token, cell or map position"],
  ["[ and ]", "previous, next layer"],
  [", and .", "previous, next head"],
  ["1, 2, …", "open a view"],
  ["?", "show keyboard shortcuts"],
];

/**
 * The list of shortcuts, a dialog that is closed.
 * @returns {HTMLDialogElement}
 */
export function keyHelp() {
  const close = h("button", { type: "button", class: "tool", on: { click: () => dialog.close() } }, "Close");
  const dialog = h(
    "dialog",
    { class: "keys", "aria-label": "keyboard shortcuts" },
    h("h2", {}, "Keyboard shortcuts"),
    h(
      "dl",
      {},
      KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)]),
    ),
    close,
  );
  return dialog;
}

/**
 * Do what a key stands for, unless it is typed into a field.
 * @param {Page} page
 * @param {KeyboardEvent} event
 */
export function pressed(page, event) {
  const { routing, state } = page;
  if (event.ctrlKey || event.metaKey || event.altKey || !routing.views.length) return;
  const target = event.target instanceof Element ? event.target : null;
  if (target?.closest("input, textarea, select, dialog")) return;
  const { layer, head } = state.values;
  const number = Number(event.key);
  if (event.key === "[") state.set({ layer: clamp(layer - 1, page.layers - 1) });
  else if (event.key === "]") state.set({ layer: clamp(layer + 1, page.layers - 1) });
  else if (event.key === ",") state.set({ head: clamp(head - 1, page.model.n_heads - 1) });
  else if (event.key === ".") state.set({ head: clamp(head + 1, page.model.n_heads - 1) });
  else if (event.key === "?") page.keys.showModal();
  else if (number >= 1 && number <= routing.views.length) routing.choose(routing.views[number - 1].name);
  else if (target?.getAttribute("role") === "tab" && event.key === "ArrowRight") routing.step(1);
  else if (target?.getAttribute("role") === "tab" && event.key === "ArrowLeft") routing.step(-1);
  else return;
  event.preventDefault();
}
