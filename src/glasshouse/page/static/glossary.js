// The glossary: a dialog with the terms of the field, and terms in a text that open it.

import { request } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";

const UNSAID = new Set(["activation", "token", "weight", "site", "loss"]); // too common to mark in every sentence

export class Glossary {
  constructor() {
    /** @type {GlossaryEntry[]} */
    this.entries = [];
    this.list = h("dl", { class: "glossary", tabindex: "0", "aria-label": "terms" });
    const close = h("button", { type: "button", class: "tool", on: { click: () => this.node.close() } }, "Close");
    this.node = h(
      "dialog",
      { class: "keys", "aria-label": "glossary", data: { testid: "glossary" } },
      h("h2", {}, "Glossary"),
      this.list,
      close,
    );
  }

  /** Fetch the terms, once. */
  async load() {
    if (this.entries.length) return;
    this.entries = (await request("glossary")).entries;
    put(
      this.list,
      this.entries.map(({ term, also, text }) =>
        h(
          "div",
          { data: { term } },
          h("dt", {}, h("b", {}, term), also.length ? h("span", { class: "quiet" }, ` ${also.join(", ")}`) : null),
          h("dd", {}, text.replaceAll("`", "")),
        ),
      ),
    );
  }

  /**
   * Open it, at a term if one is given.
   * @param {string} [term]
   */
  async open(term) {
    await this.load();
    this.node.showModal();
    for (const one of this.list.children) {
      const isIt = one instanceof HTMLElement && one.dataset.term === term;
      one.classList.toggle("chosen", isIt);
      if (isIt) one.scrollIntoView({ block: "center" });
    }
  }

  /**
   * A text in which the first occurrence of each term opens its entry; `load` must have been awaited.
   * @param {string} text
   * @returns {Child[]}
   */
  linked(text) {
    const names = new Map(
      this.entries.flatMap(({ term, also }) => [term, ...also].map((name) => [name.toLowerCase(), term])),
    );
    const known = [...names.keys()].filter((name) => !UNSAID.has(name)).sort((a, b) => b.length - a.length);
    const escaped = known.map((name) => name.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"));
    const form = new RegExp(`(?<![\\w-])(${escaped.join("|")})(?![\\w-])`, "gi");
    const seen = new Set();
    return text.split(form).map((part, i) => {
      const term = i % 2 ? names.get(part.toLowerCase()) : undefined;
      if (!term || seen.has(term)) return part;
      seen.add(term);
      return h(
        "button",
        { type: "button", class: "term", title: `glossary: ${term}`, on: { click: () => this.open(term) } },
        part,
      );
    });
  }
}
