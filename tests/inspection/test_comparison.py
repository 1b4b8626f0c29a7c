"""Comparison of two models: by hand, against plain loops, and independent of padding and tiling.

Tolerances are those of tests/models/test_properties.py: float64, some dozen operations deep.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from inspected_models import Model, assert_close, build_random, inputs
from spec_strategy import specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection import attention_map, comparison, hooks
from glasshouse.inspection.comparison import Comparison, compare
from glasshouse.inspection.editing import scale
from glasshouse.inspection.inputs import stack_input
from glasshouse.layers import lora
from glasshouse.models import Seq2Seq

many = settings(max_examples=up_to(40), deadline=None, suppress_health_check=list(HealthCheck))
TENSORS = (
    "residual_distance",
    "pattern_distance",
    "z_distance",
    "ffn_out_distance",
    "kl_divergence",
    "loss_a",
    "loss_b",
)
TOKENS = torch.tensor([[5, 6, 5, 7, 5]])


def small(kind: str = "tiny-decoder", seed: int = 0, **settings_: object) -> Model:
    torch.manual_seed(seed)
    return build_random(gh.preset(kind, vocab_size=11, **settings_))


def relative_distance(a: list[float], b: list[float]) -> float:
    """Return the distance of b from a, relative to the norm of a."""
    apart = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    return apart / math.sqrt(sum(x * x for x in a)) if apart else 0.0


def log_softmax_of(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def reference(one: Model, other: Model) -> dict[str, Tensor]:
    """Compare two models element by element."""
    prefix = "decoder." if isinstance(one, Seq2Seq) else ""
    names = [prefix + name for name in ("embed", "resid_post.*", "pattern.*", "z.*", "ffn_out.*")]
    seen, answers = [], []
    for model in (one, other):
        with gh.record(model, *names) as recorded:
            answers.append(model(*inputs(model)).tolist())
        seen.append([recorded[name] for name in names])
    (embed, after, pattern, z, ffn), (embed2, after2, pattern2, z2, ffn2) = seen
    ids = inputs(one)[-1].tolist()
    depth, heads = pattern.shape[0], pattern.shape[2]
    places = [(row, place) for row in range(len(ids)) for place in range(len(ids[0]))]
    nothing = [[math.nan] * len(ids[0]) for _ in ids]
    divergence, losses = copy.deepcopy(nothing), [copy.deepcopy(nothing), copy.deepcopy(nothing)]
    if isinstance(one.spec.head, spec.NextToken | spec.MaskedToken | spec.TokenClassification):
        for row, place in places:
            p, q = (log_softmax_of(answer[row][place]) for answer in answers)
            divergence[row][place] = sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))
            if isinstance(one.spec.head, spec.NextToken) and place + 1 < len(ids[0]):
                for loss, said in zip(losses, (p, q), strict=True):
                    loss[row][place] = -said[ids[row][place + 1]]

    def variation(layer: int, head: int) -> float:
        pairs = [
            sum(
                abs(x - y)
                for x, y in zip(
                    pattern[layer, r, head, q].tolist(), pattern2[layer, r, head, q].tolist(), strict=True
                )
            )
            / 2
            for r, q in places
        ]
        return sum(pairs) / len(pairs)

    found = {
        "residual_distance": [
            [
                [relative_distance(a, b) for a, b in zip(*rows, strict=True)]
                for rows in zip(x.tolist(), y.tolist(), strict=True)
            ]
            for x, y in zip([embed, *after], [embed2, *after2], strict=True)
        ],
        "pattern_distance": [[variation(layer, head) for head in range(heads)] for layer in range(depth)],
        "z_distance": [
            [
                relative_distance(z[layer, :, head].flatten().tolist(), z2[layer, :, head].flatten().tolist())
                for head in range(heads)
            ]
            for layer in range(depth)
        ],
        "ffn_out_distance": [
            relative_distance(a.flatten().tolist(), b.flatten().tolist()) for a, b in zip(ffn, ffn2, strict=True)
        ],
        "kl_divergence": divergence,
        "loss_a": losses[0],
        "loss_b": losses[1],
    }
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


@many
@given(specs())
def test_distances_equal_plain_loops(s: spec.Spec) -> None:
    one, other = build_random(s), build_random(s)
    seen = compare(one, other, *inputs(one))
    for name, expected in reference(one, other).items():
        assert_close(getattr(seen, name), expected)


@many
@given(specs())
def test_a_model_has_distance_0_from_itself(s: spec.Spec) -> None:
    model = build_random(s)
    for other in (model, copy.deepcopy(model)):
        seen = compare(model, other, *inputs(model))
        assert all(
            (getattr(seen, name) == 0).all()
            for name in ("residual_distance", "pattern_distance", "z_distance", "ffn_out_distance")
        )
        assert (seen.kl_divergence.nan_to_num() == 0).all()
        assert torch.equal(seen.loss_a.nan_to_num(), seen.loss_b.nan_to_num())


def test_a_changed_head_is_located() -> None:
    one = small(n_layers=3)
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.stack.blocks[1].attention.layer.query.weight[2 * 16 : 3 * 16] += 1  # d_head is 16
    seen = compare(one, other, TOKENS)
    for field in (seen.pattern_distance, seen.z_distance):
        assert field[:2].nonzero().tolist() == [[1, 2]]
        assert (field[2] > 0).all()
    assert (seen.residual_distance[:2] == 0).all()
    # The first token attends to itself alone, whatever its query; the change reaches all later positions.
    assert (seen.residual_distance[2:, 0, 1:] > 0).all()
    assert (seen.residual_distance[:, 0, 0] == 0).all()
    assert seen.ffn_out_distance[0] == 0
    assert (seen.ffn_out_distance[1:] > 0).all()


def test_distances_by_hand() -> None:
    one = small()
    other = copy.deepcopy(one)
    with gh.edit(other, {"z.0[head=3]": scale(3.0), "ffn_out.1": scale(-1.0), "resid_post.1[position=2]": 0.0}):
        seen = compare(one, other, TOKENS)
    assert seen.z_distance[0].tolist() == pytest.approx([0, 0, 0, 2], abs=1e-12)
    assert float(seen.residual_distance[2, 0, 2]) == pytest.approx(1, abs=1e-12)
    with gh.edit(other, {"ffn_out.1": scale(-1.0), "resid_post.1": scale(0.25)}):
        seen = compare(one, other, TOKENS)
    assert seen.ffn_out_distance.tolist() == pytest.approx([0, 2], abs=1e-12)
    assert (seen.residual_distance[:2] == 0).all()


def test_two_zero_activations_have_distance_0() -> None:
    one, other = small(), small(seed=1)
    silent = {"ffn_out.0": 0.0, "z.0[head=1]": 0.0}
    with gh.edit(one, silent), gh.edit(other, silent):
        seen = compare(one, other, TOKENS)
    assert seen.ffn_out_distance[0] == 0
    assert seen.z_distance[0, 1] == 0
    with gh.edit(one, silent):
        assert compare(one, other, TOKENS).ffn_out_distance[0] == math.inf


def test_total_variation_by_hand_with_edits_of_either_model() -> None:
    one = small()
    other = copy.deepcopy(one)
    back = torch.diag(torch.ones(4), -1).double()
    back[0, 0] = 1
    half = (back + torch.eye(5)) / 2
    with gh.edit(one, {"pattern.1[head=1]": back}), gh.edit(other, {"pattern.1[head=1]": torch.eye(5)}):
        # All but the first of five attend to another token.
        assert compare(one, other, TOKENS).pattern_distance[1, 1] == 0.8
    with gh.edit(one, {"pattern.1[head=1]": back}), gh.edit(other, {"pattern.1[head=1]": half}):
        assert compare(one, other, TOKENS).pattern_distance[1].tolist() == [0, 0.4, 0, 0]
    with gh.edit(one, {"scores.0[head=1]": lambda scores: scores + 1}):
        assert (
            compare(one, other, TOKENS).pattern_distance.abs().max() < 1e-14
        )  # a softmax is invariant to a constant shift


def test_kl_divergence_and_loss_by_hand() -> None:
    """Of two logits 0 and ln 3 the probabilities are 1/4 and 3/4; of two zeros, halves."""
    one = build_random(
        gh.preset("tiny-decoder", vocab_size=2, head={"kind": "next_token", "tied": False, "bias": True})
    )
    other = copy.deepcopy(one)
    with torch.no_grad():
        for model, last in ((one, math.log(3)), (other, 0.0)):
            model.head.weight.zero_()
            model.head.bias.copy_(torch.tensor([0, last]))
    seen = compare(one, other, torch.tensor([[0, 1, 0]]))
    apart = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert seen.kl_divergence[0].tolist() == pytest.approx([apart] * 3, abs=1e-7)  # ln 3 went through float32
    assert seen.loss_a[0, :2].tolist() == pytest.approx([-math.log(0.75), -math.log(0.25)], abs=1e-7)
    assert seen.loss_b[0, :2].tolist() == pytest.approx([math.log(2)] * 2, abs=1e-12)
    assert seen.loss_a[0, 2].isnan()


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder"])
def test_padding_changes_nothing(kind: str) -> None:
    one, other = small(kind), small(kind, seed=1)
    alone = compare(one, other, TOKENS)
    inside = torch.tensor([[1, 5, 6, 2, 5, 7, 5, 3]])
    mask = torch.tensor([[False, True, True, False, True, True, True, False]])
    padded = compare(one, other, inside, mask=mask)
    for name in ("pattern_distance", "z_distance", "ffn_out_distance"):
        assert_close(getattr(padded, name), getattr(alone, name))
    for name in ("residual_distance", "kl_divergence", "loss_a", "loss_b"):
        assert getattr(padded, name)[..., ~mask[0]].isnan().all()
        assert_close(getattr(padded, name)[..., mask[0]], getattr(alone, name))


def test_documents_have_no_next_token_across_their_border() -> None:
    one, other = small(), small(seed=1)
    packed = compare(one, other, torch.tensor([[5, 6, 5, 6]]), documents=torch.tensor([[3, 3, 8, 8]]))
    alone = compare(one, other, torch.tensor([[5, 6]]))
    assert packed.loss_a[0].isnan().tolist() == [False, True, False, True]
    assert_close(packed.loss_a[:, 2:], alone.loss_a)
    for name in ("pattern_distance", "z_distance", "ffn_out_distance"):
        assert_close(getattr(packed, name), getattr(alone, name))


@pytest.mark.parametrize("kwargs", [{}, {"prefix_lengths": torch.tensor([3])}])
@pytest.mark.parametrize("position", ["relative", "alibi", "rotary"])
def test_masks_and_score_biases_may_differ(position: str, kwargs: dict[str, Tensor]) -> None:
    """Windows, soft-caps and position biases may differ in models of one shape."""
    one = small(position=position, windows=(2, 0), attention_softcap=5.0)
    other = small(position="learned", seed=1)
    seen, patterns_ = compare(one, other, TOKENS, **kwargs), []
    for model in (one, other):
        with gh.record(model, "pattern.*") as recorded:
            model(TOKENS, **kwargs)
        patterns_.append(recorded["pattern.*"])
    assert_close(seen.pattern_distance, ((patterns_[0] - patterns_[1]).abs().sum(-1) / 2).mean((1, 3)))


def test_tiling_is_exact_and_never_materializes_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = small(), small(seed=1)
    whole = compare(one, other, TOKENS)
    made, recompute_attention = [], attention_map.recompute_attention

    def spy(*args: object) -> Tensor:
        made.append(recompute_attention(*args))
        return made[-1]

    monkeypatch.setattr(hooks, "recompute_attention", spy)
    monkeypatch.setattr(comparison, "recompute_attention", spy)
    monkeypatch.setattr(stack_input, "TILE", 1)
    monkeypatch.setattr(comparison, "MAX_LOGITS", 1)
    tiled = compare(one, other, TOKENS)
    for name in TENSORS:
        assert_close(getattr(tiled, name), getattr(whole, name))
    assert {one.shape[2] for one in made} == {1}
    assert len(made) == 2 * 2 * 5  # models, layers, queries


def test_each_model_runs_once_and_is_unchanged() -> None:
    one, other = small(dropout=0.5), small(seed=1, dropout=0.5)
    expected = compare(one, other, TOKENS)
    calls = []
    for model in (one, other):
        model.train()
        model.register_forward_pre_hook(lambda module, args: calls.append(module))
    seen = compare(one, other, TOKENS)
    assert calls == [one, other]
    for name in TENSORS:
        assert_close(getattr(seen, name), getattr(expected, name))
        assert not getattr(seen, name).requires_grad
    assert one.training
    assert other.training


def test_a_model_with_lora_compared_with_its_base() -> None:
    one = small()
    other = copy.deepcopy(one)
    lora.attach(other, lora.LoRA(targets=("*",)))
    assert (compare(one, other, TOKENS).residual_distance == 0).all()
    with torch.no_grad():
        other.stack.blocks[1].feedforward.layer.down.lora_b.normal_()
    seen = compare(one, other, TOKENS)
    assert seen.ffn_out_distance[0] == 0
    assert seen.ffn_out_distance[1] > 0
    assert (seen.kl_divergence > 0).all()


def test_two_dtypes_are_compared_in_the_wider() -> None:
    one = small()
    other = copy.deepcopy(one).float()
    seen = compare(one, other, TOKENS)
    assert seen.residual_distance.dtype == torch.float64
    assert 0 < seen.residual_distance.max() < 1e-4  # float32 is good to 6e-8, some dozen operations deep


WORDS = "a rose is a rose, a pea is a pea"


def test_a_text_is_encoded_by_its_tokenizer() -> None:
    tok = gh.Tokenizer.train(texts=[WORDS], vocab_size=270)
    one, other = (build_random(gh.preset("tiny-decoder", vocab_size=len(tok))) for _ in range(2))
    seen, expected = (compare(one, other, text, tok=tok) for text in (WORDS, torch.tensor([tok.encode(WORDS)])))
    assert torch.equal(seen.ids, expected.ids)
    assert torch.equal(seen.kl_divergence, expected.kl_divergence)
    with pytest.raises(InputError, match="given without a tokenizer"):
        compare(one, other, WORDS)
    small_one = small()
    with pytest.raises(InputError, match="another model's"):
        compare(small_one, small_one, WORDS, tok=tok)


@pytest.mark.parametrize("ends", [True, False])
def test_a_text_pair_is_encoded_as_in_training(ends: bool) -> None:
    """A source ends with the end token, added by the tokenizer or not; a target begins with the start token."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "rose": 1, "pea": 2, "</s>": 3}, "unk_token": "a"}
    whole: dict[str, object] = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    if ends:
        last = {"</s>": {"id": "</s>", "ids": [3], "tokens": ["</s>"]}}
        text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
        template = {"type": "TemplateProcessing", "single": [text, end], "pair": [text, end], "special_tokens": last}
        whole["post_processor"] = template
    tok = gh.Tokenizer.from_json(json.dumps(whole))
    one, other = (build_random(gh.preset("tiny-seq2seq", vocab_size=6, start_id=5, end_ids=(3,))) for _ in range(2))
    ids = torch.tensor([[0, 1, 3]]), torch.tensor([[5, 0, 2]])
    seen, expected = compare(one, other, "a rose", "a pea", tok=tok), compare(one, other, *ids)
    assert torch.equal(seen.ids, ids[1])
    assert torch.equal(seen.residual_distance, expected.residual_distance)
    without = build_random(gh.preset("tiny-seq2seq", vocab_size=6, start_id=None))
    with pytest.raises(InputError, match="no start_id"):
        compare(without, without, "a rose", "a pea", tok=tok)


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        ({"n_layers": 3}, "the first model has n_layers = 2, but the second 3; compare two of one shape."),
        ({"n_heads": 2}, "n_heads = 4, but the second 2"),
        ({"d_model": 128}, "d_head = 16, but the second 32"),
        ({"d_model": 128, "d_head": 16}, "d_model = 64, but the second 128"),
        ({"vocab_size": 12}, "vocab_size = 11, but the second 12"),
        (
            {"head": {"kind": "token_classification", "n_labels": 3}},
            "head = next_token, but the second token_classification",
        ),
    ],
)
def test_models_of_two_shapes_are_refused(settings_: dict[str, object], sentence: str) -> None:
    one, other = small(), build_random(gh.preset("tiny-decoder", **{"vocab_size": 11, **settings_}))
    with pytest.raises(InputError, match=sentence):
        compare(one, other, TOKENS)


