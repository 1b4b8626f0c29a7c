"""Token rules from generation_config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.models import Decoder, Seq2Seq

FILE = "generation_config.json"


@dataclass(frozen=True)
class TokenRules:
    """Tokens a model must not generate, and the tokens that every target of an encoder-decoder starts with.

    These belong to the model: a translation model generates its padding token if it is not suppressed. Search and
    sampling settings in the same file (beams, lengths, penalties, temperature) are deliberately ignored: they are the
    caller's, and `SamplingParams` mean the same for every model.

    >>> TokenRules(suppressed=(3, 5)).apply(SamplingParams(logit_bias={5: 0.5})).logit_bias
    {3: -inf, 5: 0.5}
    """

    suppressed: tuple[int, ...] = ()
    forced_prefix: tuple[int, ...] = ()  # after the start token

    def apply(self, options: SamplingParams) -> SamplingParams:
        """Return options that suppress these tokens, except those whose bias the caller has set."""
        if not self.suppressed:
            return options
        return replace(options, logit_bias=dict.fromkeys(self.suppressed, -math.inf) | dict(options.logit_bias))


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


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
