// A heatmap of any size on a canvas, with scrolling, zoom and selection.

import { onTheme } from "glasshouse/colour.js";
import { h } from "glasshouse/dom.js";
import { draw, LABELLED, LETTER } from "glasshouse/heatmap/drawing.js";
import { TILE, Tiles } from "glasshouse/heatmap/tiles.js";
import { clamp } from "glasshouse/number.js";

const WIDEST = 72; // pixels of a cell
const TALLEST = 640; // pixels of the whole
const CLOSE = 30; // pixels of a cell in close-up
const STEP = 2; // of one zoom

/**
 * Options: label; read(cell), called with the cell {row, column, side, value} that is pointed at, or null;
 * pick(row, column), called on selection. A value below 0 is a masked cell, drawn hatched.
 */
export class Heatmap {
  /** @param {HeatmapOptions} options */
  constructor({ label, read, pick }) {
    this.read = read;
    this.pick = pick;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.space = h("div", { class: "space" }, this.canvas);
    this.node = h(
      "div",
      {
        class: "heatmap",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "map",
        "aria-label": label,
        on: {
          scroll: () => this.moved(),
          pointermove: (event) => this.point(event),
          pointerleave: () => this.leave(),
          click: (event) => this.click(event),
          wheel: (event) => this.wheel(event),
          keydown: (event) => this.key(event),
          focus: () => this.paint(),
          blur: () => this.paint(),
        },
      },
      this.space,
    );
    this.node.addEventListener("wheel", (event) => event.ctrlKey && event.preventDefault(), { passive: false });
    this.tiles = new Tiles(() => this.paint());
    /** @type {HeatmapMap | null} */
    this.map = null;
    this.cell = 0;
    this.longest = 2; // letters of the names of rows
    this.width = 0;
    this.formerLeast = 0;
    this.frame = 0; // that is requested
    /** @type {Record<string, string> | null} */
    this.colours = null;
    /** @type {{ row: number, column: number } | null} */
    this.cursor = null;
    this.watch = new ResizeObserver(() => this.resized());
    this.watch.observe(this.node);
    this.stopTheme = onTheme(() => {
      this.colours = null;
      this.paint();
    });
  }

  close() {
    this.watch.disconnect();
    this.stopTheme();
    cancelAnimationFrame(this.frame);
    this.map = null;
    this.tiles.open(null);
  }

  /**
   * Show a map: {name, fetch(level, row, column) (null where there is no such tile), rows, columns (their tokens), row,
   * column (those selected), scale (a name), normalize(value) (its colour, 0 to 1), isEmpty(row, column) (whether the cell and
   * all above and right of it are masked)}. Resolves when everything in view is loaded.
   * @param {HeatmapMap} map
   * @returns {Promise<void>}
   */
  async show(map) {
    const old = this.map;
    this.map = map;
    this.tiles.open(map);
    if (old?.rows !== map.rows) this.longest = map.rows.reduce((most, one) => Math.max(most, one.text.length), 2);
    const resized = !old || old.rows.length !== map.rows.length || old.columns.length !== map.columns.length;
    if (resized) {
      this.cursor = null;
      this.fit();
    } else if (old.row !== map.row || old.column !== map.column) this.reveal(map.row, map.column);
    this.paint();
    await this.load();
  }

  /** The map, where there is one. */
  get shown() {
    return /** @type {HeatmapMap} */ (this.map);
  }

  // Sizes

  get isLabelled() {
    return this.cell >= LABELLED;
  }

  get left() {
    return this.isLabelled ? this.names : 40;
  }

  get top() {
    return this.isLabelled ? 70 : 22;
  }

  get right() {
    return this.isLabelled ? 48 : 10; // slanted names reach over the last column
  }

  /** The width of the longest name of a row, within limits. */
  get names() {
    return Math.min(104, 0.3 * this.node.clientWidth, 18 + LETTER * this.longest);
  }

  /** The size of a cell at which the whole map is in view. */
  get least() {
    const { rows, columns } = this.shown;
    const width = this.node.clientWidth;
    /** @type {(left: number, top: number, right: number) => number} */
    const size = (left, top, right) =>
      Math.min(WIDEST, (width - left - right) / columns.length, (TALLEST - top - 4) / rows.length);
    const labelled = size(this.names, 70, 48);
    return labelled >= LABELLED ? labelled : Math.min(LABELLED - 0.01, size(40, 22, 10));
  }

