"""Texts as the input of a model: encoded as in training, a batch of them padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.sites import unwrap_model
from glasshouse.models import Model, Seq2Seq, check_tokenizer
from glasshouse.models.prompt import encode_prompt
from glasshouse.text import Tokenizer
from glasshouse.text.padding import pad

Input = Tensor | str | Sequence[str]  # ids [B, S], a text, or a batch of texts
SHOWN = 40  # characters of a text in an error


def run(
    model: nn.Module,
    *inputs: Input,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Tensor:
    """Call a model on texts, a batch of which is padded, or on ids: for use inside `gh.record` and `gh.edit`.

    >>> import glasshouse as gh
    >>> model, tok = gh.load("python-3m")
    >>> with gh.record(model, "pattern.3", tok=tok) as seen:
    ...     logits = gh.inspection.run(model, ["import os", "import"], tok=tok)
    >>> seen.str_tokens
    [['import', '␣os'], ['import']]
    """
    given, kwargs = encode_inputs(unwrap_model(model), inputs, model_kwargs, tok)
    output: Tensor = model(*given, **kwargs)
    return output


def encode_inputs(
    model: Model, inputs: Sequence[Input], model_kwargs: Mapping[str, Any], tok: Tokenizer | None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the inputs as ids, and the keyword arguments with the lengths of texts that were padded.

    >>> import glasshouse as gh
    >>> model, tok = gh.load("python-3m")
    >>> (ids,), kwargs = encode_inputs(model, [["import os", "import"]], {}, tok)
    >>> ids.shape, kwargs
    (torch.Size([2, 2]), {'lengths': tensor([2, 1])})
    """
    if tok is not None:
        check_tokenizer(model, tok)
    given, kwargs, device = [], dict(model_kwargs), model.token_embedding.table.weight.device
    for number, one in enumerate(inputs):
        if isinstance(one, Tensor):
            given.append(one)
            continue
        is_target = isinstance(model, Seq2Seq) and number == 1
        rows = [_encode(model, text, tok, is_target) for text in _texts(one)]
        ids, lengths = pad(rows)
        given.append(ids.to(device))
        if len({*lengths.tolist()}) > 1:
            side = "target_" if is_target else ""
            if known := [name for name in (f"{side}lengths", f"{side}mask") if kwargs.get(name) is not None]:
                raise InputError(f"{known[0]} was given, but texts bring their own; leave it out, or give ids.")
            kwargs[f"{side}lengths"] = lengths.to(device)
    return tuple(given), kwargs


def _texts(given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        kind = type(given).__name__
        raise InputError(f"an input is of type {kind}, but it must be ids as a tensor [B, S], a text, or texts.")
    if not texts:
        raise InputError("an input is an empty list; give at least one text.")
    return list(texts)


def _encode(model: Model, text: str, tok: Tokenizer | None, is_target: bool) -> list[int]:
    """Return the ids of a text, with the special tokens that the model was trained with."""
    if tok is None:
        raise InputError(f"the text {text[:SHOWN]!r} was given without a tokenizer; give tok=, or ids.")
    if not is_target:
        return encode_prompt(text, tok, model.spec)
    if model.spec.start_id is None:
        raise InputError("the spec has no start_id, which a target begins with; give the target as ids.")
    return [model.spec.start_id, *tok.encode(text, add_special_tokens=False)]
