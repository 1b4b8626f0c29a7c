// Activation patching from a second text: patch a layer and position by click, or measure the effect of each.

import { balance } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { clamp, plural, short } from "glasshouse/number.js";
import { choice, panel, token } from "glasshouse/widgets.js";
import { isNumber, show, tight, walk } from "glasshouse/views/interventions/grid_cell.js";
import { named } from "glasshouse/views/interventions/site.js";
import { chunks, sweep } from "glasshouse/views/interventions/sweep.js";

const PLACES = 20; // positions of the grid at once
const PAUSE = 300; // milliseconds without a key press before typed text is applied
const SITES = [
  ["resid_post", "residual stream"],
  ["attn_out", "attention output"],
  ["ffn_out", "feed-forward output"],
  ["z", "head output (z)"],
];

/**
 * @param {ViewContext} context
 * @param {EditHistory} changes
 * @returns {Part}
 */
export function patching(context, changes) {
  const { model } = context;
  const isSeq2Seq = model.kind === "seq2seq";
  const area = h("textarea", {
    rows: 2,
    placeholder: model.tokenizer ? "For example the same text with one word changed" : "Token ids, such as 5 7 11",
    spellcheck: "false",
    autocomplete: "off",
    data: { testid: "patch-from" },
    on: { input: typed },
  });
  const box = h(
    "label",
    { class: "box" },
    h("span", { class: "name" }, isSeq2Seq ? "Patch from (source)" : "Patch from"),
    area,
  );
  const site = h(
    "select",
    {
      "aria-label": "patched site",
      data: { testid: "patch-site" },
      on: { change: () => context.set({ interventions_site: site.value === "resid_post" ? undefined : site.value }) },
    },
    SITES.map(([value, text]) => h("option", { value }, text)),
  );
  const side = isSeq2Seq
    ? choice(
        "stack",
        [
          ["encoder", "encoder"],
          ["decoder", "decoder"],
        ],
        (value) => context.set({ interventions_stack: value === "encoder" ? undefined : value }),
      )
    : null;
  const note = h("p", { class: "quiet", role: "status", data: { testid: "patch-note" } });
  const alone = sweep(context, "patch each position", tryEach, {
    failed(message) {
      traced = null;
      put(note, message);
    },
  });
  alone.dataset.testid = "trace";
  const back = h(
    "button",
    { type: "button", class: "act", "aria-label": "earlier tokens", on: { click: () => turn(-PLACES) } },
    "‹",
  );
  const on = h(
    "button",
    { type: "button", class: "act", "aria-label": "later tokens", on: { click: () => turn(PLACES) } },
    "›",
  );
  const pages = h("span", { class: "controls" }, back, on);
  const legend = h("div", { class: "legend" });
  const table = h("div", { class: "scroll" });
  const controls = h("div", { class: "controls" }, h("label", {}, "patch ", site), side, alone, pages);
  const node = panel(
    "Activation patching",
    "Click a cell to replace that activation with the one from the second text. If the prediction becomes that of the second text, the difference between the texts passes through this site.",
    box,
    note,
    controls,
    table,
    legend,
  );
  /** @type {number | undefined} */
  let pause;
  let from = 0;
  /** @type {Token[]} */
  let other = []; // tokens of the second text
  /** @type {{ about: string, effects: Map<string, number | null>, here?: Token, there?: Token } | null} */
  let traced = null; // {about, effects, here, there}

  function typed() {
    clearTimeout(pause);
    pause = setTimeout(() => {
      const edits = area.value ? context.state.edits : context.state.edits.filter((one) => one.kind !== "patch");
      changes.make({ patch_from: area.value, edits }, "type");
    }, PAUSE);
  }

  /** @param {number} by */
  function turn(by) {
    from = from === 0 && by > 0 ? PLACES - 1 : Math.max(0, from + by); // the first page has the last token as well
    fill();
  }

  const stack = () => (isSeq2Seq ? (context.state.interventions_stack === "decoder" ? "decoder" : "encoder") : "");
  const layers = () => {
    const count = stack() === "encoder" ? model.n_encoder_layers : model.n_layers;
    return Array.from({ length: count }, (_, i) => count - 1 - i); // the last on top
  };
  const row = () =>
    isSeq2Seq ? (stack() === "encoder" ? context.tokens.source : context.tokens.target) : context.tokens.text;
  const kind = () => SITES.find(([name]) => name === context.state.interventions_site)?.[0] ?? "resid_post";
  /** @type {(layer: number, place?: number) => string} */
  const name = (layer, place) => {
    const inside = [
      kind() === "z" ? `head=${Math.min(context.state.head, model.n_heads - 1)}` : "",
      place === undefined ? "" : `position=${place}`,
    ]
      .filter(Boolean)
      .join(", ");
    return `${stack() ? `${stack()}.` : ""}${kind()}.${layer}${inside ? `[${inside}]` : ""}`;
  };
  const about = () =>
    JSON.stringify([
      context.forwardPass({ unedited: true }),
      context.state.patch_from,
      stack(),
      kind(),
      kind() === "z" ? context.state.head : 0,
      context.token,
    ]);
  /** @type {(length: number) => number[]} */
  const inView = (length) => {
    const shown = Array.from({ length: clamp(length - from, PLACES) }, (_, i) => from + i);
    // The last token, at which the prediction is read, is on the first page too.
    return from === 0 && length > PLACES ? [...shown.slice(0, -1), length - 1] : shown;
  };
  /** @type {(place: number) => boolean} */
  const isApart = (place) => from === 0 && place >= PLACES;
  const shared = () => Math.min(row().length, other.length); // positions that both texts have

  /**
   * @param {number} layer
   * @param {number} [place]
   */
  function press(layer, place) {
    const where = name(layer, place);
    const there = context.state.edits.some((one) => one.site === where);
    changes.put(where, there ? null : { kind: "patch", site: where }, { layer });
  }

  /**
   * @param {SweepRequest} request
   * @returns {Promise<void>}
   */
  async function tryEach(request) {
    const position = context.token;
    const { length } = row();
    const forwardPass = { ...context.forwardPass({ unedited: true }), patch_from: context.patchPrompt };
    const lines = layers().map((layer) => inView(shared()).map((place) => name(layer, place)));
    /** @type {NonNullable<typeof traced>} */
    const own = { about: about(), effects: new Map() };
    traced = own;
    for (const line of lines) {
      for (const sites of chunks(line, length)) {
        const { effect, here, there } = await request("patch_each", { forward_pass: forwardPass, sites, position });
        for (const [i, one] of sites.entries()) own.effects.set(one, effect[i]);
        Object.assign(own, { here, there });
        colour();
      }
    }
  }

  function fill() {
    const length = Math.max(row().length, other.length);
    from = Math.min(from, Math.max(0, length - 1));
    pages.hidden = length <= PLACES;
    back.disabled = from === 0;
    on.disabled = from + PLACES >= length;
    const places = inView(length);
    /** @type {(one: Token | undefined) => HTMLElement} */
    const label = (one) => (one ? token(one) : h("span", { class: "quiet" }, "–"));
    /** @type {(tokens: Token[], text: string, last: Child) => HTMLElement} */
    const head = (tokens, text, last) =>
      h(
        "div",
        { role: "row", class: "patch-tokens" },
        h("span", { role: "rowheader" }, text),
        places.map((place) =>
          h(
            "span",
            {
              role: "columnheader",
              class: row()[place]?.id === other[place]?.id ? "" : "differs",
              title: `token ${place}`,
            },
            isApart(place) ? "… " : "",
            label(tokens[place]),
          ),
        ),
        h("span", {}, last),
      );
    const lines = layers().map((layer) => {
      /** @type {(place?: number) => HTMLElement} */
      const cell = (place) =>
        h("button", {
          type: "button",
          role: "gridcell",
          class: `part${place === undefined ? " wide" : ""}`,
          tabindex: "-1",
          disabled: place === undefined ? row().length !== other.length : place >= shared(),
          data: { site: name(layer, place) },
          on: { click: () => press(layer, place) },
        });
      return h(
        "div",
        { role: "row" },
        h("span", { role: "rowheader" }, `layer ${layer}`),
        places.map(cell),
        cell(undefined),
      );
    });
    const first = lines[0].querySelector(".part:not(:disabled)");
    if (first) first.tabIndex = 0;
    const [above, below] = stack() === "decoder" ? ["target", "target"] : ["this text", "second text"];
    put(
      table,
      h(
        "div",
        {
          class: "patches",
          role: "grid",
          "aria-label": "sites to patch: rows are layers, columns are tokens",
          style: { "--columns": `6.4rem repeat(${places.length}, minmax(42px, 84px)) 62px` },
          data: { testid: "patches" },
          on: { keydown: walk },
        },
        lines,
        head(row(), above, h("span", { class: "quiet" }, "all")),
        head(other, below, ""),
      ),
    );
    colour();
  }

  function colour() {
    const patched = new Set(context.state.edits.filter((one) => one.kind === "patch").map((one) => one.site));
    const now = traced?.about === about() ? traced : null;
    for (const button of table.querySelectorAll(".part")) {
      const where = button.dataset.site ?? "";
      const effect = now?.effects.get(where);
      const state = patched.has(where) ? "patched" : "";
      const text = isNumber(effect) ? tight(effect) : "";
      show(button, {
        label: `${named(where)}${state ? ", patched" : ""}${text ? `, effect ${short(effect)}` : ""}`,
        state,
        value: effect,
        text,
        share: effect ?? 0,
      });
    }
    put(
      legend,
      h("span", {}, h("i", { class: "part-on" }), "unpatched"),
      h("span", {}, h("i", { class: "part-edited" }), "patched"),
      now?.here && now.there
        ? [
            h(
              "span",
              {},
              h("i", { style: { background: balance(1) } }),
              `1: the prediction at token ${context.token} becomes `,
              token(now.there),
            ),
            h(
              "span",
              {},
              h("i", { class: "ringed", style: { background: balance(0) } }),
              "0: it stays ",
              token(now.here),
            ),
          ]
        : null,
    );
  }

  return {
    node,
    async draw() {
      if (document.activeElement !== area) area.value = context.state.patch_from;
      side?.show(stack() === "decoder" ? "decoder" : "encoder");
      site.value = kind();
      const ready = Boolean(context.state.patch_from);
      controls.hidden = table.hidden = legend.hidden = !ready;
      if (!ready) {
        alone.stop();
        put(note, "Enter a second text, preferably with the same number of tokens and a different prediction.");
        return;
      }
      const tokens = await context.request("tokenize", { forward_pass: context.patchPass });
      other = isSeq2Seq ? tokens[stack() === "encoder" ? "source" : "target"] : tokens.text;
      if (traced && traced.about !== about()) alone.stop();
      const [a, b] = [row().length, other.length];
      put(
        note,
        a === b
          ? `Both have ${plural(a, "token")}.`
          : `The texts have ${a} and ${b} tokens: only single positions that both have, 0 to ${Math.min(a, b) - 1}, can be patched. Patching a whole layer needs texts of the same length.`,
      );
      fill();
    },
    colour() {
      if (table.firstChild) colour();
    },
    close: () => {
      clearTimeout(pause);
      alone.stop();
    },
  };
}
