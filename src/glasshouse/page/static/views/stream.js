// Residual stream: what would be said after each layer, what adds up to a logit, and how the vectors lie.

import { opening, within } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { python } from "glasshouse/parts.js";
import { cell } from "glasshouse/views/stream/cell.js";
import { lengths } from "glasshouse/views/stream/lengths.js";
import { likeness } from "glasshouse/views/stream/likeness.js";
import { chosenRow } from "glasshouse/views/stream/selection.js";
import { sum } from "glasshouse/views/stream/sum.js";
import { table } from "glasshouse/views/stream/table.js";

export function mount(glass, root) {
  const reads = glass.model.speaks || glass.model.head === "token_classification";
  const first = table(glass, reads);
  const facts = [reads ? cell(glass) : null, lengths(glass), likeness(glass)].filter(Boolean);
  const last = glass.model.speaks ? [sum(glass)] : [];
  const parts = [first, ...facts, ...last];
  const code = h("div", {});
  root.classList.add("stream");
  root.append(first.node, h("div", { class: "columns stream-facts" }, facts.map((part) => part.node)), ...last.map((part) => part.node), code);
  const stop = onTheme(() => first.colour());
  return {
    async draw(changed) {
      if (changed.has("layer") && !changed.has("tokens") && glass.state.streamEmbed && !changed.has("streamEmbed")) {
        glass.set({ streamEmbed: undefined });
        return;
      }
      const [lines] = await Promise.all([inPython(glass, reads), ...parts.map((part) => part.draw(changed))]);
      put(code, python(lines));
    },
    close() {
      stop();
      first.close();
    },
  };
}

/** The same in Python. */
async function inPython(glass, reads) {
  const { lines, inputs } = opening(glass);
  const { speaks, kind } = glass.model;
  const { streamToken, streamAgainst, hidden } = glass.state;
  const place = glass.token;
  const row = chosenRow(glass);
  const work = [];
  if (reads) work.push(`lens = gh.lens(model, ${inputs}, positions=[${place}]${speaks && hidden.length ? ", targets=ids" : ""}, tok=tok)`);
  if (speaks) {
    const said = Number.isInteger(streamToken) ? streamToken : "int(lens.tokens[-1, 0, 0, 0])";
    const against = Number.isInteger(streamAgainst) ? `, against=${streamAgainst}` : "";
    work.push(`parts = gh.attribute(model, ${inputs}, position=${place}, token=${said}${against}).parts()`);
  }
  const site = `${kind === "seq2seq" ? "decoder." : ""}${row ? `resid_post.${row - 1}` : "embed"}`;
  work.push(`norms = gh.inspection.norms(model, ${inputs})[:, 0, ${place}]`, `cosine = gh.inspection.similarity(model, ${inputs}, site="${site}")[0, ${place}]`);
  return [...lines, ...(await within(glass, work))].join("\n");
}
