// Requests to the server with a cache; in a saved page, lookups in the responses stored in the file.

import { served } from "glasshouse/manifest.js";

const MAX_CACHED = 200; // responses
const KEY = "glasshouse-key"; // in the storage of this tab
export const SILENT = `The server does not respond; if it was stopped, restart it with “glasshouse ${served ? "serve" : "look"}”.`;

/** The state changed while a request was in flight: its response need not be drawn. */
export class Superseded extends Error {}

export class ApiError extends Error {}

/** The server wants a key. */
export class KeyError extends ApiError {}

/** The model of this page, where several are served; empty for the first. */
export const servedModel = new URLSearchParams(location.search).get("model") ?? "";

/** The headers of every request: a key is sent by the page, never by the browser on its own. */
export function headers() {
  const key = served ? sessionStorage.getItem(KEY) : null;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** Keep the key for this tab. */
export function rememberKey(key) {
  sessionStorage.setItem(KEY, key);
}

const saved = document.getElementById("saved");
const snapshot = saved ? JSON.parse(saved.textContent) : null;

const PERMANENT = /^(model|tokenize) /; // never evicted: every page needs them
const cache = new Map();
const topics = new Map(); // by cache key: the forward pass of the request
const inFlight = new Map();

function ordered(value) {
  if (Array.isArray(value)) return value.map(ordered);
  if (value === null || typeof value !== "object") return value;
  const names = Object.keys(value)
    .filter((name) => value[name] !== undefined)
    .sort();
  return Object.fromEntries(names.map((name) => [name, ordered(value[name])]));
}

export const isSaved = snapshot !== null;
export const savedFragment = snapshot?.fragment ?? "";

/** Send a request to an endpoint. With `fresh` the response is not cached. */
export function request(name, body = {}, { fresh = false, topic = "" } = {}) {
  const text = JSON.stringify(ordered(body));
  const key = `${name} ${text}`;
  if (snapshot) return lookUp(name, key);
  if (!fresh && cache.has(key)) {
    const promise = cache.get(key);
    cache.delete(key);
    cache.set(key, promise); // most recently used last
    return promise;
  }
  const control = new AbortController();
  const promise = send(name, text, control.signal).finally(() => inFlight.delete(key));
  inFlight.set(key, { control, topic });
  if (!fresh) {
    cache.set(key, promise);
    topics.set(key, topic);
    promise.catch(() => cache.delete(key));
    if (cache.size > MAX_CACHED) cache.delete([...cache.keys()].find((one) => !PERMANENT.test(one)));
  }
  return promise;
}

async function lookUp(name, key) {
  if (key in snapshot.responses) return snapshot.responses[key];
  throw new ApiError("This saved page does not include that; open the model with “glasshouse look” to see it.");
}

async function send(name, text, signal) {
  let answer;
  try {
    answer = await fetch(`/api/${name}${servedModel ? `?model=${encodeURIComponent(servedModel)}` : ""}`, {
      method: "POST",
      headers: headers(),
      body: text,
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw new Superseded();
    throw new ApiError(SILENT);
  }
  if (answer.status === 401 && served) throw new KeyError("Enter a valid key.");
  if (answer.status === 401) throw new ApiError("The server was restarted; open the address that it printed.");
  let given;
  try {
    given = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw new Superseded();
    throw new ApiError(`The server responded with status ${answer.status}.`);
  }
  if (!answer.ok)
    throw new ApiError(given.error?.message ?? given.error ?? `The server responded with status ${answer.status}.`);
  return given;
}

/** Abort requests about any other topic. */
export function abortOthers(topics) {
  for (const { control, topic } of inFlight.values()) if (topic && !topics.has(topic)) control.abort();
}

/**
 * Completed requests for some forward passes, or for none: what a saved page needs, as
 * {forward_passes, requests: ["name index body"]}, in which each forward pass is listed once.
 */
export function requestsFor(forwardPasses) {
  const listed = [...forwardPasses];
  const requests = [];
  for (const key of cache.keys()) {
    if (inFlight.has(key) || (topics.get(key) && !forwardPasses.has(topics.get(key)))) continue;
    const [name, text] = [key.slice(0, key.indexOf(" ")), key.slice(key.indexOf(" ") + 1)];
    const { forward_pass: forwardPass, ...body } = JSON.parse(text);
    const number = forwardPass
      ? listed.findIndex((one) => JSON.stringify(ordered(JSON.parse(one))) === JSON.stringify(forwardPass))
      : -1;
    if (forwardPass && number < 0) continue;
    requests.push(`${name} ${number < 0 ? "-" : number} ${JSON.stringify(body)}`);
  }
  return { forward_passes: listed, requests };
}
