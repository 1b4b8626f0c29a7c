"""A tokenizer.json whose steps could make a text grow without bound is refused before it sees one."""

from __future__ import annotations

import base64
import json
import unicodedata
from typing import Any

import pytest
import tokenizers
from examples import up_to
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glasshouse.errors import StoreError
from glasshouse.text import Tokenizer
from glasshouse.text.untrusted import expansion as expansion_limits

Step = dict[str, Any]
WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}


def file(model: Step = WORDS, **stages: Step) -> Step:
    return {"version": "1.0", "added_tokens": [], "model": model, **stages}


def replace(literal: str, content: str) -> Step:
    return {"type": "Replace", "pattern": {"String": literal}, "content": content}


def replace_all(expression: str, content: str) -> Step:
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": content}


def normalizers(*steps: Step) -> Step:
    return {"normalizer": {"type": "Sequence", "normalizers": steps}}


def before(*steps: Step) -> Step:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def decoders(*steps: Step) -> Step:
    return {"decoder": {"type": "Sequence", "decoders": steps}}


def template(*pieces: str, ids: int = 1) -> Step:
    made = [
        {"Sequence": {"id": "A", "type_id": 0}} if piece == "A" else {"SpecialToken": {"id": piece, "type_id": 0}}
        for piece in pieces
    ]
    special = {p: {"id": p, "ids": [1] * ids, "tokens": [p] * ids} for p in pieces if p != "A"}
    return {"type": "TemplateProcessing", "single": made, "pair": [], "special_tokens": special}


def charsmap(*texts: str) -> Step:
    packed = (0).to_bytes(4, "little") + "".join(f"{text}\0" for text in texts).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(packed).decode()}


NFKD, LOWER, ACCENTS = {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "StripAccents"}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
THREE = [replace(a, b * 1000) for a, b in ("ab", "bc", "cd")]
PREFIXED = {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "p" * 10**6}
PIECES = {"type": "WordPiece", "vocab": {"a": 0, "##a": 1}, "unk_token": "a", "max_input_chars_per_word": 10**9}

