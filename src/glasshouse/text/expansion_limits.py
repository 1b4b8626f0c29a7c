"""How much longer the steps of a tokenizer.json can make a text: the product is bounded before any text is seen.

Three replacements of one character by a thousand others make gigabytes of nine letters, and memory that runs out in
Rust ends the process. So every step is given a rate, the most characters that one character can become, and a
constant, what it adds to a text of any length; both are taken from above. What Unicode itself does to a text (at most
18 characters for one, by NFKD, however many such steps there are) is no step's doing and is not counted; text that
the file brings along is therefore counted in its longest form, that of NFKD.
"""

from __future__ import annotations

import base64
import binascii
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text import regex_safety

MAX_EXPANSION = 100  # characters that one may become; ALBERT's normalizer and pre-tokenizer reach 36, GPT-2's 4
MAX_ADDED_CHARS = 1_000  # characters added to a text of any length; Whisper adds 60
MAX_TOKEN_CHARS = 2**16  # characters that one token may be decoded to
STEPS = 1_000
MAX_WORD_CHARS = 200  # characters of a word that WordPiece searches in cubic time; most published files say 100
MAX_PIECE_CHARS = 256  # characters of a piece of Unigram, which takes the square of it for each character of a text
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_ENOUGH = 10**5  # where counting stops
_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


class _Growth(NamedTuple):
    rate: int = 1
    constant: int = 0


def check_expansion(document: JsonDict, source: str) -> None:
    """Refuse a file whose steps could make a text, or a decoded token, grow beyond the bounds.

    >>> check({"normalizer": {"type": "Prepend", "prepend": "x" * 2000}}, "a.json")
    Traceback (most recent call last):
    ...
    glasshouse.errors.StoreError: 'a.json' can add 2000 characters to a text, but at most 1000 may be; find another.
    """
    stages = {key: list(_steps(document.get(key))) for key in ("normalizer", "pre_tokenizer", "post_processor")}
    decoders = list(_steps(document.get("decoder")))
    if (count := sum(map(len, (*stages.values(), decoders)))) > STEPS:
        _refuse(source, f"has {count} steps, but at most {STEPS} are run")
    text = _chain([*stages["normalizer"], *stages["pre_tokenizer"]], _of_text)
    ids = _chain(stages["post_processor"], _of_ids)
    if (rate := text.rate * ids.rate) > MAX_EXPANSION:
        _refuse(source, f"can turn 1 character into {_shown(rate)}, but at most {MAX_EXPANSION} may come of it")
    if (constant := text.constant * ids.rate + ids.constant) > MAX_ADDED_CHARS:
        _refuse(source, f"can add {_shown(constant)} characters to a text, but at most {MAX_ADDED_CHARS} may be")
    _check_model(document.get("model"), source)
    token = _chain(decoders, _of_tokens)
    longest = max(map(len, _tokens(document)), default=0)
    if (length := token.rate * longest + token.constant) > MAX_TOKEN_CHARS:
        _refuse(
            source, f"can decode a token to {_shown(length)} characters, but at most {MAX_TOKEN_CHARS} may come of it"
        )


def _refuse(source: str, reason: str) -> None:
    raise StoreError(f"{source!r} {reason}; find another.")


def _shown(number: int) -> str:
    return str(number) if number <= _ENOUGH else f"more than {_ENOUGH}"


def _check_model(model: object, source: str) -> None:
    """Refuse texts that the model puts in the place of single characters, and words that it would search for ever."""
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


def _tokens(document: JsonDict) -> Iterator[str]:
    model, added = document.get("model"), document.get("added_tokens")
    yield from _pieces(model) if isinstance(model, dict) else ()
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            yield token["content"]


