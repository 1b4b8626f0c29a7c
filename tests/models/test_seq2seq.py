"""Encoder-decoders: a packed target attends to its own source, by document number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import glasshouse as gh


def test_documents_of_the_target_attend_to_the_source_of_the_same_number() -> None:
    """In any order of the documents, and with padding that has its own number."""
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-seq2seq", init="normal"), dtype=torch.float64).eval()
    source, target = torch.randint(0, 256, (1, 9)), torch.randint(0, 256, (1, 6))
    documents = torch.tensor([[-1, -1, 4, 4, 4, 9, 9, -1, -1]])
    target_documents = torch.tensor([[9, 9, 4, 4, 4, -1]])
    out = model(
        source,
        target,
        documents=documents,
        mask=documents >= 0,
        target_documents=target_documents,
        target_mask=target_documents >= 0,
    )
    for number in (4, 9):
        theirs, mine = documents[0] == number, target_documents[0] == number
        alone = model(source[:, theirs], target[:, mine])
        assert (out[:, mine] - alone).abs().max() < 1e-12 * alone.abs().max()


def test_the_encoder_runs_once_for_a_cached_target() -> None:
    model = gh.build(gh.preset("tiny-seq2seq")).eval()
    runs = []
    model.encoder.register_forward_hook(lambda *_: runs.append(1))
    source, target, cache = torch.randint(0, 256, (2, 5)), torch.randint(0, 256, (2, 4)), model.make_cache(2, 4, 5)
    with torch.no_grad():
        model(source, target[:, :1], cache=cache)
        for t in range(1, 4):
            model(None, target[:, t : t + 1], cache=cache)
    assert len(runs) == 1


def test_a_cache_without_a_source_is_refused() -> None:
    model, other = gh.build(gh.preset("tiny-seq2seq")), gh.build(gh.preset("tiny-decoder"))
    ids = torch.tensor([[1, 2]])
    with pytest.raises(gh.GlasshouseError, match="no room for a source; make one with this model's make_cache"):
        model(ids, ids, cache=other.make_cache(1, 8))


def test_wrapped_attention_is_cached() -> None:
    class Wrapper(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *arguments: object) -> torch.Tensor:
            return self.layer(*arguments)

    model = gh.build(gh.preset("tiny-seq2seq", start_id=1)).eval()
    expected = gh.generate(model, None, [[5, 6, 7]], max_new_tokens=4)[0].ids
    for block in model.decoder.blocks:
        for part in (block.attention, block.cross):
            part.layer = Wrapper(part.layer)
    assert gh.generate(model, None, [[5, 6, 7]], max_new_tokens=4)[0].ids == expected
