"""Head scores: by hand, against plain loops over the pattern, and independent of padding and tiling.

Tolerances are those of tests/models/test_properties.py: float64, some dozen operations deep.
"""

from __future__ import annotations

import math

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from inspected_models import IDS, Model, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection import attention_map, hooks
from glasshouse.inspection.head_scoring import HeadScores, head_scores, repeated_tokens
from glasshouse.inspection.inputs import stack_input
from glasshouse.layers import lora
from glasshouse.models import Encoder, Seq2Seq

many = settings(max_examples=up_to(60), deadline=None, suppress_health_check=list(HealthCheck))
NAMES = list(HeadScores.axes)
MARK = 6  # ids below it are marked
TOKENS = torch.tensor([[5, 6, 5, 7, 5]])


def same(one: HeadScores, other: HeadScores, tolerance: float = 1e-10) -> None:
    for name in NAMES:
        assert_close(getattr(one, name), getattr(other, name), tolerance)
        assert_close(one.uniform_baseline[name], other.uniform_baseline[name], tolerance)
    assert one.head_types == other.head_types


def means(*values: float) -> float:
    return sum(values) / len(values)


def slow(
    weights: list, ids: list[list[int]], real: list[list[bool]], documents: list[list[int]], causal: bool, window: int
) -> dict[str, float]:
    """Score the weights [row][query][key] of one head pair by pair."""
    found: dict[str, list[float]] = {name: [] for name in (*NAMES, "lacking")}
    for row, tokens in enumerate(ids):
        for number in sorted(set(documents[row])):
            # Extract the document without padding: then indices are positions.
            kept = [i for i in range(len(tokens)) if real[row][i] and documents[row][i] == number]
            text = [tokens[i] for i in kept]
            for q, place in enumerate(kept):
                weight = [weights[row][place][i] for i in kept]
                others = [k for k in range(len(text)) if text[k] == text[q] and (k < q if causal else k != q)]
                after = [k + 1 for k in others if k + 1 < len(text)]
                seen = [k for k in range(len(text)) if (not causal or k <= q) and (not window or abs(q - k) < window)]
                if q > 0 or (not causal and len(text) > 1):
                    found["current_token"].append(weight[q])
                if q > 0:
                    found["previous"].append(weight[q - 1])
                    found["first"].append(weight[0])
                if others:
                    found["duplicate"].append(sum(weight[k] for k in others))
                if marked := [k for k in range(len(text)) if text[k] < MARK and (not causal or k <= q)]:
                    found["marked"].append(sum(weight[k] for k in marked))
                if after:
                    found["induction"].append(sum(weight[k] for k in after))
                entropy = -sum(w * math.log(w) for w in weight if w > 0)
                found["entropy"].append(entropy)
                found["distance"].append(sum(w * abs(q - k) for k, w in enumerate(weight)))
                if len(seen) > 1:
                    found["normalized_entropy"].append(entropy / math.log(len(seen)))
                    found["lacking"].append(math.log(len(seen)) - entropy)
    return {name: means(*values) if values else math.nan for name, values in found.items()}


def uniform_weights(rows: list[list[bool]], documents: list[list[int]], causal: bool, window: int) -> list:
    """Return the weights [row][query][key] of uniform attention."""
    weights = []
    for real, document in zip(rows, documents, strict=True):
        place = [
            sum(r and d == document[i] for r, d in zip(real[:i], document[:i], strict=True)) for i in range(len(real))
        ]
        alike = [
            [
                real[q] and real[k] and document[q] == document[k] and (not causal or k <= q)
                and (not window or abs(place[q] - place[k]) < window)
                for k in range(len(real))
            ]
            for q in range(len(real))
        ]  # fmt: skip
        weights.append([[one / max(1, sum(line)) for one in line] for line in alike])
    return weights


