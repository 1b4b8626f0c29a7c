// Experiment: parts of the model switched off, scaled or patched, and what it says before and after.

import { ask, Outdated } from "glasshouse/asking.js";
import { opening, within } from "glasshouse/code.js";
import { balance, balanceInk, ink, onTheme, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent, plural, short } from "glasshouse/number.js";
import { choice, instead, panel, python, slider, token } from "glasshouse/parts.js";
import { unpack } from "glasshouse/tensor.js";

const SHOWN = 8; // candidates before, and after
const PLACES = 20; // positions of the grid of patches at once
const TOKENS = 400; // of the text that are coloured
const WORK = 4096; // tokens that one request of a sweep passes through the model, about
const PAUSE = 300; // milliseconds without a key after which what is typed counts
const FIRST = 0.5; // what a part is scaled by at first

export default {
  name: "experiment",
  title: "Experiment",
  fits: () => true,
  mount(glass, root) {
    const changes = history(glass);
    const parts = [switches(glass, changes), changed(glass, changes), outcome(glass), patching(glass, changes)];
    const [first, second, ...rest] = parts.map((part) => part.node);
    const code = h("div", {});
    root.append(h("div", { class: "experiment-top" }, first, second), ...rest, code);
    const undo = (event) => changes.key(event);
    addEventListener("keydown", undo);
    const stop = onTheme(() => parts.forEach((part) => part.colour?.()));
    return {
      async draw(which) {
        const [lines] = await Promise.all([inPython(glass), ...parts.map((part) => part.draw(which))]);
        put(code, python(lines));
      },
      close: () => {
        removeEventListener("keydown", undo);
        stop();
        parts.forEach((part) => part.close?.());
      },
    };
  },
};

async function inPython(glass) {
  const { lines, inputs } = opening(glass);
  const vectors = !glass.model.speaks && !glass.model.head.endsWith("label");
  const at = glass.model.head === "sequence_label" ? "[0]" : `[0, ${glass.token}]`;
  const call = vectors ? `model(${inputs})` : `model(${inputs})${at}.softmax(-1)`;
  return [...lines, "model.eval()", `before = ${call}`, ...(await within(glass, [`after = ${call}`]))].join("\n");
}

// The changes: made, undone and made again

const kept = { past: [], future: [] }; // for as long as the page is open, whatever view is looked at

function history(glass) {
  const now = () => ({ edits: glass.state.edits, other: glass.state.other });
  let latest = "";
  function move(from, to) {
    const next = from.pop();
    if (!next) return;
    to.push(now());
    latest = "";
    glass.set(next);
  }
  const made = {
    /** Make a change; several in a row of one `kind`, such as the movements of a slider, are undone at once. */
    make(changes, kind = "") {
      if (!kind || kind !== latest) kept.past.push(now());
      latest = kind;
      kept.future.length = 0;
      glass.set(changes);
    },
    /** Put an edit in place of what is done at a site; without one, take that away. */
    put(site, edit, more = {}, kind = "") {
      const { edits } = glass.state;
      const at = edits.findIndex((one) => one.site === site);
      const next = at < 0 ? [...edits, edit] : edits.map((one, i) => (i === at ? edit : one));
      made.make({ edits: next.filter(Boolean), ...more }, kind);
    },
    undo: () => move(kept.past, kept.future),
    redo: () => move(kept.future, kept.past),
    get canUndo() {
      return kept.past.length > 0;
    },
    get canRedo() {
      return kept.future.length > 0;
    },
    key(event) {
      if (event.defaultPrevented || !(event.ctrlKey || event.metaKey) || event.altKey) return;
      if (event.target.closest?.("textarea, input[type=text], input[type=number]")) return;
      const name = event.key.toLowerCase();
      if (name === "z" && event.shiftKey) made.redo();
      else if (name === "z") made.undo();
      else if (name === "y") made.redo();
      else return;
      event.preventDefault();
    },
  };
  return made;
}

/** What a site is, in words. */
function named(glass, site) {
  const found = /^(encoder\.|decoder\.)?(cross_)?(\w+?)\.(\d+)(?:\[(.*)\])?$/.exec(site);
  if (!found) return site;
  const [, stack = "", cross = "", kind, layer, inside = ""] = found;
  const index = Object.fromEntries(inside.split(",").filter(Boolean).map((one) => one.split("=").map((half) => half.trim())));
  const way = cross ? "cross-attention" : "attention";
  const what = { z: "head" in index ? `${cross ? "cross-attention " : ""}head ${index.head}` : `all ${way} heads`, attn_out: `all ${way}`, ffn_out: "feed-forward", resid_post: "stream after it" }[kind] ?? kind;
  const where = "position" in index ? `, token ${index.position}` : "";
  return `${stack ? `${stack.slice(0, -1)} ` : ""}layer ${layer} · ${what}${where}`;
}