ATTACKS = {
    "three replacements": (file(**normalizers(*THREE)), "turn 1 character into more than 100000, but at most 100"),
    "one replacement": (file(normalizer=THREE[0]), "turn 1 character into 1000,"),
    "without their types": (
        file(normalizer={"normalizers": [{k: v for k, v in step.items() if k != "type"} for step in THREE]}),
        "turn 1 character",
    ),
    "under another field": (file(normalizer={**THREE[0], "prepend": "x" * 10**5, "type": "Prepend"}), "turn 1"),
    "nothing replaced": (file(**normalizers(*[replace("", "ab")] * 20)), "turn 1 character"),
    "a place replaced": (file(**normalizers(*[replace_all("(?=.)|$", "ab")] * 20)), "turn 1 character"),
    "one character for many": (
        file(**normalizers(*[step for _ in range(5) for step in (replace("a", "ﷺa"), NFKD)])),
        "turn 1 character",
    ),
    "bytes of bytes": (file(**normalizers(*[{"type": "ByteLevel"}] * 20)), "turn 1 character"),
    "a table of long texts": (file(normalizer=charsmap("x" * 2000)), "turn 1 character into 2000,"),
    "marks before words": (file(**before(*[METASPACE] * 20)), "turn 1 character"),
    "a text 20,000 times": (file(post_processor=template(*"A" * 20_000)), "turn 1 character into 20000,"),
    "texts of texts": (
        file(post_processor={"type": "Sequence", "processors": [template("A", "A")] * 20}),
        "turn 1 character",
    ),
    "normalizer and template": (
        file(normalizer=replace("a", "b" * 50), post_processor=template(*"AAA")),
        "into 150,",
    ),
    "5 megabytes before": (
        file(**normalizers(*[{"type": "Prepend", "prepend": "x" * 10**5}] * 50)),
        "add more than 100000 characters to a text, but at most 1000 may",
    ),
    "many tokens around": (file(post_processor=template("A", *["<s>"] * 100, ids=100)), "add 40000 characters"),
    "long names around": (
        file(post_processor={"type": "BertProcessing", "sep": ["x" * 5000, 1], "cls": ["y", 1]}),
        "add 5001 characters",
    ),
    "three decoders": (file(**decoders(*THREE)), "decode a token to more than 100000 characters, but at most 65536"),
    "spaces between": (file(**decoders(*[{"type": "BPEDecoder", "suffix": ""}] * 40)), "decode a token"),
    "delimiters between": (
        file(**decoders(*[{"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": True}] * 40)),
        "decode a token",
    ),
    "a long token": (file({**WORDS, "vocab": {"[UNK]": 0, "a" * 10**5: 1}}), "decode a token to 100000"),
    "a long unknown": (file({**WORDS, "unk_token": "u" * 10**6}), "unk_token of 1000000 characters"),
    "a long prefix": (file(PREFIXED), "continuing_subword_prefix of 1000000"),
    "cubic time": (file(PIECES), "max_input_chars_per_word of more than 100000, but at most 200"),
    "square time": (
        file({"type": "Unigram", "vocab": [["a" * n, -1.0] for n in range(1, 1500)], "unk_id": 0}),
        "has a piece of 1499 characters, but at most 256",
    ),
    "thousands of steps": (file(**normalizers(*[{"type": "NFC"}] * 2000)), "has 2001 steps, but at most 1000"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_growth_without_bound_is_refused_at_once(name: str) -> None:
    document, sentence = ATTACKS[name]
    with pytest.raises(StoreError, match=sentence) as caught:
        Tokenizer.from_json(json.dumps(document))
    assert str(caught.value).startswith("'tokenizer.json' ")
    assert len(str(caught.value)) < 150


# As transformers' converters write them; SentencePiece's tables hold at most the 18 letters of one Arabic sign.
SENTENCEPIECE = charsmap("x" * 18)
PUBLISHED = {
    "GPT-2": file(pre_tokenizer=BYTES | {"add_prefix_space": False}, post_processor=BYTES, decoder=BYTES),
    "BART": file(
        pre_tokenizer=BYTES,
        post_processor={"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True},
        decoder=BYTES,
    ),
    "BERT": file(
        {**WORDS, "max_input_chars_per_word": 100},
        normalizer=BERT,
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=template("[CLS]", "A", "[SEP]"),
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    ),
    "Llama 2": file(
        **normalizers({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        **decoders(replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}),
        post_processor=template("<s>", "A"),
    ),
    "T5": file(
        normalizer=SENTENCEPIECE,
        **before({"type": "WhitespaceSplit"}, METASPACE),
        post_processor=template("A", "</s>"),
    ),
    "ALBERT": file(
        **normalizers(
            replace("``", '"'), replace("''", '"'), NFKD, ACCENTS, LOWER, SENTENCEPIECE, replace_all(" {2,}", " ")
        ),
        pre_tokenizer=METASPACE,
        post_processor=template("[CLS]", "A", "[SEP]"),
        decoder=METASPACE,
    ),
    "CLIP": file(
        {**WORDS, "unk_token": "<|endoftext|>", "end_of_word_suffix": "</w>"},
        **normalizers({"type": "NFC"}, replace_all(r"\s+", " "), LOWER),
        pre_tokenizer=BYTES,
    ),
    "Whisper": file(
        pre_tokenizer=BYTES,
        post_processor=template("<|startoftranscript|>", "<|notimestamps|>", "A", "<|endoftext|>"),
    ),
    "signs spelled out, one by one": file(
        **normalizers(*[replace(sign, " (" + name + ") ") for sign, name in zip("€£¥©®™…—", "abcdefgh", strict=True)])
    ),
}


def test_a_replacement_of_what_bytes_become_multiplies() -> None:
    """A byte can become any character of the byte-level alphabet, so that a later step finds it."""
    chain, to_bytes, longer = expansion_limits._chain, {"type": "ByteLevel"}, replace("Ġ", "b" * 9)
    rates = [chain(steps, expansion_limits._of_text).rate for steps in ([to_bytes], [longer], [to_bytes, longer])]
    assert rates[2] == rates[0] * rates[1]


def test_texts_put_before_a_text_do_not_multiply_it() -> None:
    steps = [{"type": "Prepend", "prepend": "ab"}] * 20
    assert expansion_limits._chain(steps, expansion_limits._of_text) == expansion_limits._Expansion(1, 40)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_are_far_below_the_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("MAX_EXPANSION", "MAX_ADDED_CHARS", "MAX_TOKEN_CHARS", "MAX_WORD_CHARS"):
        monkeypatch.setattr(expansion_limits, bound, getattr(expansion_limits, bound) // 2)
    expansion_limits.check_expansion(PUBLISHED[name], name)


LITERALS = st.text("ab ﷺİ½", max_size=3)
STEP = st.one_of(
    st.builds(replace, LITERALS, LITERALS),
    st.builds(replace_all, st.sampled_from(["a", "b*", "(?=a)|$", r"\s+", "a?b", "(?i:i)"]), LITERALS),
    st.builds(lambda text: {"type": "Prepend", "prepend": text}, LITERALS),
    st.sampled_from([NFKD, LOWER, ACCENTS, BERT, {"type": "NFC"}, {"type": "ByteLevel"}]),
)


def longest(text: str) -> int:
    return len(unicodedata.normalize("NFKD", text))


@settings(max_examples=up_to(150), deadline=None)
@given(st.lists(STEP, max_size=4), st.text("ab iİ字½ﷺé", max_size=6))
def test_no_text_grows_by_more_than_the_bound(steps: list[Step], text: str) -> None:
    rust = tokenizers.Tokenizer.from_str(json.dumps(file(**normalizers(*steps))))
    assert rust.normalizer is not None
    rate, constant = expansion_limits._chain(steps, expansion_limits._of_text)
    try:
        made = rust.normalizer.normalize_str(text)
    except BaseException as error:  # a panic at some matches of nothing, of which `Tokenizer` makes a sentence
        assume(type(error).__name__ != "PanicException")
        raise
    assert longest(made) <= rate * longest(text) + constant


@settings(max_examples=up_to(100), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(replace, LITERALS.filter(bool), LITERALS),
            st.builds(replace_all, st.sampled_from(["a", "b*", r"\s+"]), LITERALS),
            st.sampled_from(
                [
                    {"type": "Fuse"},
                    {"type": "ByteFallback"},
                    {"type": "BPEDecoder", "suffix": ""},
                    {"type": "WordPiece", "prefix": "##", "cleanup": False},
                    {"type": "CTC", "pad_token": "b", "word_delimiter_token": "", "cleanup": True},
                ]
            ),
        ),
        max_size=4,
    ),
    st.lists(st.text("ab# ", max_size=5), max_size=4),
)
def test_no_token_grows_by_more_than_the_bound(steps: list[Step], tokens: list[str]) -> None:
    rust = tokenizers.Tokenizer.from_str(json.dumps(file(**decoders(*steps))))
    assert rust.decoder is not None
    rate, constant = expansion_limits._chain(steps, expansion_limits._of_tokens)
    # "Fuse" makes one empty token of none.
    assert len(rust.decoder.decode(tokens)) <= sum(rate * longest(token) + constant for token in tokens or [""])


@pytest.mark.parametrize("step", [{"type": "WordPiece", "prefix": "##"}, {"prefix": "##", "cleanup": False}])
def test_a_word_piece_decoder_adds_a_space_per_token_also_without_its_type(step: Step) -> None:
    """The library tells decoders apart by their fields where a file has no type."""
    assert tokenizers.decoders.WordPiece(cleanup=False).decode(["a", "a", "a"]) == "a a a"
    assert expansion_limits._Expansion(1, 1) in [*expansion_limits._of_tokens(step, step.get("type"))]