  fit() {
    this.cell = this.least;
    this.layOut();
    this.node.scrollTo(0, 0);
    this.moved();
  }

  layOut() {
    const { rows, columns } = this.shown;
    const [width, height] = [
      this.left + columns.length * this.cell + this.right,
      this.top + rows.length * this.cell + 4,
    ];
    this.node.style.setProperty(
      "height",
      `${Math.ceil(Math.min(TALLEST, this.top + rows.length * this.least + 6))}px`,
    );
    this.space.style.setProperty("width", `${Math.floor(width)}px`);
    this.space.style.setProperty("height", `${Math.floor(height)}px`);
    Object.assign(this.node.dataset, { cell: this.cell, left: this.left, top: this.top });
  }

  resized() {
    if (!this.map || !this.node.clientWidth) return;
    const whole = this.width ? this.cell <= this.formerLeast * 1.001 : true;
    if (this.width !== this.node.clientWidth) {
      this.width = this.node.clientWidth;
      if (whole || this.cell < this.least) this.cell = this.least;
      this.formerLeast = this.least;
      this.layOut();
    }
    this.moved();
  }

  /**
   * Make cells larger or smaller, and keep what lies at a point of the node where it is.
   * @param {number} factor
   * @param {number} [x]
   * @param {number} [y]
   */
  zoom(factor, x = this.node.clientWidth / 2, y = this.node.clientHeight / 2) {
    if (!this.map) return;
    const { node } = this;
    const column = (x - this.left + node.scrollLeft) / this.cell;
    const row = (y - this.top + node.scrollTop) / this.cell;
    this.cell = Math.max(this.least, Math.min(WIDEST, this.cell * factor));
    this.layOut();
    node.scrollTo(column * this.cell - x + this.left, row * this.cell - y + this.top);
    this.moved();
  }

  /**
   * Zoom in or out by a step, round the selected cell where it is in view.
   * @param {number} by
   */
  step(by) {
    if (!this.map) return;
    const at = this.cursor ?? this.map;
    const x = this.left + (at.column + 0.5) * this.cell - this.node.scrollLeft;
    const y = this.top + (at.row + 0.5) * this.cell - this.node.scrollTop;
    const inside = x > this.left && y > this.top && x < this.node.clientWidth && y < this.node.clientHeight;
    this.zoom(by > 0 ? STEP : 1 / STEP, inside ? x : undefined, inside ? y : undefined);
  }

  /** Make the selected cell and those round it large enough to be read. */
  closeUp() {
    if (!this.map) return;
    this.zoom(CLOSE / this.cell);
    this.reveal(this.map.row, this.map.column, true);
  }

  /**
   * Scroll so far that a cell is in view, or in the middle of it.
   * @param {number} row
   * @param {number} column
   * @param {boolean} [middle]
   */
  reveal(row, column, middle = false) {
    const { node, cell } = this;
    const [x, y] = [column * cell, row * cell];
    const [width, height] = [node.clientWidth - this.left, node.clientHeight - this.top];
    if (middle || x < node.scrollLeft || x + cell > node.scrollLeft + width) node.scrollLeft = x - width / 2;
    if (middle || y < node.scrollTop || y + cell > node.scrollTop + height) node.scrollTop = y - height / 2;
  }

  get level() {
    if (this.cell >= 1) return 0;
    return Math.min(this.tiles.last, Math.ceil(Math.log2(1 / this.cell) - 1e-9));
  }

  // Visible tiles

  /**
   * The tiles in view, [row, column], those in the middle first.
   * @returns {[number, number][]}
   */
  inView() {
    const { node, shown: map, level } = this;
    const side = TILE * 2 ** level * this.cell;
    /** @type {(start: number, length: number, size: number) => [number, number]} */
    const span = (start, length, size) => [
      Math.max(0, Math.floor(start / side)),
      Math.min(Math.ceil(size / (TILE * 2 ** level)), Math.ceil((start + length) / side)),
    ];
    const [top, bottom] = span(node.scrollTop, node.clientHeight - this.top, map.rows.length);
    const [left, right] = span(node.scrollLeft, node.clientWidth - this.left, map.columns.length);
    /** @type {[number, number][]} */
    const found = [];
    for (let row = top; row < bottom; row += 1)
      for (let column = left; column < right; column += 1)
        if (!this.isMasked(level, row, column)) found.push([row, column]);
    /** @type {(place: [number, number]) => number} */
    const far = ([row, column]) => Math.abs(row - (top + bottom - 1) / 2) + Math.abs(column - (left + right - 1) / 2);
    return found.sort((a, b) => far(a) - far(b));
  }

