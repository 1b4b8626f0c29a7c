// A button that measures many sites, each alone, and stops that when it is pressed again.

import { ask, Outdated } from "glasshouse/asking.js";
import { h, put } from "glasshouse/dom.js";

const WORK = 4096; // tokens that one request passes through the model, about

/**
 * `work` gets a way to ask that throws Outdated once it was stopped; `stopped` is called where a press did that.
 * Returns a button with `stop()`.
 */
export function sweep(glass, title, work, { failed, stopped = () => {} }) {
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
    glass.page.wait(1);
    try {
      await work(async (name, body) => {
        const found = await ask(name, body);
        if (running !== own) throw new Outdated();
        return found;
      });
    } catch (error) {
      if (!(error instanceof Outdated) && running === own) failed(error.message);
    } finally {
      glass.page.wait(-1);
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