def _steps(value: object) -> Iterator[JsonDict]:
    """Yield the steps of a stage in their order, whatever lists they are nested in."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(reversed(value))
        elif isinstance(value, dict):
            yield value
            waiting.extend(value[key] for key in _LISTS if key in value)


def _chain(steps: list[JsonDict], growths: Callable[[JsonDict, object], Iterator[_Growth]]) -> _Growth:
    """Return the growth by steps one after the other.

    Every field counts that could make a step grow: the library takes a step without a type for whatever its fields
    fit, and passes over fields that do not belong to its type.
    """
    rate, constant = 1, 0
    made: set[str] | None = set()  # characters that earlier steps can write; None where those can be any
    for step in steps:
        for one in growths(step, step.get("type")):
            if made is not None and _needs_other_than(made, step):
                # It matches only where the text itself had that character, so the two do not multiply.
                rate = max(rate, one.rate)
            else:
                rate, constant = rate * one.rate, constant * one.rate + one.constant
        if rate > _ENOUGH or constant > _ENOUGH:
            break
        made = None if made is None or _writes_anything(step) else made | _written(step)
    return _Growth(rate, constant)


def _of_text(step: JsonDict, kind: object) -> Iterator[_Growth]:
    """Yield what a step of the normalizer or the pre-tokenizer does to the length of a text."""
    yield from _of_replacement(step)
    if isinstance(text := step.get("prepend"), str):
        yield _Growth(1, _longest(text))
    if isinstance(table := step.get("precompiled_charsmap"), str):
        yield _Growth(max(1, _longest_in(table)))
    if step.get("handle_chinese_chars"):
        yield _Growth(3)  # a space on both sides
    if kind == "Metaspace" or "replacement" in step:
        yield _Growth(2, 1)  # one before every word
    if kind == "ByteLevel" or "trim_offsets" in step:
        # A character has up to four bytes; a space may stand before every word.
        yield _Growth(8 if step.get("add_prefix_space", True) else 4, 4)


def _of_ids(step: JsonDict, kind: object) -> Iterator[_Growth]:
    """Yield how often a step of the post-processor repeats the text, and the tokens that it adds."""
    if isinstance(single := step.get("single"), list):
        special = step.get("special_tokens")
        yield _template(single, special if isinstance(special, dict) else {})
    for pair in (step.get("sep"), step.get("cls")):  # of BERT and RoBERTa, each a token and its id
        yield _Growth(1, sum(map(len, _strings(pair))))


def _of_tokens(step: JsonDict, kind: object) -> Iterator[_Growth]:
    """Yield what a step of the decoder does to the length of a token."""
    yield from _of_replacement(step)
    if kind in ("BPEDecoder", "CTC") or "suffix" in step or "word_delimiter_token" in step:
        yield _Growth(2, 1)  # an empty one is found between any two characters
    if kind == "WordPiece" or "cleanup" in step:
        yield _Growth(1, 1)  # a space before every token


def _of_replacement(step: JsonDict) -> Iterator[_Growth]:
    if isinstance(content := step.get("content"), str) and "pattern" in step:
        between = 1 if _may_be_empty(step["pattern"]) else 0  # then it stands between any two characters
        yield _Growth(max(1, between + _longest(content)), between * _longest(content))


def _may_be_empty(searched: object) -> bool:
    match searched:
        case {"String": str(literal)}:
            return not literal
        case {"Regex": str(expression)}:
            return regex_safety.may_be_empty(expression)
    return True


def _template(pieces: list[Any], special: JsonDict) -> _Growth:
    rate = constant = 0
    for piece in pieces:
        match piece:
            case {"SpecialToken": {"id": str(name)}}:
                match special.get(name):
                    case {"ids": list(ids), "tokens": tokens}:
                        constant += len(ids) + sum(map(len, _strings(tokens)))
            case {"Sequence": _}:
                rate += 1
    return _Growth(max(1, rate), constant)


def _strings(values: object) -> Iterator[str]:
    return (value for value in values if isinstance(value, str)) if isinstance(values, list) else iter(())


def _longest(text: str) -> int:
    return len(unicodedata.normalize("NFKD", text))


def _longest_in(packed: str) -> int:
    """Return the longest text that SentencePiece's table of replacements holds: behind an index, ended by zeros."""
    try:
        table = base64.b64decode(packed)
    except (binascii.Error, ValueError):
        return 0  # which the library refuses
    texts = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace")
    return max(map(len, unicodedata.normalize("NFKD", texts).split("\0")))


def _needs_other_than(made: set[str], step: JsonDict) -> bool:
    """Say whether a step replaces a literal that holds a character which no earlier step writes, and nothing else."""
    match step:
        case {"content": str(), "pattern": {"String": str(literal)}, **others}:
            return not made.issuperset(literal) and others.keys() <= {"type"}
    return False


def _written(step: JsonDict) -> set[str]:
    """Return the characters that a step can write, also after Unicode's own steps."""
    texts = [step.get("content", ""), step.get("prepend", ""), " "]
    cased = [form for text in texts if isinstance(text, str) for form in (text, text.lower())]
    return {c for text in cased for form in _FORMS for c in unicodedata.normalize(form, text)}


def _writes_anything(step: JsonDict) -> bool:
    return (
        "precompiled_charsmap" in step or step.get("type") in ("ByteLevel", "ByteFallback") or "trim_offsets" in step
    )
