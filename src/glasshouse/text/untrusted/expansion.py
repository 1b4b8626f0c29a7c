"""Limits on how much a tokenizer.json can expand a text, checked before any text is encoded.

Three replacements of one character by a thousand others turn nine letters into gigabytes, and running out of memory
in Rust ends the process. So every step gets a rate, the most characters that one character can become, and a
constant, what it adds to a text of any length; both are upper bounds. Unicode normalization itself (at most 18
characters for one, by NFKD, however many such steps there are) is not counted; text from the file is therefore
counted in its longest form, NFKD.
"""

from __future__ import annotations

import base64
import binascii
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text.untrusted import regex as regex_safety

MAX_EXPANSION = (
    100  # characters that one character may become; ALBERT's normalizer and pre-tokenizer reach 36, GPT-2's 4
)
MAX_ADDED_CHARS = 1_000  # characters added to a text of any length; Whisper adds 60
MAX_TOKEN_CHARS = 2**16  # characters that one token may be decoded to
STEPS = 1_000
MAX_WORD_CHARS = 200  # max_input_chars_per_word of WordPiece, which takes cubic time; most published files say 100
MAX_PIECE_CHARS = 256  # characters of a Unigram piece, which costs their square for each character of a text
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_COUNT_LIMIT = 10**5  # counting stops here
_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


class _Expansion(NamedTuple):
    rate: int = 1
    constant: int = 0


def check_expansion(tokenizer_json: JsonDict, source: str) -> None:
    """Raise StoreError if the steps of a file could expand a text, or a decoded token, beyond the limits.

    >>> check_expansion({"normalizer": {"type": "Prepend", "prepend": "x" * 2000}}, "a.json")
    Traceback (most recent call last):
    ...
    glasshouse.errors.StoreError: 'a.json' can add 2000 characters to a text, but at most 1000 may be; find another.
    """
    stages = {key: list(_steps(tokenizer_json.get(key))) for key in ("normalizer", "pre_tokenizer", "post_processor")}
    decoders = list(_steps(tokenizer_json.get("decoder")))
    if (count := sum(map(len, (*stages.values(), decoders)))) > STEPS:
        _refuse(source, f"has {count} steps, but at most {STEPS} are run")
    text = _chain([*stages["normalizer"], *stages["pre_tokenizer"]], _of_text)
    ids = _chain(stages["post_processor"], _of_ids)
    if (rate := text.rate * ids.rate) > MAX_EXPANSION:
        _refuse(source, f"can turn 1 character into {_shown(rate)}, but at most {MAX_EXPANSION} may come of it")
    if (constant := text.constant * ids.rate + ids.constant) > MAX_ADDED_CHARS:
        _refuse(source, f"can add {_shown(constant)} characters to a text, but at most {MAX_ADDED_CHARS} may be")
    _check_model(tokenizer_json.get("model"), source)
    token = _chain(decoders, _of_tokens)
    longest = max(map(len, _tokens(tokenizer_json)), default=0)
    if (length := token.rate * longest + token.constant) > MAX_TOKEN_CHARS:
        _refuse(
            source, f"can decode a token to {_shown(length)} characters, but at most {MAX_TOKEN_CHARS} may come of it"
        )


def _refuse(source: str, reason: str) -> None:
    raise StoreError(f"{source!r} {reason}; find another.")


def _shown(number: int) -> str:
    return str(number) if number <= _COUNT_LIMIT else f"more than {_COUNT_LIMIT}"


def _check_model(model: object, source: str) -> None:
    """Check the texts that the model substitutes for single characters, and the lengths it searches."""
    if not isinstance(model, dict):
        return
    for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(text := model.get(key), str) and len(text) > MAX_EXPANSION:
            _refuse(source, f"has a {key} of {len(text)} characters, but at most {MAX_EXPANSION} are allowed")
    most = model.get("max_input_chars_per_word")
    if isinstance(most, int) and most > MAX_WORD_CHARS:
        _refuse(source, f"has a max_input_chars_per_word of {_shown(most)}, but at most {MAX_WORD_CHARS} are allowed")
    if (
        isinstance(model.get("vocab"), list)
        and (longest := max(map(len, _pieces(model)), default=0)) > MAX_PIECE_CHARS
    ):
        _refuse(source, f"has a piece of {longest} characters, but at most {MAX_PIECE_CHARS} are allowed")


def _pieces(model: JsonDict) -> Iterator[str]:
    match model.get("vocab"):
        case dict(vocab):
            yield from vocab
        case list(vocab):  # of Unigram: each piece with its score
            yield from (row[0] for row in vocab if isinstance(row, list) and row and isinstance(row[0], str))


def _tokens(tokenizer_json: JsonDict) -> Iterator[str]:
    model, added = tokenizer_json.get("model"), tokenizer_json.get("added_tokens")
    yield from _pieces(model) if isinstance(model, dict) else ()
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            yield token["content"]


