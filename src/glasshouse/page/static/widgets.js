// Widgets shared by the views.

import { h, put } from "glasshouse/dom.js";
import { clamp, percent, short } from "glasshouse/number.js";
import { pictureButton } from "glasshouse/picture.js";

const SHORT = 12; // characters that fit the widest token in any script

/**
 * A section with a title, a description, and a button that saves a picture of it.
 * @param {string} title
 * @param {string | null} sentence
 * @param {...Child} children
 * @returns {HTMLElement}
 */
export function panel(title, sentence, ...children) {
  const about = sentence ? h("p", { class: "about" }, sentence) : null;
  const node = h("section", { class: "panel" }, h("h2", {}, title), about, ...children);
  /** @type {() => Element} */
  const shown = () => (node.isConnected ? node : [...document.querySelectorAll(".panel")].find(isSame)) ?? node;
  /** @type {(other: Element) => boolean} */
  const isSame = (other) => other.querySelector("h2")?.textContent === title;
  node.append(pictureButton(title, shown));
  return node;
}

/**
 * A token with visible whitespace; special tokens and raw bytes are styled differently.
 * @param {Shown} one
 * @param {Properties & { tag?: "span" | "button", title?: string }} [options]
 * @returns {HTMLElement}
 */
export function token(one, { tag = "span", title, ...properties } = {}) {
  const kinds = [
    "token",
    one.text.length > SHORT ? "long" : "",
    one.kind ?? "",
    one.masked ? "masked" : "",
    properties.class ?? "",
  ].filter(Boolean);
  const said =
    one.kind === "bytes" ? `bytes ${one.text}` : one.kind === "special" ? `special token ${one.text}` : null;
  return h(
    tag,
    {
      ...properties,
      class: kinds.join(" "),
      dir: "ltr",
      "aria-label": properties["aria-label"] ?? said,
      title: title ?? `${one.text} · id ${one.id}`,
    },
    one.text,
  );
}

/**
 * A rounded number; the exact value is in data-value.
 * @param {number | null | undefined} value
 * @param {string} [testid]
 * @returns {HTMLElement}
 */
export function numberLabel(value, testid) {
  return h("span", { class: "figure", data: { value: value ?? "", ...(testid ? { testid } : {}) } }, short(value));
}

/**
 * A number between two arrows. Returns an element with `show(value, most)`.
 * @param {string} label
 * @param {(value: number) => void} onchange
 * @returns {Stepper}
 */
export function stepper(label, onchange) {
  const input = h("input", {
    type: "number",
    min: 0,
    "aria-label": label,
    on: { change: () => move(Number(input.value)) },
  });
  const of = h("span", { class: "quiet" });
  const less = h(
    "button",
    { type: "button", "aria-label": `${label}: one less`, on: { click: () => move(Number(input.value) - 1) } },
    "‹",
  );
  const more = h(
    "button",
    { type: "button", "aria-label": `${label}: one more`, on: { click: () => move(Number(input.value) + 1) } },
    "›",
  );
  let most = 0;
  /** @param {number} value */
  function move(value) {
    const held = clamp(Math.round(value) || 0, most);
    input.value = String(held);
    onchange(held);
  }
  const node = h("span", { class: "stepper" }, h("span", { class: "name" }, label), less, input, more, of);
  /** @type {Stepper["show"]} */
  const show = (value, highest) => {
    most = Math.max(0, highest);
    input.max = String(most);
    if (document.activeElement !== input || Number(input.value) !== value) input.value = String(value);
    less.disabled = value <= 0;
    more.disabled = value >= most;
    put(of, `of ${most + 1}`);
  };
  return Object.assign(node, { show });
}

/**
 * A slider with its value. Returns an element with `show(value)`.
 * @param {string} label
 * @param {SliderOptions} options
 * @returns {Slider}
 */
export function slider(label, { min, max, step, shown = String, oninput }) {
  const value = h("output", {});
  const input = h("input", {
    type: "range",
    min,
    max,
    step,
    "aria-label": label,
    on: {
      input: () => {
        put(value, shown(Number(input.value)));
        oninput(Number(input.value));
      },
    },
  });
  const node = h("label", { class: "slider" }, h("span", { class: "name" }, label), input, value);
  return Object.assign(node, {
    /** @param {number} number */
    show(number) {
      input.value = String(number);
      put(value, shown(number));
    },
    /** @param {number} highest */
    limit(highest) {
      input.max = String(highest);
      put(value, shown(Number(input.value))); // which may be less now
    },
  });
}

