"""The logit lens by hand, and for all specs against a direct computation.

Models run in float64: rounding is 1e-16 of the largest entry, a few dozen operations deep, and 1e-10 leaves room for
that and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from examples import SHARE, up_to
from hypothesis import HealthCheck, assume, given, settings
from inspected_models import IDS, Model, assert_close, build_random, inputs
from spec_strategy import VOCABULARY, specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.inspection import logit_lens
from glasshouse.inspection.logit_lens import lens
from glasshouse.layers import lora
from glasshouse.models import Encoder, Seq2Seq

HEADS = (spec.NextToken(bias=True), spec.MaskedToken(), spec.TokenClassification(3))  # with logits at every position
EVERYWHERE = tuple(type(head) for head in HEADS)
fast = settings(
    max_examples=up_to(60), derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def tiny(kind: str = "tiny-decoder", **choices: object) -> Model:
    torch.manual_seed(3)
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "d_ff": 24, "vocab_size": VOCABULARY}
    return build_random(gh.preset(kind, **sizes, **choices))


def kwargs_of(model: Model, name: str, value: Tensor) -> dict[str, Tensor]:
    """Return keyword arguments for the stack that feeds the head."""
    return {f"target_{name}" if isinstance(model, Seq2Seq) else name: value}


def test_by_hand() -> None:
    """The token's vector is (1, 1) and the only layer adds (-2, 0), which makes (-1, 1).

    Of both the mean square is 1, which with an epsilon of 3 the norm divides by 2. The logits are 2 ln 2 times the
    first number, and twice 0: ln 2, 0, 0 at first, and -ln 2, 0, 0 in the end.
    """
    s = spec.DecoderSpec(
        vocab_size=3,
        d_model=2,
        n_layers=1,
        n_heads=1,
        d_ff=2,
        max_len=2,
        position=spec.NoPosition(),
        norm=spec.RMSNorm(eps=3.0),
        head=spec.NextToken(tied=False),
        ffn_bias=True,
    )
    model = gh.build(s, dtype=torch.float64)
    with torch.no_grad():
        for block in model.stack.blocks:
            for weight in (*block.attention.layer.parameters(), *block.feedforward.layer.parameters()):
                weight.zero_()
            block.feedforward.layer.down.bias.copy_(torch.tensor([-2.0, 0.0]))
        model.token_embedding.table.weight.fill_(1.0)
        model.head.weight.zero_()
        model.head.weight[0, 0] = 2 * math.log(2)
    seen = lens(model, torch.tensor([[1, 0]]), top_k=3)
    assert seen.sites == ("embed", "resid_post.0")
    near = {"rtol": 0, "atol": 1e-14}
    halves, fifths = [1 / 2, 1 / 4, 1 / 4], [2 / 5, 2 / 5, 1 / 5]
    expected = torch.tensor([[[halves, halves]], [[fifths, fifths]]], dtype=torch.float64)
    torch.testing.assert_close(seen.probabilities, expected, **near)
    entropies = [1.5 * math.log(2), -0.2 * math.log(0.2) - 0.8 * math.log(0.4)]
    torch.testing.assert_close(seen.entropy[:, 0, 0], torch.tensor(entropies, dtype=torch.float64), **near)
    assert seen.tokens[0, 0, 0, 0] == 0
    assert seen.tokens[1, 0, 0, 2] == 0
    assert seen.rank[:, 0].tolist() == [[0, -1], [2, -1]]
    losses = torch.tensor([math.log(2), math.log(5)], dtype=torch.float64)
    torch.testing.assert_close(seen.loss[:, 0, 0], losses, **near)
    assert seen.loss[:, 0, 1].isnan().all()


@pytest.mark.slow  # a few specs do not cover every kind
@torch.no_grad()
def test_each_layer_is_the_residual_stream_through_norm_and_head() -> None:
    seen_kinds = set()

    @settings(fast, max_examples=up_to(150))  # enough to draw every norm placement with and without a final norm
    @given(specs())
    def holds(s: spec.Spec) -> None:
        assume(isinstance(s.head, EVERYWHERE))
        torch.manual_seed(0)
        model = build_random(s)
        prefix, stack = ("decoder.", model.decoder) if isinstance(model, Seq2Seq) else ("", model.stack)
        call = inputs(model)
        with gh.record(model, f"{prefix}embed", f"{prefix}resid_post.*") as recorded:
            own = model(*call)
        seen = lens(model, *call, top_k=50)
        seen_kinds.add((s.kind, s.head.kind, s.norm_placement, s.final_norm))
        assert seen.sites == (f"{prefix}embed", *(f"{prefix}resid_post.{n}" for n in range(s.n_layers)))
        assert torch.equal(seen.ids, call[-1])
        spread = torch.zeros_like(seen.probabilities).scatter(-1, seen.tokens, seen.probabilities)
        assert_close(spread[-1], own.softmax(-1))
        for row, probabilities in zip(seen.sites, spread, strict=True):
            stream = recorded[row]
            assert stream.shape[:2] == call[-1].shape
            assert_close(
                probabilities, model.head(stack.norm(stream), None, model.token_embedding.table.weight).softmax(-1)
            )
        assert (seen.probabilities.diff(dim=-1) <= 0).all()

    holds()
    if SHARE > 1:
        return  # so few examples need not have every kind
    assert {kind for kind, *_ in seen_kinds} == {"decoder", "encoder", "seq2seq"}
    assert {head for _, head, *_ in seen_kinds} == {"next_token", "masked_token", "token_classification"}
    assert {rest for *_, order, final in seen_kinds for rest in [(order, final)]} == {
        (order, final) for order in ("pre", "post", "sandwich", "output", "parallel") for final in (True, False)
    }


def reference(probabilities: list[float], true: int | None) -> tuple[float, int, float]:
    """Return entropy, rank and loss by their definitions."""
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    if true is None:
        return entropy, -1, math.nan
    return entropy, sum(p > probabilities[true] for p in probabilities), -math.log(probabilities[true])


def check_slowly(model: Model, true: list[list[int | None]], **call: Tensor) -> None:
    """Compare with the definitions, layer by layer and position by position."""
    seen = lens(model, *inputs(model), top_k=VOCABULARY, **call)
    spread = torch.zeros_like(seen.probabilities).scatter(-1, seen.tokens, seen.probabilities)
    for layer, probabilities in enumerate(spread.tolist()):
        for b, row in enumerate(true):
            for i, one in enumerate(row):
                entropy, rank, loss = reference(probabilities[b][i], one)
                assert seen.entropy[layer, b, i].item() == pytest.approx(entropy, rel=1e-9, abs=1e-9)
                assert seen.rank[layer, b, i].item() == rank
                assert seen.loss[layer, b, i].item() == pytest.approx(loss, rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.few(2)
@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        *((kind, head) for kind in ("decoder", "encoder") for head in HEADS),
        ("seq2seq", spec.NextToken()),
    ],
)
def test_entropy_rank_and_loss_by_their_definitions(kind: str, head: spec.Head) -> None:
    """With the default targets of each kind of model, with padding, and with given targets."""

    @settings(fast, max_examples=10)
    @given(specs())
    def holds(s: spec.Spec) -> None:
        assume(s.kind == kind)
        torch.manual_seed(0)
        model = build_random(dataclasses.replace(s, head=head))
        ids = inputs(model)[-1].tolist()
        length = len(ids[0])
        padded = kwargs_of(model, "lengths", torch.tensor([length, length - 2]))
        for call, counts in (({}, (length, length)), (padded, (length, length - 2))):
            true: list[list[int | None]] = [[None] * length for _ in ids]
            for b, count in enumerate(counts):
                for i in range(count):
                    if isinstance(head, spec.TokenClassification):
                        continue  # an id is no label
                    if isinstance(model, Encoder):
                        true[b][i] = ids[b][i]
                    elif i + 1 < count:
                        true[b][i] = ids[b][i + 1]
            check_slowly(model, true, **call)
        targets = torch.arange(2 * length).view(2, length) % 3
        targets[0, 1] = -100
        wanted: list[list[int | None]] = [list(row) for row in targets.tolist()]
        wanted[0][1] = wanted[1][-1] = wanted[1][-2] = None
        check_slowly(model, wanted, targets=targets, **padded)

    holds()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_the_next_token_is_the_next_real_one_of_the_document(kind: str) -> None:
    model = tiny(kind)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    source = (ids,) if isinstance(model, Seq2Seq) else ()

    def losses(true: list[int], **call: Tensor) -> None:
        """Assert that the losses are those of these tokens, -1 for none."""
        seen = lens(model, *source, ids, **call)
        again = lens(model, *source, ids, **call, targets=torch.tensor([true]))
        torch.testing.assert_close(seen.loss, again.loss, rtol=0, atol=0, equal_nan=True)
        assert (seen.rank[0, 0] < 0).tolist() == [one < 0 for one in true]

    losses([6, 7, 8, 9, 10, -1])
    holes = torch.tensor([[False, True, True, False, False, True]])
    losses([-1, 7, 10, -1, -1, -1], **kwargs_of(model, "mask", holes))
    packed = {"documents": torch.tensor([[0, 0, 0, 1, 2, 2]])}
    if isinstance(model, Seq2Seq):
        packed["target_documents"] = packed["documents"]
    losses([6, 7, -1, -1, 10, -1], **packed)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_chosen_layers_and_positions_equal_those_of_the_full_lens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one row of logits at a time."""
    model = tiny(kind, n_layers=3)
    whole = lens(model, *inputs(model))
    length = whole.ids.shape[1]
    for logits in (logit_lens.MAX_LOGITS, 1, 2 * VOCABULARY, 7 * VOCABULARY + 3):
        monkeypatch.setattr(logit_lens, "MAX_LOGITS", logits)
        some = lens(model, *inputs(model), layers=[-1, 0, 2], positions=(3, -1, 1))
        places, layers = [3, length - 1, 1], [3, 0, 2]
        assert some.positions == tuple(places)
        assert some.sites == tuple(whole.sites[layer] for layer in layers)
        assert torch.equal(some.ids, whole.ids[:, places])
        for name in ("probabilities", "entropy", "loss"):
            assert_close(getattr(some, name), getattr(whole, name)[layers][:, :, places])
        for name in ("tokens", "rank"):
            assert torch.equal(getattr(some, name), getattr(whole, name)[layers][:, :, places])


