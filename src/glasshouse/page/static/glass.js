// What a view gets: the model, the state, the tokens, and a way to ask.

import { ask, Outdated } from "glasshouse/asking.js";
import { quoted } from "glasshouse/parts.js";

/** One pane of the page: a view on the model at one moment. */
export class Glass {
  constructor(page, moment) {
    this.page = page;
    this.moment = moment;
    this.turn = 0; // counts what is drawn, so that answers that come late are known
  }

  get model() {
    return this.page.model;
  }

  get state() {
    return this.page.state.values;
  }

  /** The tokens of what is asked about: {text}, or {source, target}. */
  get tokens() {
    return this.page.tokens;
  }

  /** The row of tokens that the selection walks along: the text, or the target. */
  get row() {
    return this.tokens.text ?? this.tokens.target;
  }

  /** The place of the selected token. */
  get token() {
    const length = this.row.length;
    const { token } = this.state;
    return token < 0 || token >= length ? length - 1 : token;
  }

  /** Whether the model says anything that has a probability: a token or a label. */
  get says() {
    return this.model.speaks || this.model.head.endsWith("label");
  }

  /** How Python gets the model that is shown. */
  get loading() {
    if (this.model.given) return "# model and tok are those that were given to gh.look";
    return `model, tok = gh.load(${quoted(this.model.places[this.moment] ?? this.model.name)})`;
  }

  set(changes) {
    this.page.state.set(changes);
  }

  /** The question as it stands: text, moment and changes; `plain` leaves the changes out. */
  question({ plain = false } = {}) {
    const { text, target, added, hidden, edits, other } = this.state;
    const asked = { text };
    if (target) asked.target = target;
    if (added.length) asked.added = added;
    if (hidden.length) asked.hidden = hidden;
    const question = { asked };
    if (this.moment) question.moment = this.moment;
    if (!plain && edits.length) {
      question.edits = edits;
      if (other && edits.some((one) => one.kind === "patch")) question.other = this.other;
    }
    return question;
  }

  /** The text that patches come from; in an encoder-decoder it is another source, and the target is the same. */
  get other() {
    const { asked } = this.question({ plain: true });
    const text = this.state.other;
    return this.tokens.target ? { ...asked, text } : { text };
  }

  /** The question about that text alone. */
  get otherQuestion() {
    return { ...this.question({ plain: true }), asked: this.other };
  }

  /** Ask the server; throws Outdated if the view was drawn anew meanwhile. */
  async ask(name, body = {}, options = {}) {
    const { turn } = this;
    const topic = body.question ? JSON.stringify(body.question) : "";
    const answer = await ask(name, body, { topic, ...options });
    if (turn !== this.turn) throw new Outdated();
    return answer;
  }
}
