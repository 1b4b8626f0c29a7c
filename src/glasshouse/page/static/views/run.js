// Run: the curves of a training run while they grow, what the model wrote on the way, its heads, and two moments.

import { ask, isSaved, Outdated } from "glasshouse/asking.js";
import { chart, nearest } from "glasshouse/chart.js";
import { ink, onTheme, shade } from "glasshouse/colour.js";
import { h, put, s } from "glasshouse/dom.js";
import { percent, plural, short } from "glasshouse/number.js";
import { choice, instead, panel, python, quoted, slider, token } from "glasshouse/parts.js";
import { row, unpack } from "glasshouse/tensor.js";

const OFTEN = 2000; // milliseconds between looks at a run that is not finished
const PINNED = 300; // milliseconds without a key after which a step counts as chosen
const ROWS = 40; // of the table of values
const CALM = 0.6; // smoothing at first

const CHARTS = [
  { name: "loss", title: "Loss", unit: "nats", height: 260, curves: [["loss", "training", "--series-1", true], ["validation_loss", "held out", "--series-2", false]], scales: true },
  { name: "bits", title: "Bits per byte", unit: "held out", curves: [["validation_bits_per_byte", "bits per byte", "--series-2", false]], scales: true },
  { name: "accuracy", title: "Accuracy", unit: "held out", curves: [["validation_accuracy", "accuracy", "--series-2", false]] },
  { name: "rate", title: "Learning rate", curves: [["rate", "learning rate", "--series-3", false]], zero: true },
  { name: "norm", title: "Gradient norm", unit: "unclipped", curves: [["norm", "gradient norm", "--series-4", true]], scales: true },
  { name: "speed", title: "Speed", unit: "tokens per second", curves: [["tokens_per_second", "tokens per second", "--series-1", true]], zero: true },
];

export default {
  name: "run",
  title: "Run",
  fits: (model) => model.run,
  mount(glass, root) {
    const { moment, beside } = glass.state;
    // Beside another moment the page mounts a view twice, but the run is one.
    if (beside && glass.moment === beside && beside !== (moment || glass.model.moments.at(-1))) return { draw() {} };
    const parts = [standing(glass), curves(glass), samples(glass), heads(glass), layers(glass), moments(glass)];
    const [first, second, third, fourth, fifth, sixth] = parts.map((part) => part.node);
    const code = h("div", {});
    root.append(first, second, third, h("div", { class: "columns" }, fourth, fifth), sixth, code);
    let timer = null;
    async function look() {
      if (document.hidden || log.told?.state === "finished") return;
      try {
        await follow();
        await Promise.all(parts.map((part) => part.grow?.()));
      } catch (error) {
        if (!(error instanceof Outdated)) return; // the next look may find it
      }
    }
    if (!isSaved) timer = setInterval(look, OFTEN);
    return {
      async draw(changed) {
        put(code, python(inPython(glass)));
        await follow();
        await Promise.all(parts.map((part) => part.draw(changed)));
      },
      close() {
        clearInterval(timer);
        parts.forEach((part) => part.close?.());
      },
    };
  },
};

function inPython(glass) {
  const folder = quoted(glass.model.name);
  const { text, added, beside } = glass.state;
  const isPlain = glass.tokens.text && !added.length && glass.model.tokenizer;
  const given = isPlain ? quoted(text) : Object.values(glass.tokens).filter(Array.isArray).map((row) => `torch.tensor([[${row.map((one) => one.id).join(", ")}]])`).join(", ");
  const lines = [
    beside && !isPlain ? "import json, torch, glasshouse as gh" : "import json, glasshouse as gh",
    "from pathlib import Path",
    "from glasshouse.training import moments",
    "",
    `run = Path(${folder})`,
    'metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]',
    'losses = {line["step"]: line["loss"] for line in metrics}',
    "folders = {one.name: one.folder for one in moments(run)}",
    `model, tok = gh.load(folders[${quoted(glass.moment)}])`,
  ];
  if (beside) lines.push(`other, _ = gh.load(folders[${quoted(beside)}])`, `gh.compare(model, other, ${given}, tok=tok)`);
  return lines.join("\n");
}

