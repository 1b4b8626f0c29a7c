// One card: why it matters, the statement, its live figure with a slider, the line of code, and, folded, how we know.

import { isSaved } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { isLive } from "glasshouse/live_model.js";
import { pictureButton } from "glasshouse/picture.js";
import { slider } from "glasshouse/widgets.js";
import { draw, inline } from "glasshouse/views/notes/pieces.js";

const PAUSE = 60; // milliseconds that a slider rests before its figure is drawn

export class Card {
  /**
   * @param {Statement} given
   * @param {NotesPart} part
   * @param {{ open: (number: string) => void, play: (number: string, value: number) => void, explain: (text: string) => Child }} acts
   */
  constructor(given, part, { open, play, explain }) {
    this.explain = explain;
    this.given = given;
    this.part = part;
    this.play = play;
    /** @type {Responses["note_figure"] | null} */
    this.drawn = null; // the answer on the screen
    /** @type {DrawnPiece[]} */
    this.pieces = [];
    this.number = given.number;
    /** @type {Slider | null} */
    this.slider = null;
    /** @type {number | undefined} */
    this.value = undefined; // of the slider, where it was moved
    this.head = h(
      "button",
      {
        type: "button",
        class: "head",
        "aria-expanded": "false",
        data: { card: given.number },
        on: { click: () => open(given.number) },
      },
      h("span", { class: "label" }, given.number),
      h(
        "span",
        { class: "titles" },
        h("span", { class: "cardname" }, given.title),
        h("span", { class: "quiet why" }, given.why),
      ),
    );
    this.figure = h("div", {
      class: "figure-box",
      role: "group",
      "aria-label": `figure of ${given.number}`,
      data: { testid: `figure-${given.number}` },
    });
    this.worked = h("div", {
      class: "figure-box worked",
      role: "group",
      "aria-label": `worked example of ${given.number}`,
      data: { testid: `worked-${given.number}` },
    });
    this.inside = h("div", { class: "inside", hidden: true });
    this.node = h("li", { class: "card", id: `card-${given.number}` }, h("h3", {}, this.head), this.inside);
  }

  /**
   * Unfold the card, or fold it.
   * @param {boolean} isOpen
   */
  show(isOpen) {
    this.node.classList.toggle("open", isOpen);
    this.head.setAttribute("aria-expanded", String(isOpen));
    this.inside.hidden = !isOpen;
    if (isOpen && !this.inside.hasChildNodes()) this.build();
    if (!isOpen) this.clear();
  }

  /** Whether there is something to do: a saved page has sliders and curves, but no other text, layer or head. */
  get canTry() {
    const { figure } = this.given;
    return !figure || (!isLive && (!isSaved || figure.control !== null));
  }

  build() {
    const { given } = this;
    const control = given.figure?.control;
    this.slider = control
      ? slider(control.label, {
          min: control.low,
          max: control.high,
          step: control.step,
          shown: (value) => control.labels[Math.round((value - control.low) / control.step)] ?? String(value),
          oninput: (value) => this.moved(value),
        })
      : null;
    this.showValue();
    put(
      this.inside,
      h("p", { class: "says" }, inline(`${given.says}.`, this.explain)),
      given.try_it && this.canTry ? h("p", { class: "try" }, h("strong", {}, "Try: "), given.try_it) : null,
      this.slider ? h("div", { class: "controls" }, this.slider) : null,
      this.figure,
      this.worked,
      given.slip ? h("p", { class: "slip" }, h("strong", {}, "A common slip: "), inline(given.slip)) : null,
      h(
        "dl",
        { class: "sources" },
        h("dt", {}, "Code"),
        h(
          "dd",
          {},
          h("code", {}, `${given.code.path}:${given.code.line}`),
          ` ${given.code.name}`,
          given.code.text ? h("pre", { tabindex: "0" }, h("code", {}, given.code.text)) : null,
        ),
        h("dt", { class: "link-to" }, "Link"),
        h("dd", { class: "link-to" }, h("a", { href: `#notes/${given.number}` }, `#notes/${given.number}`)),
      ),
      h("details", { class: "known", data: { testid: "known" } }, h("summary", {}, "How we know"), this.evidence()),
    );
    if (!given.figure) this.fill(given.measured_pieces);
  }

  /**
   * What shows the statement true: tests by name, what was measured, and the thresholds that it had to reach.
   * @returns {HTMLElement}
   */
  evidence() {
    const { given } = this;
    const pieces = given.figure ? given.measured_pieces : []; // without a live figure they are the figure
    return h(
      "dl",
      { class: "sources" },
      h("dt", {}, "Check"),
      h("dd", {}, inline(given.shown_by)),
      given.measured
        ? [
            h("dt", {}, `Measured, ${this.part.measured_on}`),
            h("dd", { data: { testid: "measured" } }, inline(given.measured), pieces.map(draw)),
          ]
        : null,
      given.verdicts
        ? [
            h("dt", {}, `make claims, ${given.verdicts.on}`),
            h(
              "dd",
              { data: { testid: "verdicts" } },
              h(
                "ul",
                {},
                given.verdicts.figures.map((one) => h("li", {}, one)),
              ),
            ),
          ]
        : null,
      given.read.length > 0
        ? [h("dt", {}, "Read"), h("dd", { data: { testid: "read" } }, given.read.join("; "))]
        : null,
    );
  }

  /** Move the slider to where the figure is drawn. */
  showValue() {
    this.slider?.show(this.value ?? this.given.figure?.control?.start ?? 0);
  }

  /** @param {number} value */
  moved(value) {
    clearTimeout(this.pause);
    this.pause = setTimeout(() => this.play(this.number, value), PAUSE);
  }

  /**
   * Draw the pieces of an answer.
   * @param {Piece[]} pieces
   * @param {Piece[]} [worked]
   */
  fill(pieces, worked = []) {
    this.clear();
    const [drawn, example] = [pieces.map(draw), worked.map(draw)];
    this.pieces = [...drawn, ...example];
    [...pieces, ...worked].forEach((one, i) => {
      this.offerPicture(this.pieces[i], "title" in one ? one.title : this.given.title);
    });
    put(this.figure, drawn);
    put(this.worked, example.length ? [h("h4", {}, "Worked example"), ...example] : []);
  }

  /**
   * Offer a picture of a piece, unless it is a sentence or named numbers.
   * @param {DrawnPiece} piece
   * @param {string} title
   */
  offerPicture(piece, title) {
    if (piece.matches(".said, .named")) return;
    const { given } = this;
    const told = () => {
      const control = given.figure?.control;
      const moved = control ? [`${control.label}: ${this.value ?? control.start}`] : [];
      return { about: [`${given.number}: ${given.title}`, ...moved], reads: given.figure?.reads ?? [] };
    };
    piece.append(pictureButton(title, () => piece, told));
  }

  /**
   * @param {(given: Statement) => Promise<Responses["note_figure"]>} ask
   * @returns {Promise<void>}
   */
  async draw(ask) {
    if (!this.given.figure) return;
    const answer = await ask(this.given);
    if (answer === this.drawn && this.pieces.length) return;
    this.drawn = answer;
    if (answer.limit !== null) this.slider?.limit(answer.limit);
    this.fill(answer.pieces, answer.worked);
  }

  clear() {
    for (const piece of this.pieces) piece.close?.();
    this.pieces = [];
    this.drawn = null;
    if (this.given.figure) for (const box of [this.figure, this.worked]) put(box);
  }
}
