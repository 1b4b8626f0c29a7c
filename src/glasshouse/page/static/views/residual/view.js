// Residual stream: logit lens, direct logit attribution, norms and cosine similarity.

import { preamble, within } from "glasshouse/code.js";
import { onTheme } from "glasshouse/colour.js";
import { h, put } from "glasshouse/dom.js";
import { python } from "glasshouse/widgets.js";
import { cell } from "glasshouse/views/residual/cell.js";
import { normByLayer } from "glasshouse/views/residual/norm_by_layer.js";
import { similarity } from "glasshouse/views/residual/similarity.js";
import { chosenRow } from "glasshouse/views/residual/selection.js";
import { logitAttribution } from "glasshouse/views/residual/logit_attribution.js";
import { table } from "glasshouse/views/residual/table.js";

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const reads = context.hasPositionLogits;
  const first = table(context, reads);
  const facts = [...(reads ? [cell(context)] : []), normByLayer(context), similarity(context)];
  const last = context.model.predicts_tokens ? [logitAttribution(context)] : [];
  const parts = [first, ...facts, ...last];
  const code = h("div", {});
  root.classList.add("residual");
  root.append(
    first.node,
    h(
      "div",
      { class: "columns residual-facts" },
      facts.map((part) => part.node),
    ),
    ...last.map((part) => part.node),
    code,
  );
  const stop = onTheme(() => first.colour());
  return {
    async draw(changed) {
      if (
        changed.has("layer") &&
        !changed.has("tokens") &&
        context.state.residual_embed &&
        !changed.has("residual_embed")
      ) {
        context.set({ residual_embed: undefined });
        return;
      }
      const [lines] = await Promise.all([inPython(context, reads), ...parts.map((part) => part.draw(changed))]);
      put(code, python(lines));
    },
    close() {
      stop();
      first.close();
    },
  };
}

/**
 * The same in Python.
 * @param {ViewContext} context
 * @param {boolean} reads
 * @returns {Promise<string>}
 */
async function inPython(context, reads) {
  const { lines, inputs } = preamble(context);
  const { predicts_tokens, kind } = context.model;
  const { residual_token, residual_incorrect_token, masked } = context.state;
  const place = context.token;
  const row = chosenRow(context);
  const work = [];
  if (reads)
    work.push(
      `lens = gh.lens(model, ${inputs}, positions=[${place}]${predicts_tokens && masked.length ? ", targets=ids" : ""}, tok=tok)`,
    );
  if (predicts_tokens) {
    const token = Number.isInteger(residual_token) ? residual_token : "int(lens.tokens[-1, 0, 0, 0])";
    const incorrect = Number.isInteger(residual_incorrect_token)
      ? `, incorrect_token=${residual_incorrect_token}`
      : "";
    work.push(
      `components = gh.attribute(model, ${inputs}, position=${place}, token=${token}${incorrect}).components()`,
    );
  }
  const site = `${kind === "seq2seq" ? "decoder." : ""}${row ? `resid_post.${row - 1}` : "embed"}`;
  work.push(
    `norms = gh.inspection.residual_norms(model, ${inputs})[:, 0, ${place}]`,
    `cosine = gh.inspection.position_similarity(model, ${inputs}, site="${site}")[0, ${place}]`,
  );
  return [...lines, ...(await within(context, work))].join("\n");
}
