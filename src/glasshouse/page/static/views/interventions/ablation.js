// Ablation grid: edit a head or layer by click, or ablate each component in turn.

import { balance } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { plural } from "glasshouse/number.js";
import { choice, panel } from "glasshouse/widgets.js";
import { isNumber, show, tight, walk } from "glasshouse/views/interventions/grid_cell.js";
import { named } from "glasshouse/views/interventions/site.js";
import { chunks, sweep } from "glasshouse/views/interventions/sweep.js";

const FIRST = 0.5; // initial scale factor
const SHADES = [0.25, 0.5, 0.75, 1]; // of the legend; a colour is the square root of its number

/**
 * The stacks of a model and their components.
 * @param {Model} model
 * @returns {AblationStack[]}
 */
function stacksOf(model) {
  const own = { z: "z", all: "attn_out", title: "heads", short: "" };
  if (model.kind !== "seq2seq") return [{ prefix: "", title: "", layers: model.n_layers, groups: [own] }];
  const cross = { z: "cross_z", all: "cross_attn_out", title: "cross-attention heads", short: "cross " };
  return [
    {
      prefix: "decoder.",
      title: "Decoder",
      layers: model.n_layers,
      groups: [{ ...own, title: "self-attention heads" }, cross],
    },
    { prefix: "encoder.", title: "Encoder", layers: model.n_encoder_layers, groups: [own] },
  ];
}

/**
 * @param {ViewContext} context
 * @param {EditHistory} changes
 * @returns {Part}
 */
