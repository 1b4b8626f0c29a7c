"""Linear probes: values worked by hand, Newton's method, held-out texts, on disk, and for one model only."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import glasshouse as gh
from glasshouse.errors import InputError, StoreError
from glasshouse.inspection.linear_probe import HeldOut, LinearProbe, _logistic_regression, _measure, probe

POSITIVE = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11], [12]]
NEGATIVE = [[21, 22], [23, 24, 25], [26], [27, 28, 29, 30], [31, 32]]
TEXTS, LABELS = POSITIVE + NEGATIVE, [True] * 5 + [False] * 5


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(0)
    return gh.build(gh.preset("tiny-decoder", n_layers=3, init="normal")).eval()


def slow_values(model: gh.models.Model, ids: list[int], site: str) -> list[Tensor]:
    """Return the activation of each token but the first, or of the only one."""
    with gh.record(model, site) as seen, torch.no_grad():
        model(torch.tensor([ids]))
    return [seen[site][0, at] for at in range(len(ids)) if at > 0 or len(ids) == 1]


def newton(values: Tensor, labels: Tensor, weights: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Minimize the same loss as a function of the direction itself, by Newton's method with halved steps."""
    weights = torch.where(labels, weights / (2 * weights[labels].sum()), weights / (2 * weights[~labels].sum()))
    mean = (weights[:, None] * values).sum(0)
    variance = (weights[:, None] * (values - mean) ** 2).sum(0)
    x = torch.cat([values - mean, torch.ones(len(values), 1, dtype=torch.float64)], 1)
    ridge = torch.diag(torch.cat([penalty * variance, torch.zeros(1, dtype=torch.float64)]))
    y, w = labels.double(), torch.zeros(x.shape[1], dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        p = torch.sigmoid(x @ w)
        return -(weights * torch.where(labels, p, 1 - p).log()).sum() + w @ ridge @ w / 2

    for _ in range(100):
        p = torch.sigmoid(x @ w)
        gradient = x.T @ (weights * (p - y)) + ridge @ w
        step = torch.linalg.solve(x.T @ ((weights * p * (1 - p))[:, None] * x) + ridge, gradient)
        size = 1.0
        while loss(w - size * step) > loss(w) and size > 1e-9:
            size /= 2
        w = w - size * step
    return w[:-1], float(w[-1] - mean @ w[:-1])


def test_two_points_by_hand() -> None:
    # At 3 +- 2 the standardized values are +- 1, and the optimum has penalty * v = sigmoid(-v). With v = ln 3 that is
    # 1/4. Divided by the deviation of 2 the direction is ln(3) / 2, and the score at the mean of 3 is 0.
    values, labels = torch.tensor([[5.0], [1.0]]), torch.tensor([True, False])
    penalty = 1 / (4 * math.log(3))
    direction, bias = _logistic_regression(values, labels, torch.ones(2, dtype=torch.float64), penalty)
    assert direction.item() == pytest.approx(math.log(3) / 2, rel=1e-6)
    assert bias == pytest.approx(-3 * math.log(3) / 2, rel=1e-6)


@pytest.mark.parametrize("penalty", [1e-3, 0.1, 10.0])
def test_the_optimum_is_that_of_newtons_method(penalty: float) -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(80, 6, generator=draw) * torch.tensor([1, 1e3, 1e-3, 1, 1, 1]) + 5
    labels = values[:, 0] + torch.randn(80, generator=draw) > 5.5  # not balanced
    weights = torch.rand(80, generator=draw, dtype=torch.float64) + 0.1
    direction, bias = _logistic_regression(values, labels, weights, penalty)
    expected, expected_bias = newton(values.double(), labels, weights, penalty)
    torch.testing.assert_close(direction.double(), expected, rtol=1e-5, atol=0)
    assert bias == pytest.approx(expected_bias, rel=1e-5)


def test_a_constant_dimension_is_not_read() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(20, 2, generator=draw)
    values[:, 1] = 1e4 + torch.arange(20) % 2 * 2e-4  # one unit in the last place, at most
    direction, _ = _logistic_regression(values, torch.arange(20) % 2 == 0, torch.ones(20, dtype=torch.float64), 0.1)
    assert abs(float(direction[1])) < 1e-2  # scaled up, its two values would be the labels themselves


def test_a_probe_of_equal_texts_is_that_of_their_activations(model: gh.models.Decoder) -> None:
    # Whichever text is held out, four equal ones of each class are left, eight in all.
    positive, negative, site = [1, 2, 3], [7, 8, 9, 10, 11], "resid_post.1"
    made = probe(model, None, [positive] * 5 + [negative] * 5, LABELS, site=site, l2=3.0)
    rows = [slow_values(model, ids, site) for ids in (positive, negative)]
    labels = torch.tensor([True] * len(rows[0]) + [False] * len(rows[1]))
    weights = torch.tensor([1 / len(row) for row in rows for _ in row], dtype=torch.float64)
    expected, bias = newton(torch.stack(rows[0] + rows[1]).double(), labels, weights, 3.0 / 8)
    scale = float(expected.abs().max())
    torch.testing.assert_close(made.direction.double(), expected, rtol=0, atol=1e-5 * scale)
    assert made.bias == pytest.approx(bias, rel=1e-5, abs=1e-5)
    assert made.held_out == HeldOut(1.0, 1.0, len(rows[0]), len(rows[1]))
    assert made.held_out_texts == HeldOut(1.0, 1.0, 1, 1)


def test_whole_texts_are_held_out_and_measured(model: gh.models.Decoder) -> None:
    site = "resid_post.0"
    made = probe(model, None, TEXTS, LABELS, site=site)
    # A text that is held out can be replaced without any change to the probe.
    unseen = []
    for number in range(len(TEXTS)):
        changed = [*TEXTS[:number], [40, 41, 42], *TEXTS[number + 1 :]]
        if torch.equal(probe(model, None, changed, LABELS, site=site).direction, made.direction):
            unseen.append(number)
    assert [LABELS[number] for number in unseen] == [True, False]  # a fifth of each class
    scores = [[float(made.scores(one)) for one in slow_values(model, TEXTS[number], site)] for number in unseen]
    for one, found in [(scores, made.held_out), ([[sum(row) / len(row)] for row in scores], made.held_out_texts)]:
        above = [sum(score > 0 for score in one[0]) / len(one[0]), sum(score <= 0 for score in one[1]) / len(one[1])]
        wins = [(a > b) + (a == b) / 2 for a in one[0] for b in one[1]]
        assert found is not None
        assert found.accuracy == pytest.approx(sum(above) / 2)
        assert found.auc == pytest.approx(sum(wins) / len(wins))
        assert (found.positive, found.negative) == (len(one[0]), len(one[1]))
    assert (made.accuracy, made.auc) == (made.held_out.accuracy, made.held_out.auc)
    again = probe(model, None, TEXTS, LABELS, site=site)
    assert torch.equal(again.direction, made.direction)
    assert again.bias == made.bias
    others = [probe(model, None, TEXTS, LABELS, site=site, seed=seed).direction for seed in range(1, 6)]
    assert any(not torch.equal(other, made.direction) for other in others)
    half = probe(model, None, TEXTS, LABELS, site=site, held_out_fraction=0.5)
    assert half.held_out_texts is not None
    assert (half.held_out_texts.positive, half.held_out_texts.negative) == (2, 2)


def test_every_text_counts_once_whatever_its_length(model: gh.models.Decoder) -> None:
    # At this site an activation depends on its token alone, and the first one does not count.
    short = [[0, 1, 2]] * 3 + [[0, 3, 4]] * 3 + [[0, 5, 6]] * 6
    long = [[0, *[1, 2] * 9]] * 3 + [[0, 3, 4]] * 3 + [[0, *[5, 6] * 4]] * 6
    made, same = (
        probe(model, None, texts, [True] * 6 + [False] * 6, site="token_embed", held_out_fraction=0.01)
        for texts in (short, long)
    )
    torch.testing.assert_close(
        same.direction, made.direction, rtol=1e-4, atol=1e-5 * float(made.direction.abs().max())
    )
    assert same.bias == pytest.approx(made.bias, rel=1e-4, abs=1e-5)


def test_labels_by_token(model: gh.models.Decoder) -> None:
    by_text = probe(model, None, TEXTS, LABELS, site="ffn_out.1")
    by_token = [[label] * len(ids) for ids, label in zip(TEXTS, LABELS, strict=True)]
    same = probe(model, None, TEXTS, by_token, site="ffn_out.1")
    assert torch.equal(same.direction, by_text.direction)
    assert (same.bias, same.held_out, same.held_out_texts) == (
        by_text.bias,
        by_text.held_out,
        by_text.held_out_texts,
    )
    # Whether the token itself is below 32 can be read off its embedding, in texts that have both.
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 64, 40).tolist() for _ in range(20)]
    low = [[token < 32 for token in ids] for ids in texts]
    made = probe(model, None, texts, low, site="embed")
    assert made.held_out_texts is None
    assert made.held_out.positive + made.held_out.negative == 4 * 39
    assert made.accuracy > 0.95
    for other in ([np.array(one) for one in low], [torch.tensor(one) for one in low]):
        assert torch.equal(probe(model, None, texts, other, site="embed").direction, made.direction)
    first = [[not one[0], *one[1:]] for one in low]  # of the token that does not count
    assert torch.equal(probe(model, None, texts, first, site="embed").direction, made.direction)


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=20).filter(
        lambda rows: {label for _, label in rows} == {True, False}
    )
)
def test_accuracy_and_auc_by_counting(rows: list[tuple[int, bool]]) -> None:
    scores, labels = torch.tensor([float(score) for score, _ in rows]), torch.tensor([label for _, label in rows])
    found = _measure(scores, labels)
    positive, negative = ([score for score, label in rows if label is one] for one in (True, False))
    wins = [(a > b) + (a == b) / 2 for a in positive for b in negative]
    assert found.auc == pytest.approx(sum(wins) / len(wins))
    right = sum(a > 0 for a in positive) / len(positive) + sum(b <= 0 for b in negative) / len(negative)
    assert found.accuracy == pytest.approx(right / 2)
    assert (found.positive, found.negative) == (len(positive), len(negative))
    assert _measure(scores**3, labels).auc == found.auc  # of the order alone
    assert _measure(-scores, labels).auc == pytest.approx(1 - found.auc)


