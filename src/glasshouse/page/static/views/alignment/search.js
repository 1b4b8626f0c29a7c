// How a target is searched: the tree of a beam search, what it found, and all its steps.

import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { instead, panel, slider, token } from "glasshouse/parts.js";
import { drawTree, FATES } from "glasshouse/views/alignment/tree.js";

const MANY = 48; // lines above which what was dropped is hidden at first

export function searched(glass) {
  const { alignment_beams: beams, alignment_penalty: penalty } = glass.state;
  return { beams: Number.isInteger(beams) && beams >= 2 && beams <= 8 ? beams : 4, penalty: typeof penalty === "number" ? penalty : 1 };
}

export function search(glass) {
  let told = null;
  const count = slider("beams", { min: 2, max: 8, step: 1, shown: String, oninput: (value) => glass.set({ alignment_beams: value }) });
  count.dataset.testid = "beams";
  const penalty = slider("length penalty", { min: -1, max: 2, step: 0.1, shown: (value) => value.toFixed(1).replace("-", "−"), oninput: (value) => glass.set({ alignment_penalty: value }) });
  penalty.dataset.testid = "penalty";
  const dropped = h("input", { type: "checkbox", data: { testid: "dropped" }, on: { change: () => glass.set({ alignment_dropped: dropped.checked ? 1 : 0 }) } });
  const tree = h("div", { class: "al-tree", tabindex: "0", role: "group", "aria-label": "tree of the search; the table below says the same", data: { testid: "tree" } });
  const legend = h("p", { class: "legend" }, h("span", {}, h("i", { class: "al-best" }), "the best text"), h("span", {}, h("i", { class: "al-kept" }), "kept"), h("span", {}, h("i", { class: "al-dropped" }), "dropped: likelier ones filled the beams"), h("span", {}, "■ the text ends"), h("span", {}, "percent: how likely the token is after those before it"));
  const found = h("div", { class: "scroll", data: { testid: "found" } });
  const all = h("details", { class: "as-table", on: { toggle: () => fill() } }, h("summary", {}, "every step of the search as a table"), h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "steps of the search" }));
  const node = panel(
    "How a target is searched",
    "A beam search writes several targets side by side. At each step it looks at all ways to go on, keeps the likeliest few, and drops the rest. The score is the log-probability over the length to the power of the penalty: a higher penalty favours longer texts.",
    h("div", { class: "controls" }, count, penalty, h("label", { class: "al-check" }, dropped, "show what was dropped")),
    tree, legend, h("h3", {}, "What it found"), found, all,
  );

  function fill() {
    if (!all.open || !told) return;
    const rows = told.nodes.map((one) => h("tr", {}, h("td", { class: "number" }, String(one.step)), h("td", {}, token(one)), h("td", {}, one.parent === null ? "the start" : written(one.parent)), h("td", { class: "number", data: { value: one.logprob } }, percent(Math.exp(one.logprob))), h("td", { class: "number", data: { value: one.total } }, short(one.total)), h("td", { class: "number", data: { value: one.score } }, short(one.score)), h("td", {}, FATES[one.fate])));
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
      const leaves = told.nodes.filter((one) => one.fate !== "kept").length;
      dropped.checked = wide === 1 || (wide === undefined && leaves <= MANY);
      put(tree, told.found.length ? drawTree(told, dropped.checked, choose) : instead("The search found no text: every way to go on is forbidden."));
      list();
      fill();
    },
  };
}
