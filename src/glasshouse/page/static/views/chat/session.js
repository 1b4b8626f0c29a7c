// The conversations of this tab, one for each model: what was asked, the answers, and their branches.

import { ApiError } from "glasshouse/api.js";
import { openAnswer, props, roomAfter, stream } from "glasshouse/server.js";

const LONGEST = 256; // tokens of an answer, unless that is more than half of what the model takes

/** @type {Session | null} */
let session = null;

/**
 * The session of this tab, which outlives the view.
 * @param {string} model
 * @returns {Promise<Session>}
 */
export async function theSession(model) {
  session ??= new Session(await props(), model);
  return session;
}

export class Session {
  /**
   * @param {{ models: ServedModel[] }} found
   * @param {string} model
   */
  constructor(found, model) {
    this.models = found.models.filter((one) => one.generates);
    this.chosen = new Set([model]);
    const most = Math.min(...this.models.map((one) => one.max_len));
    this.settings = {
      temperature: 1,
      top_p: 1,
      top_k: 0,
      max_tokens: Math.max(1, Math.min(LONGEST, Math.floor(most / 2))),
    };
    this.most = most;
    this.vectors = [...new Set(this.models.flatMap((one) => Object.keys(one.steering)))];
    /** @type {Record<string, number>} */
    this.steer = {}; // scale by vector
    this.probes = [...new Set(this.models.flatMap((one) => Object.keys(one.probes)))];
    this.probe = this.probes[0] ?? ""; // whose scores are drawn, of the next answers; "" for none
    this.threshold = 0;
    /** @type {Map<string, ChatTurn[]>} */
    this.conversations = new Map(this.models.map((one) => [one.id, []])); // turns by model
    this.redraw = () => {}; // of the view that is there when an answer ends
    this.round = 0; // that all chosen models were asked in
  }

  /**
   * The turns of the conversation with a model.
   * @param {string} model
   * @returns {ChatTurn[]}
   */
  turnsOf(model) {
    return this.conversations.get(model) ?? [];
  }

  /**
   * The chosen models, in the order of the server.
   * @returns {ServedModel[]}
   */
  get shown() {
    return this.models.filter((one) => this.chosen.has(one.id));
  }

  /** @returns {Answer[]} */
  get answers() {
    return [...this.conversations.values()].flat().flatMap((turn) => turn.versions);
  }

  /** @returns {boolean} */
  get isBusy() {
    return this.answers.some((one) => one.status === "streaming");
  }

  clear() {
    this.stop();
    for (const turns of this.conversations.values()) turns.length = 0;
  }

  stop() {
    for (const one of this.answers) one.control.abort();
  }

  /**
   * The fields of a request that say how to sample a model, how to steer it by the vectors that it has, and which
   * probe scores its tokens.
   * @param {ServedModel} model
   * @param {number} [seed]
   * @returns {Pick<CompletionRequest, "temperature" | "top_p" | "top_k" | "seed" | "steer" | "probes">}
   */
  sampling(model, seed = Math.floor(Math.random() * 2 ** 31)) {
    const { temperature, top_p, top_k } = this.settings;
    const steer = Object.fromEntries(
      Object.entries(this.steer).filter(([name, scale]) => scale && name in model.steering),
    );
    return {
      temperature,
      top_p,
      seed,
      ...(top_k ? { top_k } : {}),
      ...(Object.keys(steer).length ? { steer } : {}),
      ...(this.probe in model.probes ? { probes: [this.probe], return_token_ids: true } : {}),
    };
  }

  /**
   * Ask every chosen model; returns the answers, which are not begun.
   * @param {string} text
   * @returns {Answer[]}
   */
  ask(text) {
    this.round += 1;
    const { seed } = this.sampling(this.shown[0]); // one for all, so that models differ by themselves
    return this.shown.map((model) => {
      const turns = this.turnsOf(model.id);
      if (turns.some((turn) => turn.prompt !== undefined)) turns.length = 0; // an answer that was opened has no messages before it
      /** @type {ChatTurn} */
      const turn = { round: this.round, user: text, versions: [], at: 0 };
      turns.push(turn);
      const { max_tokens } = this.settings;
      const body = {
        model: model.id,
        ...this.sampling(model, seed),
        max_tokens,
        ...(model.chats ? { messages: messages(turns) } : { prompt: text }),
      };
      return this.add(turn, new Answer(model, model.chats ? "/v1/chat/completions" : "/v1/completions", body));
    });
  }

