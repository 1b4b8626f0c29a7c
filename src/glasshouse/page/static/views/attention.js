// Attention: all heads small, one head large, as a map and as lines over the text, and one query with one key.

import { isSaved, Outdated } from "glasshouse/asking.js";
import { balance, balanceInk, onTheme, ramp } from "glasshouse/colour.js";
import { h, put, s } from "glasshouse/dom.js";
import { Heat } from "glasshouse/heat.js";
import { count, percent, short } from "glasshouse/number.js";
import { bars, choice, panel, python, quoted, token } from "glasshouse/parts.js";
import { unpack } from "glasshouse/tensor.js";

const MANY = 8; // heads that fit beside a map
const WINDOW = 60; // tokens between which lines are drawn
const FAINT = 0.02; // share of the strongest line below which none is drawn
const TILE = 128; // cells of a tile, a side
const LONG = 512; // tokens of a text in which hardly a weight is large
const SCALES = {
  linear: { title: "linear", ticks: [0, 0.25, 0.5, 0.75, 1], shareOf: (weight) => weight },
  root: { title: "square root", ticks: [0, 0.05, 0.25, 0.5, 1], shareOf: Math.sqrt },
  log: { title: "logarithm", ticks: [0.0001, 0.01, 0.1, 1], shareOf: (weight) => Math.max(0, 1 + Math.log10(weight) / 4) },
};
const KINDS = {
  previous: "the token just before",
  first: "the first token",
  duplicate: "other places of the same token",
  induction: "what followed other places of the same token",
  broad: "spread evenly: 1 is the same weight on all",
};

export default {
  name: "attention",
  title: "Attention",
  fits: () => true,
  mount(glass, root) {
    const selection = new Selection(glass);
    const [all, large, over, row, two] = [heads(selection), map(selection), lines(selection), whole(selection), pair(selection)];
    const parts = [large, row, two, over, all]; // what is looked at is asked for before the small maps of all heads
    const code = h("div", { class: "code" });
    const column = (...some) => h("div", { class: "column" }, some.map((part) => part.node));
    // Many heads want the whole width.
    const many = glass.model.n_heads > MANY;
    const columns = many ? [column(over, row), column(large)] : [column(all, over), column(large, row)];
    root.append(h("div", { class: many ? "attention many" : "attention" }, many ? all.node : null, h("div", { class: "beside-each-other" }, columns), two.node, code));
    return {
      async draw(changed) {
        put(code, python(inPython(selection)));
        await Promise.all(parts.map((part) => part.draw(changed)));
      },
      close: () => parts.forEach((part) => part.close?.()),
    };
  },
};

/** What is selected, in the words of attention: which kind of it, layer, head, query and key. */
class Selection {
  constructor(glass) {
    this.glass = glass;
  }

  get kind() {
    const { attentions } = this.glass.model;
    return attentions.find((one) => one.site === this.glass.state.attention) ?? attentions[0];
  }

  get layer() {
    return Math.max(0, Math.min(this.glass.state.layer, this.kind.layers - 1));
  }

  get head() {
    return Math.max(0, Math.min(this.glass.state.head, this.glass.model.n_heads - 1));
  }

  get queries() {
    return this.glass.tokens[this.kind.queries];
  }

  get keys() {
    return this.glass.tokens[this.kind.keys];
  }

  // On the page, the token of an encoder-decoder is one of the target and the key one of the source. Where a source
  // looks at itself, or a target, the other one is kept apart.

  get query() {
    const { state } = this.glass;
    return this.kind.queries === "source" ? within(state.attentionQuery ?? -1, this.queries) : this.glass.token;
  }

  get key() {
    const { state } = this.glass;
    return within(this.kind.keys === "target" ? (state.attentionKey ?? 0) : state.key, this.keys);
  }

  choose({ query, key }) {
    const changes = {};
    if (query !== undefined) changes[this.kind.queries === "source" ? "attentionQuery" : "token"] = query;
    if (key !== undefined) changes[this.kind.keys === "target" ? "attentionKey" : "key"] = key;
    this.glass.set(changes);
  }

  /** How colours stand for weights: by themselves linear, or in a long text, where all weights are small, logarithmic. */
  get scale() {
    const { attentionScale } = this.glass.state;
    return attentionScale in SCALES ? attentionScale : this.keys.length > LONG ? "log" : "linear";
  }

  get shareOf() {
    return SCALES[this.scale].shareOf;
  }