@torch.no_grad()
def test_only_the_requested_logits_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, two texts and three positions are 12 rows, computed five at a time; later layers do not run."""
    model = tiny(n_layers=4)
    monkeypatch.setattr(logit_lens, "MAX_LOGITS", 5 * VOCABULARY)
    sizes, last = [], []
    forward = model.head.forward

    def counted(x: Tensor, layout: object, table: Tensor) -> Tensor:
        sizes.append(x.shape[:-1].numel())
        return forward(x, layout, table)

    monkeypatch.setattr(model.head, "forward", counted)
    model.stack.blocks[2].register_forward_hook(lambda *_: last.append(1))
    lens(model, IDS, layers=[1, 2], positions=[0, 1, 4])
    assert sizes == [5, 5, 2]
    assert not last


@torch.no_grad()
def test_train_mode_is_restored_and_dropout_off() -> None:
    model = tiny(dropout=0.5, embed_dropout=0.5, attention_dropout=0.5)
    quietly = lens(model, IDS)
    model.train()
    model.stack.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    with torch.enable_grad():
        seen = lens(model, IDS)
    assert torch.equal(seen.loss.nan_to_num(), quietly.loss.nan_to_num())
    assert not seen.loss.requires_grad
    assert [module.training for module in model.modules()] == modes


@torch.no_grad()
def test_half_precision_is_computed_in_float32() -> None:
    model = tiny().to(torch.bfloat16)
    seen = lens(model, IDS, top_k=VOCABULARY)
    assert seen.probabilities.dtype == seen.loss.dtype == torch.float32
    torch.testing.assert_close(seen.probabilities.sum(-1), torch.ones(3, *IDS.shape), rtol=0, atol=1e-5)


@torch.no_grad()
def test_edits_apply_and_recordings_are_not_disturbed() -> None:
    model = tiny()
    with gh.edit(model, {"resid_post.0": 0.0, "final[position=-1]": 1.0}), gh.record(model, "final") as seen:
        changed = lens(model, IDS, top_k=VOCABULARY)
        own = model(IDS).softmax(-1)
    assert_close(changed.probabilities[-1], own.gather(-1, changed.tokens[-1]))
    assert (
        changed.probabilities[1].std(dim=1).max() < 1e-12
    )  # predictions from a zero residual stream are the same everywhere
    assert seen["final"].shape == (*IDS.shape, 16)


@torch.no_grad()
def test_lora_is_included() -> None:
    model = tiny()
    lora.attach(model, lora.LoRA(rank=2, targets=("*",)))
    for tensor in lora.adapter_state_dict(model).values():
        tensor.normal_()
    attached = lens(model, IDS)
    lora.merge(model)
    assert_close(attached.loss, lens(model, IDS).loss)


@torch.no_grad()
def test_html_has_tokens_and_stays_small(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["<b>to be</b> or not"], vocab_size=263)
    model = build_random(gh.preset("tiny-decoder", vocab_size=263, max_len=512))
    ids = torch.tensor([tok.encode("<b>") * 100, tok.encode("to ") * 100])[:, :300]
    drawn = lens(model, ids, tok=tok)._repr_html_()
    assert drawn.count("<td") == 2 * 3 * 64
    assert "236 more positions" in drawn
    assert "<b>" not in drawn
    assert ">&lt;</th>" in drawn
    seen = lens(model, ids.repeat(3, 1), positions=[0])
    drawn = seen._repr_html_()
    assert drawn.count("<td") == 4 * 3
    assert "2 more texts" in drawn
    assert f">{seen.tokens[1, 0, 0, 0]}</td>" in drawn
    seen.save(tmp_path / "lens.html")
    labelled = build_random(
        gh.preset("tiny-encoder", head={"kind": "token_classification", "n_labels": 2, "labels": ["yes", "no"]})
    )
    words = {0: "yes", 1: "no"}
    seen = lens(labelled, ids[:1, :3])
    for word in {words[number] for number in seen.tokens[..., 0].flatten().tolist()}:
        assert f">{word}</td>" in seen._repr_html_()


def test_invalid_arguments_are_refused() -> None:
    model = tiny()
    for head in ("none", "pooled"):
        with pytest.raises(gh.InputError, match=f"the head is '{head}', but the lens needs logits at every position"):
            lens(tiny("tiny-encoder", head={"kind": head}), IDS)
    with pytest.raises(gh.InputError, match="the head is 'sequence_classification'"):
        lens(tiny("tiny-encoder", head={"kind": "sequence_classification", "n_labels": 3}), IDS)
    with pytest.raises(gh.InputError, match="positions contains 6, but there are 6; use 0 to 5"):
        lens(model, IDS, positions=[0, 6])
    with pytest.raises(gh.InputError, match="layers contains 3, but there are 3; use 0 to 2"):
        lens(model, IDS, layers=[3])
    with pytest.raises(gh.InputError, match="layers is empty"):
        lens(model, IDS, layers=[])
    with pytest.raises(gh.InputError, match="positions is empty"):
        lens(model, IDS, positions=[])
    with pytest.raises(gh.InputError, match="top_k is 0"):
        lens(model, IDS, top_k=0)
    with pytest.raises(gh.InputError, match=r"targets has shape \[2, 3\]"):
        lens(model, IDS, targets=IDS[:, :3])
    with pytest.raises(gh.InputError, match="targets contains 11, but the head has 11 logits"):
        lens(model, IDS, targets=IDS + 1)
    with pytest.raises(
        gh.InputError, match="positional inputs is 0, but this model takes 1; give ids right after it"
    ):
        lens(model, ids=IDS)
    with pytest.raises(gh.InputError, match="positional inputs is 1, but this model takes 2; give source and target"):
        lens(tiny("tiny-seq2seq"), IDS)
    with pytest.raises(gh.InputError, match="another model's"):
        lens(model, IDS, tok=gh.Tokenizer.train(texts=["to be"], vocab_size=263))
