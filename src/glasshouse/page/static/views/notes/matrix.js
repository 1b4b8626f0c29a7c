// A matrix in colours with its shape: signed or not, masked cells hatched, read by pointer and arrow keys.

import { balance, onTheme, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { penOf } from "glasshouse/pen.js";
import { clamp, short } from "glasshouse/number.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { cut } from "glasshouse/widgets.js";

const LETTER = 7.2; // pixels of a letter of a name
const LARGEST = 26; // pixels of a cell
const TALLEST = 440; // pixels of all rows, where they need not be read
const FEW = 12; // rows that are drawn higher than wide where there are many columns
const NAMED = 12; // pixels of a cell from which names fit
const TOP = 66; // pixels above for names of columns
const LONGEST = 12; // letters of a name
const FONT = "11.5px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

/**
 * Draw a piece; returns an element with `close()`.
 * @param {MatrixPiece} piece
 * @returns {DrawnPiece}
 */
export function matrix(piece) {
  const {
    shape: [rows, columns],
    data,
  } = decodeTensor(piece.values);
  const finite = data.filter(Number.isFinite);
  const most = finite.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
  const canvas = h("canvas", { "aria-hidden": "true" });
  const said = h("output", { class: "reading", "aria-live": "polite" });
  const [down, across] = piece.along;
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity);
  const high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  const label = `${piece.title}: ${rows} by ${columns}, from ${short(low)} to ${short(high)}; arrow keys read it`;
  const box = h(
    "div",
    {
      class: "matrix",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "map",
      "aria-label": label,
      data: { testid: "matrix" },
    },
    canvas,
  );
  const caption = h(
    "figcaption",
    {},
    piece.title,
    " ",
    h("span", { class: "shape" }, `${rows}×${columns}`),
    h("span", { class: "quiet range" }, finite.length ? ` ${short(low)} to ${short(high)}` : ""),
  );
  const node = h("figure", { class: "piece" }, caption, box, said);
  const cursor = { row: piece.row ?? 0, column: 0, on: false };
  let width = 0;
  let cell = 0;
  let left = 0;
  let top = 0;
  let tall = 0; // pixels of a row

  function measure() {
    const longest = piece.rows.reduce(
      (a, one) => Math.max(a, Math.min(LONGEST, [...one].length)),
      String(rows).length,
    );
    left = Math.min(0.34 * width, 12 + LETTER * longest);
    const named = piece.columns.length > 0;
    const fit = (width - left - (named ? 30 : 2)) / columns;
    cell = Math.max(1, Math.min(LARGEST, fit));
    top = named && cell >= NAMED ? TOP : 18;
    tall = Math.max(piece.rows.length ? 12 : 4, Math.min(rows <= FEW ? Math.max(cell, 20) : cell, TALLEST / rows));
  }

  function draw() {
    if (!width) return;
    measure();
    const fine = devicePixelRatio || 1;
    const [wide, high] = [width, top + rows * tall + 2];
    Object.assign(canvas, { width: Math.round(wide * fine), height: Math.round(high * fine) });
    canvas.style.setProperty("width", `${wide}px`);
    canvas.style.setProperty("height", `${high}px`);
    const pen = penOf(canvas);
    pen.scale(fine, fine);
    const style = getComputedStyle(box);
    /** @type {(name: string) => string} */
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    for (let i = 0; i < rows; i += 1) {
      for (let j = 0; j < columns; j += 1) {
        const value = data[i * columns + j];
        const [x, y] = [left + j * cell, top + i * tall];
        if (Number.isFinite(value)) {
          pen.fillStyle = piece.signed ? balance(value / most) : shade(value / most);
          pen.fillRect(x, y, Math.ceil(cell) - (cell > 6 ? 1 : 0), tall - (tall > 6 ? 1 : 0));
        } else {
          pen.strokeStyle = colour("quiet");
          pen.lineWidth = 0.6;
          pen.beginPath();
          pen.moveTo(x, y + tall - 1);
          pen.lineTo(x + cell - 1, y);
          pen.stroke();
        }
      }
    }
    Object.assign(pen, { font: FONT, textBaseline: "middle", textAlign: "right", fillStyle: colour("ink") });
    const every = [1, 2, 5, 10, 20, 50].find((one) => one * tall >= 12) ?? 100;
    for (let i = 0; i < rows; i += piece.rows.length ? Math.max(1, Math.ceil(11 / tall)) : every) {
      const text = piece.rows.length ? cut(piece.rows[i], Math.floor((left - 8) / LETTER)) : String(i);
      pen.fillStyle = i === piece.row ? colour("accent") : colour(piece.rows.length ? "ink" : "quiet");
      pen.fillText(text, left - 6, top + (i + 0.5) * tall);
    }
    nameColumns(pen, colour);
    /** @type {(row: number, column: number, count: number, name: string) => void} */
    const mark = (row, column, count, name) => {
      pen.strokeStyle = colour(name);
      pen.lineWidth = 2;
      pen.strokeRect(left + column * cell - 1, top + row * tall - 1, count * cell + 1, tall + 1);
    };
    if (piece.row !== null && piece.row < rows) mark(piece.row, 0, columns, "mark");
    if (cursor.on) mark(cursor.row, cursor.column, 1, "accent");
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {(name: string) => string} colour
   */
  function nameColumns(pen, colour) {
    pen.textAlign = "left";
    pen.fillStyle = colour("ink");
    if (piece.columns.length && cell >= NAMED) {
      for (let j = 0; j < columns; j += 1) {
        pen.save();
        pen.translate(left + (j + 0.6) * cell, top - 5);
        pen.rotate(-Math.max(Math.PI / 4, Math.asin(Math.min(1, 12 / cell))));
        pen.fillText(cut(piece.columns[j], 8), 0, 0);
        pen.restore();
      }
      return;
    }
    pen.fillStyle = colour("quiet");
    pen.textAlign = "center";
    const every = [1, 2, 5, 10, 20, 50].find((one) => one * cell >= 26) ?? 100;
    for (let j = 0; j < columns; j += every) pen.fillText(String(j), left + (j + 0.5) * cell, top - 9);
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  function tell(row, column) {
    Object.assign(cursor, { row, column });
    const value = data[row * columns + column];
    /** @type {(names: string[], i: number, what: string) => string} */
    const name = (names, i, what) => (names.length ? `“${names[i]}”` : `${what || "row"} ${i}`);
    const at = `${name(piece.rows, row, down)}, ${name(piece.columns, column, across || "column")}`;
    put(said, `${at}: ${Number.isFinite(value) ? short(value) : "masked"}`);
    said.dataset.value = String(value);
  }

  box.addEventListener("pointermove", (event) => {
    const [row, column] = [Math.floor((event.offsetY - top) / tall), Math.floor((event.offsetX - left) / cell)];
    if (row >= 0 && row < rows && column >= 0 && column < columns) tell(row, column);
  });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    if (cursor.on) tell(clamp(cursor.row + by[0], rows - 1), clamp(cursor.column + by[1], columns - 1));
    else tell(cursor.row, cursor.column);
    cursor.on = true;
    draw();
  });
  box.addEventListener("blur", () => {
    cursor.on = false;
    draw();
  });
  const watch = new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== width) {
      width = box.clientWidth;
      draw();
    }
  });
  watch.observe(box);
  const endTheme = onTheme(draw);
  return Object.assign(node, {
    close() {
      watch.disconnect();
      endTheme();
    },
  });
}
