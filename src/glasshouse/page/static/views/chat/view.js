// Chat with the models of this server: any token of an answer opens, and can be continued from.

import { h, put } from "glasshouse/dom.js";
import { panel, placeholder } from "glasshouse/widgets.js";
import { answerNode } from "glasshouse/views/chat/answer.js";
import { parting } from "glasshouse/views/chat/parting.js";
import { theSession } from "glasshouse/views/chat/session.js";
import { settings } from "glasshouse/views/chat/settings.js";

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  /** @type {ChatSession | null} */
  let session = null; // there once the server has said what it has
  const talk = h("div", { class: "talk", data: { testid: "talk" } });
  const models = h("div", { class: "controls", role: "group", "aria-label": "models" });
  const fields = h("div", { class: "view" });
  const box = h("textarea", {
    rows: 3,
    "aria-label": "message",
    spellcheck: "false",
    data: { testid: "message" },
    on: {
      keydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
      },
    },
  });
  const send = h("button", { class: "act first", data: { testid: "send" } }, "Send");
  const stop = h(
    "button",
    { type: "button", class: "act", data: { testid: "stop" }, on: { click: () => session?.stop() } },
    "Stop",
  );
  const fresh = h(
    "button",
    {
      type: "button",
      class: "act",
      data: { testid: "new" },
      on: {
        click: () => {
          session?.clear();
          context.set({ answer: undefined });
          page.draw();
        },
      },
    },
    "New chat",
  );
  const composer = h(
    "form",
    { class: "composer", on: { submit } },
    box,
    h("div", { class: "controls" }, send, stop, fresh),
  );
  const opener = h("input", {
    type: "text",
    "aria-label": "id of an answer",
    placeholder: "chatcmpl-… or cmpl-…",
    data: { testid: "open-id" },
  });
  const open = h(
    "form",
    {
      class: "controls",
      on: {
        submit: (event) => {
          event.preventDefault();
          if (opener.value.trim()) context.set({ answer: opener.value.trim() });
        },
      },
    },
    h("span", { class: "name" }, "open an answer"),
    opener,
    h("button", { class: "act", data: { testid: "open" } }, "Open"),
  );
  const trouble = h("p", { class: "trouble", role: "alert", hidden: true });
  root.classList.add("chat");
  root.append(
    trouble,
    talk,
    composer,
    h(
      "details",
      { class: "chat-settings" },
      h("summary", {}, "Settings, and an answer by its id"),
      panel("Sampling", "For the next answers; those that are there keep theirs.", fields, open),
    ),
  );

  /** @type {ChatPage} */
  const page = {
    /** Begin an answer, and draw the conversation with it. */
    begin(answer) {
      answer.run((changed) => {
        changed.redraw?.();
        if (changed.status !== "streaming") session?.redraw();
      });
      page.draw();
    },

    draw() {
      const now = session;
      if (!now) return;
      send.disabled = now.isBusy;
      stop.hidden = !now.isBusy;
      const { shown } = now;
      box.placeholder = shown.every((one) => one.chats) ? "Message" : "Text to continue";
      const columns = shown.map((model) => ({ model, turns: now.turnsOf(model.id) }));
      const rounds = [...new Set(columns.flatMap(({ turns }) => turns.map((turn) => turn.round)))].sort(
        (a, b) => a - b,
      );
      if (!rounds.length)
        put(
          talk,
          placeholder(
            `${shown.length > 1 ? "The models answer" : "The model answers"} here. Click a token of an answer to see what it was drawn from, to look into the model at that moment, or to go on with another one.`,
          ),
        );
      else
        put(
          talk,
          rounds.map((round) =>
            row(
              now,
              columns.map(({ model, turns }) => ({ model, turn: turns.find((turn) => turn.round === round) })),
            ),
          ),
        );
    },
  };

  /**
   * One turn: what was asked, and the answers of the chosen models side by side.
   * @param {ChatSession} now
   * @param {{ model: ServedModel, turn: ChatTurn | undefined }[]} cells
   * @returns {HTMLElement}
   */
  function row(now, cells) {
    const asked = cells.map(({ turn }) => turn).filter((turn) => turn !== undefined);
    const isSame = asked.every((turn) => turn.user === asked[0].user && turn.prompt === undefined);
    const ended = asked.map((turn) => turn.versions[turn.at]).filter((one) => one.tokens && one.id);
    const answers = cells.map(({ model, turn }) =>
      h(
        "div",
        { class: "cell" },
        cells.length > 1 && turn ? h("h3", {}, model.id) : null,
        turn && !isSame ? question(turn) : null,
        turn ? answerNode(context, now, turn, page) : null,
      ),
    );
    return h(
      "section",
      { class: "turn" },
      isSame ? question(asked[0]) : null,
      h("div", { class: "cells", style: { "--cells": cells.length } }, answers),
      ended.length > 1 ? parting(ended) : null,
    );
  }

  /**
   * @param {ChatTurn} turn
   * @returns {HTMLElement}
   */
  function question(turn) {
    return turn.prompt === undefined
      ? h("p", { class: "asked", data: { testid: "asked" } }, turn.user)
      : h(
          "details",
          { class: "asked", open: turn.prompt.length < 400, data: { testid: "asked" } },
          h("summary", {}, `Prompt, ${turn.n_prompt} tokens`),
          h("pre", {}, turn.prompt),
        );
  }

  /** @param {Event} event */
  function submit(event) {
    event.preventDefault();
    const text = box.value;
    if (!text || !session || session.isBusy) return;
    box.value = "";
    for (const answer of session.ask(text)) page.begin(answer);
    talk.lastElementChild?.scrollIntoView({ block: "nearest" });
  }

  /**
   * Which models answer: one of them, or several side by side.
   * @param {ChatSession} now
   */
  function drawModels(now) {
    if (now.models.length < 2) return;
    put(
      models,
      h("span", { class: "name" }, "models"),
      now.models.map(({ id }) => {
        const tick = h("input", {
          type: "checkbox",
          on: {
            change: () => {
              if (tick.checked) now.chosen.add(id);
              else if (now.chosen.size > 1) now.chosen.delete(id);
              else tick.checked = true; // one at least
              page.draw();
            },
          },
        });
        tick.checked = now.chosen.has(id);
        return h("label", { class: "tick" }, tick, id);
      }),
    );
    if (!models.parentNode) talk.before(models);
  }

  return {
    async draw(changed) {
      if (!session) {
        session = await theSession(context.model.name);
        session.redraw = () => page.draw(); // of the view that is there when an answer ends
        put(fields, settings(session));
      } else if (!changed.has("answer")) return;
      trouble.hidden = true;
      if (context.state.answer) {
        try {
          await session.open(context.state.answer);
        } catch (error) {
          put(trouble, error.message);
          trouble.hidden = false;
        }
      }
      drawModels(session);
      page.draw();
    },
  };
}
