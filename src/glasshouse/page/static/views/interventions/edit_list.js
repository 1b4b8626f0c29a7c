// The active edits: a list, with a slider for scale factors.

import { h, put } from "glasshouse/dom.js";
import { panel, slider } from "glasshouse/widgets.js";
import { named } from "glasshouse/views/interventions/site.js";

/**
 * @param {ViewContext} context
 * @param {EditHistory} changes
 * @returns {Part}
 */
export function editList(context, changes) {
  const list = h("ul", { class: "edits", data: { testid: "edits" } });
  const none = h(
    "p",
    { class: "quiet", data: { testid: "no-edits" } },
    "No edits. Click a head in the grid to ablate it; the predictions below show the effect.",
  );
  const undo = h(
    "button",
    { type: "button", class: "act", title: "Ctrl+Z", data: { testid: "undo" }, on: { click: () => changes.undo() } },
    "Undo",
  );
  const redo = h(
    "button",
    {
      type: "button",
      class: "act",
      title: "Ctrl+Shift+Z",
      data: { testid: "redo" },
      on: { click: () => changes.redo() },
    },
    "Redo",
  );
  const reset = h(
    "button",
    { type: "button", class: "act", data: { testid: "reset" }, on: { click: () => changes.make({ edits: [] }) } },
    "Reset",
  );
  const node = panel(
    "Active edits",
    "Edits are part of the URL and apply in all views.",
    none,
    list,
    h("div", { class: "controls" }, undo, redo, reset),
  );
  /** @type {Map<string, HTMLElement & { show: (edit: Edit) => void }>} */
  const rows = new Map(); // by site and kind, so that a slider is not replaced while it is dragged

  /**
   * @param {Edit} edit
   * @returns {HTMLElement & { show: (edit: Edit) => void }}
   */
  function make(edit) {
    const name = named(edit.site);
    const remove = h(
      "button",
      {
        type: "button",
        class: "remove",
        "aria-label": `remove ${name}`,
        on: { click: () => changes.put(edit.site, null) },
      },
      "✕",
    );
    const scale =
      edit.kind === "scale"
        ? slider(`scale ${name} by`, {
            min: 0,
            max: 3,
            step: 0.05,
            shown: (value) => (value ? `× ${value.toFixed(2)}` : "off"),
            oninput: (value) => later(edit.site, value),
          })
        : null;
    const by =
      scale ??
      h("span", { class: "quiet" }, edit.kind === "mean" ? "mean over positions" : "patched from the second text");
    by.querySelector(".name")?.remove();
    const row = h("li", { data: { site: edit.site } }, h("span", { class: "edit-name" }, name), by, remove);
    /** @param {Edit} one */
    const show = (one) => {
      if (one.kind === "scale") scale?.show(one.factor ?? 0);
    };
    return Object.assign(row, { show });
  }

  /** @type {number | undefined} */
  let waiting;
  /**
   * @param {string} site
   * @param {number} factor
   */
  function later(site, factor) {
    clearTimeout(waiting);
    waiting = setTimeout(() => changes.put(site, { kind: "scale", site, factor }, {}, `slide ${site}`), 60);
  }

  return {
    node,
    draw() {
      const { edits } = context.state;
      const names = edits.map((one) => `${one.kind} ${one.site}`);
      for (const name of rows.keys()) if (!names.includes(name)) rows.delete(name);
      const now = edits.map((one, i) => {
        const row = rows.get(names[i]) ?? make(one);
        rows.set(names[i], row);
        row.show(one);
        return row;
      });
      if (now.length !== list.children.length || now.some((row, i) => row !== list.children[i])) put(list, now);
      none.hidden = edits.length > 0;
      list.hidden = !edits.length;
      undo.disabled = !changes.canUndo;
      redo.disabled = !changes.canRedo;
      reset.disabled = !edits.length;
    },
  };
}