  /**
   * Sample another answer to the same prompt.
   * @param {ChatTurn} turn
   * @returns {Answer}
   */
  again(turn) {
    const { model, path, body, parent } = turn.versions[turn.at];
    return this.add(
      turn,
      new Answer(model, path, { ...body, steer: undefined, probes: undefined, ...this.sampling(model) }, parent),
    );
  }

  /**
   * Continue from a token of an answer, with another one in its place.
   * @param {ChatTurn} turn
   * @param {Answer} answer
   * @param {number} place
   * @param {number} id
   * @returns {Answer}
   */
  branch(turn, answer, place, id) {
    const { model } = answer;
    const opened = /** @type {OpenedAnswer} */ (answer.opened); // its tokens can be chosen from since it is opened
    const position = opened.start + place;
    const prompt = [...[...opened.prompt, ...opened.output.map((one) => one.id)].slice(0, position), id];
    const max_tokens = Math.max(1, Math.min(this.settings.max_tokens, model.max_len - prompt.length));
    const { stop, stop_token_ids } = opened;
    return this.add(
      turn,
      new Answer(
        model,
        "/v1/completions",
        { model: model.id, ...this.sampling(model), max_tokens, prompt, stop, stop_token_ids },
        { answer, place, id },
      ),
    );
  }

  /**
   * @param {ChatTurn} turn
   * @param {Answer} answer
   * @returns {Answer}
   */
  add(turn, answer) {
    const turns = this.turnsOf(answer.model.id);
    const now = turns.indexOf(turn);
    if (turn.versions.length) turn.versions[turn.at].rest = turns.splice(now + 1); // what followed belongs to that version
    turn.versions.push(answer);
    turn.at = turn.versions.length - 1;
    return answer;
  }

  /**
   * Show another version of an answer, and what followed it.
   * @param {ChatTurn} turn
   * @param {number} at
   */
  turnTo(turn, at) {
    const turns = this.turnsOf(turn.versions[at].model.id);
    turn.versions[turn.at].rest = turns.splice(turns.indexOf(turn) + 1);
    turn.at = at;
    turns.push(...turn.versions[at].rest);
  }

  /**
   * Open an answer of the server by its id, unless it is here.
   * @param {string} id
   * @returns {Promise<void>}
   */
  async open(id) {
    if (this.answers.some((one) => one.id === id)) return;
    const opened = await openAnswer(id, { start: 0 });
    const model = this.models.find((one) => one.id === opened.model);
    if (!model) throw new ApiError(`The model ${opened.model} of this answer is not served any more.`);
    const answer = new Answer(model, "", { model: model.id, ...this.sampling(model), max_tokens: 0 });
    answer.id = id;
    answer.status = "done";
    /** @type {ChatTurn} */
    const turn = {
      round: 0,
      user: null,
      prompt: opened.pieces.slice(0, opened.prompt.length).join(""),
      n_prompt: opened.prompt.length,
      versions: [answer],
      at: 0,
    };
    if (opened.source.length)
      Object.assign(turn, { prompt: opened.state?.text ?? opened.source.join(" "), n_prompt: opened.source.length });
    opened.pieces.splice(0, opened.prompt.length);
    answer.take({ ...opened, start: opened.prompt.length });
    this.turnsOf(opened.model).splice(0, Infinity, turn);
    this.chosen = new Set([opened.model]);
  }
}

/**
 * @param {ChatTurn[]} turns
 * @returns {ChatMessage[]}
 */
function messages(turns) {
  return turns.flatMap(({ user, versions, at }) => {
    const answer = versions[at];
    if (user === null) return []; // an answer that was opened by its id
    if (!answer) return [{ role: "user", content: user }];
    return answer.text
      ? [
          { role: "user", content: user },
          { role: "assistant", content: answer.text },
        ]
      : [];
  });
}