def head_type(own: dict[str, float], even: dict[str, float]) -> str:
    """Return the head type by the rules of docs/inspection.md."""
    on_keys = ("current_token", "previous", "first", "duplicate", "induction", "marked")
    ways = {name: (own[name] - even[name]) / (1 - even[name]) for name in on_keys if even[name] <= 0.5}
    furthest = max(ways, key=ways.__getitem__, default="")
    if ways.get(furthest, 0) > 0.5:
        return furthest
    return "broad" if own["lacking"] < math.log(2) else ""


def check(model: Model, stack: str | None = None, **kwargs: Tensor) -> None:
    """Compare the scores of a stack with the reference."""
    given = inputs(model)
    two = isinstance(model, Seq2Seq)
    prefix = f"{stack or 'decoder'}." if two else ""
    ids = given[0] if stack == "encoder" else given[-1]
    side = "target_" if two and stack != "encoder" else ""
    call = {side + name: value[:, : ids.shape[1]] for name, value in kwargs.items()}
    if two and "documents" in kwargs:  # they are given for source and target
        call = {"documents": kwargs["documents"], "target_documents": kwargs["documents"][:, : given[1].shape[1]]}
    with gh.record(model, f"{prefix}pattern.*", stop=True) as seen:  # a pooling head takes no documents
        model(*given, **call)
    pattern = seen[f"{prefix}pattern.*"]
    real = kwargs.get("mask", torch.ones_like(IDS, dtype=torch.bool))[:, : ids.shape[1]].tolist()
    documents = kwargs.get("documents", torch.zeros_like(IDS))[:, : ids.shape[1]].tolist()
    causal = not (isinstance(model, Encoder) or stack == "encoder")
    references = [
        [slow(layer[:, head].tolist(), ids.tolist(), real, documents, causal, model.spec.window(number))
         for head in range(layer.shape[1])]
        for number, layer in enumerate(pattern)
    ]  # fmt: skip
    even = [
        slow(uniform_weights(real, documents, causal, window), ids.tolist(), real, documents, causal, window)
        for window in map(model.spec.window, range(len(pattern)))
    ]
    scores = head_scores(model, *given, marked=ids < MARK, stack=stack, **call)
    for name in NAMES:
        expected = torch.tensor([[one[name] for one in layer] for layer in references], dtype=torch.float64)
        assert_close(getattr(scores, name), expected)
        assert_close(scores.uniform_baseline[name], torch.tensor([one[name] for one in even], dtype=torch.float64))
    assert scores.head_types == [
        [head_type(one, base) for one in layer] for layer, base in zip(references, even, strict=True)
    ]


@many
@given(specs())
def test_scores_equal_plain_loops(s: spec.Spec) -> None:
    model = build_random(s)
    holes = torch.tensor([[True, True, False, True, True, True], [False, True, True, True, True, False]])
    documents = torch.tensor([[0, 0, 0, 4, 4, 4], [1, 2, 2, 2, 2, 2]])
    for kwargs in ({}, {"mask": holes}, {"documents": documents}):
        check(model, **kwargs)
        if isinstance(model, Seq2Seq):
            check(model, "encoder", **kwargs)


def test_scores_of_repeated_tokens_equal_plain_loops() -> None:
    """The ids of the other test hardly repeat; these do."""
    for kind in ("tiny-decoder", "tiny-encoder"):
        model = small(kind)
        ids = torch.tensor([[1, 2, 1, 1, 2, 3], [4, 4, 4, 4, 4, 4]])
        with gh.record(model, "pattern.*") as seen:
            model(ids)
        scores = head_scores(model, ids, marked=ids < MARK)
        everywhere, nowhere = torch.ones_like(ids).bool().tolist(), torch.zeros_like(ids).tolist()
        for layer, head in ((0, 0), (1, 3)):
            weights = seen["pattern.*"][layer, :, head].tolist()
            expected = slow(weights, ids.tolist(), everywhere, nowhere, kind == "tiny-decoder", 0)
            for name in NAMES:
                assert float(getattr(scores, name)[layer, head]) == pytest.approx(expected[name], abs=1e-10)