// What is known of the run, however often the view is opened

const log = { told: null, curves: {}, underway: null, inside: {} };

/** Ask for what is new. */
function follow() {
  log.underway ??= read().finally(() => {
    log.underway = null;
  });
  return log.underway;
}

async function read() {
  if (isSaved && log.told) return;
  // The first question is remembered, so that a page that is saved holds its answer.
  const told = log.told ? await ask("metrics", { since: log.told.step, mark: log.told.mark }, { fresh: true }) : await ask("metrics");
  const fresh = {};
  for (const [name, curve] of Object.entries(told.curves)) {
    const old = told.since ? log.curves[name] : undefined;
    const kept = old ? old.step.findIndex((step) => step >= told.since) : 0;
    const end = kept < 0 ? old.step.length : kept;
    fresh[name] = Object.fromEntries(Object.entries(curve).map(([part, values]) => [part, old ? [...old[part].slice(0, end), ...values] : values]));
  }
  log.curves = fresh;
  log.told = told;
}

/** The weights that are kept nearest to a step. */
function kept(step) {
  const there = log.told?.moments ?? [];
  return there.reduce((best, one) => (best === null || Math.abs(one.step - step) < Math.abs(best.step - step) ? one : best), null);
}

/** A button that lets all views show the model as it was at a step, as nearly as it was kept. */
function lookAt(glass, step, testid) {
  const near = kept(step);
  if (!near) return h("span", { class: "quiet" }, "no weights are kept yet");
  if (near.name === glass.moment) return h("span", { class: "quiet", data: { testid, moment: near.name } }, `all views show the model at ${named(near)}`);
  const away = near.step === step ? "" : ", the nearest that is kept";
  return h("button", { type: "button", class: "act", data: { testid, moment: near.name }, on: { click: () => glass.set({ moment: near.name }) } }, `look at the model at ${named(near)}${away}`);
}

function named(moment) {
  return moment.name === "final" ? "the end" : moment.name;
}

function whole(step) {
  return step.toLocaleString("en");
}

// How it stands

function standing(glass) {
  const badge = h("span", { class: "run-state", data: { testid: "run-state" } });
  const far = h("span", { data: { testid: "run-far" } });
  const filled = h("span", { class: "filled" });
  const track = h("div", { class: "run-track", role: "progressbar", "aria-label": "steps taken", "aria-valuemin": 0 }, filled);
  const facts = h("dl", { class: "run-facts", data: { testid: "run-facts" } });
  const node = panel("The run", null, h("p", { class: "run-line" }, badge, far), track, facts);
  let told = null;
  async function show() {
    const { state, step, steps, best } = log.told;
    told ??= await ask("facts");
    put(badge, { running: "running", finished: "finished", stopped: "stopped" }[state]);
    badge.dataset.state = state;
    const speed = log.curves.tokens_per_second?.mean.at(-1);
    const left = state === "running" && speed && step < steps ? ` · about ${duration(((steps - step) * told.batch_tokens) / speed)} left` : "";
    const lowest = best ? ` · lowest held-out loss ${short(best.value)} nats at step ${whole(best.step)}` : "";
    const again = state === "stopped" ? " · the same command goes on with it" : "";
    put(far, `step ${whole(step)} of ${whole(steps)}${lowest}${left}${again}`);
    far.dataset.step = step;
    filled.style.width = `${(100 * step) / Math.max(1, steps)}%`;
    track.setAttribute("aria-valuenow", step);
    track.setAttribute("aria-valuemax", steps);
    if (!facts.children.length) put(facts, told.facts.map((one) => h("div", { data: { name: one.name } }, h("dt", {}, one.name), h("dd", {}, one.value))));
  }
  return { node, draw: show, grow: show };
}

function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// Curves

