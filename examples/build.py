"""Build a model, run it, and say what it is: the first look at a transformer made from a spec."""

import torch

import glasshouse as gh
from glasshouse import config

spec = gh.preset("modern-small")
torch.manual_seed(0)
model = gh.build(spec).eval()
ids = torch.randint(0, spec.vocab_size, (2, 16))
with torch.inference_mode():
    logits = model(ids)
    probabilities = logits[0, -1].softmax(-1)

print("A spec is what a model is; as TOML it reads\n")
print(config.to_toml(config.dump(spec)))
print(f"It has {gh.count_parameters(spec):,} parameters. One block, as it is built:\n")
print(model.stack.blocks[0])
print(f"\nids {list(ids.shape)} -> logits {list(logits.shape)}")
print(f"Untrained, it finds every next token about as likely: {probabilities.max():.2%} at most,")
print(f"{1 / spec.vocab_size:.2%} for a fair die of {spec.vocab_size:,} sides.")
print(f"\nOther presets: {', '.join(gh.presets())}")
