"""Reading, changing and generating as with nnsight, on the same GPT-2 weights; `make inspection` installs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hub.hf_models import make
from table_rows import table_row
from torch import Tensor

import glasshouse as gh

# Not in `make test`: importing nnsight gives every Python object an attribute `save`, which hides the lazy `gh.save`.
pytestmark = pytest.mark.long

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def both(tmp_path: Path) -> tuple[gh.models.Model, Any]:
    """Our model and theirs, with the same weights."""
    nnsight = pytest.importorskip("nnsight", reason="it comes by `make inspection`")
    published = make("gpt2")
    published.save_pretrained(tmp_path)
    ours, _ = gh.load(tmp_path)
    return ours, nnsight.NNsight(published)


def same(value: Tensor, expected: Tensor) -> None:
    """Float32 rounding of some hundred operations in either, relative to the largest."""
    assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()


@table_row("nnsight `with model.trace(text): h = model.transformer.h[3].output.save()`")
def test_reading_a_layer(both: tuple[gh.models.Model, Any]) -> None:
    ours, model = both
    with model.trace(IDS):
        h = model.transformer.h[1].output.save()
    with gh.record(ours, "resid_post.1") as seen:
        gh.inspection.run(ours, IDS)
    same(seen["resid_post.1"], h)


@table_row("nnsight `model.transformer.h[3].output[:] = value`")
def test_changing_a_layer(both: tuple[gh.models.Model, Any]) -> None:
    ours, model = both
    value = torch.linspace(-1, 1, 40).expand(1, 8, 40)
    with model.trace(IDS):
        model.transformer.h[1].output[:] = value
        logits = model.output.logits.save()
    with torch.no_grad(), gh.edit(ours, {"resid_post.1": value}):
        found = ours(IDS)
    same(found, logits)


@table_row("nnsight `with model.generate(text): ...`")
def test_generating_with_a_change(both: tuple[gh.models.Model, Any]) -> None:
    ours, model = both
    push = 3 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    ids, expected = IDS, []
    for _ in range(12):  # greedy, without a cache
        with model.trace(ids):
            model.transformer.h[1].output[:] = model.transformer.h[1].output + push
            logits = model.output.logits.save()
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        expected.append(float(logits[0, -1].log_softmax(-1).max()))
    with gh.edit(ours, {"resid_post.1": gh.inspection.add(push)}):
        (found,) = gh.generate(ours, None, IDS.tolist(), max_new_tokens=12)
    assert found.ids == ids[0, IDS.shape[1] :].tolist()
    assert found.logprobs == pytest.approx(expected, abs=1e-4)
    (plain,) = gh.generate(ours, None, IDS.tolist(), max_new_tokens=12)
    assert plain.logprobs != pytest.approx(expected, abs=1e-2)
