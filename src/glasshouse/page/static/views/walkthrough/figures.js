// Numbers as small shaded matrices: the first few of each, the rest counted and shown as a strip.

import { balance, balanceInk, shade } from "glasshouse/colour.js";
import { h, s } from "glasshouse/dom.js";
import { penOf } from "glasshouse/pen.js";
import { clamp, percent, plural, short } from "glasshouse/number.js";
import { token } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { formula } from "glasshouse/views/walkthrough/formula.js";

export const FIRST = 8; // numbers of a vector that are written out

/**
 * The largest size among numbers, to shade them by.
 * @param {...Iterable<number>} many
 * @returns {number}
 */
export function largest(...many) {
  let most = 0;
  for (const data of many) for (const one of data) if (Number.isFinite(one)) most = Math.max(most, Math.abs(one));
  return most || 1;
}

/**
 * One number, shaded. `what` is its name in the readout.
 * @param {number} value
 * @param {number} most
 * @param {string} what
 * @param {CellOptions} [options]
 * @returns {HTMLElement}
 */
function cell(value, most, what, { bare = false, mark = false, share = false } = {}) {
  const part = Number.isFinite(value) ? value / most : 0;
  const colour = share ? shade(part) : balance(part);
  const kinds = ["cell", bare ? "bare" : "", mark ? "marked" : "", Number.isFinite(value) ? "" : "gone"].filter(
    Boolean,
  );
  return h(
    "span",
    {
      class: kinds.join(" "),
      tabindex: -1,
      role: "img",
      "aria-label": `${what} = ${short(value)}`,
      style: { "background-color": colour, color: balanceInk(share ? 0 : part) },
      data: { what, value },
    },
    bare ? "" : brief(value, most),
  );
}

/**
 * A number that fits a cell; negligible ones are shown as ≈0.
 * @param {number} value
 * @param {number} most
 * @returns {string}
 */
function brief(value, most) {
  if (value === 0 || Math.abs(value) >= 1e-3 || most < 0.01) return short(value);
  return Math.abs(value) < 5e-4 ? "≈0" : value.toFixed(3).replace("-", "−");
}

/**
 * Cells in a row or a column: one stop for Tab, arrows go on within.
 * @param {Iterable<number>} values
 * @param {number} most
 * @param {string} name
 * @param {CellOptions & { first?: number }} [options]
 * @returns {HTMLElement[]}
 */
function cells(values, most, name, { first = 0, ...options } = {}) {
  const made = [...values].map((value, i) => cell(value, most, `${plain(name)}[${first + i}]`, options));
  if (made.length) made[0].tabIndex = 0;
  return made;
}

/**
 * A name without its marks, for sentences.
 * @param {string} name
 * @returns {string}
 */
function plain(name) {
  return name.replace(/[_^{}]/g, "").replace(/\s*\[[^\]]*\]/g, "");
}

/**
 * All numbers of a vector as a strip of colours; the pointer or the arrows read them one by one.
 * @param {string} name
 * @param {Float32Array} data
 * @param {(text: string) => void} say
 * @param {{ share?: boolean, label?: (i: number) => string }} [options]
 * @returns {HTMLElement}
 */
function strip(name, data, say, { share = false, label = (i) => `${plain(name)}[${i}]` } = {}) {
  const most = largest(data);
  const canvas = h("canvas", {
    class: "ribbon",
    width: data.length,
    height: 1,
    tabindex: 0,
    role: "slider",
    "aria-label": `${plain(name)}, all ${data.length}`,
    "aria-valuemin": 0,
    "aria-valuemax": data.length - 1,
  });
  const pen = penOf(canvas);
  data.forEach((value, i) => {
    const part = Number.isFinite(value) ? value / most : 0;
    pen.fillStyle = share ? shade(part) : balance(part);
    pen.fillRect(i, 0, 1, 1);
  });
  let at = 0;
  /** @param {number} i */
  function tell(i) {
    at = clamp(i, data.length - 1);
    const text = `${label(at)} = ${exact(data[at])}`;
    canvas.setAttribute("aria-valuenow", String(at));
    canvas.setAttribute("aria-valuetext", text);
    say(text);
  }
  canvas.addEventListener("pointermove", (event) =>
    tell(Math.floor((event.offsetX / canvas.clientWidth) * data.length)),
  );
  canvas.addEventListener("focus", () => tell(at));
  canvas.addEventListener("keydown", (event) => {
    const to = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      Home: 0,
      End: data.length - 1,
      PageUp: at + 16,
      PageDown: at - 16,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    tell(to);
  });
  return canvas;
}

