// Pictures of figures, for slides and paper: what is on the screen as SVG of rectangles, texts, paths and images, or as
// PNG, dark on white, with a caption that says what it is of.

import { showTheme } from "glasshouse/colour.js";
import { h, s } from "glasshouse/dom.js";
import { drawnOn, recordPens } from "glasshouse/pen.js";

const MARGIN = 16; // pixels around a figure
const CAPTION = 12; // pixels of a letter of the caption
const LINE = 17; // and of a line
const FINE = 2; // pixels of a PNG for each of the screen
const MANY = 5000; // shapes of a canvas above which it is an image
const SANS = "DejaVu Sans, Helvetica, Arial, sans-serif";
const STYLES = [
  "stroke-width",
  "stroke-dasharray",
  "stroke-linecap",
  "font-size",
  "font-family",
  "font-weight",
  "text-anchor",
];

/** @type {(reads?: string[]) => string[]} */
let subject = () => [];

/**
 * Say what the figures of this page are of: the model, and of text and selection what they depend on.
 * @param {(reads?: string[]) => string[]} tell
 */
export function captionBy(tell) {
  subject = tell;
}

/**
 * A button that saves a figure. It may be drawn anew meanwhile, and is asked for then.
 * @param {string} title
 * @param {() => Element} figure
 * @param {() => { about?: string[], reads?: string[] }} [told]
 * @returns {HTMLElement}
 */
export function pictureButton(title, figure, told = () => ({})) {
  /** @type {(kind: "svg" | "png") => HTMLElement} */
  const button = (kind) =>
    h(
      "button",
      {
        type: "button",
        class: "tool",
        "aria-label": `save “${title}” as ${kind.toUpperCase()}`,
        data: { testid: `picture-${kind}` },
        on: {
          click: async () => {
            menu.open = false;
            const { about = [], reads } = told();
            await save(figure, [...about, ...subject(reads)], title, kind);
          },
        },
      },
      kind.toUpperCase(),
    );
  const label = `picture of “${title}”`;
  const menu = h(
    "details",
    { class: "picture" },
    h("summary", { "aria-label": label, title: "save this figure as a picture" }),
    h("div", {}, button("svg"), button("png")),
  );
  return menu;
}

/**
 * @param {() => Element} figure
 * @param {string[]} captions
 * @param {string} title
 * @param {"svg" | "png"} kind
 */
async function save(figure, captions, title, kind) {
  const svg = await onPaper(() => pictureOf(figure(), captions));
  const text = new XMLSerializer().serializeToString(svg);
  const blob = kind === "svg" ? new Blob([text], { type: "image/svg+xml" }) : await bitmap(text, svg);
  const name = title
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 60);
  const link = h("a", { href: URL.createObjectURL(blob), download: `${name || "figure"}.${kind}` });
  link.click();
  URL.revokeObjectURL(link.href);
}

/**
 * Take a picture of the page in the light theme, with all canvases drawn anew; some draw in the next frame.
 * @template T
 * @param {() => T} take
 * @returns {Promise<T>}
 */
async function onPaper(take) {
  recordPens(true);
  try {
    showTheme("light");
    for (let i = 0; i < 2; i += 1) await new Promise((done) => requestAnimationFrame(done));
    return take();
  } finally {
    recordPens(false);
    showTheme();
  }
}

/**
 * @param {string} text
 * @param {SVGElement} svg
 * @returns {Promise<Blob>}
 */
async function bitmap(text, svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const [width, height] = ["width", "height"].map((name) => FINE * Number(svg.getAttribute(name)));
  const canvas = h("canvas", { width: Math.ceil(width), height: Math.ceil(height) });
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.drawImage(image, 0, 0, width, height);
  return new Promise((done, fail) =>
    canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error("the picture is too large"))), "image/png"),
  );
}

/**
 * @param {Element} figure
 * @param {string[]} captions
 * @returns {SVGElement}
 */
