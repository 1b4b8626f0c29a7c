// The prompt and its tokens, along which everything is selected.

import { isSaved, NEEDS_SERVER, request } from "glasshouse/api.js";
import { h, put, reveal } from "glasshouse/dom.js";
import { ViewContext } from "glasshouse/view_context.js";
import { clamp, plural } from "glasshouse/number.js";
import { live } from "glasshouse/saved_page.js";
import { token } from "glasshouse/widgets.js";

const PAUSE = 300; // milliseconds without a key press before typed text is applied
const CHUNK = 256; // tokens per layout chunk; off-screen chunks are not rendered
const UNFOLD = "show all tokens with their ids";
const MAX_TARGET_TOKENS = 48; // generated for an empty target

export class Prompt {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.isSeq2Seq = page.model.kind === "seq2seq";
    /** @type {HTMLElement[]} */
    this.marked = []; // the tokens that are highlighted
    this.actions = h("span", { class: "actions" });
    this.sides = this.isSeq2Seq
      ? [
          this.side("source", "text", "Source", "Source text"),
          this.side("target", "target", "Target", "Target prefix (optional)"),
        ]
      : [
          this.side(
            "text",
            "text",
            "Text",
            page.model.tokenizer ? "Type or paste text" : "Token ids, such as 5 7 11",
          ),
        ];
    this.sides[this.sides.length - 1].area.after(this.actions); // they change the target, or the only text
    this.node = h(
      "section",
      { class: "prompt", "aria-label": "text" },
      this.sides.map((one) => one.node),
      isSaved
        ? h(
            "p",
            { class: "quiet saved", id: "saved-page" },
            `Saved page: another text, or what is greyed out, ${NEEDS_SERVER}`,
          )
        : null,
    );
  }

  /**
   * A text box and its tokens, in one line until they are unfolded.
   * @param {Side} name
   * @param {"text" | "target"} key
   * @param {string} label
   * @param {string} placeholder
   * @returns {PromptSide}
   */
  side(name, key, label, placeholder) {
    const area = h("textarea", {
      rows: 2,
      id: `box-${key}`,
      "aria-labelledby": `label-${key}`,
      placeholder,
      spellcheck: "false",
      autocomplete: "off",
      readonly: isSaved, // and not disabled, so that it can be copied
      title: isSaved ? NEEDS_SERVER : undefined,
      "aria-describedby": isSaved ? "saved-page" : undefined,
      data: { testid: `box-${key}` },
      on: { input: () => this.typed() },
    });
    const strip = h("div", {
      class: "strip folded",
      id: `strip-${name}`,
      role: "listbox",
      "aria-label": name === "text" ? "tokens" : `tokens of the ${name}`,
      tabindex: "0",
      data: { testid: `strip-${name}` },
      on: {
        click: (event) => this.picked(name, event),
        keydown: (event) => this.walked(name, event),
        scroll: () => this.fade(strip),
      },
    });
    const fold = h("button", {
      type: "button",
      class: "fold",
      "aria-controls": strip.id,
      "aria-expanded": "false",
      title: UNFOLD,
      data: { testid: `fold-${name}` },
      on: { click: () => this.turn(side) },
    });
    const node = h(
      "div",
      { class: "side" },
      h("label", { class: "name", id: `label-${key}`, for: area.id }, label),
      h("div", { class: "write" }, area),
      fold,
      strip,
    );
    /** @type {PromptSide} */
    const side = { name, key, area, strip, fold, node };
    new ResizeObserver(() => this.show(side)).observe(strip);
    return side;
  }

  /**
   * Fold the tokens into one line, or unfold them.
   * @param {PromptSide} side
   */
  turn(side) {
    const isFolded = side.strip.classList.toggle("folded");
    side.fold.setAttribute("aria-expanded", String(!isFolded));
    side.fold.title = isFolded ? UNFOLD : "fold into one line";
    this.show(side);
  }

  /**
   * Bring the selected token of a strip into view.
   * @param {PromptSide} side
   */
  show(side) {
    const chosen = document.getElementById(side.strip.getAttribute("aria-activedescendant") ?? "");
    if (chosen) reveal(chosen, side.strip);
    this.fade(side.strip);
  }

  /**
   * Fade the ends where a folded strip goes on.
   * @param {HTMLElement} strip
   */
  fade(strip) {
    const isFolded = strip.classList.contains("folded");
    strip.classList.toggle("cut-left", isFolded && strip.scrollLeft > 1);
    strip.classList.toggle("cut-right", isFolded && strip.scrollLeft + strip.clientWidth < strip.scrollWidth - 1);
  }

  typed() {
    clearTimeout(this.pause);
    const written = () => Object.fromEntries(this.sides.map(({ key, area }) => [key, area.value]));
    this.pause = setTimeout(
      () => this.page.state.set({ ...written(), appended: [], masked: [], token: -1, key: 0 }),
      PAUSE,
    );
  }

  /**
   * @param {Side} side
   * @param {ElementEvent<MouseEvent>} event
   */
  picked(side, event) {
    const place = event.target.closest(".token")?.dataset.place;
    if (place !== undefined) this.choose(side, Number(place));
  }

  /**
   * A source token is selected as the key, a target or text token as the query.
   * @param {Side} side
   * @param {number} place
   */
  choose(side, place) {
    this.page.state.set(side === "source" ? { key: place } : { token: place });
  }

  /**
   * @param {Side} side
   * @param {KeyboardEvent} event
   */
  walked(side, event) {
    const length = this.page.tokens[side].length;
    const now = side === "source" ? this.page.state.values.key : new ViewContext(this.page, "").token;
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(side, clamp(to, length - 1));
  }

  /** @param {Changed} changed */
  draw(changed) {
    const { state, tokens } = this.page;
    for (const { key, area } of this.sides)
      if (area.value !== state.values[key] && document.activeElement !== area) area.value = state.values[key];
    if (changed.has("tokens")) for (const side of this.sides) this.fill(side, tokens[side.name]);
    this.mark();
    this.drawActions();
  }

  /**
   * @param {PromptSide} side
   * @param {Token[]} row
   */
  fill({ name, strip, fold }, row) {
    const { appended } = this.page.state.values;
    const from = name === "source" ? row.length : row.length - appended.length;
    const chunks = [];
    for (let start = 0; start < row.length; start += CHUNK) {
      const some = row.slice(start, start + CHUNK).map((one, i) =>
        token(one, {
          role: "option",
          id: `${name}-${start + i}`,
          class: start + i >= from ? "appended" : "",
          data: { place: start + i, id: one.id },
          "aria-label": `${one.text}, token ${start + i}, id ${one.id}`,
        }),
      );
      chunks.push(h("span", { class: "chunk", role: "presentation" }, some));
    }
    put(strip, chunks);
    put(fold, plural(row.length, "token"));
    this.marked = [];
  }

  /** Highlight the selection. */
  mark() {
    for (const one of this.marked) {
      one.classList.remove("selected", "compared");
      one.removeAttribute("aria-selected");
    }
    const { key } = this.page.state.values;
    const at = new ViewContext(this.page, "").token;
    const row = this.isSeq2Seq ? "target" : "text";
    const chosen = document.getElementById(`${row}-${at}`);
    const other = document.getElementById(`${this.isSeq2Seq ? "source" : "text"}-${key}`);
    other?.classList.add("compared");
    chosen?.classList.add("selected");
    chosen?.setAttribute("aria-selected", "true");
    this.marked = [chosen, other].filter((one) => one !== null);
    for (const side of this.sides) {
      const one = side.name === row ? chosen : other;
      side.strip.setAttribute("aria-activedescendant", one?.id ?? "");
      this.show(side);
    }
  }

  drawActions() {
    const { model, state } = this.page;
    const { appended, masked } = state.values;
    const at = new ViewContext(this.page, "").token;
    /** @type {(text: string, act: () => void, testid: string) => HTMLElement} */
    const button = (text, act, testid) =>
      live(h("button", { type: "button", class: "link", data: { testid }, on: { click: act } }, text));
    const isMasked = masked.includes(at);
    put(
      this.actions,
      appended.length
        ? button("remove last token", () => state.set({ appended: appended.slice(0, -1), token: -1 }), "remove-last")
        : null,
      appended.length > 1
        ? button(`remove all ${appended.length}`, () => state.set({ appended: [], token: -1 }), "remove-all")
        : null,
      this.isSeq2Seq && model.generates
        ? button(appended.length ? "regenerate target" : "generate target", () => this.generate(), "generate-target")
        : null,
      model.has_mask_token
        ? button(
            isMasked ? "unmask this token" : "mask this token",
            () =>
              state.set({
                masked: isMasked ? masked.filter((one) => one !== at) : [...masked, at].sort((a, b) => a - b),
              }),
            "mask",
          )
        : null,
    );
  }

  /** Generate the target of an encoder-decoder. */
  async generate() {
    const { page } = this;
    page.wait(1);
    try {
      const forwardPass = { ...new ViewContext(page, page.checkpoints()[0]).forwardPass({ unedited: true }) };
      forwardPass.prompt = { text: forwardPass.prompt.text };
      const made = await request("generate", { forward_pass: forwardPass, max_new_tokens: MAX_TARGET_TOKENS });
      page.state.set({ target: "", appended: made.tokens.map((one) => one.id), token: -1 });
    } catch (error) {
      page.say(error.message, true);
    } finally {
      page.wait(-1);
    }
  }
}
