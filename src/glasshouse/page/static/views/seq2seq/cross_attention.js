// Cross-attention: lines between source and target tokens, and the weights of one target token.

import { h, put, s } from "glasshouse/dom.js";
import { percent, plural } from "glasshouse/number.js";
import { bars, choice, panel, token } from "glasshouse/widgets.js";
import { row, decodeTensor } from "glasshouse/tensor.js";
import { moment, selection, shownToken } from "glasshouse/views/seq2seq/selection.js";
import { matrix } from "glasshouse/views/seq2seq/matrix.js";

const SIDES = /** @type {("source" | "target")[]} */ (["source", "target"]);
const WINDOW = 32; // tokens of each side that are shown at once
const FAINT = 0.03; // smaller weights are not drawn, unless a token has no larger ones
const LINES = 500; // that are drawn at most
const LISTED = 12; // source tokens whose weights are listed

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function crossAttention(context) {
  /** @type {Tensor | null} */
  let weights = null; // [target, source] of the part that is shown
  /** @type {Record<"source" | "target", number>} */
  let from = { source: 0, target: 0 };
  /** @type {Map<number, HTMLElement>} */
  const shares = new Map(); // of the source tokens, by position
  let wasWriting = true;
  /** @type {number | null} */
  let passing = null; // the target token under the pointer or with the focus
  const of = choice(
    "weights of",
    [
      ["head", "one head"],
      ["layer", "mean of the layer"],
      ["all", "mean of all layers"],
    ],
    (value) => context.set({ seq2seq_scope: value }),
  );
  const when = choice(
    "target token",
    [
      ["writing", "when it was written"],
      ["reading", "when it was read"],
    ],
    (value) => context.set({ seq2seq_moment: value === "writing" ? undefined : value }),
  );
  const what = h("span", { class: "quiet", data: { testid: "seq2seq-scope" } });
  const rows = {
    source: h("div", { class: "al-row source", role: "group", "aria-label": "source tokens" }),
    target: h("div", { class: "al-row target", role: "group", "aria-label": "target tokens" }),
  };
  const lines = s("svg", { class: "al-lines", "aria-hidden": "true" });
  const drawing = h("div", { class: "al-drawing", data: { testid: "seq2seq" } }, rows.source, lines, rows.target);
  const pagers = { source: pager("source"), target: pager("target") };
  const list = h("div", { data: { testid: "seq2seq-list" } });
  const listed = h("h3", {});
  const table = matrix(context);
  const node = panel(
    "Cross-attention",
    "Where the model looked in the source when it wrote each target token, or when it read it; line width is the weight. Point at or click a target token to see its weights.",
    h("div", { class: "controls" }, of, what),
    h("div", { class: "controls" }, h("span", { class: "name" }, "target token"), when),
    drawing,
    h("div", { class: "controls" }, pagers.source.node, pagers.target.node),
    h("div", { class: "columns" }, h("div", { class: "al-part" }, listed, list), table.node),
  );

  /**
   * @param {"source" | "target"} side
   * @returns {{ node: HTMLElement, show: () => void }}
   */
  function pager(side) {
    const less = h("button", { type: "button", class: "tool", on: { click: () => go(-1) } }, `‹ earlier ${side}`);
    const more = h("button", { type: "button", class: "tool", on: { click: () => go(1) } }, `later ${side} ›`);
    const where = h("span", { class: "quiet" });
    /** @type {(by: number) => void} */
    const go = (by) => context.set({ [side === "source" ? "key" : "token"]: from[side] + by * WINDOW });
    const line = h("span", { class: "controls", data: { testid: `pager-${side}` } }, less, where, more);
    return {
      node: line,
      show() {
        const length = context.tokens[side].length;
        line.hidden = length <= WINDOW;
        less.disabled = from[side] === 0;
        more.disabled = from[side] + WINDOW >= length;
        put(where, `${side} tokens ${from[side]} to ${Math.min(length, from[side] + WINDOW) - 1} of ${length}`);
      },
    };
  }

  function build() {
    shares.clear();
    for (const side of SIDES) {
      const some = context.tokens[side].slice(from[side], from[side] + WINDOW);
      put(
        rows[side],
        some.map((given, i) => {
          const at = from[side] + i;
          const one = side === "target" ? shownToken(context, at) : given;
          const pass =
            side === "target"
              ? {
                  pointerenter: () => pointed(at),
                  pointerleave: () => pointed(null),
                  focus: () => pointed(at),
                  blur: () => pointed(null),
                }
              : {};
          const button = token(one, {
            tag: "button",
            type: "button",
            class: "al-token",
            data: { place: at, testid: `${side}-token-${at}` },
            "aria-label":
              side === "target" ? `target position ${at}: ${moment(context, at)}` : `source token ${at}: ${one.text}`,
            title: side === "target" ? moment(context, at) : undefined,
            on: {
              ...pass,
              click: () => context.set(side === "source" ? { key: at } : { token: at }),
              keydown: (event) => walk(event, side, at),
            },
          });
          if (side === "target") return h("span", { class: "al-spot" }, button);
          const share = h("span", { class: "al-share", data: { testid: `share-${at}` } });
          shares.set(at, share);
          return h("span", { class: "al-spot" }, share, button);
        }),
      );
    }
  }

  /**
   * @param {KeyboardEvent} event
   * @param {"source" | "target"} side
   * @param {number} at
   */
  function walk(event, side, at) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = rows[side].querySelector(`[data-place="${at + by}"]`);
    next?.focus();
    next?.click();
  }

  /** @param {number | null} at */
  function pointed(at) {
    passing = at;
    connect();
  }

  /**
   * The target token whose weights are read: the one pointed at, or the selected one if it is shown.
   * @param {Tensor} shown
   * @returns {number}
   */
  function active(shown) {
    const at = passing ?? context.token;
    return at >= from.target && at < from.target + shown.shape[0] ? at : from.target;
  }

  function connect() {
    if (!weights) return;
    const at = active(weights);
    const own = row(weights, at - from.target);
    mark(at, own);
    drawLines(weights, at);
    drawList(at, own);
  }

  /**
   * @param {number} at
   * @param {Float32Array} own
   */
  function mark(at, own) {
    const { target, source } = selection(context);
    for (const one of rows.target.querySelectorAll(".al-token")) {
      const here = Number(one.dataset.place);
      one.classList.toggle("selected", here === target);
      one.classList.toggle("passing", here === at && here !== target);
    }
    for (const one of rows.source.querySelectorAll(".al-token")) {
      const here = Number(one.dataset.place);
      const share = own[here - from.source];
      one.classList.toggle("compared", here === source);
      const label = shares.get(here);
      if (!label) continue;
      put(label, percent(share));
      label.dataset.value = String(share);
      label.classList.toggle("faint", share < FAINT);
    }
  }

  /**
   * @param {Tensor} shown
   * @param {number} at
   */
  function drawLines(shown, at) {
    const [high, wide] = shown.shape;
    // Horizontal where both rows fit, otherwise two columns.
    drawing.classList.remove("tall");
    const room = drawing.clientWidth;
    const isTall = rows.source.scrollWidth > room || rows.target.scrollWidth > room;
    drawing.classList.toggle("tall", isTall);
    const box = lines.getBoundingClientRect();
    /** @type {(side: "source" | "target", i: number) => number} */
    const spot = (side, i) => {
      const r = rows[side].querySelectorAll(".al-token")[i].getBoundingClientRect();
      return isTall ? r.top + r.height / 2 - box.top : r.left + r.width / 2 - box.left;
    };
    const spots = {
      source: Array.from({ length: wide }, (_, i) => spot("source", i)),
      target: Array.from({ length: high }, (_, i) => spot("target", i)),
    };
    /** @type {[number, number, number][]} */
    const pairs = [];
    for (let t = 0; t < high; t += 1) {
      const values = row(shown, t);
      const least = Math.min(FAINT, 0.25 * Math.max(...values));
      values.forEach((value, k) => {
        if (value >= least) pairs.push([value, t, k]);
      });
    }
    pairs.sort((a, b) => b[0] - a[0]);
    /** @type {(pair: [number, number, number]) => boolean} */
    const isOwn = ([, t]) => t === at - from.target;
    const drawn = pairs
      .filter((one, i) => i < LINES || isOwn(one))
      .sort((a, b) => Number(isOwn(a)) - Number(isOwn(b)) || a[0] - b[0]);
    const long = isTall ? box.width : box.height;
    put(
      lines,
      drawn.map((one) => {
        const [value, t, k] = one;
        const [a, b] = [spots.source[k], spots.target[t]];
        const d = isTall
          ? `M0 ${a}C${long / 2} ${a} ${long / 2} ${b} ${long} ${b}`
          : `M${a} 0C${a} ${long / 2} ${b} ${long / 2} ${b} ${long}`;
        return s("path", {
          d,
          class: isOwn(one) ? "own" : "",
          "stroke-width": (0.6 + 7 * value).toFixed(2),
          "stroke-opacity": (isOwn(one) ? 0.35 + 0.65 * value : 0.08 + 0.4 * value).toFixed(3),
        });
      }),
    );
  }

  /**
   * @param {number} at
   * @param {Float32Array} own
   */
  function drawList(at, own) {
    put(listed, `Weights ${moment(context, at)} (target position ${at})`);
    const { source } = selection(context);
    const order = Array.from(own, (value, i) => [value, from.source + i])
      .sort((a, b) => b[0] - a[0])
      .slice(0, LISTED)
      .sort((a, b) => a[1] - b[1]);
    put(
      list,
      bars(
        order.map(([value, place]) => ({
          name: token(context.tokens.source[place]),
          share: value,
          value,
          text: percent(value),
          title: `source token ${place}`,
          data: { place },
          class: place === source ? "al-key" : "",
        })),
        { label: `weights of target token ${at}`, full: "100%" },
      ),
      own.length > LISTED || own.length < context.tokens.source.length
        ? h(
            "p",
            { class: "quiet" },
            `These ${order.length} have ${percent(order.reduce((sum, one) => sum + one[0], 0))} of the attention weight.`,
          )
        : null,
    );
  }

  const follow = new ResizeObserver(() => connect());
  follow.observe(drawing);
  return {
    node,
    async draw(changed) {
      const { of: which, writing, layer, head, target, source } = selection(context);
      of.show(which);
      const isTurned = writing !== wasWriting;
      wasWriting = writing;
      when.show(writing ? "writing" : "reading");
      put(
        what,
        {
          head: `layer ${layer}, head ${head}: select above, or with [ ] and , .`,
          layer: `all ${context.model.n_heads} heads of layer ${layer}`,
          all: `all ${context.model.n_heads} heads of ${plural(context.model.n_layers, "layer")}`,
        }[which],
      );
      const old = from;
      from = { source: Math.floor(source / WINDOW) * WINDOW, target: Math.floor(target / WINDOW) * WINDOW };
      /** @type {RequestBody} */
      const body = { forward_pass: context.forwardPass() };
      if (which !== "all") body.layer = layer;
      if (which === "head") body.head = head;
      for (const side of SIDES) body[side] = [from[side], from[side] + WINDOW];
      const told = await context.request("cross_attention", body);
      weights = decodeTensor(told.weights);
      if (
        isTurned ||
        changed.has("tokens") ||
        !rows.target.children.length ||
        old.source !== from.source ||
        old.target !== from.target
      )
        build();
      pagers.source.show();
      pagers.target.show();
      connect();
      table.draw(weights, from);
    },
    close() {
      follow.disconnect();
      table.close();
    },
  };
}
