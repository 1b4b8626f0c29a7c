// A button that measures many sites one at a time, and stops when clicked again.

import { request, Superseded } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";

const WORK = 4096; // approximate tokens per request

/**
 * `work` gets a request function that throws Superseded once stopped; `stopped` is called when a click stops it.
 * Returns a button with `stop()`.
 */
export function sweep(context, title, work, { failed, stopped = () => {} }) {
  let running = null;
  const button = h("button", { type: "button", class: "act first", on: { click: press } }, title);
  button.stop = () => {
    running = null;
    put(button, title);
  };

  function press() {
    if (running) {
      button.stop();
      stopped();
    } else start();
  }

  async function start() {
    const own = (running = {});
    put(button, "stop");
    context.page.wait(1);
    try {
      await work(async (name, body) => {
        const found = await request(name, body);
        if (running !== own) throw new Superseded();
        return found;
      });
    } catch (error) {
      if (!(error instanceof Superseded) && running === own) failed(error.message);
    } finally {
      context.page.wait(-1);
      if (running === own) button.stop();
    }
  }

  return button;
}

/** Chunks of sites, one per request, for a text of `length` tokens. */
export function* chunks(sites, length) {
  const each = Math.max(1, Math.floor(WORK / length));
  for (let from = 0; from < sites.length; from += each) yield sites.slice(from, from + each);
}
