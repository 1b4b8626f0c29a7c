// Drawing of a heatmap: cells, numbers, the selection and token labels.

import { ink, ramp } from "glasshouse/colour.js";
import { h } from "glasshouse/dom.js";
import { penOf } from "glasshouse/pen.js";
import { TILE } from "glasshouse/heatmap/tiles.js";
import { cut } from "glasshouse/widgets.js";

export const LABELLED = 13; // minimum cell size in pixels for token labels
export const LETTER = 7.3; // pixels of a letter of a name
const LINE = 12; // and of its height
const WRITTEN = 34; // minimum cell size in pixels for numbers
const NAMES = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const COLOURS = ["ink", "quiet", "line", "sheet", "mark", "mark-ink", "compare", "compare-ink", "accent"];

/**
 * The colours of the page as they are now; a heatmap keeps them until the theme turns.
 * @param {Heatmap} heatmap
 * @returns {Record<string, string>}
 */
function paletteOf(heatmap) {
  if (!heatmap.colours) {
    const style = getComputedStyle(heatmap.node);
    heatmap.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return heatmap.colours;
}

/**
 * A tile in colour, painted once for each scale and theme.
 * @param {ShownHeatmap} heatmap
 * @param {Tile} tile
 * @returns {HTMLCanvasElement}
 */
function picture(heatmap, tile) {
  const stamp = `${heatmap.map.scale} ${paletteOf(heatmap).sheet}`;
  if (tile.picture && tile.painted === stamp) return tile.picture;
  const [rows, columns] = tile.shape;
  tile.picture ??= h("canvas", { width: columns, height: rows });
  const pen = penOf(tile.picture);
  const image = pen.createImageData(columns, rows);
  const colours = ramp();
  const { normalize } = heatmap.map;
  for (let i = 0; i < tile.data.length; i += 1) {
    const value = tile.data[i];
    if (value < 0) continue;
    const at = 3 * Math.round(255 * Math.min(1, normalize(value)));
    image.data[4 * i] = colours[at];
    image.data[4 * i + 1] = colours[at + 1];
    image.data[4 * i + 2] = colours[at + 2];
    image.data[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  tile.painted = stamp;
  return tile.picture;
}

/**
 * Draw the part of a map that is in view.
 * @param {ShownHeatmap} heatmap
 */
export function draw(heatmap) {
  const { node, canvas, map } = heatmap;
  if (!node.clientWidth) return;
  const [width, height, fine] = [node.clientWidth, node.clientHeight, devicePixelRatio || 1];
  if (canvas.width !== Math.round(width * fine) || canvas.height !== Math.round(height * fine)) {
    Object.assign(canvas, { width: Math.round(width * fine), height: Math.round(height * fine) });
    canvas.style.setProperty("width", `${width}px`);
    canvas.style.setProperty("height", `${height}px`);
  }
  const pen = penOf(canvas);
  pen.setTransform(fine, 0, 0, fine, 0, 0);
  pen.clearRect(0, 0, width, height);
  const right = Math.min(width, heatmap.left + map.columns.length * heatmap.cell - node.scrollLeft);
  const bottom = Math.min(height, heatmap.top + map.rows.length * heatmap.cell - node.scrollTop);
  pen.save();
  pen.beginPath();
  pen.rect(heatmap.left, heatmap.top, right - heatmap.left, bottom - heatmap.top);
  pen.clip();
  drawHatch(heatmap, pen, right, bottom);
  drawTiles(heatmap, pen);
  if (heatmap.cell >= LABELLED) drawLines(heatmap, pen, right, bottom);
  if (heatmap.cell >= WRITTEN) drawNumbers(heatmap, pen);
  drawSelection(heatmap, pen, right, bottom);
  pen.restore();
  drawNames(heatmap, pen, width, height);
}

/**
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 * @param {number} right
 * @param {number} bottom
 */
function drawHatch(heatmap, pen, right, bottom) {
  const { line, sheet } = paletteOf(heatmap);
  pen.fillStyle = sheet;
  pen.fillRect(heatmap.left, heatmap.top, right - heatmap.left, bottom - heatmap.top);
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.beginPath();
  const tall = bottom - heatmap.top;
  const begin = heatmap.left - tall - ((heatmap.node.scrollLeft + heatmap.node.scrollTop) % 7);
  for (let x = begin; x < right; x += 7) {
    pen.moveTo(x, bottom);
    pen.lineTo(x + tall, heatmap.top);
  }
  pen.stroke();
}

/**
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 */
function drawTiles(heatmap, pen) {
  const { level, node } = heatmap;
  const size = 2 ** level * heatmap.cell;
  pen.imageSmoothingEnabled = false;
  for (const [row, column] of heatmap.inView()) {
    const x = heatmap.left + column * TILE * size - node.scrollLeft;
    const y = heatmap.top + row * TILE * size - node.scrollTop;
    const known = heatmap.tiles.known(level, row, column);
    if (!known) continue;
    // Until a tile is loaded, a coarser one is shown.
    const { tile, up } = known;
    const part = TILE / 2 ** up;
    const [left, above] = [(column % 2 ** up) * part, (row % 2 ** up) * part];
    const [wide, tall] = [Math.min(part, tile.shape[1] - left), Math.min(part, tile.shape[0] - above)];
    pen.drawImage(
      picture(heatmap, tile),
      left,
      above,
      wide,
      tall,
      x,
      y,
      wide * size * 2 ** up,
      tall * size * 2 ** up,
    );
  }
}

/**
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 * @param {number} right
 * @param {number} bottom
 */
function drawLines(heatmap, pen, right, bottom) {
  pen.strokeStyle = paletteOf(heatmap).sheet;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let x = heatmap.left - (heatmap.node.scrollLeft % heatmap.cell); x <= right; x += heatmap.cell) {
    pen.moveTo(x, heatmap.top);
    pen.lineTo(x, bottom);
  }
  for (let y = heatmap.top - (heatmap.node.scrollTop % heatmap.cell); y <= bottom; y += heatmap.cell) {
    pen.moveTo(heatmap.left, y);
    pen.lineTo(right, y);
  }
  pen.stroke();
}

/**
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 */
function drawNumbers(heatmap, pen) {
  const { map, node, cell } = heatmap;
  Object.assign(pen, { font: NAMES.replace("12px", "11px"), textAlign: "center", textBaseline: "middle" });
  for (
    let row = Math.floor(node.scrollTop / cell);
    row < Math.min(map.rows.length, (node.scrollTop + node.clientHeight) / cell);
    row += 1
  ) {
    for (
      let column = Math.floor(node.scrollLeft / cell);
      column < Math.min(map.columns.length, (node.scrollLeft + node.clientWidth) / cell);
      column += 1
    ) {
      const { value } = heatmap.at(row, column);
      if (value === undefined || value < 0.005) continue;
      pen.fillStyle = ink(map.normalize(value));
      pen.fillText(
        value.toFixed(2),
        heatmap.left + (column + 0.5) * cell - node.scrollLeft,
        heatmap.top + (row + 0.5) * cell - node.scrollTop,
      );
    }
  }
}

/**
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 * @param {number} right
 * @param {number} bottom
 */
function drawSelection(heatmap, pen, right, bottom) {
  const { map, node, cell } = heatmap;
  const { mark, compare, ink, accent } = paletteOf(heatmap);
  const x = heatmap.left + map.column * cell - node.scrollLeft;
  const y = heatmap.top + map.row * cell - node.scrollTop;
  const size = Math.max(cell, 3);
  pen.lineWidth = 2;
  pen.strokeStyle = compare;
  pen.strokeRect(x, heatmap.top - 2, size, bottom - heatmap.top + 4);
  pen.strokeStyle = mark;
  pen.strokeRect(heatmap.left - 2, y, right - heatmap.left + 4, size);
  pen.strokeStyle = ink;
  pen.strokeRect(x, y, size, size);
  if (!heatmap.cursor || document.activeElement !== node) return;
  const side = 2 ** heatmap.level * cell;
  pen.strokeStyle = accent;
  pen.setLineDash([3, 2]);
  pen.strokeRect(
    heatmap.left + heatmap.cursor.column * cell - node.scrollLeft - 1,
    heatmap.top + heatmap.cursor.row * cell - node.scrollTop - 1,
    Math.max(side, 5) + 2,
    Math.max(side, 5) + 2,
  );
  pen.setLineDash([]);
}

/**
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 * @param {number} width
 * @param {number} height
 */
function drawNames(heatmap, pen, width, height) {
  pen.font = NAMES;
  pen.textBaseline = "middle";
  pen.direction = "ltr";
  if (heatmap.isLabelled) drawTokens(heatmap, pen, width, height);
  else drawPositions(heatmap, pen, width, height);
}

/**
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 * @param {number} width
 * @param {number} height
 */
function drawTokens(heatmap, pen, width, height) {
  const { map, node, cell } = heatmap;
  const colours = paletteOf(heatmap);
  const most = Math.floor((heatmap.left - 12) / LETTER);
  pen.save();
  pen.beginPath();
  pen.rect(0, heatmap.top, heatmap.left, height - heatmap.top);
  pen.clip();
  pen.textAlign = "right";
  for (let row = Math.floor(node.scrollTop / cell); row < map.rows.length; row += 1) {
    const y = heatmap.top + (row + 0.5) * cell - node.scrollTop;
    if (y > height + cell) break;
    const text = cut(map.rows[row].text, most);
    if (row === map.row)
      drawTag(pen, heatmap.left - 8 - pen.measureText(text).width, y, pen.measureText(text).width, colours.mark);
    pen.fillStyle = row === map.row ? colours["mark-ink"] : colours.ink;
    pen.fillText(text, heatmap.left - 8, y);
  }
  pen.restore();
  pen.save();
  pen.beginPath();
  pen.rect(heatmap.left - 4, 0, width - heatmap.left + 4, heatmap.top);
  pen.clip();
  pen.textAlign = "left";
  // The closer the columns, the steeper their labels, so that they do not overlap.
  const slant = Math.max(Math.PI / 4, Math.asin(Math.min(1, LINE / cell)));
  const fits = Math.floor((heatmap.top - 14) / (LETTER * Math.sin(slant)));
  for (let column = Math.floor(node.scrollLeft / cell); column < map.columns.length; column += 1) {
    const x = heatmap.left + (column + 0.5) * cell - node.scrollLeft;
    if (x > width + cell) break;
    const text = cut(map.columns[column].text, fits);
    pen.save();
    pen.translate(x, heatmap.top - 8);
    pen.rotate(-slant);
    if (column === map.column) drawTag(pen, 0, 0, pen.measureText(text).width, colours.compare);
    pen.fillStyle = column === map.column ? colours["compare-ink"] : colours.ink;
    pen.fillText(text, 0, 0);
    pen.restore();
  }
  pen.restore();
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {string} colour
 */
function drawTag(pen, x, y, width, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.roundRect(x - 4, y - 8, width + 8, 16, 4);
  pen.fill();
}

/**
 * Position numbers, where there is no room for tokens.
 * @param {ShownHeatmap} heatmap
 * @param {CanvasRenderingContext2D} pen
 * @param {number} width
 * @param {number} height
 */
function drawPositions(heatmap, pen, width, height) {
  const { map, node, cell } = heatmap;
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((one) => one * cell >= 46) ?? 10000;
  pen.fillStyle = paletteOf(heatmap).quiet;
  pen.textAlign = "right";
  for (let row = Math.ceil(node.scrollTop / cell / every) * every; row < map.rows.length; row += every) {
    const y = heatmap.top + (row + 0.5) * cell - node.scrollTop;
    if (y > height) break;
    pen.fillText(String(row), heatmap.left - 6, Math.max(y, heatmap.top + 6));
  }
  pen.textAlign = "center";
  for (let column = Math.ceil(node.scrollLeft / cell / every) * every; column < map.columns.length; column += every) {
    const x = heatmap.left + (column + 0.5) * cell - node.scrollLeft;
    if (x > width - 8) break;
    pen.fillText(String(column), Math.max(x, heatmap.left + 4), heatmap.top - 10);
  }
}
