// Formulas set in plain HTML from a short notation: x_{i}, x^2, W_Q [16×64], words of two letters or more upright.

import { h } from "glasshouse/dom.js";

const PIECES =
  /([_^])(?:\{([^{}]*)\}|(\S))|(\[[^\]]*\])|([A-Za-z]{2,})|([A-Za-zα-ωΑ-Ω](?:'|′|\u0302)*)|([^_^[A-Za-zα-ωΑ-Ω]+)/gu;

/**
 * @param {string} text
 * @returns {Child[]}
 */
function pieces(text) {
  return [...text.matchAll(PIECES)].map(([, level, grouped, single, shape, word, letter, rest]) => {
    if (level) return h(level === "_" ? "sub" : "sup", {}, pieces(grouped ?? single));
    if (shape) return h("span", { class: "shape" }, shape.slice(1, -1));
    if (word) return h("span", { class: "word" }, word);
    if (letter) return h("i", {}, letter);
    return rest.replaceAll("-", "−");
  });
}

/**
 * Set a formula.
 * @param {string} text
 * @returns {HTMLElement}
 */
export function formula(text) {
  const said = text.replace(/[_^]\{?|\}/g, " ").replace(/\s+/g, " ");
  return h("span", { class: "formula", role: "math", "aria-label": said }, pieces(text));
}
