"""Token rules from generation_config.json: end tokens, suppressed tokens, and a forced prefix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from glasshouse.errors import StoreError
from glasshouse.models.decoder import Decoder
from glasshouse.models.seq2seq import Seq2Seq
from glasshouse.spec import Spec

FILE = "generation_config.json"


@dataclass(frozen=True)
class TokenRules:
    """Tokens a model must not generate, and the tokens that every target of an encoder-decoder starts with.

    These belong to the model: a translation model generates its padding token if it is not suppressed. Search and
    sampling settings in the same file (beams, lengths, penalties, temperature) are deliberately ignored: they are the
    caller's, and `SamplingParams` mean the same for every model.
    """

    suppressed: tuple[int, ...] = ()
    forced_prefix: tuple[int, ...] = ()  # after the start token


def read_token_rules(model: Decoder | Seq2Seq) -> TokenRules:
    """Read the rules that came with a model; malformed entries and ids outside the vocabulary are ignored.

    Of bad_words_ids only single tokens are used, and never an end token, as in transformers.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-seq2seq"))
    >>> model.extra_files["generation_config.json"] = {"bad_words_ids": [[3], [4, 5]], "forced_bos_token_id": 6}
    >>> read_token_rules(model)
    TokenRules(suppressed=(3,), forced_prefix=(6,))
    """
    table = model.extra_files.get(FILE)
    if not isinstance(table, dict):
        return TokenRules()

    def ids(values: list[object]) -> list[int]:
        return [value for value in values if type(value) is int and 0 <= value < model.spec.vocab_size]

    words = [word[0] for word in _listed(table.get("bad_words_ids")) if isinstance(word, list) and len(word) == 1]
    suppressed = {*ids(words)} - {*model.spec.end_ids} | {*ids(_listed(table.get("suppress_tokens")))}
    forced_prefix = ids([table.get("forced_bos_token_id")]) if isinstance(model, Seq2Seq) else []
    return TokenRules(tuple(sorted(suppressed)), tuple(forced_prefix))


def with_end_ids(s: Spec, table: dict[str, Any], source: str) -> Spec:
    """Return a spec with the end tokens of the file, which chat models maintain instead of config.json.

    >>> from glasshouse.spec import preset
    >>> with_end_ids(preset("tiny-decoder"), {"eos_token_id": [2, 5]}, FILE).end_ids
    (2, 5)
    """
    given = table.get("eos_token_id")
    if given is None:
        return s
    ends = given if isinstance(given, list) else [given]
    if not all(type(i) is int for i in ends):
        raise StoreError(f"{source!r} has eos_token_id = {given!r}, but it must be token ids.")
    if not all(0 <= i < s.vocab_size for i in ends):
        return s
    return replace(s, end_ids=tuple(ends))


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
