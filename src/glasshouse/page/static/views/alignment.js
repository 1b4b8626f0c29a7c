// Encoder-decoder: where in the source each target token looks, and the tree of a beam search.

import { opening, within } from "glasshouse/code.js";
import { h, put } from "glasshouse/dom.js";
import { python } from "glasshouse/parts.js";
import { chosen } from "glasshouse/views/alignment/chosen.js";
import { looking } from "glasshouse/views/alignment/looking.js";
import { search, searched } from "glasshouse/views/alignment/search.js";

export function mount(glass, root) {
  const parts = [looking(glass), ...(glass.model.writes ? [search(glass)] : [])];
  const code = h("div", {});
  root.classList.add("alignment");
  root.append(...parts.map((part) => part.node), code);
  return {
    async draw(changed) {
      await Promise.all(parts.map((part) => part.draw(changed)));
      put(code, python(await inPython(glass)));
    },
    close: () => parts.forEach((part) => part.close?.()),
  };
}

/** The same in Python. */
async function inPython(glass) {
  const { lines, inputs } = opening(glass);
  const { of, layer, head } = chosen(glass);
  const part = { head: `[${layer}, 0, ${head}]`, layer: `[${layer}, 0].mean(0)`, all: "[:, 0].mean((0, 1))" }[of];
  const { beams, penalty } = searched(glass);
  const work = [
    'with gh.record(model, "decoder.cross_pattern.*") as seen, torch.no_grad():',
    `    model(${inputs})`,
    `weights = seen["decoder.cross_pattern.*"]${part}  # [target, source]`,
  ];
  if (glass.model.writes) work.push(`found = gh.generate(model, tok, source.tolist(), max_new_tokens=48, beams=${beams}, n=${beams}, length_penalty=${penalty}, keep_tree=True)`);
  return [...lines, ...(await within(glass, work))].join("\n");
}
