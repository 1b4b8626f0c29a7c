// One answer of a conversation: its tokens, each of which opens, and its versions.

import { balance } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { token as chip } from "glasshouse/widgets.js";
import { candidates } from "glasshouse/views/chat/candidates.js";

/** @type {Record<string, string>} */
const ENDS = {
  length: "ended at the longest length",
  content_filter: "withheld by a rule",
  cancelled: "stopped",
  error: "ended by an error",
};

/**
 * A turn of a conversation as one model answered it. `page` has `begin(answer)` and `draw()`.
 * @param {ViewContext} context
 * @param {ChatSession} session
 * @param {ChatTurn} turn
 * @param {ChatPage} page
 * @returns {HTMLElement}
 */
export function answerNode(context, session, turn, page) {
  const answer = turn.versions[turn.at];
  const said = h("div", {
    class: answer.model.chats ? "said" : "said mono",
    data: { testid: "answer", status: answer.status },
    on: { click: (event) => choose(event.target.closest(".flow")), keydown: walk },
  });
  const under = h("div", {});
  const state = h("p", { class: "quiet answer-state", role: "status" });
  const node = h("article", { class: "answer", data: { model: answer.model.id } }, said, under, state);

  /** @param {HTMLElement | null} one */
  function choose(one) {
    if (!one) return;
    const place = Number(one.dataset.place);
    answer.selected = answer.selected === place ? null : place;
    fill();
    said.children[place].focus({ preventScroll: true });
  }

  /**
   * The arrow keys go from token to token, and Enter opens one.
   * @param {ElementEvent<KeyboardEvent>} event
   */
  function walk(event) {
    const one = event.target.closest(".flow");
    const to = { ArrowRight: one?.nextElementSibling, ArrowLeft: one?.previousElementSibling }[event.key];
    if (to) to.focus();
    else if (event.key === "Enter" || event.key === " ") choose(one);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function fill() {
    said.dataset.status = answer.status;
    const { threshold } = session;
    if (!answer.tokens) put(said, answer.probe ? streamed(answer, threshold) : answer.text);
    else
      put(
        said,
        answer.tokens.map((one, place) => tokenNode(one, place, answer, threshold)),
      );
    const place = answer.selected;
    const isOpen = place !== null && answer.tokens && place < answer.tokens.length;
    // A translation cannot be continued from a target of one's own.
    const canBranch = !answer.opened?.source.length;
    put(under, isOpen ? candidates(context, answer, place, canBranch ? branch : null) : []);
    put(
      state,
      versions(),
      answer.error ? h("span", { class: "trouble" }, answer.error) : (ENDS[answer.finish ?? ""] ?? ""),
      answer.probe ? h("span", { data: { testid: "scored" } }, summary(answer, threshold)) : null,
    );
  }

  /** @param {number} id */
  function branch(id) {
    page.begin(session.branch(turn, answer, answer.selected ?? 0, id));
  }

  /** @returns {Child[]} */
  function versions() {
    const { length } = turn.versions;
    /** @type {(at: number, text: string, label: string) => HTMLElement} */
    const to = (at, text, label) =>
      h(
        "button",
        {
          type: "button",
          class: "link",
          "aria-label": label,
          disabled: at < 0 || at >= length,
          on: {
            click: () => {
              session.turnTo(turn, at);
              page.draw();
            },
          },
        },
        text,
      );
    const again =
      turn.prompt === undefined && answer.status !== "streaming"
        ? h(
            "button",
            {
              type: "button",
              class: "link",
              data: { testid: "again" },
              on: { click: () => page.begin(session.again(turn)) },
            },
            "sample again",
          )
        : null;
    return [
      length > 1
        ? h(
            "span",
            { class: "versions", data: { testid: "versions" } },
            to(turn.at - 1, "‹", "version before"),
            ` ${turn.at + 1} of ${length} `,
            to(turn.at + 1, "›", "next version"),
          )
        : null,
      again,
    ];
  }

  fill();
  answer.redraw = fill;
  return node;
}

/**
 * The text of an answer as it comes, each piece marked by the score of its token once that is known.
 * @param {ChatAnswer} answer
 * @param {number} threshold
 * @returns {Child[]}
 */
function streamed(answer, threshold) {
  const { units, scores } = answer;
  let at = 0;
  return units.map(({ text, count }) => {
    const own = scores.slice(at, at + count).filter((one) => one !== null);
    at += count;
    const score = own.length ? Math.max(...own) : null;
    return h("span", { class: score === null ? "" : "scored", style: mark(score, answer, threshold) }, text);
  });
}

/**
 * The style of what has a score: a bar under it, by how far the score is from the threshold.
 * @param {number | null} score
 * @param {ChatAnswer} answer
 * @param {number} threshold
 * @returns {Record<string, string>}
 */
function mark(score, answer, threshold) {
  if (score === null) return {};
  const most = Math.max(...answer.scores.map((one) => Math.abs((one ?? threshold) - threshold)));
  const share = (score - threshold) / (most || 1);
  return { "--score": balance(share), "--height": score > threshold ? "4px" : "2px" };
}

/**
 * @param {ChatAnswer} answer
 * @param {number} threshold
 * @returns {string}
 */
function summary(answer, threshold) {
  const known = answer.scores.filter((one) => one !== null);
  if (!known.length) return `${answer.probe}: no scores yet`;
  const above = known.filter((one) => one > threshold).length;
  return `${answer.probe}: ${above} of ${known.length} tokens above ${short(threshold)}, highest ${short(Math.max(...known))}`;
}

/**
 * A token in the flow of the text, with its line breaks marked; one without text of its own is shown as a chip.
 * @param {AnswerToken} one
 * @param {number} place
 * @param {ChatAnswer} answer
 * @param {number} threshold
 * @returns {HTMLElement}
 */
function tokenNode(one, place, answer, threshold) {
  const isSelected = answer.selected === place;
  const isScored = one.score !== null;
  const classes = Object.entries({
    flow: true,
    chosen: one.isChosen,
    end: one.isEnd,
    selected: isSelected,
    scored: isScored,
  })
    .filter(([, holds]) => holds)
    .map(([name]) => name)
    .join(" ");
  const told = isScored ? `, ${answer.probe} ${short(one.score)}` : "";
  const properties = {
    role: "button",
    tabindex: place === (answer.selected ?? 0) ? "0" : "-1",
    "aria-pressed": String(isSelected),
    "aria-label": `${one.text}, token ${place}${told}`,
    style: mark(one.score, answer, threshold),
    data: { place, id: one.id, ...(isScored ? { score: one.score } : {}) },
  };
  if (!one.piece) return chip(one, { ...properties, class: classes });
  const lines = one.piece
    .split("\n")
    .flatMap((line, i) => (i ? [h("span", { class: "newline", "aria-hidden": "true" }, "⏎"), "\n", line] : [line]));
  return h("span", { ...properties, class: classes, title: `${one.text} · id ${one.id}${told}` }, lines);
}
