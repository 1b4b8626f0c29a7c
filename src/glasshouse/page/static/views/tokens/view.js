// Tokens: next-token probabilities, sampling, saliency, the BPE merges of a word, and BPE training on the text.

import { isSaved } from "glasshouse/api.js";
import { answer, preamble, within } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put, s } from "glasshouse/dom.js";
import { count, percent, plural, short } from "glasshouse/number.js";
import { live } from "glasshouse/saved_page.js";
import { bars, placeholder, panel, python, slider, token } from "glasshouse/widgets.js";
import { saliency, saliencyInPython } from "glasshouse/views/tokens/saliency.js";

const SHOWN = 12; // candidates
const MERGES = 200; // replayed at most
const BEAT = 500; // milliseconds between merges when they play

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const predicted = [nextToken(context), ...(context.hasProbabilities ? [saliency(context)] : [])];
  const tokenized = [
    ...(context.model.has_merges ? [wordMerges(context)] : []),
    ...(context.model.tokenizer ? [trainBpe(context)] : []),
  ];
  const parts = [...predicted, ...tokenized];
  /** @type {(some: Part[]) => HTMLElement} */
  const column = (some) =>
    h(
      "div",
      { class: "view" },
      some.map((part) => part.node),
    );
  const code = h("div", {});
  root.append(h("div", { class: "columns" }, column(predicted), column(tokenized)), code);
  const stop = onTheme(() => {
    for (const part of parts) part.colour?.();
  });
  return {
    async draw(changed) {
      const [first, ...others] = parts;
      await first.draw(changed); // the probabilities first
      await Promise.all(others.map((part) => part.draw(changed)));
      put(code, python(await inPython(context)));
    },
    close() {
      stop();
      for (const part of parts) part.close?.();
    },
  };
}

/**
 * The same in Python.
 * @param {ViewContext} context
 * @returns {Promise<string>}
 */
async function inPython(context) {
  const { lines, inputs } = preamble(context);
  const work = [`probabilities = ${answer(context, inputs)}`, ...(await saliencyInPython(context, inputs))];
  return [...lines, ...(await within(context, work))].join("\n");
}

// Next-token probabilities

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
function nextToken(context) {
  const { model } = context;
  const title = context.predictionsTitle;
  const about =
    {
      next_token: "The most likely tokens after the selected one. Click a token to append it there.",
      masked_token: "The most likely tokens at the selected position. Mask the token to predict it from the others.",
    }[model.head] ?? "The probability of each label.";
  const list = h("div", { data: { testid: "next" } });
  const facts = h("p", { class: "quiet", role: "status", data: { testid: "next-facts" } });
  const written = h("p", { class: "written quiet" });
  const settings = model.generates ? sampling(context) : null;
  /** @type {(n: number) => HTMLElement} */
  const write = (n) =>
    h(
      "button",
      {
        type: "button",
        class: n > 1 ? "act" : "act first",
        data: { testid: `generate-${n}` },
        on: { click: () => generate(context, n, written) },
      },
      n > 1 ? `generate ${n} tokens` : "sample one token",
    );
  const controls = settings
    ? [
        live(settings.node),
        h(
          "div",
          { class: "controls" },
          live(write(1)),
          live(write(20)),
          h("span", { class: "quiet" }, "each click uses a new seed"),
        ),
      ]
    : [];
  const node = panel(title, about, list, facts, controls, written);
  if (!context.hasProbabilities)
    put(
      list,
      placeholder(`The head of this model is ${model.head}, which predicts no tokens; open its attention instead.`),
    );

  return {
    node,
    async draw() {
      settings?.draw();
      if (!context.hasProbabilities) return;
      const { temperature, top_k: topK, top_p: topP } = context.state;
      /** @type {RequestBody} */
      const body = { forward_pass: context.forwardPass(), position: context.token, show: SHOWN };
      if (model.generates) {
        if (temperature !== 1) body.temperature = temperature;
        if (topK) body.top_k = topK;
        if (topP < 1) body.top_p = topP;
      }
      const found = await context.request("next", body);
      const plain = !model.generates || (temperature === 1 && !topK && topP >= 1);
      put(
        list,
        bars(
          found.candidates.map((one) => ({
            name: model.predicts_tokens ? token(one) : one.text,
            share: plain ? one.probability : one.sampling_probability,
            second: plain ? undefined : one.probability,
            value: one.probability,
            text: percent(plain ? one.probability : one.sampling_probability),
            title: `${one.text}: probability ${percent(one.probability)}, logit ${short(one.logit)}${plain ? "" : `, sampled with ${percent(one.sampling_probability)}`}`,
            class: one.id === found.actual_next ? "true" : "",
            data: { id: one.id, sampling: one.sampling_probability, logit: one.logit },
            onclick: model.generates && !isSaved ? () => branch(context, one.id) : undefined,
          })),
          { label: title, full: "100%" },
        ),
      );
      const nats = `entropy ${short(found.entropy)} nats`;
      put(
        facts,
        plain
          ? nats
          : `${nats}, ${short(found.sampling_entropy)} after temperature, top-k and top-p (${plural(found.n_candidates, "candidate")}). Pale: before.`,
      );
    },
  };
}