def test_scores(model: gh.models.Decoder) -> None:
    made = LinearProbe(torch.tensor([1.0, -2.0, 0.5]), 0.25, "resid_post.0", "", HeldOut(1.0, 1.0, 1, 1))
    values = torch.tensor([[[2.0, 1.0, 4.0], [0.0, 0.0, 0.0]]])
    assert torch.equal(made.scores(values), torch.tensor([[2.25, 0.25]]))
    assert torch.equal(made.scores(values.bfloat16()), torch.tensor([[2.25, 0.25]]))  # float32, whatever is given
    for wrong in (torch.ones(2, 4), torch.ones(3, 1), torch.tensor(1.0)):
        with pytest.raises(InputError, match=r"reads 3 dimensions in the last axis; give those of resid_post\.0"):
            made.scores(wrong)
    assert repr(made) == "LinearProbe('resid_post.0', 3 dimensions, held out: accuracy 1.000, AUC 1.000)"


def test_every_site_with_a_vector_per_token() -> None:
    for one in (gh.build(gh.preset("tiny-decoder")), gh.build(gh.preset("tiny-encoder"))):
        sites = gh.inspection.sites(one)
        names = [name for name in sites if name.startswith(("embed", "resid", "attn_out.", "ffn_out.", "hidden."))]
        for name in names:
            made = probe(one, None, TEXTS, LABELS, site=name)
            with gh.record(one, name) as seen:
                one(torch.tensor([[1, 2]]))
            assert made.scores(seen[name]).shape == (1, 2)
        assert one.training  # as before
    four = gh.build(gh.preset("tiny-decoder", n_layers=4))
    assert probe(four, None, TEXTS, LABELS).site == "resid_post.2"