def score_pattern(pattern: Tensor, kind: str = "tiny-decoder", ids: Tensor = TOKENS) -> HeadScores:
    """Score a model whose head 2 of layer 1 has a given pattern."""
    model = small(kind)
    with gh.edit(model, {"pattern.1[head=2]": pattern.double()}):
        return head_scores(model, ids, marked=ids < MARK)


def of_one_head(scores: HeadScores) -> dict[str, float]:
    return {name: float(getattr(scores, name)[1, 2]) for name in NAMES}


def test_a_previous_token_head() -> None:
    back = torch.diag(torch.ones(4), -1)
    back[0, 0] = 1
    # 5 6 5 7 5: the second and third 5 attend to the token after the previous 5.
    assert of_one_head(score_pattern(back)) == {
        "current_token": 0.0,
        "previous": 1.0,
        "first": 0.25,
        "duplicate": 0.0,
        "induction": 1.0,
        "marked": 0.6,  # positions 0, 2 and 4, attended to from 0, 1 and 3
        "entropy": 0.0,
        "distance": 0.8,
        "normalized_entropy": 0.0,
    }


def test_a_first_token_head() -> None:
    first = torch.zeros(5, 5)
    first[:, 0] = 1
    assert of_one_head(score_pattern(first)) == {
        "current_token": 0.0,
        "previous": 0.25,
        "first": 1.0,
        "duplicate": 1.0,  # the first token is the one that is repeated
        "induction": 0.0,
        "marked": 1.0,
        "entropy": 0.0,
        "distance": 2.0,
        "normalized_entropy": 0.0,
    }


def test_a_uniform_head() -> None:
    even = torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None]
    expected = {
        "current_token": means(1 / 2, 1 / 3, 1 / 4, 1 / 5),
        "previous": means(1 / 2, 1 / 3, 1 / 4, 1 / 5),
        "first": means(1 / 2, 1 / 3, 1 / 4, 1 / 5),
        "duplicate": means(1 / 3, 2 / 5),
        "induction": means(1 / 3, 2 / 5),
        "marked": means(1, 1 / 2, 2 / 3, 1 / 2, 3 / 5),
        "entropy": means(0, math.log(2), math.log(3), math.log(4), math.log(5)),
        "distance": means(0, 1 / 2, 2 / 2, 3 / 2, 4 / 2),
        "normalized_entropy": 1.0,
    }
    # The pattern is made in float32, of which one rounding is 6e-8.
    scores = score_pattern(even)
    assert of_one_head(scores) == pytest.approx(expected, abs=1e-6)
    assert {name: float(value[1]) for name, value in scores.uniform_baseline.items()} == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder"])
def test_head_types_at_every_length(kind: str) -> None:
    """The uniform baseline is 1/2 on two tokens and small on a long text; the head types are the same."""
    for length in (2, 3, 4, 5, 8, 40):
        ids = torch.arange(length)[None] % 11 if length < 11 else torch.randint(11, (1, length))
        seen = torch.ones(length, length)
        seen = seen.tril() if kind == "tiny-decoder" else seen
        before, first = torch.diag(torch.ones(length - 1), -1), torch.zeros(length, length)
        before[0, 0] = first[:, 0] = 1
        patterns = {"current_token": torch.eye(length), "previous": before, "first": first, "broad": seen}
        for name, pattern in patterns.items():
            found = score_pattern(pattern / pattern.sum(-1, keepdim=True), kind, ids).head_types[1][2]
            # With two tokens, the first is the previous one.
            assert found == ("previous" if length == 2 and name == "first" else name)


