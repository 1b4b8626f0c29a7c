"""Properties of every model: 50 specs drawn from the whole space of variants, 500 by `make models`.

Everything runs in float64, where rounding is about 1e-16 of the largest entry and a few dozen operations deep: 1e-10
leaves room for it and for nothing else. Weights are drawn anew and large, so that no block is close to the identity.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from spec_strategy import VOCABULARY, specs
from torch import Tensor

import glasshouse as gh
from glasshouse import config, spec, store
from glasshouse.models import Decoder, Encoder, Seq2Seq
from glasshouse.models.heads import NoHead

Model = Decoder | Encoder | Seq2Seq


def make(s: spec.Spec) -> Model:
    model = gh.build(s, dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape)


def close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    if a.numel():
        assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))


def run(model: Model, x: Tensor, **kwargs: Tensor | None) -> Tensor:
    """Run any model on one sequence; for an encoder-decoder it is both source and target."""
    if not isinstance(model, Seq2Seq):
        return model(x, **kwargs)
    return model(x, x, **kwargs, **{f"target_{name}": value for name, value in kwargs.items()})


def hidden_states(model: Model, x: Tensor, **kwargs: Tensor | None) -> Tensor:
    """Run without the head, so that a pooling model returns every position, too."""
    head, model.head = model.head, NoHead()
    try:
        return run(model, x, **kwargs)
    finally:
        model.head = head


def check_shapes(model: Model) -> None:
    s = model.spec
    assert sum(weight.numel() for weight in model.parameters()) == gh.count_parameters(s)
    expected = {
        spec.NextToken: (2, 5, s.vocab_size),
        spec.MaskedToken: (2, 5, s.vocab_size),
        spec.SequenceClassification: (2, getattr(s.head, "n_labels", 0)),
        spec.TokenClassification: (2, 5, getattr(s.head, "n_labels", 0)),
        spec.Pooled: (2, s.d_model),
        spec.NoHead: (2, 5, s.d_model),
    }
    out = run(model, ids(2, 5))
    assert out.shape == expected[type(s.head)]
    assert out.isfinite().all()


def check_batch_is_single(model: Model) -> None:
    x = ids(3, 6)
    close(run(model, x), torch.cat([run(model, row[None]) for row in x]))


def check_padded_is_alone(model: Model) -> None:
    text, garbage = ids(5), ids(2, 9)
    behind, ahead, holes = garbage.clone(), garbage.clone(), garbage.clone()
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1, 1], [1] * 9], dtype=torch.bool)
    behind[0, :5], ahead[0, 4:], holes[0, mask[0]] = text, text, text
    after = torch.tensor([[1] * 5 + [0] * 4, [1] * 9], dtype=torch.bool)
    alone = run(model, text[None])
    for padded, kwargs in (
        (behind, {"lengths": torch.tensor([5, 9])}),
        (behind, {"mask": after}),
        (ahead, {"mask": after.flip(1)}),
        (holes, {"mask": mask}),
    ):
        out = run(model, padded, **kwargs)
        assert out.isfinite().all()
        close(out[:1] if alone.dim() == 2 else out[:1, padding_of(kwargs, 9)[0]], alone)


def padding_of(kwargs: dict[str, Tensor], length: int) -> Tensor:
    return kwargs["mask"] if "mask" in kwargs else torch.arange(length) < kwargs["lengths"][:, None]


def check_packed_is_separate(model: Model) -> None:
    x = ids(2, 9)
    # Within a row a number used again further on is another document; between source and target it is a name.
    again = 5 if isinstance(model, Seq2Seq) else 0
    documents = torch.tensor([[7, 7, 7, 7, 0, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, again]])
    places = [
        (0, slice(0, 4)),
        (0, slice(4, 5)),
        (0, slice(5, 9)),
        (1, slice(0, 2)),
        (1, slice(2, 8)),
        (1, slice(8, 9)),
    ]
    real = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 1, 1], [1] * 8 + [0]], dtype=torch.bool)
    prefix = {"prefix_lengths": torch.tensor([2, 3])} if isinstance(model, Decoder) else {}
    for kwargs in ({}, {"mask": real}, prefix, {"mask": real, **prefix}):
        packed = hidden_states(model, x, documents=documents, **kwargs)
        for b, place in places:
            kept = kwargs.get("mask", torch.ones_like(real))[b, place]
            if kept.any():
                own = {"prefix_lengths": kwargs["prefix_lengths"][b : b + 1]} if "prefix_lengths" in kwargs else {}
                close(packed[b, place][kept], hidden_states(model, x[b, place][kept][None], **own)[0])


def check_future_changes_nothing(model: Decoder | Seq2Seq) -> None:
    x = ids(1, 8)
    source = (x,) if isinstance(model, Seq2Seq) else ()
    model.head, head = NoHead(), model.head
    before = model(*source, x)
    for j in range(1, 8):
        changed = x.clone()
        changed[0, j] = (x[0, j] + 1) % VOCABULARY
        after = model(*source, changed)
        close(after[:, :j], before[:, :j])
        assert (after[:, j] - before[:, j]).abs().max() > 0
    model.head = head


def check_cached_is_uncached(model: Decoder | Seq2Seq) -> None:
    x, source, heard = ids(2, 8), ids(2, 5), torch.tensor([5, 3])
    model.head, head = NoHead(), model.head

    def whole(**kwargs: Tensor) -> Tensor:
        return model(source, x, lengths=heard, **kwargs) if isinstance(model, Seq2Seq) else model(x, **kwargs)

    def chunks(sizes: list[int], **first: Tensor) -> Tensor:
        cache = model.make_cache(2, 8, 6) if isinstance(model, Seq2Seq) else model.make_cache(2, 8)
        outs, begin = [], 0
        for size in sizes:
            part, kwargs = x[:, begin : begin + size], {} if begin else first
            if isinstance(model, Seq2Seq):
                out = model(None if begin else source, part, lengths=None if begin else heard, cache=cache, **kwargs)
            else:
                out = model(part, cache=cache, **kwargs)
            outs.append(out)
            begin += size
        assert cache.lengths.tolist() == [begin, begin]
        return torch.cat(outs, 1)

    expected = whole()
    close(chunks([1] * 8), expected)
    close(chunks([3, 1, 4]), expected)
    if isinstance(model, Decoder):
        prefix = {"prefix_lengths": torch.tensor([3, 1])}
        close(chunks([4, 1, 3], **prefix), whole(**prefix))
    check_ragged_cache(model, x, source, heard, expected)
    model.head = head


def check_ragged_cache(model: Decoder | Seq2Seq, x: Tensor, source: Tensor, heard: Tensor, expected: Tensor) -> None:
    """Sequences at different positions, decoded in chunks with padding on either side."""
    cache = model.make_cache(2, 8, 6) if isinstance(model, Seq2Seq) else model.make_cache(2, 8)
    held = [0, 0]
    for turn, sizes in enumerate([(3, 1), (0, 2), (4, 1), (1, 4)]):
        part, mask = ids(2, 4), torch.zeros(2, 4, dtype=torch.bool)
        for b, size in enumerate(sizes):
            place = slice(0, size) if turn % 2 else slice(4 - size, 4)
            part[b, place], mask[b, place] = x[b, held[b] : held[b] + size], True
        kwargs = {"lengths": torch.tensor(sizes)} if turn % 2 else {"mask": mask}
        if isinstance(model, Seq2Seq):
            kwargs = {f"target_{name}": value for name, value in kwargs.items()}
            first = turn == 0
            out = model(source if first else None, part, lengths=heard if first else None, cache=cache, **kwargs)
        else:
            out = model(part, cache=cache, **kwargs)
        for b, size in enumerate(sizes):
            close(out[b, mask[b]], expected[b, held[b] : held[b] + size])
            held[b] += size
    assert cache.lengths.tolist() == held


def check_saved_is_loaded(model: Model, folder: Path) -> None:
    store.write(folder, model.state_dict(), config.dump(model.spec))
    tensors, about = store.read(folder)
    again = gh.build(spec.parse(about), dtype=torch.float64).eval()
    again.load_state_dict(tensors)
    x = ids(2, 6)
    assert torch.equal(run(model, x), run(again, x))


def check_spec_survives_text(s: spec.Spec) -> None:
    assert spec.parse(json.loads(json.dumps(config.dump(s)))) == s
    assert spec.parse(tomllib.loads(config.to_toml(config.dump(s)))) == s


@pytest.mark.parametrize("count", [3, pytest.param(500, marks=pytest.mark.long)])
def test_every_spec_keeps_its_promises(count: int, tmp_path: Path) -> None:
    seen: set[spec.Spec] = set()

    @settings(
        max_examples=count + min(count, 20),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def holds(s: spec.Spec) -> None:
        seen.add(s)
        torch.manual_seed(0)
        check_spec_survives_text(s)
        model = make(s)
        with torch.no_grad():
            check_shapes(model)
            check_batch_is_single(model)
            check_padded_is_alone(model)
            check_packed_is_separate(model)
            if not isinstance(model, Encoder):
                check_future_changes_nothing(model)
                check_cached_is_uncached(model)
            check_saved_is_loaded(model, tmp_path / "model")

    holds()
    assert len(seen) >= count
