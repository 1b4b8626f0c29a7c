// Controls in a saved page, which has no server, or in a live page, which has no answer to some requests.

import { answers, isSaved, NEEDS_SERVER } from "glasshouse/api.js";
import { isLive } from "glasshouse/live_model.js";

/**
 * What needs the server: in a saved page its controls are disabled, all but some, and say why; in a live page those
 * that need the response of an endpoint that it lacks.
 * @template {HTMLElement} E
 * @param {E} node
 * @param {string} [but]
 * @param {Endpoint} [endpoint]
 * @returns {E}
 */
export function live(node, but, endpoint) {
  if (!isSaved && !(isLive && endpoint && !answers(endpoint))) return node;
  node.title = NEEDS_SERVER;
  for (const one of [node, ...node.querySelectorAll("button, input, select, textarea")])
    if ("disabled" in one && !(but && one.matches(but))) {
      one.disabled = true;
      one.setAttribute("title", NEEDS_SERVER);
      one.setAttribute("aria-description", NEEDS_SERVER);
    }
  return node;
}
