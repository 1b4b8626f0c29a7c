// What each view gets: the model, the state, the tokens, and requests to the server.

import { request, Superseded } from "glasshouse/api.js";
import { quoted } from "glasshouse/widgets.js";

/** Context of one pane: a view of the model at one checkpoint. */
export class ViewContext {
  /**
   * @param {Page} page
   * @param {string} checkpoint
   */
  constructor(page, checkpoint) {
    this.page = page;
    this.checkpoint = checkpoint;
    this.turn = 0; // draw counter, to discard late responses
  }

  /** @returns {Model} */
  get model() {
    return this.page.model;
  }

  /** @returns {PageState} */
  get state() {
    return this.page.state.values;
  }

  /**
   * The tokens of the prompt: {text}, or {source, target}.
   * @returns {Tokens}
   */
  get tokens() {
    return this.page.tokens;
  }

  /**
   * The tokens that are selected from: the text, or the target.
   * @returns {Token[]}
   */
  get row() {
    return this.tokens.text ?? this.tokens.target;
  }

  /**
   * The position of the selected token.
   * @returns {number}
   */
  get token() {
    const length = this.row.length;
    const { token } = this.state;
    return token < 0 || token >= length ? length - 1 : token;
  }

  /**
   * Whether the model predicts tokens or labels.
   * @returns {boolean}
   */
  get hasProbabilities() {
    return this.hasPositionLogits || this.model.head === "sequence_classification";
  }

  /**
   * Whether the model predicts something at each position.
   * @returns {boolean}
   */
  get hasPositionLogits() {
    return this.model.predicts_tokens || this.model.head === "token_classification";
  }

  /**
   * What the model predicts, as a title.
   * @returns {string}
   */
  get predictionsTitle() {
    const { head } = this.model;
    if (head === "next_token") return "Next-token probabilities";
    return head === "masked_token" ? "Masked-token predictions" : "Label probabilities";
  }

  /**
   * The beginning of a sentence about a model without such predictions.
   * @returns {string}
   */
  get headSentence() {
    const { head } = this.model;
    return head === "none" ? "This model has no head" : `The head of this model is ${head}`;
  }

  /**
   * Python code that loads the model.
   * @returns {string}
   */
  get loading() {
    if (this.model.in_memory) return "# model and tok as passed to gh.look";
    return `model, tok = gh.load(${quoted(this.model.folders[this.checkpoint] ?? this.model.name)})`;
  }

  /** @param {Partial<PageState>} changes */
  set(changes) {
    this.page.state.set(changes);
  }

  /**
   * The current forward pass: prompt, checkpoint and edits; with `unedited`, without edits.
   * @param {{ unedited?: boolean }} [options]
   * @returns {ForwardPass}
   */
  forwardPass({ unedited = false } = {}) {
    const { text, target, appended, masked, edits, patch_from: patchFrom } = this.state;
    /** @type {PagePrompt} */
    const prompt = { text };
    if (target) prompt.target = target;
    if (appended.length) prompt.appended = appended;
    if (masked.length) prompt.masked = masked;
    /** @type {ForwardPass} */
    const forwardPass = { prompt };
    if (this.checkpoint) forwardPass.checkpoint = this.checkpoint;
    if (!unedited && edits.length) {
      forwardPass.edits = edits;
      if (patchFrom && edits.some((one) => one.kind === "patch")) forwardPass.patch_from = this.patchPrompt;
    }
    return forwardPass;
  }

  /**
   * The prompt that patches come from; in an encoder-decoder, another source with the same target.
   * @returns {PagePrompt}
   */
  get patchPrompt() {
    const { prompt } = this.forwardPass({ unedited: true });
    const text = this.state.patch_from;
    return this.tokens.target ? { ...prompt, text } : { text };
  }

  /**
   * The forward pass of that prompt.
   * @returns {ForwardPass}
   */
  get patchPass() {
    return { ...this.forwardPass({ unedited: true }), prompt: this.patchPrompt };
  }

  /**
   * Send a request; throws Superseded if the view was redrawn meanwhile.
   * @template {Endpoint} K
   * @param {K} name
   * @param {RequestBody} [body]
   * @param {RequestOptions} [options]
   * @returns {Promise<Responses[K]>}
   */
  async request(name, body = {}, options = {}) {
    const { turn } = this;
    const topic = body.forward_pass ? JSON.stringify(body.forward_pass) : "";
    const answer = await request(name, body, { topic, ...options });
    if (turn !== this.turn) throw new Superseded();
    return answer;
  }
}