def _steps(value: object) -> Iterator[JsonDict]:
    """Yield the steps of a stage in order, flattening nested lists."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            yield value
            stack.extend(value[key] for key in _LISTS if key in value)


def _chain(steps: list[JsonDict], growths: Callable[[JsonDict, object], Iterator[_Expansion]]) -> _Expansion:
    """Return the expansion by a sequence of steps.

    Every field that could expand counts: the library infers the type of a step without one from its fields, and
    ignores fields that do not belong to its type.
    """
    rate, constant = 1, 0
    made: set[str] | None = set()  # characters that earlier steps can produce; None for any
    for step in steps:
        for one in growths(step, step.get("type")):
            if made is not None and _needs_other_than(made, step):
                # It matches only where the input had that character, so the two do not multiply.
                rate = max(rate, one.rate)
            else:
                rate, constant = rate * one.rate, constant * one.rate + one.constant
        if rate > _COUNT_LIMIT or constant > _COUNT_LIMIT:
            break
        made = None if made is None or _produces_any(step) else made | _produced(step)
    return _Expansion(rate, constant)


def _of_text(step: JsonDict, kind: object) -> Iterator[_Expansion]:
    """Yield how a normalizer or pre-tokenizer step expands a text."""
    yield from _of_replacement(step)
    if isinstance(text := step.get("prepend"), str):
        yield _Expansion(1, _longest(text))
    if isinstance(table := step.get("precompiled_charsmap"), str):
        yield _Expansion(max(1, _longest_in(table)))
    if step.get("handle_chinese_chars"):
        yield _Expansion(3)  # a space on both sides
    if kind == "Metaspace" or "replacement" in step:
        yield _Expansion(2, 1)  # one space before every word
    if kind == "ByteLevel" or "trim_offsets" in step:
        # A character has up to four bytes; a space may be added before every word.
        yield _Expansion(8 if step.get("add_prefix_space", True) else 4, 4)


def _of_ids(step: JsonDict, kind: object) -> Iterator[_Expansion]:
    """Yield how often a post-processor step repeats the text, and the tokens it adds."""
    if isinstance(single := step.get("single"), list):
        special = step.get("special_tokens")
        yield _template(single, special if isinstance(special, dict) else {})
    for pair in (step.get("sep"), step.get("cls")):  # of BERT and RoBERTa, each a token and its id
        yield _Expansion(1, sum(map(len, _strings(pair))))


def _of_tokens(step: JsonDict, kind: object) -> Iterator[_Expansion]:
    """Yield how a decoder step expands a token."""
    yield from _of_replacement(step)
    if kind in ("BPEDecoder", "CTC") or "suffix" in step or "word_delimiter_token" in step:
        yield _Expansion(2, 1)  # an empty one matches between any two characters
    if kind == "WordPiece" or "cleanup" in step:
        yield _Expansion(1, 1)  # a space before every token


def _of_replacement(step: JsonDict) -> Iterator[_Expansion]:
    if isinstance(content := step.get("content"), str) and "pattern" in step:
        between = 1 if _may_be_empty(step["pattern"]) else 0  # then it matches between any two characters
        yield _Expansion(max(1, between + _longest(content)), between * _longest(content))


def _may_be_empty(searched: object) -> bool:
    match searched:
        case {"String": str(literal)}:
            return not literal
        case {"Regex": str(expression)}:
            return regex_safety.may_be_empty(expression)
    return True


def _template(pieces: list[Any], special: JsonDict) -> _Expansion:
    rate = constant = 0
    for piece in pieces:
        match piece:
            case {"SpecialToken": {"id": str(name)}}:
                match special.get(name):
                    case {"ids": list(ids), "tokens": tokens}:
                        constant += len(ids) + sum(map(len, _strings(tokens)))
            case {"Sequence": _}:
                rate += 1
    return _Expansion(max(1, rate), constant)


def _strings(values: object) -> Iterator[str]:
    return (value for value in values if isinstance(value, str)) if isinstance(values, list) else iter(())


def _longest(text: str) -> int:
    return len(unicodedata.normalize("NFKD", text))


def _longest_in(packed: str) -> int:
    """Return the longest replacement in SentencePiece's charsmap: NUL-terminated texts after an index."""
    try:
        table = base64.b64decode(packed)
    except (binascii.Error, ValueError):
        return 0  # the library rejects it
    texts = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace")
    return max(map(len, unicodedata.normalize("NFKD", texts).split("\0")))


def _needs_other_than(made: set[str], step: JsonDict) -> bool:
    """Return whether a step only replaces a literal with a character that no earlier step produces."""
    match step:
        case {"content": str(), "pattern": {"String": str(literal)}, **others}:
            return not made.issuperset(literal) and others.keys() <= {"type"}
    return False


def _produced(step: JsonDict) -> set[str]:
    """Return the characters that a step can produce, also after Unicode normalization."""
    texts = [step.get("content", ""), step.get("prepend", ""), " "]
    cased = [form for text in texts if isinstance(text, str) for form in (text, text.lower())]
    return {c for text in cased for form in _FORMS for c in unicodedata.normalize(form, text)}


def _produces_any(step: JsonDict) -> bool:
    return (
        "precompiled_charsmap" in step or step.get("type") in ("ByteLevel", "ByteFallback") or "trim_offsets" in step
    )
