"""Embeddings of a model whose weights are not finite are an error, in Python and over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse.embeddings import embed_ids
from glasshouse.serve.endpoints.embeddings import _embed
from glasshouse.serve.schema.errors import ApiError


@pytest.fixture
def damaged() -> gh.models.Encoder:
    """An encoder with NaN in the embedding of token 7."""
    model = gh.build(gh.preset("tiny-encoder", n_layers=1)).eval()
    with torch.no_grad():
        model.token_embedding.table.weight[7] = torch.nan
    return model


@pytest.mark.parametrize("normalize", [None, True])
def test_nan_is_an_error_that_names_the_text(damaged: gh.models.Encoder, normalize: bool | None) -> None:
    assert embed_ids(damaged, [[1, 2], [3]], normalize=normalize).isfinite().all()
    with pytest.raises(gh.InputError, match=r"the embedding of text 1 has NaN: .* check the weights for NaN"):
        embed_ids(damaged, [[1, 2], [3, 7], [7]], normalize=normalize)


@pytest.mark.parametrize("texts", [None, 3, [None], b"a", {"a": 1}])
def test_texts_of_another_type_are_one_sentence(damaged: gh.models.Encoder, texts: Any) -> None:  # noqa: ANN401
    words = '{"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}'
    tok = gh.Tokenizer.from_json(f'{{"version": "1.0", "model": {words}}}')
    with pytest.raises(gh.InputError, match="but it must be a text or a list of texts"):
        gh.embed(damaged, tok, texts)


def test_over_http_it_is_the_servers_error(damaged: gh.models.Encoder) -> None:
    with pytest.raises(ApiError, match="the embedding of text 0 has NaN") as raised:
        _embed(damaged, [[7, 8]])
    assert (raised.value.status, raised.value.kind) == (500, "server_error")