def test_head_type_thresholds() -> None:
    ids = torch.arange(64)[None] % 11
    even = torch.ones(64, 64).tril() / torch.arange(1, 65)[:, None]
    for share, name in ((0.0, "broad"), (0.2, "broad"), (0.45, ""), (0.55, "current_token"), (1.0, "current_token")):
        mixed = (1 - share) * even + share * torch.eye(64)
        assert score_pattern(mixed, ids=ids).head_types[1][2] == name
    # Three of eight keys are not broad, five are.
    ids = torch.arange(8)[None]
    for count, name in ((3, ""), (5, "broad")):
        pattern = torch.zeros(8, 8)
        for query in range(8):
            pattern[query, [(3 * query + step) % 8 for step in range(count)]] = 1 / count
        assert score_pattern(pattern, "tiny-encoder", ids).head_types[1][2] == name


def test_a_score_with_a_high_baseline_gives_no_head_type() -> None:
    """If every token is the same, nearly all visible keys are duplicates."""
    pattern = torch.ones(9, 9).tril(-1)
    pattern[0, 0] = 1
    scores = score_pattern(pattern / pattern.sum(-1, keepdim=True), ids=torch.full((1, 9), 7))
    assert float(scores.uniform_baseline["duplicate"][1]) > 0.5
    assert float(scores.duplicate[1, 2]) == pytest.approx(1)
    assert scores.head_types[1][2] == "broad"


def test_an_encoder_attends_both_ways() -> None:
    even = torch.full((3, 3), 1 / 3)
    scores = of_one_head(score_pattern(even, "tiny-encoder", torch.tensor([[5, 6, 5]])))
    # Nothing follows the last 5, so the first has no induction key; that of the last is the 6.
    expected = {"previous": 1 / 3, "first": 1 / 3, "duplicate": 1 / 3, "induction": 1 / 3, "normalized_entropy": 1.0}
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    weight = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    scores = of_one_head(score_pattern(weight, "tiny-encoder", torch.tensor([[5, 6, 5]])))
    assert scores["duplicate"] == 0.5  # the first 5 attends to the last, the last to the 6
    assert scores["induction"] == 1.0


def test_only_the_edited_heads_scores_change() -> None:
    plain = head_scores(small(), TOKENS)
    changed = score_pattern(torch.eye(5))
    differ = plain.entropy != changed.entropy
    assert differ.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder"])
def test_padding_changes_nothing(kind: str) -> None:
    model = small(kind)
    ids = torch.tensor([[3, 4, 3, 9, 4]])
    behind, ahead = torch.tensor([[3, 4, 3, 9, 4, 3, 4]]), torch.tensor([[3, 4, 3, 4, 3, 9, 4]])
    alone = head_scores(model, ids)
    same(head_scores(model, behind, lengths=torch.tensor([5])), alone)
    same(head_scores(model, ahead, mask=torch.tensor([[False] * 2 + [True] * 5])), alone)
    nothing = torch.cat([behind, behind])
    same(head_scores(model, nothing, lengths=torch.tensor([5, 0])), alone)


