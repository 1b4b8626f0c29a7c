// Encoder-decoder: cross-attention between source and target, and the tree of a beam search.

import { preamble, within } from "glasshouse/code.js";
import { h, put } from "glasshouse/dom.js";
import { python } from "glasshouse/widgets.js";
import { selection } from "glasshouse/views/seq2seq/selection.js";
import { crossAttention } from "glasshouse/views/seq2seq/cross_attention.js";
import { search, searched } from "glasshouse/views/seq2seq/search.js";

/**
 * @param {ViewContext} context
 * @param {HTMLElement} root
 * @returns {MountedView}
 */
export function mount(context, root) {
  const parts = [crossAttention(context), ...(context.model.generates ? [search(context)] : [])];
  const code = h("div", {});
  root.classList.add("seq2seq");
  root.append(...parts.map((part) => part.node), code);
  return {
    async draw(changed) {
      await Promise.all(parts.map((part) => part.draw(changed)));
      put(code, python(await inPython(context)));
    },
    close() {
      for (const part of parts) part.close?.();
    },
  };
}

/**
 * The same in Python.
 * @param {ViewContext} context
 * @returns {Promise<string>}
 */
async function inPython(context) {
  const { lines, inputs } = preamble(context);
  const { of, layer, head } = selection(context);
  const part = { head: `[${layer}, 0, ${head}]`, layer: `[${layer}, 0].mean(0)`, all: "[:, 0].mean((0, 1))" }[of];
  const { beams, penalty } = searched(context);
  const work = [
    'with gh.record(model, "decoder.cross_pattern.*") as seen, torch.no_grad():',
    `    model(${inputs})`,
    `weights = seen["decoder.cross_pattern.*"]${part}  # [target, source]`,
  ];
  if (context.model.generates)
    work.push(
      `hypotheses = gh.generate(model, tok, source.tolist(), max_new_tokens=48, beams=${beams}, n=${beams}, length_penalty=${penalty}, keep_tree=True)`,
    );
  return [...lines, ...(await within(context, work))].join("\n");
}
