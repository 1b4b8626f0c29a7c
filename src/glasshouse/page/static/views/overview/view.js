// Overview: the whole model for the present text, from the tokens to the predictions; then a layer, a head, a product.

import { preamble, within } from "glasshouse/code.js";
import { headColour, onTheme } from "glasshouse/colour.js";
import { h, put, reveal } from "glasshouse/dom.js";
import { percent, plural } from "glasshouse/number.js";
import { panel, python, token } from "glasshouse/widgets.js";
import { lines } from "glasshouse/views/attention/lines.js";
import { queryKey } from "glasshouse/views/attention/query_key.js";
import { row } from "glasshouse/views/attention/row.js";
import { Selection } from "glasshouse/views/attention/selection.js";
import { Flow } from "glasshouse/views/overview/flow.js";
import { layerPanel } from "glasshouse/views/overview/layer.js";
import { picture } from "glasshouse/views/overview/picture.js";
import { Player } from "glasshouse/views/overview/player.js";
import { byLayer, outcome, reasons } from "glasshouse/views/overview/reading.js";

const WINDOW = 64; // positions that are drawn at once
const CANDIDATES = 6;

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const selection = new Selection(context);
  const crumbs = h("nav", { class: "crumbs", "aria-label": "level" });
  const body = h("div", { class: "overview-body" });
  const code = h("div", {});
  root.append(h("div", { class: "overview" }, crumbs, body, code));
  const player = new Player();
  /** @type {(() => void) | null} */
  let redraw = null;

  /** @param {Zoom} where */
  function zoom({ layer, head, key, site, product }) {
    /** @type {Partial<PageState>} */
    const changes = {
      layer,
      attention: site,
      overview_zoom: product ? "product" : head === undefined ? "layer" : "head",
    };
    if (head !== undefined) changes.head = head;
    if (key !== undefined) changes[site === "decoder.pattern" ? "attention_key" : "key"] = key;
    context.set(changes);
  }

  async function whole() {
    const flows = await requestFlows(context);
    const flow = flows[flows.length - 1];
    const frame = h("div", {
      class: "scroll",
      tabindex: "0",
      role: "group",
      "aria-label": "the model",
    });
    const node = panel("The model on this text", sentence(context, flow), legend(flow), frame, windowNote(flows));
    node.append(player.node);
    const side = h("div", { class: "column" });
    const layers = panel(
      "What each layer adds at ",
      "“Adds 25%”: the vector that is added has a quarter of the length of both, it and the stream that it is added to (length ÷ (length + length of the stream)). The head named is the one that adds most by length; “Why” above goes by the effect on one logit.",
    );
    layers.querySelector("h2")?.append(token(context.row[context.token], { class: "selected" }));
    put(body, h("div", { class: "whole" }, node, side), layers);
    /** @type {string | null} */
    let top = null;
    redraw = () => {
      const drawn = picture(flows, {
        room: frame.clientWidth,
        selected: context.token,
        layer: context.state.layer,
        outcome: top,
        zoom,
        select: (place) => context.set({ token: place }),
      });
      put(frame, drawn);
      reveal(/** @type {HTMLElement} */ (drawn.querySelector(".column.lit")), frame);
      player.show(drawn, flows, body);
    };
    redraw(); // before the predictions are asked for, which take as long again
    const [next, lens, found] = await requestPredictions(context);
    top = next && `→ ${next.candidates[0].text} ${percent(next.candidates[0].probability)}`;
    redraw();
    side.append(outcome(context, next));
    if (next && lens && found) side.append(reasons(flow, next, lens, found, zoom));
    layers.append(byLayer(context, flow, lens, found, zoom));
  }

  async function oneLayer() {
    const [flows, lens] = await Promise.all([requestFlows(context), requestLens(context)]);
    const flow = flows.find(
      (one) => one.site("attention") === selection.kind.site || one.site("cross") === selection.kind.site,
    );
    put(
      body,
      await layerPanel(selection, flow ?? flows[flows.length - 1], lens, zoom),
      more("residual", "walkthrough"),
    );
  }

  /** @param {((selection: AttentionSelection) => Part)[]} parts */
  async function ofAttention(...parts) {
    const made = parts.map((part) => part(selection));
    put(
      body,
      h(
        "div",
        { class: "attention" },
        h(
          "div",
          { class: made.length > 1 ? "side-by-side" : "" },
          made.map((part) => h("div", { class: "column" }, part.node)),
        ),
      ),
      more("attention", "walkthrough"),
    );
    await Promise.all(made.map((part) => part.draw(new Set())));
  }

  /** @param {...string} names */
  function more(...names) {
    const known = context.page.routing.views.filter((view) => names.includes(view.name));
    return h(
      "p",
      { class: "more quiet" },
      "More: ",
      known.map((view, i) => [
        i ? ", " : "",
        h("a", { href: context.page.state.fragmentOf({ view: view.name }) }, view.title),
      ]),
    );
  }

  const resized = new ResizeObserver(() => redraw?.());
  resized.observe(root);
  const themed = onTheme(() => redraw?.());
  return {
    async draw() {
      redraw = null;
      player.stop();
      const level = context.state.overview_zoom ?? "model";
      showCrumbs(context, selection, crumbs, level);
      if (level === "layer") await oneLayer();
      else if (level === "head") await ofAttention(lines, row);
      else if (level === "product") await ofAttention(queryKey);
      else await whole();
      put(code, python(await inPython(context)));
    },
    close() {
      resized.disconnect();
      themed();
      player.stop();
    },
  };
}

/**
 * The stacks of the picture.
 * @param {ViewContext} context
 * @returns {Promise<Flow[]>}
 */
