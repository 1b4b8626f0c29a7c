// Metrics of the run over its steps, with a cursor at one step.

import { chart, nearest } from "glasshouse/chart.js";
import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { choice, panel, slider } from "glasshouse/widgets.js";
import { latest, store } from "glasshouse/views/run/metrics_store.js";
import { openCheckpoint, whole } from "glasshouse/views/run/step.js";

const PINNED = 300; // milliseconds without a key press before a step is pinned
const ROWS = 40; // of the table of values
const CALM = 0.6; // default smoothing

/** @type {MetricChart[]} */
const CHARTS = [
  {
    name: "loss",
    title: "Loss",
    unit: "nats",
    height: 260,
    curves: [
      ["loss", "training", "--series-1", true],
      ["validation_loss", "validation", "--series-2", false],
    ],
    scales: true,
  },
  {
    name: "bits",
    title: "Bits per byte",
    unit: "validation",
    curves: [["validation_bits_per_byte", "bits per byte", "--series-2", false]],
    scales: true,
  },
  {
    name: "accuracy",
    title: "Accuracy",
    unit: "validation",
    curves: [["validation_accuracy", "accuracy", "--series-2", false]],
  },
  { name: "lr", title: "Learning rate", curves: [["lr", "learning rate", "--series-3", false]], zero: true },
  {
    name: "grad_norm",
    title: "Gradient norm",
    unit: "unclipped",
    curves: [["grad_norm", "gradient norm", "--series-4", true]],
    scales: true,
  },
  {
    name: "throughput",
    title: "Throughput",
    unit: "tokens per second",
    curves: [["tokens_per_second", "tokens per second", "--series-1", true]],
    zero: true,
  },
];

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function curves(context) {
  /** @type {number | null} */
  let passing = null; // the step under the pointer
  /** @type {number | undefined} */
  let timer;
  const smooth = slider("smoothing", {
    min: 0,
    max: 0.99,
    step: 0.01,
    shown: (value) => value.toFixed(2),
    oninput: (value) => context.set({ run_smoothing: value }),
  });
  /** @type {Choice<string>} */
  const scale = choice(
    "scale",
    [
      ["linear", "linear"],
      ["log", "logarithmic"],
    ],
    (value) => context.set({ run_scale: value }),
  );
  const readout = h("p", { class: "run-status", role: "status", data: { testid: "run-status" } });
  const go = h("p", { class: "controls" });
  const listed = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "values by step" });
  const table = h(
    "details",
    { class: "as-table", on: { toggle: () => fill() } },
    h("summary", {}, "the values as a table"),
    listed,
  );
  const drawn = CHARTS.map((one) => ({
    ...one,
    chart: chart({
      title: one.title,
      unit: one.unit,
      height: one.height ?? 130,
      isMain: one.name === "loss",
      testid: `chart-${one.name}`,
      onmove: moved,
      onpick: pin,
    }),
  }));
  const [main, ...small] = drawn;
  const few = h(
    "div",
    { class: "run-small" },
    small.map((one) => one.chart),
  );
  const node = panel(
    "Metrics",
    "Pale: each step; solid: exponential moving average. Point at a step or use the arrow keys; click to pin it.",
    h("div", { class: "controls" }, smooth, scale),
    main.chart,
    readout,
    go,
    few,
    table,
  );

  /**
   * @param {number | null} step
   * @param {boolean} [isKey]
   */
  function moved(step, isKey = false) {
    passing = step;
    if (isKey) {
      clearTimeout(timer);
      timer = setTimeout(() => pin(step), PINNED);
    }
    mark();
  }
  /** @param {number | null} step */
  function pin(step) {
    clearTimeout(timer);
    passing = null;
    if (context.state.run_step === step) mark();
    else context.set({ run_step: step ?? undefined });
  }
  /** @returns {number | null} */
  function at() {
    const pinned = context.state.run_step;
    return passing ?? (typeof pinned === "number" && pinned <= latest().step ? pinned : null);
  }
  function mark() {
    const step = at();
    for (const one of drawn) one.chart.mark(step);
    const shown = step ?? latest().step;
    const { steps_per_point: width } = latest();
    const begin = Math.max(1, Math.floor(shown / width) * width);
    const said = width > 1 && begin < shown ? `steps ${whole(begin)} to ${whole(shown)}` : `step ${whole(shown)}`;
    const values = written().map(([name, title]) => {
      const { mean, low, high } = store.curves[name];
      const i = placeOf(name, shown);
      if (i < 0) return null;
      const range = low && high && low[i] !== high[i] ? ` (${short(low[i])} to ${short(high[i])})` : "";
      return h("span", { data: { testid: `at-${name}`, value: mean[i] } }, `${title} ${precise(mean[i])}${range}`);
    });
    readout.hidden = go.hidden = !store.curves.loss;
    put(readout, h("strong", { data: { testid: "at-step", value: shown } }, said), values);
    put(
      go,
      step === null
        ? h("span", { class: "quiet" }, "Latest step; select another in a chart.")
        : openCheckpoint(context, step, "look-at"),
    );
  }
  function show() {
    const { steps, step, status } = latest();
    const isLog = context.state.run_scale === "log";
    const calm = context.state.run_smoothing ?? CALM;
    const to = Math.max(1, status === "finished" ? step : Math.max(step, Math.min(steps ?? step, step * 4)));
    for (const one of drawn) {
      const series = one.curves
        .filter(([name]) => isWritten(name))
        .map(([name, title, colour, isNoisy]) => {
          const { step: x, mean: y, low, high } = store.curves[name];
          return {
            name: title,
            testid: `now-${name}`,
            colour: `var(${colour})`,
            x,
            y,
            low,
            high,
            smooth: isNoisy ? calm : 0,
            dots: !isNoisy && name.startsWith("validation"),
          };
        });
      one.chart.hidden = !series.length && one.name !== "loss";
      one.chart.show({ series, log: Boolean(one.scales && isLog), zero: one.zero, from: 0, to });
    }
    mark();
    fill();
  }
  /** The values as a table, for screen readers: a sample of steps from first to last. */
  function fill() {
    if (!table.open) return;
    const columns = written();
    const steps = [...new Set(columns.flatMap(([name]) => store.curves[name].step))].sort((a, b) => a - b);
    const some =
      steps.length <= ROWS
        ? steps
        : Array.from({ length: ROWS }, (_, i) => steps[Math.round((i * (steps.length - 1)) / (ROWS - 1))]);
    /** @type {(name: string, step: number) => HTMLElement} */
    const cell = (name, step) => {
      const value = store.curves[name].mean[placeOf(name, step)];
      return value === undefined
        ? h("td", { class: "number" })
        : h("td", { class: "number", data: { value } }, precise(value));
    };
    put(
      listed,
      h(
        "table",
        { data: { testid: "run-values" } },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { class: "number" }, "step"),
            columns.map(([, title]) => h("th", { class: "number" }, title)),
          ),
        ),
        h(
          "tbody",
          {},
          some.map((step) =>
            h(
              "tr",
              {},
              h("th", { class: "number", scope: "row" }, whole(step)),
              columns.map(([name]) => cell(name, step)),
            ),
          ),
        ),
      ),
    );
  }
  return {
    node,
    draw() {
      smooth.show(context.state.run_smoothing ?? CALM);
      scale.show(context.state.run_scale ?? "linear");
      show();
    },
    grow: show,
    close() {
      clearTimeout(timer);
      for (const one of drawn) one.chart.close();
    },
  };
}

/**
 * @param {string} name
 * @returns {boolean}
 */
function isWritten(name) {
  return store.curves[name]?.step.length > 0;
}

/**
 * The curves that have values, as [name, title].
 * @returns {[string, string][]}
 */
function written() {
  /** @type {[string, string][]} */
  const all = CHARTS.flatMap((one) =>
    one.curves.map(([name, title]) => [name, one.name === "loss" ? `${title} loss` : title]),
  );
  return all.filter(([name]) => isWritten(name));
}

/**
 * Where a curve has the value of a step; -1 where it has none.
 * @param {string} name
 * @param {number} step
 * @returns {number}
 */
function placeOf(name, step) {
  const steps = store.curves[name].step;
  const i = nearest(steps, step);
  return steps[i] === step ? i : -1;
}

/**
 * @param {number} value
 * @returns {string}
 */
function precise(value) {
  return Math.abs(value) >= 1e7 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(3).replace("-", "−")
    : Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 }).replace("-", "−");
}