export function ablation(context, changes) {
  const { model } = context;
  /** @type {Map<string, GridCell>} */
  const cells = new Map(); // by site: {button, at, name}
  /** @type {{ name: string, sites: string[] }[]} */
  const lines = []; // of the grids: {name, sites}
  /** @type {Choice<string>} */
  const how = choice(
    "on click",
    [
      ["off", "zero ablation"],
      ["mean", "mean ablation"],
      ["scale", "scale"],
    ],
    (value) => context.set({ interventions_edit: value === "off" ? undefined : value }),
  );
  const progress = h("p", { class: "quiet", role: "status", data: { testid: "sweep-progress" } });
  const alone = sweep(context, "ablate each component", tryEach, {
    failed: (message) => put(progress, message),
    stopped: () => put(progress, `Stopped after ${plural(swept?.values.size ?? 0, "component")}.`),
  });
  alone.dataset.testid = "sweep";
  const legend = h("div", { class: "legend" });
  const node = panel(
    "Ablate heads and layers",
    "Every component that writes to the residual stream, the last layer on top. Click to edit, click again to undo. “Ablate each component” measures the effect of each one on this text.",
    h("div", { class: "controls" }, h("span", { class: "name" }, "on click"), how, alone),
    progress,
    stacksOf(model).map(grid),
    legend,
  );
  /** @type {{ about: string, edits: number, values: Map<string, number | null> } | null} */
  let swept = null; // {about, edits, values}: loss increase by ablated site, on top of some edits
  /** @type {{ increase: string, helps: string, hinders: string, figure: (value: number) => string }} */
  const words = model.predicts_tokens
    ? {
        increase: "the increase in mean loss",
        helps: "loss increases when ablated",
        hinders: "loss decreases when ablated",
        figure: (value) => tight(value, "+"),
      }
    : {
        increase: "the relative change of the final hidden states",
        helps: "change increases when ablated",
        hinders: "change decreases when ablated",
        figure: (value) => `${value < 0 ? "−" : "+"}${tight(100 * Math.abs(value))}%`,
      };

  /**
   * @param {AblationStack} stack
   * @returns {HTMLElement}
   */
  function grid({ prefix, title, layers, groups }) {
    const heads = Array.from({ length: model.n_heads }, (_, head) => head);
    /** @type {(site: string, at: GridCell["at"], name: string) => HTMLButtonElement} */
    const cell = (site, at, name) => {
      const button = h("button", {
        type: "button",
        role: "gridcell",
        class: at.head === undefined ? "part wide" : "part",
        tabindex: "-1",
        data: { site },
        on: { click: () => press(site, at) },
      });
      cells.set(site, { button, at, name });
      return button;
    };
    const over = h(
      "div",
      { class: "parts-over", "aria-hidden": "true" },
      h("span", {}),
      groups.map((group) => h("span", { style: { "grid-column": `span ${model.n_heads + 1}` } }, group.title)),
      h("span", {}, "feed-forward"),
    );
    const top = h(
      "div",
      { role: "row" },
      h("span", { role: "columnheader" }),
      groups.map((group) => [
        heads.map((head) => h("span", { role: "columnheader", title: group.title }, `${head}`)),
        h("span", { role: "columnheader" }, "all"),
      ]),
      h("span", { role: "columnheader", "aria-label": "feed-forward" }),
    );
    const rows = [];
    for (let layer = layers - 1; layer >= 0; layer -= 1) {
      const name = `${title ? `${title.toLowerCase()} ` : ""}layer ${layer}`;
      const row = [
        ...groups.flatMap((group) => [
          ...heads.map((head) =>
            cell(
              `${prefix}${group.z}.${layer}[head=${head}]`,
              { layer, head },
              `${name}, ${group.short}head ${head}`,
            ),
          ),
          cell(`${prefix}${group.all}.${layer}`, { layer }, `${name}, all ${group.short}attention`),
        ]),
        cell(`${prefix}ffn_out.${layer}`, { layer }, `${name}, feed-forward`),
      ];
      lines.push({ name, sites: row.map((button) => button.dataset.site ?? "") });
      rows.push(h("div", { role: "row" }, h("span", { role: "rowheader" }, `layer ${layer}`), row));
    }
    const columns = `3.8rem ${groups.map(() => `repeat(${model.n_heads}, minmax(32px, 58px)) minmax(38px, 58px)`).join(" ")} minmax(78px, 84px)`;
    const table = h(
      "div",
      {
        class: layers > 8 ? "parts many" : "parts",
        role: "grid",
        "aria-label": `components${title ? ` of the ${title.toLowerCase()}` : ""}`,
        style: { "--columns": columns },
        data: { testid: `ablation-${prefix || "stack"}` },
        on: { keydown: walk },
      },
      over,
      top,
      rows,
    );
    const first = table.querySelector(".part");
    if (first) first.tabIndex = 0;
    return h("div", {}, title ? h("h3", {}, title) : null, h("div", { class: "scroll parts-box" }, table));
  }

  /**
   * @param {string} site
   * @param {GridCell["at"]} at
   */
  function press(site, at) {
    const now = context.state.edits.find((one) => one.site === site);
    const kind = context.state.interventions_edit ?? "off";
    /** @type {Edit} */
    const edit =
      kind === "mean" ? { kind: "mean", site } : { kind: "scale", site, factor: kind === "scale" ? FIRST : 0 };
    const same = now && now.kind === edit.kind && (kind === "scale") === (now.kind === "scale" && now.factor !== 0);
    changes.put(site, same ? null : edit, at);
  }

  const about = () => JSON.stringify(context.forwardPass({ unedited: true }));

  /**
   * @param {SweepRequest} request
   * @returns {Promise<void>}
   */
  async function tryEach(request) {
    const forwardPass = context.forwardPass();
    const { length } = context.row;
    /** @type {NonNullable<typeof swept>} */
    const own = { about: about(), edits: context.state.edits.length, values: new Map() };
    swept = own;
    for (const { name, sites } of lines) {
      for (const some of chunks(sites, length)) {
        put(progress, `Ablating ${name} …`);
        const { loss_increase: increase } = await request("ablate_each", { forward_pass: forwardPass, sites: some });
        for (const [i, site] of some.entries()) own.values.set(site, increase[i]);
        colour();
      }
    }
    put(progress, summary(own.values, own.edits));
  }

  /**
   * @param {Map<string, number | null>} values
   * @param {number} edits
   * @returns {string}
   */
  function summary(values, edits) {
    const measured = [...values].flatMap(([site, value]) => (isNumber(value) ? [{ site, value }] : []));
    if (!measured.length) return "There is nothing to measure; enter more text.";
    const heads = measured.filter(({ site }) => site.includes("[head=")).sort((a, b) => b.value - a.value);
    const basis = edits ? `, on top of ${plural(edits, "edit")}` : "";
    const first = heads.length
      ? ` Most important head: ${named(heads[0].site)} (${words.figure(heads[0].value)}).`
      : "";
    return `Each number is ${words.increase} when the component is ablated${basis}.${first}`;
  }

  function colour() {
    const values = swept ? [...swept.values.values()].filter(isNumber) : [];
    const most = Math.max(...values.map(Math.abs), 0) || 1;
    // The square root, as a single dominant component would make all others pale.
    /** @type {(value: number) => number} */
    const share = (value) => Math.sign(value) * Math.sqrt(Math.abs(value) / most);
    const edits = new Map(context.state.edits.map((one) => [one.site, one]));
    const { layer, head } = context.state;
    for (const [site, { button, at, name }] of cells) {
      const edit = edits.get(site);
      const value = swept?.values.get(site);
      const state = !edit ? "" : edit.kind === "scale" ? (edit.factor ? `×${edit.factor}` : "off") : edit.kind;
      const text = isNumber(value) ? words.figure(value) : "";
      show(button, {
        label: `${name}: ${state || "on"}${text ? `, ablated ${text}` : ""}`,
        state,
        value,
        text,
        share: share(value ?? 0),
      });
      button.classList.toggle("chosen", at.layer === layer && at.head === head);
    }
    put(
      legend,
      h("span", {}, h("i", { class: "part-on" }), "on"),
      h("span", {}, h("i", { class: "part-edited" }), "edited"),
      swept?.values.size
        ? [
            h("span", {}, `${words.helps}:`),
            SHADES.map((one) =>
              h("span", {}, h("i", { style: { background: balance(one) } }), words.figure(one * one * most)),
            ),
            values.some((value) => value < 0)
              ? h(
                  "span",
                  {},
                  h("i", { style: { background: balance(share(Math.min(...values))) } }),
                  `${words.hinders}, by ${words.figure(Math.min(...values))} at most`,
                )
              : null,
          ]
        : null,
    );
  }

  return {
    node,
    draw() {
      how.show(context.state.interventions_edit ?? "off");
      if (swept && swept.about !== about()) {
        alone.stop();
        swept = null;
        put(progress);
      }
      colour();
    },
    colour,
    close: alone.stop,
  };
}