async function requestFlows(context) {
  const { model, token: place, row: tokens } = context;
  const start = Math.max(0, Math.min(place - (place % WINDOW), tokens.length - WINDOW));
  const { stacks } = await context.request("overview", { forward_pass: context.forwardPass(), start });
  return stacks.map((one) => new Flow(one, model, context.tokens));
}

/**
 * What each layer of the stream predicts at the selected token, if the model predicts tokens.
 * @param {ViewContext} context
 * @returns {Promise<LensResponse | null>}
 */
async function requestLens(context) {
  const { model, token: place } = context;
  if (!model.predicts_tokens) return null;
  return context.request("lens", { forward_pass: context.forwardPass(), start: place, stop: place + 1, top_k: 1 });
}

/**
 * What comes out at the selected token, what each layer predicts and what each part adds; null where the head has none.
 * @param {ViewContext} context
 * @returns {Promise<[NextToken | null, LensResponse | null, LogitAttribution | null]>}
 */
function requestPredictions(context) {
  const here = { forward_pass: context.forwardPass(), position: context.token };
  return Promise.all([
    context.hasProbabilities ? context.request("next", { ...here, show: CANDIDATES }) : null,
    requestLens(context),
    context.model.predicts_tokens ? context.request("logit_attribution", here) : null,
  ]);
}

/**
 * The picture in one sentence.
 * @param {ViewContext} context
 * @param {Flow} flow
 */
function sentence(context, flow) {
  const { model } = context;
  const causal = model.attentions.some((one) => one.causal);
  const source = model.kind === "seq2seq" ? " The decoder reads the encoder's memory by cross-attention." : "";
  return (
    `Upwards: each token becomes a vector, the residual stream of its column, and ${plural(flow.layers, "block")} add to it. ` +
    "Information crosses from column to column only along the arcs, which are attention; feed-forward works within a column." +
    (causal
      ? ` ${source ? "In the decoder" : "Here"} a token reads itself and earlier tokens, never later ones.`
      : " A token reads all others, before and after it.") +
    source +
    " Layers, heads and tokens are counted from 0."
  );
}

/** @param {Flow} flow */
function legend(flow) {
  return h(
    "p",
    { class: "legend" },
    h(
      "span",
      {},
      h("i", { class: "own-arc" }),
      "arcs into the selected column: its heads, each from the token of which it moves most (attention weight × value)",
    ),
    h("span", {}, h("i", { class: "other-arc" }), "elsewhere the strongest head alone"),
    h("span", {}, h("i", { class: "ffn-box" }), "feed-forward"),
    h("span", {}, "thicker, darker: more is added, as a share of itself and the stream (arcs: its square root)"),
    h(
      "span",
      {},
      `${plural(flow.nHeads, "head")} a layer, by colour: `,
      Array.from({ length: flow.nHeads }, (_, head) => [
        h("i", { class: "swatch", style: { background: headColour(head, flow.nHeads) } }),
        `${head} `,
      ]),
    ),
  );
}

/** @param {Flow[]} flows */
function windowNote(flows) {
  const cut = flows.filter((one) => one.width < one.of);
  if (!cut.length) return null;
  const said = cut.map(
    (one) => `${one.side === "text" ? "tokens" : `${one.side} tokens`} ${one.start} to ${one.stop - 1} of ${one.of}`,
  );
  return h(
    "p",
    { class: "quiet" },
    `Drawn: ${said.join("; ")}. An arc from the left edge comes from an earlier token.`,
  );
}

/**
 * From the model down to where the reader is, each a way back.
 * @param {ViewContext} context
 * @param {AttentionSelection} selection
 * @param {HTMLElement} node
 * @param {string} level
 */
function showCrumbs(context, selection, node, level) {
  const { layer, head, queries, keys, query, key, kind } = selection;
  const side = kind.site.includes(".") ? `${kind.title}, ` : "";
  /** @type {[string, Child][]} */
  const levels = [
    ["model", "model"],
    ["layer", `${side}layer ${layer}`],
    ["head", `head ${layer}.${head}`],
    ["product", [token(queries[query]), " reads ", token(keys[key])]],
  ];
  const at = levels.findIndex(([name]) => name === level);
  put(
    node,
    levels.map(([name, said], i) => [
      i ? h("span", { class: "quiet", "aria-hidden": "true" }, " › ") : null,
      i === at
        ? h("b", { "aria-current": "true" }, said)
        : h(
            "button",
            {
              type: "button",
              class: i < at ? "link" : "link deeper",
              data: { testid: `zoom-${name}` },
              on: { click: () => context.set({ overview_zoom: name === "model" ? undefined : name }) },
            },
            said,
          ),
    ]),
  );
}

/**
 * The same in Python.
 * @param {ViewContext} context
 * @returns {Promise<string>}
 */
async function inPython(context) {
  const { lines: said, inputs } = preamble(context);
  const prefix = context.model.kind === "seq2seq" ? "decoder." : "";
  const { layer } = context.state;
  /** @type {(name: string) => string} */
  const site = (name) => `"${prefix}${name}.${layer}"`;
  const work = [
    `with gh.record(model, ${["attn_out", "resid_pre", "ffn_out", "resid_mid"].map(site).join(", ")}) as seen:`,
    `    model(${inputs})`,
    `added, stream = (seen[site][0].norm(dim=-1) for site in (${site("attn_out")}, ${site("resid_pre")}))`,
    "share = added / (added + stream)  # of attention; that of feed-forward from ffn_out and resid_mid",
  ];
  return [...said, ...(await within(context, work))].join("\n");
}
