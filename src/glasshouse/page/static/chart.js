// Line charts over training steps, or along something else: axes, a legend with values, and a cursor at one step.

import { h, put, s } from "glasshouse/dom.js";
import { clamp, short } from "glasshouse/number.js";

const LEFT = 52; // pixels for axis labels
const BELOW = 22;
const ABOVE = 8;
const RIGHT = 12;
const DOTS = 60; // points up to which each is shown

/**
 * Round numbers between two, about so many.
 * @param {number} low
 * @param {number} high
 * @param {number} [about]
 * @returns {number[]}
 */
function ticks(low, high, about = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((one) => one * power >= rough * 0.75) ?? 10);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first) + 1 }, (_, i) =>
    Number(((first + i) * step).toPrecision(12)),
  );
}

/**
 * Round numbers between two on a scale of powers of ten.
 * @param {number} low
 * @param {number} high
 * @returns {number[]}
 */
function powers(low, high) {
  /** @type {number[]} */
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const one of [1, 2, 5]) {
      const value = Number((one * 10 ** power).toPrecision(12));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  if (found.length > 8) {
    const whole = found.filter((value) => Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6));
    const every = Math.ceil(whole.length / 8);
    return whole.filter((_, i) => i % every === 0);
  }
  return found.length > 1 ? found : ticks(low, high, 3);
}

/**
 * Bias-corrected exponential moving average: 0 is no smoothing, near 1 is strong.
 * @param {number[]} values
 * @param {number} weight
 * @returns {number[]}
 */
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let share = 0;
  return values.map((value) => {
    sum = sum * weight + value * (1 - weight);
    share = share * weight + (1 - weight);
    return sum / share;
  });
}

/**
 * The index of the nearest value in a sorted array.
 * @param {number[]} numbers
 * @param {number} one
 * @returns {number}
 */
export function nearest(numbers, one) {
  let low = 0;
  let high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < one) low = middle + 1;
    else high = middle;
  }
  return low > 0 && one - numbers[low - 1] <= numbers[low] - one ? low - 1 : low;
}

/**
 * A chart. `show({series, log, from, to, zero})` draws: a series is {name, colour, x, y} with optional {low, high}
 * for a band, `smooth` (0 to 1) for a smoothed line over a pale one, and `testid`. `mark(step)` moves the cursor to a
 * step and shows its values; null removes it. `onmove(step)` is called on pointer or key movement (null: the pointer
 * left), `onpick(step)` on selection.
 * @param {ChartOptions} options
 * @returns {Chart}
 */
