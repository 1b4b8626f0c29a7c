// The chosen edge: its writer and its reader, its estimated and its exact effect, and the edges beside it.

import { isAvailable, NEEDS_SERVER } from "glasshouse/api.js";
import { colouredText } from "glasshouse/coloured_text.js";
import { h, put } from "glasshouse/dom.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { panel } from "glasshouse/widgets.js";
import { figure, keyOf, words } from "glasshouse/views/circuit/component.js";

/**
 * @param {ViewContext} context
 * @param {(edge: CircuitEdge) => void} pick
 * @returns {ChosenEdge}
 */
export function chosenEdge(context, pick) {
  const { model } = context;
  const text = colouredText("tokens coloured by the effect of the edge at each", "edge-positions");
  let turn = 0; // the edge that was chosen last
  const about = h("div", { class: "chosen-edge", data: { testid: "circuit-edge" } });
  const node = panel(
    "Chosen edge",
    "Its effect alone: 0 leaves the corrupted text's logit difference as it is, 1 makes it that of the clean text.",
    about,
  );

  /**
   * @param {string} title
   * @param {CircuitEdge[]} edges
   * @param {(edge: CircuitEdge) => string} name
   * @returns {Child}
   */
  function others(title, edges, name) {
    if (!edges.length) return null;
    return h(
      "p",
      { class: "quiet" },
      `${title}: `,
      edges.map((one, i) => [
        i ? ", " : "",
        h(
          "button",
          { type: "button", class: "link", on: { click: () => pick(one) } },
          `${name(one)} (${figure(one.effect)})`,
        ),
      ]),
    );
  }

  return {
    node,
    async show(edge, edges, body) {
      if (!edge) {
        put(
          about,
          h("p", { class: "quiet" }, "Click an edge in the graph or in the list to patch it alone, which is exact."),
        );
        return;
      }
      const { writer, reader, effect } = edge;
      const exact = h("td", { class: "number", data: { testid: "edge-exact" } }, "…");
      const beside = edges.filter((one) => one !== edge);
      put(
        about,
        h(
          "table",
          {},
          h("tr", {}, h("th", {}, "writer"), h("td", {}, words(writer, model), " ", h("code", {}, writer))),
          h("tr", {}, h("th", {}, "reader"), h("td", {}, words(reader, model), " ", h("code", {}, reader))),
          h(
            "tr",
            {},
            h("th", {}, "estimated effect"),
            h("td", { data: { testid: "edge-estimate", value: effect } }, figure(effect)),
          ),
          h("tr", {}, h("th", {}, "exact effect"), exact),
        ),
        others(
          "The writer is read by",
          beside.filter((one) => one.writer === writer),
          (one) => words(one.reader, model),
        ),
        others(
          "The reader also reads",
          beside.filter((one) => one.reader === reader),
          (one) => words(one.writer, model),
        ),
      );
      const request = { ...body, writer, reader };
      const own = ++turn;
      if (!isAvailable("patch_edge", request)) {
        put(exact, NEEDS_SERVER);
        return;
      }
      const found = await context.request("patch_edge", request);
      if (own !== turn) return;
      exact.dataset.value = `${found.effect}`;
      put(exact, figure(found.effect));
      const values = decodeTensor(found.positions).data;
      const most = Math.max(1e-9, ...values.map(Math.abs));
      text.show(found.is_source ? context.tokens.source : context.row, {
        selected: undefined,
        signed: true,
        told: (place) =>
          place < values.length
            ? { share: values[place] / most, text: figure(values[place]), data: { value: values[place] } }
            : { share: null, text: "after the prediction", data: {} },
      });
      about.append(
        h("h3", {}, "Where in the text"),
        text,
        h("p", { class: "quiet" }, `Its estimated effect at each token alone; full colour: ${figure(most)}.`),
      );
    },
    colour: () => text.colour(),
  };
}

/**
 * The key of the edge that the URL names, if it is drawn.
 * @param {CircuitEdge[]} edges
 * @param {string | undefined} key
 * @returns {CircuitEdge | undefined}
 */
export function findEdge(edges, key) {
  return edges.find((one) => keyOf(one) === key);
}
