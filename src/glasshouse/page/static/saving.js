// The Save button: the page as one HTML file, with what is shown, or with the model inside.

import { request, requestsFor } from "glasshouse/api.js";
import { h } from "glasshouse/dom.js";

const KINDS = [
  {
    name: "Snapshot",
    live: false,
    says: "What is shown, with the other tokens and heads if they fit. Nothing is computed in the file.",
  },
  {
    name: "Live page",
    live: true,
    says:
      "The model is in the file and runs in the browser: other texts, generation, ablation, without a server. For " +
      "models of up to 10 million parameters with byte-level BPE; takes half a minute.",
  },
];

/**
 * The choice between the two, as a dialog.
 * @param {Page} page
 * @returns {HTMLDialogElement}
 */
export function saveDialog(page) {
  /** @param {boolean} live */
  const choose = (live) => {
    dialog.close();
    saveFile(page, live);
  };
  const dialog = h(
    "dialog",
    { class: "keys", "aria-label": "save" },
    h("h2", {}, "Save as one HTML file"),
    KINDS.map(({ name, live, says }) =>
      h(
        "p",
        {},
        h("button", { type: "button", class: "act", on: { click: () => choose(live) } }, name),
        h("span", { class: "quiet" }, ` ${says}`),
      ),
    ),
    h("button", { type: "button", class: "tool", on: { click: () => dialog.close() } }, "Close"),
  );
  return dialog;
}

/**
 * @param {Page} page
 * @param {boolean} live
 */
async function saveFile(page, live) {
  page.save.disabled = true;
  page.say("Saving…");
  try {
    const fragment = page.state.fragmentOf({ checkpoint: page.checkpoints()[0] });
    const what = live ? { live } : requestsFor(page.forwardPasses());
    const { html } = await request("save", { fragment, ...what }, { fresh: true });
    const link = h("a", {
      href: URL.createObjectURL(new Blob([html], { type: "text/html" })),
      download: "glasshouse.html",
    });
    link.click();
    URL.revokeObjectURL(link.href);
    page.say("Saved as glasshouse.html, a standalone file.");
  } catch (error) {
    page.say(error.message, true);
  } finally {
    page.save.disabled = false;
  }
}