def test_packed_documents_equal_separate_ones() -> None:
    model = small()
    one, two = torch.tensor([[3, 4, 3, 4]]), torch.tensor([[4, 3, 3, 4]])
    packed = head_scores(model, torch.cat([one, two], 1), documents=torch.tensor([[0] * 4 + [1] * 4]))
    same(packed, head_scores(model, torch.cat([one, two])))


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_tiling_is_exact_and_never_materializes_a_pattern(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(kind)
    whole = head_scores(model, *inputs(model))
    made, recompute_attention = [], attention_map.recompute_attention

    def spy(*args: object) -> Tensor:
        made.append(recompute_attention(*args))
        return made[-1]

    monkeypatch.setattr(hooks, "recompute_attention", spy)
    queries = inputs(model)[-1].shape[1]
    for tile, most in ((1, 1), (2 * 2 * 4 * queries, 2)):  # rows * heads * keys make up one query
        made.clear()
        monkeypatch.setattr(stack_input, "TILE", tile)
        same(head_scores(model, *inputs(model)), whole)
        assert max(one.shape[-2] for one in made) == most
        assert sum(one.shape[-2] for one in made if one.dim() == 4) == 2 * queries  # each query once a layer


def test_one_forward_pass_stops_after_the_last_attention() -> None:
    model = small()
    calls = []
    for module in (model.stack, model.stack.blocks[1].feedforward, model.head):
        module.register_forward_pre_hook(lambda module, args: calls.append(module))
    head_scores(model, TOKENS)
    assert calls == [model.stack]


def test_an_active_recording_changes_nothing() -> None:
    model = small()
    alone = head_scores(model, TOKENS)
    with gh.record(model, "pattern.*", "scores.1") as seen:  # its hooks run first
        same(head_scores(model, TOKENS), alone)
    assert len(seen) == 3


def test_scores_without_queries_are_nan() -> None:
    scores = head_scores(small(), torch.tensor([[1, 2, 3]]))
    assert scores.duplicate.isnan().all()
    assert scores.induction.isnan().all()
    assert scores.previous.isfinite().all()
    alone = head_scores(small(), torch.tensor([[1]]))
    for name in ("current_token", "previous", "first", "normalized_entropy"):
        assert getattr(alone, name).isnan().all()
    assert alone.head_types == [[""] * 4] * 2
    assert (alone.entropy == 0).all()


def test_dropout_is_off_and_the_mode_is_restored() -> None:
    model = small(dropout=0.5, attention_dropout=0.5, embed_dropout=0.5)
    expected = head_scores(model, TOKENS)
    model.train()
    model.stack.blocks[0].eval()
    same(head_scores(model, TOKENS), expected)
    assert model.training
    assert model.stack.blocks[1].training
    assert not model.stack.blocks[0].training


def test_lora_is_included() -> None:
    model, thin = small(n_kv_heads=2), small(n_kv_heads=2)
    lora.attach(thin, lora.LoRA(targets=("*",)))
    same(head_scores(thin, TOKENS), head_scores(model, TOKENS))


def test_half_precision_gives_the_same_scores() -> None:
    model = small()
    # Some dozen operations of float32, each good to 6e-8, on scores of order 10.
    expected = head_scores(model, TOKENS, marked=TOKENS < MARK)
    single = head_scores(model.float(), TOKENS, marked=TOKENS < MARK)
    assert single.previous.dtype == torch.float32
    for name in NAMES:
        assert torch.allclose(getattr(single, name).double(), getattr(expected, name), atol=1e-4)


def test_invalid_arguments_are_refused() -> None:
    model = small()
    with pytest.raises(InputError, match="stack is 'encoder', but it must be"):
        head_scores(model, TOKENS, stack="encoder")
    with pytest.raises(InputError, match="cache was given, but whole sequences"):
        head_scores(model, TOKENS, cache=model.make_cache(1, 8))
    with pytest.raises(InputError, match="inputs"):
        head_scores(model)
    with pytest.raises(InputError, match="stack is 'both'"):
        head_scores(small("tiny-seq2seq"), TOKENS, TOKENS, stack="both")


def test_repeated_tokens_repeat_and_are_seeded() -> None:
    ids = repeated_tokens(50, 7, rows=3)
    assert ids.shape == (3, 14)
    assert torch.equal(ids[:, :7], ids[:, 7:])
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 50
    assert torch.equal(repeated_tokens(50, 7, rows=3), ids)
    assert not torch.equal(repeated_tokens(50, 7, rows=3, seed=1), ids)
    assert len({tuple(row) for row in ids.tolist()}) == 3
    with pytest.raises(InputError, match="length is 0, but it must be at least 1"):
        repeated_tokens(50, 0)


def test_html_has_a_table_per_score() -> None:
    drawn = head_scores(small(), TOKENS, marked=TOKENS < MARK)._repr_html_()
    assert drawn.count("<table>") == len(NAMES)
    assert all(f"<caption>{name}</caption>" in drawn for name in NAMES)
    assert drawn.count("layer 1") == len(NAMES)
    assert HeadScores.axes == dict.fromkeys(NAMES, ("layer", "head"))
