// The page state, kept in the URL fragment: it can be shared and is never sent to a server.

import { state as DEFAULTS } from "glasshouse/manifest.js";

/** @type {Record<string, any>} */
const BY_NAME = DEFAULTS; // for names that come from a URL

const PAGES = new Set(["view", "text", "target", "appended", "masked", "edits", "patch_from", "compare_with"]); // changes that add a history entry
const CARD = /^#(\w+)\/(\w+)$/; // a link to a card of a view

/**
 * The state of a fragment. One such as #notes/A3 names a card of a view, and leaves all else as it is `now`.
 * @param {string} fragment
 * @param {PageState} [now]
 * @returns {PageState}
 */
function parse(fragment, now = DEFAULTS) {
  const [, view, card] = CARD.exec(fragment) ?? [];
  if (view) return { ...now, view, [`${view}_card`]: card, [`${view}_value`]: undefined };
  /** @type {PageState & Record<string, any>} */
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    if (typeof BY_NAME[name] === "string") {
      state[name] = value;
      continue;
    }
    try {
      const given = JSON.parse(value);
      if (
        name in BY_NAME &&
        (typeof given !== typeof BY_NAME[name] || Array.isArray(given) !== Array.isArray(BY_NAME[name]))
      )
        continue;
      state[name] = given;
    } catch {
      if (!(name in BY_NAME)) state[name] = value;
    }
  }
  return state;
}

/**
 * @param {PageState} state
 * @returns {string}
 */
function write(state) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value === undefined || JSON.stringify(value) === JSON.stringify(BY_NAME[name])) continue;
    const plain = typeof BY_NAME[name] === "string" || (typeof value === "string" && !isJSON(value));
    found.set(name, plain ? value : JSON.stringify(value));
  }
  return `#${found}`;
}

/**
 * @param {string} text
 * @returns {boolean}
 */
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
  /**
   * @param {string} fragment
   * @param {string} [saved]
   */
  constructor(fragment, saved = "") {
    this.values = parse(fragment, parse(saved));
    /** @type {Set<(changed: Changed) => void>} */
    this.followers = new Set();
    addEventListener("popstate", () => this.#arrive());
  }

  /**
   * Change values, update the URL and notify observers.
   * @param {Partial<PageState>} changes
   */
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

  /** @param {(changed: Changed) => void} act */
  follow(act) {
    this.followers.add(act);
  }

  /** Follow a link, or go back. A link to a card counts as a change even where that card is open, since it shows it. */
  #arrive() {
    const values = parse(location.hash, this.values);
    const changed = difference(this.values, values);
    const [, view] = CARD.exec(location.hash) ?? [];
    if (view) {
      changed.add(`${view}_card`);
      this.begin(values); // in full, so that the same link can be followed again
    }
    this.#become(values, changed);
  }

  /**
   * @param {PageState} values
   * @param {Changed} [changed]
   */
  #become(values, changed = difference(this.values, values)) {
    this.values = values;
    for (const act of this.followers) act(changed);
  }

  /**
   * Set initial values without a history entry.
   * @param {Partial<PageState>} changes
   */
  begin(changes) {
    this.values = { ...this.values, ...changes };
    try {
      history.replaceState(null, "", write(this.values));
    } catch {
      // as above
    }
  }

  /**
   * The URL fragment of the state with some changes.
   * @param {Partial<PageState>} changes
   * @returns {string}
   */
  fragmentOf(changes) {
    return write({ ...this.values, ...changes });
  }
}

/**
 * @param {Record<string, any>} old
 * @param {Record<string, any>} now
 * @returns {Set<string>}
 */
function difference(old, now) {
  const names = new Set([...Object.keys(old), ...Object.keys(now)]);
  return new Set([...names].filter((name) => JSON.stringify(old[name]) !== JSON.stringify(now[name])));
}
