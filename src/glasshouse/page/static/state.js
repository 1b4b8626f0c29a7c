// The page state, kept in the URL fragment: it can be shared and is never sent to a server.

import { state as DEFAULTS } from "glasshouse/manifest.js";

const PAGES = new Set(["view", "text", "target", "appended", "masked", "edits", "patch_from", "compare_with"]); // changes that add a history entry

/** The state of a fragment. One such as #notes/A3 names a card of a view, and leaves all else as it is `now`. */
function parse(fragment, now = DEFAULTS) {
  const [, view, card] = /^#(\w+)\/(\w+)$/.exec(fragment) ?? [];
  if (view) return { ...now, view, [`${view}_card`]: card, [`${view}_value`]: undefined };
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    if (typeof DEFAULTS[name] === "string") {
      state[name] = value;
      continue;
    }
    try {
      const given = JSON.parse(value);
      if (
        name in DEFAULTS &&
        (typeof given !== typeof DEFAULTS[name] || Array.isArray(given) !== Array.isArray(DEFAULTS[name]))
      )
        continue;
      state[name] = given;
    } catch {
      if (!(name in DEFAULTS)) state[name] = value;
    }
  }
  return state;
}

function write(state) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value === undefined || JSON.stringify(value) === JSON.stringify(DEFAULTS[name])) continue;
    const plain = typeof DEFAULTS[name] === "string" || (typeof value === "string" && !isJSON(value));
    found.set(name, plain ? value : JSON.stringify(value));
  }
  return `#${found}`;
}

function isJSON(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The page state and its observers. */
export class State {
  constructor(fragment, saved = "") {
    this.values = parse(fragment, parse(saved));
    this.followers = new Set();
    addEventListener("popstate", () => this.#become(parse(location.hash, this.values)));
  }

  /** Change values, update the URL and notify observers. */
  set(changes) {
    const values = { ...this.values, ...changes };
    const changed = difference(this.values, values);
    if (changed.size === 0) return;
    const step = [...changed].some((name) => PAGES.has(name));
    try {
      history[step ? "pushState" : "replaceState"](null, "", write(values));
    } catch {
      // an embedded page may not change its URL
    }
    this.#become(values);
  }

  follow(act) {
    this.followers.add(act);
  }

  #become(values) {
    const changed = difference(this.values, values);
    this.values = values;
    for (const act of this.followers) act(changed);
  }

  /** Set initial values without a history entry. */
  begin(changes) {
    this.values = { ...this.values, ...changes };
    try {
      history.replaceState(null, "", write(this.values));
    } catch {
      // as above
    }
  }

  /** The URL fragment of the state with some changes. */
  fragmentOf(changes) {
    return write({ ...this.values, ...changes });
  }
}

function difference(old, now) {
  const names = new Set([...Object.keys(old), ...Object.keys(now)]);
  return new Set([...names].filter((name) => JSON.stringify(old[name]) !== JSON.stringify(now[name])));
}
