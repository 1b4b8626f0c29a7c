// The table: rows are layers, columns are tokens. Only visible tiles are requested.

import { Superseded } from "glasshouse/api.js";
import { ink, ramp, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { panel, token } from "glasshouse/widgets.js";
import { logitLens } from "glasshouse/views/residual/logit_lens.js";
import { norms } from "glasshouse/views/residual/norms.js";
import { chosenRow, depth, rowName, select } from "glasshouse/views/residual/selection.js";
import { clamp } from "glasshouse/number.js";

const COLUMNS = 16; // positions of a tile
const ROWS = 12; // layers of a tile
const NARROW = 64; // pixels of a cell at least
const WIDE = 128; // and at most
const HIGH = 36;
const SIDE = 74; // of the names of the layers

/**
 * @param {ViewContext} context
 * @param {boolean} reads
 * @returns {Part & { colour: () => void, close: () => void }}
 */
export function table(context, reads) {
  /** @type {TableContent<any, any>} */
  const content = reads ? logitLens(context, colourAll) : norms(context, colourAll);
  const column = h("div", { class: "lens-column", "aria-hidden": "true" });
  const body = h("div", { class: "lens-body" }, column);
  const above = h("div", { class: "lens-above", hidden: !context.model.predicts_tokens });
  const below = h("div", { class: "lens-below" });
  const names = h("div", { class: "lens-names", "aria-hidden": "true" });
  const box = h(
    "div",
    {
      class: "lens",
      role: "grid",
      tabindex: "0",
      "aria-label": `${content.title}: rows are layers, columns are tokens`,
      data: { testid: "lens" },
      on: { scroll: () => scrolled(), keydown: walk, click: picked },
    },
    names,
    h("div", { class: "lens-sheet" }, above, body, below),
  );
  const scale = h("span", { class: "lens-scale" });
  const legend = h("div", { class: "legend", data: { testid: "lens-legend" } });
  const controls = h("div", { class: "controls" }, content.controls, legend);
  const node = panel(content.title, content.about, controls, box);
  /** @type {Map<string, { node: HTMLElement, cells: DrawnCell<any>[] }>} */
  const tiles = new Map();
  let shown = ""; // the forward pass of the tiles
  let width = NARROW;

  function lay() {
    const { length } = context.row;
    const rows = depth(context);
    width = Math.max(NARROW, Math.min(WIDE, Math.floor((controls.clientWidth - SIDE - 3) / length)));
    for (const one of [above, body, below]) one.style.width = `${length * width}px`;
    body.style.height = `${rows * HIGH}px`;
    box.setAttribute("aria-rowcount", String(rows));
    box.setAttribute("aria-colcount", String(length));
    const labels = Array.from({ length: rows }, (_, i) => h("span", {}, rowName(rows - 1 - i)));
    /** @type {(text: string) => HTMLElement} */
    const end = (text) => h("span", { class: "lens-end" }, text);
    put(
      names,
      context.model.predicts_tokens ? end(context.model.kind === "encoder" ? "target" : "next") : null,
      labels,
      end("token"),
    );
  }

  /**
   * The tiles in view, by name: the first row from the top and the first column.
   * @returns {Map<string, [number, number]>}
   */
  function visibleTiles() {
    const left = Math.max(0, Math.floor(box.scrollLeft / width));
    const right = Math.min(context.row.length, Math.ceil((box.scrollLeft + box.clientWidth - SIDE) / width) + 1);
    const top = Math.max(0, Math.floor(box.scrollTop / HIGH) - 1);
    const bottom = Math.min(depth(context), Math.ceil((box.scrollTop + box.clientHeight) / HIGH));
    /** @type {Map<string, [number, number]>} */
    const found = new Map();
    for (let r = Math.floor(top / ROWS) * ROWS; r < bottom; r += ROWS)
      for (let c = Math.floor(left / COLUMNS) * COLUMNS; c < right; c += COLUMNS) found.set(`${r} ${c}`, [r, c]);
    return found;
  }

  /** @param {string} name */
  function remove(name) {
    tiles.get(name)?.node.remove();
    tiles.delete(name);
  }

  async function ensure() {
    const forwardPass = context.forwardPass();
    const key = JSON.stringify(forwardPass);
    if (key !== shown) {
      [...tiles.keys()].forEach(remove);
      put(above);
      put(below);
      shown = key;
      content.forget?.();
    }
    const inView = visibleTiles();
    [...tiles.keys()].filter((name) => !inView.has(name)).forEach(remove);
    await Promise.all(
      [...inView].filter(([name]) => !tiles.has(name)).map(([name, [r, c]]) => load(forwardPass, name, r, c)),
    );
    mark();
  }

  /**
   * @param {ForwardPass} forwardPass
   * @param {string} name
   * @param {number} r
   * @param {number} c
   * @returns {Promise<void>}
   */
  async function load(forwardPass, name, r, c) {
    const key = shown;
    const rows = depth(context);
    const stop = Math.min(context.row.length, c + COLUMNS);
    const layers = Array.from({ length: Math.min(rows - r, ROWS) }, (_, i) => rows - 1 - r - i);
    const found = await context.request(content.endpoint, { forward_pass: forwardPass, layers, start: c, stop });
    if (key !== shown || tiles.has(name)) return;
    const cells = content.cells(found, stop - c).map((line, i) => line.map((one, j) => make(one, layers[i], c + j)));
    const lines = layers.map((layer, i) =>
      h(
        "div",
        { class: "lens-row", role: "row", "aria-rowindex": rows - layer, style: { height: `${HIGH}px` } },
        cells[i].map((one) => one.node),
      ),
    );
    const tile = {
      node: h("div", { class: "lens-tile", style: { left: `${c * width}px`, top: `${r * HIGH}px` } }, lines),
      cells: cells.flat(),
    };
    tiles.set(name, tile);
    body.append(tile.node);
    colour(tile);
    ends(found, c, stop);
  }

  /**
   * Target tokens above and input tokens below the columns of a tile.
   * @param {LensResponse | NormsResponse} found
   * @param {number} start
   * @param {number} stop
   */
  function ends(found, start, stop) {
    if (below.querySelector(`[data-start="${start}"]`)) return;
    /** @type {(tokens: (Token | null)[], kind: string) => HTMLElement} */
    const strip = (tokens, kind) =>
      h(
        "div",
        { class: "lens-strip", "aria-hidden": "true", data: { start }, style: { left: `${start * width}px` } },
        tokens.map((one, i) =>
          h(
            "span",
            { class: kind, style: { width: `${width}px` }, data: { place: start + i } },
            one ? token(one) : "",
          ),
        ),
      );
    below.append(strip(context.row.slice(start, stop), "lens-token"));
    if ("targets" in found)
      above.append(
        strip(
          found.targets.map((id) => (id === null ? null : found.token_info[id])),
          "lens-true",
        ),
      );
  }

  /** @type {(row: number, place: number) => string} */
  const idOf = (row, place) => `lens-${context.checkpoint}-${row}-${place}`;

  /**
   * @param {TableCell<any>} one
   * @param {number} row
   * @param {number} place
   * @returns {DrawnCell<any>}
   */
  function make(one, row, place) {
    const figure = h("span", { class: "lens-figure" });
    const cell = h(
      "div",
      {
        class: "lens-cell",
        id: idOf(row, place),
        role: "gridcell",
        "aria-colindex": place + 1,
        "aria-description": `after ${rowName(row)}, token ${place}: ${one.said}`,
        data: { row, place, ...one.data },
        style: { width: `${width}px` },
      },
      one.word === undefined ? null : h("span", { class: "lens-word" }, one.word),
      figure,
    );
    return { node: cell, figure, data: one.data };
  }

  /** @param {{ cells: DrawnCell<any>[] }} tile */
  function colour({ cells }) {
    for (const { node: cell, figure, data } of cells) {
      const share = content.share(data);
      cell.style.background = shade(share);
      cell.style.color = ink(share);
      put(figure, content.figure(data));
    }
  }

  function colourAll() {
    drawLegend();
    tiles.forEach(colour);
  }

  function drawLegend() {
    const [low, high] = content.legend();
    const colours = ramp();
    const stops = [0, 64, 128, 192, 255].map(
      (i) => `rgb(${colours[3 * i]}, ${colours[3 * i + 1]}, ${colours[3 * i + 2]})`,
    );
    scale.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    put(legend, h("span", {}, low), scale, h("span", {}, high));
  }

  function mark() {
    const number = chosenRow(context);
    Object.assign(column.style, { left: `${context.token * width}px`, width: `${width}px` });
    box.querySelector(".lens-cell[aria-selected]")?.removeAttribute("aria-selected");
    below.querySelector(".lens-chosen")?.classList.remove("lens-chosen");
    const id = idOf(number, context.token);
    const one = document.getElementById(id);
    one?.setAttribute("aria-selected", "true");
    below.querySelector(`[data-place="${context.token}"]`)?.classList.add("lens-chosen");
    box.setAttribute("aria-activedescendant", one ? id : "");
    for (const [i, name] of names.querySelectorAll("span:not(.lens-end)").entries())
      name.classList.toggle("lens-chosen", depth(context) - 1 - i === number);
  }

  /** Bring the selected cell into view. */
  function reveal() {
    const left = context.token * width;
    const room = box.clientWidth - SIDE;
    if (left < box.scrollLeft || left + width > box.scrollLeft + room) box.scrollLeft = left - room / 2 + width / 2;
    const top = (depth(context) - 1 - chosenRow(context)) * HIGH;
    if (top < box.scrollTop || top + 3 * HIGH > box.scrollTop + box.clientHeight)
      box.scrollTop = top - box.clientHeight / 2;
  }

  /** @type {number | undefined} */
  let waiting;
  function scrolled() {
    clearTimeout(waiting);
    waiting = setTimeout(async () => {
      context.page.wait(1);
      try {
        await ensure();
      } catch (error) {
        if (!(error instanceof Superseded)) context.page.say(error.message, true);
      } finally {
        context.page.wait(-1);
      }
    }, 40);
  }

  /** @param {ElementEvent<MouseEvent>} event */
  function picked(event) {
    const one = event.target.closest("[data-place]");
    const row = one?.dataset.row;
    if (one) select(context, Number(one.dataset.place), row === undefined ? undefined : Number(row));
  }

  /** @param {KeyboardEvent} event */
  function walk(event) {
    const number = chosenRow(context);
    const to = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (event.key === "Home") select(context, 0, number);
    else if (event.key === "End") select(context, context.row.length - 1, number);
    else if (to) select(context, context.token + to[0], clamp(number + to[1], depth(context) - 1));
    else return;
    event.preventDefault();
  }

  const watch = new ResizeObserver(() => {
    const before = width;
    lay();
    if (width !== before) {
      shown = "";
      scrolled();
    }
  });
  watch.observe(controls);

  return {
    node,
    async draw(changed) {
      content.draw();
      drawLegend();
      if (changed.has("tokens")) lay();
      if (changed.has("residual_color")) tiles.forEach(colour);
      if (["tokens", "token", "layer", "residual_embed"].some((name) => changed.has(name))) reveal();
      mark();
      await ensure();
    },
    colour: colourAll,
    close: () => watch.disconnect(),
  };
}