export function chart({ title, unit = "", height = 190, onmove, onpick, isMain = false, along = "step", testid }) {
  const legend = h("figcaption", { class: "chart-legend" });
  const area = h("div", { class: "chart-area", style: { height: `${height}px` } });
  const node = h("figure", { class: "chart", data: { testid } }, legend, area);
  /** @type {ChartContent | null} */
  let given = null;
  /** @type {number | null} */
  let at = null;
  /** @type {{ X: (step: number) => number, Y: (value: number) => number, from: number, to: number, wide: number } | null} */
  let scale = null;
  let width = 0;
  const cursor = s("g", { class: "chart-cursor" });
  const follow = new ResizeObserver(() => {
    const now = Math.floor(area.clientWidth);
    if (now && now !== width) {
      width = now;
      draw();
    }
  });
  follow.observe(area);

  function draw() {
    if (!given || !width) return;
    const { series, log, from, to } = given;
    const drawn = series.filter((one) => one.x.length);
    const every = drawn
      .flatMap((one) => [...one.y, ...(one.low ?? []), ...(one.high ?? [])])
      .filter((value) => !log || value > 0);
    area.style.setProperty("height", every.length ? `${height}px` : "auto");
    if (!every.length) {
      put(area, h("p", { class: "chart-none" }, "no data yet"));
      put(legend, h("strong", {}, title));
      return;
    }
    let low = every.reduce((a, b) => Math.min(a, b));
    let high = every.reduce((a, b) => Math.max(a, b));
    if (given.zero && !log) low = Math.min(0, low);
    if (low === high)
      [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    /** @type {(value: number) => number} */
    const y = log ? (value) => Math.log(value) : (value) => value;
    const room = (y(high) - y(low)) * 0.04;
    const bottom = given.zero && !log && low === 0 ? 0 : y(low) - room;
    const top = y(high) + room;
    const wide = Math.max(1, width - LEFT - RIGHT);
    const deep = height - ABOVE - BELOW;
    /** @type {(step: number) => number} */
    const X = (step) => LEFT + (to > from ? (step - from) / (to - from) : 0.5) * wide;
    /** @type {(value: number) => number} */
    const Y = (value) => ABOVE + (1 - (y(value) - bottom) / (top - bottom)) * deep;
    scale = { X, Y, from, to, wide };
    const rows = (log ? powers(low, high) : ticks(low, high, height > 160 ? 5 : 3)).filter(
      (value) => Y(value) >= ABOVE - 1 && Y(value) <= height - BELOW + 1,
    );
    const columns = ticks(from, to, Math.max(2, Math.floor(wide / 110))).filter(
      (one) => to - from < 1 || Number.isInteger(one),
    );
    /** @type {Child[]} */
    const shapes = [
      rows.map((value) => [
        s("line", { class: "chart-grid", x1: LEFT, x2: width - RIGHT, y1: Y(value), y2: Y(value) }),
        s("text", { class: "chart-row", x: LEFT - 8, y: Y(value) }, tick(value)),
      ]),
      columns.map((step) => {
        const text = Number.isInteger(step) ? step.toLocaleString("en") : tick(step);
        const isLast = X(step) + text.length * 3.5 > width; // it would be cut off
        return s(
          "text",
          { class: isLast ? "chart-column last" : "chart-column", x: isLast ? width : X(step), y: height - 6 },
          text,
        );
      }),
      drawn.map((one) => shapesOf(one, Boolean(log), X, Y)),
      cursor,
    ];
    const role = isMain
      ? {
          tabindex: "0",
          role: "slider",
          "aria-label": `${title}: ${along}`,
          "aria-valuemin": from,
          "aria-valuemax": to,
        }
      : { role: "img", "aria-label": describe(drawn) };
    const listen = onmove
      ? {
          pointermove: passed,
          pointerdown: passed,
          pointerleave: () => onmove(null),
          click: (/** @type {MouseEvent} */ event) => onpick?.(stepAt(event)),
          keydown: isMain ? walked : () => {},
        }
      : {};
    const old = area.querySelector("svg");
    const focused = old && document.activeElement === old;
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, ...role, on: listen }, shapes);
    put(area, svg);
    if (focused) svg.focus({ preventScroll: true });
    mark(at);
  }

  /**
   * @param {Series[]} drawn
   * @returns {string}
   */
  function describe(drawn) {
    const ends = drawn.map(
      (one) =>
        `${one.name} from ${short(one.y[0])} at ${along} ${one.x[0]} to ${short(one.y.at(-1))} at ${along} ${one.x.at(-1)}`,
    );
    return `${title}${unit ? ` in ${unit}` : ""}: ${ends.join("; ")}`;
  }

  /**
   * @param {MouseEvent} event
   * @returns {number}
   */
  function stepAt(event) {
    if (!given || !scale) return 0; // nothing is drawn yet
    const x = event.clientX - area.getBoundingClientRect().left;
    const step = scale.from + ((x - LEFT) / scale.wide) * (scale.to - scale.from);
    const dense = given.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    return dense.x[nearest(dense.x, step)];
  }

  /** @param {PointerEvent} event */
  function passed(event) {
    onmove?.(stepAt(event));
  }

  /** @param {KeyboardEvent} event */
  function walked(event) {
    if (!given) return;
    const dense = given.series.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
    const now = at === null ? dense.length : nearest(dense, at);
    const far = Math.max(1, Math.round(dense.length / 20));
    const to = {
      ArrowRight: now + 1,
      ArrowUp: now + 1,
      ArrowLeft: now - 1,
      ArrowDown: now - 1,
      PageUp: now + far,
      PageDown: now - far,
      Home: 0,
      End: dense.length - 1,
    }[event.key];
    if (event.key === "Enter" || event.key === " ") onpick?.(dense[Math.min(now, dense.length - 1)]);
    else if (to === undefined) return;
    else onmove?.(dense[clamp(to, dense.length - 1)], true);
    event.preventDefault();
  }

  /** @param {number | null} step */
  function mark(step) {
    at = step;
    if (!given) return;
    const drawn = given.series.filter((one) => one.x.length);
    /** @type {SVGElement[]} */
    const marks = [];
    const values = drawn.map((one) => {
      const i = step === null ? one.x.length - 1 : nearest(one.x, step);
      if (step !== null && scale)
        marks.push(s("circle", { cx: scale.X(one.x[i]), cy: scale.Y(one.y[i]), r: 4, style: { fill: one.colour } }));
      return { one, i };
    });
    if (step !== null && scale)
      marks.unshift(s("line", { x1: scale.X(step), x2: scale.X(step), y1: ABOVE, y2: height - BELOW }));
    put(cursor, marks);
    put(
      legend,
      h("strong", {}, title),
      unit ? h("span", { class: "quiet" }, unit) : null,
      values.map(({ one, i }) =>
        h(
          "span",
          { class: "chart-value", data: { testid: one.testid, value: one.y[i], step: one.x[i] } },
          h("i", { style: { background: one.colour } }),
          drawn.length > 1 ? `${one.name} ` : "",
          h("b", {}, formatValue(one.y[i])),
          one.x[i] !== (step ?? (along === "step" ? one.x[i] : null))
            ? h("span", { class: "quiet" }, ` at ${one.x[i].toLocaleString("en")}`)
            : null,
        ),
      ),
    );
    const svg = area.querySelector("svg[role=slider]");
    if (svg) {
      svg.setAttribute("aria-valuenow", String(step ?? given.to));
      svg.setAttribute(
        "aria-valuetext",
        `${along} ${step ?? given.to}: ${values.map(({ one, i }) => `${one.name} ${short(one.y[i])}`).join(", ")}`,
      );
    }
  }

  /** @param {ChartContent} content */
  function show(content) {
    given = content;
    width = Math.floor(area.clientWidth) || width;
    draw();
  }
  return Object.assign(node, { show, mark, close: () => follow.disconnect() });
}

