// Questions to the server, each asked once; or, in a saved page, looked up among the answers that it holds.

const MOST = 200; // answers kept
export const SILENT = "The server does not answer; was it stopped? Start it again with “glasshouse look”.";

/** The state moved on while an answer was under way: whoever waited for it need not draw. */
export class Outdated extends Error {}

export class Refused extends Error {}

const saved = document.getElementById("saved");
const held = saved ? JSON.parse(saved.textContent) : null;

const LASTING = /^(model|tokens) /; // what every page needs
const known = new Map();
const topics = new Map(); // of each key, the question it is about
const underway = new Map();

function ordered(value) {
  if (Array.isArray(value)) return value.map(ordered);
  if (value === null || typeof value !== "object") return value;
  const names = Object.keys(value).filter((name) => value[name] !== undefined).sort();
  return Object.fromEntries(names.map((name) => [name, ordered(value[name])]));
}

export const isSaved = held !== null;
export const savedFragment = held?.fragment ?? "";

/** Ask by name. With `fresh` the answer is not remembered. */
export function ask(name, body = {}, { fresh = false, topic = "" } = {}) {
  const text = JSON.stringify(ordered(body));
  const key = `${name} ${text}`;
  if (held) return lookUp(name, key);
  if (!fresh && known.has(key)) {
    const promise = known.get(key);
    known.delete(key);
    known.set(key, promise); // the latest used stands last
    return promise;
  }
  const control = new AbortController();
  const promise = send(name, text, control.signal).finally(() => underway.delete(key));
  underway.set(key, { control, topic });
  if (!fresh) {
    known.set(key, promise);
    topics.set(key, topic);
    promise.catch(() => known.delete(key));
    if (known.size > MOST) known.delete([...known.keys()].find((one) => !LASTING.test(one)));
  }
  return promise;
}

async function lookUp(name, key) {
  if (key in held.answers) return held.answers[key];
  throw new Refused("This saved page does not hold that; open the model with “glasshouse look” to see it.");
}

async function send(name, text, signal) {
  let answer;
  try {
    answer = await fetch(`/api/${name}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: text,
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw new Outdated();
    throw new Refused(SILENT);
  }
  if (answer.status === 401) throw new Refused("The server was started anew; open the address that it printed.");
  let given;
  try {
    given = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw new Outdated();
    throw new Refused(`The server answered with status ${answer.status}.`);
  }
  if (!answer.ok) throw new Refused(given.error ?? `The server answered with status ${answer.status}.`);
  return given;
}

/** Let go of what was asked about anything but these topics. */
export function dropOthers(topics) {
  for (const { control, topic } of underway.values()) if (topic && !topics.has(topic)) control.abort();
}

/**
 * What was asked about some questions, or about none, and answered: what a saved page needs, as
 * {questions, asked: ["name number body"]}, in which a question stands once, however long its text is.
 */
export function askedAbout(questions) {
  const listed = [...questions];
  const asked = [];
  for (const key of known.keys()) {
    if (underway.has(key) || (topics.get(key) && !questions.has(topics.get(key)))) continue;
    const [name, text] = [key.slice(0, key.indexOf(" ")), key.slice(key.indexOf(" ") + 1)];
    const { question, ...body } = JSON.parse(text);
    const number = question ? listed.findIndex((one) => JSON.stringify(ordered(JSON.parse(one))) === JSON.stringify(question)) : -1;
    if (question && number < 0) continue;
    asked.push(`${name} ${number < 0 ? "-" : number} ${JSON.stringify(body)}`);
  }
  return { questions: listed, asked };
}
