"""Folders without tokenizer.json give the ids that transformers and SentencePiece give, and are saved with one."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from text.conversion.folders import (
    BYTE_LEVEL,
    GEMMA,
    LLAMA,
    SPECIAL,
    T5,
    VOCAB_TXT,
    XLM_ROBERTA,
    Files,
    config,
    kinds,
    model_type,
    odd_texts,
    sentencepiece_model,
    write,
)

from glasshouse.errors import StoreError
from glasshouse.text import Tokenizer

NAMES = list(kinds())
SHORT = ("BERT", "RoBERTa", "Llama", "Gemma", "T5", "XLM-RoBERTa")  # one of each algorithm and set of settings


def plain_texts() -> list[str]:
    return [text for text in odd_texts() if not any(special in text for special in SPECIAL)]


@pytest.mark.parametrize(
    "name", [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in NAMES]
)
def test_ids_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write(kinds()[name], tmp_path / "old")
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs(odd_texts())["input_ids"]
    assert [ours.encode(text, parse_special_tokens=True) for text in odd_texts()] == ids
    assert ours.encode_batch(plain_texts()) == theirs(plain_texts())["input_ids"]
    assert [ours.decode(row) for row in ids] == theirs.batch_decode(ids, clean_up_tokenization_spaces=False)
    for role, token in ours.special_tokens.items():
        assert getattr(theirs, f"{role}_token") == token
        assert getattr(theirs, f"{role}_token_id") == ours.special_id(role)
    ours.save(tmp_path / "new")
    again, saved = Tokenizer.load(tmp_path / "new"), transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert again.fingerprint == ours.fingerprint
    assert saved(odd_texts())["input_ids"] == ids
    assert saved("a", "b") == theirs("a", "b")
    assert len(again) == len(saved) == len(ours)


def test_bert_is_its_first_implementation_in_python(tmp_path: Path) -> None:
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    folder = write(kinds()["BERT"], tmp_path)
    theirs = BertTokenizerLegacy(str(folder / "vocab.txt"))
    old = unicodedata.ucd_3_2_0  # of characters since, Python and Rust know different versions of Unicode
    texts = [text for text in plain_texts() if not any(old.category(c) in ("Cn", "Co") for c in text)]
    assert len(texts) > 200
    assert Tokenizer.load(folder).encode_batch(texts) == [theirs.encode(text) for text in texts]


def test_llama_as_it_was_is_sentencepiece(tmp_path: Path) -> None:
    """With `legacy` there is no exception, and every text comes back; special tokens spelled out are text in both."""
    ours, theirs = as_it_was(LLAMA, tmp_path)
    ids = ours.encode_batch(odd_texts(), add_special_tokens=False)
    assert ids == theirs.encode(odd_texts())
    assert [ours.decode_bytes(row) for row in ids] == [text.replace("▁", " ").encode() for text in odd_texts()]


def test_bpe_that_normalizes_and_removes_spaces_is_sentencepiece(tmp_path: Path) -> None:
    ours, theirs = as_it_was({"model_type": "bpe", "vocab_size": 420, "byte_fallback": True}, tmp_path)
    # The library's Precompiled loses some combining marks.
    texts = [text for text in odd_texts() if not any(map(unicodedata.combining, text))]
    assert ours.encode_batch(texts, add_special_tokens=False) == theirs.encode(texts)


def as_it_was(settings: dict[str, Any], folder: Path) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    model = sentencepiece_model(**settings)
    ours = Tokenizer.load(write({"tokenizer.model": model, **config("LlamaTokenizer", legacy=True)}, folder))
    return ours, sentencepiece.SentencePieceProcessor(model_proto=model)


def test_llama_is_sentencepiece_but_for_spaces_that_begin_a_text(tmp_path: Path) -> None:
    ours = Tokenizer.load(write(kinds()["Llama"], tmp_path))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(**LLAMA))
    texts = [text for text in odd_texts() if not text.startswith((" ", "▁"))]
    assert ours.encode_batch(texts, add_special_tokens=False) == theirs.encode(texts)
    # One space is taken for the one that SentencePiece would put before it.
    assert ours.encode(" a", add_special_tokens=False) == theirs.encode("a")


def test_gemma_is_sentencepiece(tmp_path: Path) -> None:
    ours = Tokenizer.load(write(kinds()["Gemma"], tmp_path))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(**GEMMA))
    # SentencePiece takes user-defined pieces from left to right, before it merges.
    texts = [text for text in plain_texts() if "▁" not in text and "   " not in text]
    assert ours.encode_batch(texts, add_special_tokens=False) == theirs.encode(texts)
    assert [ours.decode(ours.encode(text, add_special_tokens=False)) for text in texts] == texts


@pytest.mark.parametrize(("name", "settings"), [("T5", T5), ("XLM-RoBERTa", XLM_ROBERTA)])
def test_unigram_is_sentencepiece(name: str, settings: Files, tmp_path: Path) -> None:
    """But for U+0085, a space to transformers alone, and which of two equally likely splits of a run is taken."""
    ours = Tokenizer.load(write(kinds()[name], tmp_path))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(**settings))
    texts = [text for text in odd_texts() if "\x85" not in text and "aaa" not in text]
    pieces = [[theirs.id_to_piece(number) for number in row] for row in theirs.encode(texts)]
    assert ours.encode_batch(texts, add_special_tokens=False) == [
        [ours.token_to_id(piece) for piece in row] for row in pieces
    ]


def test_a_special_token_spelled_out_is_text(tmp_path: Path) -> None:
    for number, (name, files) in enumerate(kinds().items()):
        tokenizer = Tokenizer.load(write(files, tmp_path / str(number)))
        unknown = {tokenizer.special_id("unk")}
        for row in tokenizer.encode_batch(odd_texts()[:120], add_special_tokens=False):
            assert not tokenizer.special_ids.intersection(row) - unknown, name


CLASSES: dict[str, tuple[Files, str]] = {
    "of tokenizer_config.json": (
        {
            **BYTE_LEVEL,
            **config("RobertaTokenizerFast"),
            "config.json": {"model_type": "gpt2", "tokenizer_class": "GPT2Tokenizer"},
        },
        "RoBERTa",
    ),
    "of config.json": (
        {**BYTE_LEVEL, "config.json": {"model_type": "gpt2", "tokenizer_class": "RobertaTokenizer"}},
        "RoBERTa",
    ),
    "of no class": ({**BYTE_LEVEL, **config("PreTrainedTokenizerFast"), **model_type("roberta")}, "RoBERTa"),
    "of vocab.json": (BYTE_LEVEL, "GPT-2"),
    "of vocab.txt": ({"vocab.txt": VOCAB_TXT}, "BERT"),
    "of spiece.model": ({"spiece.model": kinds()["T5"]["spiece.model"]}, "T5"),
    "of tokenizer.model": ({"tokenizer.model": kinds()["Llama"]["tokenizer.model"]}, "Llama"),
    "of a newer model": ({"tokenizer.model": kinds()["Llama"]["tokenizer.model"], **model_type("new")}, "Llama"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_is_the_one_that_the_files_name(name: str, tmp_path: Path) -> None:
    files, same = CLASSES[name]
    ours, expected = write(files, tmp_path / "ours"), write(kinds()[same], tmp_path / "expected")
    assert Tokenizer.load(ours).fingerprint == Tokenizer.load(expected).fingerprint


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    folder = write(kinds()["BERT"], tmp_path)
    Tokenizer.train(texts=["to be"], vocab_size=263).save(folder)
    assert len(Tokenizer.load(folder)) == 263


def test_settings_are_kept_but_the_class(tmp_path: Path) -> None:
    files = kinds()["Llama"] | {
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": {"pad_token": "</s>"},
    }
    tokenizer = Tokenizer.load(write(files, tmp_path / "old"))
    assert (tokenizer.chat_template, tokenizer.special_id("pad")) == ("{{ messages }}", 2)
    tokenizer.save(tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert saved["add_bos_token"] is True


def test_a_role_that_a_config_takes_away_is_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write({**BYTE_LEVEL, **config("GPT2Tokenizer", bos_token=None)}, tmp_path))
    assert "bos" not in tokenizer.special_tokens


REFUSED: dict[str, tuple[Files, str]] = {
    "another class": (
        {"vocab.txt": "a\n", **config("BertJapaneseTokenizer")},
        "without one its BertJapaneseTokenizer",
    ),
    "Marian": ({"source.spm": b"", "target.spm": b"", "vocab.json": "{}"}, "without one its MarianTokenizer is not"),
    "code": ({"vocab.txt": "a\n", "tokenizer_config.json": {"auto_map": {"AutoTokenizer": "a.B"}}}, "'auto_map'"),
    "no merges": ({"vocab.json": "{}"}, r"no '.*merges\.txt' beside vocab\.json"),
    "another file": ({"vocab.txt": "a\n", **config("T5Tokenizer")}, r"no '.*spiece\.model', which T5Tokenizer needs"),
    "another model": (
        {"tokenizer.model": kinds()["T5"]["spiece.model"], **config("LlamaTokenizer")},
        "SentencePiece model of unigram, but its tokenizer_class has BPE",
    ),
    "T5's for XLM-RoBERTa": (
        {"sentencepiece.bpe.model": kinds()["T5"]["spiece.model"]},
        r"starts with \['<pad>', '</s>', '<unk>'\], but",
    ),
    "Gemma's for Llama": ({"tokenizer.model": kinds()["Gemma"]["tokenizer.model"]}, "has no '<s>', the bos token"),
    "no [UNK]": ({"vocab.txt": "[CLS]\n[SEP]\n"}, r"has no None, which stands for unknown|has no '\[UNK\]'"),
    "no [CLS]": ({"vocab.txt": "[UNK]\n[SEP]\n"}, r"has no '\[CLS\]', the cls token"),
    "a merge of three": ({"vocab.json": "{}", "merges.txt": "a b c\n"}, "has the line 'a b c', which is not two"),
    "a million lines": ({"vocab.txt": "\n" * (2**20 + 1)}, "has 1048577 lines, but at most 1048576"),
    "not UTF-8": ({"vocab.txt": b"[UNK]\n\xff\n"}, "not UTF-8 at byte 6"),
    "a list": ({"vocab.json": "[]", "merges.txt": ""}, "contains list instead"),
    "an id of 2**40": ({"vocab.json": f'{{"a": {2**40}}}', "merges.txt": ""}, "gives a token the id 1099511627776"),
    "extra ids": ({"spiece.model": b"", **config("T5Tokenizer", extra_ids=10**9)}, "extra_ids = 1000000000, but"),
    "an added token with a gap": (
        {**BYTE_LEVEL, "added_tokens.json": {"<x>": 900}},
        r"no place for the added token '<x>' with the id 900, as its vocabulary gives it 266",
    ),
    "an added token without an id": (
        {**BYTE_LEVEL, **config("GPT2Tokenizer", added_tokens_decoder={"x": {"content": "<x>"}})},
        "has the added token 'x'",
    ),
    "added tokens of a list": (
        {**BYTE_LEVEL, **config("GPT2Tokenizer", added_tokens_decoder=[1])},
        "the added token",
    ),
    "an id of a string": ({**BYTE_LEVEL, "added_tokens.json": {"<x>": "9"}}, "has the id '9' for an added token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_one_sentence(name: str, tmp_path: Path) -> None:
    files, sentence = REFUSED[name]
    with pytest.raises(StoreError, match=sentence) as caught:
        Tokenizer.load(write(files, tmp_path))
    assert str(caught.value).count(". ") == 0
    assert str(caught.value).endswith(".")