/**
 * A number with all digits that it has as a float of 32 bits.
 * @param {number} value
 * @returns {string}
 */
export function exact(value) {
  if (!Number.isFinite(value)) return short(value);
  return String(Number(value.toPrecision(9))).replace("-", "−");
}

/**
 * A button that counts what is not written out, and shows it as a strip in `below`.
 * @param {string} name
 * @param {Float32Array} data
 * @param {HTMLElement} below
 * @param {(text: string) => void} say
 * @returns {HTMLElement | null}
 */
function more(name, data, below, say) {
  if (data.length <= FIRST) return null;
  /** @type {HTMLElement | null} */
  let shown = null;
  const button = h(
    "button",
    {
      type: "button",
      class: "link rest",
      "aria-expanded": "false",
      data: { testid: `more-${plain(name)}` },
      on: {
        click: () => {
          if (shown) {
            shown.remove();
            shown = null;
          } else {
            shown = h(
              "div",
              { class: "entire" },
              h("span", { class: "name" }, formula(name), ` all ${data.length}`),
              strip(name, data, say),
            );
            below.append(shown);
          }
          button.setAttribute("aria-expanded", String(Boolean(shown)));
        },
      },
    },
    `+ ${data.length - FIRST} more`,
  );
  return button;
}

/**
 * Vectors below each other, coordinate under coordinate. Rows: {sign, name, value, captions}.
 * @param {VectorRow[]} list
 * @param {(text: string) => void} say
 * @param {{ alike?: boolean }} [options]
 * @returns {HTMLElement}
 */
export function rows(list, say, { alike = false } = {}) {
  const below = h("div", { class: "strips" });
  const all = list.map((one) => decodeTensor(one.value).data);
  const common = largest(...all);
  const lines = list.map(({ sign = "", name, captions }, i) => {
    const data = all[i];
    return h(
      "div",
      { class: "vector" },
      h("span", { class: "sign", "aria-hidden": "true" }, sign),
      h("span", { class: "label" }, formula(`${name} [${data.length}]`)),
      h(
        "span",
        {
          class: "cells",
          role: "group",
          "aria-label": `${plain(name)}, the first ${Math.min(FIRST, data.length)} of ${data.length}`,
          data: { testid: `vector-${plain(name)}` },
        },
        cells(data.slice(0, FIRST), alike ? common : largest(data), name),
        captions ? captions.slice(0, FIRST).map((text) => h("small", {}, text)) : null,
      ),
      h("span", { class: "tail" }, more(name, data, below, say)),
    );
  });
  return h("div", { class: "figures" }, h("div", { class: "aligned" }, lines), below);
}

/**
 * y = W x + b with the corner of W that belongs to the first coordinates.
 * @param {LinearLetters} letters
 * @param {LinearCard} card
 * @param {(text: string) => void} say
 * @returns {HTMLElement}
 */
export function product({ y, W, x, b }, card, say) {
  const below = h("div", { class: "strips" });
  const corner = decodeTensor(card.weight);
  const [high, wide] = corner.shape;
  const most = largest(corner.data);
  const given = decodeTensor(card.x).data;
  const made = decodeTensor(card.y).data;
  const bias = card.bias ? decodeTensor(card.bias).data : null;
  /** @type {(name: string, data: Float32Array) => HTMLElement} */
  const column = (name, data) =>
    h(
      "div",
      { class: "upright" },
      h("span", { class: "label" }, formula(name), h("span", { class: "shape" }, String(data.length))),
      h(
        "span",
        {
          class: "cells",
          role: "group",
          "aria-label": `${plain(name)}, the first ${Math.min(FIRST, data.length)} of ${data.length}`,
          data: { testid: `vector-${plain(name)}` },
        },
        cells(data.slice(0, FIRST), largest(data), name),
      ),
      more(name, data, below, say) ?? h("span", { class: "rest" }),
    );
  /** @type {HTMLElement[]} */
  const grid = [];
  for (let i = 0; i < high; i += 1) {
    for (let j = 0; j < wide; j += 1) grid.push(cell(corner.data[i * wide + j], most, `${plain(W)}[${i}, ${j}]`));
  }
  grid[0].tabIndex = 0;
  /** @type {(text: string) => HTMLElement} */
  const sign = (text) => h("span", { class: "sign", "aria-hidden": "true" }, text);
  const [rowsOf, columnsOf] = card.shape;
  const cut = rowsOf > high || columnsOf > wide ? `a corner of ${rowsOf}×${columnsOf}` : "";
  return h(
    "div",
    { class: "figures" },
    h(
      "div",
      { class: "product" },
      column(y, made),
      sign("="),
      h(
        "div",
        { class: "upright" },
        h("span", { class: "label" }, formula(W), h("span", { class: "shape" }, `${rowsOf}×${columnsOf}`)),
        h(
          "span",
          {
            class: "cells square",
            role: "group",
            "aria-label": `${plain(W)}, ${high} by ${wide} of ${rowsOf} by ${columnsOf}`,
            style: { "grid-template-columns": `repeat(${wide}, auto)` },
            data: { testid: `matrix-${plain(W)}`, columns: wide },
          },
          grid,
        ),
        h("span", { class: "rest quiet" }, cut),
      ),
      sign("·"),
      column(x, given),
      bias ? [sign("+"), column(b, bias)] : null,
    ),
    below,
    worked(y, corner, given, bias, made),
  );
}