/**
 * A value in three digits, or as an integer from 1,000.
 * @param {number} value
 * @returns {string}
 */
function formatValue(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : tick(Number(value.toPrecision(3)));
}

/**
 * @param {number} value
 * @returns {string}
 */
function tick(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6))
    return value.toExponential().replace("e+", "e").replace("-", "−");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 }).replace("-", "−");
}

/**
 * @param {Series} one
 * @param {boolean} log
 * @param {(step: number) => number} X
 * @param {(value: number) => number} Y
 * @returns {Child[]}
 */
function shapesOf(one, log, X, Y) {
  /** @type {(value: number) => boolean} */
  const fits = (value) => !log || value > 0;
  /** @type {(values: number[]) => string} */
  const path = (values) => {
    let pen = "M";
    let d = "";
    values.forEach((value, i) => {
      if (!fits(value)) {
        pen = "M";
        return;
      }
      d += `${pen}${X(one.x[i]).toFixed(1)} ${Y(value).toFixed(1)}`;
      pen = "L";
    });
    return d;
  };
  /** @type {Child[]} */
  const shapes = [];
  const { low, high } = one;
  if (low && high) {
    const up = high.map((value, i) => `${X(one.x[i]).toFixed(1)} ${Y(value).toFixed(1)}`);
    const down = low
      .map((value, i) => (fits(value) ? `${X(one.x[i]).toFixed(1)} ${Y(value).toFixed(1)}` : null))
      .filter(Boolean)
      .reverse();
    if (high.every(fits))
      shapes.push(
        s("path", { class: "chart-band", d: `M${up.join("L")}L${down.join("L")}Z`, style: { fill: one.colour } }),
      );
  }
  const calm = one.smooth ? smoothed(one.y, one.smooth) : one.y;
  if (one.smooth) shapes.push(s("path", { class: "chart-line pale", d: path(one.y), style: { stroke: one.colour } }));
  const dashes = one.dashed ? { "stroke-dasharray": "6 6" } : {};
  shapes.push(s("path", { class: "chart-line", d: path(calm), style: { stroke: one.colour }, ...dashes }));
  if (one.dots && one.x.length <= DOTS)
    shapes.push(
      one.y
        .map((value, i) =>
          fits(value)
            ? s("circle", {
                class: "chart-dot",
                cx: X(one.x[i]),
                cy: Y(value),
                r: one.dashed ? 1.5 : 3,
                style: { fill: one.colour },
              })
            : null,
        )
        .filter(Boolean),
    );
  return shapes;
}
