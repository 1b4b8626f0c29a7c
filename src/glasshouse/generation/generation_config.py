"""What was published beside a model's weights about the tokens it writes, where its texts would be wrong without."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.models import Decoder, Seq2Seq

FILE = "generation_config.json"


@dataclass(frozen=True)
class TokenRules:
    """Tokens that a model must not write, and those with which every target of an encoder-decoder goes on.

    Such rules belong to the model: a translator writes its padding token if nobody stops it. How to search or draw
    (beams, lengths, penalties, temperature), which may stand in the same file, is deliberately not taken: that is
    the caller's, and `Options` mean the same for every model.

    >>> TokenRules(suppressed=(3, 5)).apply(SamplingParams(logit_bias={5: 0.5})).logit_bias
    {3: -inf, 5: 0.5}
    """

    suppressed: tuple[int, ...] = ()
    forced_prefix: tuple[int, ...] = ()  # after the start token

    def apply(self, options: SamplingParams) -> SamplingParams:
        """Return options that forbid these tokens, except those whose bias a caller has set."""
        if not self.suppressed:
            return options
        return replace(options, logit_bias=dict.fromkeys(self.suppressed, -math.inf) | dict(options.logit_bias))


def read_token_rules(model: Decoder | Seq2Seq) -> TokenRules:
    """Read the rules that came with a model; what is odd in them, or no id of its vocabulary, is left out.

    Of bad words only those of one token are taken, and none that ends a text, as in transformers.

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
    forbidden = {*ids(words)} - {*model.spec.end_ids} | {*ids(_listed(table.get("suppress_tokens")))}
    opening = ids([table.get("forced_bos_token_id")]) if isinstance(model, Seq2Seq) else []
    return TokenRules(tuple(sorted(forbidden)), tuple(opening))


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
