"""Texts where ids are taken: encoded as in training, padded in a batch, and known to the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inspected_models import Model, assert_close, build_random
from torch import Tensor

import glasshouse as gh
from glasshouse import InputError, inspection
from glasshouse.models import Seq2Seq

TEXT, OTHER = "to be or not", "to do or not"
TOK = gh.Tokenizer.train(texts=[TEXT, OTHER] * 2, vocab_size=273)


def model_of(kind: str) -> Model:
    torch.manual_seed(0)
    settings = {"start_id": 1, "end_ids": (2,)} if kind == "tiny-seq2seq" else {}
    return build_random(gh.preset(kind, vocab_size=273, **settings))


def inputs_of(model: Model, text: str) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Return a text as the inputs of a model, and the ids by hand; of an encoder-decoder it is source and target."""
    ids = TOK.encode(text)
    if isinstance(model, Seq2Seq):
        return (text, text), (torch.tensor([[*ids, 2]]), torch.tensor([[1, *ids]]))
    return (text,), (torch.tensor([ids]),)


def tensors(result: object) -> list[Tensor]:
    values = [result] if isinstance(result, Tensor) else vars(result).values()
    return [one for one in values if isinstance(one, Tensor)]


TOOLS: dict[str, Callable[..., Any]] = {
    "run": inspection.run,
    "lens": gh.lens,
    "attribute": lambda model, *given, **more: gh.attribute(model, *given, token=5, **more),
    "head_scores": gh.head_scores,
    "ablation_effects": inspection.ablation_effects,
    "attention_rollout": inspection.attention_rollout,
    "position_similarity": inspection.position_similarity,
    "residual_norms": inspection.residual_norms,
    "compare": lambda model, *given, **more: gh.compare(model, model, *given, **more),
}


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_text_is_its_ids(tool: str, kind: str) -> None:
    model = model_of(kind)
    if tool == "ablation_effects" and kind == "tiny-encoder":
        return  # which has no next token
    text, ids = inputs_of(model, TEXT)
    found, expected = (TOOLS[tool](model, *given, tok=TOK) for given in (text, ids))
    assert tensors(found)
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_prompts_of_patching_are_texts(kind: str) -> None:
    model = model_of(kind)
    assert len(TOK.encode(TEXT)) == len(TOK.encode(OTHER))
    (text, ids), (other, other_ids) = inputs_of(model, TEXT), inputs_of(model, OTHER)
    if kind == "tiny-decoder":
        text, other = text[0], other[0]
    stack = "decoder." if kind == "tiny-seq2seq" else ""
    more: dict[str, Any] = {"tok": TOK, "metric": lambda logits: logits[0, -1, 7]}
    ends = (f"{stack}z.0[head=0]", f"{stack}q.1[head=1]")
    for tool in (
        lambda *given: gh.patch(model, *given, f"{stack}resid_post.0", tok=TOK),
        lambda *given: inspection.activation_patching(model, *given, f"{stack}z", **more).metric_values,
        lambda *given: inspection.path_patching(model, *given, *ends, **more).output,
    ):
        assert torch.equal(tool(text, other), tool(ids, other_ids))


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_a_batch_of_texts_pads_itself(kind: str) -> None:
    model, texts = model_of(kind), [TEXT, "to", "be or not to be"]
    pair = isinstance(model, Seq2Seq)
    together = inspection.residual_norms(model, *((texts, texts) if pair else (texts,)), tok=TOK)
    for number, text in enumerate(texts):
        alone = inspection.residual_norms(model, *inputs_of(model, text)[0], tok=TOK)
        assert_close(together[:, number, : alone.shape[2]], alone[:, 0])
    patched = gh.patch(model_of("tiny-decoder"), texts, texts, "resid_post.0", tok=TOK)
    assert patched.shape[:2] == (3, max(len(TOK.encode(text)) for text in texts))


def test_results_know_their_tokens() -> None:
    model = model_of("tiny-decoder")
    assert "not" in gh.lens(model, TEXT, tok=TOK)._repr_html_()
    drawn = gh.attribute(model, TEXT, token=" be", tok=TOK, incorrect_token=" do")._repr_html_()
    number = TOK.encode(" be")[0]
    assert f"token {number}" not in drawn
    assert "the logit of &#x27;␣be&#x27; minus that of &#x27;␣do&#x27;" in drawn
    with gh.record(model, "pattern.0", tok=TOK) as seen:
        inspection.run(model, [TEXT, "to"], tok=TOK)
    first, second = seen.str_tokens
    assert "".join(first).replace("␣", " ") == TEXT
    assert second == ["to"]
    assert f"tokens: {' '.join(first)}" in seen._repr_html_()
    pair = model_of("tiny-seq2seq")
    with gh.record(pair, "decoder.final", tok=TOK) as seen:
        pair(torch.tensor([TOK.encode(TEXT)]), target=torch.tensor([TOK.encode("to")]))
    assert seen.str_tokens == [["to"]]


def test_tokens_need_a_tokenizer() -> None:
    model = model_of("tiny-decoder")
    with gh.record(model, "pattern.0") as seen:
        model(torch.tensor([[1, 2]]))
    with pytest.raises(InputError, match=r"give tok to gh\.record"):
        _ = seen.str_tokens


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        (TEXT, {}, "the text 'to be or not' was given without a tokenizer; give tok=, or ids"),
        ([TEXT, "to"], {"tok": TOK, "lengths": torch.tensor([2, 1])}, "lengths was given, but texts bring their own"),
        ([], {"tok": TOK}, "an input is an empty list"),
        ([[1, 2]], {"tok": TOK}, "an input is of type list, but it must be ids as a tensor"),
        (None, {"tok": TOK}, "an input is of type NoneType, but it must be ids as a tensor"),
        ("", {"tok": TOK}, "the prompt is empty"),
    ],
)
def test_wrong_texts(given: Any, more: dict[str, Any], message: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match=message):
        gh.lens(model_of("tiny-decoder"), given, **more)
