// Small attention maps of all heads of all layers, each with its head type.

import { Superseded } from "glasshouse/api.js";
import { onTheme, ramp } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { penOf } from "glasshouse/pen.js";
import { clamp, count } from "glasshouse/number.js";
import { choice, panel } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { SCALES, SCORES, typeName } from "glasshouse/views/attention/selection.js";

const NAMELESS = "–";

/**
 * @param {AttentionSelection} selection
 * @returns {Part}
 */
export function heads(selection) {
  const { context } = selection;
  const { model } = context;
  const kinds =
    model.attentions.length > 1
      ? choice(
          "which attention",
          model.attentions.map((one) => [one.site, one.title]),
          (attention) => context.set({ attention }),
        )
      : null;
  const scale = choice(
    "colour",
    Object.entries(SCALES).map(([name, { title }]) => [name, title]),
    (one) => context.set({ attention_scale: one }),
  );
  const legend = h("div", { class: "scale-legend" });
  const grid = h("div", {
    class: "heads",
    role: "group",
    "aria-label": "all heads; move with the arrow keys",
    data: { testid: "heads" },
    on: { scroll: () => look(), keydown: walk },
  });
  const named = h("p", { class: "quiet named", data: { testid: "named" } });
  const note = h("p", { class: "quiet named", data: { testid: "heads-note" } });
  const controls = h(
    "div",
    { class: "controls" },
    kinds,
    h("span", { class: "labelled" }, h("span", { class: "name" }, "colour"), scale),
    legend,
  );
  const node = panel(
    "All heads",
    "Attention patterns of all heads: rows are queries, columns are keys, colour is the attention weight. Click a head to enlarge it.",
    controls,
    grid,
    named,
    note,
  );
  node.classList.add("all");
  if (kinds) kinds.dataset.testid = "kinds";
  scale.dataset.testid = "scale";
  /** @type {SmallMaps[]} */
  let rows = [];
  let built = "";
  /** @type {LayerMaps | null} */
  let pooling = null;
  /** @type {HTMLElement | null} */
  let marked = null; // the button of the selected head
  /** @type {HeadScores | null | undefined} */
  let scores; // head scores as shown; null: not loaded
  const stopTheme = onTheme(() => rows.forEach(paint));

  function build() {
    const { layers, site } = selection.kind;
    if (built === site) return;
    built = site;
    marked = null;
    scores = undefined;
    rows = Array.from({ length: layers }, (_, layer) => {
      const cells = Array.from({ length: model.n_heads }, (__, head) => {
        const canvas = h("canvas", { width: 1, height: 1, "aria-hidden": "true" });
        const label = h("span", { class: "label" });
        const button = h(
          "button",
          {
            type: "button",
            class: "small-map",
            "aria-pressed": "false",
            tabindex: "-1",
            data: { testid: `head-${layer}-${head}`, layer, head },
            on: { click: () => context.set({ layer, head }) },
          },
          canvas,
          label,
        );
        return { button, canvas, label, layer, head };
      });
      const line = h(
        "div",
        { class: "layer", style: { "--heads": model.n_heads, "--layers": layers } },
        h("span", { class: "name" }, h("span", { class: "word" }, "layer "), String(layer)),
        cells.map((one) => one.button),
      );
      return { line, cells, layer, loaded: "", small: null };
    });
    const top = h(
      "div",
      { class: "layer top", "aria-hidden": "true", style: { "--heads": model.n_heads, "--layers": layers } },
      h("span", {}),
      Array.from({ length: model.n_heads }, (_, head) =>
        h("span", { class: "name" }, head ? String(head) : "head 0"),
      ),
    );
    put(
      grid,
      top,
      rows.map((row) => row.line),
    );
  }

  function mark() {
    const chosen = rows[selection.layer]?.cells[selection.head]?.button;
    if (!chosen || chosen === marked) return;
    for (const button of [marked, chosen]) {
      button?.setAttribute("aria-pressed", String(button === chosen));
      if (button) button.tabIndex = button === chosen ? 0 : -1;
    }
    marked = chosen;
    const [inner, outer] = [chosen.getBoundingClientRect(), grid.getBoundingClientRect()];
    if (inner.top < outer.top) grid.scrollTop -= outer.top - inner.top + 8;
    else if (inner.bottom > outer.bottom) grid.scrollTop += inner.bottom - outer.bottom + 8;
    if (inner.left < outer.left) grid.scrollLeft -= outer.left - inner.left + 40;
    else if (inner.right > outer.right) grid.scrollLeft += inner.right - outer.right + 8;
  }

  /** @param {ElementEvent<KeyboardEvent>} event */
  function walk(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const from = event.target.closest(".small-map");
    if (!by || !from) return;
    event.preventDefault();
    const layer = clamp(Number(from.dataset.layer) + by[0], rows.length - 1);
    const head = clamp(Number(from.dataset.head) + by[1], model.n_heads - 1);
    rows[layer].cells[head].button.focus();
    context.set({ layer, head });
  }

  /** @param {SmallMaps} row */
  function paint({ small, cells }) {
    if (!small) return;
    const [, tall, wide] = small.shape;
    const colours = ramp();
    const { normalize } = selection;
    const shares = Array.from({ length: 256 }, (_, byte) => normalize(((byte - 1) / 254) ** 2)); // bytes are roots
    for (const { canvas, head } of cells) {
      if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, { width: wide, height: tall });
      const pen = penOf(canvas);
      const image = pen.createImageData(wide, tall);
      for (let i = 0; i < tall * wide; i += 1) {
        const byte = small.data[head * tall * wide + i];
        if (!byte) continue; // masked
        const at = 3 * Math.round(255 * shares[byte]);
        image.data.set([colours[at], colours[at + 1], colours[at + 2], 255], 4 * i);
      }
      pen.putImageData(image, 0, 0);
    }
  }

  const topic = () => JSON.stringify([context.forwardPass(), selection.kind.site]);

  /** Fetch the visible layers one by one, so that other requests need not wait for all of them. */
  async function fetchRows() {
    const now = topic();
    for (;;) {
      const [top, bottom] = [grid.scrollTop, grid.scrollTop + grid.clientHeight];
      const next = rows.find(
        ({ line, loaded }) => loaded !== now && line.offsetTop < bottom && line.offsetTop + line.offsetHeight > top,
      );
      if (!next) return;
      const found = await context.request("maps", {
        forward_pass: context.forwardPass(),
        attention: selection.kind.site,
        layer: next.layer,
      });
      if (topic() !== now) return;
      next.loaded = now;
      next.small = decodeTensor(found.maps);
      pooling = found;
      paint(next);
    }
  }

  function look() {
    context.page.wait(1);
    fetchRows()
      .catch(() => {})
      .finally(() => context.page.wait(-1));
  }

  /** @param {HeadScores | null} found */
  function name(found) {
    if (found === scores) return;
    scores = found;
    if (found) explain(found);
    for (const { cells } of rows) {
      for (const { button, label, layer, head } of cells) {
        const one = found?.heads[layer][head];
        const value = one?.label ? one[one.label] : undefined;
        put(
          label,
          one
            ? one.label
              ? [h("span", {}, typeName(one.label)), " ", h("b", {}, value?.toFixed(2))]
              : NAMELESS
            : "",
        );
        Object.assign(button.dataset, { label: one?.label ?? "", value: value ?? "" });
        button.setAttribute(
          "aria-label",
          `layer ${layer}, head ${head}${one ? `: ${one.label ? `${typeName(one.label)} ${value?.toFixed(2)}` : `${NAMELESS} no label`}` : ""}`,
        );
      }
    }
  }

  /** @param {HeadScores} found */
  function explain(found) {
    /** @type {Set<string | null>} */
    const used = new Set(found.heads.flat().map((one) => one.label));
    const said = Object.entries(SCORES).filter(([kind]) => used.has(kind));
    if (used.has(null)) said.push([NAMELESS, "none"]);
    put(
      named,
      "Labelled by the head score that most exceeds uniform attention: ",
      said.map(([kind, what], i) => [i ? "; " : "", h("b", {}, typeName(kind)), ` ${what}`]),
      ".",
    );
  }

  return {
    node,
    async draw(changed) {
      build();
      kinds?.show(selection.kind.site);
      scale.show(selection.scale);
      put(legend, scaleLegend(selection));
      mark();
      if (changed.has("attention_scale") || changed.has("tokens")) rows.forEach(paint);
      const now = topic();
      if (rows.every((row) => row.loaded !== now)) name(null);
      await fetchRows();
      let found;
      try {
        found = await context.request("scores", {
          forward_pass: context.forwardPass(),
          attention: selection.kind.site,
        });
      } catch (error) {
        if (error instanceof Superseded) throw error;
        put(named, `No head types here: ${error.message}`);
      }
      if (found) name(found);
      const said = [];
      if (pooling && Math.max(...pooling.pool_size) > 1)
        said.push(`Each cell is the maximum over ${pooling.pool_size[0]} × ${pooling.pool_size[1]} tokens.`);
      if (pooling && pooling.stride > 1)
        said.push(`Only every ${ordinal(pooling.stride)} query is drawn here; the large map has all.`);
      if (found && found.scored < found.of)
        said.push(`Head scores are computed on the first ${count(found.scored)} of ${count(found.of)} tokens.`);
      put(note, said.join(" "));
      note.hidden = !said.length;
    },
    close: stopTheme,
  };
}

/**
 * @param {number} n
 * @returns {string}
 */
function ordinal(n) {
  const end = n % 100 > 10 && n % 100 < 14 ? "th" : ({ 1: "st", 2: "nd", 3: "rd" }[n % 10] ?? "th");
  return `${n}${end}`;
}

/**
 * Colour legend: the colours stay, the ticks move.
 * @param {AttentionSelection} selection
 * @returns {Child[]}
 */
function scaleLegend(selection) {
  const { ticks: weights, normalize } = SCALES[selection.scale];
  const ticks = weights.map((weight) =>
    h("span", { style: { left: `${100 * normalize(weight)}%` } }, String(weight)),
  );
  const hidden = selection.kind.causal ? h("span", { class: "cannot" }, h("i", {}), "causal mask") : null;
  return [
    h(
      "span",
      { class: "labelled" },
      h("span", { class: "name" }, "weight"),
      h(
        "span",
        { class: "ramp", role: "img", "aria-label": "colours from no weight to all of it" },
        h("span", { class: "ticks", "aria-hidden": "true" }, ticks),
      ),
    ),
    hidden,
  ];
}
