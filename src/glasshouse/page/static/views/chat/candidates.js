// What a token was drawn from, where to look into it, and how to go on from it.

import { h } from "glasshouse/dom.js";
import { percent, plural, short } from "glasshouse/number.js";
import { addressOf } from "glasshouse/server.js";
import { bars, placeholder, token } from "glasshouse/widgets.js";

const LOOKS = [
  ["attention", "attention"],
  ["residual", "logit lens"],
  ["walkthrough", "step through"],
];

/**
 * The panel of a token of an answer. `branch(id)` continues with another one in its place.
 * @param {ViewContext} context
 * @param {ChatAnswer} answer
 * @param {number} place
 * @param {((id: number) => void) | null} branch
 * @returns {HTMLElement}
 */
export function candidates(context, answer, place, branch) {
  const { opened } = answer;
  const one = answer.tokens?.[place];
  const drawn = one?.drawn;
  if (!opened || !one || !drawn)
    return h("div", { class: "drawn", data: { testid: "drawn" } }, placeholder("This token was given, not drawn."));
  const rows = drawn.candidates.map(([id, probability, logprob]) => ({ id, probability, logprob }));
  if (!rows.some((row) => row.id === drawn.id)) rows.push(drawn);
  const rest = 1 - rows.reduce((sum, row) => sum + row.probability, 0);
  const isPlain = rows.every((row) => Math.abs(row.probability - Math.exp(row.logprob)) < 1e-4);
  const list = bars(
    rows.map((row) => {
      const info = one.tables[row.id] ?? { id: row.id, text: String(row.id) };
      const ends = opened.end_ids.includes(row.id);
      const canBranch = branch && !ends && row.id !== one.id;
      return {
        name: token(info),
        share: row.probability,
        second: isPlain ? undefined : Math.exp(row.logprob),
        value: row.probability,
        text: percent(row.probability),
        title: `${info.text}: drawn with ${percent(row.probability)}, the model’s own probability ${percent(Math.exp(row.logprob))}${ends ? "; it ends the answer" : canBranch ? "; continue with it" : ""}`,
        class: row.id === drawn.id ? "drawn-one" : "",
        data: { id: row.id, logprob: row.logprob },
        onclick: canBranch ? () => branch(row.id) : undefined,
      };
    }),
    { label: "candidates", full: "100%" },
  );
  const settings = [
    `temperature ${short(opened.settings.temperature)}`,
    opened.settings.top_k ? `top-k ${opened.settings.top_k}` : "",
    opened.settings.top_p && opened.settings.top_p < 1 ? `top-p ${short(opened.settings.top_p)}` : "",
    opened.settings.min_p ? `min-p ${short(opened.settings.min_p)}` : "",
    `seed ${opened.settings.seed}`,
  ]
    .filter(Boolean)
    .join(", ");
  const steered = Object.entries(opened.settings.steer ?? {})
    .filter(([, scale]) => scale)
    .map(([name, scale]) => `${name} ${short(scale)}`)
    .join(", ");
  const chosen = one.isChosen ? " You chose another token here than the model drew." : "";
  return h(
    "section",
    { class: "drawn", "aria-label": "what this token was drawn from", data: { testid: "drawn" } },
    h("h3", {}, one.isEnd ? "The end: " : "Token ", token(one), " was drawn from"),
    list,
    h(
      "p",
      { class: "quiet" },
      rest > 5e-5 ? `All others together ${percent(rest)}. ` : "",
      isPlain ? "" : "Pale: the model’s own probability, before penalties, temperature and filters. ",
      branch ? "Click a candidate to continue with it." : "",
      chosen,
    ),
    steered ? h("p", { class: "quiet" }, `Steered by ${steered}; the views show the model without that.`) : null,
    h(
      "p",
      { class: "looks" },
      "At this moment: ",
      LOOKS.filter(([view]) => context.model.views.includes(view)).map(([view, title]) =>
        look(context, answer, opened, place, view, title),
      ),
    ),
    h(
      "p",
      { class: "quiet" },
      `${settings} · ${plural(opened.prompt.length, "prompt token")} · `,
      h(
        "a",
        {
          href: addressOf(answer.model.id, `#answer=${answer.id}`),
          target: "_blank",
          rel: "opener",
          title: "open this answer in another tab",
        },
        h("code", { data: { testid: "answer-id" } }, answer.id),
      ),
    ),
  );
}

/**
 * A link to a view at the position where a token was drawn: that of the token before it.
 * @param {ViewContext} context
 * @param {ChatAnswer} answer
 * @param {OpenedAnswer} opened
 * @param {number} place
 * @param {string} view
 * @param {string} title
 * @returns {HTMLElement}
 */
function look(context, answer, opened, place, view, title) {
  const position = opened.start + place - 1;
  const here = answer.model.id === context.model.name;
  const address = addressOf(answer.model.id, `#view=${view}&answer=${answer.id}&token=${position}`);
  /** @param {MouseEvent} event */
  const go = (event) => {
    if (!here || !opened.state || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    context.set({ ...opened.state, view, token: position, answer: answer.id });
  };
  // In another tab, which gets the key of this one.
  return h(
    "a",
    {
      href: address,
      target: here ? null : "_blank",
      rel: here ? null : "opener",
      on: { click: go },
      data: { testid: `look-${view}` },
    },
    title,
  );
}
