// Requests to the server with a cache; in a saved page, lookups in the responses stored in the file; in a live page,
// requests to the model inside it.

import { headers } from "glasshouse/access.js";
import { ask, isLive, liveEndpoints } from "glasshouse/live_model.js";
import { served } from "glasshouse/manifest.js";

const MAX_CACHED = 200; // responses
export const SILENT = `The server does not respond; if it was stopped, restart it with “glasshouse ${served ? "serve" : "look"}”.`;

/** The state changed while a request was in flight: its response need not be drawn. */
export class Superseded extends Error {}

export class ApiError extends Error {}

/** A saved page has no response to a request. */
export class NotSaved extends ApiError {}

/** The server wants a key. */
export class KeyError extends ApiError {}

/** The model of this page, where several are served; empty for the first. */
export const servedModel = new URLSearchParams(location.search).get("model") ?? "";

const saved = document.getElementById("saved");
/** @type {{ fragment: string, selection: string[], responses: Record<string, any> } | null} */
const snapshot = saved ? JSON.parse(saved.textContent) : null;

const PERMANENT = /^(model|tokenize) /; // never evicted: every page needs them
/** @type {Map<string, Promise<any>>} */
const cache = new Map();
/** @type {Map<string, string>} */
const topics = new Map(); // by cache key: the forward pass of the request
/** @type {Map<string, { control: AbortController, topic: string }>} */
const inFlight = new Map();

/**
 * The same value with the keys of all objects in order, as Python writes them.
 * @param {unknown} value
 * @returns {unknown}
 */
function ordered(value) {
  if (Array.isArray(value)) return value.map(ordered);
  if (value === null || typeof value !== "object") return value;
  const given = Object.entries(value).filter(([, one]) => one !== undefined);
  return Object.fromEntries(given.sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, one]) => [name, ordered(one)]));
}

/** Whether the page has the responses that it was saved with, and no model. */
export const isSaved = snapshot !== null && !isLive;
export const savedFragment = snapshot?.fragment ?? "";
/** Whether another "token", or another "head", can be selected; in a saved page these may be too many. */
export const canSelect = (/** @type {string} */ what) => !isSaved || snapshot?.selection.includes(what);
/** Why a control of a saved page, or a view of a live page, is disabled. */
export const NEEDS_SERVER = `needs the running page: ${openedBy(snapshot?.responses["model {}"])}`;

/**
 * How the page of a model is opened.
 * @param {Model | undefined} model
 * @returns {string}
 */
function openedBy(model) {
  if (!model || model.in_memory) return "gh.look(model, tok).open()";
  return `glasshouse look ${/^[\w./:@~-]+$/.test(model.name) ? model.name : `'${model.name}'`}`;
}

/**
 * Whether there are responses of an endpoint: always where there is a server.
 * @param {Endpoint} name
 * @returns {boolean}
 */
export function answers(name) {
  if (isLive) return liveEndpoints.has(name);
  return !snapshot || Object.keys(snapshot.responses).some((key) => key.startsWith(`${name} `));
}

/**
 * Whether there is a response to a request: always where there is a server.
 * @param {Endpoint} name
 * @param {RequestBody} body
 * @returns {boolean}
 */
export function isAvailable(name, body) {
  if (isLive && liveEndpoints.has(name)) return true;
  return !snapshot || `${name} ${JSON.stringify(ordered(body))}` in snapshot.responses;
}

/**
 * The requests of an endpoint that the page was saved with the responses to.
 * @param {Endpoint} name
 * @returns {RequestBody[]}
 */
export function savedRequests(name) {
  const own = Object.keys(snapshot?.responses ?? {}).filter((key) => key.startsWith(`${name} `));
  return own.map((key) => JSON.parse(key.slice(name.length + 1)));
}

/**
 * Send a request to an endpoint. With `fresh` the response is not cached.
 * @template {Endpoint} K
 * @param {K} name
 * @param {RequestBody} [body]
 * @param {RequestOptions} [options]
 * @returns {Promise<Responses[K]>}
 */
export function request(name, body = {}, { fresh = false, topic = "" } = {}) {
  const text = JSON.stringify(ordered(body));
  const key = `${name} ${text}`;
  if (snapshot && (!isLive || key in snapshot.responses)) return lookUp(key);
  const cached = fresh ? undefined : cache.get(key);
  if (cached) {
    cache.delete(key);
    cache.set(key, cached); // most recently used last
    return cached;
  }
  const control = new AbortController();
  const promise = send(name, text, control.signal).finally(() => inFlight.delete(key));
  inFlight.set(key, { control, topic });
  if (!fresh) {
    cache.set(key, promise);
    topics.set(key, topic);
    promise.catch(() => cache.delete(key));
    const oldest = cache.size > MAX_CACHED ? [...cache.keys()].find((one) => !PERMANENT.test(one)) : undefined;
    if (oldest !== undefined) cache.delete(oldest);
  }
  return promise;
}

/**
 * @param {string} key
 * @returns {Promise<any>}
 */
async function lookUp(key) {
  if (snapshot && key in snapshot.responses) return snapshot.responses[key];
  throw new NotSaved(`This saved page does not include that: it ${NEEDS_SERVER}`);
}

/**
 * @param {string} name
 * @param {string} text
 * @param {AbortSignal} signal
 * @returns {Promise<any>}
 */
async function send(name, text, signal) {
  if (isLive) return askModel(name, text, signal);
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

/**
 * @param {string} name
 * @param {string} text
 * @param {AbortSignal} signal
 * @returns {Promise<any>}
 */
async function askModel(name, text, signal) {
  if (!liveEndpoints.has(name)) throw new ApiError(`This file has no model code for that: it ${NEEDS_SERVER}`);
  try {
    return await ask(name, JSON.parse(text));
  } catch (error) {
    throw signal.aborted ? new Superseded() : new ApiError(error.message);
  }
}

/**
 * Abort requests about any other topic.
 * @param {Set<string>} topics
 */
export function abortOthers(topics) {
  for (const { control, topic } of inFlight.values()) if (topic && !topics.has(topic)) control.abort();
}

/**
 * Completed requests for some forward passes, or for none: what a saved page needs, as
 * {forward_passes, requests: ["name index body"]}, in which each forward pass is listed once.
 * @param {Set<string>} forwardPasses
 * @returns {{ forward_passes: string[], requests: string[] }}
 */
export function requestsFor(forwardPasses) {
  const listed = [...forwardPasses];
  const requests = [];
  for (const key of cache.keys()) {
    const topic = topics.get(key);
    if (inFlight.has(key) || (topic && !forwardPasses.has(topic))) continue;
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
