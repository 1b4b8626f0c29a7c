// Encoder-decoder: where in the source each target token looks, and the tree of a beam search.

import { ink, onTheme, shade } from "glasshouse/colour.js";
import { h, put, s } from "glasshouse/dom.js";
import { percent, plural, short } from "glasshouse/number.js";
import { bars, choice, instead, panel, python, slider, token } from "glasshouse/parts.js";
import { row, unpack } from "glasshouse/tensor.js";

const WINDOW = 32; // tokens of each side that are shown at once
const FAINT = 0.03; // weights below are not drawn as lines, unless a token has none that is much above
const LINES = 500; // that are drawn at most
const LISTED = 12; // source tokens whose weights are listed
const NUMBERED = 14; // columns up to which each cell says its number

export default {
  name: "alignment",
  title: "Source and target",
  fits: (model) => model.kind === "seq2seq",
  mount(glass, root) {
    const parts = [alignment(glass), ...(glass.model.writes ? [search(glass)] : [])];
    const code = h("div", {});
    root.append(...parts.map((part) => part.node), code);
    return {
      async draw(changed) {
        put(code, python(inPython(glass)));
        await Promise.all(parts.map((part) => part.draw(changed)));
      },
      close: () => parts.forEach((part) => part.close?.()),
    };
  },
};

function inPython(glass) {
  const ids = (side) => `torch.tensor([[${glass.tokens[side].map((one) => one.id).join(", ")}]])`;
  const { of, layer, head } = chosen(glass);
  const part = { head: `[${layer}, 0, ${head}]`, layer: `[${layer}, 0].mean(0)`, all: "[:, 0].mean((0, 1))" }[of];
  const { beams, penalty } = searched(glass);
  return [
    "import torch, glasshouse as gh",
    "",
    glass.loading,
    `source, target = ${ids("source")}, ${ids("target")}`,
    'with gh.record(model, "decoder.cross_pattern.*") as seen, torch.no_grad():',
    "    model(source, target)",
    `weights = seen["decoder.cross_pattern.*"]${part}  # [target, source]`,
    "",
    `found = gh.generate(model, tok, source.tolist(), max_new_tokens=48, beams=${beams}, n=${beams}, length_penalty=${penalty}, keep_tree=True)`,
    "[(one.text, one.score) for one in found], found[0].tree",
  ].join("\n");
}

/** What the weights are of: one head, the mean of a layer, or of all; and which. */
function chosen(glass) {
  const of = ["head", "layer"].includes(glass.state.alignment_of) ? glass.state.alignment_of : "all";
  const within = (value, size) => Math.max(0, Math.min(size - 1, value));
  return { of, layer: within(glass.state.layer, glass.model.n_layers), head: within(glass.state.head, glass.model.n_heads) };
}

// Where the target looks