/**
 * @param {ViewContext} context
 * @returns {{ node: HTMLElement, draw: () => void }}
 */
function sampling(context) {
  const temperature = slider("temperature", {
    min: 0,
    max: 2,
    step: 0.05,
    shown: (value) => value.toFixed(2),
    oninput: (value) => context.set({ temperature: value }),
  });
  const most = Math.min(context.model.vocab_size, 100);
  const topK = slider("top-k", {
    min: 0,
    max: most,
    step: 1,
    shown: (value) => (value ? String(value) : "all"),
    oninput: (value) => context.set({ top_k: value }),
  });
  const topP = slider("top-p", {
    min: 0.05,
    max: 1,
    step: 0.05,
    shown: (value) => (value >= 1 ? "all" : value.toFixed(2)),
    oninput: (value) => context.set({ top_p: value }),
  });
  return {
    node: h("div", { class: "sampling" }, temperature, topK, topP),
    draw() {
      temperature.show(context.state.temperature);
      topK.show(context.state.top_k);
      topP.show(context.state.top_p);
    },
  };
}

/**
 * Append a token after the selected one; what followed is dropped.
 * @param {ViewContext} context
 * @param {number} id
 */
function branch(context, id) {
  const { token: place, row, tokens } = context;
  if (place === row.length - 1) {
    context.set({ appended: [...context.state.appended, id], token: -1 });
    return;
  }
  const kept = row.slice(tokens.start ?? 0, place + 1).map((one) => one.id);
  context.set({ [tokens.target ? "target" : "text"]: "", appended: [...kept, id], token: -1 });
}

/**
 * @param {ViewContext} context
 * @param {number} n
 * @param {HTMLElement} written
 * @returns {Promise<void>}
 */
async function generate(context, n, written) {
  const { temperature, top_k: topK, top_p: topP, seed, appended } = context.state;
  /** @type {RequestBody} */
  const body = { forward_pass: context.forwardPass(), max_new_tokens: n, seed };
  if (temperature) body.temperature = temperature;
  if (topK) body.top_k = topK;
  if (topP < 1) body.top_p = topP;
  context.page.wait(1);
  try {
    const made = await context.request("generate", body);
    if (made.tokens.length)
      put(
        written,
        "Generated: ",
        made.tokens.map((one) => token(one, { class: "appended" })),
      );
    else put(written, "The model generated the end-of-text token.");
    context.set({ appended: [...appended, ...made.tokens.map((one) => one.id)], token: -1, seed: seed + 1 });
  } catch (error) {
    put(written, error.message);
  } finally {
    context.page.wait(-1);
  }
}

