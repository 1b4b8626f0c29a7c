// The box of the second text: that patches come from, or that a circuit is found against.

import { h } from "glasshouse/dom.js";

const PAUSE = 300; // milliseconds without a key press before typed text is applied

/**
 * Returns a label with the box, with `show()` and `close()`; `apply` gets the changes of the state.
 * @param {ViewContext} context
 * @param {string} name
 * @param {(changes: Pick<PageState, "patch_from" | "edits">) => void} apply
 * @returns {SecondText}
 */
export function secondText(context, name, apply) {
  /** @type {number | undefined} */
  let pause;
  const area = h("textarea", {
    rows: 2,
    placeholder: context.model.tokenizer
      ? "For example the same text with one word changed"
      : "Token ids, such as 5 7 11",
    spellcheck: "false",
    autocomplete: "off",
    data: { testid: "patch-from" },
    on: { input: typed },
  });
  const isSeq2Seq = context.model.kind === "seq2seq";
  const node = h(
    "label",
    { class: "box" },
    h("span", { class: "name" }, isSeq2Seq ? `${name} (source)` : name),
    area,
  );

  function typed() {
    clearTimeout(pause);
    pause = setTimeout(() => {
      const edits = area.value ? context.state.edits : context.state.edits.filter((one) => one.kind !== "patch");
      apply({ patch_from: area.value, edits });
    }, PAUSE);
  }

  return Object.assign(node, {
    show() {
      if (document.activeElement !== area) area.value = context.state.patch_from;
    },
    close: () => clearTimeout(pause),
  });
}
