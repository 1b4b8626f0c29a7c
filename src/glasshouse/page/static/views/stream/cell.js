// One cell of the table: what the model would say there, and how the true token stands.

import { h, put } from "glasshouse/dom.js";
import { percent, short } from "glasshouse/number.js";
import { bars, panel, token } from "glasshouse/parts.js";
import { unpack } from "glasshouse/tensor.js";
import { chosenRow } from "glasshouse/views/stream/selection.js";

export function cell(glass) {
  const list = h("div", { data: { testid: "cell" } });
  const facts = h("p", { class: "quiet", role: "status", data: { testid: "cell-facts" } });
  const node = panel("The selected cell", null, list, facts);
  const title = node.querySelector("h2");
  return {
    node,
    async draw() {
      const place = glass.token;
      const number = chosenRow(glass);
      const found = await glass.ask("lens", { question: glass.question(), layers: [number], start: place, stop: place + 1, top_k: 5 });
      const probability = unpack(found.probability).data;
      const [[ids]] = found.tokens;
      const [right] = found.true;
      put(title, number ? `After layer ${number - 1}, at ` : "Of the embedding alone, at ", token(glass.row[place]));
      put(list, bars(ids.map((id, i) => ({
        name: glass.model.speaks ? token(found.words[id]) : found.words[id].text,
        share: probability[i],
        value: probability[i],
        text: percent(probability[i]),
        title: found.words[id].text,
        class: id === right ? "true" : "",
        data: { id },
      })), { label: "likeliest" }));
      const [entropy, rank, loss] = ["entropy", "rank", "loss"].map((name) => unpack(found[name]).data[0]);
      const said = [h("span", { data: { testid: "cell-entropy", value: entropy } }, `entropy ${short(entropy)} nats`)];
      if (right === null) said.push(glass.model.speaks ? "; after the last token nothing stands in the text to compare with" : "");
      else said.push("; the true token ", token(found.words[right]), h("span", { data: { testid: "cell-rank", value: rank } }, rank ? ` has ${rank.toLocaleString("en")} likelier ones above it` : " is the likeliest"), h("span", { data: { testid: "cell-loss", value: loss } }, `, loss ${short(loss)} nats`));
      put(facts, said);
    },
  };
}
