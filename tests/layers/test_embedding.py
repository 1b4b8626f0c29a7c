"""Ids are checked to the last one, and token embeddings scaled as the spec says."""

from __future__ import annotations

import pytest
import torch

import glasshouse as gh
from glasshouse.layers.embedding import TokenEmbedding, check_ids


def test_ids_from_0_to_the_last_are_accepted() -> None:
    check_ids(torch.tensor([[0, 4]]), 5, "ids", "vocab_size")


@pytest.mark.parametrize(("ids", "wrong"), [([0, 5], 5), ([0, 7], 7), ([-1, 0], -1), ([-2, 9], -2)])
def test_the_error_names_the_id_that_is_wrong(ids: list[int], wrong: int) -> None:
    with pytest.raises(gh.InputError, match=rf"ids contains {wrong}, but it must be from 0 to vocab_size - 1 = 4\."):
        check_ids(torch.tensor([ids]), 5, "ids", "vocab_size")


@pytest.mark.parametrize(("scaled", "factor"), [(True, 8.0), (False, 1.0)])  # 8 is the square root of 64
def test_embeddings_are_scaled_by_the_root_of_their_width(scaled: bool, factor: float) -> None:
    embedding = TokenEmbedding(gh.preset("tiny-decoder", d_model=64, embed_scale=scaled))
    assert embedding(torch.tensor([[2, 0]])).equal(embedding.table.weight[[2, 0]][None] * factor)