function changed(glass, changes) {
  const list = h("ul", { class: "edits", data: { testid: "edits" } });
  const none = h("p", { class: "quiet", data: { testid: "no-edits" } }, "Nothing is changed yet. Press a head in the grid to switch it off, and see below what the model says then.");
  const undo = h("button", { type: "button", class: "act", title: "Ctrl+Z", data: { testid: "undo" }, on: { click: () => changes.undo() } }, "Undo");
  const redo = h("button", { type: "button", class: "act", title: "Ctrl+Shift+Z", data: { testid: "redo" }, on: { click: () => changes.redo() } }, "Redo");
  const reset = h("button", { type: "button", class: "act", data: { testid: "reset" }, on: { click: () => changes.make({ edits: [] }) } }, "Reset");
  const node = panel("What is changed inside", "The address holds all of this: who opens it sees the same experiment. The other views show the changed model, too.", none, list, h("div", { class: "controls" }, undo, redo, reset));
  const rows = new Map(); // by site and kind, so that a slider stays under the hand

  function make(edit) {
    const remove = h("button", { type: "button", class: "remove", "aria-label": `remove ${named(glass, edit.site)}`, on: { click: () => changes.put(edit.site, null) } }, "✕");
    const by = edit.kind === "scale" ? slider(`scale ${named(glass, edit.site)} by`, { min: 0, max: 3, step: 0.05, shown: (value) => (value ? `× ${value.toFixed(2)}` : "off"), oninput: (value) => later(edit.site, value) }) : h("span", { class: "quiet" }, edit.kind === "mean" ? "always its mean over the text" : "as on the second text");
    by.querySelector?.(".name")?.remove();
    const row = h("li", { data: { site: edit.site } }, h("span", { class: "edit-name" }, named(glass, edit.site)), by, remove);
    row.show = (one) => by.show?.(one.by ?? 0);
    return row;
  }

  let waiting = null;
  function later(site, by) {
    clearTimeout(waiting);
    waiting = setTimeout(() => changes.put(site, { kind: "scale", site, by }, {}, `slide ${site}`), 60);
  }

  return {
    node,
    draw() {
      const { edits } = glass.state;
      const names = edits.map((one) => `${one.kind} ${one.site}`);
      for (const name of rows.keys()) if (!names.includes(name)) rows.delete(name);
      const now = edits.map((one, i) => {
        if (!rows.has(names[i])) rows.set(names[i], make(one));
        rows.get(names[i]).show(one);
        return rows.get(names[i]);
      });
      if (now.length !== list.children.length || now.some((row, i) => row !== list.children[i])) put(list, now);
      none.hidden = edits.length > 0;
      list.hidden = !edits.length;
      undo.disabled = !changes.canUndo;
      redo.disabled = !changes.canRedo;
      reset.disabled = !edits.length;
    },
  };
}

// Before and after

