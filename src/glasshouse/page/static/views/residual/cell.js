// The selected cell of the table: top predictions, and the rank and loss of the target token.

import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { bars, panel, token } from "glasshouse/widgets.js";
import { decodeTensor } from "glasshouse/tensor.js";
import { chosenRow } from "glasshouse/views/residual/selection.js";

/**
 * @param {ViewContext} context
 * @returns {Part}
 */
export function cell(context) {
  const list = h("div", { data: { testid: "cell" } });
  const facts = h("p", { class: "quiet", role: "status", data: { testid: "cell-facts" } });
  const node = panel("The selected cell", null, list, facts);
  const title = /** @type {HTMLElement} */ (node.querySelector("h2"));
  return {
    node,
    async draw() {
      const place = context.token;
      const number = chosenRow(context);
      const found = await context.request("lens", {
        forward_pass: context.forwardPass(),
        layers: [number],
        start: place,
        stop: place + 1,
        top_k: 5,
      });
      const probability = decodeTensor(found.probability).data;
      const [[ids]] = found.tokens;
      const [right] = found.targets;
      put(title, number ? `After layer ${number - 1}, at ` : "Embedding, at ", token(context.row[place]));
      put(
        list,
        bars(
          ids.map((id, i) => ({
            name: context.model.predicts_tokens ? token(found.token_info[id]) : found.token_info[id].text,
            share: probability[i],
            value: probability[i],
            text: percent(probability[i]),
            title: found.token_info[id].text,
            class: id === right ? "true" : "",
            data: { id },
          })),
          { label: "top predictions", full: "100%" },
        ),
      );
      const [entropy, rank, loss] = [found.entropy, found.rank, found.loss].map((one) => decodeTensor(one).data[0]);
      /** @type {Child[]} */
      const said = [
        h("span", { data: { testid: "cell-entropy", value: entropy } }, `entropy ${short(entropy)} nats`),
      ];
      if (right === null) said.push(context.model.predicts_tokens ? "; the last token has no target" : "");
      else
        said.push(
          "; the target token ",
          token(found.token_info[right]),
          h(
            "span",
            { data: { testid: "cell-rank", value: rank } },
            rank ? ` has rank ${rank.toLocaleString("en")}` : " is the top prediction",
          ),
          h("span", { data: { testid: "cell-loss", value: loss } }, `, loss ${short(loss)} nats`),
        );
      put(facts, said);
    },
  };
}