/**
 * The first coordinate written out.
 * @param {string} y
 * @param {Tensor} corner
 * @param {Float32Array} x
 * @param {Float32Array | null} bias
 * @param {Float32Array} made
 * @returns {HTMLElement}
 */
function worked(y, corner, x, bias, made) {
  const terms = [];
  const shown = Math.min(3, corner.shape[1], x.length);
  for (let j = 0; j < shown; j += 1) terms.push(`${bracketed(corner.data[j])}·${bracketed(x[j])}`);
  const left = x.length - shown;
  const rest = left > 0 ? ` + … ${left} more` : "";
  const added = bias ? ` + ${bracketed(bias[0])}` : "";
  const first = y.includes("_") ? y.replace(/_\{(\d+)\}/, "_{$1, 0}") : `${y}_0`;
  return h(
    "p",
    { class: "worked" },
    formula(first),
    ` = ${terms.join(" + ")}${rest}${added} = `,
    h("b", {}, short(made[0])),
  );
}

/**
 * A number in a sum, in parentheses if negative.
 * @param {number} value
 * @returns {string}
 */
export function bracketed(value) {
  const text = short(value);
  return text.startsWith("−") ? `(${text})` : text;
}

/**
 * A line of named numbers: [name, value, unit].
 * @param {[string, number, string?][]} list
 * @returns {HTMLElement}
 */
export function facts(list) {
  return h(
    "p",
    { class: "numbers" },
    list.map(([name, value, unit = ""]) =>
      h(
        "span",
        {},
        formula(name),
        " = ",
        h("b", { data: { value, what: plain(name) }, tabindex: 0 }, short(value)),
        unit,
      ),
    ),
  );
}

/**
 * Tokens below each other with what belongs to each. Columns: {title, of(j) -> node}.
 * @param {string} label
 * @param {Token[]} tokens
 * @param {number} first
 * @param {number} count
 * @param {KeyedColumn[]} columns
 * @param {number} here
 * @returns {HTMLElement}
 */
export function keyed(label, tokens, first, count, columns, here) {
  /** @type {(j: number) => HTMLElement} */
  const line = (j) =>
    h(
      "tr",
      { class: j === here ? "own" : "", data: { key: j } },
      h("th", { scope: "row" }, h("span", { class: "quiet place" }, String(j)), token(tokens[j])),
      columns.map((one) => h("td", { class: one.class ?? "" }, one.of(j))),
    );
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "keyed", "aria-label": label },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "token"),
          columns.map((one) => h("th", { scope: "col" }, one.title)),
        ),
      ),
      h(
        "tbody",
        {},
        Array.from({ length: count }, (_, i) => line(first + i)),
      ),
    ),
  );
}

/**
 * A row of a matrix as colours; exact numbers are shown on focus.
 * @param {Float32Array} data
 * @param {number} most
 * @param {string} name
 * @returns {HTMLElement}
 */
export function small(data, most, name) {
  return h(
    "span",
    { class: "cells small", role: "group", "aria-label": plain(name) },
    cells(data.slice(0, FIRST), most, name, { bare: true }),
  );
}

/**
 * A number in a table.
 * @param {number} value
 * @param {number} most
 * @param {string} what
 * @param {CellOptions} [options]
 * @returns {HTMLElement}
 */
