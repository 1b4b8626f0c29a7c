"""The nearest tokens, against sorting the similarity of every token by a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from inspected_models import small
from torch import Tensor

import glasshouse as gh
from glasshouse.inspection.parameters import nearest_tokens
from glasshouse.inspection.parameters.nearest_tokens import Matrix, Similarity, nearest


def model_of(tied: bool = False) -> gh.models.Model:
    return small("gpt2", n_layers=1, d_model=8, n_heads=2, head={"kind": "next_token", "tied": tied, "bias": True})


def slowly(vector: Tensor, table: Tensor, similarity: str, k: int) -> list[tuple[int, float]]:
    """Return ids and scores, most similar first."""
    scores = []
    for row in table:
        score = sum(float(a) * float(b) for a, b in zip(vector, row, strict=True))
        if similarity == "cosine":
            score /= math.hypot(*vector.tolist()) * math.hypot(*row.tolist())
        scores.append(score)
    order = sorted(range(len(table)), key=lambda token: -scores[token])
    return [(token, scores[token]) for token in order[:k]]


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("by", ["unembedding", "embedding"])
def test_against_a_loop(by: Matrix, similarity: Similarity, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    table = (model.head.weight if by == "unembedding" else model.token_embedding.table.weight).detach()
    vectors = torch.randn(3, 2, 8, dtype=torch.float64)
    for scores_at_once in (nearest_tokens.MAX_SCORES, 25):  # two vectors at a time, of a vocabulary of eleven
        monkeypatch.setattr(nearest_tokens, "MAX_SCORES", scores_at_once)
        found = nearest(model, vectors, k=4, by=by, similarity=similarity)
        assert found.ids.shape == found.scores.shape == (3, 2, 4)
        assert not found.scores.requires_grad
        for index in [(a, b) for a in range(3) for b in range(2)]:
            expected = slowly(vectors[index], table, similarity, 4)
            assert found.ids[index].tolist() == [token for token, _ in expected]
            assert found.scores[index].tolist() == pytest.approx([score for _, score in expected], abs=1e-12)
    one = nearest(model, vectors[2, 1], k=4, by=by, similarity=similarity)
    assert torch.equal(one.ids, found.ids[2, 1])


def test_an_embedding_is_its_own_nearest_and_zero_is_near_nothing() -> None:
    model = model_of(tied=True)
    found = nearest(model, gh.weights(model).W_E, k=1, similarity="cosine")
    assert found.ids.flatten().tolist() == list(range(11))
    assert torch.allclose(found.scores, torch.ones(11, 1, dtype=torch.float64))
    assert nearest(model, torch.zeros(8), similarity="cosine").scores.abs().max() == 0  # and no NaN


def test_low_precision_is_compared_in_float32() -> None:
    model = model_of().bfloat16()
    found = nearest(model, torch.randn(8, dtype=torch.float64), k=11)
    assert found.scores.dtype == torch.float32
    assert sorted(found.ids.tolist()) == list(range(11))


def test_texts_and_drawings() -> None:
    model, tok = gh.load("python-3m")
    words = [tok.encode(text)[0] for text in (" def", "import")]
    table = gh.weights(model).W_E
    one = gh.nearest(model, table[words[0]], k=3, by="embedding", tok=tok)
    assert one.str_tokens[0][0] == "␣def"
    assert "tokens of the nearest embedding, by dot product" in one._repr_html_()
    both = gh.nearest(model, table[words], k=3, by="embedding", similarity="cosine", tok=tok)
    assert [row[0] for row in both.str_tokens] == ["␣def", "import"]
    page = both._repr_html_()
    assert "by cosine similarity" in page
    assert "␣def" in page
    assert "vector 1" in page
    many = gh.nearest(model, table[:40], k=3)
    assert "(8 more vectors not drawn)" in many._repr_html_()
    assert many.str_tokens[0][0] == str(int(many.ids[0, 0]))  # without tok


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        (
            {"vector": torch.zeros(3, 9)},
            "vector is of torch.float32 [3, 9], but it must be a tensor of floating-point numbers [..., 8]; give one "
            "of the residual stream's width, d_model.",
        ),
        (
            {"vector": torch.zeros(8).long()},
            "vector is of torch.int64 [8], but it must be a tensor of floating-point",
        ),
        ({"vector": torch.tensor(1.0)}, "vector is of torch.float32 [], but it must be"),
        ({"vector": [1.0]}, "vector is [1.0], but it must be a tensor of floating-point numbers [..., 8]"),
        ({"k": 0}, "k is 0, but it must be from 1 to 11, the size of the vocabulary."),
        ({"k": "3"}, "k is '3', but it must be from 1 to 11"),
        ({"k": 12}, "k is 12, but it must be from 1 to 11, the size of the vocabulary."),
        ({"by": "head"}, "by is 'head', but it must be 'unembedding' or 'embedding'."),
        ({"similarity": "l2"}, "similarity is 'l2', but it must be 'dot' or 'cosine'."),
        ({"tok": "x"}, "the tokenizer is a str, but it must be a gh.Tokenizer"),
    ],
)
def test_wrong_calls_are_refused(kwargs: dict[str, object], sentence: str) -> None:
    with pytest.raises(gh.InputError) as error:
        nearest(model_of(), **{"vector": torch.zeros(8), **kwargs})  # type: ignore[arg-type]
    assert sentence in str(error.value)


def test_without_logits_only_the_embedding_has_nearest_tokens() -> None:
    model = small("tiny-encoder", d_model=8, n_heads=2, head={"kind": "pooled"})
    with pytest.raises(gh.InputError, match=r"the head is 'pooled', which has no logits over the vocabulary; use"):
        nearest(model, torch.zeros(8))
    assert nearest(model, torch.ones(8), by="embedding").ids.shape == (10,)