  /** Which map this is, whatever is selected in it. */
  get place() {
    return { question: this.glass.question(), attention: this.kind.site, layer: this.layer, head: this.head };
  }

  askPair() {
    return this.glass.ask("pair", { ...this.place, query: this.query, key: this.key });
  }

  async askTile(level, row, column) {
    return unpack((await this.glass.ask("tile", { ...this.place, level, row, column })).cells);
  }
}

/** A saved page has some tiles: without the others the map is coarser. */
function absent(error) {
  if (isSaved && !(error instanceof Outdated)) return null;
  throw error;
}

function within(place, tokens) {
  return place < 0 || place >= tokens.length ? tokens.length - 1 : place;
}

function figure(value, testid) {
  return h("span", { class: "figure", data: { value: value ?? "", ...(testid ? { testid } : {}) } }, short(value));
}

// All heads

function heads(selection) {
  const { glass } = selection;
  const { model } = glass;
  const kinds = model.attentions.length > 1
    ? choice("which attention", model.attentions.map((one) => [one.site, one.title]), (attention) => glass.set({ attention }))
    : null;
  const scale = choice("colour", Object.entries(SCALES).map(([name, { title }]) => [name, title]), (one) => glass.set({ attentionScale: one }));
  const legend = h("div", { class: "scale-legend" });
  const grid = h("div", { class: "heads", role: "group", "aria-label": "all heads; arrow keys move", data: { testid: "heads" }, on: { scroll: () => look(), keydown: walk } });
  const named = h("p", { class: "quiet named", data: { testid: "named" } });
  const note = h("p", { class: "quiet named", data: { testid: "heads-note" } });
  const controls = h("div", { class: "controls" }, kinds, h("span", { class: "labelled" }, h("span", { class: "name" }, "colour"), scale), legend);
  const node = panel("All heads", "In every layer each head decides for itself where each token looks. A row of a map is a token that looks, a column a token that is looked at; the stronger the colour, the more. Choose a head to see it large.", controls, grid, named, note);
  node.classList.add("all");
  if (kinds) kinds.dataset.testid = "kinds";
  scale.dataset.testid = "scale";
  let rows = [];
  let built = "";
  let covers = null;
  const stopTheme = onTheme(() => rows.forEach(paint));

  function build() {
    const { layers, site } = selection.kind;
    if (built === site) return;
    built = site;
    rows = Array.from({ length: layers }, (_, layer) => {
      const cells = Array.from({ length: model.n_heads }, (__, head) => {
        const canvas = h("canvas", { width: 1, height: 1, "aria-hidden": "true" });
        const called = h("span", { class: "called" });
        const button = h("button", { type: "button", class: "small-map", data: { testid: `head-${layer}-${head}`, layer, head }, on: { click: () => glass.set({ layer, head }) } }, canvas, called);
        return { button, canvas, called, layer, head };
      });
      const line = h("div", { class: "layer", style: { "--heads": model.n_heads } }, h("span", { class: "name" }, h("span", { class: "word" }, "layer "), String(layer)), cells.map((one) => one.button));
      return { line, cells, layer, held: "", small: null };
    });
    const top = h("div", { class: "layer top", "aria-hidden": "true", style: { "--heads": model.n_heads } }, h("span", {}), Array.from({ length: model.n_heads }, (_, head) => h("span", { class: "name" }, head ? String(head) : "head 0")));
    put(grid, top, rows.map((row) => row.line));
  }

  function mark() {
    for (const { cells } of rows) {
      for (const { button, layer, head } of cells) {
        const on = layer === selection.layer && head === selection.head;
        button.setAttribute("aria-pressed", on);
        button.tabIndex = on ? 0 : -1;
      }
    }
    const chosen = rows[selection.layer]?.cells[selection.head]?.button;
    if (!chosen) return;
    const [inner, outer] = [chosen.getBoundingClientRect(), grid.getBoundingClientRect()];
    if (inner.top < outer.top) grid.scrollTop -= outer.top - inner.top + 8;
    else if (inner.bottom > outer.bottom) grid.scrollTop += inner.bottom - outer.bottom + 8;
    if (inner.left < outer.left) grid.scrollLeft -= outer.left - inner.left + 40;
    else if (inner.right > outer.right) grid.scrollLeft += inner.right - outer.right + 8;
  }

  function walk(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const from = event.target.closest(".small-map");
    if (!by || !from) return;
    event.preventDefault();
    const layer = Math.max(0, Math.min(rows.length - 1, Number(from.dataset.layer) + by[0]));
    const head = Math.max(0, Math.min(model.n_heads - 1, Number(from.dataset.head) + by[1]));
    rows[layer].cells[head].button.focus();
    glass.set({ layer, head });
  }

  function paint({ small, cells }) {
    if (!small) return;
    const [, tall, wide] = small.shape;
    const colours = ramp();
    const { shareOf } = selection;
    const shares = Array.from({ length: 256 }, (_, byte) => shareOf(((byte - 1) / 254) ** 2)); // bytes are roots
    for (const { canvas, head } of cells) {
      if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, { width: wide, height: tall });
      const pen = canvas.getContext("2d");
      const image = pen.createImageData(wide, tall);
      for (let i = 0; i < tall * wide; i += 1) {
        const byte = small.data[head * tall * wide + i];
        if (!byte) continue; // may not be looked at
        const at = 3 * Math.round(255 * shares[byte]);
        image.data.set([colours[at], colours[at + 1], colours[at + 2], 255], 4 * i);
      }
      pen.putImageData(image, 0, 0);
    }
  }

  const topic = () => JSON.stringify([glass.question(), selection.kind.site]);

  /** Fetch the layers that are in view, one by one, so that whatever else is asked need not wait for all. */
  async function fetchRows() {
    const now = topic();
    for (;;) {
      const [top, bottom] = [grid.scrollTop, grid.scrollTop + grid.clientHeight];
      const next = rows.find(({ line, held }) => held !== now && line.offsetTop < bottom && line.offsetTop + line.offsetHeight > top);
      if (!next) return;
      const found = await glass.ask("maps", { question: glass.question(), attention: selection.kind.site, layer: next.layer });
      if (topic() !== now) return;
      next.held = now;
      next.small = unpack(found.maps);
      covers = found;
      paint(next);
    }
  }

  function look() {
    glass.page.wait(1);
    fetchRows().catch(() => {}).finally(() => glass.page.wait(-1));
  }

  function name(found) {
    for (const { cells } of rows) {
      for (const { button, called, layer, head } of cells) {
        const one = found?.heads[layer][head];
        const value = one?.[one.called];
        put(called, one ? [h("span", {}, one.called), h("b", {}, value === null ? "" : value.toFixed(2))] : "");
        Object.assign(button.dataset, { called: one?.called ?? "", value: value ?? "" });
        button.setAttribute("aria-label", `layer ${layer}, head ${head}${one ? `: ${one.called} ${short(value)}` : ""}`);
      }
    }
  }

  function explain(found) {
    const used = new Set(found.heads.flat().map((one) => one.called));
    put(named, "Named after where its weight goes, on average: ", Object.entries(KINDS).filter(([kind]) => used.has(kind)).map(([kind, what], i) => [i ? "; " : "", h("b", {}, kind), ` ${what}`]), ".");
  }

  return {
    node,
    async draw(changed) {
      build();
      kinds?.show(selection.kind.site);
      scale.show(selection.scale);
      put(legend, scaleLegend(selection));
      mark();
      if (changed.has("attentionScale") || changed.has("tokens")) rows.forEach(paint);
      if (rows.every((row) => row.held !== topic())) name(null);
      await fetchRows();
      let found;
      try {
        found = await glass.ask("scores", { question: glass.question(), attention: selection.kind.site });
      } catch (error) {
        if (error instanceof Outdated) throw error;
        put(named, `The heads have no names here: ${error.message}`);
      }
      if (found) {
        name(found);
        explain(found);
      }
      const said = [];
      if (covers && Math.max(...covers.covers) > 1) said.push(`A cell is the largest weight among ${covers.covers[0]} × ${covers.covers[1]} tokens.`);
      if (covers?.stride > 1) said.push(`Of so long a text, only every ${ordinal(covers.stride)} token that looks is drawn here; the large map has them all.`);
      if (found && found.scored < found.of) said.push(`The names come from the first ${count(found.scored)} of ${count(found.of)} tokens.`);
      put(note, said.join(" "));
      note.hidden = !said.length;
    },
    close: stopTheme,
  };
}

