// The page: the model's name, the prompt and its tokens, the selection, and the views.

import {
  request,
  requestsFor,
  abortOthers,
  isSaved,
  Superseded,
  ApiError,
  KeyError,
  headers,
  rememberKey,
  savedFragment,
  servedModel,
  SILENT,
} from "glasshouse/api.js";
import { turnTheme } from "glasshouse/colour.js";
import { h, put, reveal } from "glasshouse/dom.js";
import { ViewContext } from "glasshouse/view_context.js";
import { count, plural } from "glasshouse/number.js";
import { stepper } from "glasshouse/widgets.js";
import { Prompt } from "glasshouse/prompt.js";
import { State } from "glasshouse/state.js";
import { CheckpointPicker } from "glasshouse/checkpoint_picker.js";
import { served, views as VIEWS } from "glasshouse/manifest.js";
import { openAnswer, props } from "glasshouse/server.js";

const LATER = 1000; // milliseconds before the views that are not open are prefetched
const PROMPT_KEYS = new Set(["text", "target", "appended", "masked"]); // state keys that change the tokens
const PATIENCE = 250; // milliseconds before the progress bar shows

const KEYS = [
  ["← →", "next token, cell or map position"],
  ["[ and ]", "previous, next layer"],
  [", and .", "previous, next head"],
  ["1, 2, …", "open a view"],
  ["?", "show keyboard shortcuts"],
];

class Page {
  constructor(root) {
    this.state = new State(isSaved && !location.hash ? savedFragment : location.hash, savedFragment);
    this.root = root;
    this.model = null;
    this.tokens = { text: [] };
    this.panes = [];
    this.due = new Set(); // state keys that changed and are not drawn yet
    this.busy = 0;
  }

  async open() {
    this.build();
    this.wait(1);
    try {
      const view = VIEWS.find((one) => one.name === this.state.values.view) ?? VIEWS[0];
      this.load(view).catch(() => {}); // loads in parallel with the request; errors are reported when it is drawn
      this.model = await request("model");
      this.furnish();
      await this.begin();
      setTimeout(() => this.views.forEach((view) => this.load(view).catch(() => {})), LATER);
    } catch (error) {
      if (error instanceof KeyError) this.askForKey();
      else this.say(error.message, true);
    } finally {
      this.wait(-1);
    }
  }

  async begin() {
    this.state.follow((changed) => this.changed(changed));
    if (served && this.state.values.answer && !this.state.values.appended.length)
      await this.openAnswer(this.state.values.answer);
    const { text: given, appended } = this.state.values;
    if (!given && !appended.length && this.model.example) this.state.begin({ text: this.model.example });
    else this.state.begin({});
    await this.changed(new Set(["text", "view", "checkpoint"]), true);
    const { target, appended: chosen } = this.state.values;
    if (this.model.kind === "seq2seq" && this.model.generates && !target && !chosen.length && !isSaved)
      await this.prompt.generate();
  }

  /** Show the tokens of an answer, on the page of the model that gave it. */
  async openAnswer(id) {
    const answer = await openAnswer(id).catch(() => null);
    if (!answer)
      this.state.begin({ view: "chat" }); // which says what is wrong
    else if (answer.model !== this.model.name)
      location.replace(`/?model=${encodeURIComponent(answer.model)}${location.hash}`);
    else if (answer.state) this.state.begin(answer.state);
  }

  // Independent of the model

