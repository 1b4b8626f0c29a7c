// The page: the model's name, the prompt and its tokens, the selection, and the panes of the open view.

import { askForKey } from "glasshouse/access.js";
import {
  request,
  abortOthers,
  isSaved,
  canSelect,
  Superseded,
  ApiError,
  KeyError,
  NotSaved,
  savedFragment,
} from "glasshouse/api.js";
import { CheckpointPicker } from "glasshouse/checkpoint_picker.js";
import { turnTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { Glossary } from "glasshouse/glossary.js";
import { keyHelp, pressed } from "glasshouse/keyboard.js";
import { isLive } from "glasshouse/live_model.js";
import { served } from "glasshouse/manifest.js";
import { count, plural } from "glasshouse/number.js";
import { captionBy } from "glasshouse/picture.js";
import { Prompt } from "glasshouse/prompt.js";
import { Routing } from "glasshouse/routing.js";
import { State } from "glasshouse/state.js";
import { ViewContext } from "glasshouse/view_context.js";
import { live } from "glasshouse/saved_page.js";
import { saveDialog } from "glasshouse/saving.js";
import { cut, stepper } from "glasshouse/widgets.js";

const LATER = 1000; // milliseconds before the views that are not open are prefetched
const PROMPT_KEYS = new Set(["text", "target", "appended", "masked"]); // state keys that change the tokens
const PATIENCE = 250; // milliseconds before the progress bar shows
const LONGEST = 160; // letters of the text in the caption of a picture
/** What the figures of a view depend on; those of others on all of it. @type {Record<string, string[]>} */
const READS = {
  tokens: ["pass", "position"],
  residual: ["pass", "position"],
  interventions: ["pass", "position"],
  run: [],
};

export class Page {
  constructor() {
    this.state = new State(location.hash || savedFragment, savedFragment);
    this.routing = new Routing(this);
    /** @type {Tokens} */
    this.tokens = { text: [], source: [], target: [] };
    /** @type {Pane[]} */
    this.panes = [];
    /** @type {Changed} */
    this.due = new Set(); // state keys that changed and are not drawn yet
    this.busy = 0; // tasks that the page waits for
    this.reading = 0; // requests for tokens, to discard late responses
    /** @type {PageState | null} */
    this.shown = null; // the state that was drawn last
    this.refusal = ""; // why the page went back to it
    // These are there once the server has described the model.
    this.model = /** @type {Model} */ ({});
    this.prompt = /** @type {Prompt} */ ({});
    this.checkpointPicker = /** @type {CheckpointPicker} */ ({});
    this.steppers = /** @type {Record<"token" | "layer" | "head", Stepper>} */ ({});
    // The rest is not the model's.
    this.saving = saveDialog(this);
    this.save = h("button", { type: "button", class: "tool", on: { click: () => this.saving.showModal() } }, "Save");
    this.name = h("h1", {}, "Glasshouse");
    this.facts = h("p", { class: "facts quiet" });
    this.status = h("p", { class: "status", role: "status", "aria-live": "polite" });
    this.waiting = h("div", { class: "waiting", role: "progressbar", "aria-label": "computing" });
    this.title = h("div", { class: "title" }, this.name, this.facts);
    this.front = h("div", { class: "front" });
    this.selection = h("div", { class: "selection", role: "group", "aria-label": "selection" });
    this.main = h("main", { id: "main", tabindex: "-1" });
    this.keys = keyHelp();
    this.glossary = new Glossary();
  }

  async open() {
    this.build();
    this.wait(1);
    try {
      const { routing } = this;
      routing.load(routing.view).catch(() => {}); // in parallel with the request; errors are reported when it is drawn
      this.model = await request("model");
      this.furnish();
      await this.begin();
      setTimeout(() => routing.prefetch(), LATER);
    } catch (error) {
      if (error instanceof KeyError) askForKey(this);
      else this.say(error.message, true);
    } finally {
      this.wait(-1);
    }
  }

  async begin() {
    const { model, state } = this;
    state.follow((changed) => this.changed(changed));
    if (served && state.values.answer && !state.values.appended.length)
      await this.routing.openAnswer(state.values.answer);
    const { text: given, appended, layer, head, key } = state.values;
    const isExample = !given && !appended.length && model.example;
    const isSelected = layer || head || key;
    const selection = isExample && !isSelected ? await request("opening_selection") : {};
    state.begin({ ...(isExample ? { text: model.example } : {}), ...selection });
    await this.changed(new Set(["text", "view", "checkpoint"]), true);
    const { target, appended: chosen } = state.values;
    if (model.kind === "seq2seq" && model.generates && !target && !chosen.length && !isSaved)
      await this.prompt.generate();
  }

  /** Put the page together, as far as no model is needed. */
  build() {
    /** @type {(text: string, label: string, click: () => void) => HTMLElement} */
    const tool = (text, label, click) =>
      h("button", { type: "button", class: "tool", on: { click }, "aria-label": label }, text);
    const icon = document.head.querySelector("link[rel=icon]")?.getAttribute("href");
    put(
      /** @type {HTMLElement} */ (document.getElementById("page")),
      h(
        "header",
        { class: "top" },
        h("img", { src: icon, alt: "", width: 28, height: 28 }),
        this.title,
        isSaved || isLive || served ? null : this.save,
        tool("◐", "light or dark theme", turnTheme),
        tool("A–Z", "A–Z: glossary", () => this.glossary.open().catch((error) => this.say(error.message, true))),
        tool("?", "keyboard shortcuts", () => this.keys.showModal()),
      ),
      this.waiting,
      this.front,
      h("nav", { class: "where" }, this.routing.tabs, this.selection),
      this.status,
      this.main,
      this.keys,
      this.saving,
      this.glossary.node,
    );
    addEventListener("keydown", (event) => pressed(this, event));
    captionBy((reads) => this.caption(reads ?? READS[this.routing.view.name]));
  }

  /** Show what depends on the model. */
  furnish() {
    const { model } = this;
    document.title = `${model.name} · Glasshouse`;
    put(this.name, model.name);
    this.name.title = model.name;
    const kind = { decoder: "decoder", encoder: "encoder", seq2seq: "encoder-decoder" }[model.kind];
    const layers =
      model.kind === "seq2seq"
        ? `${model.n_encoder_layers} + ${model.n_layers} layers`
        : plural(model.n_layers, "layer");
    const shared = model.n_kv_heads === model.n_heads ? "" : ` (${model.n_kv_heads} key-value)`;
    put(
      this.facts,
      [
        kind,
        layers,
        `${plural(model.n_heads, "head")}${shared}`,
        `d_model ${model.d_model}`,
        `${count(model.parameters)} parameters`,
        `${model.position} positions`,
        ...(isLive ? ["runs in this page, weights in float16"] : []),
      ].join(" · "),
    );
    this.prompt = new Prompt(this);
    this.checkpointPicker = new CheckpointPicker(this);
    put(this.front, this.prompt.node);
    this.title.after(this.checkpointPicker.node);
    if (served) this.routing.offerModels();
    this.routing.furnish();
    this.steppers = {
      token: stepper("token", (token) => this.state.set({ token })),
      layer: stepper("layer", (layer) => this.state.set({ layer })),
      head: stepper("head", (head) => this.state.set({ head })),
    };
    put(this.selection, Object.values(this.steppers));
  }

  /** The number of layers of the selected attention: an encoder-decoder has two stacks. */
  get layers() {
    const { attentions } = this.model;
    return (attentions.find((one) => one.site === this.state.values.attention) ?? attentions[0]).layers;
  }

  /** Whether something could not be fetched or drawn. */
  get hasFailed() {
    return this.due.size > 0 || this.panes.some((pane) => !pane.trouble.hidden);
  }

  // State changes

  /**
   * @param {Changed} now
   * @param {boolean} [first]
   * @returns {Promise<void>}
   */
  async changed(now, first = false) {
    for (const name of now) this.due.add(name); // includes changes that were superseded before they were drawn
    this.wait(1);
    try {
      // Also retries a failed attempt.
      if (first || [...this.due].some((name) => PROMPT_KEYS.has(name))) {
        await this.read();
        this.due.add("tokens");
      }
      if (!this.routing.view.mount) await this.routing.load(this.routing.view);
    } catch (error) {
      if (error instanceof Superseded || this.goBack(error)) return;
      this.say(error.message, true);
      return;
    } finally {
      this.wait(-1);
    }
    if (!this.routing.view.mount) return; // another view was selected meanwhile; it draws itself once loaded
    const changed = this.due;
    this.due = new Set();
    this.say(this.refusal, Boolean(this.refusal));
    this.refusal = "";
    this.prompt.draw(changed);
    this.checkpointPicker.draw();
    this.drawSelection();
    if (first || changed.has("view") || changed.has("compare_with") || changed.has("checkpoint")) this.mount();
    else for (const pane of this.panes) this.draw(pane, changed);
    abortOthers(this.forwardPasses());
  }

  /**
   * The forward passes that are shown: of all panes, with and without edits, and of the patch source.
   * @returns {Set<string>}
   */
  forwardPasses() {
    const passes = this.panes.flatMap(({ context }) => [
      context.forwardPass(),
      context.forwardPass({ unedited: true }),
      ...(context.state.patch_from ? [context.patchPass] : []),
    ]);
    return new Set(passes.map((one) => JSON.stringify(one)));
  }

  async read() {
    this.reading += 1;
    const turn = this.reading;
    const context = new ViewContext(this, this.checkpoints()[0]);
    const tokens = await request("tokenize", { forward_pass: context.forwardPass({ unedited: true }) });
    if (turn !== this.reading) throw new Superseded();
    this.tokens = tokens;
  }

  /** @returns {string[]} */
  checkpoints() {
    const { checkpoint, compare_with: compareWith } = this.state.values;
    const first = checkpoint || this.model.checkpoints.at(-1) || "";
    return compareWith ? [first, compareWith] : [first];
  }

  drawSelection() {
    const { layer, head } = this.state.values;
    const context = new ViewContext(this, "");
    this.steppers.token.show(context.token, context.row.length - 1);
    this.steppers.layer.show(Math.min(layer, this.layers - 1), this.layers - 1);
    this.steppers.head.show(Math.min(head, this.model.n_heads - 1), this.model.n_heads - 1);
    if (!canSelect("token")) live(this.steppers.token);
    if (!canSelect("head")) for (const one of [this.steppers.layer, this.steppers.head]) live(one);
    this.routing.draw();
  }

  /** Open the view anew, at each checkpoint that is shown. */
  mount() {
    const { mount } = this.routing.view;
    if (!mount) return;
    for (const pane of this.panes) pane.mounted.close?.();
    const checkpoints = this.checkpoints();
    this.panes = checkpoints.map((checkpoint) => {
      const context = new ViewContext(this, checkpoint);
      const root = h("div", { class: "view" });
      const trouble = h("p", { class: "trouble", role: "alert", hidden: true });
      const title = checkpoints.length > 1 ? h("h2", { class: "checkpoint" }, checkpoint) : null;
      const node = h("div", { class: "pane", data: { checkpoint } }, title, trouble, root);
      return { context, node, trouble, mounted: mount(context, root) };
    });
    put(
      this.main,
      this.panes.map((pane) => pane.node),
    );
    this.main.classList.toggle("comparing", this.panes.length > 1);
    for (const pane of this.panes) this.draw(pane, new Set([...Object.keys(this.state.values), "tokens"]));
  }

  /**
   * @param {Pane} pane
   * @param {Changed} changed
   * @returns {Promise<void>}
   */
  async draw(pane, changed) {
    pane.context.turn += 1;
    const { turn } = pane.context;
    const patience = setTimeout(() => pane.node.setAttribute("aria-busy", "true"), PATIENCE);
    this.wait(1);
    try {
      await pane.mounted.draw(changed);
      if (turn === pane.context.turn) {
        pane.trouble.hidden = true;
        this.shown = this.state.values;
      }
    } catch (error) {
      if (error instanceof Superseded || this.goBack(error)) return;
      put(pane.trouble, error.message);
      pane.trouble.hidden = false;
      if (!(error instanceof ApiError)) console.error(error); // a bug in the page
    } finally {
      clearTimeout(patience);
      this.wait(-1);
      if (turn === pane.context.turn) pane.node.setAttribute("aria-busy", "false");
    }
  }

  /**
   * Return to the state that was drawn last where a saved page does not have the one that was asked for: half of it
   * would be old and half new.
   * @param {Error} error
   * @returns {boolean}
   */
  goBack(error) {
    const { shown, state } = this;
    if (!(error instanceof NotSaved) || !shown) return false;
    const added = Object.fromEntries(Object.keys(state.values).map((name) => [name, undefined]));
    const before = { ...added, ...shown };
    if (state.fragmentOf(before) === state.fragmentOf({})) return false; // what was opened is not there either
    this.refusal = error.message;
    state.set(before);
    return true;
  }

  /** @param {number} by */
  wait(by) {
    this.busy += by;
    clearTimeout(this.patience);
    if (this.busy > 0) this.patience = setTimeout(() => this.waiting.classList.add("on"), PATIENCE);
    else this.waiting.classList.remove("on");
    document.body.dataset.busy = String(this.busy > 0);
  }

  /**
   * @param {string} sentence
   * @param {boolean} [isTrouble]
   */
  say(sentence, isTrouble = false) {
    put(this.status, sentence);
    this.status.classList.toggle("trouble", isTrouble);
  }

  // Tools

  /**
   * What a figure is of, in words, for its picture.
   * @param {string[]} [reads]
   * @returns {string[]}
   */
  caption(reads = ["pass", "layer", "head", "position"]) {
    const { layer, head, text, edits } = this.state.values;
    const context = new ViewContext(this, "");
    /** @type {(name: string, said: string) => string[]} */
    const where = (name, said) => (reads.includes(name) ? [said] : []);
    const { tokens } = this;
    const words = (tokens.source?.length ? tokens.source : context.row).map((one) => one.text).join("");
    const shown = cut((text || words).replace(/\n/g, "⏎"), LONGEST);
    return [
      [
        [this.model.name, this.checkpoints()[0]].filter(Boolean).join(", "),
        ...where("layer", `layer ${layer}`),
        ...where("head", `head ${head}`),
        ...where("position", `token ${context.token} “${context.row[context.token]?.text ?? ""}”`),
        ...(edits.length && reads.includes("pass") ? [plural(edits.length, "edit")] : []),
      ].join(" · "),
      ...where("pass", `text: ${shown}`),
    ];
  }
}

new Page().open();