function ordinal(n) {
  const end = n % 100 > 10 && n % 100 < 14 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[n % 10] ?? "th";
  return `${n}${end}`;
}

/** How colours stand for weights: the colours stay, the numbers move. */
function scaleLegend(selection) {
  const { ticks: weights, shareOf } = SCALES[selection.scale];
  const ticks = weights.map((weight) => h("span", { style: { left: `${100 * shareOf(weight)}%` } }, String(weight)));
  const hidden = selection.kind.causal ? h("span", { class: "cannot" }, h("i", {}), "may not be seen: it comes later") : null;
  return [h("span", { class: "labelled" }, h("span", { class: "name" }, "weight"), h("span", { class: "ramp", role: "img", "aria-label": "colours from no weight to all of it" }, h("span", { class: "ticks", "aria-hidden": "true" }, ticks))), hidden];
}

// One head, as a map

function map(selection) {
  const { glass } = selection;
  const title = h("h2", { data: { testid: "head-title" } });
  const facts = h("p", { class: "quiet facts", data: { testid: "head-facts" } });
  const status = h("p", { class: "readout", role: "status", "aria-live": "polite", data: { testid: "cell" } });
  const heat = new Heat({ label: "map of one head; arrow keys move, Enter selects, plus and minus zoom", read: show, pick: (query, key) => selection.choose({ query, key }) });
  heat.node.dataset.testid = "map";
  const button = (text, label, act) => h("button", { type: "button", class: "tool", "aria-label": label, data: { testid: label.replace(" ", "-") }, on: { click: act } }, text);
  const tools = h("span", { class: "zoom" }, button("−", "zoom out", () => heat.step(-1)), button("+", "zoom in", () => heat.step(1)), button("close up", "close up", () => heat.closeUp()), button("whole", "whole map", () => heat.fit()));
  const about = h("p", { class: "about" });
  const node = h("section", { class: "panel large" }, h("div", { class: "headline" }, title, tools), about, facts, heat.node, status);
  let held = null; // the weight of the selected pair

  function show(cell) {
    const { queries, keys } = selection;
    if (!cell) {
      if (held === null) return;
      cell = { row: selection.query, column: selection.key, side: 1, value: held };
    }
    const { row, column, side, value } = cell;
    const hides = value < 0;
    Object.assign(status.dataset, { query: row, key: column, side, value: value === undefined || hides ? "" : value });
    if (side > 1) {
      const to = (start, tokens) => Math.min(start + side, tokens.length) - 1;
      put(status, `tokens ${row}–${to(row, queries)} on ${column}–${to(column, keys)}: `, value === undefined ? "…" : hides ? "may not be seen" : ["at most ", h("b", {}, short(value))]);
      return;
    }
    put(status, token(queries[row], { class: "selected" }), ` ${row} looks at `, token(keys[column], { class: "compared" }), ` ${column}: `, value === undefined ? "…" : hides ? "may not, it comes later" : ["weight ", h("b", {}, short(value))]);
  }

  return {
    node,
    async draw() {
      const { kind, layer, head, query, key, queries, keys } = selection;
      put(title, `Layer ${layer}, head ${head}`);
      put(about, `Each row is a token that looks, and its weights add up to 1. ${kind.causal ? "It sees itself and what came before." : kind.queries === kind.keys ? "It sees the whole text, on both sides." : "It is one of the target, and sees the whole source."} Click a cell to follow it below.`);
      const name = JSON.stringify(selection.place);
      held = null;
      show(heat.cursor && document.activeElement === heat.node ? heat.at(query, key) : null);
      const shown = heat.show({
        name,
        rows: queries,
        columns: keys,
        row: query,
        column: key,
        scale: selection.scale,
        shareOf: selection.shareOf,
        fetch: (level, row, column) => selection.askTile(level, row, column).catch(absent),
        isEmpty: kind.causal ? (row, column) => column > row : undefined,
      });
      const [found, scores] = await Promise.all([
        selection.askPair(),
        glass.ask("scores", { question: glass.question(), attention: kind.site }).catch((error) => {
          if (error instanceof Outdated) throw error;
          return null;
        }),
        shown,
      ]);
      held = found.bias === null ? -1 : found.weight;
      show(null);
      const one = scores?.heads[layer][head] ?? {};
      put(facts, [...Object.keys(KINDS), "entropy"].filter((each) => one[each] !== undefined).map((each) => h("span", { class: each === one.called ? "chosen" : "" }, `${each} `, figure(one[each], `score-${each}`), each === "entropy" ? " nats" : "")));
    },
    close: () => heat.close(),
  };
}