  build() {
    const theme = h(
      "button",
      { type: "button", class: "tool", on: { click: turnTheme }, "aria-label": "light or dark theme" },
      "◐",
    );
    const keys = h(
      "button",
      { type: "button", class: "tool", on: { click: () => this.showKeys() }, "aria-label": "keyboard shortcuts" },
      "?",
    );
    this.save = h("button", { type: "button", class: "tool", on: { click: () => this.saveFile() } }, "Save");
    this.name = h("h1", {}, "Glasshouse");
    this.facts = h("p", { class: "facts quiet" });
    this.status = h("p", { class: "status", role: "status", "aria-live": "polite" });
    this.waiting = h("div", { class: "waiting", role: "progressbar", "aria-label": "computing" });
    this.title = h("div", { class: "title" }, this.name, this.facts);
    this.front = h("div", { class: "front" });
    this.tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "views" });
    new ResizeObserver(() => this.showTab()).observe(this.tabs);
    this.selection = h("div", { class: "selection", role: "group", "aria-label": "selection" });
    this.main = h("main", { id: "main", tabindex: "-1" });
    put(
      this.root,
      h(
        "header",
        { class: "top" },
        h("img", { src: ICON, alt: "", width: 28, height: 28 }),
        this.title,
        isSaved || served ? null : this.save,
        theme,
        keys,
      ),
      this.waiting,
      this.front,
      h("nav", { class: "where" }, this.tabs, this.selection),
      this.status,
      this.main,
    );
    this.keys = this.keyHelp();
    this.root.append(this.keys);
    addEventListener("keydown", (event) => this.key(event));
  }

  // Depends on the model

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
      ].join(" · "),
    );
    this.prompt = new Prompt(this);
    this.checkpointPicker = new CheckpointPicker(this);
    put(this.front, this.prompt.node);
    this.title.after(this.checkpointPicker.node);
    if (served) this.offerModels();
    this.views = VIEWS.filter((view) => model.views.includes(view.name));
    put(
      this.tabs,
      this.views.map((view, number) =>
        h(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${view.name}`,
            "aria-controls": "main",
            data: { view: view.name },
            title: `key ${number + 1}`,
            on: { click: () => this.choose(view.name) },
          },
          view.title,
        ),
      ),
    );
    this.steppers = {
      token: stepper("token", (token) => this.state.set({ token })),
      layer: stepper("layer", (layer) => this.state.set({ layer })),
      head: stepper("head", (head) => this.state.set({ head })),
    };
    put(this.selection, Object.values(this.steppers));
  }

  /** A choice between the models of the server, each of which has a page. */
  async offerModels() {
    const { models } = await props();
    if (models.length < 2) return;
    const chosen = h(
      "select",
      {
        "aria-label": "model",
        data: { testid: "model" },
        on: { change: () => location.assign(`/?model=${encodeURIComponent(chosen.value)}#view=${this.view.name}`) },
      },
      models.map(({ id }) => h("option", { value: id }, id)),
    );
    chosen.value = servedModel || models[0].id;
    this.title.after(chosen);
  }

  /** Ask for the key that the server wants. */
  askForKey() {
    const key = h("input", {
      type: "password",
      id: "key",
      autocomplete: "off",
      "aria-label": "key",
      data: { testid: "key" },
    });
    const enter = (event) => {
      event.preventDefault();
      rememberKey(key.value.trim());
      location.reload();
    };
    put(
      this.main,
      h(
        "form",
        { class: "panel", on: { submit: enter } },
        h("h2", {}, "This server wants a key"),
        h("p", { class: "about" }, "One of those it was started with. It is kept for this tab alone."),
        h("div", { class: "controls" }, key, h("button", { class: "act first" }, "Open")),
      ),
    );
    key.focus();
    if (headers().Authorization) this.say("The server did not accept that key.", true);
  }

  /** Import a view's module when it is first opened. */
  async load(view) {
    try {
      view.mount ??= (await import(`glasshouse/views/${view.name}/view.js`)).mount;
    } catch (error) {
      throw error instanceof TypeError ? new ApiError(SILENT) : error; // a module that cannot be fetched is a TypeError
    }
  }

  get view() {
    return this.views.find((one) => one.name === this.state.values.view) ?? this.views[0];
  }

  /** Open a view; retry the current one if it could not be fetched or drawn. */
  choose(name) {
    const failed = this.due.size > 0 || this.panes.some((pane) => !pane.trouble.hidden);
    if (name === this.state.values.view && failed) this.changed(new Set(["view"]));
    else this.state.set({ view: name });
  }

  /** The number of layers of the selected attention: an encoder-decoder has two stacks. */
  get layers() {
    const { attentions } = this.model;
    return (attentions.find((one) => one.site === this.state.values.attention) ?? attentions[0]).layers;
  }

  // State changes

  async changed(now, first = false) {
    for (const name of now) this.due.add(name); // includes changes that were superseded before they were drawn
    this.wait(1);
    try {
      if (first || [...this.due].some((name) => PROMPT_KEYS.has(name))) {
        // also retries a failed attempt
        await this.read();
        this.due.add("tokens");
      }
      if (!this.view.mount) await this.load(this.view);
    } catch (error) {
      if (!(error instanceof Superseded)) this.say(error.message, true);
      return;
    } finally {
      this.wait(-1);
    }
    if (!this.view.mount) return; // another view was selected meanwhile; it draws itself once loaded
    const changed = this.due;
    this.due = new Set();
    this.say("");
    this.prompt.draw(changed);
    this.checkpointPicker.draw(changed);
    this.drawSelection();
    if (first || changed.has("view") || changed.has("compare_with") || changed.has("checkpoint")) this.mount();
    else for (const pane of this.panes) this.draw(pane, changed);
    abortOthers(this.forwardPasses());
  }

  /** The forward passes that are shown: of all panes, with and without edits, and of the patch source. */
  forwardPasses() {
    const passes = this.panes.flatMap(({ context }) => [
      context.forwardPass(),
      context.forwardPass({ unedited: true }),
      ...(context.state.patch_from ? [context.patchPass] : []),
    ]);
    return new Set(passes.map((one) => JSON.stringify(one)));
  }

  async read() {
    const turn = (this.reading = (this.reading ?? 0) + 1);
    const context = new ViewContext(this, this.checkpoints()[0]);
    const tokens = await request("tokenize", { forward_pass: context.forwardPass({ unedited: true }) });
    if (turn !== this.reading) throw new Superseded();
    this.tokens = tokens;
  }

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
    for (const tab of this.tabs.children) {
      const on = tab.dataset.view === this.view.name;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
    }
    this.showTab();
    this.main.setAttribute("aria-labelledby", `tab-${this.view.name}`);
    document.body.dataset.view = this.view.name;
  }

  /** Bring the open tab into view. */
  showTab() {
    const open = this.tabs.querySelector("[aria-selected=true]");
    if (open) reveal(open, this.tabs);
  }

  mount() {
    for (const pane of this.panes) pane.mounted.close?.();
    const checkpoints = this.checkpoints();
    this.panes = checkpoints.map((checkpoint) => {
      const context = new ViewContext(this, checkpoint);
      const root = h("div", { class: "view" });
      const trouble = h("p", { class: "trouble", role: "alert", hidden: true });
      const title = checkpoints.length > 1 ? h("h2", { class: "checkpoint" }, checkpoint) : null;
      const node = h("div", { class: "pane", data: { checkpoint } }, title, trouble, root);
      return { context, node, trouble, mounted: this.view.mount(context, root) };
    });
    put(
      this.main,
      this.panes.map((pane) => pane.node),
    );
    this.main.classList.toggle("comparing", this.panes.length > 1);
    for (const pane of this.panes) this.draw(pane, new Set([...Object.keys(this.state.values), "tokens"]));
  }

  async draw(pane, changed) {
    pane.context.turn += 1;
    const { turn } = pane.context;
    const patience = setTimeout(() => pane.node.setAttribute("aria-busy", "true"), PATIENCE);
    this.wait(1);
    try {
      await pane.mounted.draw(changed);
      if (turn === pane.context.turn) pane.trouble.hidden = true;
    } catch (error) {
      if (error instanceof Superseded) return;
      put(pane.trouble, error.message);
      pane.trouble.hidden = false;
      if (!(error instanceof ApiError)) console.error(error); // a bug in the page
    } finally {
      clearTimeout(patience);
      this.wait(-1);
      if (turn === pane.context.turn) pane.node.setAttribute("aria-busy", "false");
    }
  }

  wait(by) {
    this.busy += by;
    clearTimeout(this.patience);
    if (this.busy > 0) this.patience = setTimeout(() => this.waiting.classList.add("on"), PATIENCE);
    else this.waiting.classList.remove("on");
    document.body.dataset.busy = this.busy > 0;
  }

  say(sentence, isTrouble = false) {
    put(this.status, sentence);
    this.status.classList.toggle("trouble", isTrouble);
  }

  // Tools

  async saveFile() {
    this.save.disabled = true;
    try {
      const { html } = await request(
        "save",
        {
          fragment: this.state.fragmentOf({ checkpoint: this.checkpoints()[0] }),
          ...requestsFor(this.forwardPasses()),
        },
        { fresh: true },
      );
      const link = h("a", {
        href: URL.createObjectURL(new Blob([html], { type: "text/html" })),
        download: "glasshouse.html",
      });
      link.click();
      URL.revokeObjectURL(link.href);
      this.say("Saved as glasshouse.html, a standalone file.");
    } catch (error) {
      this.say(error.message, true);
    } finally {
      this.save.disabled = false;
    }
  }

  keyHelp() {
    const close = h("button", { type: "button", class: "tool", on: { click: () => this.keys.close() } }, "Close");
    return h(
      "dialog",
      { class: "keys", "aria-label": "keyboard shortcuts" },
      h("h2", {}, "Keyboard shortcuts"),
      h(
        "dl",
        {},
        KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)]),
      ),
      close,
    );
  }

  showKeys() {
    this.keys.showModal();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.views) return;
    if (event.target.closest?.("input, textarea, select, dialog")) return;
    const { layer, head } = this.state.values;
    const within = (value, most) => Math.max(0, Math.min(most, value));
    const number = Number(event.key);
    if (event.key === "[") this.state.set({ layer: within(layer - 1, this.layers - 1) });
    else if (event.key === "]") this.state.set({ layer: within(layer + 1, this.layers - 1) });
    else if (event.key === ",") this.state.set({ head: within(head - 1, this.model.n_heads - 1) });
    else if (event.key === ".") this.state.set({ head: within(head + 1, this.model.n_heads - 1) });
    else if (event.key === "?") this.showKeys();
    else if (number >= 1 && number <= this.views.length) this.choose(this.views[number - 1].name);
    else if (
      event.target.getAttribute?.("role") === "tab" &&
      (event.key === "ArrowRight" || event.key === "ArrowLeft")
    ) {
      const at = this.views.indexOf(this.view) + (event.key === "ArrowRight" ? 1 : -1);
      const next = this.views[(at + this.views.length) % this.views.length];
      this.state.set({ view: next.name });
      document.getElementById(`tab-${next.name}`).focus();
    } else return;
    event.preventDefault();
  }
}

const ICON = document.querySelector("link[rel=icon]").href;

new Page(document.getElementById("page")).open();
