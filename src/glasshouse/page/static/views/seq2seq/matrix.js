// Cross-attention weights as a table.

import { ink, onTheme, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent } from "glasshouse/number.js";
import { token } from "glasshouse/widgets.js";
import { moment, selection, shownToken } from "glasshouse/views/seq2seq/selection.js";

const NUMBERED = 14; // columns up to which each cell says its number

/**
 * @param {ViewContext} context
 * @returns {{ node: HTMLElement, draw: (given: Tensor, first: Record<"source" | "target", number>) => void, close: () => void }}
 */
export function matrix(context) {
  /** @type {Tensor | null} */
  let weights = null; // [target, source]
  /** @type {Record<"source" | "target", number>} */
  let from = { source: 0, target: 0 }; // the first tokens of both sides
  const box = h("div", { class: "scroll al-matrix", data: { testid: "seq2seq-matrix" } });
  const legend = h("p", { class: "legend" });
  const node = h("div", { class: "al-part" }, h("h3", {}, "Attention matrix"), box, legend);

  /** @param {Tensor} shown */
  function fill(shown) {
    const [high, wide] = shown.shape;
    const { target: selected, source: key } = selection(context);
    const isNumbered = wide <= NUMBERED;
    const most = Math.max(1e-9, ...shown.data);
    const source = context.tokens.source.slice(from.source, from.source + wide);
    const target = Array.from({ length: high }, (_, t) => shownToken(context, from.target + t));
    const isShown =
      selected >= from.target && selected < from.target + high && key >= from.source && key < from.source + wide;
    /** @type {(t: number, k: number) => HTMLElement} */
    const cell = (t, k) => {
      const value = shown.data[t * wide + k];
      const [y, x] = [from.target + t, from.source + k];
      const on = y === selected && x === key;
      const style = { background: shade(value / most), color: ink(value / most) };
      const written = isNumbered ? (value * 100).toFixed(0) : "";
      return h(
        "td",
        {
          role: "gridcell",
          tabindex: on || (t === 0 && k === 0 && !isShown) ? "0" : "-1",
          class: on ? "on" : "",
          style,
          "aria-label": `${moment(context, y)}, to ${source[k].text}: ${written ? `${written}%` : percent(value)}`,
          title: `${moment(context, y)} → ${source[k].text}: ${percent(value)}`,
          data: { t: y, k: x, value, testid: `weight-${y}-${x}` },
        },
        written,
      );
    };
    const hasFocus = box.contains(document.activeElement);
    put(
      box,
      h(
        "table",
        {
          role: "grid",
          "aria-label": "attention of target tokens to source tokens",
          class: isNumbered ? "numbered" : "",
          on: { click: pick, keydown: walk },
        },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("td", { class: "al-corner quiet" }, "target ↓ source →"),
            source.map((one, k) =>
              h("th", { scope: "col", class: from.source + k === key ? "on" : "" }, h("span", {}, token(one))),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          target.map((one, t) =>
            h(
              "tr",
              {},
              h("th", { scope: "row", class: from.target + t === selected ? "on" : "" }, token(one)),
              source.map((_, k) => cell(t, k)),
            ),
          ),
        ),
      ),
    );
    if (hasFocus) box.querySelector('td[tabindex="0"]')?.focus({ preventScroll: true });
    put(
      legend,
      h("i", { style: { background: shade(0.02), outline: "1px solid var(--line)" } }),
      "0%",
      h("i", { style: { background: shade(0.5) } }),
      percent(most / 2),
      h("i", { style: { background: shade(1) } }),
      percent(most),
      h("span", {}, `of the attention of a target token${isNumbered ? "; numbers are percent" : ""}`),
    );
  }

  /** @param {ElementEvent<MouseEvent>} event */
  function pick(event) {
    const cell = event.target.closest("td[data-t]");
    if (cell) context.set({ token: Number(cell.dataset.t), key: Number(cell.dataset.k) });
  }

  /** @param {ElementEvent<KeyboardEvent>} event */
  function walk(event) {
    const by = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const cell = event.target.closest("td[data-t]");
    if (!by || !cell) return;
    event.preventDefault();
    const [t, k] = [Number(cell.dataset.t) + by[0], Number(cell.dataset.k) + by[1]];
    if (t >= 0 && k >= 0 && t < context.tokens.target.length && k < context.tokens.source.length)
      context.set({ token: t, key: k });
  }

  return {
    node,
    draw(given, first) {
      [weights, from] = [given, first];
      fill(given);
    },
    close: onTheme(() => {
      if (weights) fill(weights);
    }),
  };
}