// BPE merges of a word

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
function wordMerges(context) {
  const title = h("h3", {});
  const tree = h("div", {
    class: "tree",
    tabindex: "0",
    role: "group",
    "aria-label": "merge tree",
    data: { testid: "tree" },
  });
  const table = h("div", { class: "scroll" });
  const node = panel(
    "BPE merges of this word",
    "A word starts as bytes; the adjacent pair with the lowest merge rank is merged until none is left. Numbers are merge ranks.",
    title,
    tree,
    table,
  );
  return {
    node,
    async draw(changed) {
      if (!["tokens", "token", "key"].some((name) => changed.has(name))) return;
      /** @type {RequestBody} */
      const body = { forward_pass: context.forwardPass({ unedited: true }), position: context.token };
      if (context.tokens.target) body.side = "target";
      const found = await context.request("word_merges", body);
      put(title, "word ", token({ text: found.word, id: "" }, { title: found.word }));
      if (!found.steps.length) {
        put(tree, placeholder("A special token has no merges."));
        put(table);
        return;
      }
      put(tree, drawTrees(found.trees));
      const rows = found.steps.map((step, i) =>
        h(
          "tr",
          {},
          h("td", { class: "number" }, i ? count(step.rank) : ""),
          h("td", {}, i ? `${step.merge[0]} + ${step.merge[1]}` : "bytes"),
          h(
            "td",
            {},
            step.tokens.map((one) => token({ text: one, id: "" }, { title: one })),
          ),
        ),
      );
      put(
        table,
        h(
          "table",
          { class: "merges", data: { testid: "merges" } },
          h(
            "thead",
            {},
            h("tr", {}, h("th", { class: "number" }, "rank"), h("th", {}, "merge"), h("th", {}, "tokens")),
          ),
          h("tbody", {}, rows),
        ),
      );
    },
  };
}

const WIDE = 8.2; // of a character
const HIGH = 44;

/**
 * Lay trees out side by side: leaves at the bottom, each token above the two that it is merged from.
 * @param {MergeTree[]} trees
 * @returns {SVGElement}
 */
function drawTrees(trees) {
  let x = 8;
  /** @type {(SVGElement | null)[]} */
  const shapes = [];
  let deepest = 0;
  /**
   * @param {MergeTree} tree
   * @param {number} depth
   * @returns {{ middle: number, depth: number }}
   */
  function place(tree, depth) {
    deepest = Math.max(deepest, depth);
    const own = Math.max(24, [...tree.text].length * WIDE + 12);
    const parts = tree.parts.map((part) => place(part, depth + 1));
    let middle;
    if (parts.length) {
      middle = (parts[0].middle + parts[parts.length - 1].middle) / 2;
      x = Math.max(x, middle + own / 2 + 6);
    } else {
      middle = x + own / 2;
      x += own + 6;
    }
    const spot = { middle, depth, own, tree };
    for (const part of parts)
      shapes.unshift(s("line", { x1: middle, y1: depth * HIGH + 30, x2: part.middle, y2: part.depth * HIGH + 12 }));
    shapes.push(
      s("rect", {
        x: middle - own / 2,
        y: depth * HIGH + 10,
        width: own,
        height: 22,
        rx: 4,
        class: parts.length ? "" : "leaf",
      }),
      s("text", { x: middle, y: depth * HIGH + 21 }, tree.text),
      tree.rank === null ? null : s("text", { class: "rank", x: middle, y: depth * HIGH + 4 }, String(tree.rank)),
    );
    return spot;
  }
  for (const tree of trees) {
    place(tree, 0);
    x += 14;
  }
  return s(
    "svg",
    { width: x + 4, height: (deepest + 1) * HIGH, role: "img", "aria-label": trees.map(said).join("; ") },
    shapes.filter(Boolean),
  );
}

/**
 * @param {MergeTree} tree
 * @returns {string}
 */
function said(tree) {
  return tree.parts.length ? `${tree.text} from ${tree.parts.map(said).join(" and ")}` : tree.text;
}