/** An answer: streamed first, and opened once it has ended. `parent` is the token of another that it branches from. */
export class Answer {
  /**
   * @param {ServedModel} model
   * @param {string} path
   * @param {CompletionRequest} body
   * @param {BranchPoint | null} [parent]
   */
  constructor(model, path, body, parent = null) {
    this.model = model;
    this.path = path;
    this.body = body;
    this.parent = parent;
    this.id = "";
    /** @type {"streaming" | "done" | "stopped" | "failed"} */
    this.status = "streaming";
    this.error = "";
    /** @type {string | null} */
    this.finish = null;
    /** @type {OpenedAnswer | null} */
    this.opened = null;
    /** @type {AnswerToken[] | null} */
    this.tokens = null; // there once it is opened
    /** @type {(number | null)[]} */
    this.scores = []; // of its own tokens, by the probe of its request: that of a token comes with the next
    /** @type {{ text: string, count: number }[]} */
    this.units = []; // as they were streamed: mostly a token each
    /** @type {number | null} */
    this.selected = null; // the token that is open
    /** @type {ChatTurn[]} */
    this.rest = []; // the turns that followed this version
    /** @type {(() => void) | null} */
    this.redraw = null;
    this.control = new AbortController();
    this.probe = body.probes?.[0] ?? "";
    this.text = parent ? parent.answer.textBefore(parent.place) : "";
  }

  /**
   * The text of the tokens before one.
   * @param {number} place
   * @returns {string}
   */
  textBefore(place) {
    const before = (this.tokens ?? []).slice(0, place);
    return before.map((one) => one.piece).join("");
  }

  /**
   * @param {(answer: Answer) => void} changed
   * @returns {Promise<void>}
   */
  async run(changed) {
    try {
      const room = this.model.kind === "encoder-decoder" ? Infinity : await roomAfter(this.body, this.control.signal);
      if (room > 0) this.body.max_tokens = Math.min(this.body.max_tokens, room);
      await stream(this.path, this.body, this.control.signal, (event) => {
        this.id = event.id;
        const [choice] = event.choices;
        const text = choice?.delta?.content ?? choice?.text ?? "";
        this.text += text;
        this.units.push({ text, count: choice?.token_ids?.length ?? 0 });
        this.scores.push(...(choice?.scores?.[this.probe] ?? []));
        this.finish = choice?.finish_reason ?? this.finish;
        changed(this);
      });
      this.status = "done";
    } catch (error) {
      this.status = this.control.signal.aborted ? "stopped" : "failed";
      this.error = this.control.signal.aborted ? "" : error.message;
    }
    if (this.id) {
      try {
        this.take(
          await openAnswer(this.id, { start: this.parent?.answer.opened?.start, patient: this.status === "stopped" }),
        );
      } catch (error) {
        this.error = error.message;
      }
    }
    changed(this);
  }

  /**
   * Take the tokens of an opened answer; those before a branch were drawn where it began.
   * @param {OpenedAnswer} opened
   */
  take(opened) {
    this.opened = opened;
    this.probe ||= Object.keys(opened.scores)[0] ?? "";
    this.scores = opened.scores[this.probe] ?? [];
    this.finish = opened.finish_reason;
    const ids = [...opened.prompt, ...opened.output.map((one) => one.id)].slice(opened.start);
    this.tokens = ids.map((id, i) => {
      const drawn = opened.output[opened.start + i - opened.prompt.length];
      const before = this.parent?.answer.tokens?.[i];
      const score = this.scores[opened.start + i - opened.prompt.length];
      return {
        ...this.describe(id),
        piece: opened.pieces[i],
        drawn: drawn ?? before?.drawn ?? null,
        score: score ?? null,
        isChosen: drawn ? false : i === this.parent?.place || Boolean(before?.isChosen),
        tables: drawn ? opened.tokens : (before?.tables ?? opened.tokens),
      };
    });
    this.text = opened.pieces.join("");
    if (opened.end)
      this.tokens.push({
        ...this.describe(opened.end.id),
        piece: "",
        drawn: opened.end,
        score: null,
        isEnd: true,
        isChosen: false,
        tables: opened.tokens,
      });
  }

  /**
   * @param {number} id
   * @returns {Token}
   */
  describe(id) {
    return this.opened?.tokens[id] ?? { id, text: String(id) };
  }
}
