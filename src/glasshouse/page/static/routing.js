// Which view is open, on the page of which model: tabs, the modules of the views, and links to answers.

import { ApiError, NEEDS_SERVER, SILENT, servedModel } from "glasshouse/api.js";
import { h, put, reveal } from "glasshouse/dom.js";
import { isLive, liveViews } from "glasshouse/live_model.js";
import { views as VIEWS } from "glasshouse/manifest.js";
import { addressOf, openAnswer, props } from "glasshouse/server.js";

/**
 * A view that a live page does not have.
 * @param {ViewContext} _
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
function elsewhere(_, root) {
  root.append(h("p", { class: "quiet" }, `The model in this file cannot draw this view: it ${NEEDS_SERVER}`));
  return { draw: async () => {} };
}

export class Routing {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    /** @type {ViewEntry[]} */
    this.views = []; // those that apply to the model
    this.tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "views" });
    new ResizeObserver(() => this.showTab()).observe(this.tabs);
  }

  /** Offer the views that apply to the model. */
  furnish() {
    this.views = VIEWS.filter((view) => this.page.model.views.includes(view.name));
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
  }

  /** The view that is open, or will be once the model is known. */
  get view() {
    const { view } = this.page.state.values;
    const views = this.views.length ? this.views : VIEWS;
    return views.find((one) => one.name === view) ?? views[0];
  }

  /**
   * Import a view's module when it is first opened.
   * @param {ViewEntry} view
   */
  async load(view) {
    if (isLive && !liveViews.has(view.name)) view.mount ??= elsewhere;
    try {
      view.mount ??= (await import(`glasshouse/views/${view.name}/view.js`)).mount;
    } catch (error) {
      throw error instanceof TypeError ? new ApiError(SILENT) : error; // a module that cannot be fetched is a TypeError
    }
  }

  /** Import the modules of all views; errors are reported when one is drawn. */
  prefetch() {
    for (const view of this.views) this.load(view).catch(() => {});
  }

  /**
   * Open a view; retry the current one if it could not be fetched or drawn.
   * @param {string} name
   */
  choose(name) {
    const { page } = this;
    if (name === page.state.values.view && page.hasFailed) page.changed(new Set(["view"]));
    else page.state.set({ view: name });
  }

  /**
   * Go to the tab so many further, round the ends.
   * @param {number} by
   */
  step(by) {
    const at = this.views.indexOf(this.view) + by;
    const next = this.views[(at + this.views.length) % this.views.length];
    this.page.state.set({ view: next.name });
    document.getElementById(`tab-${next.name}`)?.focus();
  }

  /** Mark the open tab. */
  draw() {
    for (const tab of this.tabs.querySelectorAll("[role=tab]")) {
      const on = tab.dataset.view === this.view.name;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    }
    this.showTab();
    this.page.main.setAttribute("aria-labelledby", `tab-${this.view.name}`);
    document.body.dataset.view = this.view.name;
  }

  /** Bring the open tab into view. */
  showTab() {
    const open = this.tabs.querySelector("[aria-selected=true]");
    if (open) reveal(open, this.tabs);
  }

  /**
   * Show the tokens of an answer, on the page of the model that gave it.
   * @param {string} id
   */
  async openAnswer(id) {
    const { model, state } = this.page;
    const answer = await openAnswer(id).catch(() => null);
    if (!answer)
      state.begin({ view: "chat" }); // which says what is wrong
    else if (answer.model !== model.name) location.replace(addressOf(answer.model, location.hash));
    else if (answer.state) state.begin(answer.state);
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
        on: { change: () => location.assign(addressOf(chosen.value, `#view=${this.view.name}`)) },
      },
      models.map(({ id }) => h("option", { value: id }, id)),
    );
    chosen.value = servedModel || models[0].id;
    this.page.title.after(chosen);
  }
}