// One head, as lines over the text

const HIGH = 24; // pixels of a token

function lines(selection) {
  const { glass } = selection;
  const which = choice("lines", [["one", "from the selected token"], ["all", "from all"]], (one) => glass.set({ attentionLines: one === "one" ? undefined : one }));
  which.dataset.testid = "lines-of";
  const left = h("div", { class: "side looking", role: "group", "aria-label": "tokens that look" });
  const right = h("div", { class: "side looked", role: "group", "aria-label": "tokens that are looked at" });
  const web = s("svg", { class: "web", role: "img", "aria-label": "lines from tokens that look to those they look at", preserveAspectRatio: "none" });
  const frame = h("div", { class: "frame", data: { testid: "lines" } }, left, web, right);
  const note = h("p", { class: "quiet", data: { testid: "lines-note" } });
  const node = panel("Over the text", "On the left the tokens that look, on the right those they look at: a line is the stronger, the more weight it carries.", h("div", { class: "controls" }, which), frame, note);
  node.classList.add("over");

  const buttons = (tokens, [start, stop], chosen, name, choose) =>
    tokens.slice(start, stop).map((one, i) =>
      token(one, { tag: "button", type: "button", class: start + i === chosen ? name : "", data: { place: start + i }, "aria-pressed": start + i === chosen, "aria-label": `${one.text}, token ${start + i}`, on: { click: () => choose(start + i) } }));

  async function weights(all, rows, columns, found) {
    const row = unpack(found.weights).data;
    if (!all) return [[selection.query, (key) => row[key]]];
    const tiles = new Map();
    const wanted = [];
    for (let r = Math.floor(rows[0] / TILE); r * TILE < rows[1]; r += 1) {
      for (let c = Math.floor(columns[0] / TILE); c * TILE < columns[1]; c += 1) wanted.push(selection.askTile(0, r, c).then((tile) => tiles.set(`${r} ${c}`, tile)));
    }
    await Promise.all(wanted);
    const at = (query, key) => {
      const tile = tiles.get(`${Math.floor(query / TILE)} ${Math.floor(key / TILE)}`);
      return tile.data[(query % TILE) * tile.shape[1] + (key % TILE)];
    };
    return Array.from({ length: rows[1] - rows[0] }, (_, i) => [rows[0] + i, (key) => at(rows[0] + i, key)]);
  }

  return {
    node,
    async draw() {
      const { queries, keys, query, key } = selection;
      const held = !isSaved || (queries.length <= TILE && keys.length <= TILE); // a saved page has the map as one tile
      const all = held && glass.state.attentionLines === "all";
      which.show(all ? "all" : "one");
      which.hidden = !held;
      const found = await selection.askPair();
      const rows = span(query, queries.length);
      // Both sides show the same part of the text, if most weight goes there; else the right one shows where it goes.
      const peak = found.top[0]?.key ?? key;
      const columns = queries === keys && peak >= rows[0] && peak < rows[1] ? rows : span(peak, keys.length);
      const many = await weights(all, rows, columns, found);
      const row = unpack(found.weights).data;
      const most = all ? 1 : (found.top[0]?.weight ?? 1);
      put(left, buttons(queries, rows, query, "selected", (place) => selection.choose({ query: place })));
      put(right, buttons(keys, columns, key, "compared", (place) => selection.choose({ key: place })).map((button, i) => {
        const weight = row[columns[0] + i];
        return h("span", { class: "with" }, button, h("span", { class: "figure", data: { value: weight < 0 ? "" : weight, key: columns[0] + i } }, weight < 0 ? "·" : most < 0.05 ? short(weight) : weight < 0.005 ? "0" : weight.toFixed(2)));
      }));
      const height = HIGH * Math.max(rows[1] - rows[0], columns[1] - columns[0]);
      web.setAttribute("viewBox", `0 0 100 ${height}`);
      web.style.setProperty("height", `${height}px`);
      const strands = [];
      for (const [place, weight] of many) {
        for (let other = columns[0]; other < columns[1]; other += 1) {
          const much = weight(other);
          if (!(much >= FAINT * most)) continue;
          const [y, to] = [(place - rows[0] + 0.5) * HIGH, (other - columns[0] + 0.5) * HIGH];
          const classes = ["strand", place === query ? "own" : "", place === query && other === key ? "chosen" : ""].filter(Boolean).join(" ");
          strands.push(s("path", { class: classes, d: `M0 ${y} C40 ${y} 60 ${to} 100 ${to}`, "stroke-opacity": Math.min(1, much / most).toFixed(4), data: { query: place, key: other, value: much }, "vector-effect": "non-scaling-stroke" }));
        }
      }
      put(web, strands);
      const inside = row.slice(...columns).reduce((sum, one) => sum + Math.max(0, one), 0);
      const said = [` are the weights of `, token(queries[query], { class: "selected" }), all ? "." : `; a full line is ${short(most)}.`];
      if (columns[1] - columns[0] < keys.length) said.push(` ${percent(Math.max(0, 1 - inside))} of its weight is on tokens before or after these ${columns[1] - columns[0]}.`);
      put(note, "The numbers", said);
      const chosen = left.querySelector(".selected");
      if (chosen && frame.scrollHeight > frame.clientHeight) frame.scrollTop = chosen.offsetTop - frame.clientHeight / 2;
    },
  };
}

