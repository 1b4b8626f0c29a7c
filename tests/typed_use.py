"""Code as a user writes it, for the type checkers of `make types`: it is checked, and never run.

README's Python is checked beside it; tests/readme_code.py writes that to a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq

IDS = torch.tensor([[1, 2, 3]])


def models_by_preset(name: str) -> None:
    assert_type(gh.build(gh.preset("gpt2")), Decoder)
    assert_type(gh.build(gh.preset("llama-1b", n_layers=2)), Decoder)
    assert_type(gh.build(gh.preset("bert-base")), Encoder)
    assert_type(gh.build(gh.preset("t5-small")), Seq2Seq)
    assert_type(gh.build(gh.preset(name)), Model)
    assert_type(gh.build(gh.preset("gpt2")).eval(), Decoder)


def logits_are_tensors(decoder: Decoder, encoder: Encoder, pair: Seq2Seq, any_kind: Model) -> None:
    assert_type(decoder(IDS), Tensor)
    assert_type(encoder(IDS, lengths=torch.tensor([3])), Tensor)
    assert_type(pair(IDS, IDS), Tensor)
    assert_type(any_kind(IDS), Tensor)


def loaded(folder: Path) -> None:
    model, tok = gh.load(folder)
    assert_type(model, Model)
    assert_type(tok, gh.Tokenizer | None)
    (completion,) = gh.generate(model, tok, "x", max_new_tokens=3)
    assert_type(completion, gh.Completion)
    assert_type(completion.text, str)
    assert_type("".join(gh.stream(model, tok, "x")), str)
    engine = gh.Engine(model, tok)
    engine.submit("x", max_new_tokens=3)
    gh.save(model, tok, folder)
    gh.look(model, tok, "x")
    coder, code_tok = gh.load("python-3m", device="cpu")
    assert_type(coder, Decoder)
    assert_type(code_tok.encode("x"), list[int])
    dates, _ = gh.load("dates-1m")
    assert_type(dates, Seq2Seq)


def inspected(model: Model, tok: gh.Tokenizer | None) -> None:
    with gh.record(model, "resid_post.*", tok=tok) as seen, gh.edit(model, {"z.0": gh.ablate_head(1)}):
        assert_type(gh.inspection.run(model, ["a text", "another"], tok=tok), Tensor)
    assert_type(seen["resid_post.*"], Tensor)
    assert_type(gh.lens(model, "a text", tok=tok).loss, Tensor)
    assert_type(gh.attribute(model, IDS, token=3).heads, Tensor)
    weights = gh.weights(model, fold_norm=True)
    assert_type(weights.W_Q[0, 1], Tensor)
    assert_type(weights.OV[0] @ weights.OV[1], gh.inspection.LowRank)
    assert_type(weights.composition("K").scores, Tensor)
    assert_type(gh.nearest(model, weights.W_U[:, 3], tok=tok).str_tokens, list[list[str]])
    assert_type(gh.patch(model, "a text", "another", "resid_post.0", tok=tok), Tensor)
    assert_type(gh.head_scores(model, IDS).head_types, list[list[str]])
    gh.compare(model, model, "a text", tok=tok)


def trained() -> None:
    run = gh.Run.load("stdlib", "train.steps=10")
    result = gh.train(run)
    assert_type(result.folder, Path)