function curves(glass) {
  let passing = null; // the step under the pointer
  let timer = null;
  const smooth = slider("smoothing", { min: 0, max: 0.99, step: 0.01, shown: (value) => value.toFixed(2), oninput: (value) => glass.set({ run_smooth: value }) });
  const scale = choice("scale", [["linear", "linear"], ["log", "logarithmic"]], (value) => glass.set({ run_scale: value }));
  const status = h("p", { class: "run-status", role: "status", data: { testid: "run-status" } });
  const go = h("p", { class: "controls" });
  const table = h("details", { class: "run-table", on: { toggle: () => fill() } }, h("summary", {}, "the values as a table"), h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "values by step" }));
  const drawn = CHARTS.map((one) => ({
    ...one,
    chart: chart({ title: one.title, unit: one.unit, height: one.height ?? 130, isMain: one.name === "loss", testid: `chart-${one.name}`, onmove: moved, onpick: (step) => pin(step) }),
  }));
  const [main, ...small] = drawn;
  const few = h("div", { class: "run-small" }, small.map((one) => one.chart));
  const node = panel("Curves", "Each step the model reads some text, is told how wrong it was (the loss), and changes a little. The pale line is each step, the strong one its running mean. Point at a step, or walk with the arrow keys; click to keep it.", h("div", { class: "controls" }, smooth, scale), main.chart, status, go, few, table);

  function moved(step, isKey = false) {
    passing = step;
    if (isKey) {
      clearTimeout(timer);
      timer = setTimeout(() => pin(step), PINNED);
    }
    mark();
  }
  function pin(step) {
    clearTimeout(timer);
    passing = null;
    if (glass.state.run_step === step) mark();
    else glass.set({ run_step: step });
  }
  function at() {
    const pinned = glass.state.run_step;
    return passing ?? (typeof pinned === "number" && pinned <= log.told.step ? pinned : null);
  }
  function mark() {
    const step = at();
    for (const one of drawn) one.chart.mark(step);
    const shown = step ?? log.told.step;
    const { width } = log.told;
    const begin = Math.max(1, Math.floor(shown / width) * width);
    const said = width > 1 && begin < shown ? `steps ${whole(begin)} to ${whole(shown)}` : `step ${whole(shown)}`;
    const values = CHARTS.flatMap((one) => one.curves).filter(([name]) => log.curves[name]?.step.length).map(([name, title]) => {
      const curve = log.curves[name];
      const i = nearest(curve.step, shown);
      if (curve.step[i] !== shown) return null;
      const range = curve.low && curve.low[i] !== curve.high[i] ? ` (${short(curve.low[i])} to ${short(curve.high[i])})` : "";
      return h("span", { data: { testid: `at-${name}`, value: curve.mean[i] } }, `${title === "training" || title === "held out" ? `${title} loss` : title} ${precise(curve.mean[i])}${range}`);
    });
    status.hidden = go.hidden = !log.curves.loss;
    put(status, h("strong", { data: { testid: "at-step", value: shown } }, said), values);
    put(go, step === null ? h("span", { class: "quiet" }, "The latest step is shown; choose another in a chart.") : lookAt(glass, step, "look-at"));
  }
  function show() {
    const { steps, step } = log.told;
    const log10 = glass.state.run_scale === "log";
    const calm = glass.state.run_smooth ?? CALM;
    for (const one of drawn) {
      const series = one.curves.filter(([name]) => log.curves[name]?.step.length).map(([name, title, colour, isNoisy]) => {
        const { step: x, mean: y, low, high } = log.curves[name];
        return { name: title, testid: `now-${name}`, colour: `var(${colour})`, x, y, low, high, smooth: isNoisy ? calm : 0, dots: !isNoisy && name.startsWith("validation") };
      });
      one.chart.hidden = !series.length && one.name !== "loss";
      const to = log.told.state === "finished" ? step : Math.max(step, Math.min(steps, step * 4));
      one.chart.show({ series, log: Boolean(one.scales && log10), zero: one.zero, from: 0, to: Math.max(1, to) });
    }
    mark();
    fill();
  }
  /** The values as text, for those who do not see the lines: some steps from the first to the last. */
  function fill() {
    if (!table.open) return;
    const columns = CHARTS.flatMap((one) => one.curves.map(([name, title]) => [name, one.name === "loss" ? `${title} loss` : title])).filter(([name]) => log.curves[name]?.step.length);
    const steps = [...new Set(columns.flatMap(([name]) => log.curves[name].step))].sort((a, b) => a - b);
    const some = steps.length <= ROWS ? steps : Array.from({ length: ROWS }, (_, i) => steps[Math.round((i * (steps.length - 1)) / (ROWS - 1))]);
    const cell = (name, step) => {
      const curve = log.curves[name];
      const i = nearest(curve.step, step);
      return curve.step[i] === step ? h("td", { class: "number", data: { value: curve.mean[i] } }, precise(curve.mean[i])) : h("td", { class: "number" }, "");
    };
    put(
      table.lastElementChild,
      h("table", { data: { testid: "run-values" } }, h("thead", {}, h("tr", {}, h("th", { class: "number" }, "step"), columns.map(([, title]) => h("th", { class: "number" }, title)))), h("tbody", {}, some.map((step) => h("tr", {}, h("th", { class: "number", scope: "row" }, whole(step)), columns.map(([name]) => cell(name, step)))))),
    );
  }
  return {
    node,
    draw() {
      smooth.show(glass.state.run_smooth ?? CALM);
      scale.show(glass.state.run_scale ?? "linear");
      show();
    },
    grow: show,
    close() {
      clearTimeout(timer);
      drawn.forEach((one) => one.chart.close());
    },
  };
}