/** The window of a row of tokens round one of them. */
function span(place, length) {
  const start = Math.max(0, Math.min(place - Math.floor((2 * WINDOW) / 3), length - WINDOW));
  return [start, Math.min(length, start + WINDOW)];
}

// The row of one query

function whole(selection) {
  const title = h("h2", {});
  const strip = rowStrip(selection);
  const top = h("div", { data: { testid: "row-top" } });
  const node = h("section", { class: "panel whole" }, title, h("p", { class: "about" }, "All its weights side by side, and the largest of them. Choose one to see how it comes about."), strip.node, top);
  return {
    node,
    async draw() {
      const { queries, keys, query, key } = selection;
      const found = await selection.askPair();
      put(title, "Where ", token(queries[query], { class: "selected" }), ` token ${query} looks`);
      strip.draw(found);
      const most = found.top[0]?.weight || 1;
      put(top, h("h4", {}, found.top.length < found.seen ? `The ${found.top.length} largest of ${count(found.seen)}` : "From the largest down"), bars(found.top.map((one) => ({
        name: [token(keys[one.key], { class: one.key === key ? "compared" : "" }), h("span", { class: "quiet" }, ` ${one.key}`)],
        share: one.weight / most,
        value: one.weight,
        text: short(one.weight),
        title: `score ${short(one.score)}`,
        data: { key: one.key, score: one.score },
        class: one.key === key ? "chosen" : "",
        onclick: () => selection.choose({ key: one.key }),
      })), { label: "largest weights" }));
    },
    close: () => strip.close(),
  };
}