  /**
   * @param {number} level
   * @param {number} row
   * @param {number} column
   * @returns {boolean}
   */
  isMasked(level, row, column) {
    const side = TILE * 2 ** level;
    return this.shown.isEmpty?.((row + 1) * side - 1, column * side) ?? false;
  }

  async load() {
    const isThere = await this.tiles.load(() => ({ level: this.level, places: this.inView() }));
    if (!isThere) this.moved(); // the selection changed, but the map may be the same
  }

  /**
   * What is known of a cell: {row, column, side, value}, the value that of a square, or undefined as yet.
   * @param {number} row
   * @param {number} column
   * @returns {HeatmapCell}
   */
  at(row, column) {
    const { level } = this;
    const [tileRow, tileColumn] = [row, column].map((one) => Math.floor(one / 2 ** level / TILE));
    const { tile, up } = this.tiles.known(level, tileRow, tileColumn) ?? { tile: null, up: 0 };
    const side = 2 ** (level + up);
    const [r, c] = [Math.floor(row / side), Math.floor(column / side)];
    const value = tile
      ? tile.data[(r % TILE) * tile.shape[1] + (c % TILE)]
      : this.isMasked(level, tileRow, tileColumn)
        ? -1
        : undefined;
    return { row: r * side, column: c * side, side, value };
  }

  moved() {
    if (!this.map) return;
    this.paint();
    clearTimeout(this.pause);
    this.pause = setTimeout(() => this.map && this.load().catch(() => {}), 30);
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      if (this.map) draw(/** @type {ShownHeatmap} */ (this));
    });
  }

  // Pointer and keyboard

  /**
   * @param {MouseEvent} event
   * @returns {{ row: number, column: number } | null}
   */
  under(event) {
    if (!this.map) return null;
    const { node } = this;
    const place = node.getBoundingClientRect();
    const x = event.clientX - place.left - node.clientLeft;
    const y = event.clientY - place.top - node.clientTop;
    if (x < this.left || y < this.top || x > node.clientWidth || y > node.clientHeight) return null;
    const column = Math.floor((x - this.left + node.scrollLeft) / this.cell);
    const row = Math.floor((y - this.top + node.scrollTop) / this.cell);
    return row < this.map.rows.length && column < this.map.columns.length ? { row, column } : null;
  }

  /** @param {PointerEvent} event */
  point(event) {
    const cell = this.under(event);
    this.read(cell && this.at(cell.row, cell.column));
  }

  leave() {
    const { cursor } = this;
    this.read(cursor && document.activeElement === this.node ? this.at(cursor.row, cursor.column) : null);
  }

  /** @param {MouseEvent} event */
  click(event) {
    const cell = this.under(event);
    if (!cell) return;
    this.cursor = cell;
    this.pick(cell.row, cell.column);
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    if (!event.ctrlKey) return;
    const place = this.node.getBoundingClientRect();
    this.zoom(Math.exp(-event.deltaY / 300), event.clientX - place.left, event.clientY - place.top);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (!this.map || event.altKey || event.ctrlKey || event.metaKey) return;
    const side = 2 ** this.level;
    const by = { ArrowUp: [-side, 0], ArrowDown: [side, 0], ArrowLeft: [0, -side], ArrowRight: [0, side] }[event.key];
    if (by) {
      const from = this.cursor ?? this.map;
      this.cursor = {
        row: clamp(from.row + by[0], this.map.rows.length - 1),
        column: clamp(from.column + by[1], this.map.columns.length - 1),
      };
      this.reveal(this.cursor.row, this.cursor.column);
      this.paint();
      this.read(this.at(this.cursor.row, this.cursor.column));
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor)
      this.pick(this.cursor.row, this.cursor.column);
    else if (event.key === "+" || event.key === "=") this.step(1);
    else if (event.key === "-") this.step(-1);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }
}
