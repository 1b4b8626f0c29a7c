// The pieces that figures are made of: matrices, bars, curves, tables, named numbers, tokens, shapes and dials.

import { chart } from "glasshouse/chart.js";
import { h, s } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { bars as barRows } from "glasshouse/widgets.js";
import { matrix } from "glasshouse/views/notes/matrix.js";

const SERIES = ["var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)"];
const SIDE = 13; // pixels of a box of a shape for each power of two
const DIAL = 40; // pixels of the radius of a dial

/**
 * A number in few digits, or a whole one in full; the exact one in data-value.
 * @param {number | null} value
 * @returns {string}
 */
function number(value) {
  const isWhole =
    typeof value === "number" && (Number.isInteger(value) || (Math.abs(value) >= 1000 && Math.abs(value) < 1e6));
  return isWhole ? Math.round(value).toLocaleString("en").replace("-", "−") : short(value);
}

/**
 * @param {BarsPiece} piece
 * @returns {HTMLElement}
 */
function bars(piece) {
  const most = piece.most || Math.max(...piece.rows.map(([, value]) => Math.abs(value))) || 1;
  const rows = piece.rows.map(([name, value]) => ({
    name,
    value,
    title: `${name}: ${value}`,
    class: value < 0 ? "less" : "",
    share: Math.abs(value) / most,
    text: number(value),
  }));
  return h(
    "figure",
    { class: "piece" },
    h("figcaption", {}, piece.title),
    barRows(rows, { label: piece.title, full: number(most) }),
  );
}

/**
 * @param {LinesPiece} piece
 * @returns {DrawnPiece}
 */
function lines(piece) {
  const node = chart({
    title: piece.title,
    along: piece.along,
    height: 180,
    isMain: true,
    onmove: (at) => node.mark(at),
  });
  const values = piece.series.flatMap(({ y }) => y.filter((value) => value !== null));
  const near = (Math.max(...values) - Math.min(...values)) / 100;
  /** @type {(a: LinesPiece["series"][0], b: LinesPiece["series"][0]) => boolean} */
  const coincide = (a, b) =>
    a.y.length === b.y.length && a.y.every((value, i) => Math.abs((value ?? 0) - (b.y[i] ?? 0)) <= near);
  const series = piece.series.map((one, i) => {
    const { name, x, y } = one;
    const there = y.flatMap((value, i) => (value === null ? [] : [{ at: x[i], value }]));
    const dashed = piece.series.slice(0, i).some((other) => coincide(one, other));
    return {
      name: dashed ? `${name} (dashed)` : name,
      dashed,
      colour: SERIES[i % SERIES.length],
      x: there.map(({ at }) => at),
      y: there.map(({ value }) => value),
      dots: there.length < 30,
    };
  });
  const places = series.flatMap((one) => one.x);
  node.show({ series, log: piece.log, from: Math.min(...places), to: Math.max(...places) });
  const figure = h("div", { class: "piece" }, node, h("p", { class: "axis quiet" }, piece.along));
  return Object.assign(figure, { close: () => node.close() });
}

const WIDE = 6; // columns that fit in half the width

/**
 * @param {TablePiece} piece
 * @returns {HTMLElement}
 */
function table(piece) {
  /** @type {(value: string | number | null) => HTMLElement} */
  const cell = (value) =>
    typeof value === "number"
      ? h("td", { class: "number", data: { value } }, number(value))
      : h("td", {}, inline(value ?? ""));
  return h(
    "figure",
    { class: piece.head.length > WIDE ? "piece wide" : "piece" },
    h("figcaption", {}, inline(piece.title)),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": piece.title },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            piece.head.map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        h(
          "tbody",
          {},
          piece.rows.map((row) => h("tr", {}, row.map(cell))),
        ),
      ),
    ),
  );
}

/**
 * @param {FactsPiece} piece
 * @returns {HTMLElement}
 */
function facts(piece) {
  return h(
    "dl",
    { class: "piece named" },
    piece.facts.map(([name, value]) =>
      h(
        "div",
        {},
        h("dt", {}, name),
        h("dd", { data: { fact: name, value: value ?? "" } }, typeof value === "string" ? value : number(value)),
      ),
    ),
  );
}