function outcome(glass) {
  const { model } = glass;
  const vectors = !model.speaks && !model.head.endsWith("label");
  const title = { next_token: "What comes next", masked_token: "What stands here" }[model.head] ?? "What the model says";
  const said = h("div", { class: "twins", role: "list", "aria-label": "probabilities before and after", data: { testid: "changed" } });
  const apart = h("p", { class: "quiet", data: { testid: "divergence" } });
  const loss = h("p", { class: "loss", role: "status", data: { testid: "loss" } });
  const text = h("div", { class: "loss-text", tabindex: "0", role: "group", "aria-label": "the text, coloured by its loss", data: { testid: "loss-text" }, on: { click: (event) => {
    const place = event.target.closest("[data-place]")?.dataset.place;
    if (place !== undefined) glass.set({ token: Number(place) });
  } } });
  const legend = h("div", { class: "legend" });
  const column = h("div", { class: "scroll column-box", tabindex: "0", role: "group", "aria-label": "the lens before and after", data: { testid: "column" } });
  const reads = model.speaks || model.head === "token_label";
  const panels = [
    panel(title, "At the selected token, before and after the changes.", vectors ? instead(`${model.head === "none" ? "This model has no head" : `The head of this model is ${model.head}`}, so it says nothing of tokens: see how far its vectors move.`) : [key(), said, apart]),
    panel(model.speaks ? "How well the text is foretold" : "How far the last vectors move", model.speaks ? (model.kind === "encoder" ? "The loss is how surprised the model is by each token where it stands: the less, the better. Hide tokens, and only those count." : "The loss is how surprised the model is by each token after those before it: the less, the better.") : "How far the vector that the head reads moved at each token, as a share of its length.", loss, text, legend),
  ];
  if (reads) panels.push(panel("What it would say after each layer", "The lens at the selected token, before and after.", column));
  const node = h("div", { class: "columns outcome" }, panels);
  let colour = () => {};

  function key() {
    return h("div", { class: "legend" }, h("span", {}, h("i", { class: "twin-before" }), "before"), h("span", {}, h("i", { class: "twin-after" }), "after"));
  }

  async function drawSaid() {
    const { candidates, divergence } = await glass.ask("changed", { question: glass.question(), position: glass.token, show: SHOWN });
    const top = Math.max(...candidates.map((one) => Math.max(one.before, one.after)));
    const bar = (kind, value) => h("i", { class: `twin-${kind}`, style: { width: `${(100 * value) / top}%` } });
    const order = [...candidates].sort((a, b) => Math.max(b.before, b.after) - Math.max(a.before, a.after)).slice(0, SHOWN + 2);
    put(said, order.map((one) => h("div", { class: "twin", role: "listitem", data: { id: one.id, before: one.before, after: one.after }, title: `${one.text}: ${percent(one.before)} before, ${percent(one.after)} after` },
      h("span", { class: "what" }, model.speaks ? token(one) : one.text),
      h("span", { class: "twin-track", "aria-hidden": "true" }, bar("before", one.before), bar("after", one.after)),
      h("span", { class: "figure quiet" }, percent(one.before)),
      h("span", { class: "twin-arrow quiet" }, "→"),
      h("span", { class: "figure" }, percent(one.after)))));
    put(apart, glass.state.edits.length ? h("span", { data: { value: divergence } }, `The two are ${short(Math.abs(divergence))} nats apart (Kullback-Leibler divergence).`) : "Nothing is changed yet, so both are the same.");
  }

  async function drawLoss() {
    const [before, after] = await Promise.all([glass.ask("loss", { question: glass.question({ plain: true }) }), glass.ask("loss", { question: glass.question() })]);
    const isLoss = after.measure === "loss";
    const some = glass.state.edits.length > 0;
    const figure = (name, value) => h("b", { data: { testid: name, value } }, short(value));
    if (after.mean === null) put(loss, "One token alone has no loss: write more.");
    else if (!isLoss) put(loss, "moved by ", figure("loss-after", after.mean), " of its length on average");
    else {
      const grown = after.mean - before.mean;
      put(loss, "mean loss ", figure("loss-before", before.mean), some ? [" → ", figure("loss-after", after.mean), h("span", { class: grown > 0 ? "worse" : "better", data: { testid: "loss-grown", value: grown } }, ` (${grown > 0 ? "+" : ""}${short(grown)})`)] : null, ` nats a token, over ${plural(after.count, after.counted === "hidden" ? "hidden token" : "token")}`);
    }
    const old = unpack(before.values).data;
    const now = unpack(after.values).data;
    const shift = isLoss && model.kind !== "encoder" ? 1 : 0; // what is foretold stands one further on
    const first = Math.max(0, Math.min(glass.token - TOKENS / 2, glass.row.length - TOKENS));
    const shown = glass.row.slice(first, first + TOKENS).map((one, i) => ({ one, place: first + i, old: old[first + i - shift], now: now[first + i - shift] }));
    const differs = shown.map(({ old: was, now: is }) => (isLoss && some ? is - was : is));
    const most = Math.max(1e-9, ...differs.filter(Number.isFinite).map(Math.abs));
    put(text, first ? "… " : "", shown.map(({ one, place, old: was, now: is }, i) => {
      const figures = Number.isFinite(is) ? (isLoss && some ? `loss ${short(was)} before, ${short(is)} after` : isLoss ? `loss ${short(is)}` : `moved by ${short(is)}`) : "no loss";
      return token(one, { title: figures, "aria-label": `${one.text}: ${figures}`, class: place === glass.token ? "here" : "", data: { place, value: is, before: was } });
    }), first + TOKENS < glass.row.length ? " …" : "");
    colour = () => {
      const signed = isLoss && some;
      [...text.querySelectorAll(".token")].forEach((node_, i) => {
        const share = Number.isFinite(differs[i]) ? differs[i] / most : 0;
        node_.style.background = Number.isFinite(differs[i]) ? (signed ? balance(share) : shade(share)) : "transparent";
        node_.style.color = signed ? balanceInk(share) : ink(share);
      });
      const high = signed ? `worse by up to ${short(most)} nats` : isLoss ? `loss ${short(most)} nats` : `moved by ${short(most)}`;
      put(legend, signed ? h("span", {}, h("i", { style: { background: balance(-1) } }), "better foretold") : h("span", {}, h("i", { class: "ringed", style: { background: shade(0) } }), "0"), h("span", {}, h("i", { style: { background: signed ? balance(1) : shade(1) } }), high));
    };
    colour();
  }

  async function drawColumn() {
    const body = (question) => ({ question, start: glass.token, stop: glass.token + 1 });
    const [before, after] = await Promise.all([glass.ask("lens", body(glass.question({ plain: true }))), glass.ask("lens", body(glass.question()))]);
    const side = (found, layer) => {
      const [[id]] = found.tokens[layer];
      const probability = unpack(found.probability).data[layer];
      return [h("td", {}, model.speaks ? token(found.words[id]) : found.words[id].text), h("td", { class: "number", data: { id, value: probability } }, percent(probability))];
    };
    const rows = before.layers.map((layer) => {
      const same = before.tokens[layer][0][0] === after.tokens[layer][0][0];
      return h("tr", { class: same ? "" : "differs", data: { row: layer } }, h("th", { scope: "row" }, layer ? `layer ${layer - 1}` : "embed"), side(before, layer), side(after, layer));
    });
    const head = h("tr", {}, h("th", {}, ""), h("th", { colspan: 2 }, "before"), h("th", { colspan: 2 }, "after"));
    put(column, h("table", { class: "column" }, h("thead", {}, head), h("tbody", {}, rows.reverse())));
  }

  return {
    node,
    async draw() {
      await Promise.all([vectors ? null : drawSaid(), drawLoss(), reads ? drawColumn() : null]);
    },
    colour: () => colour(),
  };
}