def test_models_of_two_kinds_or_devices_are_refused() -> None:
    with pytest.raises(InputError, match="kind = decoder, but the second encoder"):
        compare(small(), small("tiny-encoder"), TOKENS)
    with pytest.raises(InputError, match="the first model is on cpu, but the second on meta"):
        compare(small(), small().to("meta"), TOKENS)
    labels = [small(head={"kind": "token_classification", "n_labels": number}) for number in (2, 3)]
    with pytest.raises(InputError, match="n_labels = 2, but the second 3"):
        compare(*labels, TOKENS)
    with pytest.raises(InputError, match="logits_to_keep was given"):
        compare(small(), small(), TOKENS, logits_to_keep=torch.tensor([0]))


def test_html_is_small_and_escaped(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["<script>"], vocab_size=266)
    one, other = (build_random(gh.preset("tiny-decoder", vocab_size=len(tok), max_len=512)) for _ in range(2))
    long = compare(one, other, "<script> " * 100, tok=tok)
    drawn = long._repr_html_()
    more = long.ids.shape[1] - 64
    assert more > 0
    assert drawn.count(f"({more} more positions not drawn)") == 2
    assert drawn.count('<td class="word"') == 64
    assert "&lt;" in drawn
    assert "<script" not in drawn
    assert len(drawn) < 100_000
    top = int(long.kl_divergence.argmax())
    assert f"text 0, {top}:" in drawn  # the token that differs most is listed, though it may not be drawn
    long.save(tmp_path / "page.html")
    alike = compare(one, one, torch.tensor([[1, 2, 3]]))._repr_html_()
    assert alike.count('<td class="word"') == 16
    assert "text 0, " not in alike