function alignment(glass) {
  let weights = null; // [target, source] of the part that is shown
  let from = { source: 0, target: 0 };
  let passing = null; // the target token under the pointer or with the focus
  const of = choice("weights of", [["head", "one head"], ["layer", "mean of the layer"], ["all", "mean of all layers"]], (value) => glass.set({ alignment_of: value }));
  const what = h("span", { class: "quiet", data: { testid: "alignment-of" } });
  const rows = { source: h("div", { class: "al-row source", role: "group", "aria-label": "source tokens" }), target: h("div", { class: "al-row target", role: "group", "aria-label": "target tokens" }) };
  const lines = s("svg", { class: "al-lines", "aria-hidden": "true" });
  const drawing = h("div", { class: "al-drawing", data: { testid: "alignment" } }, rows.source, lines, rows.target);
  const pagers = { source: pager("source"), target: pager("target") };
  const list = h("div", { data: { testid: "alignment-list" } });
  const listed = h("h3", {});
  const matrix = h("div", { class: "scroll al-matrix", data: { testid: "alignment-matrix" } });
  const legend = h("p", { class: "legend" });
  const node = panel(
    "Where the target looks",
    "While it chooses the next token, each target token looks back at the source. The thicker the line, the more of its attention goes there. Point at a target token, or choose it, to see its weights.",
    h("div", { class: "controls" }, of, what),
    drawing,
    h("div", { class: "controls" }, pagers.source.node, pagers.target.node),
    h("div", { class: "columns" }, h("div", { class: "al-part" }, listed, list), h("div", { class: "al-part" }, h("h3", {}, "All of them, as a table"), matrix, legend)),
  );

  function pager(side) {
    const less = h("button", { type: "button", class: "tool", on: { click: () => go(-1) } }, `‹ earlier ${side}`);
    const more = h("button", { type: "button", class: "tool", on: { click: () => go(1) } }, `later ${side} ›`);
    const where = h("span", { class: "quiet" });
    const go = (by) => glass.set({ [side === "source" ? "key" : "token"]: from[side] + by * WINDOW });
    const line = h("span", { class: "controls", data: { testid: `pager-${side}` } }, less, where, more);
    return {
      node: line,
      show() {
        const length = glass.tokens[side].length;
        line.hidden = length <= WINDOW;
        less.disabled = from[side] === 0;
        more.disabled = from[side] + WINDOW >= length;
        put(where, `${side} tokens ${from[side]} to ${Math.min(length, from[side] + WINDOW) - 1} of ${length}`);
      },
    };
  }

  function place() {
    return { token: glass.token, key: Math.min(glass.state.key, glass.tokens.source.length - 1) };
  }

  function build() {
    for (const side of ["source", "target"]) {
      const some = glass.tokens[side].slice(from[side], from[side] + WINDOW);
      put(rows[side], some.map((one, i) => {
        const at = from[side] + i;
        const pass = side === "target" ? { pointerenter: () => pointed(at), pointerleave: () => pointed(null), focus: () => pointed(at), blur: () => pointed(null) } : {};
        const button = token(one, { tag: "button", type: "button", class: "al-token", data: { place: at, testid: `${side}-token-${at}` }, "aria-label": `${side} token ${at}: ${one.text}`, on: { ...pass, click: () => glass.set(side === "source" ? { key: at } : { token: at }), keydown: (event) => walk(event, side, at) } });
        return h("span", { class: "al-spot" }, side === "source" ? h("span", { class: "al-share", data: { testid: `share-${at}` } }) : null, button);
      }));
    }
  }

  function walk(event, side, at) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = rows[side].querySelector(`[data-place="${at + by}"]`);
    next?.focus();
    next?.click();
  }

  function pointed(at) {
    passing = at;
    connect();
  }

  /** The target token whose weights are read: the one pointed at, or the selected one if it is shown. */
  function active() {
    const at = passing ?? glass.token;
    return at >= from.target && at < from.target + weights.shape[0] ? at : from.target;
  }

  function connect() {
    if (!weights) return;
    const [high, wide] = weights.shape;
    const at = active();
    const { token: selected, key } = place();
    const own = row(weights, at - from.target);
    for (const side of ["source", "target"]) for (const one of rows[side].querySelectorAll(".al-token")) {
      const here = Number(one.dataset.place);
      one.classList.toggle("selected", side === "target" && here === selected);
      one.classList.toggle("compared", side === "source" && here === key);
      one.classList.toggle("passing", side === "target" && here === at && here !== selected);
      if (side === "source") {
        const share = own[here - from.source];
        const label = one.parentElement.firstElementChild;
        put(label, percent(share));
        label.dataset.value = share;
        label.classList.toggle("faint", share < FAINT);
      }
    }
    // In a line where both rows fit, else one column beside the other.
    drawing.classList.remove("tall");
    const room = drawing.clientWidth;
    if (rows.source.scrollWidth > room || rows.target.scrollWidth > room) drawing.classList.add("tall");
    const isTall = drawing.classList.contains("tall");
    const box = lines.getBoundingClientRect();
    const spot = (side, i) => {
      const r = rows[side].children[i].querySelector(".al-token").getBoundingClientRect();
      return isTall ? r.top + r.height / 2 - box.top : r.left + r.width / 2 - box.left;
    };
    const spots = { source: Array.from({ length: wide }, (_, i) => spot("source", i)), target: Array.from({ length: high }, (_, i) => spot("target", i)) };
    const pairs = [];
    for (let t = 0; t < high; t += 1) {
      const values = row(weights, t);
      const least = Math.min(FAINT, 0.25 * Math.max(...values));
      values.forEach((value, k) => value >= least && pairs.push([value, t, k]));
    }
    pairs.sort((a, b) => b[0] - a[0]);
    const shown = pairs.filter((one, i) => i < LINES || one[1] === at - from.target).sort((a, b) => (a[1] === at - from.target) - (b[1] === at - from.target) || a[0] - b[0]);
    const long = isTall ? box.width : box.height;
    put(lines, shown.map(([value, t, k]) => {
      const [a, b] = [spots.source[k], spots.target[t]];
      const d = isTall ? `M0 ${a}C${long / 2} ${a} ${long / 2} ${b} ${long} ${b}` : `M${a} 0C${a} ${long / 2} ${b} ${long / 2} ${b} ${long}`;
      const isOwn = t === at - from.target;
      return s("path", { d, class: isOwn ? "own" : "", "stroke-width": (0.6 + 7 * value).toFixed(2), "stroke-opacity": (isOwn ? 0.35 + 0.65 * value : 0.08 + 0.4 * value).toFixed(3) });
    }));
    drawList(at, own, wide);
  }

  function drawList(at, own, wide) {
    put(listed, "What ", token(glass.tokens.target[at]), ` (target token ${at}) looks at`);
    const order = Array.from(own, (value, i) => [value, i]).sort((a, b) => b[0] - a[0]).slice(0, LISTED).sort((a, b) => a[1] - b[1]);
    const most = Math.max(1e-9, ...own);
    put(
      list,
      bars(order.map(([value, i]) => ({ name: token(glass.tokens.source[from.source + i]), share: value / most, value, text: percent(value), title: `source token ${from.source + i}`, data: { place: from.source + i }, class: from.source + i === place().key ? "al-key" : "" })), { label: `weights of target token ${at}` }),
      wide > LISTED || wide < glass.tokens.source.length ? h("p", { class: "quiet" }, `These ${order.length} have ${percent(order.reduce((sum, one) => sum + one[0], 0))} of the attention; the others share the rest.`) : null,
    );
  }

  function drawMatrix() {
    const [high, wide] = weights.shape;
    const { token: selected, key } = place();
    const isNumbered = wide <= NUMBERED;
    const most = Math.max(1e-9, ...weights.data);
    const source = glass.tokens.source.slice(from.source, from.source + wide);
    const target = glass.tokens.target.slice(from.target, from.target + high);
    const cell = (t, k) => {
      const value = weights.data[t * wide + k];
      const [y, x] = [from.target + t, from.source + k];
      const on = y === selected && x === key;
      const node = h("td", { role: "gridcell", tabindex: on || (t === 0 && k === 0 && !has(selected, key)) ? "0" : "-1", class: on ? "on" : "", "aria-label": `${target[t].text} looks at ${source[k].text}: ${percent(value)}`, title: `${target[t].text} → ${source[k].text}: ${percent(value)}`, data: { t: y, k: x, value, testid: `weight-${y}-${x}` } }, isNumbered ? (value * 100).toFixed(0) : "");
      node.style.background = shade(value / most);
      node.style.color = ink(value / most);
      return node;
    };
    const has = (y, x) => y >= from.target && y < from.target + high && x >= from.source && x < from.source + wide;
    const focused = document.activeElement?.closest?.(".al-matrix td") !== null && matrix.contains(document.activeElement);
    put(
      matrix,
      h("table", { role: "grid", "aria-label": "attention of target tokens to source tokens", class: isNumbered ? "numbered" : "", on: { click: picked, keydown: moved } },
        h("thead", {}, h("tr", {}, h("td", { class: "al-corner quiet" }, "target ↓ source →"), source.map((one, k) => h("th", { scope: "col", class: from.source + k === key ? "on" : "" }, h("span", {}, token(one)))))),
        h("tbody", {}, target.map((one, t) => h("tr", {}, h("th", { scope: "row", class: from.target + t === selected ? "on" : "" }, token(one)), source.map((_, k) => cell(t, k)))))),
    );
    if (focused) matrix.querySelector('td[tabindex="0"]')?.focus({ preventScroll: true });
    put(legend, h("i", { style: { background: shade(0.02), outline: "1px solid var(--line)" } }), "0%", h("i", { style: { background: shade(0.5) } }), percent(most / 2), h("i", { style: { background: shade(1) } }), percent(most), h("span", {}, `of a target token’s attention${isNumbered ? "; numbers are percent" : ""}`));
  }

  function picked(event) {
    const cell = event.target.closest("td[data-t]");
    if (cell) glass.set({ token: Number(cell.dataset.t), key: Number(cell.dataset.k) });
  }

  function moved(event) {
    const by = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const cell = event.target.closest("td[data-t]");
    if (!by || !cell) return;
    event.preventDefault();
    const [t, k] = [Number(cell.dataset.t) + by[0], Number(cell.dataset.k) + by[1]];
    if (t >= 0 && k >= 0 && t < glass.tokens.target.length && k < glass.tokens.source.length) glass.set({ token: t, key: k });
  }

  const follow = new ResizeObserver(() => connect());
  follow.observe(drawing);
  const stop = onTheme(() => weights && drawMatrix());
  return {
    node,
    async draw(changed) {
      const { of: which, layer, head } = chosen(glass);
      of.show(which);
      put(what, { head: `layer ${layer}, head ${head}: choose others above, or with [ ] and , .`, layer: `all ${glass.model.n_heads} heads of layer ${layer}`, all: `all ${glass.model.n_heads} heads of ${plural(glass.model.n_layers, "layer")}` }[which]);
      const { token: selected, key } = place();
      const old = { ...from };
      from = { source: Math.floor(key / WINDOW) * WINDOW, target: Math.floor(selected / WINDOW) * WINDOW };
      const body = { question: glass.question() };
      if (which !== "all") body.layer = layer;
      if (which === "head") body.head = head;
      for (const side of ["source", "target"]) body[side] = [from[side], from[side] + WINDOW];
      const told = await glass.ask("alignment", body);
      weights = unpack(told.weights);
      if (changed.has("tokens") || !rows.target.children.length || old.source !== from.source || old.target !== from.target) build();
      pagers.source.show();
      pagers.target.show();
      connect();
      drawMatrix();
    },
    close() {
      follow.disconnect();
      stop();
    },
  };
}

