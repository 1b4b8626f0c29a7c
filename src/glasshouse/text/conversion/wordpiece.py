"""BERT's WordPiece: vocab.txt, a token a line."""

from __future__ import annotations

from pathlib import Path

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text.conversion.pipeline import Pipeline
from glasshouse.text.tokenizer_folder import read_text

MAX_BYTES = 32 * 2**20  # multilingual BERT's has 1 MB
MAX_TOKENS = 2**20


def bert(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of BertTokenizer; of a token that stands on two lines the later one is its id."""
    lines = vocabulary_lines(path)
    strip_accents = config.get("strip_accents")  # None: where letters are lowercased
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
        "strip_accents": None if strip_accents is None else bool(strip_accents),
        "lowercase": bool(config.get("do_lower_case", True)),
    }
    model = {
        "type": "WordPiece",
        "unk_token": config["unk_token"],
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {token: number for number, token in enumerate(lines)},
    }
    return Pipeline(
        model,
        normalizer=normalizer,
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        before=("cls",),
        after=("sep",),
        type_ids=True,
    )


def vocabulary_lines(path: Path) -> list[str]:
    """Return the lines of a text file of at most `MAX_TOKENS`."""
    text = read_text(path, MAX_BYTES)
    if (count := text.count("\n")) > MAX_TOKENS:
        raise StoreError(f"{str(path)!r} has {count} lines, but at most {MAX_TOKENS} are allowed; find another.")
    return text.removesuffix("\n").split("\n")
