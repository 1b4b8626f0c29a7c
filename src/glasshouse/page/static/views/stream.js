// Residual stream: what would be said after each layer, what adds up to a logit, and how the vectors lie.

import { Outdated } from "glasshouse/asking.js";
import { opening, within } from "glasshouse/code.js";
import { ink, onTheme, ramp, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { bars, choice, instead, panel, python, token } from "glasshouse/parts.js";
import { row as rowOf, unpack } from "glasshouse/tensor.js";

const COLUMNS = 16; // positions of a tile
const ROWS = 12; // layers of a tile
const NARROW = 64; // pixels of a cell at least
const WIDE = 128; // and at most
const HIGH = 36;
const SIDE = 74; // of the names of the layers
const CANDIDATES = 12;
const LARGEST = 10;

export default {
  name: "stream",
  title: "Residual stream",
  fits: () => true,
  mount(glass, root) {
    const reads = glass.model.speaks || glass.model.head === "token_label";
    const parts = [table(glass, reads), reads ? cell(glass) : null, lengths(glass), likeness(glass), glass.model.speaks ? sum(glass) : null].filter(Boolean);
    const [first, ...rest] = parts;
    const last = glass.model.speaks ? rest.pop() : null;
    const code = h("div", {});
    root.append(first.node, h("div", { class: "columns stream-facts" }, rest.map((part) => part.node)), ...(last ? [last.node] : []), code);
    const stop = onTheme(() => parts.forEach((part) => part.colour?.()));
    return {
      async draw(changed) {
        if (changed.has("layer") && !changed.has("tokens") && glass.state.streamEmbed && !changed.has("streamEmbed")) {
          glass.set({ streamEmbed: undefined });
          return;
        }
        const [lines] = await Promise.all([inPython(glass, reads), ...parts.map((part) => part.draw(changed))]);
        put(code, python(lines));
      },
      close: () => {
        stop();
        parts.forEach((part) => part.close?.());
      },
    };
  },
};

/** How many rows the table has: the embedding, and each layer. */
function depth(glass) {
  return glass.model.n_layers + 1;
}

/** The row that is selected: 0 is the embedding. */
function chosenRow(glass) {
  return glass.state.streamEmbed ? 0 : Math.min(glass.state.layer, glass.model.n_layers - 1) + 1;
}

function rowName(number) {
  return number ? `layer ${number - 1}` : "embed";
}

function select(glass, place, number) {
  const last = glass.row.length - 1;
  const changes = { token: Math.max(0, Math.min(last, place)) };
  if (number !== undefined) Object.assign(changes, { layer: Math.max(0, number - 1), streamEmbed: number ? undefined : 1 });
  glass.set(changes);
}

async function inPython(glass, reads) {
  const { lines, inputs } = opening(glass);
  const place = glass.token;
  const work = [];
  if (reads) {
    const hides = glass.model.kind === "encoder" && glass.state.hidden.length;
    if (hides) lines.push("targets = ids.clone()", ...glass.state.hidden.map((one) => `targets[0, ${one}] = ...  # what is hidden there`));
    work.push(`lens = gh.lens(model, ${inputs}, positions=[${place}]${hides ? ", targets=targets" : ""}, tok=tok)`);
  }
  if (glass.model.speaks) {
    const { streamToken, streamAgainst } = glass.state;
    const said = Number.isInteger(streamToken) ? streamToken : "int(lens.tokens[-1, 0, 0, 0])";
    const against = Number.isInteger(streamAgainst) ? `, against=${streamAgainst}` : "";
    work.push(`parts = gh.attribute(model, ${inputs}, position=${place}, token=${said}${against}).parts()`);
  }
  work.push(`norms = gh.inspection.norms(model, ${inputs})[:, 0, ${place}]`);
  const prefix = glass.model.kind === "seq2seq" ? "decoder." : "";
  const site = prefix + (chosenRow(glass) ? `resid_post.${chosenRow(glass) - 1}` : "embed");
  work.push(`cosine = gh.inspection.similarity(model, ${inputs}, site="${site}")[0, ${place}]`);
  return [...lines, ...(await within(glass, work))].join("\n");
}

// The table

const COLOURS = {
  probability: {
    text: "probability",
    share: (one) => one.probability,
    figure: (one) => percent(one.probability),
    legend: () => ["0%", "100% sure of this token"],
  },
  entropy: {
    text: "entropy",
    share: (one, outputs) => one.entropy / Math.log(outputs),
    figure: (one) => short(one.entropy),
    legend: (outputs) => ["0 nats: sure", `${short(Math.log(outputs))} nats: anything could come`],
  },
  rank: {
    text: "rank of the true token",
    share: (one, outputs) => (one.rank < 0 ? 0 : 1 - Math.log1p(one.rank) / Math.log(outputs)),
    figure: (one) => (one.rank < 0 ? "–" : one.rank.toLocaleString("en")),
    legend: () => ["far down", "0: no other is likelier"],
  },
};

function table(glass, reads) {
  const title = reads ? "What the model would say after each layer" : "How long the vectors are after each layer";
  const about = reads
    ? "Read it from the bottom up: each token enters as a vector, every layer adds to it, and the top row is what the model says. In between, the same head reads the unfinished vector: this is what would be said if the model stopped there."
    : `${glass.model.head === "none" ? "This model has no head" : `The head of this model is ${glass.model.head}`}, so there are no logits at each token, and what would be said on the way cannot be shown. What can be shown, from the bottom up, is how long the vectors are, and which are alike.`;
  const body = h("div", { class: "lens-body" });
  const above = h("div", { class: "lens-above" });
  const below = h("div", { class: "lens-below" });
  const names = h("div", { class: "lens-names", "aria-hidden": "true" });
  const column = h("div", { class: "lens-column", "aria-hidden": "true" });
  const box = h("div", { class: "lens", role: "grid", tabindex: "0", "aria-label": `${title}: rows are layers, columns are tokens`, data: { testid: "lens" }, on: { scroll: () => scrolled(), keydown: walk, click: picked } }, names, h("div", { class: "lens-sheet" }, above, body, below));
  const scale = h("span", { class: "lens-scale" });
  const legend = h("div", { class: "legend", data: { testid: "lens-legend" } });
  const colours = reads ? choice("colour by", Object.entries(COLOURS).filter(([name]) => name !== "rank" || glass.model.speaks).map(([name, one]) => [name, one.text]), (value) => glass.set({ streamColour: value === "probability" ? undefined : value })) : null;
  const controls = h("div", { class: "controls" }, colours ? [h("span", { class: "quiet" }, "colour by"), colours] : null, legend);
  const node = panel(title, about, controls, box);
  const tiles = new Map();
  let shown = ""; // the question that the tiles answer
  let width = NARROW;
  let span = null; // the lengths of vectors so far, from the shortest to the longest
  let outputs = glass.model.vocab_size; // or labels

  const colourName = () => (glass.state.streamColour in COLOURS ? glass.state.streamColour : "probability");

  function lay() {
    const { length } = glass.row;
    width = Math.max(NARROW, Math.min(WIDE, Math.floor((controls.clientWidth - SIDE - 3) / length)));
    for (const one of [above, body, below]) one.style.width = `${length * width}px`;
    body.style.height = `${depth(glass) * HIGH}px`;
    box.setAttribute("aria-rowcount", depth(glass));
    box.setAttribute("aria-colcount", length);
    const labels = Array.from({ length: depth(glass) }, (_, i) => rowName(depth(glass) - 1 - i));
    put(names, reads && glass.model.speaks ? h("span", { class: "lens-end" }, glass.model.kind === "encoder" ? "true" : "true next") : null, labels.map((name) => h("span", {}, name)), h("span", { class: "lens-end" }, "token"));
    above.hidden = !(reads && glass.model.speaks);
  }

  /** The tiles in view, as the first row from the top and the first column. */
  function wanted() {
    const { length } = glass.row;
    const left = Math.max(0, Math.floor(box.scrollLeft / width));
    const right = Math.min(length, Math.ceil((box.scrollLeft + box.clientWidth - SIDE) / width) + 1);
    const top = Math.max(0, Math.floor(box.scrollTop / HIGH) - 1);
    const bottom = Math.min(depth(glass), Math.ceil((box.scrollTop + box.clientHeight) / HIGH));
    const found = [];
    for (let r = Math.floor(top / ROWS) * ROWS; r < bottom; r += ROWS)
      for (let c = Math.floor(left / COLUMNS) * COLUMNS; c < right; c += COLUMNS) found.push([r, c]);
    return found;
  }

  async function ensure() {
    const question = glass.question();
    const key = JSON.stringify(question);
    if (key !== shown) {
      for (const tile of tiles.values()) tile.remove();
      tiles.clear();
      put(above);
      put(below);
      shown = key;
      span = null;
    }
    const inView = wanted();
    const names_ = new Set(inView.map(String));
    for (const [name, tile] of tiles) {
      if (names_.has(name)) continue;
      tile.remove();
      tiles.delete(name);
    }
    await Promise.all(inView.filter((one) => !tiles.has(String(one))).map(([r, c]) => load(question, key, r, c)));
    mark();
  }

  async function load(question, key, r, c) {
    const stop = Math.min(glass.row.length, c + COLUMNS);
    const layers = [];
    for (let i = r; i < Math.min(depth(glass), r + ROWS); i += 1) layers.push(depth(glass) - 1 - i);
    const found = await glass.ask(reads ? "lens" : "norms", { question, layers, start: c, stop });
    if (key !== shown || tiles.has(String([r, c]))) return;
    if (reads && found.outputs !== outputs) {
      outputs = found.outputs;
      drawLegend();
    }
    const count = stop - c;
    const tile = h("div", { class: "lens-tile", style: { left: `${c * width}px`, top: `${r * HIGH}px` } });
    const cells = reads ? opened(found, count) : lengthsOf(found, count);
    tile.append(...layers.map((layer, i) => h("div", { class: "lens-row", role: "row", "aria-rowindex": depth(glass) - layer, style: { height: `${HIGH}px` } }, cells[i].map((one, j) => make(one, layer, c + j)))));
    tile.cells = cells.flat();
    tiles.set(String([r, c]), tile);
    body.append(tile);
    colour(tile);
    ends(found, c, stop);
  }

  /** What stands above and below the columns of a tile. */
  function ends(found, start, stop) {
    if (below.querySelector(`[data-start="${start}"]`)) return;
    const strip = (tokens, kind) => h("div", { class: "lens-strip", data: { start }, style: { left: `${start * width}px` } }, tokens.map((one, i) => h("span", { class: kind, style: { width: `${width}px` }, data: { place: start + i } }, one ? token(one) : "")));
    below.append(strip(glass.row.slice(start, stop), "lens-token"));
    if (found.true) above.append(strip(found.true.map((id) => (id === null ? null : found.words[id])), "lens-true"));
  }

  function make(one, layer, place) {
    const data = { row: layer, place, ...(reads ? { id: one.id, probability: one.probability, entropy: one.entropy, rank: one.rank } : { norm: one.norm }) };
    const said = reads
      ? `after ${rowName(layer)}, token ${place}: ${one.word.text}, ${percent(one.probability)}, entropy ${short(one.entropy)} nats${one.rank < 0 ? "" : `, rank of the true token ${one.rank}`}`
      : `after ${rowName(layer)}, token ${place}: length ${short(one.norm)}`;
    return h("div", { class: "lens-cell", id: `lens-${glass.moment}-${layer}-${place}`, role: "gridcell", "aria-colindex": place + 1, "aria-label": said, data, style: { width: `${width}px` } }, reads ? h("span", { class: "lens-word" }, one.word.text) : null, h("span", { class: "lens-figure" }));
  }

  function colour(tile) {
    const how = COLOURS[colourName()];
    const nodes = tile.querySelectorAll(".lens-cell");
    tile.cells.forEach((one, i) => {
      const share = reads ? how.share(one, outputs) : within01(one.norm);
      nodes[i].style.background = shade(share);
      nodes[i].style.color = ink(share);
      put(nodes[i].lastChild, reads ? how.figure(one) : short(one.norm));
    });
  }

  /** Where a length stands between the shortest and the longest; lengths that are all alike are pale. */
  function within01(norm) {
    const [low, high] = span;
    return high > 1.001 * low ? 0.08 + 0.84 * ((norm - low) / (high - low)) : 0.25;
  }

  function opened(found, count) {
    const probability = unpack(found.probability).data;
    const entropy = unpack(found.entropy).data;
    const rank = unpack(found.rank).data;
    return found.tokens.map((line, i) => line.map(([id], j) => {
      const at = i * count + j;
      return { id, word: found.words[id], probability: probability[at], entropy: entropy[at], rank: rank[at] };
    }));
  }

  function lengthsOf(found, count) {
    const values = unpack(found.norms);
    const [low, high] = span ?? [Infinity, -Infinity];
    span = [Math.min(low, ...values.data), Math.max(high, ...values.data)];
    if (low !== span[0] || high !== span[1]) {
      for (const tile of tiles.values()) colour(tile);
      drawLegend();
    }
    return found.layers.map((_, i) => Array.from(values.data.subarray(i * count, (i + 1) * count), (norm) => ({ norm })));
  }

  function mark() {
    const number = chosenRow(glass);
    body.append(column);
    Object.assign(column.style, { left: `${glass.token * width}px`, width: `${width}px` });
    for (const one of box.querySelectorAll(".lens-cell[aria-selected], .lens-chosen")) {
      one.removeAttribute("aria-selected");
      one.classList.remove("lens-chosen");
    }
    const id = `lens-${glass.moment}-${number}-${glass.token}`;
    const one = document.getElementById(id);
    one?.setAttribute("aria-selected", "true");
    below.querySelector(`[data-place="${glass.token}"]`)?.classList.add("lens-chosen");
    box.setAttribute("aria-activedescendant", one ? id : "");
    [...names.querySelectorAll("span:not(.lens-end)")].forEach((name, i) => name.classList.toggle("lens-chosen", depth(glass) - 1 - i === number));
  }

  /** Bring the selected cell into view. */
  function reveal() {
    const left = glass.token * width;
    const room = box.clientWidth - SIDE;
    if (left < box.scrollLeft || left + width > box.scrollLeft + room) box.scrollLeft = left - room / 2 + width / 2;
    const top = (depth(glass) - 1 - chosenRow(glass)) * HIGH;
    if (top < box.scrollTop || top + 3 * HIGH > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
  }

  let waiting = null;
  function scrolled() {
    clearTimeout(waiting);
    waiting = setTimeout(async () => {
      glass.page.wait(1);
      try {
        await ensure();
      } catch (error) {
        if (!(error instanceof Outdated)) glass.page.say(error.message, true);
      } finally {
        glass.page.wait(-1);
      }
    }, 40);
  }

  function picked(event) {
    const one = event.target.closest(".lens-cell");
    if (one) return select(glass, Number(one.dataset.place), Number(one.dataset.row));
    const end = event.target.closest("[data-place]");
    if (end) select(glass, Number(end.dataset.place));
    return undefined;
  }

  function walk(event) {
    const number = chosenRow(glass);
    const to = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (event.key === "Home") select(glass, 0, number);
    else if (event.key === "End") select(glass, glass.row.length - 1, number);
    else if (to) select(glass, glass.token + to[0], Math.max(0, Math.min(depth(glass) - 1, number + to[1])));
    else return;
    event.preventDefault();
  }

  function drawLegend() {
    const [low, high] = reads ? COLOURS[colourName()].legend(outputs) : [`the shortest here: ${short(span?.[0])}`, `the longest: ${short(span?.[1])}`];
    const colours_ = ramp();
    const stops = [0, 64, 128, 192, 255].map((i) => `rgb(${colours_[3 * i]}, ${colours_[3 * i + 1]}, ${colours_[3 * i + 2]})`);
    scale.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    put(legend, h("span", {}, low), scale, h("span", {}, high));
  }

  const watch = new ResizeObserver(() => {
    const before = width;
    lay();
    if (width !== before) {
      shown = "";
      scrolled();
    }
  });
  watch.observe(controls);

  return {
    node,
    async draw(changed) {
      colours?.show(colourName());
      drawLegend();
      if (changed.has("tokens")) lay();
      if (changed.has("streamColour")) for (const tile of tiles.values()) colour(tile);
      if (["tokens", "token", "layer", "streamEmbed"].some((name) => changed.has(name))) reveal();
      mark();
      await ensure();
    },
    colour() {
      drawLegend();
      for (const tile of tiles.values()) colour(tile);
    },
    close: () => watch.disconnect(),
  };
}

// One cell

function cell(glass) {
  const list = h("div", { data: { testid: "cell" } });
  const facts = h("p", { class: "quiet", role: "status", data: { testid: "cell-facts" } });
  const node = panel("The selected cell", null, list, facts);
  const title = node.querySelector("h2");
  return {
    node,
    async draw() {
      const place = glass.token;
      const number = chosenRow(glass);
      const found = await glass.ask("lens", { question: glass.question(), layers: [number], start: place, stop: place + 1, top_k: 5 });
      const probability = unpack(found.probability).data;
      const [[ids]] = found.tokens;
      const [true_] = found.true;
      put(title, number ? `After layer ${number - 1}, at ` : "Of the embedding alone, at ", token(glass.row[place]));
      put(list, bars(ids.map((id, i) => ({
        name: glass.model.speaks ? token(found.words[id]) : found.words[id].text,
        share: probability[i],
        value: probability[i],
        text: percent(probability[i]),
        title: found.words[id].text,
        class: id === true_ ? "true" : "",
        data: { id },
      })), { label: "likeliest" }));
      const entropy = unpack(found.entropy).data[0];
      const rank = unpack(found.rank).data[0];
      const loss = unpack(found.loss).data[0];
      const said = [h("span", { data: { testid: "cell-entropy", value: entropy } }, `entropy ${short(entropy)} nats`)];
      if (true_ === null) said.push(glass.model.speaks ? "; after the last token nothing stands in the text to compare with" : "");
      else said.push("; the true token ", token(found.words[true_]), h("span", { data: { testid: "cell-rank", value: rank } }, rank ? ` has ${rank.toLocaleString("en")} likelier ones above it` : " is the likeliest"), h("span", { data: { testid: "cell-loss", value: loss } }, `, loss ${short(loss)} nats`));
      put(facts, said);
    },
  };
}

// Lengths and angles

function lengths(glass) {
  const list = h("div", { class: "lengths", data: { testid: "norms" } });
  const node = panel("How long its vector is", "The length of the selected token’s vector after each layer, the last on top.", list);
  return {
    node,
    async draw() {
      const place = glass.token;
      const found = await glass.ask("norms", { question: glass.question(), start: place, stop: place + 1 });
      const values = unpack(found.norms).data;
      const most = Math.max(...values);
      const rows = found.layers.map((layer) => ({
        name: rowName(layer),
        share: values[layer] / most,
        value: values[layer],
        text: short(values[layer]),
        class: layer === chosenRow(glass) ? "chosen" : "",
        onclick: () => select(glass, place, layer),
        data: { row: layer },
      }));
      put(list, bars(rows.reverse(), { label: "length of the vector after each layer" }));
    },
  };
}

function likeness(glass) {
  const list = h("div", { data: { testid: "alike" } });
  const none = instead("There is no other token to compare with.");
  const node = panel("Which tokens are like it", "Vectors that point the same way, after the selected layer: cosine 1 is the same direction, 0 is none in common.", list);
  return {
    node,
    async draw() {
      const place = glass.token;
      const found = await glass.ask("alike", { question: glass.question(), layer: chosenRow(glass), position: place, show: 6 });
      put(list, found.nearest.length ? bars(found.nearest.map((one) => ({
        name: [token(one), h("span", { class: "quiet" }, ` ${one.position}`)],
        share: Math.abs(one.cosine),
        value: one.cosine,
        text: short(one.cosine),
        class: one.cosine < 0 ? "less" : "",
        title: `token ${one.position}`,
        onclick: () => select(glass, one.position),
        data: { place: one.position },
      })), { label: "tokens whose vectors are most alike" }) : none);
    },
  };
}

// What adds up

function sum(glass) {
  const said = h("select", { "aria-label": "token", data: { testid: "parts-token" }, on: { change: () => glass.set({ streamToken: said.value === "" ? undefined : Number(said.value) }) } });
  const against = h("select", { "aria-label": "less the logit of", data: { testid: "parts-against" }, on: { change: () => glass.set({ streamAgainst: against.value === "" ? undefined : Number(against.value) }) } });
  const chart = h("div", { class: "sum", tabindex: "0", role: "group", "aria-label": "what each layer adds; arrow keys go from head to head", data: { testid: "sum" }, on: { keydown: walk } });
  const chosen = h("p", { class: "quiet", role: "status", data: { testid: "sum-chosen" } });
  const list = h("div", { data: { testid: "largest" } });
  const cross = glass.model.kind === "seq2seq";
  const legend = h("div", { class: "legend" }, swatch("heads", "one segment a head"), cross ? swatch("cross", "one segment a head of cross-attention") : null, swatch("ffn", "feed-forward"), swatch("start", "embedding and biases"), h("span", {}, "right of the line: for the token; left: against it"));
  const node = panel(
    "What adds up to its logit",
    "A logit is a sum: what the embedding gives, what every head and every feed-forward layer adds, and biases. (Norms are held as they were.)",
    h("div", { class: "controls" }, h("label", {}, "logit of ", said), h("label", {}, "less that of ", against)),
    legend,
    h("div", { class: "sum-both" }, h("div", {}, chart, chosen), h("div", {}, h("h3", {}, "The largest parts"), h("p", { class: "quiet sum-names" }, "Head 1.3 is head 3 of layer 1; ffn is feed-forward."), list)),
  );

  function walk(event) {
    const { layer, head } = glass.state;
    const to = { ArrowLeft: { head: head - 1 }, ArrowRight: { head: head + 1 }, ArrowUp: { layer: layer + 1 }, ArrowDown: { layer: layer - 1 } }[event.key];
    if (!to) return;
    event.preventDefault();
    const held = (value, most) => Math.max(0, Math.min(most, value));
    if ("head" in to) glass.set({ head: held(to.head, glass.model.n_heads - 1) });
    else glass.set({ layer: held(to.layer, glass.model.n_layers - 1) });
  }

  function options(node_, rows, value, none) {
    const ids = new Set(rows.map((one) => one.id));
    const all = [h("option", { value: "" }, none), ...rows.map((one) => h("option", { value: one.id }, `${one.text} · ${percent(one.probability)}`))];
    if (Number.isInteger(value) && !ids.has(value)) all.push(h("option", { value }, `id ${value}`));
    put(node_, all);
    node_.value = Number.isInteger(value) ? value : "";
  }

  return {
    node,
    async draw() {
      const place = glass.token;
      const { streamToken, streamAgainst } = glass.state;
      const question = glass.question();
      const body = { question, position: place };
      if (Number.isInteger(streamToken)) body.token = streamToken;
      if (Number.isInteger(streamAgainst)) body.against = streamAgainst;
      const [following, found] = await Promise.all([glass.ask("next", { question, position: place, show: CANDIDATES }), glass.ask("parts", body)]);
      options(said, following.candidates, streamToken, `the likeliest: ${following.candidates[0].text}`);
      options(against, following.candidates, streamAgainst, "nothing");
      const groups = layersOf(glass, found);
      chart.classList.toggle("few", groups.length <= 7);
      put(chart, drawn(glass, groups, found));
      const { layer, head } = glass.state;
      const here = groups.flatMap((one) => one.parts).filter((one) => one.layer === layer && (one.kind === "ffn" || one.head === head));
      put(chosen, `Layer ${layer}: `, here.map((one, i) => [i ? ", " : "", `${one.kind === "ffn" ? "feed-forward" : one.kind === "cross" ? `cross-attention head ${one.head}` : `head ${one.head}`} adds `, h("b", { data: { value: one.value } }, signed(one.value))]), ".");
      const all = groups.flatMap((one) => one.parts).sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, LARGEST);
      const most = Math.abs(all[0]?.value ?? 1) || 1;
      put(list, bars(all.map((one) => ({
        name: one.name,
        share: Math.abs(one.value) / most,
        value: one.value,
        text: signed(one.value),
        class: `${one.value < 0 ? "less" : "more"}${one.layer === layer && one.head === head ? " chosen" : ""}`,
        title: one.name,
        onclick: one.layer === undefined ? undefined : () => glass.set(one.head === undefined ? { layer: one.layer } : { layer: one.layer, head: one.head }),
        data: { part: one.name },
      })), { label: "the largest parts" }));
    },
  };
}

function swatch(kind, text) {
  return h("span", {}, h("i", { class: `sum-${kind}` }), text);
}

function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value);
}