// Switches

/** The stacks of a model: what can be switched off in them. */
function stacksOf(model) {
  const own = { z: "z", all: "attn_out", title: "heads", short: "" };
  if (model.kind !== "seq2seq") return [{ prefix: "", title: "", layers: model.n_layers, groups: [own] }];
  const cross = { z: "cross_z", all: "cross_attn_out", title: "cross-attention heads", short: "cross " };
  return [
    { prefix: "decoder.", title: "Decoder", layers: model.n_layers, groups: [{ ...own, title: "self-attention heads" }, cross] },
    { prefix: "encoder.", title: "Encoder", layers: model.n_encoder_layers, groups: [own] },
  ];
}

function switches(glass, changes) {
  const stacks = stacksOf(glass.model);
  const how = choice("a press makes a part", [["off", "off"], ["mean", "its mean"], ["scale", "scaled"]], (value) => glass.set({ experimentHow: value === "off" ? undefined : value }));
  const sweep = h("button", { type: "button", class: "act first", data: { testid: "sweep" }, on: { click: () => (running ? stop() : start()) } }, "switch off each part alone");
  const progress = h("p", { class: "quiet", role: "status", data: { testid: "sweep-progress" } });
  const legend = h("div", { class: "legend" });
  const grids = stacks.map((stack) => grid(stack));
  const node = panel(
    "Switches",
    "Every part of the model that adds to the stream, the last layer on top. Press one to change it, press again to put it back. Try each one alone to find out which ones matter for this text.",
    h("div", { class: "controls" }, h("span", { class: "quiet" }, "a press makes a part"), how, sweep),
    progress,
    grids.map((one) => one.node),
    legend,
  );
  let running = null; // what the sweep under way is of
  let swept = null; // {key, values}: how much the loss grows without each site
  const words = glass.model.speaks
    ? { grows: "how much the mean loss grows", helps: "without it the loss grows: it helps", hinders: "the loss falls: it hinders", figure: (value) => figure(value, "+") }
    : { grows: "how much further the last vectors move", helps: "without it the vectors move further", hinders: "they move less far", figure: (value) => `${value < 0 ? "−" : "+"}${figure(100 * Math.abs(value))}%` };

  function grid(stack) {
    const buttons = new Map();
    const cell = (site, layer, head, name) => {
      const button = h("button", { type: "button", role: "gridcell", class: head === undefined ? "part wide" : "part", tabindex: "-1", data: { site }, "aria-label": name, on: { click: () => press(site, layer, head) } });
      buttons.set(site, { button, name });
      return button;
    };
    const rows = [];
    const top = [h("span", { role: "columnheader" })];
    for (const group of stack.groups) {
      for (let head = 0; head < glass.model.n_heads; head += 1) top.push(h("span", { role: "columnheader", title: group.title }, `${head}`));
      top.push(h("span", { role: "columnheader" }, "all"));
    }
    top.push(h("span", { role: "columnheader", "aria-label": "feed-forward" }));
    const over = h("div", { class: "parts-over", "aria-hidden": "true" }, h("span", {}), stack.groups.map((group) => h("span", { style: { "grid-column": `span ${glass.model.n_heads + 1}` } }, group.title)), h("span", {}, "feed-forward"));
    for (let layer = stack.layers - 1; layer >= 0; layer -= 1) {
      const line = [h("span", { role: "rowheader" }, `layer ${layer}`)];
      for (const group of stack.groups) {
        for (let head = 0; head < glass.model.n_heads; head += 1) line.push(cell(`${stack.prefix}${group.z}.${layer}[head=${head}]`, layer, head, `${group.short}head ${head}`));
        line.push(cell(`${stack.prefix}${group.all}.${layer}`, layer, undefined, `all ${group.short}attention`));
      }
      line.push(cell(`${stack.prefix}ffn_out.${layer}`, layer, undefined, "feed-forward"));
      rows.push(h("div", { role: "row" }, line));
    }
    const columns = `3.8em ${stack.groups.map(() => `repeat(${glass.model.n_heads}, minmax(32px, 58px)) minmax(38px, 58px)`).join(" ")} minmax(78px, 84px)`;
    const table = h("div", { class: stack.layers > 8 ? "parts many" : "parts", role: "grid", "aria-label": `switches${stack.title ? ` of the ${stack.title.toLowerCase()}` : ""}`, style: { "--columns": columns }, data: { testid: `switches-${stack.prefix || "stack"}` }, on: { keydown: walk } }, over, h("div", { role: "row", class: "parts-top" }, top), rows);
    return { stack, buttons, table, node: h("div", {}, stack.title ? h("h3", {}, stack.title) : null, h("div", { class: "scroll parts-box" }, table)) };
  }

  function press(site, layer, head) {
    const now = glass.state.edits.find((one) => one.site === site);
    const kind = glass.state.experimentHow ?? "off";
    const edit = kind === "mean" ? { kind: "mean", site } : { kind: "scale", site, by: kind === "scale" ? FIRST : 0 };
    const same = now && now.kind === edit.kind && (kind === "scale") === (now.kind === "scale" && now.by !== 0);
    const more = head === undefined ? { layer } : { layer, head };
    changes.put(site, same ? null : edit, more);
  }

  function walk(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const at = event.target.closest(".part");
    if (!by || !at) return;
    event.preventDefault();
    const lines = [...event.currentTarget.querySelectorAll("[role=row]:not(.parts-top)")].map((line) => [...line.querySelectorAll(".part")]);
    const row = lines.findIndex((line) => line.includes(at));
    const next = lines[row + by[0]]?.[lines[row].indexOf(at) + by[1]];
    if (!next) return;
    at.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  const about = () => JSON.stringify(glass.question({ plain: true }));

  async function start() {
    const question = glass.question();
    const own = (running = { about: about() });
    swept = { about: about(), edits: glass.state.edits.length, values: new Map() };
    put(sweep, "stop");
    glass.page.wait(1);
    const each = Math.max(1, Math.floor(WORK / glass.row.length));
    const lines = grids.flatMap(({ stack, table }) => [...table.querySelectorAll("[role=row]:not(.parts-top)")].map((line, i) => ({ sites: [...line.querySelectorAll(".part")].map((one) => one.dataset.site), name: `${stack.title ? `${stack.title.toLowerCase()} ` : ""}layer ${stack.layers - 1 - i}` })));
    try {
      for (const { sites, name } of lines) {
        for (let from = 0; from < sites.length; from += each) {
          put(progress, `Trying ${name} …`);
          const some = sites.slice(from, from + each);
          const found = await ask("without", { question, sites: some });
          if (running !== own) return;
          some.forEach((site, i) => swept.values.set(site, found.growth[i]));
          colour();
        }
      }
      put(progress, summary());
    } catch (error) {
      if (!(error instanceof Outdated) && running === own) put(progress, error.message);
    } finally {
      glass.page.wait(-1);
      if (running === own) stop(false);
    }
  }

  function stop(told = true) {
    running = null;
    put(sweep, "switch off each part alone");
    if (told) put(progress, `Stopped after ${plural(swept.values.size, "part")}.`);
  }

  function summary() {
    const order = [...swept.values].filter(([, value]) => Number.isFinite(value)).sort((a, b) => b[1] - a[1]);
    if (!order.length) return "There is nothing to measure: write more.";
    const heads = order.filter(([site]) => /\[head=/.test(site));
    const [site, value] = heads[0];
    const basis = swept.edits ? `, besides ${plural(swept.edits, "change")}` : "";
    return `Each number is ${words.grows} without that part${basis}. Of the heads, ${named(glass, site)} matters most (${words.figure(value)}).`;
  }

  function colour() {
    const values = swept ? [...swept.values.values()].filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b) : [];
    const most = values[Math.floor(0.9 * (values.length - 1))] || values.at(-1) || 1; // one part that is everything would make all others pale
    const now = new Map(glass.state.edits.map((one) => [one.site, one]));
    const { layer, head } = glass.state;
    for (const { stack, buttons } of grids) {
      for (const [site, { button, name }] of buttons) {
        const edit = now.get(site);
        const grown = swept?.values.get(site);
        const state = !edit ? "" : edit.kind === "scale" ? (edit.by ? `×${edit.by}` : "off") : edit.kind;
        const measured = Number.isFinite(grown) ? words.figure(grown) : "";
        const at = Number(/\.(\d+)/.exec(site)[1]);
        put(button, state || measured || "");
        button.classList.toggle("edited", Boolean(edit));
        button.classList.toggle("chosen", at === layer && site.includes(`[head=${head}]`));
        button.setAttribute("aria-pressed", Boolean(edit));
        button.setAttribute("aria-label", `${stack.title ? `${stack.title.toLowerCase()} ` : ""}layer ${at}, ${name}: ${state || "on"}${measured ? `, without it ${measured}` : ""}`);
        const share = Number.isFinite(grown) ? Math.max(-1, Math.min(1, grown / most)) : 0;
        if (Number.isFinite(grown)) button.dataset.value = grown;
        else delete button.dataset.value;
        button.style.background = edit || !Number.isFinite(grown) ? "" : balance(share);
        button.style.color = edit || !Number.isFinite(grown) ? "" : balanceInk(share);
      }
    }
    put(legend,
      h("span", {}, h("i", { class: "part-on" }), "on"),
      h("span", {}, h("i", { class: "part-edited" }), "changed"),
      swept?.values.size ? [h("span", {}, h("i", { style: { background: balance(1) } }), words.helps), h("span", {}, h("i", { style: { background: balance(-1) } }), words.hinders)] : null);
  }

  return {
    node,
    draw() {
      how.show(glass.state.experimentHow ?? "off");
      if (swept && swept.about !== about()) {
        if (running) stop(false);
        swept = null;
        put(progress);
      }
      colour();
      for (const { table, buttons } of grids) {
        if (table.querySelector(".part[tabindex='0']")) continue;
        [...buttons.values()].at(-1).button.tabIndex = -1;
        table.querySelector(".part").tabIndex = 0;
      }
    },
    colour,
    close: () => {
      running = null;
    },
  };
}

/** A number that fits a cell; what is above 0 begins with `plus`. */
function figure(value, plus = "") {
  const size = Math.abs(value);
  if (size < 0.005) return "0";
  const text = size >= 9.95 ? size.toFixed(0) : size >= 0.995 ? size.toFixed(1) : size.toFixed(2).replace("0.", ".");
  return `${value < 0 ? "−" : plus}${text}`;
}

// Patches from a second text

const SITES = [["resid_post", "the stream after a layer"], ["attn_out", "what attention adds"], ["ffn_out", "what feed-forward adds"], ["z", "one head"]];

function patching(glass, changes) {
  const { model } = glass;
  const pair = model.kind === "seq2seq";
  const area = h("textarea", { rows: 2, placeholder: model.tokenizer ? "For example the same text with one word changed" : "Numbers of tokens, such as 5 7 11", spellcheck: "false", autocomplete: "off", data: { testid: "other" }, on: { input: typed } });
  const box = h("label", { class: "box" }, h("span", { class: "name" }, pair ? "Second source" : "Second text"), area);
  const site = h("select", { "aria-label": "what is patched", data: { testid: "patch-site" }, on: { change: () => glass.set({ experimentSite: site.value === "resid_post" ? undefined : site.value }) } }, SITES.map(([value, text]) => h("option", { value }, text)));
  const side = pair ? choice("stack", [["encoder", "encoder"], ["decoder", "decoder"]], (value) => glass.set({ experimentStack: value === "encoder" ? undefined : value })) : null;
  const note = h("p", { class: "quiet", role: "status", data: { testid: "patch-note" } });
  const trace = h("button", { type: "button", class: "act first", data: { testid: "trace" }, on: { click: () => (running ? halt() : start()) } }, "patch each place alone");
  const back = h("button", { type: "button", class: "act", "aria-label": "earlier tokens", on: { click: () => turn(-PLACES) } }, "‹");
  const on = h("button", { type: "button", class: "act", "aria-label": "later tokens", on: { click: () => turn(PLACES) } }, "›");
  const pages = h("span", { class: "controls" }, back, on);
  const legend = h("div", { class: "legend" });
  const table = h("div", { class: "scroll" });
  const controls = h("div", { class: "controls" }, h("label", {}, "patch ", site), side, trace, pages);
  const node = panel(
    "Patch from a second text",
    "Press a place, and the model holds there what it held on the second text. If its answer turns into that of the second text, the difference between the two passed through this place.",
    box, note, controls, table, legend,
  );
  let pause = null;
  let from = 0;
  let other = null; // tokens of the second text
  let running = null;
  let traced = null; // {about, effects, here, there}

  function typed() {
    clearTimeout(pause);
    pause = setTimeout(() => {
      const edits = area.value ? glass.state.edits : glass.state.edits.filter((one) => one.kind !== "patch");
      changes.make({ other: area.value, edits }, "type");
    }, PAUSE);
  }

  function turn(by) {
    from = Math.max(0, from + by);
    fill();
  }

  const stack = () => (pair ? (glass.state.experimentStack === "decoder" ? "decoder" : "encoder") : "");
  const layers = () => (stack() === "encoder" ? model.n_encoder_layers : model.n_layers);
  const row = () => (pair ? (stack() === "encoder" ? glass.tokens.source : glass.tokens.target) : glass.tokens.text);
  const kind = () => (SITES.some(([name]) => name === glass.state.experimentSite) ? glass.state.experimentSite : "resid_post");
  const name = (layer, place) => {
    const inside = [kind() === "z" ? `head=${Math.min(glass.state.head, model.n_heads - 1)}` : "", place === undefined ? "" : `position=${place}`].filter(Boolean).join(", ");
    return `${stack() ? `${stack()}.` : ""}${kind()}.${layer}${inside ? `[${inside}]` : ""}`;
  };
  const about = () => JSON.stringify([glass.question({ plain: true }), glass.state.other, stack(), kind(), kind() === "z" ? glass.state.head : 0, glass.token]);

  function press(layer, place) {
    const where = name(layer, place);
    const there = glass.state.edits.some((one) => one.site === where);
    changes.put(where, there ? null : { kind: "patch", site: where }, { layer });
  }

  async function start() {
    const own = (running = {});
    const places = shown();
    const question = { ...glass.question({ plain: true }), other: glass.other };
    traced = { about: about(), effects: new Map() };
    put(trace, "stop");
    glass.page.wait(1);
    const each = Math.max(1, Math.floor(WORK / row().length));
    try {
      for (let layer = layers() - 1; layer >= 0; layer -= 1) {
        for (let at = 0; at < places.length; at += each) {
          const sites = places.slice(at, at + each).map((place) => name(layer, place));
          const found = await ask("patched", { question, sites, position: glass.token });
          if (running !== own) return;
          sites.forEach((one, i) => traced.effects.set(one, found.effect[i]));
          Object.assign(traced, { here: found.here, there: found.there });
          colour();
        }
      }
    } catch (error) {
      if (!(error instanceof Outdated) && running === own) {
        traced = null;
        put(note, error.message);
      }
    } finally {
      glass.page.wait(-1);
      if (running === own) halt();
    }
  }

  function halt() {
    running = null;
    put(trace, "patch each place alone");
  }

  /** The places that both texts have, of those in view. */
  function shown() {
    const most = Math.min(row().length, other.length);
    return Array.from({ length: Math.max(0, Math.min(PLACES, most - from)) }, (_, i) => from + i);
  }

  function fill() {
    const length = Math.max(row().length, other.length);
    from = Math.min(from, Math.max(0, length - 1));
    pages.hidden = length <= PLACES;
    back.disabled = from === 0;
    on.disabled = from + PLACES >= length;
    const places = Array.from({ length: Math.min(PLACES, length - from) }, (_, i) => from + i);
    const same = row().length === other.length;
    const label = (one) => (one ? token(one) : h("span", { class: "quiet" }, "–"));
    const head = (tokens, text) => h("div", { role: "row", class: "patch-tokens" }, h("span", { role: "rowheader" }, text), places.map((place) => h("span", { role: "columnheader", class: row()[place]?.id === other[place]?.id ? "" : "differs", title: `token ${place}` }, label(tokens[place]))), h("span", {}, ""));
    const lines = [];
    for (let layer = layers() - 1; layer >= 0; layer -= 1) {
      const cell = (place) => h("button", { type: "button", role: "gridcell", class: `part${place === undefined ? " wide" : ""}`, tabindex: "-1", disabled: place === undefined ? !same : !(place < row().length && place < other.length), data: { site: name(layer, place) }, on: { click: () => press(layer, place) } });
      lines.push(h("div", { role: "row", class: "patch-line" }, h("span", { role: "rowheader" }, `layer ${layer}`), places.map(cell), cell(undefined)));
    }
    const first = lines[0].querySelector(".part:not(:disabled)");
    if (first) first.tabIndex = 0;
    const grid = h("div", { class: "patches", role: "grid", "aria-label": "places to patch: rows are layers, columns are tokens", style: { "--columns": `6.4em repeat(${places.length}, minmax(42px, 84px)) 62px` }, data: { testid: "patches" }, on: { keydown: walk } }, lines, head(row(), pair && stack() === "decoder" ? "target" : "this text"), head(other, pair && stack() === "decoder" ? "target" : "second text"));
    grid.querySelectorAll(".patch-tokens")[0].lastChild.append(h("span", { class: "quiet" }, "all"));
    put(table, grid);
    colour();
  }

  function walk(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const at = event.target.closest(".part");
    if (!by || !at) return;
    event.preventDefault();
    const lines = [...event.currentTarget.querySelectorAll(".patch-line")].map((line) => [...line.querySelectorAll(".part")]);
    const line = lines.findIndex((one) => one.includes(at));
    const next = lines[line + by[0]]?.[lines[line].indexOf(at) + by[1]];
    if (!next || next.disabled) return;
    at.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  function colour() {
    const sites = new Set(glass.state.edits.filter((one) => one.kind === "patch").map((one) => one.site));
    const effects = traced && traced.about === about() ? traced.effects : new Map();
    for (const button of table.querySelectorAll(".part")) {
      const { site: where } = button.dataset;
      const effect = effects.get(where);
      const measured = Number.isFinite(effect);
      const edited = sites.has(where);
      put(button, edited ? "patched" : measured ? figure(effect) : "");
      button.classList.toggle("edited", edited);
      button.setAttribute("aria-pressed", edited);
      button.setAttribute("aria-label", `${named(glass, where)}${edited ? ", patched" : ""}${measured ? `, effect ${short(effect)}` : ""}`);
      if (measured) button.dataset.value = effect;
      else delete button.dataset.value;
      const share = measured ? Math.max(-1, Math.min(1, effect)) : 0;
      button.style.background = edited || !measured ? "" : balance(share);
      button.style.color = edited || !measured ? "" : balanceInk(share);
    }
    put(legend, h("span", {}, h("i", { class: "part-on" }), "as it is"), h("span", {}, h("i", { class: "part-edited" }), "patched"), effects.size ? [h("span", {}, h("i", { style: { background: balance(1) } }), `1: at token ${glass.token} the answer becomes `, token(traced.there)), h("span", {}, h("i", { class: "ringed", style: { background: balance(0) } }), "0: it stays ", token(traced.here))] : null);
  }

  return {
    node,
    async draw() {
      if (document.activeElement !== area) area.value = glass.state.other;
      side?.show(stack());
      site.value = kind();
      const ready = Boolean(glass.state.other);
      controls.hidden = table.hidden = legend.hidden = !ready;
      if (!ready) {
        if (running) halt();
        put(note, "Write a second text, best one that has as many tokens as the first, and leads elsewhere.");
        return;
      }
      const question = { ...glass.question({ plain: true }), asked: glass.other };
      const tokens = await glass.ask("tokens", { question }, { topic: "" });
      other = pair ? tokens[stack() === "encoder" ? "source" : "target"] : tokens.text;
      if (traced && traced.about !== about() && running) halt();
      const [a, b] = [row().length, other.length];
      put(note, a === b ? `Both have ${plural(a, "token")}.` : `The texts have ${a} and ${b} tokens: only single places that both have, 0 to ${Math.min(a, b) - 1}, can be patched. A whole layer takes texts of the same length.`);
      fill();
    },
    colour: () => table.firstChild && colour(),
    close: () => {
      clearTimeout(pause);
      running = null;
    },
  };
}
