// The prompt and its tokens, along which everything is selected.

import { request } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { ViewContext } from "glasshouse/view_context.js";
import { plural } from "glasshouse/number.js";
import { token } from "glasshouse/widgets.js";

const PAUSE = 300; // milliseconds without a key press before typed text is applied
const CHUNK = 256; // tokens per layout chunk; off-screen chunks are not rendered
const MAX_TARGET_TOKENS = 48; // generated for an empty target

export class Prompt {
  constructor(page) {
    this.page = page;
    const isSeq2Seq = page.model.kind === "seq2seq";
    this.isSeq2Seq = isSeq2Seq;
    this.boxes = isSeq2Seq
      ? [this.box("text", "Source", "Source text"), this.box("target", "Target", "Target prefix (optional)")]
      : [this.box("text", "Text", page.model.tokenizer ? "Type or paste text" : "Token ids, such as 5 7 11")];
    this.rows = isSeq2Seq ? [this.strip("source", "tokens of the source"), this.strip("target", "tokens of the target")] : [this.strip("text", "tokens")];
    this.count = h("span", { class: "quiet" });
    this.more = h("span", { class: "more" });
    this.node = h("section", { class: "prompt", "aria-label": "text" }, h("div", { class: "boxes" }, this.boxes.map((one) => one.node)), this.rows.map((one) => one.node), h("p", { class: "below" }, this.count, this.more));
  }

  box(name, label, placeholder) {
    const area = h("textarea", { rows: 2, id: `box-${name}`, placeholder, spellcheck: "false", autocomplete: "off", data: { testid: `box-${name}` }, on: { input: () => this.typed() } });
    return { name, area, node: h("label", { class: "box" }, h("span", { class: "name" }, label), area) };
  }

  typed() {
    clearTimeout(this.pause);
    const written = () => Object.fromEntries(this.boxes.map(({ name, area }) => [name, area.value]));
    this.pause = setTimeout(() => this.page.state.set({ ...written(), appended: [], masked: [], token: -1, key: 0 }), PAUSE);
  }

  strip(side, label) {
    const node = h("div", { class: "strip", role: "listbox", "aria-label": label, tabindex: "0", data: { testid: `strip-${side}` }, on: { click: (event) => this.picked(side, event), keydown: (event) => this.walked(side, event) } });
    return { side, node };
  }

  picked(side, event) {
    const place = event.target.closest(".token")?.dataset.place;
    if (place !== undefined) this.choose(side, Number(place));
  }

  /** A source token is selected as the key, a target or text token as the query. */
  choose(side, place) {
    this.page.state.set(side === "source" ? { key: place } : { token: place });
  }

  walked(side, event) {
    const length = this.page.tokens[side].length;
    const now = side === "source" ? this.page.state.values.key : new ViewContext(this.page, "").token;
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(side, Math.max(0, Math.min(length - 1, to)));
  }

  draw(changed) {
    const { state, tokens } = this.page;
    for (const { name, area } of this.boxes) if (area.value !== state.values[name] && document.activeElement !== area) area.value = state.values[name];
    if (changed.has("tokens")) for (const { side, node } of this.rows) this.fill(side, node, tokens[side]);
    this.mark();
    const counts = this.rows.map(({ side }) => plural(tokens[side].length, "token"));
    put(this.count, counts.join(" → "));
    this.drawMore();
  }

  fill(side, node, row) {
    const { appended } = this.page.state.values;
    const from = side === "source" ? row.length : row.length - appended.length;
    const chunks = [];
    for (let start = 0; start < row.length; start += CHUNK) {
      const some = row.slice(start, start + CHUNK).map((one, i) =>
        token(one, { role: "option", id: `${side}-${start + i}`, class: start + i >= from ? "appended" : "", data: { place: start + i, id: one.id }, "aria-label": `${one.text}, token ${start + i}, id ${one.id}` }));
      chunks.push(h("span", { class: "chunk", role: "presentation" }, some));
    }
    put(node, chunks);
    this.marked = [];
  }

  /** Highlight the selection. */
  mark() {
    for (const one of this.marked ?? []) {
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
    this.marked = [chosen, other].filter(Boolean);
    for (const { side, node } of this.rows) {
      const one = side === row ? chosen : other;
      node.setAttribute("aria-activedescendant", one?.id ?? "");
      if (one && node.scrollHeight > node.clientHeight) node.scrollTop = one.offsetTop - node.offsetTop - node.clientHeight / 2;
    }
  }

  drawMore() {
    const { model, state } = this.page;
    const { appended, masked } = state.values;
    const at = new ViewContext(this.page, "").token;
    const button = (text, act, testid) => h("button", { type: "button", class: "link", data: { testid }, on: { click: act } }, text);
    const isMasked = masked.includes(at);
    put(
      this.more,
      appended.length ? button("remove last token", () => state.set({ appended: appended.slice(0, -1), token: -1 }), "remove-last") : null,
      appended.length > 1 ? button(`remove all ${appended.length}`, () => state.set({ appended: [], token: -1 }), "remove-all") : null,
      this.isSeq2Seq && model.generates ? button(appended.length ? "regenerate target" : "generate target", () => this.generate(), "generate-target") : null,
      model.has_mask_token ? button(isMasked ? "unmask this token" : "mask this token", () => state.set({ masked: isMasked ? masked.filter((one) => one !== at) : [...masked, at].sort((a, b) => a - b) }), "mask") : null,
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
