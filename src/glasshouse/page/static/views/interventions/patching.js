// Activation patching from a second text: patch a layer and position by click, or measure the effect of each.

import { balance } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { clamp, plural } from "glasshouse/number.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { choice, panel, token } from "glasshouse/widgets.js";
import { isNumber, show, tight, walk } from "glasshouse/views/interventions/grid_cell.js";
import { named } from "glasshouse/views/interventions/site.js";
import { secondText } from "glasshouse/views/interventions/second_text.js";
import { chunks, sweep } from "glasshouse/views/interventions/sweep.js";

const PLACES = 20; // positions of the grid at once
const SITES = [
  ["resid_post", "residual stream"],
  ["attn_out", "attention output"],
  ["ffn_out", "feed-forward output"],
  ["z", "head output (z)"],
  ["heads", "output of every head (z)"],
];

/**
 * @param {ViewContext} context
 * @param {EditHistory} changes
 * @returns {Part}
 */
export function patching(context, changes) {
  const { model } = context;
  const isSeq2Seq = model.kind === "seq2seq";
  const box = secondText(context, "Patch from", (next) => changes.make(next, "type"));
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
  const guess = sweep(context, "estimate all", estimate, { failed: (message) => put(note, message) });
  guess.dataset.testid = "estimate";
  guess.title = "for all layers, positions and heads at once, by gradients";
  guess.classList.remove("first");
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
  const controls = h("div", { class: "controls" }, h("label", {}, "patch ", site), side, alone, guess, pages);
  const node = panel(
    "Activation patching",
    "Click a cell to replace that activation with the one from the second text. If the prediction becomes that of the second text, the difference between the texts passes through this site.",
    box,
    note,
    controls,
    table,
    legend,
  );
  let from = 0;
  /** @type {Token[]} */
  let other = []; // tokens of the second text
  /** @type {{ about: string, effects: Map<string, number | null>, estimated: Set<string>, here?: Token, there?: Token } | null} */
  let traced = null; // effects by site, and which of them are estimates

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
  /** The rows of the grid: layers, or all their heads. */
  const rows = () =>
    layers().flatMap((layer) =>
      kind() === "heads" ? Array.from({ length: model.n_heads }, (_, head) => ({ layer, head })) : [{ layer }],
    );
  const row = () =>
    isSeq2Seq ? (stack() === "encoder" ? context.tokens.source : context.tokens.target) : context.tokens.text;
  const kind = () => SITES.find(([name]) => name === context.state.interventions_site)?.[0] ?? "resid_post";
  const isOfHeads = () => kind() === "z" || kind() === "heads";
  const stem = () => `${stack() ? `${stack()}.` : ""}${isOfHeads() ? "z" : kind()}`;
  /** @type {(at: PatchRow, place?: number) => string} */
  const name = ({ layer, head = Math.min(context.state.head, model.n_heads - 1) }, place) => {
    const inside = [isOfHeads() ? `head=${head}` : "", place === undefined ? "" : `position=${place}`]
      .filter(Boolean)
      .join(", ");
    return `${stem()}.${layer}${inside ? `[${inside}]` : ""}`;
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
   * @param {PatchRow} at
   * @param {number} [place]
   */
  function press(at, place) {
    const where = name(at, place);
    const there = context.state.edits.some((one) => one.site === where);
    changes.put(where, there ? null : { kind: "patch", site: where }, at);
  }

  /** What is known of the present texts, site and token. */
  function known() {
    if (traced?.about !== about()) traced = { about: about(), effects: new Map(), estimated: new Set() };
    return traced;
  }

  /**
   * @param {SweepRequest} request
   * @returns {Promise<void>}
   */
  async function estimate(request) {
    const now = known();
    const site = stem();
    const { effect, here, there } = await request("estimate_patches", {
      forward_pass: context.forwardPass({ unedited: true }),
      patch_from: context.patchPrompt,
      site,
      position: context.token,
    });
    const { data, shape } = decodeTensor(effect);
    const length = shape[shape.length - 1];
    const heads = shape.length > 2 ? shape[1] : 1;
    for (const at of rows())
      for (let place = 0; place < length; place += 1) {
        const where = name(at, place);
        if (now.effects.has(where) && !now.estimated.has(where)) continue; // measured
        const head = heads > 1 ? Number(/head=(\d+)/.exec(where)?.[1] ?? 0) : 0;
        now.effects.set(where, data[(at.layer * heads + head) * length + place]);
        now.estimated.add(where);
      }
    Object.assign(now, { here, there });
    colour();
  }

  /**
   * @param {SweepRequest} request
   * @returns {Promise<void>}
   */
  async function tryEach(request) {
    const position = context.token;
    const { length } = row();
    const forwardPass = { ...context.forwardPass({ unedited: true }), patch_from: context.patchPrompt };
    // The selected layer first: of every head there may be many.
    const order = [...rows()].sort(
      (a, b) => Number(b.layer === context.state.layer) - Number(a.layer === context.state.layer),
    );
    const lines = order.map((at) => inView(shared()).map((place) => name(at, place)));
    const own = known();
    for (const line of lines) {
      for (const sites of chunks(line, length)) {
        const { effect, here, there } = await request("patch_each", { forward_pass: forwardPass, sites, position });
        for (const [i, one] of sites.entries()) {
          own.effects.set(one, effect[i]);
          own.estimated.delete(one);
        }
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
    const lines = rows().map((at) => {
      /** @type {(place?: number) => HTMLElement} */
      const cell = (place) =>
        h("button", {
          type: "button",
          role: "gridcell",
          class: `part${place === undefined ? " wide" : ""}`,
          tabindex: "-1",
          disabled: place === undefined ? row().length !== other.length : place >= shared(),
          data: { site: name(at, place) },
          on: { click: () => press(at, place) },
        });
      return h(
        "div",
        { role: "row" },
        h("span", { role: "rowheader" }, "head" in at ? `head ${at.layer}.${at.head}` : `layer ${at.layer}`),
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
          "aria-label": `sites to patch: rows are ${kind() === "heads" ? "heads" : "layers"}, columns are tokens`,
          style: { "--columns": `6.4rem repeat(${places.length}, minmax(42px, 84px)) 62px` },
          data: { testid: "patches" },
          on: { keydown: walk },
        },
        lines,
        h(
          "div",
          { role: "rowgroup", class: "patch-foot" },
          head(row(), above, h("span", { class: "quiet" }, "all")),
          head(other, below, ""),
        ),
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
      const isEstimate = now?.estimated.has(where) ?? false;
      const text = isNumber(effect) ? tight(effect) : "";
      const word = isEstimate ? "estimated effect" : "effect";
      button.classList.toggle("estimated", isEstimate && !state);
      show(button, {
        label: `${named(where)}${state ? ", patched" : ""}${text ? `, ${word} ${text}` : ""}`,
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
            now.estimated.size
              ? h("span", {}, h("em", {}, "italic"), ": estimated; “patch each position” measures")
              : null,
          ]
        : null,
    );
  }

  return {
    node,
    async draw() {
      box.show();
      side?.show(stack() === "decoder" ? "decoder" : "encoder");
      site.value = kind();
      const ready = Boolean(context.state.patch_from);
      controls.hidden = table.hidden = legend.hidden = !ready;
      if (!ready) {
        alone.stop();
        guess.stop();
        put(note, "Enter a second text, preferably with the same number of tokens and a different prediction.");
        return;
      }
      const tokens = await context.request("tokenize", { forward_pass: context.patchPass });
      other = isSeq2Seq ? tokens[stack() === "encoder" ? "source" : "target"] : tokens.text;
      if (traced && traced.about !== about()) {
        alone.stop();
        guess.stop();
      }
      const [a, b] = [row().length, other.length];
      put(
        note,
        a === b
          ? `Both have ${plural(a, "token")}.`
          : `The texts have ${a} and ${b} tokens: only single positions that both have, 0 to ${Math.min(a, b) - 1}, can be patched. Patching a whole layer needs texts of the same length.`,
      );
      guess.disabled = a !== b; // gradients are of whole layers
      table.classList.toggle("many", kind() === "heads");
      fill();
    },
    colour() {
      if (table.firstChild) colour();
    },
    close: () => {
      box.close();
      alone.stop();
      guess.stop();
    },
  };
}
