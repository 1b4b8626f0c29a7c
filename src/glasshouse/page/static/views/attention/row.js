// The attention weights of one query, and the largest of them.

import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { penOf } from "glasshouse/pen.js";
import { clamp, count, short } from "glasshouse/number.js";
import { pictureButton } from "glasshouse/picture.js";
import { bars, cut, token } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";

/**
 * @param {AttentionSelection} selection
 * @returns {Part}
 */
export function row(selection) {
  const title = h("h2", {});
  const bits = strip(selection);
  const top = h("div", { data: { testid: "row-top" } });
  /** @type {HTMLElement} */
  const node = h(
    "section",
    { class: "panel whole" },
    title,
    h(
      "p",
      { class: "about" },
      "Attention weights of the selected query on all keys. Click a key to see how its weight is computed.",
    ),
    bits.node,
    top,
    pictureButton("attention weights of a query", () => node),
  );
  return {
    node,
    async draw() {
      const { queries, keys, query, key } = selection;
      const found = await selection.requestQueryKey();
      put(title, "Weights of query ", token(queries[query], { class: "selected" }), ` (token ${query})`);
      bits.draw(found);
      put(
        top,
        h(
          "h4",
          {},
          found.top.length < found.seen
            ? `The ${found.top.length} largest of ${count(found.seen)}`
            : "Sorted by weight",
        ),
        bars(
          found.top.map((one) => ({
            name: [
              token(keys[one.key], { class: one.key === key ? "compared" : "" }),
              h("span", { class: "quiet" }, ` ${one.key}`),
            ],
            share: one.weight,
            value: one.weight,
            text: short(one.weight),
            title: `score ${short(one.score)}`,
            data: { key: one.key, score: one.score },
            class: one.key === key ? "chosen" : "",
            onclick: () => selection.choose({ key: one.key }),
          })),
          { label: "largest weights", full: "a weight of 1" },
        ),
      );
    },
    close: () => bits.close(),
  };
}

/**
 * The weights of one query on all keys, as a strip of bars.
 * @param {AttentionSelection} selection
 * @returns {{ node: HTMLElement, draw: (given: QueryKeyPair) => void, close: () => void }}
 */
function strip(selection) {
  const [tall, below] = [96, 22]; // pixels of the bars and of the labels below
  const canvas = h("canvas", { role: "img", on: { click: (event) => pick(event) } });
  const axis = h("p", { class: "axis quiet", "aria-hidden": "true" });
  const node = h("div", { class: "row-strip", data: { testid: "row" } }, canvas, axis);
  /** @type {QueryKeyPair | null} */
  let found = null;
  const watch = new ResizeObserver(() => paint());
  watch.observe(node);
  const stopTheme = onTheme(() => paint());

  /** @param {MouseEvent} event */
  function pick(event) {
    const place = canvas.getBoundingClientRect();
    const { length } = selection.keys;
    selection.choose({
      key: clamp(Math.floor(((event.clientX - place.left) / place.width) * length), length - 1),
    });
  }

  function paint() {
    const width = node.clientWidth;
    const { keys, key, query } = selection;
    if (!found || !width) return;
    const fine = devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.round(width * fine), height: (tall + below) * fine });
    const pen = penOf(canvas);
    pen.setTransform(fine, 0, 0, fine, 0, 0);
    const style = getComputedStyle(node);
    const [sheet, accent, more, quiet, compare, compareInk] = [
      "sheet",
      "accent",
      "more",
      "quiet",
      "compare",
      "compare-ink",
    ].map((name) => style.getPropertyValue(`--${name}`).trim());
    const { data } = decodeTensor(found.weights);
    const size = width / data.length;
    const most = Math.max(
      data.reduce((so, one) => Math.max(so, one), 0),
      1e-9,
    );
    const gap = size > 6 ? 2 : size > 3 ? 1 : 0;
    pen.fillStyle = sheet; // masked keys stay hatched
    pen.fillRect(0, tall, width, below);
    data.forEach((weight, place) => {
      if (weight >= 0) pen.fillRect(place * size, 0, size + 0.5, tall);
    });
    data.forEach((weight, place) => {
      if (weight < 0) return;
      const high = Math.max((tall - 4) * (weight / most), weight > 0 ? 1 : 0);
      pen.fillStyle = place === key ? more : accent;
      pen.fillRect(place * size + gap / 2, tall - high, Math.max(size - gap, 1), high);
    });
    pen.fillStyle = quiet;
    pen.fillRect(0, tall, width, 1);
    pen.fillStyle = compare;
    pen.beginPath();
    if (size >= 26) pen.roundRect(key * size + 1, tall + 3, size - 2, below - 4, 4);
    else {
      const middle = (key + 0.5) * size;
      pen.fillStyle = more;
      pen.moveTo(middle, tall + 2);
      pen.lineTo(middle + 6, tall + 12);
      pen.lineTo(middle - 6, tall + 12);
    }
    pen.fill();
    if (size >= 26) {
      Object.assign(pen, {
        font: "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
        textAlign: "center",
        textBaseline: "middle",
        direction: "ltr",
      });
      const room = Math.max(1, Math.floor((size - 4) / 6.7));
      keys.forEach((one, place) => {
        pen.fillStyle = place === key ? compareInk : quiet;
        pen.fillText(cut(one.text, room), (place + 0.5) * size, tall + 13);
      });
    }
    canvas.setAttribute(
      "aria-label",
      `weights of token ${query} on all ${data.length} tokens; the largest is ${short(most)}${found.seen < data.length ? "; some keys are masked" : ""}`,
    );
    put(
      axis,
      h("span", {}, "token 0"),
      h("span", {}, `a full bar is ${short(most)}`),
      h("span", {}, `token ${data.length - 1}`),
    );
  }

  return {
    node,
    /** @param {QueryKeyPair} given */
    draw(given) {
      found = given;
      paint();
    },
    close() {
      watch.disconnect();
      stopTheme();
    },
  };
}
