// One query-key pair: score, softmax weight and weighted value, number by number.

import { balance, balanceInk } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { short } from "glasshouse/number.js";
import { numberLabel, panel, token } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";

/**
 * @param {AttentionSelection} selection
 * @returns {Part}
 */
export function queryKey(selection) {
  const { context } = selection;
  const who = h("p", { class: "who", data: { testid: "pair" } });
  const shares = h("p", { class: "quiet", data: { testid: "pair-shares" } });
  const vectors = h("div", {
    class: "scroll",
    tabindex: "0",
    role: "group",
    "aria-label": "query, key and their products",
  });
  const score = h("div", { class: "equation" });
  const softmax = h("div", { class: "equation" });
  const maskNote = h(
    "p",
    { class: "about", data: { testid: "pair-masked" } },
    "This key is masked: it comes after the query, so its weight is 0.",
  );
  const weighted = h("div", {
    class: "scroll",
    tabindex: "0",
    role: "group",
    "aria-label": "value, what is weighted, and what the head gathers, number by number",
  });
  /** @type {(number: string, title: string, about: string, ...children: Child[]) => HTMLElement} */
  const stage = (number, title, about, ...children) =>
    h(
      "div",
      { class: "stage" },
      h("h3", {}, h("span", { class: "nth" }, number), title),
      h("p", { class: "about" }, about),
      children,
    );
  const turned = context.model.position === "rotary" ? " Both are shown after the rotary position embedding." : "";
  const node = panel(
    "One query, one key",
    null,
    who,
    shares,
    stage(
      "1",
      "Score: scaled dot product",
      `The dot product of the query q and the key k, ${context.model.d_head} numbers each, times the scale.${turned}`,
      vectors,
      score,
    ),
    stage(
      "2",
      "Softmax over keys",
      "The exponential of the score, divided by the sum over all keys. The largest score is subtracted first for numerical stability.",
      softmax,
      maskNote,
    ),
    stage(
      "3",
      "Weighted value",
      "The weight times the value v of the key. The sum over all keys is z, the output of the head.",
      weighted,
    ),
    h(
      "p",
      { class: "legend" },
      h("span", {}, h("i", { class: "more-than" }), "above 0"),
      h("span", {}, h("i", { class: "less-than" }), "below 0"),
      h("span", {}, "colour: magnitude"),
    ),
  );
  node.classList.add("pair");

  return {
    node,
    async draw() {
      const found = await selection.requestQueryKey();
      const { queries, keys, query, key, kind, head } = selection;
      const [from, to] = [token(queries[query], { class: "selected" }), token(keys[key], { class: "compared" })];
      /** @type {(number: number, side: Side) => string} */
      const place = (number, side) => ` token ${number}${side === "text" ? "" : ` of the ${side}`}`;
      put(
        who,
        from,
        `${place(query, kind.queries)}, the query, attends to `,
        to,
        `${place(key, kind.keys)}, the key.`,
      );
      const group = Array.from({ length: found.group }, (_, i) => found.kv_head * found.group + i);
      put(
        shares,
        `Heads ${group.slice(0, -1).join(", ")} and ${group.at(-1)} share the keys and values of key-value head ${found.kv_head}; head ${head} has its own queries.`,
      );
      shares.hidden = found.group === 1;
      const [q, k, products, v, moved, z] = [
        found.q,
        found.k,
        found.products,
        found.v,
        found.weighted_value,
        found.z,
      ].map((one) => decodeTensor(one).data);
      put(
        vectors,
        elements([
          ["q", "q", q, largest(q)],
          ["k", "k", k, largest(k)],
          ["q × k", "products", products, largest(products)],
        ]),
      );
      put(score, scoreTerms(found));
      put(softmax, softmaxTerms(found));
      maskNote.hidden = found.bias !== null;
      put(
        weighted,
        elements([
          ["v", "v", v, largest(v)],
          ["weight × v", "weighted_value", moved, largest(v)],
          ["z", "z", z, largest(v)],
        ]),
      );
    },
  };
}

/**
 * @param {Tensor["data"]} data
 * @returns {number}
 */
function largest(data) {
  return data.reduce((most, one) => Math.max(most, Math.abs(one)), 0) || 1;
}

/**
 * Vectors number by number, one below the other: rows of [name, testid, numbers, the number that has full colour].
 * @param {[string, string, Tensor["data"], number][]} rows
 * @returns {HTMLElement}
 */
function elements(rows) {
  const head = h(
    "tr",
    {},
    h("th", {}),
    Array.from(rows[0][2], (_, i) => h("th", { scope: "col" }, String(i))),
  );
  const body = rows.map(([name, testid, data, most]) =>
    h(
      "tr",
      { data: { testid: `pair-${testid}` } },
      h("th", { scope: "row" }, name),
      Array.from(data, (one) =>
        h(
          "td",
          { data: { value: one }, style: { background: balance(one / most), color: balanceInk(one / most) } },
          tight(one),
        ),
      ),
    ),
  );
  return h("table", { class: "elements" }, h("thead", {}, head), h("tbody", {}, body));
}

/**
 * A number in a narrow cell.
 * @param {number} value
 * @returns {string}
 */
function tight(value) {
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.005 || size === 0 ? 2 : 3;
  return (size && size < 0.0005 ? value.toExponential(0) : value.toFixed(digits)).replaceAll("-", "−");
}

/** @type {(value: number, name: string, testid?: string) => HTMLElement} */
const term = (value, name, testid) =>
  h("span", { class: "term" }, numberLabel(value, testid), h("span", { class: "quiet" }, name));
/** @type {(text: string) => HTMLElement} */
const sign = (text) => h("span", { class: "sign" }, text);

/**
 * From the sum of products to the score.
 * @param {QueryKeyPair} found
 * @returns {Child[]}
 */
function scoreTerms(found) {
  const terms = [term(found.sum, "sum of q × k", "pair-sum"), sign("×"), term(found.scale, "scale", "pair-scale")];
  const scaled = found.sum * found.scale;
  if (found.softcap !== null)
    terms.push(
      sign("→"),
      term(found.softcap * Math.tanh(scaled / found.softcap), `softcap ±${short(found.softcap)}`, "pair-capped"),
    );
  if (found.bias === null)
    return [
      ...terms,
      sign("→"),
      h(
        "span",
        { class: "term" },
        h("span", { class: "figure", data: { testid: "pair-score", value: "" } }, "−∞"),
        h("span", { class: "quiet" }, "score: masked"),
      ),
    ];
  if (found.bias !== 0) terms.push(sign("+"), term(found.bias, "position bias", "pair-bias"));
  return [...terms, sign("="), term(found.score, "score", "pair-score")];
}

/**
 * From the score to the weight.
 * @param {QueryKeyPair} found
 * @returns {Child[]}
 */
function softmaxTerms(found) {
  if (found.bias === null) return [term(found.weight, "weight", "pair-weight")];
  return [
    sign("exp ("),
    term(found.score, "score"),
    sign("−"),
    term(found.largest, "largest score", "pair-largest"),
    sign(")"),
    sign("="),
    term(Math.exp(found.score - found.largest), "exp"),
    sign(";"),
    term(Math.exp(found.score - found.largest), "exp"),
    sign("÷"),
    term(found.total, "sum of exp", "pair-total"),
    sign("="),
    term(found.weight, "weight", "pair-weight"),
  ];
}
