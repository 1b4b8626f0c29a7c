// Step through: the forward pass of one token, as cards with formulas and the actual numbers.

import { preamble, within } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { pictureButton } from "glasshouse/picture.js";
import { choice, panel, python, quoted } from "glasshouse/widgets.js";
import { keyOf, partName, partOf } from "glasshouse/views/walkthrough/card.js";
import { describe } from "glasshouse/views/walkthrough/cards.js";
import { exact } from "glasshouse/views/walkthrough/figures.js";
import { formula } from "glasshouse/views/walkthrough/formula.js";
import { draw as drawPath } from "glasshouse/views/walkthrough/diagram.js";
import { clamp } from "glasshouse/number.js";

const NARROW = matchMedia("(max-width: 760px)");
const BUSY =
  "input, textarea, select, dialog, pre, [role=listbox], [role=tab], [role=radio], [role=slider], .cell, .scroll"; // elements with their own arrow keys

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const view = new Walkthrough(context, root);
  return { draw: (changed) => view.draw(changed), close: () => view.close() };
}

class Walkthrough {
  /**
   * @param {ViewContext} context
   * @param {HTMLElement} root
   */
  constructor(context, root) {
    this.context = context;
    /** @type {WalkthroughResponse | null} */
    this.found = null;
    /** @type {ListedCard[]} */
    this.cards = [];
    this.written = ""; // the same in Python
    this.side =
      context.model.kind === "seq2seq"
        ? choice(
            "stack",
            [
              ["target", "decoder (target)"],
              ["source", "encoder (source)"],
            ],
            (side) =>
              context.set({ walkthrough_side: side === "source" ? side : undefined, walkthrough_card: undefined }),
          )
        : null;
    this.title = h("p", { class: "whose", data: { testid: "walkthrough-title" } });
    this.path = h("nav", {
      class: "trail",
      "aria-label": "where in the model",
      data: { testid: "walkthrough-path" },
    });
    this.list = h("ol", { class: "cards", data: { testid: "walkthrough-cards" } });
    this.back = h(
      "button",
      { type: "button", class: "act", data: { testid: "walkthrough-back" }, on: { click: () => this.move(-1) } },
      "‹ Previous",
    );
    this.next = h(
      "button",
      { type: "button", class: "act first", data: { testid: "walkthrough-next" }, on: { click: () => this.move(1) } },
      "Next ›",
    );
    this.where = h("span", { class: "at", role: "status", data: { testid: "walkthrough-at" } });
    this.all = h(
      "button",
      {
        type: "button",
        class: "tool",
        "aria-pressed": "false",
        data: { testid: "walkthrough-all" },
        on: { click: () => context.set({ walkthrough_all: context.state.walkthrough_all ? undefined : 1 }) },
      },
      "Show all",
    );
    this.told = h(
      "output",
      { class: "told", "aria-live": "polite", data: { testid: "walkthrough-value" } },
      "point at a number for all its digits",
    );
    this.code = h("div", {});
    const bar = h(
      "div",
      { class: "walk", role: "group", "aria-label": "steps" },
      this.back,
      this.next,
      this.where,
      this.told,
      this.all,
    );
    root.classList.add("walkthrough");
    root.append(
      panel(
        "Forward pass of one token",
        "From the token id to the output, step by step, with the actual numbers. Select token, layer and head above; step with the arrow keys.",
        this.side,
        this.title,
        h(
          "p",
          { class: "legend" },
          h("span", {}, h("i", { class: "plus" }), "above 0"),
          h("span", {}, h("i", { class: "minus" }), "below 0"),
          h(
            "span",
            {},
            "full colour: the largest magnitude of the vector or matrix; point at a number or reach it by Tab for all digits",
          ),
        ),
      ),
      h("div", { class: "course" }, this.path, this.list),
      bar,
      this.code,
    );
    root.addEventListener("pointerover", (event) => this.point(event));
    root.addEventListener("focusin", (event) => this.point(event));
    root.addEventListener("keydown", (event) => this.rove(event));
    this.root = root;
    /** @type {(event: KeyboardEvent) => void} */
    this.onKey = (event) => this.key(event);
    this.onWidth = () => this.drawPath();
    document.addEventListener("keydown", this.onKey);
    NARROW.addEventListener("change", this.onWidth);
    this.endTheme = onTheme(() => this.build());
  }