function precise(value) {
  return Math.abs(value) >= 1e7 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3).replace("-", "−") : Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 }).replace("-", "−");
}

// What the model wrote

function samples(glass) {
  let told = null;
  const sides = ["run_left", "run_right"].map((name, side) => {
    const steps = slider("step", { min: 0, max: 0, step: 1, shown: (i) => (told ? whole(told.steps[i] ?? 0) : ""), oninput: (i) => { show(side, i); glass.set({ [name]: told.steps[i] }); } });
    steps.dataset.testid = `sample-step-${side}`;
    const text = h("div", { class: "run-texts", data: { testid: `samples-${side}` } });
    const go = h("p", { class: "controls" });
    return { name, steps, text, go, node: h("div", { class: "run-side" }, steps, text, go) };
  });
  const body = h("div", { class: "columns" }, sides.map((side) => side.node));
  const note = h("p", { class: "quiet" });
  const kinds = { seq2seq: "The model answers the same held-out sources at each checkpoint: on the left early, on the right late.", encoder: "In the same held-out texts some tokens are hidden at each checkpoint, and the model fills them in." };
  const node = panel("What the model wrote", kinds[glass.model.kind] ?? "At each checkpoint the model goes on with the same held-out beginnings: on the left early, on the right late. Drag to see it learn.", body, note);

  function show(side, i) {
    const { steps, text, go } = sides[side];
    steps.limit(told.steps.length - 1);
    steps.show(i);
    put(text, told.samples[i].map((one) => written(one, glass.model.kind)));
    text.dataset.step = told.steps[i];
    put(go, lookAt(glass, told.steps[i], `look-at-sample-${side}`));
  }
  async function draw() {
    told = await inside("samples");
    if (!told.steps.length) {
      put(body, instead(glass.model.speaks ? "No sample is written down yet; the first comes with the first checkpoint." : "This model writes no text, so there are no samples."));
      return;
    }
    if (!body.contains(sides[0].node)) put(body, sides.map((side) => side.node));
    const last = told.steps.length - 1;
    sides.forEach(({ name }, side) => {
      const chosen = told.steps.indexOf(glass.state[name]);
      show(side, chosen >= 0 ? chosen : side ? last : 0);
    });
    put(note, told.left_out ? `${plural(told.left_out, "checkpoint")} in between are left out.` : "");
  }
  return { node, draw, grow: draw };
}

