// Notes: the statements of the lectures as cards, from text to text, each with a live figure.

import { isAvailable, isSaved, savedRequests } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { isLive } from "glasshouse/live_model.js";
import { live } from "glasshouse/saved_page.js";
import { Card } from "glasshouse/views/notes/card.js";

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const view = new Notes(context, root);
  return { draw: (changed) => view.draw(changed), close: () => view.close() };
}

class Notes {
  /**
   * @param {ViewContext} context
   * @param {HTMLElement} root
   */
  constructor(context, root) {
    this.context = context;
    /** @type {Map<string, Card>} */
    this.cards = new Map(); // empty until the notes are there
    /** @type {Map<string, RequestBody>} */
    this.saved = new Map(isLive ? savedRequests("note_figure").map((body) => [String(body.number), body]) : []);
    this.examples = h("div", { class: "controls examples", role: "group", "aria-label": "examples of the notes" });
    this.all = h(
      "button",
      {
        type: "button",
        class: "tool",
        "aria-pressed": "false",
        data: { testid: "notes-all" },
        on: {
          click: () =>
            context.set(
              this.listed ? { notes_cards: undefined } : { notes_all: context.state.notes_all ? undefined : 1 },
            ),
        },
      },
      "Open all cards",
    );
    this.large = h(
      "button",
      {
        type: "button",
        class: "tool",
        "aria-pressed": "false",
        data: { testid: "notes-large" },
        on: { click: () => context.set({ notes_large: context.state.notes_large ? undefined : 1 }) },
      },
      "Large type",
    );
    this.listed = ""; // the cards that are listed, where these are not all
    this.index = h("nav", { class: "index", "aria-label": "cards" });
    this.list = h("div", { class: "lectures", on: { keydown: (event) => this.walk(event) } });
    root.classList.add("notes");
    root.append(
      h(
        "section",
        { class: "panel" },
        h("h2", {}, isLive ? "The notes" : "The notes, live"),
        h(
          "p",
          { class: "about" },
          "Every statement of the lectures on a card: why it matters, a figure computed on this model, something to play with, the line of code that does it, and how we know.",
          isLive
            ? " In this file the figures are of the text, token, layer and head that it was saved with."
            : isSaved
              ? null
              : " Token, layer and head are selected above.",
        ),
        this.examples,
        this.index,
        h("div", { class: "controls" }, this.all, this.large),
      ),
      this.list,
    );
  }

  close() {
    document.documentElement.classList.remove("large-type");
    for (const card of this.cards.values()) card.clear();
  }

  /** @param {Responses["notes"]} notes */
  build({ parts: all, examples }) {
    const { context } = this;
    const parts = this.listed ? [this.selected(all)] : all;
    this.close();
    this.cards.clear();
    /** @type {(number: string) => void} */
    const open = (number) =>
      context.set({
        notes_card: this.current === number && !context.state.notes_all ? "none" : number,
        notes_value: undefined,
      });
    /** @type {(number: string, value: number) => void} */
    const play = (number, value) => context.set({ notes_card: number, notes_value: value });
    put(
      this.list,
      parts.map((part) => {
        const cards = part.statements.map(
          (one) =>
            new Card(one, all.find((from) => from.statements.includes(one)) ?? part, {
              open,
              play,
              explain: (text) => context.page.glossary.linked(text),
            }),
        );
        for (const card of cards) this.cards.set(card.number, card);
        return h(
          "section",
          { class: "lecture", "aria-label": part.title },
          h("h2", {}, part.title),
          h(
            "ol",
            { class: "cards" },
            cards.map((card) => card.node),
          ),
          part.questions.length
            ? h(
                "div",
                { class: "questions" },
                h("h3", {}, "Test yourself"),
                part.questions.map((one) =>
                  h(
                    "details",
                    {},
                    h("summary", {}, one.ask),
                    h("p", {}, one.answer, " ", h("a", { href: `#notes/${one.card}` }, `see ${one.card}`)),
                  ),
                ),
              )
            : null,
        );
      }),
    );
    put(
      this.index,
      parts.map((part) =>
        h(
          "details",
          { open: matchMedia("(min-width: 641px)").matches },
          h("summary", { class: "name" }, part.title),
          h(
            "ul",
            {},
            part.statements.map((one) =>
              h(
                "li",
                {},
                h(
                  "a",
                  { href: `#notes/${one.number}`, data: { to: one.number } },
                  one.title,
                  " ",
                  h("span", { class: "code" }, one.number),
                ),
              ),
            ),
          ),
        ),
      ),
    );
    put(
      this.examples,
      h("span", { class: "name" }, "examples"),
      examples.map((one) =>
        h(
          "button",
          { type: "button", class: "tool", data: { testid: "example" }, on: { click: () => this.choose(one) } },
          one.title || one.text,
        ),
      ),
    );
    live(this.examples, undefined, "note_figure");
  }

  /**
   * The listed cards as one part, in their order.
   * @param {NotesPart[]} parts
   * @returns {NotesPart}
   */
  selected(parts) {
    const statements = parts.flatMap((part) => part.statements);
    const listed = this.listed.split(",").flatMap((number) => statements.filter((one) => one.number === number));
    return { ...parts[0], title: "Lecture", statements: listed, questions: [] };
  }