// One query and one key

function pair(selection) {
  const { glass } = selection;
  const who = h("p", { class: "who", data: { testid: "pair" } });
  const shares = h("p", { class: "quiet", data: { testid: "pair-shares" } });
  const vectors = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "query, key and their product, number by number" });
  const score = h("div", { class: "equation" });
  const softmax = h("div", { class: "equation" });
  const hiding = h("p", { class: "about", data: { testid: "pair-hidden" } }, "This key comes after the query, so it may not be seen: it gets no weight, whatever q and k are.");
  const carried = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "value, what is carried, and what the head gathers, number by number" });
  const stage = (number, title, about, ...children) => h("div", { class: "stage" }, h("h3", {}, h("span", { class: "nth" }, number), title), h("p", { class: "about" }, about), children);
  const turned = glass.model.position === "rotary" ? " Both are already turned by their positions." : "";
  const node = panel(
    "How one token looks at another",
    null,
    who,
    shares,
    stage("1", "The score: how well query and key fit", `The token that looks has a query q, the one that is looked at a key k: ${glass.model.d_head} numbers each.${turned} They are multiplied number by number, and added up.`, vectors, score),
    stage("2", "The softmax: a share of the weight", "Scores become weights that add up to 1: e to the power of the score, divided by the sum of that over the whole row. The largest score is taken off first, which changes nothing but keeps the numbers small.", softmax, hiding),
    stage("3", "What it carries: weight times value", "The token that is looked at offers a value v. Its weight says how much of that goes over. What comes from all tokens together is z, which the head hands on.", carried),
    h("p", { class: "legend" }, h("span", {}, h("i", { class: "more-than" }), "above 0"), h("span", {}, h("i", { class: "less-than" }), "below 0"), h("span", {}, "the stronger the colour, the larger the number")),
  );
  node.classList.add("pair");

  return {
    node,
    async draw() {
      const found = await selection.askPair();
      const { queries, keys, query, key, kind, head } = selection;
      const [from, to] = [token(queries[query], { class: "selected" }), token(keys[key], { class: "compared" })];
      const place = (number, side) => ` token ${number}${side === "text" ? "" : ` of the ${side}`}`;
      put(who, from, `${place(query, kind.queries)}, the query, looks at `, to, `${place(key, kind.keys)}, the key.`);
      const group = Array.from({ length: found.group }, (_, i) => found.kv_head * found.group + i);
      put(shares, `Heads ${group.slice(0, -1).join(", ")} and ${group.at(-1)} share one key and one value, those of key-value head ${found.kv_head}; head ${head} has a query of its own.`);
      shares.hidden = found.group === 1;
      const [q, k, products, v, moved, z] = ["q", "k", "products", "v", "carried", "z"].map((name) => unpack(found[name]).data);
      put(vectors, elements([["q", "q", q, largest(q)], ["k", "k", k, largest(k)], ["q × k", "products", products, largest(products)]]));
      put(score, scoreTerms(found));
      put(softmax, softmaxTerms(found));
      hiding.hidden = found.bias !== null;
      put(carried, elements([["v", "v", v, largest(v)], ["weight × v", "carried", moved, largest(v)], ["z", "z", z, largest(v)]]));
    },
  };
}