/** What was asked and what the model wrote. */
function written(one, kind) {
  if (kind === "decoder" && one.wanted === undefined) return h("p", { class: "run-sample", dir: "auto" }, h("span", { class: "quiet" }, one.prompt), one.text || h("span", { class: "quiet" }, " (nothing)"));
  const line = (name, text, isOwn) => h("div", {}, h("dt", {}, name), h("dd", { class: isOwn ? "own" : "", dir: "auto" }, text || "(nothing)"));
  const own = { encoder: ["hidden", "filled in", "was"], seq2seq: ["source", "written", "wanted"] }[kind] ?? ["asked", "written", "wanted"];
  return h("dl", { class: one.text === one.wanted ? "run-sample right" : "run-sample" }, line(own[0], one.prompt), line(own[1], one.text, true), one.wanted === undefined ? null : line(own[2], one.wanted));
}

/** What was written down at the checkpoints, asked for again when there is more of it. */
function inside(name) {
  const mark = log.told.inside;
  const held = log.inside[name];
  if (held?.mark !== mark) {
    const told = ask(name, {}, { fresh: held !== undefined });
    log.inside[name] = { mark, told };
    told.catch(() => delete log.inside[name]);
  }
  return log.inside[name].told;
}

// What the heads learn

const HEADS = {
  entropy: ["looks widely", "How widely each head looks, as the entropy of its weights: 0 is one token, more is many.", "nats"],
  previous: ["looks back by one", "How much weight each head puts on the token just before.", "share of the weight"],
  induction: ["looks for repetition", "How much weight each head puts on what followed the same token before: such heads can copy.", "share of the weight"],
};

function heads(glass) {
  let told = null;
  const pick = h("div", {});
  const about = h("p", { class: "about" });
  const grid = h("div", { class: "run-heads scroll", tabindex: "0", role: "group", "aria-label": "heads over time", data: { testid: "run-heads" } });
  const legend = h("p", { class: "legend" });
  const node = panel("What the heads learn", null, pick, about, grid, legend);
  let buttons = null;
  async function draw() {
    told = await inside("probes");
    const names = Object.keys(HEADS).filter((name) => name in told.heads);
    if (!names.length) {
      put(grid, instead("No figures of heads are written down yet; the first come with the first checkpoint."));
      return;
    }
    if (!buttons || buttons.names.length !== names.length) {
      buttons = choice("figure", names.map((name) => [name, HEADS[name][0]]), (name) => glass.set({ run_figure: name }));
      buttons.names = names;
      put(pick, buttons);
    }
    const name = names.includes(glass.state.run_figure) ? glass.state.run_figure : (names.find((one) => one === "induction") ?? names[0]);
    buttons.show(name);
    put(about, HEADS[name][1]);
    const lines = told.heads[name];
    const depth = lines.reduce((most, one) => Math.max(most, one?.length ?? 0), 0);
    const n = glass.model.n_heads;
    const most = Math.max(1e-9, ...lines.filter(Boolean).flat(2).filter((value) => value !== null));
    const cells = [];
    for (let layer = depth - 1; layer >= 0; layer -= 1) {
      cells.push(h("span", { class: "run-layer quiet" }, `layer ${layer}`));
      for (let head = 0; head < n; head += 1) cells.push(cell(glass, name, layer, head, lines.map((line) => line?.[layer]?.[head] ?? null), told.steps, most));
    }
    put(grid, h("div", { class: "run-grid", style: { "grid-template-columns": `max-content repeat(${n}, minmax(58px, 1fr))` } }, cells));
    put(legend, `Each box is a head over the steps ${whole(told.steps[0])} to ${whole(told.steps.at(-1))}, from 0 at the bottom to ${short(most)} at the top (${HEADS[name][2]}); the number is the latest. Choose one, and all views show that head.`);
  }
  return { node, draw, grow: draw };
}

