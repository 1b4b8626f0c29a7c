"""The steps of a tokenizer.json, as each class of tokenizers determines them."""

from __future__ import annotations

from dataclasses import dataclass, field

from glasshouse.config import JsonDict

AddedTokens = list[tuple[str, bool]]  # texts, and whether they are special
Roles = tuple[str, ...]  # of special tokens: "bos", "eos" and so on


@dataclass(frozen=True)
class Pipeline:
    """The model with its vocabulary, the steps around it, and the special tokens around every text."""

    model: JsonDict
    decoder: JsonDict
    normalizer: JsonDict | None = None
    pre_tokenizer: JsonDict | None = None
    before: Roles = ()
    after: Roles = ()
    between: Roles = ()  # of a pair of texts, after what follows the first
    type_ids: bool = False  # whether the second text of a pair has another segment id
    added: AddedTokens = field(default_factory=list)  # found in a text before the model sees it

    def ids(self) -> dict[str, int]:
        """Return the ids of the tokens of the model."""
        vocab = self.model["vocab"]
        return vocab if isinstance(vocab, dict) else {text: number for number, (text, _) in enumerate(vocab)}

    def to_json(self, added_tokens: list[JsonDict], special_tokens: dict[str, str], ids: dict[str, int]) -> JsonDict:
        """Return the tokenizer.json, given its added tokens, special tokens by role, and ids."""
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added_tokens,
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self._post_processor(special_tokens, ids),
            "decoder": self.decoder,
            "model": self.model,
        }

    def _post_processor(self, special_tokens: dict[str, str], ids: dict[str, int]) -> JsonDict | None:
        if not (used := {special_tokens[role] for role in self.before + self.after}):
            return None

        def around(roles: Roles, type_id: int) -> list[JsonDict]:
            return [{"SpecialToken": {"id": special_tokens[role], "type_id": type_id}} for role in roles]

        second = int(self.type_ids)
        first = [*around(self.before, 0), _sequence("A", 0), *around(self.after, 0)]
        return {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, *around(self.between, second), _sequence("B", second), *around(self.after, second)],
            "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in sorted(used)},
        }


def _sequence(name: str, type_id: int) -> JsonDict:
    return {"Sequence": {"id": name, "type_id": type_id}}
