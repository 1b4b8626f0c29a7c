// A button that measures many sites one at a time, and stops when clicked again.

import { request, Superseded } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";

const WORK = 4096; // approximate tokens per request

/**
 * `work` gets a request function that throws Superseded once stopped; `stopped` is called when a click stops it.
 * Returns a button with `stop()`.
 * @param {ViewContext} context
 * @param {string} title
 * @param {(request: SweepRequest) => Promise<void>} work
 * @param {{ failed: (message: string) => void, stopped?: () => void }} options
 * @returns {HTMLButtonElement & { stop: () => void }}
 */
export function sweep(context, title, work, { failed, stopped = () => {} }) {
  /** @type {object | null} */
  let running = null;
  const button = h("button", { type: "button", class: "act first", on: { click: press } }, title);
  const stop = () => {
    running = null;
    put(button, title);
  };

  function press() {
    if (running) {
      stop();
      stopped();
    } else start();
  }

  async function start() {
    const own = {};
    running = own;
    put(button, "stop");
    context.page.wait(1);
    try {
      await work(async (name, body, options) => {
        const found = await request(name, body, options);
        if (running !== own) throw new Superseded();
        return found;
      });
    } catch (error) {
      if (!(error instanceof Superseded) && running === own) failed(error.message);
    } finally {
      context.page.wait(-1);
      if (running === own) stop();
    }
  }

  return Object.assign(button, { stop });
}

/**
 * Chunks of sites, one per request, for a text of `length` tokens.
 * @template T
 * @param {T[]} sites
 * @param {number} length
 * @returns {Generator<T[]>}
 */
export function* chunks(sites, length) {
  const each = Math.max(1, Math.floor(WORK / length));
  for (let from = 0; from < sites.length; from += each) yield sites.slice(from, from + each);
}
