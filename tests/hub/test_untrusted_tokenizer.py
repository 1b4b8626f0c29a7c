"""Malicious tokenizer files: refused in one sentence, with no code run and nothing read outside."""

from __future__ import annotations

import json

import pytest
from hub.damage import (
    LONG,
    SPECIAL,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Case,
    Damage,
    RefuseCase,
    Table,
    both,
    cut,
    directory,
    fifo,
    link,
    nested,
    on,
    tokenizer,
    words,
    write,
)


def split(expression: str) -> Table:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def replace(expression: str) -> Table:
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": ""}


WORDS = {
    "words-not-JSON": (write(TOKENIZER, "{"), "not JSON"),
    "words-empty": (write(TOKENIZER, ""), "not JSON"),
    "words-not-utf-8": (write(TOKENIZER, b"\xff"), "not UTF-8"),
    "words-list": (write(TOKENIZER, []), "list instead"),
    "words-deep-lists": (write(TOKENIZER, "[" * 100_000), "nested"),
    "words-deep-tables": (write(TOKENIZER, '{"a":' * 100_000), "nested"),
    "words-deep-inside": (tokenizer(normalizer=json.loads(nested(600))), "cannot be used|nested"),
    "words-of-the-future": (tokenizer(version="2.0"), "version '2.0'"),
    "words-version-long": (tokenizer(version=LONG), "version"),
    "words-without-a-model": (tokenizer(model=None), "no model"),
    "words-model-unknown": (tokenizer(model={"type": "Hostile"}), "cannot be used"),
    "words-vocabulary-null": (
        tokenizer(model={"type": "WordLevel", "vocab": None, "unk_token": "a"}),
        "cannot be used",
    ),
    "words-merge-unknown-long": (
        tokenizer(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", LONG]]}),
        "cannot be used",
    ),
    "words-merge-without-its-prefix-long": (
        tokenizer(
            model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", LONG]], "continuing_subword_prefix": f"#{LONG}"}
        ),
        "merge",
    ),
    "words-half-a-character": (write(TOKENIZER, json.dumps(words()).replace("w60", "\\ud800")), "cannot be used"),
    "words-201-MB": (both(tokenizer(), cut(TOKENIZER, 201_000_000)), "201000000 bytes"),
    "words-more-than-the-model": (tokenizer(62), "62 tokens.*vocab_size is 61"),
    "words-far-beyond-the-model": (
        tokenizer(model={"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}),
        "the id 4294967295",
    ),
    "words-catastrophic-split": (tokenizer(pre_tokenizer=split("(a+)+$")), r"\(a\+\)\+\$"),
    "words-catastrophic-normalizer": (tokenizer(normalizer=replace("(a|aa)+$")), r"\(a\|aa\)"),
    "words-catastrophic-decoder": (tokenizer(decoder=replace("(.*)*x")), r"\(\.\*\)\*x"),
    "words-catastrophic-inside": (
        tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [split(r"\w+"), split("(x*)*y")]}),
        r"\(x\*\)\*y",
    ),
    "words-charsmap-of-junk": (tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "used"),
    "words-that-grow": (
        tokenizer(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": LONG}),
        "1 character into 5000",
    ),
    "words-directory": (directory(TOKENIZER), "not a file"),
    "words-fifo": (fifo(TOKENIZER), "not a file"),
    "words-link-out": (link(TOKENIZER, "OUTSIDE/tokenizer.json"), "outside its folder"),
    "words-link-to-itself": (link(TOKENIZER, TOKENIZER), "link|not a file"),
}
WORD_SETTINGS = {
    "not-JSON": ("{", "not JSON"),
    "list": ([], "list instead"),
    "deep": ("[" * 100_000, "nested"),
    "role-list": ({"pad_token": ["w1"]}, "pad_token"),
    "role-long": ({"pad_token": [LONG]}, "pad_token"),
}
TOKENIZER_SETTINGS = {
    f"{name.removesuffix('.json')}-{what}": Case("worded", damage, f"{name}|{TOKENIZER}", reason)
    for name in (TOKENIZER_CONFIG, SPECIAL)
    for what, damage, reason in (
        *((what, write(name, content), reason) for what, (content, reason) in WORD_SETTINGS.items()),
        ("fifo", fifo(name), "not a file"),
        ("directory", directory(name), "not a file"),
        ("dangling", link(name, "nowhere"), "not a file"),
        ("link-out", link(name, "OUTSIDE/words.json"), "outside its folder"),
    )
} | {
    f"{key}-in-tokenizer_config": Case(
        "worded", write(TOKENIZER_CONFIG, {key: {"a": "hostile.A"}}), TOKENIZER_CONFIG, key
    )
    for key in ("auto_map", "trust_remote_code")
}


def of_class(name: str, file: str, content: str | bytes) -> Damage:
    return both(write(TOKENIZER_CONFIG, {"tokenizer_class": name}), write(file, content))


BYTE_LEVEL = both(write("vocab.json", {"a": 0}), write("merges.txt", "#version: 0.2\n"))
VOCABULARY_FILES = {
    "vocabulary-not-JSON": (both(BYTE_LEVEL, write("vocab.json", "{")), "vocab.json", "not JSON"),
    "vocabulary-deep": (both(BYTE_LEVEL, write("vocab.json", '{"a":' * 100_000)), "vocab.json", "nested"),
    "vocabulary-an-id-too-large": (both(BYTE_LEVEL, write("vocab.json", {"a": 2**40})), "vocab.json", "the id"),
    "vocabulary-33-MB": (both(BYTE_LEVEL, cut("vocab.json", 2**25 + 1)), "vocab.json", "33554433 bytes"),
    "vocabulary-more-than-the-model": (
        both(BYTE_LEVEL, write("vocab.json", {f"w{i}": i for i in range(62)})),
        "model",
        "62 tokens.*vocab_size is 61",
    ),
    "vocabulary-dangling": (both(BYTE_LEVEL, link("vocab.json", "nowhere")), "vocab.json", "not a file"),
    "vocabulary-fifo": (both(BYTE_LEVEL, fifo("vocab.json")), "vocab.json", "not a file"),
    "vocabulary-link-out": (
        both(BYTE_LEVEL, link("vocab.json", "OUTSIDE/tokenizer.json")),
        "vocab.json",
        "outside its folder",
    ),
    "merges-long": (both(BYTE_LEVEL, write("merges.txt", LONG)), "merges.txt", "not two tokens"),
    "merges-unknown-long": (both(BYTE_LEVEL, write("merges.txt", f"a {LONG}")), "vocab.json", "cannot be used"),
    "merges-link-out": (
        both(BYTE_LEVEL, link("merges.txt", "OUTSIDE/words.json")),
        "merges.txt",
        "outside its folder",
    ),
    "added-tokens-long": (both(BYTE_LEVEL, write("added_tokens.json", {LONG: 7})), "vocab.json", "no place for"),
    "added-tokens-link-out": (
        both(BYTE_LEVEL, link("added_tokens.json", "OUTSIDE/words.json")),
        "added_tokens.json",
        "outside its folder",
    ),
    "word-pieces-not-utf-8": (of_class("BertTokenizer", "vocab.txt", b"[UNK]\n\xff"), "vocab.txt", "not UTF-8"),
    "word-pieces-of-nothing": (of_class("BertTokenizer", "vocab.txt", ""), "vocab.txt", r"has no '\[CLS\]'"),
    "sentencepiece-of-text": (
        of_class("T5Tokenizer", "spiece.model", "text"),
        "spiece.model",
        "is not a SentencePiece model",
    ),
    "sentencepiece-cut": (
        of_class("LlamaTokenizer", "tokenizer.model", b"\x0a\xff\xff\xff\x7f"),
        "tokenizer.model",
        "ends early",
    ),
    "sentencepiece-9-MB": (
        both(of_class("T5Tokenizer", "spiece.model", ""), cut("spiece.model", 2**23 + 1)),
        "spiece.model",
        "8388609",
    ),
    "sentencepiece-link-out": (
        link("tokenizer.model", "OUTSIDE/model.safetensors"),
        "tokenizer.model",
        "outside its folder",
    ),
}
CASES = {
    **on("gpt2", TOKENIZER, WORDS),
    **TOKENIZER_SETTINGS,
    **{name: Case("gpt2", damage, file, reason) for name, (damage, file, reason) in VOCABULARY_FILES.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(refuse_case: RefuseCase, name: str) -> None:
    refuse_case(CASES[name])
