// Access to a served page: the key that its server may want.

import { h, put } from "glasshouse/dom.js";
import { served } from "glasshouse/manifest.js";

const KEY = "glasshouse-key"; // in the storage of this tab

/**
 * The headers of every request: a key is sent by the page, never by the browser on its own.
 * @returns {Record<string, string>}
 */
export function headers() {
  const key = served ? sessionStorage.getItem(KEY) : null;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/**
 * Ask for the key that the server wants, and open the page anew with it.
 * @param {Page} page
 */
export function askForKey(page) {
  const key = h("input", {
    type: "password",
    id: "key",
    autocomplete: "off",
    "aria-label": "key",
    data: { testid: "key" },
  });
  /** @param {Event} event */
  const enter = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, key.value.trim());
    location.reload();
  };
  put(
    page.main,
    h(
      "form",
      { class: "panel", on: { submit: enter } },
      h("h2", {}, "This server wants a key"),
      h("p", { class: "about" }, "One of those it was started with. It is kept for this tab alone."),
      h("div", { class: "controls" }, key, h("button", { class: "act first" }, "Open")),
    ),
  );
  key.focus();
  if (headers().Authorization) page.say("The server did not accept that key.", true);
}