/** The rows of the sum, the lowest first: what it starts from, then each layer. */
function layersOf(glass, found) {
  const heads = unpack(found.heads);
  const cross = found.cross_heads ? unpack(found.cross_heads) : null;
  const ffn = unpack(found.feedforward).data;
  const groups = [{ name: "start", parts: [{ kind: "start", name: "embed", value: found.embedding }, { kind: "start", name: "biases", value: found.bias }] }];
  for (let layer = 0; layer < ffn.length; layer += 1) {
    const parts = [...rowOf(heads, layer)].map((value, head) => ({ kind: "heads", name: `head ${layer}.${head}`, layer, head, value }));
    if (cross) parts.push(...[...rowOf(cross, layer)].map((value, head) => ({ kind: "cross", name: `cross head ${layer}.${head}`, layer, head, value })));
    parts.push({ kind: "ffn", name: `ffn ${layer}`, layer, value: ffn[layer] });
    groups.push({ name: `layer ${layer}`, layer, parts });
  }
  return groups;
}

function drawn(glass, groups, found) {
  const { layer, head } = glass.state;
  let far = 0;
  let near = 0;
  for (const { parts } of groups) {
    far = Math.max(far, parts.reduce((sum_, one) => sum_ + Math.max(0, one.value), 0));
    near = Math.max(near, parts.reduce((sum_, one) => sum_ - Math.min(0, one.value), 0));
  }
  const span = far + near || 1;
  const zero = near / span;
  let running = 0;
  const sums = groups.map(({ parts }) => (running += parts.reduce((sum_, one) => sum_ + one.value, 0)));
  const low = Math.min(0, ...sums);
  const reach = Math.max(0, ...sums) - low || 1;
  const lines = groups.map((group, i) => {
    const adds = group.parts.reduce((sum_, one) => sum_ + one.value, 0);
    let right = zero;
    let left = zero;
    const segments = group.parts.map((one) => {
      const size_ = Math.abs(one.value) / span;
      const at = one.value >= 0 ? right : left - size_;
      if (one.value >= 0) right += size_;
      else left -= size_;
      const on = one.layer !== undefined && one.layer === layer && one.head === head;
      const properties = { class: `segment sum-${one.kind}${on ? " chosen" : ""}${one.head % 2 ? " odd" : ""}`, style: { left: `${100 * at}%`, width: `${100 * size_}%` }, title: `${one.name}: ${signed(one.value)}`, data: { part: one.name, value: one.value } };
      if (one.layer === undefined) return h("span", properties);
      const press = () => glass.set(one.head === undefined ? { layer: one.layer } : { layer: one.layer, head: one.head });
      return h("button", { ...properties, type: "button", tabindex: "-1", "aria-label": `${one.name} adds ${signed(one.value)}`, "aria-pressed": on, on: { click: press } });
    });
    const from = (Math.min(0, sums[i]) - low) / reach;
    return h("div", { class: `sum-row${group.layer === layer ? " chosen" : ""}` },
      h("span", { class: "sum-name" }, group.name),
      h("span", { class: "sum-track" }, h("i", { class: "sum-zero", style: { left: `${100 * zero}%` } }), segments),
      h("span", { class: "figure", data: { value: adds } }, signed(adds)),
      h("span", { class: "sum-so-far", "aria-hidden": "true" }, h("i", { style: { left: `${100 * from}%`, width: `${(100 * Math.abs(sums[i])) / reach}%` } })),
      h("span", { class: "figure quiet", data: { value: sums[i] } }, short(sums[i])));
  });
  const total = h("div", { class: "sum-row sum-total" }, h("span", { class: "sum-name" }, "total"), h("span", { class: "sum-said" }, found.against ? ["logit of ", token(found.token), " less that of ", token(found.against)] : ["logit of ", token(found.token)]), h("span", {}), h("span", {}), h("b", { class: "figure", data: { testid: "logit", value: found.logit } }, short(found.logit)));
  const top = h("div", { class: "sum-row sum-top quiet" }, h("span", {}), h("span", {}), h("span", { class: "figure" }, "adds"), h("span", {}), h("span", { class: "figure" }, "so far"));
  return [top, total, lines.reverse()];
}
