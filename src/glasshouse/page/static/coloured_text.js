// A text whose tokens are coloured by a number each; a click selects a token.

import { balance, balanceInk, ink, shade } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { clamp } from "glasshouse/number.js";
import { token } from "glasshouse/widgets.js";

const TOKENS = 400; // drawn, around the selected one

/**
 * Returns an element with `show(row, options)`, and `colour()` for when the theme has changed.
 * @param {string} label
 * @param {string} testid
 * @param {(place: number) => void} [pick]
 * @returns {ColouredText}
 */
export function colouredText(label, testid, pick) {
  const node = h("div", {
    class: `coloured-text${pick ? " picked-from" : ""}`,
    tabindex: "0",
    role: "group",
    "aria-label": label,
    data: { testid },
    on: {
      click: (event) => {
        const place = event.target.closest("[data-place]")?.dataset.place;
        if (pick && place !== undefined) pick(Number(place));
      },
    },
  });
  /** @type {[HTMLElement, number | null][]} */
  let shares = [];
  let isSigned = false;

  function colour() {
    for (const [one, share] of shares) {
      one.style.background = share === null ? "transparent" : isSigned ? balance(share) : shade(share);
      one.style.color = share === null ? "" : isSigned ? balanceInk(share) : ink(share);
    }
  }

  return Object.assign(node, {
    /** @type {ColouredText["show"]} */
    show(row, { selected, signed, told }) {
      const first = clamp((selected ?? 0) - TOKENS / 2, row.length - TOKENS);
      isSigned = signed;
      shares = row.slice(first, first + TOKENS).map((one, i) => {
        const place = first + i;
        const { share, text, data } = told(place);
        const chip = token(one, {
          title: text,
          "aria-label": `${one.text}: ${text}`,
          class: place === selected ? "here" : "",
          data: { place, ...data },
        });
        return [chip, share];
      });
      put(
        node,
        first ? "… " : "",
        shares.map(([one]) => one),
        first + TOKENS < row.length ? " …" : "",
      );
      colour();
    },
    colour,
  });
}