  close() {
    document.removeEventListener("keydown", this.onKey);
    NARROW.removeEventListener("change", this.onWidth);
    this.endTheme();
  }

  get isSource() {
    return this.side !== null && this.context.state.walkthrough_side === "source";
  }

  // Request

  /** @returns {RequestBody} */
  body() {
    const { context } = this;
    const { model, state } = context;
    const depth = this.isSource ? model.n_encoder_layers : model.n_layers;
    const at = {
      layer: Math.min(state.layer, depth - 1),
      head: Math.min(state.head, model.n_heads - 1),
      position: context.token,
    };
    if (this.isSource)
      Object.assign(at, { side: "source", position: Math.min(state.key, context.tokens.source.length - 1) });
    return { forward_pass: context.forwardPass(), ...at };
  }

  /**
   * @param {Changed} changed
   * @returns {Promise<void>}
   */
  async draw(changed) {
    this.side?.show(this.isSource ? "source" : "target");
    const found = await this.context.request("walkthrough", this.body());
    if (found !== this.found) {
      this.found = found;
      this.build();
    }
    this.open(changed.has("walkthrough_card") && this.context.state.walkthrough_card !== undefined);
    const code = await this.inPython(found);
    if (code === this.written) return; // keep it expanded while stepping
    this.written = code;
    put(this.code, python(code));
  }

  // Drawing

  build() {
    if (!this.found) return;
    const { found, context } = this;
    const c = this.cardContext(found);
    const named = `token ${found.position}, “${found.token.text}” (id ${found.token.id}), layer ${found.layer}, head ${found.head}`;
    put(this.title, `Now: ${named}.`);
    this.cards = found.cards.map((card, i) => this.card(card, i, c));
    put(
      this.list,
      this.cards.map((one) => one.node),
    );
    this.drawPath();
    this.open(false);
    this.root.dataset.part = context.state.walkthrough_card ?? "";
  }

  /**
   * @param {WalkthroughResponse} found
   * @returns {CardContext}
   */
  cardContext(found) {
    const { context } = this;
    const side = this.isSource ? "source" : "";
    const own = side ? context.tokens.source : context.row;
    return {
      model: context.model,
      found,
      side,
      say: (text) => put(this.told, text),
      keys: (card) => (partOf(card) === "cross" ? context.tokens.source : own),
      here: (card) => (partOf(card) === "cross" ? -1 : found.position),
    };
  }

  /**
   * @param {StepCard} card
   * @param {number} number
   * @param {CardContext} c
   * @returns {ListedCard}
   */
  card(card, number, c) {
    const told = describe(card, c);
    const id = `step-${number}`;
    const key = keyOf(card);
    const body = h("div", { class: "inside", id, hidden: true });
    const part = partName(card);
    const head = h(
      "button",
      {
        type: "button",
        class: "head",
        "aria-expanded": "false",
        "aria-controls": id,
        on: { click: () => this.choose(key) },
      },
      h("span", { class: "number" }, String(number + 1)),
      h(
        "span",
        { class: "titles" },
        h("span", { class: "stepname" }, told.name, part ? h("span", { class: "belongs quiet" }, part) : null),
        formula(told.formula),
      ),
    );
    const node = h("li", { class: "step", data: { key, node: card.node, kind: card.kind } }, h("h3", {}, head), body);
    const fill = () => {
      const legend = told.legend.length
        ? h(
            "p",
            { class: "symbols quiet" },
            told.legend.map(([symbol, text]) => h("span", {}, formula(symbol), ` ${text}`)),
          )
        : null;
      const changed = card.changed
        ? h(
            "p",
            { class: "changed", role: "note" },
            `${card.site.replace(/\[.*/, "")} is edited: the numbers are those after the edit, so the formula does not give them.`,
          )
        : null;
      const site = card.site ? h("p", { class: "site quiet" }, "site ", h("code", {}, card.site)) : null;
      put(
        body,
        pictureButton(told.name, () => document.querySelector(`.step[data-key="${CSS.escape(key)}"]`) ?? node),
        h("div", { class: "words" }, h("p", { class: "why" }, told.why), legend, changed, site),
        h("div", { class: "figure-box" }, told.figure()),
      );
    };
    return { key, card, node, head, body, told, fill, filled: false };
  }

