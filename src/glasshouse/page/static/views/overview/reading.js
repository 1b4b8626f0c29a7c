// The selected column in words and numbers: what comes out, why, and what each layer adds, the last layer on top.

import { headColour } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { bars, panel, token } from "glasshouse/widgets.js";
import { row, decodeTensor } from "glasshouse/tensor.js";
import { PARTS } from "glasshouse/views/overview/flow.js";

const REASONS = 5; // contributions that are listed

/**
 * What the model predicts at the selected token.
 * @param {ViewContext} context
 * @param {NextToken | null} next
 * @returns {HTMLElement}
 */
export function outcome(context, next) {
  const place = context.row[context.token];
  if (!next) return panel("Out", `${context.headSentence}: what comes out is the vector of each token.`);
  const { model } = context;
  const candidates = next.candidates.map((one) => ({
    name: model.predicts_tokens ? token(one) : one.text,
    share: one.probability,
    value: one.probability,
    text: percent(one.probability),
    title: one.text,
    class: one.id === next.actual_next ? "true" : "",
    data: { id: one.id },
  }));
  const rest = Math.max(0, 1 - next.candidates.reduce((sum, one) => sum + one.probability, 0));
  const others = {
    name: "all others",
    share: rest,
    value: rest,
    text: percent(rest),
    title: "all other tokens",
    data: {},
  };
  const node = panel(
    "Out",
    null,
    bars(model.predicts_tokens ? [...candidates, others] : candidates, {
      label: context.predictionsTitle.toLowerCase(),
      full: "100%",
    }),
  );
  put(
    /** @type {HTMLElement} */ (node.querySelector("h2")),
    model.head === "sequence_classification"
      ? "Out: the label of the text"
      : model.head === "next_token"
        ? "Out: the next token after "
        : "Out: predicted at ",
    model.head === "sequence_classification" ? null : token(place, { class: "selected" }),
  );
  node.dataset.testid = "overview-out";
  return node;
}

/**
 * Why this token: the largest contributions to its logit, and the layer from which on the stream predicts it.
 * @param {Flow} flow
 * @param {NextToken} next
 * @param {LensResponse} lens
 * @param {LogitAttribution} found
 * @param {(where: Zoom) => void} zoom
 * @returns {HTMLElement}
 */
export function reasons(flow, next, lens, found, zoom) {
  const [best] = next.candidates;
  const since = settled(lens, best.id);
  const list = contributions(found, flow)
    .sort((a, b) => b.value - a.value)
    .slice(0, REASONS)
    .filter((one) => one.value > 0);
  const rest = found.logit - list.reduce((sum, one) => sum + one.value, 0);
  const most = Math.max(list[0]?.value ?? 0, Math.abs(rest)) || 1;
  /** @type {ReturnType<typeof contributions>[0]} */
  const others = { name: "all others", title: "all other parts, some of which push it down", value: rest };
  const when =
    since === lens.layers.length - 1
      ? "only the last layer turns the stream to it"
      : since === 0
        ? "the embedding alone predicts it already"
        : `the stream predicts it from layer ${since - 1} on`;
  return panel(
    `Why ${JSON.stringify(best.text)}?`,
    `Its logit is ${short(found.logit)}, the sum of what every part has added; ${when}. The largest parts (head 1.3: head 3 of layer 1; ffn: feed-forward):`,
    bars(
      [...list, others].map((one) => ({
        name: one.name,
        share: Math.abs(one.value) / most,
        value: one.value,
        text: signed(one.value),
        title: one.title,
        class: one.value < 0 ? "less" : "",
        onclick: one.where && (() => zoom(/** @type {Zoom} */ (one.where))),
        data: { part: one.name },
      })),
      { label: "largest contributions to the logit", full: `${short(most)}, the largest` },
    ),
  );
}

/**
 * The first row of the lens from which on the top prediction is this token: 0 is the embedding.
 * @param {LensResponse} lens
 * @param {number} id
 */
function settled(lens, id) {
  let since = lens.layers.length - 1;
  while (since > 0 && lens.tokens[since - 1][0][0] === id) since -= 1;
  return since;
}

/**
 * What each part adds to the logit.
 * @param {LogitAttribution} found
 * @param {Flow} flow
 * @returns {{ name: string, title: string, value: number, where?: Zoom }[]}
 */
function contributions(found, flow) {
  /** @type {(packed: PackedTensor, part: OverviewPart) => { name: string, title: string, value: number, where: Zoom }[]} */
  const heads = (packed, part) => {
    const tensor = decodeTensor(packed);
    return Array.from({ length: tensor.shape[0] }, (_, layer) =>
      Array.from(row(tensor, layer), (value, head) => ({
        name: `${part === "cross" ? "cross head" : "head"} ${layer}.${head}`,
        title: `head ${head} of ${PARTS[part]} ${layer}`,
        value,
        where: { layer, head, site: flow.site(part) },
      })),
    ).flat();
  };
  return [
    { name: "embedding", title: "the token itself", value: found.embedding },
    { name: "biases", title: "the same at every token", value: found.bias },
    ...heads(found.heads, "attention"),
    ...(found.cross_heads ? heads(found.cross_heads, "cross") : []),
    ...Array.from(decodeTensor(found.feedforward).data, (value, layer) => ({
      name: `ffn ${layer}`,
      title: `feed-forward of layer ${layer}`,
      value,
      where: { layer, site: flow.site("attention") },
    })),
  ];
}

