"""Prompts: text is encoded, and ids are validated against the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from glasshouse.errors import GlasshouseError, InputError
from glasshouse.spec import Seq2SeqSpec, Spec
from glasshouse.text import Tokenizer

Prompt = str | bytes | Sequence[int]


def encode_prompt(prompt: str | bytes | Iterable[int], tok: Tokenizer | None, s: Spec) -> list[int]:
    """Return the ids of a prompt; an empty one becomes the model's start token, if it has one.

    >>> from glasshouse.spec import preset
    >>> s = preset("tiny-decoder", start_id=1)
    >>> encode_prompt([5, 7], None, s), encode_prompt([], None, s)
    ([5, 7], [1])
    """
    if isinstance(prompt, str | bytes):
        if tok is None:
            raise InputError("the prompt is a text, but there is no tokenizer; give ids, or a tokenizer.")
        ids = tok.encode(prompt)
        if isinstance(s, Seq2SeqSpec) and s.end_ids and not (ids and ids[-1] in s.end_ids):
            ids.append(s.end_ids[0])  # as in training
    else:
        ids = check_ids(prompt, s.vocab_size)
    if not ids and s.start_id is not None:
        ids = [s.start_id]
    if not ids:
        raise InputError("the prompt is empty, and the model has no start_id; give at least one token.")
    return ids


def written_ids(text: str) -> list[int]:
    """Return the ids written in a text, as a prompt of a model without a tokenizer is given.

    >>> written_ids("5 7 11")
    [5, 7, 11]
    """
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise InputError(
            "this model has no tokenizer; enter token ids separated by spaces, such as 5 7 11."
        ) from None


def check_ids(prompt: object, vocab_size: int) -> list[int]:
    """Return ids as a list of ints; raise for ids outside the vocabulary."""
    tolist = getattr(prompt, "tolist", None)  # a tensor or an array
    values = prompt if tolist is None else tolist()
    if not isinstance(values, Sequence):
        raise InputError(f"the prompt is a {type(prompt).__name__}, but it must be a text or a list of ids.")
    # The common case, plain ints, is checked without a Python loop.
    if values and set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocab_size:
        return list(values)
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) < vocab_size:
            raise InputError(
                f"the prompt contains {value!r}, but ids are whole numbers from 0 to vocab_size - 1 = "
                f"{vocab_size - 1}."
            )
    return [int(value) for value in values]


def end_of_turn_ids(tok: Tokenizer, opening: Sequence[Mapping[str, str]] = ()) -> tuple[int, ...]:
    """Return the end-of-turn token of a chat template: not every model lists it among its end tokens.

    `opening` are messages that every conversation starts with; raise if the template does not take them.
    """
    messages = [*opening, {"role": "user", "content": "?"}]
    tok.encode_chat(messages, add_generation_prompt=True)
    try:
        ids, assistant_mask = tok.encode_chat([*messages, {"role": "assistant", "content": "!"}])
    except GlasshouseError:  # some templates rewrite a reply
        return ()
    reply = [token for token, in_reply in zip(ids, assistant_mask, strict=True) if in_reply]
    return tuple(token for token in reply[-1:] if token in tok.special_ids)
