// Pens of canvases, and what they draw as shapes while a picture is taken.

import { s } from "glasshouse/dom.js";

/** What a picture cannot show as shapes. */
const PIXELS = new Set(["drawImage", "putImageData", "arc", "bezierCurveTo", "quadraticCurveTo", "ellipse"]);

/** @type {WeakMap<HTMLCanvasElement, Drawn> | null} */
let recorded = null;

/**
 * What draws on a canvas; it is null only where a canvas has been given to something else.
 * @param {HTMLCanvasElement} canvas
 * @returns {CanvasRenderingContext2D}
 */
export function penOf(canvas) {
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  return recorded ? recorder(canvas, pen, recorded) : pen;
}

/**
 * Record what canvases draw from now on, without their texts, which are recorded alone; null ends that.
 * @param {boolean} isOn
 */
export function recordPens(isOn) {
  recorded = isOn ? new WeakMap() : null;
}

/**
 * What was drawn on a canvas since, in its own pixels.
 * @param {HTMLCanvasElement} canvas
 * @returns {Drawn | undefined}
 */
export function drawnOn(canvas) {
  return recorded?.get(canvas);
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {CanvasRenderingContext2D} pen
 * @param {WeakMap<HTMLCanvasElement, Drawn>} all
 * @returns {CanvasRenderingContext2D}
 */
function recorder(canvas, pen, all) {
  /** @type {Drawn} */
  const drawn = { shapes: [], texts: [], hasPixels: false };
  all.set(canvas, drawn);
  let path = "";
  /** @type {(x: number, y: number) => DOMPoint} */
  const at = (x, y) => pen.getTransform().transformPoint(new DOMPoint(x, y));
  /** @type {(name: string, x: number, y: number) => string} */
  const step = (name, x, y) => `${name}${at(x, y).x.toFixed(1)} ${at(x, y).y.toFixed(1)}`;
  /** @type {(x: number, y: number, width: number, height: number) => string} */
  const frame = (x, y, width, height) =>
    `${step("M", x, y)}${step("L", x + width, y)}${step("L", x + width, y + height)}${step("L", x, y + height)}Z`;
  const ink = () => ({ fill: String(pen.fillStyle), opacity: pen.globalAlpha < 1 ? pen.globalAlpha : undefined });
  const line = () => ({
    fill: "none",
    stroke: String(pen.strokeStyle),
    "stroke-width": pen.lineWidth * pen.getTransform().a,
    "stroke-dasharray": pen.getLineDash().join(" ") || undefined,
  });
  /** @type {Record<string, (...given: any[]) => void>} */
  const acts = {
    fillRect: (x, y, width, height) => {
      const [from, to] = [at(x, y), at(x + width, y + height)];
      const size = { width: (to.x - from.x).toFixed(1), height: (to.y - from.y).toFixed(1) };
      drawn.shapes.push(s("rect", { x: from.x.toFixed(1), y: from.y.toFixed(1), ...size, ...ink() }));
    },
    strokeRect: (x, y, width, height) => {
      drawn.shapes.push(s("path", { d: frame(x, y, width, height), ...line() }));
    },
    beginPath: () => {
      path = "";
    },
    moveTo: (x, y) => {
      path += step("M", x, y);
    },
    lineTo: (x, y) => {
      path += step("L", x, y);
    },
    rect: (x, y, width, height) => {
      path += frame(x, y, width, height);
    },
    roundRect: (x, y, width, height) => {
      path += frame(x, y, width, height);
    },
    stroke: () => {
      drawn.shapes.push(s("path", { d: path, ...line() }));
    },
    fill: () => {
      drawn.shapes.push(s("path", { d: path, ...ink() }));
    },
    fillText: (text, x, y) => {
      const place = at(x, y);
      const { a, b } = pen.getTransform();
      const turn = (Math.atan2(b, a) * 180) / Math.PI;
      const size = Number.parseFloat(/([\d.]+)px/.exec(pen.font)?.[1] ?? "10") * Math.hypot(a, b);
      const node = s(
        "text",
        {
          x: place.x.toFixed(1),
          y: place.y.toFixed(1),
          transform: turn ? `rotate(${turn.toFixed(1)} ${place.x.toFixed(1)} ${place.y.toFixed(1)})` : undefined,
          dy: pen.textBaseline === "middle" ? "0.35em" : undefined,
          "font-family": "DejaVu Sans Mono, Menlo, Consolas, monospace",
          "font-size": size.toFixed(1),
          "text-anchor": { right: "end", center: "middle" }[String(pen.textAlign)],
          ...ink(),
        },
        String(text),
      );
      drawn.texts.push({ x: place.x, y: place.y, node });
    },
  };
  return new Proxy(pen, {
    get(_, name) {
      const value = Reflect.get(pen, name);
      if (typeof value !== "function") return value;
      return (/** @type {any[]} */ ...given) => {
        if (PIXELS.has(String(name))) drawn.hasPixels = true;
        acts[String(name)]?.(...given);
        return name === "fillText" ? undefined : value.apply(pen, given);
      };
    },
    set: (_, name, value) => Reflect.set(pen, name, value),
  });
}
