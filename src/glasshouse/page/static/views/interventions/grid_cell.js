// Cells shared by the ablation and patching grids: keyboard, numbers, colours.

import { balance, balanceInk } from "glasshouse/colour.js";
import { put } from "glasshouse/dom.js";

/**
 * Arrow keys go from cell to cell.
 * @param {ElementEvent<KeyboardEvent>} event
 */
export function walk(event) {
  const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const at = event.target.closest(".part");
  if (!by || !at) return;
  event.preventDefault();
  const rows = [...event.currentTarget.querySelectorAll("[role=row]")]
    .map((row) => [...row.querySelectorAll(".part")])
    .filter((row) => row.length);
  const row = rows.findIndex((one) => one.includes(at));
  const next = rows[row + by[0]]?.[rows[row].indexOf(at) + by[1]];
  if (!next || next.hasAttribute("disabled")) return;
  at.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

/**
 * Show the edit of a cell, or the measured `value` as `text` ("": none), coloured by its share.
 * @param {HTMLElement} button
 * @param {{ label: string, state: string, value: number | null | undefined, text: string, share: number }} cell
 */
export function show(button, { label, state, value, text, share }) {
  put(button, state || text);
  button.classList.toggle("edited", Boolean(state));
  button.setAttribute("aria-selected", String(Boolean(state)));
  button.setAttribute("aria-label", label);
  if (text) button.dataset.value = String(value);
  else delete button.dataset.value;
  button.style.background = state || !text ? "" : balance(share);
  button.style.color = state || !text ? "" : balanceInk(share);
}

/**
 * Whether something was measured.
 * @param {number | null | undefined} value
 * @returns {value is number}
 */
export function isNumber(value) {
  return Number.isFinite(value);
}

/**
 * A number that fits a cell; positive numbers start with `plus`.
 * @param {number} value
 * @param {string} [plus]
 * @returns {string}
 */
export function tight(value, plus = "") {
  const size = Math.abs(value);
  if (size < 0.005) return "0";
  const text = size >= 9.95 ? size.toFixed(0) : size >= 0.995 ? size.toFixed(1) : size.toFixed(2).replace("0.", ".");
  return `${value < 0 ? "−" : plus}${text}`;
}
