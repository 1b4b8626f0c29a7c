// The whole model as one picture: a column for each token, upwards through the blocks, with arcs where heads move
// something from one column to another.

import { headColour, shade } from "glasshouse/colour.js";
import { s } from "glasshouse/dom.js";
import { clamp, percent } from "glasshouse/number.js";
import { cut } from "glasshouse/widgets.js";
import { PARTS } from "glasshouse/views/overview/flow.js";

const GUTTER = 62; // pixels of the names of the layers
const GAP = 26; // between encoder and decoder
const TALL = { attention: 34, cross: 34, feedforward: 20 }; // pixels of each part of a block
const MOST = 560; // pixels of all blocks together, above which they are drawn flatter
const [NARROW, WIDE] = [15, 76]; // pixels of a column
const FLAT = 46; // pixels of a column from which tokens are written horizontally
const CHARACTER = 7.6;
const FAINT = 0.02; // the smallest share that is drawn
const THICK = 10; // pixels of an arc whose share is 1; others by the square root, which keeps small ones apart

/**
 * Draw the stacks within so many pixels.
 * @param {Flow[]} flows
 * @param {PictureOptions} options
 * @returns {SVGSVGElement}
 */
export function picture(flows, { room, selected, layer, outcome, zoom, select }) {
  const columns = flows.reduce((sum, flow) => sum + flow.width, 0);
  const sides = flows.length * GUTTER + (flows.length - 1) * GAP;
  const width = clamp((room - sides - 8) / columns, WIDE);
  const column = Math.max(NARROW, width);
  const isFlat = column >= FLAT;
  const depth = Math.max(...flows.map((flow) => flow.layers * high(flow)));
  const scale = Math.min(1, MOST / depth);
  const [above, below] = [34, isFlat ? 26 : 86];
  const floor = above + depth * scale + 14; // where the embeddings are
  /** @type {Placed[]} */
  const placed = [];
  let x = 0;
  for (const flow of flows) {
    placed.push({ flow, x: x + GUTTER, column, floor, scale });
    x += GUTTER + flow.width * column + GAP;
  }
  const wide = x - GAP + 8;
  const tall = floor + below;
  const tops = placed.map((one) => floor - 14 - one.flow.layers * high(one.flow) * scale);
  return s(
    "svg",
    {
      class: "overview-picture",
      width: wide,
      height: tall,
      viewBox: `0 0 ${wide} ${tall}`,
      role: "group",
      "aria-label": `${flows.map((flow) => flow.name).join(" and ")}: tokens at the bottom, predictions at the top`,
      data: { testid: "overview-picture" },
    },
    placed.map((one, i) => [
      stackOf(one, placed[0], tops[0], { selected, layer, zoom, select }),
      tokensOf(one, isFlat, select, selected),
      s(
        "text",
        { class: "end", x: one.x - 8, y: tops[i] - 8, "text-anchor": "end" },
        one.flow.isLast ? "out" : "memory",
      ),
      s("text", { class: "end", x: one.x - 8, y: floor + 16, "text-anchor": "end" }, "in"),
      one.flow.isLast && outcome ? outcomeOf(one, selected, tops[i], outcome) : null,
    ]),
  );
}

/**
 * What comes out of the selected column, written beside it on the side that has room.
 * @param {Placed} placed
 * @param {number} selected
 * @param {number} top
 * @param {string} outcome
 * @returns {Child}
 */
function outcomeOf(placed, selected, top, outcome) {
  const { flow } = placed;
  const isRight = 2 * (selected - flow.start) >= flow.width;
  const x = centre(placed, selected) + ((isRight ? 1 : -1) * placed.column) / 2;
  return s("text", { class: "outcome", x, y: top - 16, "text-anchor": isRight ? "end" : "start" }, outcome);
}

/** @param {Flow} flow */
function high(flow) {
  return flow.parts.reduce((sum, part) => sum + TALL[part], 0);
}

/**
 * @param {Placed} placed
 * @param {number} place
 */
function centre({ flow, x, column }, place) {
  return x + (place - flow.start + 0.5) * column;
}

/**
 * The streams and blocks of one stack, the first block at the bottom.
 * @param {Placed} placed
 * @param {Placed} memory
 * @param {number} memoryTop
 * @param {Omit<PictureOptions, "room" | "outcome">} options
 * @returns {Child}
 */
function stackOf(placed, memory, memoryTop, { selected, layer: chosen, zoom, select }) {
  const { flow, x, column, floor, scale } = placed;
  const places = Array.from({ length: flow.width }, (_, i) => flow.start + i);
  const top = floor - 14 - flow.layers * high(flow) * scale;
  const lit = flow.isLast ? selected : -1;
  /** @type {Child[]} */
  const shapes = places.map((place) =>
    s("rect", {
      class: place === lit ? "column lit" : "column",
      x: centre(placed, place) - column / 2,
      y: top - 6,
      width: column,
      height: floor - top + 6,
      data: { place },
      on: flow.isLast ? { click: () => select(place) } : {},
    }),
  );
  for (const place of places)
    shapes.push(
      s("line", {
        class: place === lit ? "stream lit" : "stream",
        x1: centre(placed, place),
        x2: centre(placed, place),
        y1: floor,
        y2: top - 6,
      }),
    );
  let y = floor - 14;
  for (let layer = 0; layer < flow.layers; layer += 1) {
    /** @type {Child[]} */
    const inside = [];
    const bottom = y;
    for (const part of flow.parts) {
      const next = y - TALL[part] * scale;
      if (part === "feedforward") inside.push(boxes(placed, layer, [y, next], { places, lit, zoom }));
      else inside.push(arcs(placed, part, layer, [y, next], { places, lit, memory, memoryTop, zoom }));
      y = next;
    }
    const name = `layer ${layer}`;
    const act = () => zoom({ layer, site: flow.site("attention") });
    shapes.push(
      s(
        "g",
        { class: "layer", data: { layer } },
        s("line", { class: "border", x1: x - 4, x2: x + flow.width * column, y1: y, y2: y }),
        inside,
        s(
          "g",
          {
            class: flow.isLast && layer === chosen ? "name chosen" : "name",
            role: "button",
            tabindex: 0,
            "aria-label": `${flow.prefix ? `${flow.name}, ` : ""}${name}: zoom in`,
            data: { testid: `overview-${flow.name}-${layer}` },
            on: {
              click: act,
              keydown: (event) => {
                if (event.key !== "Enter" && event.key !== " ") return;
                event.preventDefault();
                act();
              },
            },
          },
          s("rect", {
            x: x - GUTTER + 2,
            y: (y + bottom) / 2 - 9,
            width: GUTTER - 10,
            height: 18,
            rx: 5,
          }),
          s("text", { x: x - GUTTER / 2 - 3, y: (y + bottom) / 2, "text-anchor": "middle" }, name),
        ),
      ),
    );
  }
  return s("g", { class: "stack", data: { stack: flow.name } }, shapes);
}

