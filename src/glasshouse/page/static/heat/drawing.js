// A map on its canvas: cells, numbers where there is room, what is selected, and the tokens along the sides.

import { ink, ramp } from "glasshouse/colour.js";
import { TILE } from "glasshouse/heat/tiles.js";

export const LABELLED = 13; // pixels from which a cell has its token beside it
export const LETTER = 7.3; // pixels of a letter of a name
const LINE = 12; // and of its height
const WRITTEN = 34; // pixels from which a cell has its number in it
const NAMES = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const COLOURS = ["ink", "quiet", "line", "sheet", "mark", "mark-ink", "compare", "compare-ink", "accent"];

function cut(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

/** The colours of the page as they are now; a heat keeps them until the theme turns. */
function paletteOf(heat) {
  if (!heat.colours) {
    const style = getComputedStyle(heat.node);
    heat.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return heat.colours;
}

/** A tile in colour, painted once for each scale and theme. */
function picture(heat, tile) {
  const stamp = `${heat.map.scale} ${paletteOf(heat).sheet}`;
  if (tile.painted === stamp) return tile.picture;
  const [rows, columns] = tile.shape;
  tile.picture ??= Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  const pen = tile.picture.getContext("2d");
  const image = pen.createImageData(columns, rows);
  const colours = ramp();
  const { shareOf } = heat.map;
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

/** Draw the part of a map that is in view. */
export function draw(heat) {
  const { node, canvas, map } = heat;
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
  const right = Math.min(width, heat.left + map.columns.length * heat.cell - node.scrollLeft);
  const bottom = Math.min(height, heat.top + map.rows.length * heat.cell - node.scrollTop);
  pen.save();
  pen.beginPath();
  pen.rect(heat.left, heat.top, right - heat.left, bottom - heat.top);
  pen.clip();
  drawHatch(heat, pen, right, bottom);
  drawTiles(heat, pen);
  if (heat.cell >= LABELLED) drawLines(heat, pen, right, bottom);
  if (heat.cell >= WRITTEN) drawNumbers(heat, pen);
  drawSelection(heat, pen, right, bottom);
  pen.restore();
  drawNames(heat, pen, width, height);
}

function drawHatch(heat, pen, right, bottom) {
  const { line, sheet } = paletteOf(heat);
  pen.fillStyle = sheet;
  pen.fillRect(heat.left, heat.top, right - heat.left, bottom - heat.top);
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.beginPath();
  const tall = bottom - heat.top;
  const begin = heat.left - tall - ((heat.node.scrollLeft + heat.node.scrollTop) % 7);
  for (let x = begin; x < right; x += 7) {
    pen.moveTo(x, bottom);
    pen.lineTo(x + tall, heat.top);
  }
  pen.stroke();
}

function drawTiles(heat, pen) {
  const { level, node } = heat;
  const size = 2 ** level * heat.cell;
  pen.imageSmoothingEnabled = false;
  for (const [row, column] of heat.inView()) {
    const x = heat.left + column * TILE * size - node.scrollLeft;
    const y = heat.top + row * TILE * size - node.scrollTop;
    const known = heat.tiles.known(level, row, column);
    if (!known) continue;
    // Until a tile is there, its place is shown from further away.
    const { tile, up } = known;
    const part = TILE / 2 ** up;
    const [left, above] = [(column % 2 ** up) * part, (row % 2 ** up) * part];
    const [wide, tall] = [Math.min(part, tile.shape[1] - left), Math.min(part, tile.shape[0] - above)];
    pen.drawImage(picture(heat, tile), left, above, wide, tall, x, y, wide * size * 2 ** up, tall * size * 2 ** up);
  }
}

function drawLines(heat, pen, right, bottom) {
  pen.strokeStyle = paletteOf(heat).sheet;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let x = heat.left - (heat.node.scrollLeft % heat.cell); x <= right; x += heat.cell) {
    pen.moveTo(x, heat.top);
    pen.lineTo(x, bottom);
  }
  for (let y = heat.top - (heat.node.scrollTop % heat.cell); y <= bottom; y += heat.cell) {
    pen.moveTo(heat.left, y);
    pen.lineTo(right, y);
  }
  pen.stroke();
}

function drawNumbers(heat, pen) {
  const { map, node, cell } = heat;
  Object.assign(pen, { font: NAMES.replace("12px", "11px"), textAlign: "center", textBaseline: "middle" });
  for (let row = Math.floor(node.scrollTop / cell); row < Math.min(map.rows.length, (node.scrollTop + node.clientHeight) / cell); row += 1) {
    for (let column = Math.floor(node.scrollLeft / cell); column < Math.min(map.columns.length, (node.scrollLeft + node.clientWidth) / cell); column += 1) {
      const { value } = heat.at(row, column);
      if (!(value >= 0.005)) continue;
      pen.fillStyle = ink(map.shareOf(value));
      pen.fillText(value.toFixed(2), heat.left + (column + 0.5) * cell - node.scrollLeft, heat.top + (row + 0.5) * cell - node.scrollTop);
    }
  }
}

function drawSelection(heat, pen, right, bottom) {
  const { map, node, cell } = heat;
  const { mark, compare, ink, accent } = paletteOf(heat);
  const x = heat.left + map.column * cell - node.scrollLeft;
  const y = heat.top + map.row * cell - node.scrollTop;
  const size = Math.max(cell, 3);
  pen.lineWidth = 2;
  pen.strokeStyle = compare;
  pen.strokeRect(x, heat.top - 2, size, bottom - heat.top + 4);
  pen.strokeStyle = mark;
  pen.strokeRect(heat.left - 2, y, right - heat.left + 4, size);
  pen.strokeStyle = ink;
  pen.strokeRect(x, y, size, size);
  if (!heat.cursor || document.activeElement !== node) return;
  const side = 2 ** heat.level * cell;
  pen.strokeStyle = accent;
  pen.setLineDash([3, 2]);
  pen.strokeRect(heat.left + heat.cursor.column * cell - node.scrollLeft - 1, heat.top + heat.cursor.row * cell - node.scrollTop - 1, Math.max(side, 5) + 2, Math.max(side, 5) + 2);
  pen.setLineDash([]);
}

function drawNames(heat, pen, width, height) {
  pen.font = NAMES;
  pen.textBaseline = "middle";
  pen.direction = "ltr";
  if (heat.isLabelled) drawTokens(heat, pen, width, height);
  else drawPlaces(heat, pen, width, height);
}

function drawTokens(heat, pen, width, height) {
  const { map, node, cell } = heat;
  const colours = paletteOf(heat);
  const most = Math.floor((heat.left - 12) / LETTER);
  pen.save();
  pen.beginPath();
  pen.rect(0, heat.top, heat.left, height - heat.top);
  pen.clip();
  pen.textAlign = "right";
  for (let row = Math.floor(node.scrollTop / cell); row < map.rows.length; row += 1) {
    const y = heat.top + (row + 0.5) * cell - node.scrollTop;
    if (y > height + cell) break;
    const text = cut(map.rows[row].text, most);
    if (row === map.row) drawTag(pen, heat.left - 8 - pen.measureText(text).width, y, pen.measureText(text).width, colours.mark);
    pen.fillStyle = row === map.row ? colours["mark-ink"] : colours.ink;
    pen.fillText(text, heat.left - 8, y);
  }
  pen.restore();
  pen.save();
  pen.beginPath();
  pen.rect(heat.left - 4, 0, width - heat.left + 4, heat.top);
  pen.clip();
  pen.textAlign = "left";
  // The closer the columns, the steeper their names, so that none lies on the next.
  const slant = Math.max(Math.PI / 4, Math.asin(Math.min(1, LINE / cell)));
  const fits = Math.floor((heat.top - 14) / (LETTER * Math.sin(slant)));
  for (let column = Math.floor(node.scrollLeft / cell); column < map.columns.length; column += 1) {
    const x = heat.left + (column + 0.5) * cell - node.scrollLeft;
    if (x > width + cell) break;
    const text = cut(map.columns[column].text, fits);
    pen.save();
    pen.translate(x, heat.top - 8);
    pen.rotate(-slant);
    if (column === map.column) drawTag(pen, 0, 0, pen.measureText(text).width, colours.compare);
    pen.fillStyle = column === map.column ? colours["compare-ink"] : colours.ink;
    pen.fillText(text, 0, 0);
    pen.restore();
  }
  pen.restore();
}

function drawTag(pen, x, y, width, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.roundRect(x - 4, y - 8, width + 8, 16, 4);
  pen.fill();
}

/** Places by their number, where there is no room for tokens. */
function drawPlaces(heat, pen, width, height) {
  const { map, node, cell } = heat;
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((one) => one * cell >= 46) ?? 10000;
  pen.fillStyle = paletteOf(heat).quiet;
  pen.textAlign = "right";
  for (let row = Math.ceil(node.scrollTop / cell / every) * every; row < map.rows.length; row += every) {
    const y = heat.top + (row + 0.5) * cell - node.scrollTop;
    if (y > height) break;
    pen.fillText(String(row), heat.left - 6, Math.max(y, heat.top + 6));
  }
  pen.textAlign = "center";
  for (let column = Math.ceil(node.scrollLeft / cell / every) * every; column < map.columns.length; column += every) {
    const x = heat.left + (column + 0.5) * cell - node.scrollLeft;
    if (x > width - 8) break;
    pen.fillText(String(column), Math.max(x, heat.left + 4), heat.top - 10);
  }
}