/**
 * One of several, as a row of buttons. Options are [value, text]. Returns an element with `show(value)`.
 * @template {string | number} V
 * @param {string} label
 * @param {[V, string][]} options
 * @param {(value: V) => void} onchange
 * @returns {Choice<V>}
 */
export function choice(label, options, onchange) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", role: "radio", data: { value }, on: { click: () => onchange(value) } }, text),
  );
  const node = h(
    "span",
    { class: "choice", role: "radiogroup", "aria-label": label, on: { keydown: walk } },
    buttons,
  );
  /** @param {KeyboardEvent} event */
  function walk(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at =
      (buttons.indexOf(/** @type {HTMLButtonElement} */ (document.activeElement)) + by + buttons.length) %
      buttons.length;
    buttons[at].focus();
    onchange(options[at][0]);
  }
  return Object.assign(node, {
    /** @param {V} value */
    show(value) {
      for (const button of buttons) {
        const on = button.dataset.value === String(value);
        button.setAttribute("aria-checked", String(on));
        button.tabIndex = on ? 0 : -1;
      }
    },
  });
}

/**
 * A select of candidate tokens, or none. `show(rows, id, none)` sets the options and the selection.
 * @param {string} label
 * @param {string} testid
 * @param {(id: number | undefined) => void} onchange
 * @returns {TokenChooser}
 */
export function tokenChooser(label, testid, onchange) {
  const node = h("select", {
    "aria-label": label,
    data: { testid },
    on: { change: () => onchange(node.value === "" ? undefined : Number(node.value)) },
  });
  /** @type {TokenChooser["show"]} */
  const show = (rows, id, none) => {
    const options = [
      h("option", { value: "" }, none),
      ...rows.map((one) => h("option", { value: one.id }, `${one.text} · ${percent(one.probability)}`)),
    ];
    if (Number.isInteger(id) && !rows.some((one) => one.id === id))
      options.push(h("option", { value: id }, `id ${id}`));
    put(node, options);
    node.value = Number.isInteger(id) ? String(id) : "";
  };
  return Object.assign(node, { show });
}

/**
 * Horizontal bars: rows of {name (a node or text), share (0 to 1), second (0 to 1), value, text, title, onclick}.
 * @param {Bar[]} rows
 * `full` is what a bar of the whole width stands for, as text, which is shown below them.
 * @param {{ label: string, full: string }} options
 * @returns {HTMLElement}
 */
export function bars(rows, { label, full }) {
  const list = h(
    "div",
    { class: "bars", role: "list", "aria-label": label },
    rows.map((row) => {
      const filled = h("span", {
        class: "filled",
        style: { width: `${100 * clamp(row.share, 1)}%` },
      });
      const under =
        row.second === undefined
          ? null
          : h("span", { class: "under", style: { width: `${100 * clamp(row.second, 1)}%` } });
      const line = [
        h("span", { class: "what" }, row.name),
        h("span", { class: "track", "aria-hidden": "true" }, under, filled),
        h("span", { class: "figure", data: { value: row.value } }, row.text),
      ];
      const inner = row.onclick
        ? h("button", { type: "button", title: row.title, class: "bar", on: { click: row.onclick } }, line)
        : h("div", { class: "bar", title: row.title }, line);
      return h("div", { role: "listitem", class: row.class ?? "", data: row.data ?? {} }, inner);
    }),
  );
  return h("div", {}, list, h("p", { class: "quiet full-bar" }, `full bar: ${full}`));
}

/**
 * Python code that computes the numbers on the screen.
 * @param {string} code
 * @returns {HTMLElement}
 */
export function python(code) {
  return h(
    "details",
    { class: "python" },
    h("summary", {}, "the same in Python"),
    h("pre", { tabindex: "0" }, h("code", {}, code)),
  );
}

/**
 * A Python string literal.
 * @param {string} text
 * @returns {string}
 */
export function quoted(text) {
  /** @type {(one: string) => string} */
  const code = (one) =>
    one.length > 1
      ? `\\U${one.codePointAt(0)?.toString(16).padStart(8, "0")}`
      : `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(text).replace(/[^\x20-\x7e]/gu, code);
}

/**
 * A text of at most so many letters.
 * @param {string} text
 * @param {number} most
 * @returns {string}
 */
export function cut(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

/**
 * A message in place of content that is not available.
 * @param {string} sentence
 * @returns {HTMLElement}
 */
export function placeholder(sentence) {
  return h("p", { class: "placeholder" }, sentence);
}
