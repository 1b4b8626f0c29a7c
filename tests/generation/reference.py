"""Reference generation: one request, no cache, the whole sequence recomputed for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glasshouse.generation import SamplingParams
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.models import Decoder, Seq2Seq


def reference_generate(
    model: Decoder | Seq2Seq, prompt: Sequence[int], options: SamplingParams, max_len: int
) -> list[int]:
    """Return the new tokens, with the engine's sampler, alone in its first slot."""
    end_ids = {*model.spec.end_ids, *options.stop_token_ids}
    text = [model.spec.start_id] if isinstance(model, Seq2Seq) else list(prompt)
    sampler = Sampler(1, model.spec.vocab_size, torch.device("cpu"))
    sampler.slots.set(0, options, text, sorted(end_ids))
    new: list[int] = []
    with torch.no_grad():
        while len(new) < min(options.max_new_tokens, max_len - (1 if isinstance(model, Seq2Seq) else len(prompt))):
            ids = torch.tensor([text + new])
            logits = model(torch.tensor([prompt]), ids) if isinstance(model, Seq2Seq) else model(ids)
            token = int(sampler.sample(logits[:, -1])[0])
            if token in end_ids:
                break
            new.append(token)
    return new
