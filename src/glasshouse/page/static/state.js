// What is looked at: kept in the address after #, so that it can be shared, and is never sent to a server.

const DEFAULTS = {
  view: "tokens",
  text: "", // what is read; of an encoder-decoder, the source
  target: "", // of an encoder-decoder, what is written
  appended: [], // ids chosen one by one, after the text or the target
  masked: [], // places that an encoder does not get to see
  token: -1, // the selection: a token (-1: the last), what it is compared with, a layer, a head
  key: 0,
  layer: 0,
  head: 0,
  attention: "", // which of several kinds of attention: the name of its pattern
  edits: [], // changes made inside
  patch_from: "", // the text that patches come from
  checkpoint: "", // of a run: which checkpoint ("": the latest)
  compare_with: "", // a second one, shown beside it
  temperature: 1,
  top_k: 0, // 0: all
  top_p: 1,
  seed: 0,
};
const PAGES = new Set(["view", "text", "target", "appended", "masked", "edits", "patch_from", "compare_with"]); // steps for Back

function parse(fragment) {
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    if (typeof DEFAULTS[name] === "string") {
      state[name] = value;
      continue;
    }
    try {
      const given = JSON.parse(value);
      if (name in DEFAULTS && (typeof given !== typeof DEFAULTS[name] || Array.isArray(given) !== Array.isArray(DEFAULTS[name]))) continue;
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

/** The state of the page, and those who follow it. */
export class State {
  constructor(fragment) {
    this.values = parse(fragment);
    this.followers = new Set();
    addEventListener("popstate", () => this.#become(parse(location.hash)));
  }

  /** Change some values: the address says so, and everyone who follows is told which. */
  set(changes) {
    const values = { ...this.values, ...changes };
    const changed = difference(this.values, values);
    if (changed.size === 0) return;
    const step = [...changed].some((name) => PAGES.has(name));
    try {
      history[step ? "pushState" : "replaceState"](null, "", write(values));
    } catch {
      // a page inside another may not change its address
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

  /** Change some values as if they had always been so: Back does not lead before them. */
  begin(changes) {
    this.values = { ...this.values, ...changes };
    try {
      history.replaceState(null, "", write(this.values));
    } catch {
      // as above
    }
  }

  /** The fragment that leads here, or near. */
  fragmentOf(changes) {
    return write({ ...this.values, ...changes });
  }
}

function difference(old, now) {
  const names = new Set([...Object.keys(old), ...Object.keys(now)]);
  return new Set([...names].filter((name) => JSON.stringify(old[name]) !== JSON.stringify(now[name])));
}