function cell(glass, name, layer, head, values, steps, most) {
  const span = Math.max(1, steps.at(-1) - steps[0]);
  const points = values.map((value, i) => (value === null ? null : [2 + (56 * (steps[i] - steps[0])) / span, 29 - (26 * value) / most])).filter(Boolean);
  const line = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  const last = values.findLast((value) => value !== null) ?? null;
  const first = values.find((value) => value !== null) ?? null;
  const on = glass.state.layer === layer && glass.state.head === head;
  return h(
    "button",
    { type: "button", class: on ? "run-cell on" : "run-cell", "aria-pressed": String(on), "aria-label": `layer ${layer}, head ${head}: ${name} ${short(first)} at step ${steps[0]}, ${short(last)} at step ${steps.at(-1)}`, data: { testid: `cell-${layer}-${head}`, value: last ?? "", values: JSON.stringify(values) }, on: { click: () => glass.set({ layer, head, attention: "" }) } },
    s("svg", { viewBox: "0 0 60 32", preserveAspectRatio: "none", "aria-hidden": "true" }, points.length ? [s("path", { class: "run-fill", d: `M${points[0][0].toFixed(1)} 30L${line}L${points.at(-1)[0].toFixed(1)} 30Z` }), s("path", { class: "run-spark", d: `M${line}` })] : []),
    h("span", { class: "run-number" }, short(last)),
  );
}

// What each layer knows

function layers(glass) {
  const picture = chart({ title: "Loss read off after each layer", unit: "nats", height: 230, testid: "chart-lens", onmove: (step) => picture.mark(step), onpick: (step) => glass.set({ run_step: step }) });
  const body = h("div", {}, picture);
  const legend = h("p", { class: "legend" });
  const node = panel("What each layer knows", "If the model had to answer after a layer, without those above, this would be its loss on held-out text. As it learns, later layers part from earlier ones.", body, legend);
  let told = null;
  function show() {
    const lines = told.layers.lens;
    const depth = lines.find(Boolean).length;
    const series = Array.from({ length: depth }, (_, layer) => {
      const points = told.steps.map((step, i) => [step, lines[i]?.[layer]]).filter(([, value]) => value !== null && value !== undefined);
      return { name: layer ? `layer ${layer - 1}` : "embedded", testid: `lens-${layer}`, colour: shade(0.3 + (0.7 * layer) / Math.max(1, depth - 1)), x: points.map(([step]) => step), y: points.map(([, value]) => value), dots: true };
    });
    picture.show({ series, log: glass.state.run_scale === "log", from: 0, to: Math.max(1, told.steps.at(-1)) });
    picture.mark(glass.state.run_step ?? null);
  }
  async function draw() {
    told = await inside("probes");
    if (!told.layers.lens) {
      put(body, instead(glass.model.speaks ? "Nothing was read off the layers yet; the first figures come with the first checkpoint." : "The head of this model has no vocabulary, so nothing can be read off its layers."));
      return;
    }
    if (!body.contains(picture)) put(body, picture);
    show();
    put(legend, "“embedded” is before the first layer. The darker the line, the later the layer (in the dark theme, the lighter).");
  }
  const stop = onTheme(() => told?.layers.lens && show());
  return { node, draw, grow: draw, close: () => { stop(); picture.close(); } };
}

// Two moments