def test_texts_are_encoded() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=256 + 7)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok)))
    texts = ["to be", "to bee", "or not", "or no"]
    made = probe(model, tok, texts, [True, True, False, False])
    same = probe(model, None, [tok.encode(text) for text in texts], [True, True, False, False])
    assert torch.equal(made.direction, same.direction)
    with torch.inference_mode():
        assert torch.equal(probe(model, tok, texts, [True, True, False, False]).direction, made.direction)


def test_saved_and_loaded(model: gh.models.Decoder, tmp_path: Path) -> None:
    mixed = [[True, False, True], *([label] * len(ids) for ids, label in zip(TEXTS[1:], LABELS[1:], strict=True))]
    for labels in (LABELS, mixed):
        made = probe(model, None, TEXTS, labels, site="final")
        made.save(tmp_path / "one.safetensors")
        back = LinearProbe.load(tmp_path / "one.safetensors")
        assert torch.equal(back.direction, made.direction)
        without = [
            dataclasses.replace(one, direction=torch.zeros(1)).__dict__ | {"direction": 0} for one in (back, made)
        ]
        assert without[0] == without[1]
        back.check(model)
    other = gh.build(gh.preset("tiny-decoder", n_layers=3))
    with pytest.raises(InputError, match=r"^the probe was made for another model, .*; make one for this model\.$"):
        back.check(other)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no"):
        LinearProbe.load(tmp_path / "nothing")
    path = tmp_path / "other.safetensors"
    measured = '{"tokens": {"accuracy": 1.0, "auc": 1.0, "positive": 1, "negative": 1}}'
    good = {"kind": "linear probe", "site": "resid_post.0", "fingerprint": "f", "held_out": measured}
    tensors = {"direction": torch.ones(3), "bias": torch.tensor(1.0)}
    save_file(tensors, path, good)
    assert LinearProbe.load(path).accuracy == 1.0
    for changed, metadata in [
        ({}, {}),
        ({}, {**good, "kind": "steering vector"}),
        ({"direction": torch.ones(3, 3)}, good),
        ({"direction": torch.ones(3, dtype=torch.int64)}, good),
        ({"bias": torch.ones(1)}, good),
        ({"bias": torch.tensor(1)}, good),
        ({}, {**good, "held_out": "{"}),
        ({}, {**good, "held_out": "[]"}),
        ({}, {**good, "held_out": '{"texts": {}}'}),
        ({}, {**good, "held_out": '{"tokens": {"accuracy": 1.0}}'}),
        ({}, {**good, "held_out": measured.replace("1.0", '"high"')}),
        ({}, {name: text for name, text in good.items() if name != "site"}),
    ]:
        save_file({**tensors, **changed}, path, metadata)
        with pytest.raises(StoreError, match="is no linear probe; make one with glasshouse probe make"):
            LinearProbe.load(path)
    for name in tensors:
        save_file(tensors | {name: tensors[name] * float("nan")}, path, good)
        with pytest.raises(StoreError, match="not finite"):
            LinearProbe.load(path)
    path.write_bytes(b"\0" * 4)
    with pytest.raises(StoreError):
        LinearProbe.load(path)


