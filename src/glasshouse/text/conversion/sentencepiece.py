"""Llama, Gemma, T5 and XLM-RoBERTa: SentencePiece models as the tokenizers library has them."""

from __future__ import annotations

import base64
from pathlib import Path

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text.conversion.pipeline import AddedTokens, Pipeline, Roles
from glasshouse.text.conversion.sentencepiece_model import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
)

SPACE = "▁"
MAX_MERGES = 2_000_000  # Gemma has some 600,000
MAX_EXTRA_IDS = 10_000  # T5 has 100
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")


def llama(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of LlamaTokenizer, and of GemmaTokenizer: BPE over marked spaces, unknown characters as bytes.

    With `legacy` ids are SentencePiece's. Otherwise no space is put before a text that starts with one, as in
    transformers.
    """
    file = _read(path, BPE)
    unknown = _unknown(file, path)
    vocab = {piece.text: number for number, piece in enumerate(file.pieces)}
    model = {
        "type": "BPE",
        "unk_token": file.pieces[unknown].text,
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": vocab,
        "merges": merges(file, path),
    }
    prefix = config.get("add_prefix_space")
    prefix = file.add_dummy_prefix if prefix is None else bool(prefix)
    normalizers = _charsmap(file)
    if file.remove_extra_whitespaces:
        normalizers += [_replace({"Regex": "^ +| +$"}, ""), _replace({"Regex": " {2,}"}, " ")]
    pre_tokenizer = None
    if prefix and not config.get("legacy"):
        pre_tokenizer = _metaspace("first") | {"split": False}
    else:
        normalizers += [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        normalizers += [_replace({"String": " "}, SPACE)]
    decoders = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    before = ("bos",) if config.get("add_bos_token", True) else ()
    return Pipeline(
        model,
        normalizer={"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        pre_tokenizer=pre_tokenizer,
        decoder={"type": "Sequence", "decoders": decoders},
        before=before,
        after=("eos",) if config.get("add_eos_token", False) else (),
        between=before,
        added=_added(file),
    )


def t5(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of T5Tokenizer: its sentinels follow the pieces, the last one first."""
    count = config.get("extra_ids", 100)
    if not isinstance(count, int) or not 0 <= count <= MAX_EXTRA_IDS:
        raise StoreError(f"{str(path)!r} has extra_ids = {count!r}, but it must be 0 to {MAX_EXTRA_IDS}; fix it.")
    file = _read(path, UNIGRAM)
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(count))]
    vocab = [(piece.text, piece.score) for piece in file.pieces] + [(text, 0.0) for text in sentinels]
    added = _added(file) + [(text, True) for text in sentinels]
    return _unigram(file, vocab, _unknown(file, path), added, (), ("eos",))


def xlm_roberta(path: Path, config: JsonDict) -> Pipeline:
    """Return the steps of XLMRobertaTokenizer: fairseq's four special tokens stand before the pieces."""
    file = _read(path, UNIGRAM)
    if (first := [piece.text for piece in file.pieces[:3]]) != ["<unk>", "<s>", "</s>"]:
        raise StoreError(
            f"{str(path)!r} starts with {first}, but XLM-RoBERTa's starts with <unk>, <s>, </s>; fix it."
        )
    pieces = [(piece.text, piece.score) for piece in file.pieces[3:]]
    vocab = [*((text, 0.0) for text in FAIRSEQ), *pieces, ("<mask>", 0.0)]
    return _unigram(file, vocab, FAIRSEQ.index("<unk>"), _added(file), ("cls",), ("sep",), ("sep",))


def merges(file: SentencePieceModel, path: Path) -> list[tuple[str, str]]:
    """Return the merges of a BPE, which the file has not: each split of a piece into two, by the piece's id.

    >>> from glasshouse.text.conversion.sentencepiece_model import Piece
    >>> pieces = [Piece(text) for text in ("<unk>", "a", "b", "ab", "ba", "aba")]
    >>> merges(SentencePieceModel(pieces, BPE), Path("a.model"))
    [('a', 'b'), ('b', 'a'), ('a', 'ba'), ('ab', 'a')]
    """
    # Gemma's runs of spaces are user-defined, and found by merging: a text has its spaces marked only by then.
    merged = {piece.text for piece in file.pieces if piece.kind in (NORMAL, USER_DEFINED)}
    found: list[tuple[str, str]] = []
    for text in (piece.text for piece in file.pieces if piece.text in merged):
        cuts = (cut for cut in range(1, len(text)) if text[:cut] in merged)
        found += [(text[:cut], text[cut:]) for cut in cuts if text[cut:] in merged]
        if len(found) > MAX_MERGES:
            raise StoreError(f"{str(path)!r} leads to more than {MAX_MERGES} merges; find another.")
    return found


def _read(path: Path, model_type: int) -> SentencePieceModel:
    file = SentencePieceModel.read(path)
    if file.model_type != model_type:
        names = {UNIGRAM: "unigram", BPE: "BPE"}
        found = names.get(file.model_type, f"model_type {file.model_type}")
        raise StoreError(
            f"{str(path)!r} is a SentencePiece model of {found}, but its tokenizer_class has {names[model_type]}; "
            "correct tokenizer_class in tokenizer_config.json."
        )
    return file


def _unknown(file: SentencePieceModel, path: Path) -> int:
    """Return the id of the unknown token."""
    for number, piece in enumerate(file.pieces):
        if piece.kind == UNKNOWN:
            return number
    raise StoreError(f"{str(path)!r} has no unknown token; download it again.")


def _added(file: SentencePieceModel) -> AddedTokens:
    """Return what is found in a text before it is split into pieces."""
    return [(piece.text, piece.kind == CONTROL) for piece in file.pieces if piece.kind in (CONTROL, USER_DEFINED)]


def _unigram(
    file: SentencePieceModel,
    vocab: list[tuple[str, float]],
    unknown: int,
    added: AddedTokens,
    before: Roles,
    after: Roles,
    between: Roles = (),
) -> Pipeline:
    steps = [{"type": "WhitespaceSplit"}, _metaspace("always")]
    return Pipeline(
        {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": False},
        normalizer=next(iter(_charsmap(file)), None),
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder=_metaspace("always"),
        before=before,
        after=after,
        between=between,
        added=added,
    )


def _metaspace(scheme: str) -> JsonDict:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}


def _replace(pattern: JsonDict, content: str) -> JsonDict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _charsmap(file: SentencePieceModel) -> list[JsonDict]:
    packed = base64.b64encode(file.charsmap).decode()
    return [{"type": "Precompiled", "precompiled_charsmap": packed}] if packed else []