// BPE training

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
function trainBpe(context) {
  /** @type {BpeStep[]} */
  let steps = [];
  /** @type {string[][]} */
  let spelled = [];
  let at = 0;
  /** @type {number | undefined} */
  let timer;
  const progress = slider("merge", {
    min: 0,
    max: 0,
    step: 1,
    shown: (value) => `${value} of ${steps.length}`,
    oninput: (value) => {
      stop();
      show(value);
    },
  });
  const play = h(
    "button",
    { type: "button", class: "act", data: { testid: "play" }, on: { click: () => (timer ? stop() : start()) } },
    "play",
  );
  const what = h("p", { role: "status", data: { testid: "merge" } });
  const runnersUp = h("p", { class: "quiet runners-up" });
  const words = h("div", {
    class: "words",
    tabindex: "0",
    role: "group",
    "aria-label": "the text in tokens",
    data: { testid: "learned" },
  });
  const node = panel(
    "Train BPE on this text",
    "Byte-pair encoding trained on this text alone: each merge turns the most frequent adjacent pair into a token.",
    h("div", { class: "controls" }, play, progress),
    what,
    runnersUp,
    words,
  );
  node.classList.add("learning");

  /** @param {number} value */
  function show(value) {
    at = value;
    progress.show(at);
    const now = spelled.map((word) => [...word]);
    for (let i = 0; i < at; i += 1)
      for (let w = 0; w < now.length; w += 1) now[w] = join(now[w], steps[i].merge, steps[i].token);
    const fresh = at ? steps[at - 1].token : null;
    put(
      words,
      now.map((word) =>
        h(
          "span",
          { class: "word" },
          word.map((text) => token({ text, id: "" }, { class: text === fresh ? "new" : "", title: text })),
        ),
      ),
    );
    const size = now.reduce((sum, word) => sum + word.length, 0);
    if (!at) {
      put(what, `Before the first merge: ${plural(size, "byte")}.`);
      put(runnersUp, steps.length ? "" : "No pair occurs often enough; enter more text.");
      return;
    }
    const step = steps[at - 1];
    put(
      what,
      "Merge ",
      String(at),
      ": ",
      ...pair(step.merge),
      ` occurs ${plural(step.count, "time")}; ${plural(size, "token")} remain.`,
    );
    const pairs = step.runners_up.map((one, i) => [i ? ", " : "Runners-up: ", ...pair(one.merge), ` (${one.count})`]);
    put(runnersUp, pairs);
  }
  function start() {
    if (at >= steps.length) show(0);
    put(play, "pause");
    timer = setInterval(() => (at < steps.length ? show(at + 1) : stop()), BEAT);
  }
  function stop() {
    clearInterval(timer);
    timer = undefined;
    put(play, "play");
  }
  return {
    node,
    async draw(changed) {
      if (!changed.has("tokens")) return;
      stop();
      const { text } = context.state;
      const found = await context.request(
        "train_bpe",
        { text: text || context.row.map((one) => one.text).join(""), merges: MERGES },
        { topic: JSON.stringify(context.forwardPass({ unedited: true })) },
      );
      steps = found.steps;
      spelled = found.words;
      progress.limit(steps.length);
      show(Math.min(steps.length, 8));
    },
    close: stop,
  };
}

/**
 * @param {Pair} merge
 * @returns {Child[]}
 */
function pair([left, right]) {
  return [token({ text: left, id: "" }, { title: left }), " + ", token({ text: right, id: "" }, { title: right })];
}

/**
 * Put a token wherever its two halves stand side by side, from left to right.
 * @param {string[]} word
 * @param {Pair} merge
 * @param {string} made
 * @returns {string[]}
 */
function join(word, [left, right], made) {
  /** @type {string[]} */
  const joined = [];
  for (let i = 0; i < word.length; i += 1) {
    if (word[i] === left && word[i + 1] === right) {
      joined.push(made);
      i += 1;
    } else joined.push(word[i]);
  }
  return joined;
}
