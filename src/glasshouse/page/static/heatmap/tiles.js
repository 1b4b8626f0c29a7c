// Tiles of a heatmap, fetched as they scroll into view, in an LRU cache.

import { Superseded } from "glasshouse/api.js";

export const TILE = 256; // cells of a tile, a side
const KEPT = 64; // tiles
const AT_ONCE = 6; // tiles under way, as many as a browser has connections

export class Tiles {
  /** `arrived` is called whenever there is something new to draw. */
  constructor(arrived) {
    this.arrived = arrived;
    this.kept = new Map(); // most recently used last
    this.inFlight = new Set();
    this.numbers = new Map(); // of maps: their names hold whole texts
    this.map = null;
  }

  /** Switch to a map, some tiles of which may be cached; null: to none. */
  open(map) {
    this.map = map;
    if (!map) return;
    this.number = this.numbers.get(map.name) ?? this.numbers.size;
    this.numbers.set(map.name, this.number);
  }

  /** The level at which the map is a single tile. */
  get last() {
    const { rows, columns } = this.map;
    return Math.max(0, Math.ceil(Math.log2(Math.max(rows.length, columns.length) / TILE)));
  }

  keyOf(level, row, column) {
    return `${this.number} ${level} ${row} ${column}`;
  }

  /** A cached tile; null if it does not exist. */
  get(level, row, column) {
    const key = this.keyOf(level, row, column);
    const found = this.kept.get(key);
    if (found) {
      this.kept.delete(key);
      this.kept.set(key, found);
    }
    return found;
  }

  /** The finest cached tile of a position, and how many levels above the requested one it is. */
  known(level, row, column) {
    for (let up = 0; level + up <= this.last; up += 1) {
      const tile = this.get(level + up, row >> up, column >> up);
      if (tile) return { tile, up };
    }
    return null;
  }

  /** The next tile to fetch, [level, row, column]: a visible one, or its parent if it does not exist. */
  missing({ level, places }) {
    const { last } = this;
    for (const [row, column] of places) {
      let up = 0;
      while (level + up < last && this.get(level + up, row >> up, column >> up) === null) up += 1;
      const place = [level + up, row >> up, column >> up];
      if (this.get(...place) === undefined && !this.inFlight.has(this.keyOf(...place))) return place;
    }
    return null;
  }

  /** Fetch the missing tiles of `view()`, which is called again for each; returns whether all were loaded. */
  async load(view) {
    const { name } = this.map;
    let isSuperseded = false;
    const one = async () => {
      while (this.map?.name === name && !isSuperseded) {
        const next = this.missing(view());
        if (!next) return;
        const key = this.keyOf(...next);
        this.inFlight.add(key);
        try {
          this.keep(key, await this.map.fetch(...next));
        } catch (error) {
          if (!(error instanceof Superseded)) throw error;
          isSuperseded = true;
        } finally {
          this.inFlight.delete(key);
        }
        this.arrived();
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, one));
    return !isSuperseded;
  }

  keep(key, tile) {
    this.kept.set(key, tile && { ...tile, picture: null, painted: "" });
    while (this.kept.size > KEPT) this.kept.delete(this.kept.keys().next().value);
  }
}