/**
 * Feed-forward: a box on each column, darker the more it adds.
 * @param {Placed} placed
 * @param {number} layer
 * @param {[number, number]} rows
 * @param {{ places: number[], lit: number, zoom: PictureOptions["zoom"] }} options
 * @returns {Child[]}
 */
function boxes(placed, layer, [bottom, top], { places, lit, zoom }) {
  const { flow, column } = placed;
  const [wide, tall] = [Math.min(30, column * 0.7), (bottom - top) * 0.62];
  return places.map((place) => {
    const share = flow.share("feedforward", layer, place);
    return s(
      "rect",
      {
        class: place === lit ? "box lit" : "box",
        x: centre(placed, place) - wide / 2,
        y: (bottom + top - tall) / 2,
        width: wide,
        height: tall,
        rx: 3,
        fill: shade(share),
        data: { part: "feedforward", layer, place, value: share },
        on: { click: () => zoom({ layer, site: flow.site("attention") }) },
      },
      s("title", {}, `feed-forward ${layer} adds ${percent(share)} at ${flow.tokens[place].text}`),
    );
  });
}

/**
 * Attention: arcs from the column that a head reads to the one that it writes to. Of the selected column those of all
 * heads, in their colours; of the others the largest.
 * @param {Placed} placed
 * @param {OverviewPart} part
 * @param {number} layer
 * @param {[number, number]} rows
 * @param {{ places: number[], lit: number, memory: Placed, memoryTop: number, zoom: PictureOptions["zoom"] }} options
 * @returns {Child[]}
 */
function arcs(placed, part, layer, [bottom, top], { places, lit, memory, memoryTop, zoom }) {
  const { flow } = placed;
  const order = [...places.filter((place) => place !== lit), ...places.filter((place) => place === lit)];
  return order.flatMap((place) => {
    const all = flow.moved(part, layer, place).filter((one) => one.share >= FAINT);
    const drawn = place === lit ? all.reverse() : all.slice(0, 1);
    return drawn.map((one) => {
      const [x2, y2] = [centre(placed, place), top + 3];
      const crosses = part === "cross";
      const from = crosses ? memory : placed;
      const isInside = one.key >= from.flow.start && one.key < from.flow.stop;
      const x1 = isInside ? centre(from, one.key) : from.x - 6; // from before the window
      const y1 = crosses ? memoryTop - 6 : bottom;
      const middle = crosses ? (x1 + x2) / 2 : 0;
      const d = crosses
        ? `M${x1} ${y1} C${middle} ${y1 - 26} ${middle} ${y2} ${x2} ${y2}`
        : `M${x1} ${y1} C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`;
      const isOwn = place === lit;
      const key = flow.keyToken(part, one.key);
      return s(
        "path",
        {
          class: `arc ${isOwn ? "own" : "other"} ${part}`,
          d,
          stroke: isOwn || !flow.isLast ? headColour(one.head, flow.nHeads) : undefined,
          "stroke-width": ((isOwn ? 1 : 0.5) * THICK * Math.sqrt(one.share)).toFixed(2),
          data: { part, layer, head: one.head, place, key: one.key, value: one.share },
          on: isOwn ? { click: () => zoom({ layer, head: one.head, key: one.key, site: flow.site(part) }) } : {},
        },
        s(
          "title",
          {},
          `${PARTS[part]} head ${layer}.${one.head} adds ${percent(one.share)} at ${flow.tokens[place].text}; it moves most from ` +
            `${key.text}, token ${one.key} (attention weight ${percent(one.weight)})`,
        ),
      );
    });
  });
}

/**
 * The tokens below their columns.
 * @param {Placed} placed
 * @param {boolean} isFlat
 * @param {(place: number) => void} select
 * @param {number} selected
 * @returns {Child[]}
 */
function tokensOf(placed, isFlat, select, selected) {
  const { flow, column, floor } = placed;
  const most = isFlat ? Math.max(3, Math.floor(column / CHARACTER)) : 11;
  return Array.from({ length: flow.width }, (_, i) => {
    const place = flow.start + i;
    const [x, y] = [centre(placed, place), floor + 14];
    return s(
      "text",
      {
        class: flow.isLast && place === selected ? "word lit" : "word",
        x,
        y,
        "text-anchor": isFlat ? "middle" : "end",
        transform: isFlat ? undefined : `rotate(-60 ${x} ${y})`,
        on: flow.isLast ? { click: () => select(place) } : {},
      },
      cut(flow.tokens[place].text, most),
    );
  });
}
