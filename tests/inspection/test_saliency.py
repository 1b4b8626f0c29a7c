"""Saliency against finite differences and plain loops, which replace the token embedding by one that returns tensors.

Models run in float64. A loop and the tool sum the same products in another order: 1e-9 of the largest leaves room for
that. A central difference over 1e-5 is off by 1e-10 times the third derivative, and by rounding 1e-16 / 1e-5: 1e-6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, assume, given, settings
from inspected_models import IDS, Model, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection import Saliency, attention_rollout
from glasshouse.layers.attend.backends import BACKENDS, Flex
from glasshouse.layers.linear.int8 import quantize_int8
from glasshouse.layers.module_swap import clone_sharing_parameters
from glasshouse.models import Encoder, Seq2Seq
from glasshouse.models.heads import Classifier

MASKED = {"kind": "masked_token"}
CLASSIFIER = {"kind": "sequence_classification", "n_labels": 3, "labels": ["bad", "fair", "good"]}
TAGGER = {"kind": "token_classification", "n_labels": 3}
PACKED = torch.tensor([[7, 7, 7, 3, 3, 3], [1, 1, 1, 1, 2, 2]])


def tiny(kind: str = "tiny-decoder", **choices: object) -> Model:
    return small(kind, d_model=16, n_heads=2, d_ff=24, **choices)


def build_kinds() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("tiny-decoder", {}),
        ("tiny-encoder", {"head": CLASSIFIER}),
        ("tiny-seq2seq", {}),
        ("tiny-encoder", {"head": MASKED, "n_segments": 2}),
        ("tiny-decoder", {"head": {**CLASSIFIER, "pooling": "last"}, "position": "learned"}),
        ("tiny-encoder", {"head": TAGGER, "norm_placement": "post", "embed_norm": True}),
    ]


class Given(nn.Module):
    """A token embedding that returns given vectors, by the name of its ids."""

    def __init__(self, original: nn.Module, vectors: dict[str, Tensor]) -> None:
        super().__init__()
        self.table, self.scale, self.vectors = original.table, original.scale, vectors

    def forward(self, ids: Tensor, name: str = "ids") -> Tensor:
        return self.vectors[name]


def embed(model: Model, call: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the token embeddings of each input, by its name."""
    names = ("source", "target") if isinstance(model, Seq2Seq) else ("ids",)
    with torch.no_grad():
        return {name: model.token_embedding(ids) for name, ids in zip(names, call, strict=True)}


def run(model: Model, call: tuple[Tensor, ...], vectors: dict[str, Tensor], **kwargs: Tensor) -> Tensor:
    """Return the output with other token embeddings."""
    original = model.token_embedding
    model.token_embedding = Given(original, vectors)
    try:
        return model(*call, **kwargs)
    finally:
        model.token_embedding = original


