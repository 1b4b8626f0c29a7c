// A map of any size on a canvas: tiles are fetched as they come into view, and only so many are kept.

import { Outdated } from "glasshouse/asking.js";
import { ink, onTheme, ramp } from "glasshouse/colour.js";
import { h } from "glasshouse/dom.js";

const TILE = 128; // cells of a tile, a side
const KEPT = 192; // tiles
const CHEAP = 1024; // cells of a map, a side, that costs little as a whole
const AT_ONCE = 6; // tiles under way, as many as a browser has connections
const WIDEST = 72; // pixels of a cell
const LABELLED = 13; // pixels from which a cell has its token beside it
const WRITTEN = 34; // pixels from which a cell has its number in it
const TALLEST = 640; // pixels of the whole
const CLOSE = 30; // pixels of a cell that is looked at closely
const STEP = 2; // of one zoom
const LETTER = 7.3; // pixels of a letter of a name
const NAMES = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

/** How many levels a map has: at the last one it is a single tile. */
function levels(rows, columns) {
  return 1 + Math.max(0, Math.ceil(Math.log2(Math.max(rows, columns) / TILE)));
}

function cut(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

/**
 * Options: label; read(cell), called with the cell {row, column, side, value} that is pointed at, or null;
 * pick(row, column), called when it is chosen. A value below 0 is a cell that cannot be: it stays hatched.
 */
export class Heat {
  constructor({ label, read, pick }) {
    this.read = read;
    this.pick = pick;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.space = h("div", { class: "space" }, this.canvas);
    this.node = h("div", { class: "heat", tabindex: "0", role: "application", "aria-roledescription": "map", "aria-label": label, on: {
      scroll: () => this.moved(),
      pointermove: (event) => this.point(event),
      pointerleave: () => this.leave(),
      click: (event) => this.click(event),
      wheel: (event) => this.wheel(event),
      keydown: (event) => this.key(event),
      focus: () => this.paint(),
      blur: () => this.paint(),
    } }, this.space);
    this.node.addEventListener("wheel", (event) => event.ctrlKey && event.preventDefault(), { passive: false });
    this.tiles = new Map(); // the latest used stands last
    this.underway = new Set();
    this.numbers = new Map(); // of maps: their names hold whole texts
    this.map = null;
    this.cell = 0;
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
  }

  /**
   * Show a map: {name, fetch(level, row, column) (null where there is no such tile), rows, columns (their tokens), row,
   * column (those selected), scale (a name), shareOf(value) (its colour, 0 to 1), isEmpty(row, column) (whether nothing
   * can be there, nor further up, nor further to the right)}. Resolves when all that is in view is there.
   */
  async show(map) {
    const old = this.map;
    this.map = map;
    this.number = this.numbers.get(map.name) ?? this.numbers.size;
    this.numbers.set(map.name, this.number);
    if (old?.rows !== map.rows) this.longest = map.rows.reduce((most, one) => Math.max(most, one.text.length), 2);
    const resized = !old || old.rows.length !== map.rows.length || old.columns.length !== map.columns.length;
    if (resized) {
      this.cursor = null;
      this.fit();
    } else if (old.row !== map.row || old.column !== map.column) this.reveal(map.row, map.column);
    this.paint();
    await this.load();
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
    const { rows, columns } = this.map;
    const width = this.node.clientWidth;
    const size = (left, top, right) => Math.min(WIDEST, (width - left - right) / columns.length, (TALLEST - top - 4) / rows.length);
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
    const { rows, columns } = this.map;
    const [width, height] = [this.left + columns.length * this.cell + this.right, this.top + rows.length * this.cell + 4];
    this.node.style.setProperty("height", `${Math.ceil(Math.min(TALLEST, this.top + rows.length * this.least + 6))}px`);
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

  /** Make cells larger or smaller, and keep what lies at a point of the node where it is. */
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

  /** Zoom in or out by a step, round the selected cell where it is in view. */
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

  /** Scroll so far that a cell is in view, or in the middle of it. */
  reveal(row, column, middle = false) {
    const { node, cell } = this;
    const [x, y] = [column * cell, row * cell];
    const [width, height] = [node.clientWidth - this.left, node.clientHeight - this.top];
    if (middle || x < node.scrollLeft || x + cell > node.scrollLeft + width) node.scrollLeft = x - width / 2;
    if (middle || y < node.scrollTop || y + cell > node.scrollTop + height) node.scrollTop = y - height / 2;
  }

  get level() {
    const { rows, columns } = this.map;
    if (this.cell >= 1) return 0;
    return Math.min(levels(rows.length, columns.length) - 1, Math.ceil(Math.log2(1 / this.cell) - 1e-9));
  }

  // Tiles

  keyOf(level, row, column) {
    return `${this.number} ${level} ${row} ${column}`;
  }

  /** A tile that is kept; null where there is none to be had. */
  tile(level, row, column) {
    const key = this.keyOf(level, row, column);
    const found = this.tiles.get(key);
    if (found) {
      this.tiles.delete(key);
      this.tiles.set(key, found);
    }
    return found;
  }

  /** The finest tile at hand of a place, and how many levels above the one that is asked for it is. */
  known(level, row, column) {
    for (let up = 0; level + up < levels(this.map.rows.length, this.map.columns.length); up += 1) {
      const tile = this.tile(level + up, row >> up, column >> up);
      if (tile) return { tile, up };
    }
    return null;
  }

  /** The next tile to fetch, [level, row, column]: one in view, or where it cannot be had the one above it. */
  missing() {
    const { level, map } = this;
    const last = levels(map.rows.length, map.columns.length) - 1;
    const isUnderway = (...place) => this.underway.has(this.keyOf(...place));
    for (const [row, column] of this.inView()) {
      let up = 0;
      while (level + up < last && this.tile(level + up, row >> up, column >> up) === null) up += 1;
      const place = [level + up, row >> up, column >> up];
      if (this.tile(...place) === undefined && !isUnderway(...place)) return place;
    }
    // All of a map that is not very long is soon there: something to show while the rest comes.
    const cheap = Math.max(map.rows.length, map.columns.length) <= CHEAP;
    return cheap && this.tile(last, 0, 0) === undefined && !isUnderway(last, 0, 0) ? [last, 0, 0] : null;
  }

  /** The tiles in view, [row, column], those in the middle first. */
  inView() {
    const { node, map, level } = this;
    const side = TILE * 2 ** level * this.cell;
    const span = (start, length, size) => [Math.max(0, Math.floor(start / side)), Math.min(Math.ceil(size / (TILE * 2 ** level)), Math.ceil((start + length) / side))];
    const [top, bottom] = span(node.scrollTop, node.clientHeight - this.top, map.rows.length);
    const [left, right] = span(node.scrollLeft, node.clientWidth - this.left, map.columns.length);
    const found = [];
    for (let row = top; row < bottom; row += 1) for (let column = left; column < right; column += 1) if (!this.cannotBe(level, row, column)) found.push([row, column]);
    const far = ([row, column]) => Math.abs(row - (top + bottom - 1) / 2) + Math.abs(column - (left + right - 1) / 2);
    return found.sort((a, b) => far(a) - far(b));
  }

  cannotBe(level, row, column) {
    const side = TILE * 2 ** level;
    return this.map.isEmpty?.((row + 1) * side - 1, column * side) ?? false;
  }

  /** Fetch what is in view and not at hand, until nothing is. */
  async load() {
    const { name } = this.map;
    let isOutdated = false;
    const one = async () => {
      while (this.map?.name === name && !isOutdated) {
        const next = this.missing();
        if (!next) return;
        const key = this.keyOf(...next);
        this.underway.add(key);
        try {
          this.keep(key, await this.map.fetch(...next));
        } catch (error) {
          if (!(error instanceof Outdated)) throw error;
          isOutdated = true;
        } finally {
          this.underway.delete(key);
        }
        this.paint();
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, one));
    if (isOutdated) this.moved(); // something else was selected, but the map may be the same
  }

  keep(key, tile) {
    this.tiles.set(key, tile && { ...tile, picture: null, painted: "" });
    while (this.tiles.size > KEPT) this.tiles.delete(this.tiles.keys().next().value);
  }

  /** What is known of a cell: {row, column, side, value}, the value that of a square, or undefined as yet. */
  at(row, column) {
    const { level } = this;
    const place = [row, column].map((one) => Math.floor(one / 2 ** level / TILE));
    const { tile, up } = this.known(level, ...place) ?? { up: 0 };
    const side = 2 ** (level + up);
    const [r, c] = [Math.floor(row / side), Math.floor(column / side)];
    const value = tile ? tile.data[(r % TILE) * tile.shape[1] + (c % TILE)] : this.cannotBe(level, ...place) ? -1 : undefined;
    return { row: r * side, column: c * side, side, value };
  }

  // Drawing

  moved() {
    if (!this.map) return;
    this.paint();
    clearTimeout(this.pause);
    this.pause = setTimeout(() => this.map && this.load().catch(() => {}), 30);
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  picture(tile) {
    const stamp = `${this.map.scale} ${this.palette().stamp}`;
    if (tile.painted === stamp) return tile.picture;
    const [rows, columns] = tile.shape;
    tile.picture ??= Object.assign(document.createElement("canvas"), { width: columns, height: rows });
    const pen = tile.picture.getContext("2d");
    const image = pen.createImageData(columns, rows);
    const colours = ramp();
    const { shareOf } = this.map;
    for (let i = 0; i < tile.data.length; i += 1) {
      const value = tile.data[i];
      if (value < 0) continue;
      const at = 3 * Math.round(255 * Math.min(1, shareOf(value)));
      image.data[4 * i] = colours[at];
      image.data[4 * i + 1] = colours[at + 1];
      image.data[4 * i + 2] = colours[at + 2];
      image.data[4 * i + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
    tile.painted = stamp;
    return tile.picture;
  }

  palette() {
    if (!this.colours) {
      const style = getComputedStyle(this.node);
      const names = ["ink", "quiet", "line", "sheet", "mark", "mark-ink", "compare", "compare-ink", "accent"];
      this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
      this.colours.stamp = this.colours.sheet;
    }
    return this.colours;
  }

  draw() {
    const { node, canvas, map } = this;
    if (!map || !node.clientWidth) return;
    const [width, height, fine] = [node.clientWidth, node.clientHeight, devicePixelRatio || 1];
    if (canvas.width !== Math.round(width * fine) || canvas.height !== Math.round(height * fine)) {
      Object.assign(canvas, { width: Math.round(width * fine), height: Math.round(height * fine) });
      canvas.style.setProperty("width", `${width}px`);
      canvas.style.setProperty("height", `${height}px`);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(fine, 0, 0, fine, 0, 0);
    pen.clearRect(0, 0, width, height);
    const right = Math.min(width, this.left + map.columns.length * this.cell - node.scrollLeft);
    const bottom = Math.min(height, this.top + map.rows.length * this.cell - node.scrollTop);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, this.top, right - this.left, bottom - this.top);
    pen.clip();
    this.drawHatch(pen, right, bottom);
    this.drawTiles(pen);
    if (this.cell >= LABELLED) this.drawLines(pen, right, bottom);
    if (this.cell >= WRITTEN) this.drawNumbers(pen);
    this.drawSelection(pen, right, bottom);
    pen.restore();
    this.drawNames(pen, width, height);
  }

  drawHatch(pen, right, bottom) {
    const { line, sheet } = this.palette();
    pen.fillStyle = sheet;
    pen.fillRect(this.left, this.top, right - this.left, bottom - this.top);
    pen.strokeStyle = line;
    pen.lineWidth = 1;
    pen.beginPath();
    const tall = bottom - this.top;
    const begin = this.left - tall - ((this.node.scrollLeft + this.node.scrollTop) % 7);
    for (let x = begin; x < right; x += 7) {
      pen.moveTo(x, bottom);
      pen.lineTo(x + tall, this.top);
    }
    pen.stroke();
  }

  drawTiles(pen) {
    const { level, node } = this;
    const size = 2 ** level * this.cell;
    pen.imageSmoothingEnabled = false;
    for (const [row, column] of this.inView()) {
      const x = this.left + column * TILE * size - node.scrollLeft;
      const y = this.top + row * TILE * size - node.scrollTop;
      const known = this.known(level, row, column);
      if (!known) continue;
      // Until a tile is there, its place is shown from further away.
      const { tile, up } = known;
      const part = TILE / 2 ** up;
      const [left, above] = [(column % 2 ** up) * part, (row % 2 ** up) * part];
      const [wide, tall] = [Math.min(part, tile.shape[1] - left), Math.min(part, tile.shape[0] - above)];
      pen.drawImage(this.picture(tile), left, above, wide, tall, x, y, wide * size * 2 ** up, tall * size * 2 ** up);
    }
  }

  drawLines(pen, right, bottom) {
    pen.strokeStyle = this.palette().sheet;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = this.left - (this.node.scrollLeft % this.cell); x <= right; x += this.cell) {
      pen.moveTo(x, this.top);
      pen.lineTo(x, bottom);
    }
    for (let y = this.top - (this.node.scrollTop % this.cell); y <= bottom; y += this.cell) {
      pen.moveTo(this.left, y);
      pen.lineTo(right, y);
    }
    pen.stroke();
  }

  drawNumbers(pen) {
    const { map, node, cell } = this;
    Object.assign(pen, { font: NAMES.replace("12px", "11px"), textAlign: "center", textBaseline: "middle" });
    for (let row = Math.floor(node.scrollTop / cell); row < Math.min(map.rows.length, (node.scrollTop + node.clientHeight) / cell); row += 1) {
      for (let column = Math.floor(node.scrollLeft / cell); column < Math.min(map.columns.length, (node.scrollLeft + node.clientWidth) / cell); column += 1) {
        const { value } = this.at(row, column);
        if (!(value >= 0.005)) continue;
        pen.fillStyle = ink(map.shareOf(value));
        pen.fillText(value.toFixed(2), this.left + (column + 0.5) * cell - node.scrollLeft, this.top + (row + 0.5) * cell - node.scrollTop);
      }
    }
  }

  drawSelection(pen, right, bottom) {
    const { map, node, cell } = this;
    const { mark, compare, ink, accent } = this.palette();
    const x = this.left + map.column * cell - node.scrollLeft;
    const y = this.top + map.row * cell - node.scrollTop;
    const size = Math.max(cell, 3);
    pen.lineWidth = 2;
    pen.strokeStyle = compare;
    pen.strokeRect(x, this.top - 2, size, bottom - this.top + 4);
    pen.strokeStyle = mark;
    pen.strokeRect(this.left - 2, y, right - this.left + 4, size);
    pen.strokeStyle = ink;
    pen.strokeRect(x, y, size, size);
    if (!this.cursor || document.activeElement !== node) return;
    const side = 2 ** this.level * cell;
    pen.strokeStyle = accent;
    pen.setLineDash([3, 2]);
    pen.strokeRect(this.left + this.cursor.column * cell - node.scrollLeft - 1, this.top + this.cursor.row * cell - node.scrollTop - 1, Math.max(side, 5) + 2, Math.max(side, 5) + 2);
    pen.setLineDash([]);
  }

  drawNames(pen, width, height) {
    pen.font = NAMES;
    pen.textBaseline = "middle";
    pen.direction = "ltr";
    if (this.isLabelled) this.drawTokens(pen, width, height);
    else this.drawPlaces(pen, width, height);
  }

  drawTokens(pen, width, height) {
    const { map, node, cell } = this;
    const colours = this.palette();
    const most = Math.floor((this.left - 12) / LETTER);
    pen.save();
    pen.beginPath();
    pen.rect(0, this.top, this.left, height - this.top);
    pen.clip();
    pen.textAlign = "right";
    for (let row = Math.floor(node.scrollTop / cell); row < map.rows.length; row += 1) {
      const y = this.top + (row + 0.5) * cell - node.scrollTop;
      if (y > height + cell) break;
      const text = cut(map.rows[row].text, most);
      if (row === map.row) this.drawTag(pen, this.left - 8 - pen.measureText(text).width, y, pen.measureText(text).width, colours.mark);
      pen.fillStyle = row === map.row ? colours["mark-ink"] : colours.ink;
      pen.fillText(text, this.left - 8, y);
    }
    pen.restore();
    pen.save();
    pen.beginPath();
    pen.rect(this.left - 4, 0, width - this.left + 4, this.top);
    pen.clip();
    pen.textAlign = "left";
    for (let column = Math.floor(node.scrollLeft / cell); column < map.columns.length; column += 1) {
      const x = this.left + (column + 0.5) * cell - node.scrollLeft;
      if (x > width + cell) break;
      const text = cut(map.columns[column].text, 10);
      pen.save();
      pen.translate(x, this.top - 8);
      pen.rotate(-Math.PI / 4);
      if (column === map.column) this.drawTag(pen, 0, 0, pen.measureText(text).width, colours.compare);
      pen.fillStyle = column === map.column ? colours["compare-ink"] : colours.ink;
      pen.fillText(text, 0, 0);
      pen.restore();
    }
    pen.restore();
  }

  drawTag(pen, x, y, width, colour) {
    pen.fillStyle = colour;
    pen.beginPath();
    pen.roundRect(x - 4, y - 8, width + 8, 16, 4);
    pen.fill();
  }

  /** Places by their number, where there is no room for tokens. */
  drawPlaces(pen, width, height) {
    const { map, node, cell } = this;
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((one) => one * cell >= 46) ?? 10000;
    pen.fillStyle = this.palette().quiet;
    pen.textAlign = "right";
    for (let row = Math.ceil(node.scrollTop / cell / every) * every; row < map.rows.length; row += every) {
      const y = this.top + (row + 0.5) * cell - node.scrollTop;
      if (y > height) break;
      pen.fillText(String(row), this.left - 6, Math.max(y, this.top + 6));
    }
    pen.textAlign = "center";
    for (let column = Math.ceil(node.scrollLeft / cell / every) * every; column < map.columns.length; column += every) {
      const x = this.left + (column + 0.5) * cell - node.scrollLeft;
      if (x > width - 8) break;
      pen.fillText(String(column), Math.max(x, this.left + 4), this.top - 10);
    }
  }

  // Pointing and choosing

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

  point(event) {
    const cell = this.under(event);
    this.read(cell && this.at(cell.row, cell.column));
  }

  leave() {
    const { cursor } = this;
    this.read(cursor && document.activeElement === this.node ? this.at(cursor.row, cursor.column) : null);
  }

  click(event) {
    const cell = this.under(event);
    if (!cell) return;
    this.cursor = cell;
    this.pick(cell.row, cell.column);
  }

  wheel(event) {
    if (!event.ctrlKey) return;
    const place = this.node.getBoundingClientRect();
    this.zoom(Math.exp(-event.deltaY / 300), event.clientX - place.left, event.clientY - place.top);
  }

  key(event) {
    if (!this.map || event.altKey || event.ctrlKey || event.metaKey) return;
    const side = 2 ** this.level;
    const by = { ArrowUp: [-side, 0], ArrowDown: [side, 0], ArrowLeft: [0, -side], ArrowRight: [0, side] }[event.key];
    if (by) {
      const from = this.cursor ?? this.map;
      const held = (value, size) => Math.max(0, Math.min(size - 1, value));
      this.cursor = { row: held(from.row + by[0], this.map.rows.length), column: held(from.column + by[1], this.map.columns.length) };
      this.reveal(this.cursor.row, this.cursor.column);
      this.paint();
      this.read(this.at(this.cursor.row, this.cursor.column));
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor) this.pick(this.cursor.row, this.cursor.column);
    else if (event.key === "+" || event.key === "=") this.step(1);
    else if (event.key === "-") this.step(-1);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }
}
