// Controls in a saved page, which has no server.

import { isSaved, NEEDS_SERVER } from "glasshouse/api.js";

/**
 * What needs the server: in a saved page its controls are disabled, all but some, and say why.
 * @template {HTMLElement} E
 * @param {E} node
 * @param {string} [but]
 * @returns {E}
 */
export function live(node, but) {
  if (!isSaved) return node;
  node.title = NEEDS_SERVER;
  for (const one of [node, ...node.querySelectorAll("button, input, select, textarea")])
    if ("disabled" in one && !(but && one.matches(but))) {
      one.disabled = true;
      one.setAttribute("title", NEEDS_SERVER);
      one.setAttribute("aria-description", NEEDS_SERVER);
    }
  return node;
}