// The beam tree

const STEP = 124; // pixels from one token to the next
const LINE = 30; // and from one line to the next
const MANY = 48; // lines above which what was dropped is hidden at first

function searched(glass) {
  const { alignment_beams: beams, alignment_penalty: penalty } = glass.state;
  return { beams: Number.isInteger(beams) && beams >= 2 && beams <= 8 ? beams : 4, penalty: typeof penalty === "number" ? penalty : 1 };
}

function search(glass) {
  let told = null;
  const count = slider("beams", { min: 2, max: 8, step: 1, shown: String, oninput: (value) => glass.set({ alignment_beams: value }) });
  count.dataset.testid = "beams";
  const penalty = slider("length penalty", { min: -1, max: 2, step: 0.1, shown: (value) => value.toFixed(1).replace("-", "−"), oninput: (value) => glass.set({ alignment_penalty: value }) });
  penalty.dataset.testid = "penalty";
  const dropped = h("input", { type: "checkbox", data: { testid: "dropped" }, on: { change: () => glass.set({ alignment_dropped: dropped.checked ? 1 : 0 }) } });
  const tree = h("div", { class: "al-tree", tabindex: "0", role: "group", "aria-label": "tree of the search; the table below says the same", data: { testid: "tree" } });
  const legend = h("p", { class: "legend" }, h("span", {}, h("i", { class: "al-best" }), "the best text"), h("span", {}, h("i", { class: "al-kept" }), "kept"), h("span", {}, h("i", { class: "al-dropped" }), "dropped: likelier ones filled the beams"), h("span", {}, "■ the text ends"), h("span", {}, "percent: how likely the token is after those before it"));
  const found = h("div", { class: "scroll", data: { testid: "found" } });
  const all = h("details", { class: "run-table", on: { toggle: () => fill() } }, h("summary", {}, "every step of the search as a table"), h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "steps of the search" }));
  const node = panel(
    "How a target is searched",
    "A beam search writes several targets side by side. At each step it looks at all ways to go on, keeps the likeliest few, and drops the rest. The score is the log-probability over the length to the power of the penalty: a higher penalty favours longer texts.",
    h("div", { class: "controls" }, count, penalty, h("label", { class: "al-check" }, dropped, "show what was dropped")),
    tree, legend, h("h3", {}, "What it found"), found, all,
  );

  function fill() {
    if (!all.open || !told) return;
    const rows = told.nodes.map((one, i) => h("tr", {}, h("td", { class: "number" }, String(one.step)), h("td", {}, token(one)), h("td", {}, one.parent === null ? "the start" : written(one.parent)), h("td", { class: "number", data: { value: one.logprob } }, percent(Math.exp(one.logprob))), h("td", { class: "number", data: { value: one.total } }, short(one.total)), h("td", { class: "number", data: { value: one.score } }, short(one.score)), h("td", {}, { kept: "kept", ended: "the text ends", pruned: "dropped" }[one.fate])));
    put(all.lastElementChild, h("table", { data: { testid: "nodes" } }, h("thead", {}, h("tr", {}, ["step", "token", "after", "probability", "log-probability", "score", "then"].map((name) => h("th", {}, name)))), h("tbody", {}, rows)));
  }

  function written(at) {
    const path = [];
    for (let one = at; one !== null; one = told.nodes[one].parent) path.unshift(told.nodes[one].text);
    return h("span", { class: "al-after" }, path.slice(-6).join(""));
  }

  function choose(ids) {
    glass.set({ target: "", added: ids, token: -1 });
  }

  function isShown(one) {
    return !glass.state.target && JSON.stringify(glass.state.added) === JSON.stringify(one.ids);
  }

  function list() {
    put(found, h("table", { class: "al-found" }, h("thead", {}, h("tr", {}, ["", "text", "score", "ends", ""].map((name) => h("th", {}, name)))), h("tbody", {}, told.found.map((one, i) => h("tr", { class: isShown(one) ? "on" : "" }, h("td", { class: "number" }, `${i + 1}.`), h("td", {}, one.tokens.length ? one.tokens.map((each) => token(each)) : h("span", { class: "quiet" }, "(nothing)")), h("td", { class: "number", data: { testid: `score-${i}`, value: one.score } }, short(one.score)), h("td", {}, one.finish_reason === "stop" ? "by itself" : "at the limit"), h("td", {}, isShown(one) ? h("span", { class: "quiet", data: { testid: `shown-${i}` } }, "shown in all views") : h("button", { type: "button", class: "act", "aria-label": `look at text ${i + 1}`, data: { testid: `choose-${i}` }, on: { click: () => choose(one.ids) } }, "look at it")))))));
  }

  return {
    node,
    async draw() {
      const { beams, penalty: power } = searched(glass);
      count.show(beams);
      penalty.show(power);
      const question = glass.question();
      const body = { question: { ...question, asked: { text: question.asked.text } } };
      if (beams !== 4) body.beams = beams;
      if (power !== 1) body.length_penalty = power;
      told = await glass.ask("beams", body, { topic: "" }); // its question is not that of the page, so none drops it
      const wide = glass.state.alignment_dropped;
      const leaves = told.nodes.filter((one, i) => one.fate !== "kept").length;
      dropped.checked = wide === 1 || (wide === undefined && leaves <= MANY);
      put(tree, told.found.length ? drawTree(told, dropped.checked, choose) : instead("The search found no text: every way to go on is forbidden."));
      list();
      fill();
    },
  };
}