  /** The index of the current card. */
  get at() {
    const { walkthrough_card } = this.context.state;
    const at = this.cards.findIndex((one) => one.key === walkthrough_card);
    return Math.max(0, at);
  }

  /**
   * Expand the current card, collapse the others.
   * @param {boolean} scroll
   */
  open(scroll) {
    if (!this.cards.length) return;
    const { at } = this;
    const all = Boolean(this.context.state.walkthrough_all);
    this.cards.forEach((one, i) => {
      const open = all || i === at;
      if (open && !one.filled) {
        one.fill();
        one.filled = true;
      }
      one.body.hidden = !open;
      one.head.setAttribute("aria-expanded", String(open));
      one.node.classList.toggle("present", i === at);
      if (i === at) one.head.setAttribute("aria-current", "step");
      else one.head.removeAttribute("aria-current");
    });
    const present = this.cards[at];
    put(
      this.where,
      h("b", {}, `${at + 1}`),
      ` of ${this.cards.length}`,
      h("span", { class: "spoken" }, `: ${present.told.name}`),
    );
    this.back.disabled = at === 0;
    this.next.disabled = at === this.cards.length - 1;
    this.all.setAttribute("aria-pressed", String(all));
    put(this.all, all ? "Show one" : "Show all");
    this.light();
    if (scroll) this.reveal(present.node);
  }

  /**
   * Bring a card into view, its head at least.
   * @param {HTMLElement} node
   */
  reveal(node) {
    const box = node.getBoundingClientRect();
    const room = innerHeight - 72;
    if (box.top >= 84 && box.bottom <= room) return;
    node.scrollIntoView({ block: box.height < room - 84 && box.top >= 84 ? "end" : "start" });
  }

  drawPath() {
    if (!this.found) return;
    put(
      this.path,
      drawPath(this.found, this.context.model, NARROW.matches, (node) => {
        const first = this.cards.find((one) => one.card.node === node);
        if (first) this.choose(first.key);
      }),
    );
    this.light();
  }

  /** Highlight the current node of the diagram. */
  light() {
    const node = this.cards[this.at]?.card.node;
    for (const place of this.path.querySelectorAll(".place")) {
      const on = place.dataset.node === node;
      place.classList.toggle("lit", on);
      if (on) place.setAttribute("aria-current", "step");
      else place.removeAttribute("aria-current");
      if (on && NARROW.matches && place instanceof SVGGraphicsElement)
        this.path.scrollLeft = place.getBBox().x - this.path.clientWidth / 2 + 40;
    }
  }

  // Selection

  /** @param {string} key */
  choose(key) {
    this.context.set({ walkthrough_card: key });
  }

  /** @param {number} by */
  move(by) {
    const to = this.at + by;
    if (to >= 0 && to < this.cards.length) this.choose(this.cards[to].key);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.target instanceof Element && event.target.closest(BUSY)) return;
    event.preventDefault();
    this.move(by);
  }

  /**
   * Arrows within a row or matrix of numbers go from one to the next.
   * @param {KeyboardEvent} event
   */
  rove(event) {
    const cell = event.target instanceof Element ? event.target.closest(".cells .cell") : null;
    const box = cell?.parentElement;
    if (!cell || !box) return;
    const cells = [...box.querySelectorAll(".cell")];
    const at = cells.indexOf(cell);
    const line = Number(box.dataset.columns ?? 1);
    const to = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at + line,
      ArrowUp: at - line,
      Home: 0,
      End: cells.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = cells[clamp(to, cells.length - 1)];
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  /** @param {Event} event */
  point(event) {
    const cell = event.target instanceof Element ? event.target.closest("[data-value]") : null;
    if (!cell?.dataset.what) return;
    put(this.told, `${cell.dataset.what} = ${exact(Number(cell.dataset.value))}`);
  }

  /**
   * The same in Python.
   * @param {WalkthroughResponse} found
   * @returns {Promise<string>}
   */
  async inPython(found) {
    const { lines, inputs } = preamble(this.context);
    const sites = found.cards.filter((one) => one.site).map((one) => `    ${quoted(one.site)},`);
    const work = ["with gh.record(model, *sites) as seen:", `    model(${inputs})`];
    return [
      ...lines,
      "sites = [",
      ...sites,
      "]",
      ...(await within(this.context, work)),
      "for site in sites:",
      "    print(site, seen[site][0])",
    ].join("\n");
  }
}
