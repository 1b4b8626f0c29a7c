// Circuit: the edges between components that carry what makes two texts end in different predictions.

import { isAvailable, isSaved } from "glasshouse/api.js";
import { preamble } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { count, percent, plural } from "glasshouse/number.js";
import { live } from "glasshouse/saved_page.js";
import { bars, choice, panel, python, slider, token } from "glasshouse/widgets.js";
import { figure, keyOf, shownIn, words } from "glasshouse/views/circuit/component.js";
import { chosenEdge, findEdge } from "glasshouse/views/circuit/edge.js";
import { graph } from "glasshouse/views/circuit/graph.js";
import { secondText } from "glasshouse/views/interventions/second_text.js";
import { sweep } from "glasshouse/views/interventions/sweep.js";

const LISTED = 64; // edges in the list, which scrolls
const FEW = 32; // edges that are drawn before the circuit is found
const PLACES = 8; // tokens to choose from

/** @type {Map<string, KnownCircuit>} */
const kept = new Map(); // by texts and token; kept across views while the page is open

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const { model } = context;
  const box = secondText(context, "Corrupted text", (changes) => context.set(changes));
  const note = h("div", { class: "circuit-note", role: "status", data: { testid: "circuit-note" } });
  const progress = h("p", { class: "quiet", role: "status", data: { testid: "circuit-progress" } });
  const search = sweep(context, "find the circuit", find, {
    failed: (message) => put(progress, message),
    stopped: () => put(progress, "Stopped: the largest edges by estimate are shown, and no circuit was found."),
  });
  search.dataset.testid = "find-circuit";
  const texts = panel(
    "Which components talk to which",
    "Components write to the residual stream, later ones read it: each such pair is an edge. A circuit is a small set of edges that is enough: with all other edges as on the corrupted text, the model still predicts at the selected token as on this text, the clean one.",
    box,
    note,
    h("div", { class: "controls" }, search),
    progress,
  );
  /** @type {Choice<string>} */
  const which = choice(
    "edges",
    [
      ["found", "circuit found"],
      ["largest", "largest edges"],
    ],
    (value) => context.set({ circuit_size: value === "found" ? undefined : known()?.circuit?.largest.size }),
  );
  const sizes = slider("number of edges", {
    min: 0,
    max: 0,
    step: 1,
    shown: (at) => count(stops()[at]?.size ?? 0),
    oninput: (at) => context.set({ circuit_size: stops()[at].size }),
  });
  const facts = h("div", { class: "circuit-facts", data: { testid: "circuit-facts" } });
  const frame = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "the graph" });
  const legend = h(
    "div",
    { class: "legend" },
    h("span", {}, h("i", { class: "more" }), "patched alone, moves the prediction towards that of the clean text"),
    h("span", {}, h("i", { class: "less" }), "moves it away"),
    h("span", {}, "into a head, from left to right: queries, keys, values"),
  );
  const drawing = panel(
    "The circuit",
    "A component is a link to the view that shows it; an edge is thicker the larger its estimated effect (by the square root).",
    h("div", { class: "controls" }, which, sizes),
    facts,
    frame,
    legend,
  );
  const list = h("div", { data: { testid: "circuit-list" } });
  const listed = panel("Largest edges of those drawn", null, list);
  const chosen = chosenEdge(context, pick);
  const body = h("div", { class: "circuit-body" }, drawing, h("div", { class: "column" }, chosen.node, listed));
  const code = h("div", {});
  root.classList.add("circuit");
  root.append(texts, body, code);
  /** @type {(() => void) | null} */
  let redraw = null;
  let running = ""; // what a search is about

  /** @returns {RequestBody} */
  const texted = () => ({
    forward_pass: context.forwardPass({ unedited: true }),
    ...(context.state.patch_from ? { corrupted: context.patchPrompt } : {}),
  });
  const asked = () => ({ ...texted(), position: context.token });
  const about = () => JSON.stringify(asked());
  const known = () => kept.get(about());

  /** The sizes of the slider: those of the estimates, and that of the circuit. */
  function stops() {
    const now = known();
    if (!now) return [];
    const { sizes: all } = now.estimates;
    const own = now.circuit?.largest;
    const more = own && !all.some((one) => one.size === own.size) ? [own] : [];
    return [...all, ...more].sort((a, b) => a.size - b.size);
  }

  /** @param {CircuitEdge} edge */
  function pick(edge) {
    context.set({ circuit_edge: keyOf(edge) === context.state.circuit_edge ? undefined : keyOf(edge) });
  }

  /**
   * @param {SweepRequest} request
   * @returns {Promise<void>}
   */
  async function find(request) {
    const [key, asking] = [about(), asked()];
    running = key;
    put(progress, "Estimating the effect of every edge …");
    /** @type {KnownCircuit} */
    const own = kept.get(key) ?? { estimates: await request("edge_effects", asking), circuit: null };
    kept.set(key, own);
    await show();
    put(progress, "Searching for a circuit …");
    for (let isFound = Boolean(own.circuit); !isFound; ) {
      // In slices, so that the page answers meanwhile and the search can be stopped.
      const { done, total, found } = await request("find_circuit", { ...asking, sliced: true }, { fresh: true });
      put(progress, `Searching: ${count(done)} of ${count(total)} edges decided (${percent(done / total)}).`);
      isFound = found !== null;
    }
    own.circuit = (await request("find_circuit", asking)).found;
    put(progress);
    await show();
  }

  /** Draw what is known. */
  async function show() {
    const now = known();
    body.hidden = !now;
    redraw = null;
    if (!now) return;
    const all = stops();
    const size = context.state.circuit_size ?? (now.circuit ? undefined : Math.min(FEW, all[all.length - 1].size));
    const at = size === undefined ? -1 : all.findLastIndex((one) => one.size <= Math.max(1, size));
    const stop = at < 0 ? null : all[at];
    const edges = stop
      ? stop.kept.map((rank) => now.estimates.edges[rank])
      : /** @type {FoundCircuit} */ (now.circuit).edges;
    which.hidden = !now.circuit;
    which.show(stop ? "largest" : "found");
    sizes.limit(all.length - 1);
    sizes.show(at < 0 ? all.findIndex((one) => one.size === now.circuit?.largest.size) : at);
    sizes.querySelector("input")?.setAttribute("aria-valuetext", `${stop?.size ?? edges.length} edges`);
    put(facts, stop ? aboutSize(stop, now) : aboutCircuit(/** @type {FoundCircuit} */ (now.circuit), now));
    const edge = findEdge(edges, context.state.circuit_edge);
    redraw = () => {
      const drawn = graph(model, edges, {
        room: frame.clientWidth,
        chosen: edge ? keyOf(edge) : "",
        href: (name) => context.page.state.fragmentOf(shownIn(name)),
        pick,
      });
      put(frame, drawn);
    };
    redraw();
    const top = Math.max(...edges.map((one) => Math.abs(one.effect)), Number.MIN_VALUE);
    put(
      list,
      edges.length
        ? bars(
            edges.slice(0, LISTED).map((one) => ({
              name: `${words(one.writer, model)} → ${words(one.reader, model)}`,
              share: Math.abs(one.effect) / top,
              value: one.effect,
              text: figure(one.effect),
              title: `${words(one.writer, model)} → ${words(one.reader, model)}`,
              class: `${one.effect < 0 ? "less" : "more"}${one === edge ? " chosen" : ""}`,
              onclick: () => pick(one),
            })),
            { label: "edges by estimated effect", full: figure(top) },
          )
        : h("p", { class: "quiet" }, "None of them lies on a path from the embedding to the logits."),
      edges.length > LISTED
        ? h("p", { class: "quiet" }, `${plural(edges.length - LISTED, "smaller edge")} are in the graph alone.`)
        : null,
    );
    await chosen.show(edge, edges, asked());
  }

  /**
   * @param {CircuitSize} stop
   * @param {KnownCircuit} now
   * @returns {Child}
   */
  function aboutSize({ size, kept: some, faithfulness }, { estimates, circuit }) {
    const unread = size - some.length;
    return [
      h(
        "p",
        {},
        `The ${plural(size, "edge")} of ${count(estimates.n_edges)} with the largest estimated effects.`,
        unread
          ? ` ${unread} of them ${unread === 1 ? "is" : "are"} not drawn and ${unread === 1 ? "does" : "do"} nothing: no path from the embedding to the logits passes there.`
          : "",
      ),
      scores([
        faithful(faithfulness),
        circuit && circuit.edges.length === size
          ? ["faithfulness of the circuit found, of as many edges", circuit.faithfulness, "found"]
          : null,
      ]),
    ];
  }

  /**
   * @param {FoundCircuit} found
   * @param {KnownCircuit} now
   * @returns {Child}
   */
  function aboutCircuit(found, { estimates }) {
    return [
      h("p", {}, `${plural(found.edges.length, "edge")} of ${count(estimates.n_edges)} are enough.`),
      scores([
        faithful(found.faithfulness),
        [
          "completeness (1: nothing is left of the difference without these edges)",
          found.completeness,
          "completeness",
        ],
        [`faithfulness of the ${plural(found.edges.length, "largest edge")}`, found.largest.faithfulness, "largest"],
        [
          `faithfulness of ${plural(found.edges.length, "edge")} on paths drawn at random`,
          found.random_faithfulness,
          "random",
        ],
      ]),
    ];
  }

  /**
   * @param {number} value
   * @returns {[string, number, string]}
   */
  function faithful(value) {
    return ["faithfulness (0: predicts as on the corrupted text, 1: as on the clean one)", value, "faithfulness"];
  }

  /**
   * A table of names and numbers.
   * @param {([string, number, string] | null)[]} rows
   * @returns {HTMLElement}
   */
  function scores(rows) {
    return h(
      "table",
      {},
      rows.map(
        (row) =>
          row &&
          h(
            "tr",
            {},
            h("th", {}, row[0]),
            h("td", { class: "number", data: { testid: row[2], value: row[1] } }, figure(row[1])),
          ),
      ),
    );
  }

  /**
   * Say what both texts predict; return whether there is a circuit to find.
   * @param {TextPair} pair
   * @returns {boolean}
   */
  function describe({ why_not: whyNot, clean, corrupted }) {
    if (whyNot || !corrupted.length) {
      put(
        note,
        whyNot ??
          "Enter a second text with as many tokens and another prediction, such as this text with one word changed.",
      );
      return false;
    }
    const at = Math.min(context.token, clean.length - 1);
    if (clean[at].id !== corrupted[at].id) {
      put(
        note,
        clean.length > 1 ? `At token ${at} the clean text predicts ` : "The clean text predicts ",
        token(clean[at]),
        " and the corrupted text ",
        token(corrupted[at]),
        "; the circuit is that of the difference of their logits.",
      );
      return true;
    }
    const others = clean.flatMap((one, i) => (one.id === corrupted[i].id ? [] : [i]));
    put(
      note,
      clean.length > 1 ? `At token ${at} both texts predict ` : "Both texts predict ",
      token(clean[at]),
      others.length ? ", so there is no difference to explain. They differ after " : "; enter another text.",
      others.slice(-PLACES).map((place) => [
        h(
          "button",
          {
            type: "button",
            class: "act",
            data: { place },
            on: { click: () => context.set({ token: place }) },
          },
          `token ${place}`,
        ),
        " ",
      ]),
    );
    return false;
  }

  const resized = new ResizeObserver(() => redraw?.());
  resized.observe(root);
  const stopTheme = onTheme(() => chosen.colour());
  return {
    async draw() {
      box.show();
      if (running !== about()) {
        search.stop();
        put(progress);
      }
      const pair = await context.request("text_pair", texted());
      box.hidden = Boolean(pair.why_not) && !context.state.patch_from; // whatever the second text
      const isReady = describe(pair);
      search.hidden = !isReady;
      // A saved page has the circuit that was found before, and nothing to press.
      if (
        isReady &&
        !known() &&
        isAvailable("edge_effects", asked()) &&
        isAvailable("find_circuit", asked()) &&
        isSaved
      )
        kept.set(about(), {
          estimates: await context.request("edge_effects", asked()),
          circuit: (await context.request("find_circuit", asked())).found,
        });
      put(code, isReady ? python(await inPython(context, pair)) : "");
      live(texts);
      if (isReady) await show();
      else body.hidden = true;
    },
    close() {
      resized.disconnect();
      stopTheme();
      box.close();
      search.stop();
    },
  };
}