function pictureOf(figure, captions) {
  const drawing = laidOut(figure, () => {
    const { left, top } = figure.getBoundingClientRect();
    const made = new Drawing(left, top);
    made.add(figure);
    return made;
  });
  const width = Math.max(drawing.right, 360);
  const lines = captions.flatMap((line) => wrapped(line, width / (0.6 * CAPTION)));
  const bottom = drawing.bottom + MARGIN + CAPTION;
  const said = lines.map((line, i) =>
    s(
      "text",
      { x: 0, y: bottom + i * LINE, "font-family": SANS, "font-size": CAPTION, fill: "#444444" },
      valid(line),
    ),
  );
  const [wide, tall] = [width + 2 * MARGIN, bottom + lines.length * LINE + MARGIN].map(Math.ceil);
  return s(
    "svg",
    { xmlns: "http://www.w3.org/2000/svg", width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}` },
    s("title", {}, lines.join(" ")),
    s("rect", { width: wide, height: tall, fill: "#ffffff" }),
    s("g", { transform: `translate(${MARGIN} ${MARGIN})` }, drawing.shapes, said),
  );
}

/**
 * Lay a figure out as for paper: without controls, and with what would have to be scrolled. Parts with canvases stay,
 * since these draw what is in view alone.
 * @template T
 * @param {Element} figure
 * @param {() => T} act
 * @returns {T}
 */
function laidOut(figure, act) {
  const scrolled = [...figure.querySelectorAll("*")].filter(
    (one) => /auto|scroll/.test(getComputedStyle(one).overflow) && !one.querySelector("canvas"),
  );
  figure.classList.add("on-paper");
  for (const one of scrolled) one.classList.add("unrolled");
  try {
    return act();
  } finally {
    figure.classList.remove("on-paper");
    for (const one of scrolled) one.classList.remove("unrolled");
  }
}

/**
 * A text in lines of at most so many letters.
 * @param {string} text
 * @param {number} most
 * @returns {string[]}
 */
function wrapped(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const last = lines.length - 1;
    if (lines[last] && lines[last].length + word.length >= most) lines.push(word);
    else lines[last] += lines[last] ? ` ${word}` : word;
  }
  return lines;
}

class Drawing {
  /**
   * @param {number} left
   * @param {number} top
   */
  constructor(left, top) {
    this.left = left;
    this.top = top;
    this.right = 0;
    this.bottom = 0;
    /** @type {SVGElement[]} */
    this.shapes = [];
  }

  /**
   * Draw an element and what is in it.
   * @param {Element} node
   * @param {Clip} [clip]
   */
  add(node, clip = EVERYWHERE) {
    if (!node.checkVisibility()) return;
    const box = node.getBoundingClientRect();
    const style = getComputedStyle(node);
    const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    if (x < clip.left || x > clip.right || y < clip.top || y > clip.bottom) return; // scrolled away
    if (node instanceof SVGSVGElement) return this.addSvg(node, box);
    if (node instanceof HTMLCanvasElement) return this.addCanvas(node, box);
    this.addBox(box, style);
    const isClipped = style.overflowX !== "visible";
    const inner = isClipped ? within(clip, box) : clip;
    for (const child of node.childNodes) {
      if (child instanceof Element) this.add(child, inner);
      else if (child instanceof Text && child.data.trim()) this.addText(child, style, inner);
    }
  }

  /**
   * @param {SVGElement} shape
   * @param {{ right: number, bottom: number }} box
   */
  push(shape, { right, bottom }) {
    this.shapes.push(shape);
    this.right = Math.max(this.right, right - this.left);
    this.bottom = Math.max(this.bottom, bottom - this.top);
  }

  /**
   * The background of an element and its borders.
   * @param {DOMRect} box
   * @param {CSSStyleDeclaration} style
   */
  addBox(box, style) {
    const [x, y] = [box.left - this.left, box.top - this.top];
    const fill = colour(style.backgroundColor);
    const sides = ["top", "right", "bottom", "left"].map((side) => ({
      width:
        style.getPropertyValue(`border-${side}-style`) === "none"
          ? 0
          : parseFloat(style.getPropertyValue(`border-${side}-width`)),
      colour: colour(style.getPropertyValue(`border-${side}-color`)),
    }));
    const isFramed = sides.every((one) => one.width > 0 && one.colour);
    const rx = Math.min(parseFloat(style.borderTopLeftRadius) || 0, box.height / 2, box.width / 2);
    if ((fill || isFramed) && box.width > 0 && box.height > 0) {
      const half = isFramed ? sides[0].width / 2 : 0;
      this.push(
        s("rect", {
          x: short(x + half),
          y: short(y + half),
          width: short(box.width - 2 * half),
          height: short(box.height - 2 * half),
          rx: rx || undefined,
          ...paint("fill", fill),
          ...(isFramed ? { ...paint("stroke", sides[0].colour), "stroke-width": sides[0].width } : {}),
        }),
        box,
      );
    }
    if (isFramed) return;
    const [top, right, bottom, left] = sides;
    /** @type {[typeof top, number, number, number, number][]} */
    const lines = [
      [top, x, y, x + box.width, y],
      [right, x + box.width, y, x + box.width, y + box.height],
      [bottom, x, y + box.height, x + box.width, y + box.height],
      [left, x, y, x, y + box.height],
    ];
    for (const [side, x1, y1, x2, y2] of lines)
      if (side.width > 0 && side.colour)
        this.push(
          s("line", {
            x1: short(x1),
            y1: short(y1),
            x2: short(x2),
            y2: short(y2),
            ...paint("stroke", side.colour),
            "stroke-width": side.width,
          }),
          box,
        );
  }

  /**
   * The lines of a text, each where it stands.
   * @param {Text} node
   * @param {CSSStyleDeclaration} style
   * @param {Clip} clip
   */
  addText(node, style, clip) {
    const range = document.createRange();
    if (style.writingMode.startsWith("vertical")) return this.addUpright(node, style);
    /** @type {{ text: string, box: DOMRect, right: number }[]} */
    const lines = [];
    let at = 0;
    for (const letter of node.data) {
      range.setStart(node, at);
      range.setEnd(node, at + letter.length);
      at += letter.length;
      const [box] = range.getClientRects();
      if (!box?.width || box.left > clip.right - 1 || box.right < clip.left) continue;
      const last = lines.at(-1);
      if (last && Math.abs(last.box.top - box.top) < box.height / 2) {
        last.text += letter;
        last.right = box.right;
      } else if (letter.trim()) lines.push({ text: letter, box, right: box.right }); // spaces in front are not drawn
    }
    const ascent = ascentOf(style);
    for (const { text, box, right } of lines)
      if (text.trim())
        this.push(
          s(
            "text",
            {
              x: short(box.left - this.left),
              y: short(box.top - this.top + ascent),
              "font-family": fontOf(style.fontFamily),
              "font-size": style.fontSize,
              "font-weight": style.fontWeight === "400" ? undefined : style.fontWeight,
              ...paint("fill", colour(style.color)),
            },
            valid(text.trimEnd().replaceAll("  ", "\u00a0\u00a0")),
          ),
          { right, bottom: box.bottom },
        );
  }

  /**
   * A text that is written upwards, such as the name of a narrow column.
   * @param {Text} node
   * @param {CSSStyleDeclaration} style
   */
  addUpright(node, style) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    const [x, y] = [short((box.left + box.right) / 2 - this.left), short(box.bottom - this.top)];
    const font = { "font-family": fontOf(style.fontFamily), "font-size": style.fontSize };
    const place = { x, y, dy: "0.35em", transform: `rotate(-90 ${x} ${y})` };
    this.push(s("text", { ...place, ...font, ...paint("fill", colour(style.color)) }, valid(node.data.trim())), box);
  }

  /**
   * A copy of a drawing, with the styles that the page gives it.
   * @param {SVGSVGElement} node
   * @param {DOMRect} box
   */
  addSvg(node, box) {
    const view = node.viewBox.baseVal;
    const isScaled = view && view.width > 0;
    const wide = isScaled ? box.width / view.width : 1;
    const tall = node.getAttribute("preserveAspectRatio") === "none" ? box.height / view.height : wide;
    const origin = isScaled ? ` scale(${wide} ${tall}) translate(${-view.x} ${-view.y})` : "";
    const place = `translate(${short(box.left - this.left)} ${short(box.top - this.top)})${origin}`;
    const shapes = [...node.children].flatMap((child) => copy(child) ?? []);
    this.push(s("g", { transform: place }, shapes), box);
  }

  /**
   * What was drawn on a canvas: its shapes, or an image where they are too many; names are texts in both.
   * @param {HTMLCanvasElement} node
   * @param {DOMRect} box
   */
  addCanvas(node, box) {
    const drawn = drawnOn(node);
    const place = `translate(${short(box.left - this.left)} ${short(box.top - this.top)})`;
    const isVector = drawn && !drawn.hasPixels && drawn.shapes.length <= MANY;
    const { width, height } = node;
    const image = () =>
      s("image", {
        width,
        height,
        href: node.toDataURL(),
        preserveAspectRatio: "none",
        style: { "image-rendering": "pixelated" },
      });
    const texts = (drawn?.texts ?? []).filter(({ x, y }) => x >= 0 && y >= 0 && x <= width && y <= height);
    const scale = ` scale(${box.width / width} ${box.height / height})`;
    const shapes = isVector ? drawn.shapes : [image()];
    this.push(
      s(
        "g",
        { transform: place + scale },
        shapes,
        texts.map((one) => one.node),
      ),
      box,
    );
  }
}

/**
 * @typedef {{ left: number, top: number, right: number, bottom: number }} Clip
 */
/** @type {Clip} */
const EVERYWHERE = { left: -Infinity, top: -Infinity, right: Infinity, bottom: Infinity };

/**
 * @param {Clip} a
 * @param {Clip} b
 * @returns {Clip}
 */
function within(a, b) {
  return {
    left: Math.max(a.left, b.left),
    top: Math.max(a.top, b.top),
    right: Math.min(a.right, b.right),
    bottom: Math.min(a.bottom, b.bottom),
  };
}

/**
 * @param {Element} node
 * @returns {Element | null}
 */
function copy(node) {
  const style = getComputedStyle(node);
  if (style.display === "none" || style.visibility === "hidden") return null;
  const made = /** @type {SVGElement} */ (node.cloneNode(false));
  for (const name of ["class", "style", "tabindex", "role"]) made.removeAttribute(name);
  for (const name of Object.keys(made.dataset)) delete made.dataset[name];
  for (const [name, value] of Object.entries({
    ...paint("fill", colour(style.fill)),
    ...paint("stroke", colour(style.stroke)),
  }))
    made.setAttribute(name, String(value));
  if (Number(style.opacity) < 1) made.setAttribute("opacity", style.opacity);
  for (const name of STYLES) {
    const value = style.getPropertyValue(name);
    const isText = name.startsWith("font") || name === "text-anchor";
    if (isText !== node instanceof SVGTextElement || !value || value === "none" || value === "normal") continue;
    made.setAttribute(name, name === "font-family" ? fontOf(value) : value);
  }
  if (["central", "middle"].includes(style.dominantBaseline)) made.setAttribute("dy", "0.35em"); // which all programs know
  for (const child of node.childNodes) {
    const inner = child instanceof Element ? copy(child) : child instanceof Text ? valid(child.data) : null;
    if (inner) made.append(inner);
  }
  return made;
}

/** @type {Map<string, [string, number] | null>} */
const colours = new Map();

/**
 * A colour in hexadecimal and its opacity, or null where it is transparent.
 * @param {string} given
 * @returns {[string, number] | null}
 */
function colour(given) {
  const known = colours.get(given);
  if (known !== undefined) return known;
  const pen = /** @type {CanvasRenderingContext2D} */ (h("canvas", { width: 1, height: 1 }).getContext("2d"));
  pen.fillStyle = "#00000000"; // where `given` is none
  pen.fillStyle = given;
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = pen.getImageData(0, 0, 1, 1).data;
  const hex = [red, green, blue].map((one) => one.toString(16).padStart(2, "0")).join("");
  /** @type {[string, number] | null} */
  const found = alpha ? [`#${hex}`, alpha / 255] : null;
  colours.set(given, found);
  return found;
}

/**
 * @param {"fill" | "stroke"} name
 * @param {[string, number] | null} found
 * @returns {Record<string, string | number>}
 */
function paint(name, found) {
  if (!found) return { [name]: "none" };
  const [hex, opacity] = found;
  return opacity < 1 ? { [name]: hex, [`${name}-opacity`]: short(opacity) } : { [name]: hex };
}

/** @type {Map<string, number>} */
const ascents = new Map();

/**
 * Pixels from the top of a line box to the baseline.
 * @param {CSSStyleDeclaration} style
 * @returns {number}
 */
function ascentOf({ fontWeight, fontSize, fontFamily }) {
  const font = `${fontWeight} ${fontSize} ${fontFamily}`;
  if (!ascents.has(font)) {
    const pen = /** @type {CanvasRenderingContext2D} */ (h("canvas").getContext("2d"));
    pen.font = font;
    ascents.set(font, pen.measureText("x").fontBoundingBoxAscent);
  }
  return ascents.get(font) ?? 0;
}

/**
 * A font that other programs know.
 * @param {string} family
 * @returns {string}
 */
function fontOf(family) {
  return family.includes("mono") ? "DejaVu Sans Mono, Menlo, Consolas, monospace" : SANS;
}

/**
 * A text without the characters that XML does not have.
 * @param {string} text
 * @returns {string}
 */
function valid(text) {
  // biome-ignore lint/suspicious/noControlCharactersInRegex: they are what is replaced
  return text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "�");
}

/**
 * @param {number} value
 * @returns {number}
 */
function short(value) {
  return Math.round(100 * value) / 100;
}