def target_logits(model: Model, ids: Tensor, output: Tensor) -> Tensor:
    """Return the logit of each default target [B, T]: next token, token itself, or predicted label of `plain`."""
    if isinstance(model.head, Classifier):
        best = PLAIN[model].argmax(-1, keepdim=True)
        values = output.gather(-1, best)[..., 0]
        return values[:, None] if values.dim() == 1 else values
    if isinstance(model, Encoder):
        return output.gather(-1, ids[..., None])[..., 0]
    return output[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


PLAIN: dict[Model, Tensor] = {}


def value_function(model: Model, call: tuple[Tensor, ...], **kwargs: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    with torch.no_grad():
        PLAIN[model] = model(*call, **kwargs)
    return lambda vectors: target_logits(model, call[-1], run(model, call, vectors, **kwargs))


def slow_integral(
    value: Callable[[dict[str, Tensor]], Tensor], start: dict[str, Tensor], stop: dict[str, Tensor], steps: int
) -> dict[str, Tensor]:
    """Integrate with a forward and a backward pass for every step, sequence and target."""
    batch, targets = value(stop).shape
    found = {name: torch.zeros(batch, targets, x.shape[1], dtype=x.dtype) for name, x in stop.items()}
    for step in range(steps):
        share = (step + 0.5) / steps
        for b in range(batch):
            for t in range(targets):
                points = {
                    name: (start[name] + share * (x - start[name])).requires_grad_() for name, x in stop.items()
                }
                gradients = torch.autograd.grad(value(points)[b, t], list(points.values()), allow_unused=True)
                for name, gradient in zip(points, gradients, strict=True):
                    if gradient is not None:
                        found[name][b, t] += (gradient[b] * (stop[name][b] - start[name][b])).sum(-1) / steps
    return found


def by_input(found: Saliency) -> dict[str, Tensor]:
    if found.source_scores is None:
        return {"ids": found.scores}
    return {"source": found.source_scores, "target": found.scores}


@pytest.mark.parametrize(("kind", "choices"), build_kinds())
def test_gradient_times_input_is_the_derivative_by_the_scale_of_a_token(kind: str, choices: dict[str, Any]) -> None:
    model, h = tiny(kind, **choices), 1e-5
    call = inputs(model)
    value, at = value_function(model, call), embed(model, call)
    found = by_input(gh.saliency(model, *call, method="gradient_x_input"))
    assert found.keys() == at.keys()
    for name, x in at.items():
        expected = torch.zeros_like(found[name])
        for token in range(x.shape[1]):
            scaled = []
            for factor in (1 + h, 1 - h):
                moved = x.clone()
                moved[:, token] *= factor
                with torch.no_grad():
                    scaled.append(value({**at, name: moved}))
            expected[:, :, token] = (scaled[0] - scaled[1]) / (2 * h)
        assert expected.abs().max() > 0.01
        assert_close(found[name], expected, 1e-6)


@pytest.mark.parametrize("baseline", ["mean", "token", "vector"])
@pytest.mark.parametrize(("kind", "choices"), build_kinds())
@pytest.mark.few(8)
def test_integrated_gradients_equal_a_slow_loop(kind: str, choices: dict[str, Any], baseline: str) -> None:
    model, steps = tiny(kind, **choices), 3
    call = inputs(model, IDS[:, :4])
    value, stop = value_function(model, call), embed(model, call)
    table = model.token_embedding.table.weight.detach() * model.token_embedding.scale
    vector = torch.linspace(-1, 1, 16, dtype=torch.float64)
    given, start = {"mean": (None, table.mean(0)), "token": (7, table[7]), "vector": (vector, vector)}[baseline]
    starts = {name: start.expand_as(x) for name, x in stop.items()}
    found = gh.saliency(model, *call, steps=steps, baseline=given)
    for name, expected in slow_integral(value, starts, stop, steps).items():
        assert expected.abs().max() > 0.01
        assert_close(by_input(found)[name], expected, 1e-9)
    with torch.no_grad():
        assert_close(found.target_value, value(stop))
        assert found.baseline_value is not None
        assert_close(found.baseline_value, value(starts))


@settings(max_examples=up_to(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_any_spec_equals_a_slow_loop(s: spec.Spec) -> None:
    assume(not isinstance(s.head, spec.NoHead | spec.Pooled))
    model = build_random(s)
    call = inputs(model, IDS[:, :4])
    value, stop = value_function(model, call), embed(model, call)
    start = model.token_embedding.table.weight.detach().mean(0) * model.token_embedding.scale
    found = by_input(gh.saliency(model, *call, steps=2))
    for name, expected in slow_integral(
        value, {name: start.expand_as(x) for name, x in stop.items()}, stop, 2
    ).items():
        assert_close(found[name], expected, 1e-9)


@pytest.mark.parametrize(("kind", "choices"), build_kinds())
@pytest.mark.parametrize("of", ["logit", "log_prob"])
@pytest.mark.few(6)
def test_scores_sum_to_the_change_of_the_value(kind: str, choices: dict[str, Any], of: Any) -> None:  # noqa: ANN401
    """The error of the midpoint rule falls with the square of the steps, without the kinks of ReLU: to a quarter."""
    model = tiny(kind, **choices, feedforward={"kind": "gelu"})
    call = inputs(model, IDS[:, :4])
    gaps = []
    for steps in (1000, 2000):
        found = gh.saliency(model, *call, steps=steps, of=of, baseline=10)
        assert found.completeness_gap is not None
        assert found.baseline_value is not None
        gaps.append(found.completeness_gap.abs().max() / (found.target_value - found.baseline_value).abs().max())
    assert gaps[1] <= 1e-6
    assert gaps[1] <= 0.3 * gaps[0]


def test_the_default_steps_leave_little_of_the_change_in_a_trained_model() -> None:
    """From the mean token embedding; from zeros the norms bring nearly all of it into the first step."""
    model, tok = gh.load("english-4m")
    shares = []
    for baseline in (None, torch.zeros(model.spec.d_model)):
        found = gh.saliency(model, "Once upon a time there", tok=tok, baseline=baseline)
        assert found.completeness_gap is not None
        assert found.baseline_value is not None
        shares.append(found.completeness_gap.abs().mean() / (found.target_value - found.baseline_value).abs().mean())
    assert shares[0] <= 0.01
    assert shares[1] >= 0.1


def test_targets_are_the_next_tokens_or_the_top_prediction() -> None:
    model = tiny()
    logits = model(IDS)
    found = gh.saliency(model, IDS, steps=1)
    assert torch.equal(found.target, IDS[:, 1:])
    assert found.position.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert_close(found.target_value, logits[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0])
    last = gh.saliency(model, IDS, positions=[-1], steps=1)
    assert_close(last.target_value, logits[:, -1:].max(-1).values)
    assert torch.equal(last.target, logits[:, -1:].argmax(-1))
    assert_close(
        gh.saliency(model, IDS, of="log_prob", steps=1).target_value[:, 0],
        logits.log_softmax(-1)[[0, 1], 0, IDS[:, 1]],
    )


@pytest.mark.parametrize("method", ["integrated_gradients", "gradient_x_input", "attention_rollout"])
def test_chosen_positions_are_rows_of_all(method: Any) -> None:  # noqa: ANN401
    for model in (tiny(), tiny("tiny-encoder", head=MASKED)):
        every = gh.saliency(model, IDS, method=method, steps=2)
        some = gh.saliency(model, IDS, method=method, steps=2, positions=[3, 0, 3])
        for name in ("scores", "target_value", "baseline_value", "target", "position"):
            if getattr(every, name) is not None:
                assert_close(getattr(some, name), getattr(every, name)[:, [3, 0, 3]])


def test_tokens_are_given_as_text() -> None:
    model, tok = gh.load("python-3m")
    one, two = tok.token_to_id("for"), tok.encode(" in")[0]
    ids = torch.tensor([tok.encode("for i")])
    by_id = gh.saliency(model, ids, positions=[-1], token=two, baseline=one, steps=2)
    by_text = gh.saliency(model, "for i", positions=[-1], token=" in", baseline="for", steps=2, tok=tok)
    assert torch.equal(by_text.scores, by_id.scores)
    assert by_text.str_targets == [["␣in"]]


def test_a_named_token_and_a_difference() -> None:
    model = tiny()
    logits = model(IDS)
    two = gh.saliency(model, IDS, token=torch.tensor([4, 5]), incorrect_token=7, steps=2)
    assert two.scores.shape == (2, 6, 6)  # at the last position, too
    assert_close(two.target_value, logits[[0, 1], :, [4, 5]] - logits[..., 7])
    parts = [gh.saliency(model, IDS, token=one, steps=2).scores for one in (torch.tensor([4, 5]), 7)]
    assert_close(two.scores, parts[0] - parts[1])


def test_a_named_label() -> None:
    model = tiny("tiny-encoder", head=CLASSIFIER)
    logits = model(IDS)
    found = gh.saliency(model, IDS, label="good", steps=2)
    assert found.scores.shape == (2, 1, 6)
    assert found.position is None
    assert_close(found.target_value, logits[:, 2:])
    assert_close(gh.saliency(model, IDS, label=torch.tensor([2, 0])).target_value, logits[[0, 1], [2, 0]][:, None])
    predicted = gh.saliency(model, IDS, steps=2)
    assert torch.equal(predicted.target[:, 0], logits.argmax(-1))


def test_a_score_is_zero_where_the_target_cannot_see() -> None:
    found = gh.saliency(tiny(), IDS, steps=2)
    seen = torch.ones(5, 6).tril().bool()
    assert (found.scores[:, ~seen] == 0).all()
    assert (found.scores[:, seen] != 0).all()


@pytest.mark.parametrize("method", ["integrated_gradients", "gradient_x_input", "attention_rollout"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("kind", "choices"), build_kinds())
@pytest.mark.few(8)
def test_padding_changes_nothing(kind: str, choices: dict[str, Any], side: str, method: Any) -> None:  # noqa: ANN401
    model = tiny(kind, **choices)
    if isinstance(model, Seq2Seq) and method == "attention_rollout":
        return
    right = side == "right"
    columns = slice(0, 4) if right else slice(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1], mask[1, columns] = False, True
    pad = {"lengths": torch.tensor([6, 4])} if right else {"mask": mask}
    if isinstance(model, Seq2Seq):
        pad |= {f"target_{name}": given for name, given in pad.items()}
        call = (IDS, IDS.flip(1))
    else:
        call = (IDS,)
    together = gh.saliency(model, *call, method=method, steps=3, **pad)
    for b, (row, own) in enumerate(((0, slice(None)), (1, columns))):
        alone = gh.saliency(model, *(ids[row : row + 1, own] for ids in call), method=method, steps=3)
        there = together.target_value[b].isfinite()
        for name, scores in by_input(alone).items():
            padded = by_input(together)[name][b]
            assert_close(padded[there][:, own], scores[0])
            assert (padded[~there] == 0).all()
            hidden = torch.ones(6, dtype=torch.bool)
            hidden[own] = False
            assert (padded[:, hidden] == 0).all()
        for name in ("target_value", "baseline_value", "target"):
            if (value := getattr(alone, name)) is not None:
                assert_close(getattr(together, name)[b][there], value[0])


def test_positions_count_the_tokens_of_each_sequence() -> None:
    model = tiny()
    together = gh.saliency(model, IDS, positions=[-1, 0], token=3, lengths=torch.tensor([6, 4]), steps=3)
    assert together.position is not None
    assert together.position.tolist() == [[5, 0], [3, 0]]
    for row, length in ((0, 6), (1, 4)):
        alone = gh.saliency(model, IDS[row : row + 1, :length], positions=[-1, 0], token=3, steps=3)
        assert_close(together.scores[row, :, :length], alone.scores[0])
        assert_close(together.target_value[row], alone.target_value[0])


def test_packed_documents_are_each_alone() -> None:
    model = tiny()
    packed = gh.saliency(model, IDS, documents=PACKED, steps=2)
    for row, start, stop in ((0, 0, 3), (0, 3, 6), (1, 0, 4), (1, 4, 6)):
        alone = gh.saliency(model, IDS[row : row + 1, start:stop], steps=2)
        there = (packed.position[row] >= start) & (packed.position[row] < stop - 1)
        assert_close(packed.scores[row, there, start:stop], alone.scores[0])
        assert (packed.scores[row, there, :start] == 0).all()
        assert (packed.scores[row, there, stop:] == 0).all()


def test_rollout_is_that_of_the_last_layer() -> None:
    for choices in ({}, {"head": {**CLASSIFIER, "pooling": "last"}}, {"head": {**CLASSIFIER, "pooling": "mean"}}):
        model = tiny(**choices)
        rolled = attention_rollout(model, IDS)[-1]
        found = gh.saliency(model, IDS, method="attention_rollout")
        expected = rolled[:, :-1] if not choices else rolled[:, -1:]
        expected = rolled.mean(1, keepdim=True) if choices.get("head", {}).get("pooling") == "mean" else expected
        assert_close(found.scores, expected)
        assert found.completeness_gap is None
    assert_close(
        gh.saliency(tiny(), IDS, method="attention_rollout", positions=[1]).scores,
        attention_rollout(tiny(), IDS)[-1][:, 1:2],
    )


def test_batches_of_steps_and_of_logits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, choices in build_kinds():
        model = tiny(kind, **choices)
        whole = gh.saliency(model, *inputs(model), steps=5)
        calls: list[tuple[int, int]] = []
        with monkeypatch.context() as patch:
            patch.setattr("glasshouse.inspection.token_gradients.MAX_LOGITS", 30)
            patch.setattr("glasshouse.inspection.token_gradients._points_at_once", lambda predictions: 2)
            parts = gh.saliency(model, *inputs(model), steps=5, progress=lambda *done: calls.append(done))  # noqa: B023
        for name, scores in by_input(whole).items():
            assert_close(by_input(parts)[name], scores)
        assert_close(parts.target_value, whole.target_value)
        targets = whole.target.shape[1]
        assert len(calls) == 3 * targets
        assert calls[-1] == (5 * targets, 5 * targets)
        assert calls == sorted(calls)


def test_memory_bounds_the_points_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = tiny(), []
    model.register_forward_pre_hook(lambda module, args: batches.append(len(args[0])))
    # One layer, and there are two, stores at most 8 * 16 + 3 * 24 numbers and 2 heads times 6 keys for each token.
    monkeypatch.setattr("glasshouse.inspection.token_gradients.MAX_STORED", 3 * 2 * (8 * 16 + 3 * 24 + 12) * 6 * 2)
    gh.saliency(model, IDS, steps=7)
    assert batches[-3:] == [6, 6, 2]  # copies of a batch of two


def test_the_model_is_left_as_it_was() -> None:
    model = tiny(dropout=0.5, attention_dropout=0.5, embed_dropout=0.5)
    expected = gh.saliency(model, IDS, steps=2)
    model.train()
    frozen = next(model.parameters()).requires_grad_(False)
    with torch.no_grad():
        found = gh.saliency(model, IDS, steps=2)
    assert_close(found.scores, expected.scores)
    assert all(module.training for module in model.modules())
    assert all(
        weight.grad is None and weight.requires_grad == (weight is not frozen) for weight in model.parameters()
    )
    assert not any(value.requires_grad for value in vars(found).values() if isinstance(value, Tensor))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_kernel_that_allows_one_backward_pass_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    expected = gh.saliency(model, IDS, steps=2).scores

    def refuse(situation: object) -> None:
        raise AssertionError("FlexAttention was chosen")

    monkeypatch.setattr(Flex, "supports", staticmethod(lambda situation: True))
    monkeypatch.setattr(Flex, "prepare", refuse)
    assert_close(gh.saliency(model, IDS, steps=2).scores, expected)
    assert model.stack.backends is BACKENDS


def test_edits_around_it_are_explained() -> None:
    model = tiny()
    with gh.edit(model, {"z.*": 0.0}):  # without attention a prediction depends on its own token alone
        found = gh.saliency(model, IDS, steps=2)
        assert_close(found.target_value, model(IDS)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0])
    own = torch.eye(5, 6).bool()
    assert (found.scores[:, ~own] == 0).all()
    assert (found.scores[:, own] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_near(dtype: torch.dtype) -> None:
    """Scores are float32 at least; some 32 roundings follow each other, forward and back, at most all one way."""
    for kind, choices in build_kinds():
        model = tiny(kind, **choices)
        exact = by_input(gh.saliency(model, *inputs(model), steps=8))
        near = by_input(gh.saliency(copy.deepcopy(model).to(dtype), *inputs(model), steps=8))
        for name, scores in exact.items():
            assert near[name].dtype == torch.float32
            assert (near[name] - scores).abs().max() <= 32 * torch.finfo(dtype).eps * scores.abs().max()


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_model() -> None:
    torch.compiler.reset()
    model = tiny()
    expected = gh.saliency(model, IDS, steps=2).scores
    compiled = torch.compile(model, backend="eager")
    compiled(IDS)
    assert_close(gh.saliency(compiled, IDS, steps=2).scores, expected)
    model.stack.blocks[0] = torch.compile(model.stack.blocks[0], backend="eager")
    model.head = torch.compile(model.head, backend="eager")
    assert_close(gh.saliency(model, IDS, steps=2).scores, expected)


def test_invalid_arguments_are_refused() -> None:
    model, encoder, classifier = tiny(), tiny("tiny-encoder", head=MASKED), tiny("tiny-encoder", head=CLASSIFIER)
    pair = tiny("tiny-seq2seq")
    cases: list[tuple[Model, dict[str, Any], str]] = [
        (model, {"method": "gradient"}, "method is 'gradient', which does not exist"),
        (model, {"of": "probability"}, "of is 'probability', which does not exist"),
        (model, {"steps": 0}, "steps is 0"),
        (model, {"baseline": 3, "method": "gradient_x_input"}, "gradient_x_input has none"),
        (model, {"baseline": 11}, "baseline contains 11"),
        (model, {"baseline": 0.0}, "baseline is 0.0, but it must be a token"),
        (model, {"baseline": torch.zeros(5)}, r"baseline has shape \[5\]"),
        (model, {"baseline": "x"}, "baseline is the text 'x'; give its id"),
        (model, {"positions": [6]}, "positions contains 6"),
        (model, {"positions": []}, "no prediction to explain"),
        (model, {"token": 11}, "token contains 11"),
        (model, {"label": 1}, "label was given, but the head is 'next_token'"),
        (model, {"cache": model.make_cache(2, 8)}, "cache was given"),
        (model, {"logits_to_keep": torch.tensor([0])}, "logits_to_keep was given"),
        (classifier, {"label": 3}, "label contains 3"),
        (classifier, {"label": "god"}, "label is 'god', which the model does not have; did you mean good"),
        (classifier, {"token": 1}, "token was given, but the head is 'sequence_classification'"),
        (classifier, {"incorrect_token": 1}, "incorrect_token was given, but the head is 'sequence_classification'"),
        (classifier, {"positions": [0]}, "positions was given, but the head 'sequence_classification'"),
        (tiny("tiny-encoder", head={"kind": "none"}), {}, "the head is 'none', which has no logits"),
        (pair, {"method": "attention_rollout"}, "this is an encoder-decoder"),
    ]
    for one, kwargs, message in cases:
        with pytest.raises(InputError, match=message):
            gh.saliency(one, *inputs(one), **kwargs)
    with pytest.raises(InputError, match="no prediction to explain"):
        gh.saliency(model, IDS[:, :1])
    assert gh.saliency(encoder, IDS[:, :1], steps=1).scores.shape == (2, 1, 1)
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode is on"):
        gh.saliency(model, IDS)


def test_a_quantized_model_is_refused() -> None:
    copied = clone_sharing_parameters(gh.build(gh.preset("tiny-decoder")).eval())
    quantize_int8(copied)
    with pytest.raises(InputError, match="Int8Linear is for inference and has no gradient"):
        gh.saliency(copied, IDS)


def test_it_is_drawn(tmp_path: Path) -> None:
    model, tok = gh.load("python-3m")
    found = gh.saliency(model, ["for i in range(n", "import"], tok=tok, steps=2)
    page = found._repr_html_()
    assert "completeness gap" in repr(found)
    assert "text 0: integrated gradients of the logit by token, completeness gap" in page
    assert "␣range" in page
    assert page.count("<caption>") == 1  # a text of one token has no target
    found.save(tmp_path / "saliency.svg", caption="python-3m")
    assert "␣range" in (tmp_path / "saliency.svg").read_text("utf-8")
    rolled = gh.saliency(model, "for i in", tok=tok, method="attention_rollout")._repr_html_()
    assert "text 0: attention rollout by token<" in rolled
    dates, tok = gh.load("dates-1m")
    pair = gh.saliency(dates, "March 5th, 1987", "1987-03-05", tok=tok, steps=2)
    assert pair._repr_html_().count("of the logit by source token") == 1
    labelled = gh.saliency(tiny("tiny-encoder", head=CLASSIFIER), IDS, label="fair", steps=1, of="log_prob")
    assert "<th>fair</th>" in labelled._repr_html_()
    assert "of the log-probability by token" in labelled._repr_html_()
    against = gh.saliency(tiny(), IDS, token=4, incorrect_token=5, positions=[-1], steps=1)
    assert "4 - 5" in against._repr_html_()


def test_a_long_text_is_drawn_up_to_its_last_prediction() -> None:
    model = tiny(max_len=128)
    ids = torch.arange(100)[None] % 10
    ids[0, -1] = 10
    drawn = gh.saliency(model, ids, positions=[-1], token=3, method="gradient_x_input")._repr_html_()
    assert "<th>10</th>" in drawn
    assert "(36 more tokens not drawn)" in drawn
    assert drawn.count("<td") == 64
    every = gh.saliency(model, ids, method="gradient_x_input")._repr_html_()
    assert "(35 more targets and 36 more tokens not drawn)" in every
