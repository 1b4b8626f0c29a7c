// The model inside a live page: a worker, made from scripts in the file, that answers as a server would.

const file = document.getElementById("live");
/** @type {{ script: string, endpoints: string[], views: string[], file: LiveFile } | null} */
const given = file ? JSON.parse(file.textContent) : null;

/** Whether this page has a model inside that runs in the browser. */
export const isLive = given !== null;
/** The endpoints that it answers, and the views that need no others. */
export const liveEndpoints = new Set(given?.endpoints);
export const liveViews = new Set(given?.views);

/** @type {Map<number, { resolve: (given: any) => void, reject: (error: Error) => void }>} */
const waiting = new Map();
let asked = 0;
/** @type {Worker | undefined} */
let worker;

function start() {
  if (!given) throw new Error("this page has no model inside.");
  const made = new Worker(URL.createObjectURL(new Blob([given.script], { type: "text/javascript" })));
  made.addEventListener("message", ({ data: { number, given: response, error } }) => {
    const one = waiting.get(number);
    waiting.delete(number);
    if (error === undefined) one?.resolve(response);
    else one?.reject(new Error(error));
  });
  made.addEventListener("error", ({ message }) => {
    for (const one of waiting.values())
      one.reject(new Error(message || "the browser does not run the model's worker."));
    waiting.clear();
  });
  worker = made;
  ask("load", { file: given.file, weights: document.getElementById("weights")?.textContent }).catch(() => {});
  document.getElementById("weights")?.remove();
}

/**
 * @param {string} name
 * @param {unknown} body
 * @returns {Promise<any>}
 */
export function ask(name, body) {
  if (!worker) start();
  asked += 1;
  const number = asked;
  return new Promise((resolve, reject) => {
    waiting.set(number, { resolve, reject });
    worker?.postMessage({ number, name, body });
  });
}
