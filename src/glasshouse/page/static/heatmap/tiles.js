// Tiles of a heatmap, fetched as they scroll into view, in an LRU cache.

import { Superseded } from "glasshouse/api.js";

export const TILE = 256; // cells of a tile, a side
const KEPT = 64; // tiles
const AT_ONCE = 6; // tiles under way, as many as a browser has connections

export class Tiles {
  /**
   * `arrived` is called whenever there is something new to draw.
   * @param {() => void} arrived
   */
  constructor(arrived) {
    this.arrived = arrived;
    /** @type {Map<string, Tile | null>} */
    this.kept = new Map(); // most recently used last
    /** @type {Set<string>} */
    this.inFlight = new Set();
    /** @type {Map<string, number>} */
    this.numbers = new Map(); // of maps: their names hold whole texts
    /** @type {HeatmapMap | null} */
    this.map = null;
  }

  /**
   * Switch to a map, some tiles of which may be cached; null: to none.
   * @param {HeatmapMap | null} map
   */
  open(map) {
    this.map = map;
    if (!map) return;
    this.number = this.numbers.get(map.name) ?? this.numbers.size;
    this.numbers.set(map.name, this.number);
  }

  /**
   * The level at which the map is a single tile.
   * @returns {number}
   */
  get last() {
    if (!this.map) return 0;
    const { rows, columns } = this.map;
    return Math.max(0, Math.ceil(Math.log2(Math.max(rows.length, columns.length) / TILE)));
  }

  /**
   * @param {number} level
   * @param {number} row
   * @param {number} column
   * @returns {string}
   */
  keyOf(level, row, column) {
    return `${this.number} ${level} ${row} ${column}`;
  }

  /**
   * A cached tile; null if it does not exist.
   * @param {number} level
   * @param {number} row
   * @param {number} column
   * @returns {Tile | null | undefined}
   */
  get(level, row, column) {
    const key = this.keyOf(level, row, column);
    const found = this.kept.get(key);
    if (found) {
      this.kept.delete(key);
      this.kept.set(key, found);
    }
    return found;
  }

  /**
   * The finest cached tile of a position, and how many levels above the requested one it is.
   * @param {number} level
   * @param {number} row
   * @param {number} column
   * @returns {{ tile: Tile, up: number } | null}
   */
  known(level, row, column) {
    for (let up = 0; level + up <= this.last; up += 1) {
      const tile = this.get(level + up, row >> up, column >> up);
      if (tile) return { tile, up };
    }
    return null;
  }

  /**
   * The next tile to fetch, [level, row, column]: a visible one, or its parent if it does not exist.
   * @param {TilesInView} view
   * @returns {[number, number, number] | null}
   */
  missing({ level, places }) {
    const { last } = this;
    for (const [row, column] of places) {
      let up = 0;
      while (level + up < last && this.get(level + up, row >> up, column >> up) === null) up += 1;
      /** @type {[number, number, number]} */
      const place = [level + up, row >> up, column >> up];
      if (this.get(...place) === undefined && !this.inFlight.has(this.keyOf(...place))) return place;
    }
    return null;
  }

  /**
   * Fetch the missing tiles of `view()`, which is called again for each; returns whether all were loaded.
   * @param {() => TilesInView} view
   * @returns {Promise<boolean>}
   */
  async load(view) {
    const { map } = this;
    if (!map) return true;
    let isSuperseded = false;
    const one = async () => {
      while (this.map?.name === map.name && !isSuperseded) {
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

  /**
   * @param {string} key
   * @param {Tensor | null} tile
   */
  keep(key, tile) {
    this.kept.set(key, tile && { ...tile, picture: null, painted: "" });
    for (const oldest of this.kept.keys()) {
      if (this.kept.size <= KEPT) break;
      this.kept.delete(oldest);
    }
  }
}