  /**
   * The cards that the address lists, unless another one was opened since.
   * @returns {string}
   */
  get wanted() {
    const { notes_cards: listed = "", notes_card: opened = "none" } = this.context.state;
    return opened === "none" || listed.split(",").includes(opened) ? listed : "";
  }

  /**
   * Open the card that works an example through, and put the example into the prompt of a model that can take it.
   * @param {NotesExample} example
   */
  choose({ text, ids, card }) {
    const { model } = this.context;
    const opened = { notes_card: card, notes_value: undefined };
    const prompt = { appended: [], masked: [], token: -1 };
    const fits = ids.length && Math.max(...ids) < model.vocab_size;
    if (text && model.tokenizer) this.context.set({ ...opened, ...prompt, text });
    else if (fits && !model.tokenizer) this.context.set({ ...opened, ...prompt, text: ids.join(" ") });
    else if (fits && model.kind === "decoder") this.context.set({ ...opened, ...prompt, text: "", appended: ids });
    else this.context.set(opened);
  }

  /**
   * The number of the open card: the first one unless another is chosen.
   * @returns {string}
   */
  get current() {
    return this.context.state.notes_card ?? this.cards.keys().next().value ?? "";
  }

  /**
   * @param {Changed} changed
   * @returns {Promise<void>}
   */
  async draw(changed) {
    const { context } = this;
    const { state } = context;
    const [notes] = await Promise.all([context.request("notes"), context.page.glossary.load()]);
    const isFirst = !this.cards.size || this.listed !== this.wanted;
    if (isFirst) {
      this.listed = this.wanted;
      this.build(notes);
    }
    const every = Boolean(state.notes_all || this.listed);
    this.all.setAttribute("aria-pressed", String(Boolean(state.notes_all)));
    put(this.all, this.listed ? "List all cards" : every ? "Close all but one" : "Open all cards");
    this.large.setAttribute("aria-pressed", String(Boolean(state.notes_large)));
    document.documentElement.classList.toggle("large-type", Boolean(state.notes_large)); // for a projector
    for (const [number, card] of this.cards) {
      const isOpen = every || number === this.current;
      if (isOpen !== card.node.classList.contains("open")) card.show(isOpen);
      if (changed.has("notes_card") && number !== this.current) clearTimeout(card.pause); // which would choose it again
    }
    for (const link of this.index.querySelectorAll("a"))
      link.toggleAttribute("aria-current", link.dataset.to === this.current);
    const chosen = this.cards.get(this.current);
    if (chosen) chosen.value = state.notes_value; // others keep theirs, where all are open
    chosen?.showValue();
    if (isSaved || isLive) this.disable();
    // A slider also chooses its card, which must stay where it is under the pointer.
    const isPlayed = !isFirst && state.notes_value !== undefined;
    const moved = changed.has("notes_card") && state.notes_card && !isPlayed && chosen;
    if (moved) chosen.node.scrollIntoView({ block: "start" });
    for (const card of this.cards.values())
      if (card.node.classList.contains("open")) await card.draw((given) => this.ask(given));
    if (!moved) return;
    chosen.node.scrollIntoView({ block: "start" }); // cards above it may have grown
    if (document.activeElement?.matches('a[href^="#notes/"]')) chosen.head.focus({ preventScroll: true });
  }

  /** Disable what this file has no figures for: cards, and sliders. */
  disable() {
    const closed = [...this.cards.values()].filter((card) => !card.node.classList.contains("open"));
    const missing = closed.filter(({ given }) => given.figure && !isAvailable("note_figure", this.body(given)));
    for (const card of missing) live(card.head, undefined, "note_figure");
    if (missing.length || this.listed) live(this.all, undefined, "note_figure");
    for (const { given, slider } of this.cards.values()) {
      const control = given.figure?.control;
      const other = control?.low === control?.start ? control?.high : control?.low;
      if (slider && !isAvailable("note_figure", this.body(given, other))) live(slider, undefined, "note_figure");
    }
  }

  /**
   * Request a figure with what it depends on.
   * @param {Statement} statement
   * @returns {Promise<Responses["note_figure"]>}
   */
  ask(statement) {
    const { number } = statement;
    return this.context.request("note_figure", this.body(statement, this.cards.get(number)?.value));
  }

  /**
   * What a figure depends on.
   * @param {Statement} statement
   * @param {number} [value]
   * @returns {RequestBody}
   */
  body({ number, figure }, value) {
    const { context } = this;
    const { model, state } = context;
    /** @type {RequestBody} */
    const body = { number, ...this.saved.get(number) };
    if (value !== undefined && value !== figure?.control?.start) body.value = value;
    if (isLive) return body;
    const reads = figure?.reads ?? [];
    if (reads.includes("pass")) body.forward_pass = context.forwardPass();
    if (reads.includes("layer")) body.layer = Math.min(state.layer, model.n_layers - 1);
    if (reads.includes("head")) body.head = Math.min(state.head, model.n_heads - 1);
    if (reads.includes("position")) body.position = context.token;
    return body;
  }

  /**
   * Arrow keys move between the heads of cards.
   * @param {ElementEvent<KeyboardEvent>} event
   */
  walk(event) {
    if (!event.target.classList?.contains("head")) return;
    const heads = [...this.cards.values()].map((card) => card.head);
    const at = heads.indexOf(/** @type {HTMLButtonElement} */ (event.target));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: heads.length - 1 }[event.key];
    if (to === undefined || !heads[to]) return;
    event.preventDefault();
    heads[to].focus();
  }
}