/**
 * @param {TokensPiece} piece
 * @returns {HTMLElement}
 */
function tokens(piece) {
  return h(
    "figure",
    { class: "piece" },
    h("figcaption", {}, piece.title),
    h(
      "p",
      { class: "line" },
      piece.tokens.map(([text, marked]) => h("span", { class: marked ? "token selected" : "token" }, text)),
    ),
  );
}

/**
 * Boxes in proportion, on a scale of powers of two: x [6×64] · W [64×32] = q [6×32].
 * @param {ShapesPiece} piece
 * @returns {HTMLElement}
 */
function shapes(piece) {
  /** @type {(n: number) => string} */
  const size = (n) => `${SIDE * (1 + Math.log2(Math.max(1, n)) / 2)}px`;
  /** @type {(part: [string, number[]]) => HTMLElement} */
  const box = ([name, shape]) => {
    const [rows, columns] = shape.slice(-2);
    return h(
      "span",
      { class: "shaped" },
      h("span", { class: "box", style: { width: size(columns), height: size(rows) } }),
      h("b", {}, name),
      h("span", { class: "shape" }, shape.map((n) => n.toLocaleString("en")).join("×")),
    );
  };
  const count = piece.parts.length;
  /** @type {(i: number) => HTMLElement | null} */
  const sign = (i) =>
    i === count - 1 ? null : h("span", { class: "sign" }, count === 2 ? "→" : i === count - 2 ? "=" : "·");
  const said = piece.parts.map(([name, shape]) => `${name}, ${shape.join(" by ")}`).join("; ");
  return h(
    "p",
    { class: "piece shapes", role: "img", "aria-label": said },
    piece.parts.map((part, i) => [box(part), sign(i)]),
  );
}

/**
 * @param {DialsPiece} piece
 * @returns {HTMLElement}
 */
function dials(piece) {
  /** @type {(end: [number, number], kind: string) => SVGElement} */
  const hand = ([x, y], kind) => s("line", { x1: 0, y1: 0, x2: DIAL * x, y2: -DIAL * y, class: kind });
  return h(
    "div",
    { class: "piece dials" },
    piece.dials.map((one) =>
      h(
        "figure",
        { "aria-label": `${one.name} turned by ${short((180 * one.angle) / Math.PI)} degrees`, role: "img" },
        s(
          "svg",
          { viewBox: "-46 -46 92 92", width: 88, height: 88, "aria-hidden": "true" },
          s("circle", { r: DIAL, class: "rim" }),
          hand(one.before, "before"),
          hand(one.after, "after"),
        ),
        h(
          "figcaption",
          {},
          one.name,
          h("br"),
          h("span", { class: "quiet", data: { value: one.angle } }, `${short((180 * one.angle) / Math.PI)}°`),
        ),
      ),
    ),
  );
}

/** @type {{ [K in Piece["kind"]]: (piece: Extract<Piece, { kind: K }>) => DrawnPiece }} */
const KINDS = {
  matrix,
  bars,
  lines,
  table,
  facts,
  tokens,
  shapes,
  dials,
  text: (piece) => h("p", { class: "piece said" }, piece.text),
};

/**
 * Draw a piece; the element may have `close()`.
 * @param {Piece} piece
 * @returns {DrawnPiece}
 */
export function draw(piece) {
  /** @type {Record<string, (piece: any) => DrawnPiece>} */
  const kinds = KINDS; // each takes its own kind, which the compiler cannot follow
  return kinds[piece.kind](piece);
}

/**
 * A sentence with `code` and **strong** words, and the rest as `plain` draws it.
 * @param {string | number} text
 * @param {(part: string) => Child} [plain]
 * @returns {Child[]}
 */
export function inline(text, plain = (part) => part) {
  return String(text)
    .split(/(`[^`]+`|\*\*[^*]+\*\*|\[[^\]]+\]\([^)]+\))/)
    .map((part) => {
      if (part.startsWith("`")) return h("code", {}, part.slice(1, -1));
      if (part.startsWith("**")) return h("strong", {}, part.slice(2, -2));
      return plain(part.replace(/^\[([^\]]+)\]\([^)]+\)$/, "$1"));
    });
}
