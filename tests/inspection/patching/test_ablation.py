"""Ablation against a loop over edits, with losses computed token by token.

Tolerances are those of tests/models/test_properties.py: float64, some dozen operations deep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspected_models import IDS, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection import editing
from glasshouse.inspection.editing import mean_ablate
from glasshouse.inspection.patching.ablation import ablation_effects
from glasshouse.models import Seq2Seq

many = settings(max_examples=up_to(40), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def some_number(output: Tensor) -> Tensor:
    """Return a metric with another weight for each element of an output, so that every change shows."""
    return (output * torch.arange(output.numel(), dtype=output.dtype).sin().view(output.shape)).sum()


def loss_by_hand(logits: Tensor, targets_at: list[tuple[int, int, int]]) -> float:
    """Return the mean of -log p over (row, position, target)."""
    lost = []
    for row, position, answer in targets_at:
        numbers = logits[row, position].tolist()
        lost.append(math.log(sum(math.exp(number) for number in numbers)) - numbers[answer])
    return sum(lost) / len(lost)


@many
@given(
    specs(), st.sampled_from(["head", "feedforward"]), st.sampled_from(["zero", "mean"]), st.sampled_from([1, 2**25])
)
def test_ablation_equals_a_loop_over_edits(
    s: spec.Spec, by: Literal["head", "feedforward"], to: Literal["zero", "mean"], most: int
) -> None:
    """For any spec, and any number of edits in a batch."""
    model = build_random(s)
    prefix = "decoder." if isinstance(model, Seq2Seq) else ""
    plain = some_number(model(*inputs(model)))
    rows = []
    for layer in range(s.n_layers):
        rows.append([])
        for place in range(s.n_heads if by == "head" else 1):
            silent: dict[str, Any] = {f"{prefix}z.{layer}": gh.ablate_head(place, to=to)}
            if by == "feedforward":
                silent = {f"{prefix}ffn_out.{layer}": 0.0 if to == "zero" else mean_ablate()}
            with gh.edit(model, silent):
                rows[-1].append(some_number(model(*inputs(model))))
    kwargs: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(editing, "MAX_ELEMENTS", most)
        found = ablation_effects(
            model, *inputs(model), metric=some_number, component=by, to=to, progress=lambda *now: kwargs.append(now)
        )
    expected = torch.tensor(rows, dtype=torch.float64)
    assert_close(found.metric_increase + plain, expected)
    assert_close(found.baseline, plain)
    assert kwargs[-1] == (expected.numel(), expected.numel())


def test_next_token_loss_by_hand() -> None:
    model = small()
    targets_at = [(row, i, int(IDS[row, i + 1])) for row in range(2) for i in range(5)]
    found = ablation_effects(model, IDS)
    assert float(found.baseline) == pytest.approx(loss_by_hand(model(IDS), targets_at), rel=1e-12)
    with gh.edit(model, {"z.1": gh.ablate_head(3)}):
        silent = loss_by_hand(model(IDS), targets_at)
    assert float(found.baseline + found.metric_increase[1, 3]) == pytest.approx(silent, rel=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "counted"),
    [
        ({"lengths": [6, 3]}, [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]),
        (
            {"mask": [[False, True, True, True, True, True], [True, True, False, True, True, True]]},
            [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 3), (1, 4)],
        ),
        (
            {"documents": [[0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 2]]},
            [(0, 0), (0, 1), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 3)],
        ),
    ],
)
def test_padding_and_document_ends_are_ignored(kwargs: dict[str, Any], counted: list[tuple[int, int]]) -> None:
    model = small()
    call = {name: torch.tensor(value) for name, value in kwargs.items()}
    real = call.get("mask", torch.ones_like(IDS))
    after = [next(j for j in range(i + 1, 6) if real[row, j]) for row, i in counted]  # past holes in a text
    targets_at = [(row, i, int(IDS[row, j])) for (row, i), j in zip(counted, after, strict=True)]
    found = ablation_effects(model, IDS, **call)
    assert float(found.baseline) == pytest.approx(loss_by_hand(model(IDS, **call), targets_at), rel=1e-12)
    with gh.edit(model, {"z.0": gh.ablate_head(2)}):
        silent = loss_by_hand(model(IDS, **call), targets_at)
    assert float(found.baseline + found.metric_increase[0, 2]) == pytest.approx(silent, rel=1e-12)


def test_mean_ablation_ignores_padding() -> None:
    model, text = small(), IDS[:1, :4]
    alone = ablation_effects(model, text, to="mean")
    for filler in (0, 7):
        padded = torch.cat([text, torch.full((1, 5), filler)], 1)
        found = ablation_effects(model, padded, to="mean", lengths=torch.tensor([4]))
        assert (found.metric_increase - alone.metric_increase).abs().max() < 1e-10


def test_a_cache_is_refused() -> None:
    model = small()
    with pytest.raises(gh.InputError, match="cache was given, but whole sequences are inspected"):
        ablation_effects(model, IDS, cache=model.make_cache(2, 8))
    with pytest.raises(gh.InputError, match="cache was given"):
        gh.patch(model, IDS, IDS, "z.0", cache=model.make_cache(2, 8))


def test_only_logits_to_keep_count() -> None:
    model, keep = small(), torch.tensor([1, 4])
    targets_at = [(row, i, int(IDS[row, place + 1])) for row in range(2) for i, place in enumerate((1, 4))]
    found = ablation_effects(model, IDS, logits_to_keep=keep)
    assert float(found.baseline) == pytest.approx(
        loss_by_hand(model(IDS, logits_to_keep=keep), targets_at), rel=1e-12
    )


def test_targets_of_a_masked_language_model() -> None:
    torch.manual_seed(0)
    model = build_random(gh.preset("tiny-encoder", vocab_size=11))
    targets = torch.full_like(IDS, -100)
    targets[0, 2], targets[1, 5] = 7, 3
    found = ablation_effects(model, IDS, targets=targets)
    assert float(found.baseline) == pytest.approx(loss_by_hand(model(IDS), [(0, 2, 7), (1, 5, 3)]), rel=1e-12)


def test_targets_of_a_sequence_classifier() -> None:
    torch.manual_seed(0)
    model = build_random(
        gh.preset("tiny-encoder", vocab_size=11, head={"kind": "sequence_classification", "n_labels": 4})
    )
    found = ablation_effects(model, IDS, targets=torch.tensor([3, 1]))
    assert float(found.baseline) == pytest.approx(
        loss_by_hand(model(IDS)[:, None], [(0, 0, 3), (1, 0, 1)]), rel=1e-12
    )


def test_stacks_and_cross_attention_of_an_encoder_decoder() -> None:
    torch.manual_seed(0)
    model = build_random(gh.preset("tiny-seq2seq", vocab_size=11))
    source, target = inputs(model)
    targets_at = [(row, i, int(target[row, i + 1])) for row in range(2) for i in range(4)]
    plain = loss_by_hand(model(source, target), targets_at)
    for kwargs, site in (
        ({}, "decoder.z"),
        ({"component": "cross_head"}, "decoder.cross_z"),
        ({"stack": "encoder"}, "encoder.z"),
    ):
        found = ablation_effects(model, source, target, **kwargs)
        assert float(found.baseline) == pytest.approx(plain, rel=1e-12)
        with gh.edit(model, {f"{site}.1": gh.ablate_head(1)}):
            silent = loss_by_hand(model(source, target), targets_at)
        assert float(found.baseline + found.metric_increase[1, 1]) == pytest.approx(silent, rel=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "counted"),
    [
        ({"lengths": [3, 6], "target_lengths": [5, 2]}, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]),
        (
            {
                "documents": [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]],
                "target_documents": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]],
            },
            [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)],
        ),
    ],
)
def test_padding_and_documents_of_a_target(kwargs: dict[str, Any], counted: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = build_random(gh.preset("tiny-seq2seq", vocab_size=11))
    source, target = inputs(model)
    call = {name: torch.tensor(value) for name, value in kwargs.items()}
    targets_at = [(row, i, int(target[row, i + 1])) for row, i in counted]
    found = ablation_effects(model, source, target, **call)
    assert float(found.baseline) == pytest.approx(loss_by_hand(model(source, target, **call), targets_at), rel=1e-12)
    with gh.edit(model, {"decoder.z.0": gh.ablate_head(1)}):
        silent = loss_by_hand(model(source, target, **call), targets_at)
    assert float(found.baseline + found.metric_increase[0, 1]) == pytest.approx(silent, rel=1e-12)


def test_a_tensor_given_to_edit_is_not_modified() -> None:
    model, held = small(), torch.randn(2, 4, 6, 16, dtype=torch.float64)
    before = held.clone()
    with pytest.MonkeyPatch.context() as patched, gh.edit(model, {"z.0": held}):
        patched.setattr(editing, "MAX_ELEMENTS", 1)  # one copy at a time, which is the given tensor itself
        ablation_effects(model, IDS)
    assert torch.equal(held, before)


def test_a_head_without_output_has_no_effect() -> None:
    model = small()
    model.stack.blocks[1].attention.layer.out.weight[:, 16:32] = 0.0  # head 1 of width 16
    growth = ablation_effects(model, IDS).metric_increase
    assert growth[1, 1].abs() < 1e-12
    assert (growth.flatten()[[0, 1, 2, 3, 4, 6, 7]].abs() > 1e-6).all()


def test_invalid_ablations_are_refused() -> None:
    model, encoder = small(), build_random(gh.preset("tiny-encoder", vocab_size=11))
    for options, sentence in (
        ({"to": "noise"}, "to is 'noise', which is unknown; it has zero, mean"),
        ({"component": "layer"}, "component is 'layer', which is unknown"),
        ({"component": "cross_head"}, "the layers have no site 'cross_z'"),
        ({"targets": IDS[:, :3]}, r"targets has shape \[2, 3\], but the logits have \[2, 6\]; give one for each"),
        (
            {"targets": torch.full_like(IDS, -100)},
            "no token has a target; give a longer text",
        ),
    ):
        with pytest.raises(InputError, match=sentence):
            ablation_effects(model, IDS, **options)
    with pytest.raises(InputError, match="no token has a target"):
        ablation_effects(model, IDS[:, :1])
    with pytest.raises(InputError, match=r"the model does not predict next tokens, .*; give targets"):
        ablation_effects(encoder, IDS)
    with pytest.raises(InputError, match="the model outputs vectors, not logits"):
        ablation_effects(small(head="none"), IDS)


def test_ablation_html() -> None:
    found = ablation_effects(small(), IDS)
    html = found._repr_html_()
    assert html.count("<td") == found.metric_increase.numel()
    assert "layer 1" in html
    assert set(found.axes) == {name for name, value in vars(found).items() if isinstance(value, Tensor)}