/**
 * The same in Python.
 * @param {ViewContext} context
 * @param {TextPair} pair
 * @returns {Promise<string>}
 */
async function inPython(context, { clean, corrupted }) {
  const { model, token: place } = context;
  const { lines, inputs } = preamble(context);
  const tokens = await context.request("tokenize", { forward_pass: context.patchPass });
  const isPair = model.kind === "seq2seq";
  const ids = (isPair ? tokens.source : tokens.text).map((one) => one.id);
  const cut = clean.length > 1 && model.kind !== "encoder" ? `[:, :${place + 1}]` : "";
  const metric = `metric=lambda logits: logits[0, ${place}, ${clean[place]?.id}] - logits[0, ${place}, ${corrupted[place]?.id}]`;
  const both = isPair ? [`(other, target${cut})`, `(source, target${cut})`] : [`other${cut}`, `${inputs}${cut}`];
  const call = [...both, ...(model.kind === "encoder" && clean.length > 1 ? [metric] : [])].join(", ");
  return [
    ...lines,
    `other = torch.tensor([[${ids.join(", ")}]])`,
    `effects = gh.inspection.edge_attribution(model, ${call})`,
    `found = gh.circuit(model, ${call})`,
    "print(found, *found.edges.items(), sep='\\n')",
  ].join("\n");
}