export function single(value, most, what, options) {
  const made = cell(value, most, what, options);
  made.tabIndex = 0;
  return made;
}

/**
 * A share as a bar with its figure.
 * @param {number} value
 * @param {string} what
 * @param {number} [most]
 * @returns {HTMLElement}
 */
export function weighted(value, what, most = 1) {
  return h(
    "span",
    {
      class: "weighted",
      tabindex: 0,
      role: "img",
      "aria-label": `${what} = ${percent(value)}`,
      data: { value, what },
    },
    h("span", { class: "track" }, h("span", { class: "filled", style: { width: `${(100 * value) / most}%` } })),
    h("span", { class: "figure" }, percent(value)),
  );
}

/**
 * All tokens as a strip, where only some are written out.
 * @param {string} name
 * @param {Float32Array} data
 * @param {Token[]} tokens
 * @param {(text: string) => void} say
 * @param {{ share?: boolean, shown?: number }} [options]
 * @returns {HTMLElement | null}
 */
export function everywhere(name, data, tokens, say, { share = false, shown = 0 } = {}) {
  if (data.length <= shown) return null;
  return h(
    "div",
    { class: "entire" },
    h("span", { class: "name" }, formula(name), ` of all ${plural(data.length, "token")}`),
    strip(name, data, say, { share, label: (j) => `${plain(name)}[${j}], “${tokens[j]?.text ?? j}”` }),
  );
}

/**
 * Which key-value head each head uses: lines from heads to those.
 * @param {number} heads
 * @param {number} shared
 * @param {number} head
 * @returns {HTMLElement}
 */
export function groups(heads, shared, head) {
  const step = Math.max(16, Math.min(46, 520 / heads));
  const size = Math.min(15, step / 2 - 1);
  const kv = Math.floor((head * shared) / heads);
  /** @type {(i: number) => number} */
  const x = (i) => step * (i + 0.5);
  /** @type {(i: number) => number} */
  const below = (i) => step * (((i + 0.5) * heads) / shared);
  const wide = step * heads;
  const numbers = size > 8;
  const lines = Array.from({ length: heads }, (_, i) =>
    s("line", {
      x1: x(i),
      y1: 22 + size,
      x2: below(Math.floor((i * shared) / heads)),
      y2: 84 - size,
      class: i === head ? "lit" : "",
    }),
  );
  const top = Array.from({ length: heads }, (_, i) => [
    s("circle", { cx: x(i), cy: 22, r: size, class: i === head ? "lit" : "" }),
    numbers ? s("text", { x: x(i), y: 22, class: i === head ? "lit" : "" }, String(i)) : null,
  ]);
  const bottom = Array.from({ length: shared }, (_, i) => [
    s("rect", {
      x: below(i) - size,
      y: 84 - size,
      width: 2 * size,
      height: 2 * size,
      rx: 4,
      class: i === kv ? "lit" : "",
    }),
    numbers ? s("text", { x: below(i), y: 84, class: i === kv ? "lit" : "" }, String(i)) : null,
  ]);
  const said =
    shared === heads
      ? `each of the ${heads} heads has its own keys and values`
      : `${heads} heads share ${shared} key-value heads; head ${head} uses ${kv}`;
  return h(
    "div",
    { class: "scroll" },
    h(
      "div",
      { class: "grouping" },
      h(
        "div",
        { class: "sides quiet", "aria-hidden": "true" },
        h("span", {}, "queries"),
        h("span", {}, "keys, values"),
      ),
      s(
        "svg",
        { viewBox: `0 0 ${wide} 106`, width: wide, height: 106, role: "img", "aria-label": said, class: "groups" },
        lines,
        top.flat().filter(Boolean),
        bottom.flat().filter(Boolean),
      ),
    ),
  );
}

/**
 * Pairs of coordinates as vectors: pale before the rotation, solid after it.
 * @param {CardFields["rotate"]} card
 * @returns {HTMLElement}
 */
