// The API of the server that this page belongs to: what it serves, streamed answers, and answers that open.

import { headers } from "glasshouse/access.js";
import { ApiError, KeyError, SILENT } from "glasshouse/api.js";

const PATIENCE = 20; // tries until an answer that was stopped can be opened
const PAUSE = 100; // milliseconds between them

/**
 * @param {string} path
 * @param {object} [body]
 * @param {AbortSignal} [signal]
 * @returns {Promise<Response>}
 */
async function send(path, body, signal) {
  let answer;
  try {
    answer = await fetch(
      path,
      body
        ? { method: "POST", headers: headers(), body: JSON.stringify(body), signal }
        : { headers: headers(), signal },
    );
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(SILENT);
  }
  if (answer.status === 401) throw new KeyError("Enter a valid key.");
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new ApiError(said?.error?.message ?? `The server responded with status ${answer.status}.`);
}

/**
 * The address of the page of a model.
 * @param {string} model
 * @param {string} fragment
 * @returns {string}
 */
export function addressOf(model, fragment) {
  return `/?model=${encodeURIComponent(model)}${fragment}`;
}

/**
 * What the server and its models can do.
 * @returns {Promise<{ version: string, models: ServedModel[] }>}
 */
export async function props() {
  return (await send("/props")).json();
}

/**
 * How many tokens may follow the prompt of a request; none where it does not fit.
 * @param {Pick<CompletionRequest, "model" | "messages" | "prompt">} request
 * @param {AbortSignal} signal
 * @returns {Promise<number>}
 */
export async function roomAfter({ model, messages, prompt }, signal) {
  if (Array.isArray(prompt)) return Infinity; // whoever has the ids has counted them
  const { count, max_model_len: most } = await (
    await send("/tokenize", messages ? { model, messages } : { model, prompt }, signal)
  ).json();
  return most - count;
}

/**
 * Send a request and call back with each event of its answer.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {(event: StreamEvent) => void} act
 * @returns {Promise<void>}
 */
export async function stream(path, body, signal, act) {
  const answer = await send(path, { ...body, stream: true }, signal);
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop() ?? "";
    for (const line of events) {
      const data = line.slice(line.indexOf("data: ") + 6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      act(event);
    }
  }
}

/**
 * An answer with what each of its tokens was drawn from; its text from the position `start` on.
 * @param {string} id
 * @param {{ start?: number, patient?: boolean }} [options]
 * @returns {Promise<OpenedAnswer>}
 */
export async function openAnswer(id, { start, patient = false } = {}) {
  const path = `/v1/answers/${encodeURIComponent(id)}${start === undefined ? "" : `?start=${start}`}`;
  for (let tries = patient ? PATIENCE : 1; ; tries -= 1) {
    try {
      return await (await send(path)).json();
    } catch (error) {
      if (tries <= 1 || error instanceof KeyError) throw error;
    }
    await new Promise((go) => setTimeout(go, PAUSE)); // the server has yet to notice that its client left
  }
}

/**
 * Where two answers part, and how much their models differ on the first.
 * @param {string} a
 * @param {string} b
 * @returns {Promise<AnswerComparison>}
 */
export async function compareAnswers(a, b) {
  return (await send("/v1/answers/comparison", { a, b })).json();
}
