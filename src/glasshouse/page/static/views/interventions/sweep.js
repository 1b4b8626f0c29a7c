// A button that measures many sites, each alone, and stops that when it is pressed again.

import { request, Superseded } from "glasshouse/api.js";
import { h, put } from "glasshouse/dom.js";

const WORK = 4096; // tokens that one request passes through the model, about

/**
 * `work` gets a way to ask that throws Superseded once it was stopped; `stopped` is called where a press did that.
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

/** Sites in pieces, one for each request, where the text has `length` tokens. */
export function* pieces(sites, length) {
  const each = Math.max(1, Math.floor(WORK / length));
  for (let from = 0; from < sites.length; from += each) yield sites.slice(from, from + each);
}