export function dials(card) {
  const [angles, x, y, xk, yk] = [card.angles, card.x, card.y, card.x_key, card.y_key].map(
    (one) => decodeTensor(one).data,
  );
  const half = angles.length;
  /** @type {(data: Float32Array, i: number) => [number, number]} */
  const pair = (data, i) => (card.layout === "pairs" ? [data[2 * i], data[2 * i + 1]] : [data[i], data[i + half]]);
  const shown = Math.min(half, 6);
  const made = Array.from({ length: shown }, (_, i) => {
    const hands = [
      { data: x, name: "q before" },
      { data: y, name: "q after" },
      { data: xk, name: "k before" },
      { data: yk, name: "k after" },
    ];
    const most = Math.max(...hands.map(({ data }) => Math.hypot(...pair(data, i)))) || 1;
    const names = card.layout === "pairs" ? [2 * i, 2 * i + 1] : [i, i + half];
    const turn = (angles[i] * 180) / Math.PI;
    const what = `angle of coordinates ${names.join(" and ")}, radians`;
    return h(
      "figure",
      {
        tabindex: 0,
        data: { value: angles[i], what, testid: "dial" },
        "aria-label": `coordinates ${names.join(" and ")} rotated by ${short(turn)} degrees`,
      },
      s(
        "svg",
        { viewBox: "-50 -50 100 100", width: 96, height: 96, "aria-hidden": "true" },
        s("circle", { r: 46, class: "rim" }),
        s("line", { x1: -46, x2: 46, y1: 0, y2: 0, class: "cross-hair" }),
        s("line", { y1: -46, y2: 46, x1: 0, x2: 0, class: "cross-hair" }),
        hands.map(({ data, name }) => {
          const [a, b] = pair(data, i);
          return s("line", {
            x1: 0,
            y1: 0,
            x2: (44 * a) / most,
            y2: (-44 * b) / most,
            class: name,
          });
        }),
      ),
      h("figcaption", {}, h("span", { class: "quiet" }, names.join(", ")), ` ${short(turn)}°`),
    );
  });
  const rest =
    half > shown
      ? h("p", { class: "quiet" }, `+ ${plural(half - shown, "more pair")}: with lower frequencies.`)
      : null;
  return h(
    "div",
    { class: "figures" },
    h("div", { class: "dials" }, made),
    h(
      "p",
      { class: "legend" },
      h("span", {}, h("i", { class: "q" }), "query"),
      h("span", {}, h("i", { class: "k" }), "key"),
      h("span", {}, "pale: before the rotation"),
    ),
    rest,
  );
}

/**
 * The activation as a curve, with the neurons of this token on it.
 * @param {(x: number) => number} act
 * @param {string} name
 * @param {number[]} inputs
 * @returns {SVGElement}
 */
export function curve(act, name, inputs) {
  const reach = Math.min(6, Math.max(2, Math.ceil(largest(inputs))));
  /** @type {(value: number) => number} */
  const x = (value) => 130 + (value / reach) * 120;
  /** @type {(value: number) => number} */
  const y = (value) => 104 - (value / reach) * 92;
  const points = Array.from({ length: 97 }, (_, i) => {
    const at = -reach + (2 * reach * i) / 96;
    return `${x(at).toFixed(1)},${y(act(at)).toFixed(1)}`;
  });
  const dots = [...inputs]
    .filter((value) => Math.abs(value) <= reach)
    .map((value) => s("circle", { cx: x(value), cy: y(act(value)), r: 3 }));
  return s(
    "svg",
    {
      viewBox: "0 0 260 134",
      width: 260,
      height: 134,
      class: "curve",
      role: "img",
      "aria-label": `${name} from −${reach} to ${reach}, with the strongest neurons on it`,
    },
    s("line", { x1: 10, x2: 250, y1: 104, y2: 104 }),
    s("line", { x1: 130, x2: 130, y1: 6, y2: 128 }),
    s("polyline", { points: points.join(" ") }),
    dots,
    s("text", { x: 12, y: 118 }, `−${reach}`),
    s("text", { x: 248, y: 118, class: "end" }, String(reach)),
    s("text", { x: 136, y: 16 }, `${name}(x)`),
  );
}

/**
 * The outputs of all heads as strips; concatenated, they are one vector.
 * @param {PackedTensor} packed
 * @param {number} head
 * @param {(text: string) => void} say
 * @returns {HTMLElement}
 */
export function heads(packed, head, say) {
  const {
    shape: [count, wide],
    data,
  } = decodeTensor(packed);
  const lines = Array.from({ length: count }, (_, i) =>
    h(
      "div",
      { class: i === head ? "one lit" : "one" },
      h("span", { class: "name" }, `head ${i}`),
      strip(`z_${i}`, data.subarray(i * wide, (i + 1) * wide), say),
    ),
  );
  return h("div", { class: "joined" }, lines);
}
