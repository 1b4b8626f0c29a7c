// Beam search: its tree, its hypotheses and all its steps.

import { answers, NEEDS_SERVER } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { live } from "glasshouse/saved_page.js";
import { placeholder, panel, slider, token } from "glasshouse/widgets.js";
import { drawTree, OUTCOMES } from "glasshouse/views/seq2seq/tree.js";

const MANY = 48; // leaves above which pruned beams are hidden by default

/**
 * @param {ViewContext} context
 * @returns {{ beams: number, penalty: number }}
 */
export function searched(context) {
  const { seq2seq_beams: beams, seq2seq_length_penalty: penalty } = context.state;
  return {
    beams: beams !== undefined && Number.isInteger(beams) && beams >= 2 && beams <= 8 ? beams : 4,
    penalty: typeof penalty === "number" ? penalty : 1,
  };
}

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function search(context) {
  /** @type {BeamTree | null} */
  let told = null;
  const count = slider("beams", {
    min: 2,
    max: 8,
    step: 1,
    shown: String,
    oninput: (value) => context.set({ seq2seq_beams: value }),
  });
  count.dataset.testid = "beams";
  const penalty = slider("length penalty", {
    min: -1,
    max: 2,
    step: 0.1,
    shown: (value) => value.toFixed(1).replace("-", "−"),
    oninput: (value) => context.set({ seq2seq_length_penalty: value }),
  });
  penalty.dataset.testid = "penalty";
  for (const one of [count, penalty]) live(one);
  const pruned = h("input", {
    type: "checkbox",
    data: { testid: "pruned" },
    on: { change: () => context.set({ seq2seq_pruned: pruned.checked ? 1 : 0 }) },
  });
  const tree = h("div", {
    class: "al-tree",
    tabindex: "0",
    role: "group",
    "aria-label": "tree of the beam search; also in the table below",
    data: { testid: "tree" },
  });
  const legend = h(
    "p",
    { class: "legend" },
    h("span", {}, h("i", { class: "al-best" }), "best hypothesis"),
    h("span", {}, h("i", { class: "al-kept" }), "kept"),
    h("span", {}, h("i", { class: "al-pruned" }), "pruned"),
    h("span", {}, "■ end of text"),
    h("span", {}, "percent: probability of the token given its prefix"),
  );
  const hypotheses = h("div", { class: "scroll", data: { testid: "hypotheses" } });
  const steps = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "steps of the search" });
  const all = h(
    "details",
    { class: "as-table", on: { toggle: () => fill() } },
    h("summary", {}, "every step of the search as a table"),
    steps,
  );
  const node = panel(
    "Beam search",
    "Each step extends all beams and keeps the most likely ones. The score is the log-probability divided by length to the power of the length penalty: a higher penalty favours longer targets.",
    h("div", { class: "controls" }, count, penalty, h("label", { class: "al-check" }, pruned, "show pruned")),
    tree,
    legend,
    h("h3", {}, "Hypotheses"),
    hypotheses,
    all,
  );

  function fill() {
    if (!all.open || !told) return;
    const { nodes } = told;
    const rows = nodes.map((one) =>
      h(
        "tr",
        {},
        h("td", { class: "number" }, String(one.step)),
        h("td", {}, token(one)),
        h("td", {}, one.parent === null ? "start" : written(nodes, one.parent)),
        h("td", { class: "number", data: { value: one.logprob } }, percent(Math.exp(one.logprob))),
        h("td", { class: "number", data: { value: one.total } }, short(one.total)),
        h("td", { class: "number", data: { value: one.score } }, short(one.score)),
        h("td", {}, OUTCOMES[one.outcome]),
      ),
    );
    put(
      steps,
      h(
        "table",
        { data: { testid: "nodes" } },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["step", "token", "after", "probability", "log-probability", "score", "then"].map((name) =>
              h("th", {}, name),
            ),
          ),
        ),
        h("tbody", {}, rows),
      ),
    );
  }

  /**
   * @param {BeamNode[]} nodes
   * @param {number} at
   * @returns {HTMLElement}
   */
  function written(nodes, at) {
    /** @type {string[]} */
    const path = [];
    /** @type {number | null} */
    let one = at;
    while (one !== null) {
      path.unshift(nodes[one].text);
      one = nodes[one].parent;
    }
    return h("span", { class: "al-after" }, path.slice(-6).join(""));
  }

  /** @param {number[]} ids */
  function choose(ids) {
    context.set({ target: "", appended: ids, token: -1 });
  }

  /**
   * @param {Hypothesis} one
   * @returns {boolean}
   */
  function isShown(one) {
    return !context.state.target && JSON.stringify(context.state.appended) === JSON.stringify(one.ids);
  }

  /** @param {BeamTree} found */
  function list(found) {
    put(
      hypotheses,
      h(
        "table",
        { class: "al-hypotheses" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["", "text", "score", "ends", ""].map((name) => h("th", {}, name)),
          ),
        ),
        h(
          "tbody",
          {},
          found.hypotheses.map((one, i) =>
            h(
              "tr",
              { class: isShown(one) ? "on" : "" },
              h("td", { class: "number" }, `${i + 1}.`),
              h(
                "td",
                {},
                one.tokens.length
                  ? one.tokens.map((each) => token(each))
                  : h("span", { class: "quiet" }, "(nothing)"),
              ),
              h("td", { class: "number", data: { testid: `score-${i}`, value: one.score } }, short(one.score)),
              h("td", {}, one.finish_reason === "stop" ? "EOS" : "max_new_tokens"),
              h(
                "td",
                {},
                isShown(one)
                  ? h("span", { data: { testid: `shown-${i}` } }, "shown in all views")
                  : live(
                      h(
                        "button",
                        {
                          type: "button",
                          class: "act",
                          "aria-label": `use as target: hypothesis ${i + 1}`,
                          data: { testid: `choose-${i}` },
                          on: { click: () => choose(one.ids) },
                        },
                        "use as target",
                      ),
                    ),
              ),
            ),
          ),
        ),
      ),
    );
  }

  return {
    node,
    async draw() {
      if (!answers("beams")) {
        for (const one of [count, penalty]) live(one, "", "beams");
        put(tree, placeholder(`The file has no beam search: it ${NEEDS_SERVER}`));
        return;
      }
      const { beams, penalty: power } = searched(context);
      count.show(beams);
      penalty.show(power);
      const forwardPass = context.forwardPass();
      /** @type {RequestBody} */
      const body = { forward_pass: { ...forwardPass, prompt: { text: forwardPass.prompt.text } } };
      if (beams !== 4) body.beams = beams;
      if (power !== 1) body.length_penalty = power;
      told = await context.request("beams", body, { topic: "" }); // its forward pass is not the page's, so it must not be aborted
      const wide = context.state.seq2seq_pruned;
      const leaves = told.nodes.filter((one) => one.outcome !== "kept").length;
      pruned.checked = wide === 1 || (wide === undefined && leaves <= MANY);
      put(
        tree,
        told.hypotheses.length
          ? drawTree(told, pruned.checked, choose)
          : placeholder("The search found no hypothesis: every continuation is forbidden."),
      );
      list(told);
      fill();
    },
  };
}
