// What a view gets: the model, the state, the tokens, and a way to ask.

import { request, Superseded } from "glasshouse/api.js";
import { quoted } from "glasshouse/widgets.js";

/** One pane of the page: a view on the model at one checkpoint. */
export class ViewContext {
  constructor(page, checkpoint) {
    this.page = page;
    this.checkpoint = checkpoint;
    this.turn = 0; // counts what is drawn, so that answers that come late are known
  }

  get model() {
    return this.page.model;
  }

  get state() {
    return this.page.state.values;
  }

  /** The tokens of what is prompt about: {text}, or {source, target}. */
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
  get hasProbabilities() {
    return this.model.predicts_tokens || this.model.head.endsWith("label");
  }

  /** How Python gets the model that is shown. */
  get loading() {
    if (this.model.in_memory) return "# model and tok are those that were given to gh.look";
    return `model, tok = gh.load(${quoted(this.model.folders[this.checkpoint] ?? this.model.name)})`;
  }

  set(changes) {
    this.page.state.set(changes);
  }

  /** The forwardPass as it stands: text, checkpoint and changes; `plain` leaves the changes out. */
  forwardPass({ unedited = false } = {}) {
    const { text, target, appended, masked, edits, patch_from: patchFrom } = this.state;
    const prompt = { text };
    if (target) prompt.target = target;
    if (appended.length) prompt.appended = appended;
    if (masked.length) prompt.masked = masked;
    const forwardPass = { prompt };
    if (this.checkpoint) forwardPass.checkpoint = this.checkpoint;
    if (!unedited && edits.length) {
      forwardPass.edits = edits;
      if (patchFrom && edits.some((one) => one.kind === "patch")) forwardPass.patch_from = this.patchPrompt;
    }
    return forwardPass;
  }

  /** The text that patches come from; in an encoder-decoder it is another source, and the target is the same. */
  get patchPrompt() {
    const { prompt } = this.forwardPass({ unedited: true });
    const text = this.state.patch_from;
    return this.tokens.target ? { ...prompt, text } : { text };
  }

  /** The forwardPass about that text alone. */
  get patchPass() {
    return { ...this.forwardPass({ unedited: true }), prompt: this.patchPrompt };
  }

  /** Ask the server; throws Superseded if the view was drawn anew meanwhile. */
  async request(name, body = {}, options = {}) {
    const { turn } = this;
    const topic = body.forward_pass ? JSON.stringify(body.forward_pass) : "";
    const answer = await request(name, body, { topic, ...options });
    if (turn !== this.turn) throw new Superseded();
    return answer;
  }
}