function moments(glass) {
  const one = h("select", { "aria-label": "one moment", data: { testid: "compare-one" } });
  const other = h("select", { "aria-label": "another moment", data: { testid: "compare-other" } });
  const go = h("button", { type: "button", class: "act first", data: { testid: "compare" }, on: { click: () => glass.set({ moment: one.value, beside: other.value }) } }, "compare");
  const stop = h("button", { type: "button", class: "act", data: { testid: "compare-stop" }, on: { click: () => glass.set({ beside: "" }) } }, "stop comparing");
  const found = h("div", { class: "view", data: { testid: "difference" } });
  const node = panel("Two moments side by side", "Choose two moments of the run: here are the places where they part on your text, and every other view then shows both, side by side.", h("div", { class: "controls" }, h("label", {}, "from ", one), h("label", {}, "to ", other), go, stop), found);
  return {
    node,
    async draw() {
      const names = log.told.moments.map((moment) => moment.name);
      const { beside } = glass.state;
      go.disabled = names.length < 2;
      stop.hidden = !beside;
      for (const [select, value] of [[one, beside ? glass.moment : names[0]], [other, beside || names.at(-1)]]) {
        put(select, names.map((name) => h("option", { value: name }, name)));
        select.value = value;
      }
      if (!beside) {
        put(found, names.length < 2 ? instead("There is but one moment yet; more come with each checkpoint.") : null);
        return;
      }
      if (beside === glass.moment) {
        put(found, instead("Both are the same moment; choose another one."));
        return;
      }
      const told = await glass.ask("difference", { question: glass.question({ plain: true }), beside }, { topic: "" });
      put(found, different(glass, told, beside));
    },
  };
}

function different(glass, told, beside) {
  const [before, after] = told.losses;
  const divergence = unpack(told.divergence).data;
  const stream = unpack(told.stream);
  const heads = unpack(told.heads);
  const figure = (name, value) => h("b", { data: { testid: name, value } }, short(value));
  const said = before === null
    ? h("p", {}, "The two moments are compared on the text above.")
    : h("p", {}, `On the text above, each token costs `, figure("loss-one", before), ` nats at ${glass.moment} and `, figure("loss-other", after), ` nats at ${beside}.`);
  const most = Math.max(1e-9, ...[...divergence].filter(Number.isFinite));
  const hasAnswers = [...divergence].some(Number.isFinite);
  const words = hasAnswers
    ? [h("h3", {}, "After which tokens the answers part"), h("p", { class: "run-words", data: { testid: "divergence" } }, told.tokens.map((each, i) => {
        const share = divergence[i] / most;
        const node = token(each, { class: "run-word", data: { value: divergence[i] }, title: `${each.text}: ${short(divergence[i])} nats`, "aria-label": `${each.text}: ${short(divergence[i])} nats` });
        node.style.background = shade(share);
        node.style.color = ink(share);
        return h("span", { class: "run-worded" }, node, h("small", { class: "quiet" }, short(divergence[i])));
      })), h("p", { class: "legend" }, "Divergence of the second’s predictions from the first’s, in nats: 0 is the same answer.")]
    : [];
  const depth = stream.shape[0];
  const rows = Array.from({ length: depth }, (_, layer) => {
    const values = row(stream, layer);
    return values.reduce((sum, value) => sum + value, 0) / values.length;
  });
  const [n, across] = heads.shape;
  const table = h(
    "table",
    { class: "run-apart", data: { testid: "apart" } },
    h("thead", {}, h("tr", {}, h("th", {}, ""), Array.from({ length: across }, (_, head) => h("th", { scope: "col" }, `head ${head}`)), h("th", { scope: "col" }, "stream"))),
    h("tbody", {}, Array.from({ length: n }, (_, i) => n - 1 - i).map((layer) => h("tr", {}, h("th", { scope: "row" }, `layer ${layer}`), [...row(heads, layer)].map((value) => {
      const cell = h("td", { data: { value } }, percent(value));
      cell.style.background = shade(value);
      cell.style.color = ink(value);
      return cell;
    }), h("td", { class: "number", data: { value: rows[layer + 1] } }, short(rows[layer + 1]))))),
  );
  return [said, ...words, h("h3", {}, "Which heads look elsewhere"), h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "heads that look elsewhere" }, table), h("p", { class: "legend" }, "Of a head: how much of its attention moved to other tokens, 0% to 100%. Stream: how far the vectors are apart after a layer, where 1 is as far as from zero.")];
}
