// The plan of a run as a picture: memory by part, and memory and speed by the size of a micro-batch.

import { chart } from "glasshouse/chart.js";
import { h, put } from "glasshouse/dom.js";
import { count, percent, plural, short } from "glasshouse/number.js";

const GIB = 2 ** 30;
/** @type {(series: number, share: number) => string} */
const pale = (series, share) => `color-mix(in srgb, var(--series-${series}) ${share}%, var(--sheet))`;
/** @type {Record<string, string>} */
const COLOURS = {
  weights: "var(--series-1)",
  optimizer: "var(--series-3)",
  ema: pale(3, 55),
  gradients: "var(--series-4)",
  activations: "var(--series-2)",
  logits: pale(2, 60),
  working: pale(2, 30),
};

/**
 * The picture of a plan. `show(plan, measured)` draws it; `measured` has the tokens_per_second and memory of a run.
 * @returns {PlanPicture}
 */
export function planPicture() {
  const sentence = h("p", { data: { testid: "plan-sentence" } });
  const used = h("div", { class: "plan-memory" });
  const parts = h("div", { class: "plan-parts" });
  const legend = h("p", { class: "plan-legend", data: { testid: "plan-parts" } });
  const memory = chart({
    title: "Peak memory",
    unit: "GiB by sequences of a micro-batch",
    height: 150,
    along: "micro-batch",
    testid: "plan-memory",
    onmove,
  });
  const speed = chart({
    title: "Throughput",
    unit: "tokens per second by sequences of a micro-batch",
    height: 150,
    along: "micro-batch",
    testid: "plan-speed",
    onmove,
  });
  const node = h(
    "div",
    { class: "plan" },
    sentence,
    used,
    parts,
    legend,
    h("div", { class: "plan-charts" }, memory, speed),
  );
  /** @param {number | null} rows */
  function onmove(rows) {
    memory.mark(rows);
    speed.mark(rows);
  }
  /** @type {PlanPicture["show"]} */
  const show = (plan, measured = {}) => {
    put(sentence, told(plan), measuredSentence(measured));
    put(used, ...usage(plan, measured));
    const pieces = Object.entries(plan.memory.parts).filter(([, size]) => size > 0);
    put(
      parts,
      pieces.map(([name, size]) =>
        h("span", {
          title: `${name}: ${gib(size)}`,
          style: { width: `${(100 * size) / plan.memory.peak}%`, background: COLOURS[name] },
        }),
      ),
    );
    put(
      legend,
      pieces.map(([name, size]) =>
        h(
          "span",
          { class: "chart-value", data: { part: name, value: size } },
          h("i", { style: { background: COLOURS[name] } }),
          `${name} `,
          h("b", {}, gib(size)),
          h("span", { class: "quiet" }, ` ${percent(size / plan.memory.peak)}`),
        ),
      ),
    );
    const x = plan.micro_batches.map((one) => one.rows);
    const range = { from: 0, to: x[x.length - 1], zero: true };
    const usable = plan.usable_memory / GIB;
    const highest = Math.max(...plan.micro_batches.map((one) => one.memory)) / GIB;
    const limit = highest > usable / 4 ? [{ name: "usable", colour: "var(--quiet)", x, y: x.map(() => usable) }] : [];
    /** @type {(value: number | undefined, name: string) => Series[]} */
    const found = (value, name) =>
      value
        ? [{ name: "measured", colour: "var(--series-2)", x: [plan.rows], y: [value], dots: true, testid: name }]
        : [];
    memory.show({
      ...range,
      series: [
        {
          name: "planned",
          colour: "var(--series-1)",
          x,
          y: plan.micro_batches.map((one) => one.memory / GIB),
          dots: true,
          testid: "planned-memory",
        },
        ...limit,
        ...found(measured.memory && measured.memory / GIB, "measured-memory"),
      ],
    });
    speed.show({
      ...range,
      series: [
        {
          name: "planned",
          colour: "var(--series-1)",
          x,
          y: plan.micro_batches.map((one) => one.tokens_per_second),
          dots: true,
          testid: "planned-speed",
        },
        ...found(measured.tokens_per_second, "measured-speed"),
      ],
    });
    onmove(plan.rows);
  };
  const close = () => {
    memory.close();
    speed.close();
  };
  return Object.assign(node, { show, close });
}

/**
 * @param {TrainingPlan} plan
 * @returns {string}
 */
function told(plan) {
  const { peak, moment } = plan.memory;
  const time =
    plan.days === null
      ? ""
      : ` The run takes ${duration(plan.days)}${plan.cost === null ? "" : ` and costs ${plan.cost.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`}.`;
  const fits = plan.fits ? `${gib(peak)} at the peak (${moment})` : "not even one sequence fits";
  return `${plural(plan.n_parameters, "parameter")} on ${plan.gpus} x ${plan.gpu.name}: ${fits}; micro-batches of ${plural(plan.rows, "sequence")}, gradient accumulation ${plan.grad_accum}, ${Math.round(plan.tokens_per_second).toLocaleString("en")} tokens/s planned.${time}`;
}

/**
 * @param {MeasuredRun} measured
 * @returns {Child}
 */
function measuredSentence({ tokens_per_second: speed, memory }) {
  if (!speed && !memory) return "";
  const found = [
    speed ? `${Math.round(speed).toLocaleString("en")} tokens/s` : null,
    memory ? gib(memory) : null,
  ].filter(Boolean);
  return h(
    "span",
    { data: { testid: "plan-measured" } },
    ` Measured in this run, on its own device: ${found.join(", ")}.`,
  );
}

/**
 * The peak against the memory of the GPU.
 * @param {TrainingPlan} plan
 * @param {MeasuredRun} measured
 * @returns {Child[]}
 */
function usage(plan, measured) {
  const whole = Math.max(plan.gpu.memory, plan.memory.peak);
  /** @type {(size: number) => string} */
  const share = (size) => `${(100 * size) / whole}%`;
  const over = plan.memory.peak > plan.usable_memory;
  return [
    h(
      "div",
      {
        class: "plan-track",
        role: "img",
        "aria-label": `${gib(plan.memory.peak)} of ${gib(plan.gpu.memory)}`,
        data: { testid: "plan-track", share: plan.memory.peak / plan.gpu.memory },
      },
      h("span", { class: over ? "filled over" : "filled", style: { width: share(plan.memory.peak) } }),
      h("span", { class: "mark", title: "usable", style: { left: share(plan.usable_memory) } }),
      measured.memory
        ? h("span", { class: "mark measured", title: "measured", style: { left: share(measured.memory) } })
        : null,
    ),
    h(
      "p",
      { class: "legend" },
      `${percent(plan.memory.peak / plan.gpu.memory)} of ${gib(plan.gpu.memory)}; the mark is what can be used, ${gib(plan.usable_memory)}. The largest micro-batch has ${count(plan.largest_rows)} sequences. Below, the parts of the peak:`,
    ),
  ];
}

/**
 * @param {number} days
 * @returns {string}
 */
function duration(days) {
  if (days >= 2) return `${short(days)} days`;
  const minutes = days * 24 * 60;
  if (minutes >= 120) return `${short(minutes / 60)} hours`;
  return minutes >= 2 ? `${short(minutes)} minutes` : `${short(minutes * 60)} seconds`;
}

/**
 * @param {number} size
 * @returns {string}
 */
function gib(size) {
  return size < GIB / 10 ? `${short(size / 2 ** 20)} MiB` : `${short(size / GIB)} GiB`;
}