function largest(data) {
  return data.reduce((most, one) => Math.max(most, Math.abs(one)), 0) || 1;
}

/** Vectors number by number, one below the other: rows of [name, testid, numbers, the number that has full colour]. */
function elements(rows) {
  const head = h("tr", {}, h("th", {}), Array.from(rows[0][2], (_, i) => h("th", { scope: "col" }, String(i))));
  const body = rows.map(([name, testid, data, most]) =>
    h("tr", { data: { testid: `pair-${testid}` } }, h("th", { scope: "row" }, name), Array.from(data, (one) =>
      h("td", { data: { value: one }, style: { background: balance(one / most), color: balanceInk(one / most) } }, tight(one)))));
  return h("table", { class: "elements" }, h("thead", {}, head), h("tbody", {}, body));
}

/** A number in a narrow cell. */
function tight(value) {
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.005 || size === 0 ? 2 : 3;
  return (size && size < 0.0005 ? value.toExponential(0) : value.toFixed(digits)).replaceAll("-", "−");
}

const term = (value, name, testid) => h("span", { class: "term" }, figure(value, testid), h("span", { class: "quiet" }, name));
const sign = (text) => h("span", { class: "sign" }, text);

/** From the sum of products to the score. */
function scoreTerms(found) {
  const terms = [term(found.sum, "sum of q × k", "pair-sum"), sign("×"), term(found.scale, "scale", "pair-scale")];
  const scaled = found.sum * found.scale;
  if (found.softcap !== null) terms.push(sign("→"), term(found.softcap * Math.tanh(scaled / found.softcap), `held within ±${short(found.softcap)}`, "pair-capped"));
  if (found.bias === null) return [...terms, sign("→"), h("span", { class: "term" }, h("span", { class: "figure", data: { testid: "pair-score", value: "" } }, "−∞"), h("span", { class: "quiet" }, "score: hidden"))];
  if (found.bias !== 0) terms.push(sign("+"), term(found.bias, "for the distance", "pair-bias"));
  return [...terms, sign("="), term(found.score, "score", "pair-score")];
}

/** From the score to the weight. */
function softmaxTerms(found) {
  if (found.bias === null) return [term(found.weight, "weight", "pair-weight")];
  return [
    sign("exp ("), term(found.score, "score"), sign("−"), term(found.largest, "largest score", "pair-largest"), sign(")"), sign("="),
    term(Math.exp(found.score - found.largest), "its part"), sign("÷"), term(found.total, "sum of all parts", "pair-total"), sign("="), term(found.weight, "weight", "pair-weight"),
  ];
}

