"""GPT-2, RoBERTa, Qwen2 and GPT-NeoX: byte-level BPE, vocab.json and merges.txt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text.conversion.pipeline import Pipeline
from glasshouse.text.conversion.wordpiece import vocabulary_lines
from glasshouse.text.tokenizer_folder import read_json_object

MERGES = "merges.txt"
MAX_BYTES = 32 * 2**20  # Qwen's vocab.json has 2.8 MB
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def gpt2(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of GPT2Tokenizer."""
    before = ("bos",) if config.get("add_bos_token", False) else ()
    return Pipeline(
        _model(path),
        pre_tokenizer=_byte_level(prefix=bool(config.get("add_prefix_space", False))),
        decoder=_byte_level(prefix=True),
        before=before,
        between=before,
        after=("eos",) if config.get("add_eos_token", False) else (),
    )


def roberta(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of RobertaTokenizer, which is BART's, too."""
    return Pipeline(
        _model(path),
        pre_tokenizer=_byte_level(prefix=bool(config.get("add_prefix_space", False))),
        decoder=_byte_level(prefix=True),
        before=("cls",),
        after=("sep",),
        between=("sep",),
    )


def gpt_neox(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of GPTNeoXTokenizer: GPT-2's, after Unicode normalization."""
    return replace(gpt2(path, config), normalizer={"type": "NFC"})


def qwen2(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of Qwen2Tokenizer."""
    split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
    to_bytes = _byte_level(prefix=bool(config.get("add_prefix_space", False))) | {"use_regex": False}
    return Pipeline(
        _model(path),
        normalizer={"type": "NFC"},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, to_bytes]},
        decoder=_byte_level(prefix=True),
    )


def _model(path: Path) -> JsonDict:
    file = path.with_name(MERGES)
    if not file.is_file():
        raise StoreError(f"there is no {str(file)!r} beside {path.name}; download the folder again.")
    lines = (line for line in vocabulary_lines(file) if line and not line.startswith("#version"))
    return {
        "type": "BPE",
        "vocab": read_json_object(path, MAX_BYTES),
        "merges": [_merge(line, file) for line in lines],
    }


def _merge(line: str, file: Path) -> list[str]:
    parts = line.split(" ")
    if len(parts) != 2 or not all(parts):
        raise StoreError(f"{str(file)!r} has the line {line[:80]!r}, which is not two tokens; download it again.")
    return parts


def _byte_level(*, prefix: bool) -> JsonDict:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": True}