def test_what_cannot_be_made(model: gh.models.Decoder) -> None:
    for site in ("resid_post.3", "pattern.0", "z.0", "resid_post.*", "attn_norm_scale.0", "x"):
        with pytest.raises(
            InputError, match=r"^the site is '.*', but a probe reads one with a vector per token; .*\w"
        ):
            probe(model, None, TEXTS, LABELS, site=site)
    with pytest.raises(InputError, match="probes are of decoders and encoders"):
        probe(gh.build(gh.preset("tiny-seq2seq")), None, TEXTS, LABELS)
    with pytest.raises(InputError, match="there are 10 texts and 9 labels"):
        probe(model, None, TEXTS, LABELS[1:])
    with pytest.raises(InputError, match="give a list of texts"):
        probe(model, None, "text", [True] * 4)
    with pytest.raises(InputError, match="text 0 has 3 tokens and 2 labels"):
        probe(model, None, TEXTS, [[True, False], *LABELS[1:]])
    for wrong in (1, "yes", None, [1, 0, 1]):
        with pytest.raises(InputError, match=r"^text 0 has"):
            probe(model, None, TEXTS, [wrong, *LABELS[1:]])
    for fraction in (0.0, 1.0, float("nan")):
        with pytest.raises(InputError, match=r"^held_out_fraction is .*, but it must be above 0 and below 1"):
            probe(model, None, TEXTS, LABELS, held_out_fraction=fraction)
    for l2 in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match=r"^l2 is .*, but it must be a number above 0"):
            probe(model, None, TEXTS, LABELS, l2=l2)
    broken = gh.build(model.spec)
    with torch.no_grad():
        broken.token_embedding.table.weight.fill_(float("nan"))
    with pytest.raises(InputError, match=r"the activations at resid_post\.1 have NaN"):
        probe(broken, None, TEXTS, LABELS)


def test_too_few_texts_to_hold_some_out(model: gh.models.Decoder) -> None:
    two = [[1, 2, 3], [4, 5, 6]]
    both = [False, True, False]
    few: list[tuple[list[list[int]], list[list[bool] | bool], str]] = [
        ([], [], "0 texts are positive, 0 negative, and 0 have"),
        (POSITIVE, [True] * 5, "5 texts are positive, 0 negative, and 0 have"),
        ([*two, [7]], [True, True, False], "2 texts are positive, 1 negative, and 0 have"),
        ([*two, [7, 8, 9]], [True, False, both], "1 texts are positive, 1 negative, and 1 have"),
    ]
    for texts, labels, said in few:
        with pytest.raises(InputError, match=f"^{said} .* at least 2 positive and 2 negative ones, or 2 with both"):
            probe(model, None, texts, labels)
    for enough in ([True, True, False, False], [both, both]):
        probe(model, None, (two * 2)[: len(enough)], enough)
