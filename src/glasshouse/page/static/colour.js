// Theme and colour scales: one sequential, one diverging.

import { h } from "glasshouse/dom.js";
import { penOf } from "glasshouse/pen.js";
import { clamp } from "glasshouse/number.js";

const system = matchMedia("(prefers-color-scheme: dark)");
/** @type {Set<() => void>} */
const followers = new Set();
let chosen = remembered();
/** @type {{ much: Uint8ClampedArray, more: Uint8ClampedArray, less: Uint8ClampedArray } | null} */
let tables = null;

/**
 * @param {string} name
 * @returns {number[]}
 */
function read(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const probe = penOf(h("canvas", { width: 1, height: 1 }));
  probe.fillStyle = text;
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

/**
 * @param {number[][]} stops
 * @returns {Uint8ClampedArray}
 */
function blend(stops) {
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i += 1) {
    const place = (i / 255) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(place));
    for (let c = 0; c < 3; c += 1) {
      table[3 * i + c] = stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (place - low);
    }
  }
  return table;
}

/** @returns {{ much: Uint8ClampedArray, more: Uint8ClampedArray, less: Uint8ClampedArray }} */
function all() {
  if (tables === null) {
    const stops = ["--much-0", "--much-1", "--much-2", "--much-3"].map(read);
    tables = {
      much: blend(stops),
      more: blend([read("--paper"), read("--more")]),
      less: blend([read("--paper"), read("--less")]),
    };
  }
  return tables;
}

/**
 * The colours of shares 0 to 1 as 256 x RGB, for canvases.
 * @returns {Uint8ClampedArray}
 */
export function ramp() {
  return all().much;
}

/**
 * The colour of a share between 0 and 1.
 * @param {number} share
 * @returns {string}
 */
export function shade(share) {
  return pick(all().much, share);
}

/**
 * The colour of a value between -1 and 1: one hue for more, another for less.
 * @param {number} value
 * @returns {string}
 */
export function balance(value) {
  return pick(value >= 0 ? all().more : all().less, Math.abs(value));
}

/**
 * The colour of a head among so many: hues as far apart as they can be, in the lightness of the theme.
 * @param {number} head
 * @param {number} heads
 * @returns {string}
 */
export function headColour(head, heads) {
  const dark = document.documentElement.dataset.theme === "dark";
  return `oklch(${dark ? 0.76 : 0.56} 0.16 ${Math.round((360 * head) / heads + 30) % 360})`;
}

/**
 * Ink that can be read on the colour of a share, or of a value.
 * @param {number} share
 * @returns {string}
 */
export function ink(share) {
  return readable(all().much, share);
}

/**
 * Ink that can be read on `balance(value)`.
 * @param {number} value
 * @returns {string}
 */
export function balanceInk(value) {
  return readable(value >= 0 ? all().more : all().less, value);
}

/**
 * @param {Uint8ClampedArray} table
 * @param {number} value
 * @returns {string}
 */
function readable(table, value) {
  const at = 3 * Math.round(255 * clamp(Math.abs(value) || 0, 1));
  /** @type {(byte: number) => number} */
  const linear = (byte) => (byte <= 10 ? byte / 3294.6 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = 0.2126 * linear(table[at]) + 0.7152 * linear(table[at + 1]) + 0.0722 * linear(table[at + 2]);
  // Where black and white have the same contrast, 4.58: above the 4.5 that WCAG asks of small text.
  return luminance > 0.179 ? "#000000" : "#ffffff";
}

/**
 * @param {Uint8ClampedArray} table
 * @param {number} share
 * @returns {string}
 */
function pick(table, share) {
  const at = 3 * Math.round(255 * clamp(share || 0, 1));
  return `rgb(${table[at]}, ${table[at + 1]}, ${table[at + 2]})`;
}

/**
 * Call back when the theme changes; returns what ends that.
 * @param {() => void} act
 * @returns {() => void}
 */
export function onTheme(act) {
  followers.add(act);
  return () => {
    followers.delete(act);
  };
}

/** From light to dark, or back, whatever the system has. */
export function turnTheme() {
  chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("glasshouse-theme", chosen);
  } catch {
    // not persisted
  }
  showTheme();
}

function remembered() {
  try {
    return localStorage.getItem("glasshouse-theme");
  } catch {
    return null; // saved or embedded pages may have no storage
  }
}

/**
 * Show a theme, by default that of the reader or the system.
 * @param {string} [theme]
 */
export function showTheme(theme = chosen ?? (system.matches ? "dark" : "light")) {
  document.documentElement.dataset.theme = theme;
  tables = null;
  for (const act of followers) act();
}

system.addEventListener("change", () => showTheme());
addEventListener("beforeprint", () => showTheme("light")); // paper is white
addEventListener("afterprint", () => showTheme());
showTheme();