def test_html_notes_how_many_texts_are_not_drawn() -> None:
    one, other = small(), small(seed=1)
    drawn = compare(one, other, torch.arange(6)[:, None].expand(6, 3).contiguous())._repr_html_()
    assert drawn.count("(2 more texts not drawn)") == 2 * 4


def test_every_tensor_has_its_axes_named() -> None:
    seen = compare(small(), small(), TOKENS)
    for name, axes in Comparison.axes.items():
        assert getattr(seen, name).dim() == len(axes)
    assert {field.name for field in fields(Comparison)} == {*Comparison.axes, "tok"}


def test_two_threads_compare_the_same_models_in_opposite_order() -> None:
    """Each pauses between locking the first model and the second, which would deadlock without a fixed order."""
    one, other = small(), small(seed=1)
    expected = compare(one, other, TOKENS).kl_divergence, compare(other, one, TOKENS).kl_divergence
    meeting = threading.Barrier(2)
    found: dict[int, Tensor] = {}

    class Slow:
        """A lock that lets another thread run after it is acquired."""

        def __init__(self, lock: threading.RLock) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            self.lock.acquire()
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)  # both have one lock, or one waits for the other

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    for model in (one, other):
        hooks.hook_manager_of(model).lock = Slow(hooks.hook_manager_of(model).lock)

    def run(number: int, *models: Model) -> None:
        found[number] = compare(*models, TOKENS).kl_divergence

    threads = [
        threading.Thread(target=run, args=(number, *models), daemon=True)
        for number, models in enumerate([(one, other), (other, one)])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)  # a guard against a deadlock
    assert not any(thread.is_alive() for thread in threads)
    for number in range(2):
        assert found[number].allclose(expected[number], equal_nan=True)