/**
 * What each layer adds at the selected token, as a table with the last layer on top.
 * @param {ViewContext} context
 * @param {Flow} flow
 * @param {LensResponse | null} lens
 * @param {LogitAttribution | null} found
 * @param {(where: Zoom) => void} zoom
 * @returns {HTMLElement}
 */
export function byLayer(context, flow, lens, found, zoom) {
  const place = context.token;
  const logits = found && layerSums(found);
  /** @type {(layer: number) => Child} */
  const reads = (layer) => {
    if (!lens) return null;
    const [[id]] = lens.tokens[layer + 1];
    const probability = decodeTensor(lens.probability).data[layer + 1];
    return h("td", { data: { value: probability } }, shown(context, lens, id), ` ${percent(probability)}`);
  };
  const rows = Array.from({ length: flow.layers }, (_, i) => flow.layers - 1 - i).map((layer) =>
    h(
      "tr",
      { class: layer === context.state.layer ? "chosen" : "", data: { layer } },
      h(
        "th",
        { scope: "row" },
        h(
          "button",
          {
            type: "button",
            class: "link",
            "aria-label": `layer ${layer}: zoom in`,
            on: { click: () => zoom({ layer, site: flow.site("attention") }) },
          },
          String(layer),
        ),
      ),
      flow.parts.map((part) =>
        h(
          "td",
          {},
          part === "feedforward" ? null : looked(flow, part, layer, place, zoom),
          adds(flow, part, layer, place),
        ),
      ),
      reads(layer),
      logits ? h("td", { class: "figure", data: { value: logits[layer] } }, signed(logits[layer])) : null,
    ),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": "what each layer adds" },
    h(
      "table",
      { class: "flow-table", data: { testid: "overview-layers" } },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "layer"),
          flow.parts.map((part) => h("th", { scope: "col" }, PARTS[part])),
          lens ? h("th", { scope: "col" }, "stream then predicts") : null,
          logits ? h("th", { scope: "col" }, "adds to the logit of ", found && token(found.token)) : null,
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}

/**
 * Where the head that moves most looked.
 * @param {Flow} flow
 * @param {OverviewPart} part
 * @param {number} layer
 * @param {number} place
 * @param {(where: Zoom) => void} zoom
 * @returns {Child}
 */
function looked(flow, part, layer, place, zoom) {
  const [one] = flow.moved(part, layer, place);
  const key = flow.keyToken(part, one.key);
  const back =
    part === "cross"
      ? ""
      : one.key === place
        ? ", itself"
        : `, ${Math.abs(place - one.key)} ${one.key < place ? "back" : "ahead"}`;
  return [
    h(
      "button",
      {
        type: "button",
        class: "link head",
        "aria-label": `head ${one.head} of ${PARTS[part]} ${layer}: zoom in`,
        on: { click: () => zoom({ layer, head: one.head, key: one.key, site: flow.site(part) }) },
      },
      h("i", { style: { background: headColour(one.head, flow.nHeads) } }),
      `head ${one.head}`,
    ),
    " from ",
    token(key),
    h("span", { class: "quiet" }, back),
    h("br", {}),
  ];
}

/** @type {(flow: Flow, part: OverviewPart, layer: number, place: number) => Child} */
function adds(flow, part, layer, place) {
  const share = flow.share(part, layer, place);
  const who = part === "feedforward" ? "adds" : "all heads add";
  return h("span", { class: "figure quiet", data: { value: share, part } }, `${who} ${percent(share)}`);
}

/**
 * @param {ViewContext} context
 * @param {LensResponse} lens
 * @param {number} id
 * @returns {Child}
 */
export function shown(context, lens, id) {
  return context.model.predicts_tokens ? token(lens.token_info[id]) : lens.token_info[id].text;
}

/**
 * What all parts of each layer add to the logit.
 * @param {LogitAttribution} found
 * @returns {number[]}
 */
function layerSums(found) {
  const feedforward = Array.from(decodeTensor(found.feedforward).data);
  const heads = [found.heads, found.cross_heads].flatMap((one) => (one ? [decodeTensor(one)] : []));
  return feedforward.map((value, layer) =>
    heads.reduce((sum, tensor) => sum + row(tensor, layer).reduce((total, one) => total + one, 0), value),
  );
}

/** @type {(value: number) => string} */
function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value);
}