/** The weights of one query on all keys, as a strip of bars. */
function rowStrip(selection) {
  const [tall, below] = [96, 22]; // pixels of bars, and of what stands below them
  const canvas = h("canvas", { role: "img", on: { click: (event) => pick(event) } });
  const axis = h("p", { class: "axis quiet", "aria-hidden": "true" });
  const node = h("div", { class: "row-strip", data: { testid: "row" } }, canvas, axis);
  let found = null;
  const watch = new ResizeObserver(() => paint());
  watch.observe(node);
  const stopTheme = onTheme(() => paint());

  function pick(event) {
    const place = canvas.getBoundingClientRect();
    const { length } = selection.keys;
    selection.choose({ key: Math.max(0, Math.min(length - 1, Math.floor(((event.clientX - place.left) / place.width) * length))) });
  }

  function paint() {
    const width = node.clientWidth;
    const { keys, key, query } = selection;
    if (!found || !width) return;
    const fine = devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.round(width * fine), height: (tall + below) * fine });
    const pen = canvas.getContext("2d");
    pen.setTransform(fine, 0, 0, fine, 0, 0);
    const style = getComputedStyle(node);
    const colour = (name) => style.getPropertyValue(name).trim();
    const { data } = unpack(found.weights);
    const size = width / data.length;
    const most = Math.max(data.reduce((so, one) => Math.max(so, one), 0), 1e-9);
    const gap = size > 6 ? 2 : size > 3 ? 1 : 0;
    pen.fillStyle = colour("--sheet"); // what may not be seen stays hatched
    pen.fillRect(0, tall, width, below);
    data.forEach((weight, place) => weight >= 0 && pen.fillRect(place * size, 0, size + 0.5, tall));
    data.forEach((weight, place) => {
      if (weight < 0) return;
      const high = Math.max((tall - 4) * (weight / most), weight > 0 ? 1 : 0);
      pen.fillStyle = colour(place === key ? "--more" : "--accent");
      pen.fillRect(place * size + gap / 2, tall - high, Math.max(size - gap, 1), high);
    });
    pen.fillStyle = colour("--quiet");
    pen.fillRect(0, tall, width, 1);
    pen.fillStyle = colour("--compare");
    pen.beginPath();
    if (size >= 26) pen.roundRect(key * size + 1, tall + 3, size - 2, below - 4, 4);
    else {
      const middle = (key + 0.5) * size;
      pen.fillStyle = colour("--more");
      pen.moveTo(middle, tall + 2);
      pen.lineTo(middle + 6, tall + 12);
      pen.lineTo(middle - 6, tall + 12);
    }
    pen.fill();
    if (size >= 26) {
      Object.assign(pen, { font: "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace", textAlign: "center", textBaseline: "middle", direction: "ltr" });
      const room = Math.max(1, Math.floor((size - 4) / 6.7));
      keys.forEach((one, place) => {
        const letters = [...one.text];
        pen.fillStyle = colour(place === key ? "--compare-ink" : "--quiet");
        pen.fillText(letters.length > room ? `${letters.slice(0, room - 1).join("")}…` : one.text, (place + 0.5) * size, tall + 13);
      });
    }
    canvas.setAttribute("aria-label", `weights of token ${query} on all ${data.length} tokens; the largest is ${short(most)}${found.seen < data.length ? "; some may not be seen" : ""}`);
    put(axis, h("span", {}, "token 0"), h("span", {}, `a full bar is ${short(most)}`), h("span", {}, `token ${data.length - 1}`));
  }

  return {
    node,
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

// The same in Python

function inPython(selection) {
  const { glass, kind, layer, head, query, key } = selection;
  const { text, added, hidden, edits } = glass.state;
  const said = [`import torch, glasshouse as gh`, ``, glass.loading];
  let call = "ids";
  const listed = (tokens) => `torch.tensor([[${tokens.map((one) => one.id).join(", ")}]])`;
  if (glass.tokens.source) {
    said.push(`source = ${listed(glass.tokens.source)}`, `target = ${listed(glass.tokens.target)}`);
    call = "source, target";
  } else if (hidden.length || !glass.model.tokenizer) said.push(`ids = ${listed(glass.tokens.text)}`);
  else said.push(`ids = torch.tensor([tok.encode(${quoted(text)})${added.length ? ` + [${added.join(", ")}]` : ""}])`);
  const site = (name) => `"${kind.site.replace("pattern", name)}.${layer}"`;
  const changed = edits.filter((one) => one.kind !== "patch").map((one) => `"${one.site}": ${one.kind === "mean" ? "gh.inspection.mean()" : `gh.inspection.scale(${one.by})`}`);
  const around = changed.length ? `gh.edit(model, {${changed.join(", ")}}), ` : "";
  said.push(`with ${around}gh.record(model, ${["q", "k", "v", "scores", "pattern", "z"].map(site).join(", ")}) as seen:`, `    model(${call})`);
  said.push(`weight = seen[${site("pattern")}][0, ${head}, ${query}, ${key}]`);
  if (!kind.site.includes("cross_")) said.push(`scores = gh.head_scores(model, ${call}${kind.site.startsWith("encoder.") ? `, stack="encoder"` : ""})  # previous, first, duplicate, induction, broad`);
  return said.join("\n");
}