/** Lay the tree out from left to right: each line is one way to its end, the likeliest on top. */
function drawTree({ nodes, found }, withDropped, choose) {
  const best = new Set(found[0]?.path ?? []);
  const useful = new Set(found.flatMap((one) => one.path));
  const children = new Map();
  nodes.forEach((one, i) => {
    if (!withDropped && one.fate === "pruned") return;
    if (!children.has(one.parent)) children.set(one.parent, []);
    children.get(one.parent).push(i);
  });
  for (const some of children.values()) some.sort((a, b) => best.has(b) - best.has(a) || nodes[b].total - nodes[a].total);
  const spots = new Map();
  let line = 0;
  function place(at) {
    const below = children.get(at) ?? [];
    const mine = line;
    below.forEach((child, i) => {
      if (i) line += 1;
      place(child);
    });
    spots.set(at, mine);
  }
  place(null);
  const last = Math.max(...nodes.map((one) => one.step));
  const X = (step) => 90 + (step - 1) * STEP;
  const Y = (at) => 20 + spots.get(at) * LINE;
  const wide = STEP - 26;
  const shapes = [];
  const boxes = [];
  for (const [at, i] of spots) {
    if (at === null) continue;
    const one = nodes[at];
    const kind = best.has(at) ? "best" : one.fate === "pruned" ? "dropped" : useful.has(at) ? "kept" : "kept lost";
    const [x, y] = [X(one.step), Y(at)];
    const before = one.parent === null ? [62, Y(null)] : [X(nodes[one.parent].step) + wide, Y(one.parent)];
    const d = `M${before[0]} ${before[1]}C${(before[0] + x) / 2} ${before[1]} ${(before[0] + x) / 2} ${y} ${x} ${y}`;
    shapes.push([kind === "best" ? 2 : kind === "dropped" ? 0 : 1, s("path", { class: `al-edge ${kind}`, d })]);
    const text = one.fate === "ended" ? "■ end" : [...one.text].length > 7 ? `${[...one.text].slice(0, 6).join("")}…` : one.text;
    boxes.push(s("g", { class: `al-node ${kind} ${one.fate}`, data: { testid: `node-${at}`, value: one.logprob, fate: one.fate } }, s("title", {}, `${one.text}: ${percent(Math.exp(one.logprob))}, score ${short(one.score)}, ${{ kept: "kept", ended: "the text ends", pruned: "dropped" }[one.fate]}`), s("rect", { x, y: y - 11, width: wide, height: 22, rx: 5 }), s("text", { x: x + 6, y }, text), s("text", { class: "al-percent", x: x + wide - 5, y }, brief(Math.exp(one.logprob)))));
  }
  const right = X(last) + wide + 26;
  const labels = found.map((one, i) => {
    const end = one.path.at(-1);
    if (end === undefined) return null;
    const y = Y(end);
    const from = X(nodes[end].step) + wide;
    const text = one.text || one.tokens.map((each) => each.text).join("") || "(nothing)";
    const said = [...text].length > 28 ? `${[...text].slice(0, 27).join("")}…` : text;
    const act = () => choose(one.ids);
    return [
      s("line", { class: "al-lead", x1: from + 3, x2: right - 6, y1: y, y2: y }),
      s("g", { class: i ? "al-label" : "al-label best", role: "button", tabindex: "0", "aria-label": `look at text ${i + 1}: ${text}, score ${short(one.score)}`, data: { testid: `label-${i}` }, on: { click: act, keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } } } }, s("text", { x: right, y }, `${i + 1}. `, s("tspan", { class: "al-score" }, short(one.score)), `  ${said}`)),
    ];
  });
  const start = s("g", { class: "al-node best" }, s("rect", { x: 8, y: Y(null) - 11, width: 54, height: 22, rx: 5 }), s("text", { x: 14, y: Y(null) }, "start"));
  const width = right + 330;
  const height = 40 + line * LINE;
  const inOrder = shapes.sort((a, b) => a[0] - b[0]).map(([, shape]) => shape);
  return s("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, inOrder, labels.filter(Boolean), start, boxes);
}

function brief(share) {
  return share >= 0.01 ? `${(100 * share).toFixed(0)}%` : "<1%";
}
