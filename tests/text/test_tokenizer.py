"""Text to ids and back: as the outside libraries have it, exact to the byte, safe with anyone's file and text."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import transformers
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from glasshouse.errors import InputError, StoreError
from glasshouse.text import Tokenizer
from glasshouse.text import tokenizer as room

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it jumps back again.",
    "Hello there! It's 2024, and 12345 tokens aren't many: naïve café, größer als 10 €.",
    "<p>if a < b / 2 then s = [x] else s = (y)</p>\n\n    return  s\t# 你好 世界 🙂",
]


@functools.cache
def byte_level() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>"]
    tokenizer.train_from_iterator(
        SENTENCES * 3, trainers.BpeTrainer(vocab_size=350, special_tokens=special, initial_alphabet=alphabet)
    )
    return tokenizer.to_str()


@functools.cache
def wordpiece() -> str:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(SENTENCES * 3, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer.to_str()


@functools.cache
def unigram() -> str:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer.to_str()


@functools.cache
def byte_fallback() -> str:
    """SentencePiece's BPE as Llama 2 has it: spaces are marked, what is not in the vocabulary is spelled in bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(["▁" + text.replace(" ", "▁") for text in SENTENCES[:1]], trainers.BpeTrainer())
    document = json.loads(tokenizer.to_str())
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = sorted(document["model"]["vocab"], key=document["model"]["vocab"].__getitem__)
    document["model"]["vocab"] = {token: number for number, token in enumerate(first + learned)}
    document["added_tokens"] = [added(number, token) for number, token in enumerate(first[:3])]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def added(number: int, content: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def small(model: dict[str, Any], *special: dict[str, Any], **parts: Any) -> str:  # noqa: ANN401 - parts of a file
    return json.dumps({"version": "1.0", "added_tokens": list(special), "model": model, **parts})


WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}
KINDS = {"byte level": byte_level, "WordPiece": wordpiece, "Unigram": unigram, "byte fallback": byte_fallback}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
texts = st.lists(st.text() | st.sampled_from([*SENTENCES, " ", "<", "the", "</", "s", ">", "\n"])).map("".join)
drawn = settings(max_examples=up_to(60), derandomize=True, deadline=None)


# Outside systems.


@kinds
@drawn
@given(text=texts, special=st.booleans())
def test_ids_and_texts_are_the_libraries_own(make: Callable[[], str], text: str, special: bool) -> None:
    theirs, ours = tokenizers.Tokenizer.from_str(make()), Tokenizer.from_json(make())
    if any(token.content in text for token in theirs.get_added_tokens_decoder().values()):
        return
    ids = theirs.encode(text, add_special_tokens=special).ids
    assert ours.encode(text, special) == ids
    assert ours.encode(text.encode(), special) == ids
    assert ours.encode_batch([text, "the", text.encode()], special) == [ids, ours.encode("the", special), ids]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids)


BERT = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "cls_token": "[CLS]", "sep_token": "[SEP]"}
T5 = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (byte_level, {}),
        (byte_level, FAST | {"eos_token": "<|endoftext|>"}),
        (wordpiece, {}),
        (wordpiece, BERT | {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}),
        (unigram, {}),
        (unigram, FAST | T5),
        (byte_fallback, {}),
        (byte_fallback, FAST | {"bos_token": "<s>", "eos_token": "</s>"}),
    ],
)
def test_transformers_reads_what_is_saved(make: Callable[[], str], config: dict[str, Any], tmp_path: Path) -> None:
    ours = Tokenizer.from_json(make(), config)
    ours.save(tmp_path / "new" / "folder")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    assert len(theirs) == len(ours)
    for text in (*SENTENCES, ""):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text, add_special_tokens=False)
    for role, token in ours.special_tokens.items():
        assert getattr(theirs, f"{role}_token") == token
        assert getattr(theirs, f"{role}_token_id") == ours.special_id(role)


# A special token spelled out in a text is text.


@kinds
def test_a_special_token_in_a_text_never_becomes_its_id(make: Callable[[], str]) -> None:
    tokenizer = Tokenizer.from_json(make())
    unknown = {tokenizer.token_to_id(token) for token in ("[UNK]", "<unk>")}
    assert len(tokenizer.special_ids) > 1
    for number in tokenizer.special_ids:
        token = tokenizer.id_to_token(number)
        for text in (token, f"the {token} dog", f"the{token}{token}dog", token * 3 + "\n"):
            assert not tokenizer.special_ids - unknown & {*tokenizer.encode(text, add_special_tokens=False)}
            assert not tokenizer.special_ids - unknown & {
                *tokenizer.encode_batch([text], add_special_tokens=False)[0]
            }
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_unigram_spells_special_tokens_in_its_other_pieces() -> None:
    pieces = ["<unk>", "</s>", "<", "/", "s", ">", "</"]
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -float(n)] for n, piece in enumerate(pieces)]}
    tokenizer = Tokenizer.from_json(small(model, added(0, "<unk>"), added(1, "</s>")))
    # "<" and "/" cost 2 + 3, "</" costs 6.
    assert tokenizer.encode("</s>") == [2, 3, 4, 5]
    assert tokenizer.encode("s?s") == [4, 0, 4]


def test_merges_that_lead_to_a_special_token_stop_before_it() -> None:
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "<s><": 5}
    for merges in (["< s", "<s >", "<s> <"], [["<", "s"], ["<s", ">"], ["<s>", "<"]]):
        model = {"type": "BPE", "vocab": vocab, "merges": merges}
        assert Tokenizer.from_json(small(model)).encode("<s><") == [5]
        assert Tokenizer.from_json(small(model, added(4, "<s>"))).encode("<s><") == [3, 2, 0]
        assert Tokenizer.from_json(small(model | {"ignore_merges": True}, added(4, "<s>"))).encode("<s>") == [3, 2]


def test_marked_pieces_that_are_special_tokens_are_not_made() -> None:
    vocab = {"<": 0, "s": 1, "s>": 2, "<s>": 3, "-s": 4, "<s": 5, "?": 6}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "?"}
    ends = Tokenizer.from_json(small(model | {"end_of_word_suffix": ">"}, added(2, "s>")))
    assert ends.encode("ss") == [1, 6]
    goes_on = model | {"merges": ["< -s"], "continuing_subword_prefix": "-"}
    assert Tokenizer.from_json(small(goes_on)).encode("<s") == [5]
    assert Tokenizer.from_json(small(goes_on, added(5, "<s"))).encode("<s") == [0, 4]
    assert Tokenizer.from_json(small(goes_on, added(4, "-s"))).encode("<s") == [0, 6]


def test_a_word_that_is_a_special_token_is_unknown() -> None:
    model = WORDS | {"vocab": {"[UNK]": 0, "a": 1, "[SEP]": 2}}
    tokenizer = Tokenizer.from_json(small(model, added(2, "[SEP]"), pre_tokenizer={"type": "WhitespaceSplit"}))
    assert tokenizer.encode("a [SEP] a") == [1, 0, 1]
    assert tokenizer.decode([1, 2]) == "a [SEP]"
    assert tokenizer.token_to_id("[SEP]") == 2


@pytest.mark.parametrize("source", ["config", "special_tokens_map"])
@pytest.mark.parametrize(("in_model", "in_list"), [(True, False), (False, True), (True, True)])
def test_a_token_with_a_role_is_special_whatever_the_file_says(source: str, in_model: bool, in_list: bool) -> None:
    vocab = {"<": 0, "s": 1, ">": 2} | ({"<s>": 3} if in_model else {})
    model = {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True}
    text = small(model, *([added(3, "<s>", special=False)] if in_list else []))
    assert Tokenizer.from_json(text).encode("<s>") == [3]
    tokenizer = Tokenizer.from_json(text, **{source: {"bos_token": {"content": "<s>"}}})
    assert tokenizer.encode("<s>") == [0, 1, 2]
    assert tokenizer.special_ids == {3}
    assert tokenizer.decode([3, 1], skip_special_tokens=True) == "s"


def test_a_token_outside_the_model_is_spelled_by_it() -> None:
    model = {"type": "BPE", "vocab": {"<": 0, "s": 1, ">": 2}, "merges": []}
    tokenizer = Tokenizer.from_json(small(model, added(3, "<s>")))
    assert tokenizer.encode("s<s>") == [1, 0, 1, 2]
    assert tokenizer.decode_bytes([3]) == b"<s>"


def test_bytes_to_fall_back_on_are_kept_where_the_file_calls_them_special() -> None:
    document = json.loads(byte_fallback())
    document["added_tokens"] += [added(3 + byte, f"<0x{byte:02X}>") for byte in range(256)]
    tokenizer = Tokenizer.from_json(json.dumps(document))
    assert tokenizer.encode("é", add_special_tokens=False)[-2:] == [3 + byte for byte in "é".encode()]


def test_a_single_character_keeps_its_only_spelling() -> None:
    document = json.loads(byte_level())
    number = document["model"]["vocab"]["!"]
    document["added_tokens"].append(added(number, "!"))  # as CLIP pads with it
    tokenizer = Tokenizer.from_json(json.dumps(document))
    assert tokenizer.decode_bytes(tokenizer.encode("Hello!")) == b"Hello!"


# Bytes.


@drawn
@given(text=st.lists(st.text() | st.sampled_from(["<|endoftext|>", "<|im_start|>", *SENTENCES])).map("".join))
def test_byte_level_text_comes_back_byte_for_byte(text: str) -> None:
    tokenizer = Tokenizer.from_json(byte_level())
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@drawn
@given(st.data())
def test_byte_level_ids_are_the_bytes_that_decode_marks(data: st.DataObject) -> None:
    tokenizer = Tokenizer.from_json(byte_level())
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1)))
    assert tokenizer.decode_bytes(ids).decode(errors="replace") == tokenizer.decode(ids)
    assert b"".join(tokenizer.decode_bytes([number]) for number in ids) == tokenizer.decode_bytes(ids)


def test_every_byte_is_a_token_of_byte_level() -> None:
    tokenizer = Tokenizer.from_json(byte_level())
    single = {tokenizer.decode_bytes([number]) for number in range(len(tokenizer))}
    assert single >= {bytes([byte]) for byte in range(256)}


def test_added_tokens_of_byte_level_are_their_text() -> None:
    document = json.loads(byte_level())
    size = len(document["model"]["vocab"])
    document["added_tokens"] += [added(size, "éé", special=False), added(size + 1, "Ġ Ġ", special=False)]
    tokenizer = Tokenizer.from_json(json.dumps(document))
    assert tokenizer.encode("ééĠ Ġ") == [size, size + 1]
    assert tokenizer.decode_bytes([size, size + 1]) == "ééĠ Ġ".encode()


@drawn
@given(text=st.text() | st.sampled_from(["<s>", "</s>", "<unk>", "<0x0A>", *SENTENCES]))
def test_byte_fallback_text_comes_back_byte_for_byte(text: str) -> None:
    text = text.replace("▁", "_")  # the mark itself means a space
    tokenizer = Tokenizer.from_json(byte_fallback())
    assert tokenizer.decode_bytes(tokenizer.encode(text, add_special_tokens=False)) == text.encode()


def test_byte_fallback_keeps_half_a_character() -> None:
    tokenizer = Tokenizer.from_json(byte_fallback())
    ids = tokenizer.encode("a€", add_special_tokens=False)
    assert tokenizer.decode_bytes(ids[:-1]) == "a€".encode()[:-1]
    assert "\ufffd" in tokenizer.decode(ids[:-1])


@pytest.mark.parametrize("make", [wordpiece, unigram])
def test_other_kinds_give_the_bytes_of_their_text(make: Callable[[], str]) -> None:
    tokenizer = Tokenizer.from_json(make())
    ids = tokenizer.encode(SENTENCES[1])
    assert tokenizer.decode_bytes(ids) == tokenizer.decode(ids).encode()


# What a file says, and what is kept of it.


def test_truncation_and_padding_in_a_file_are_ignored(tmp_path: Path) -> None:
    plain = Tokenizer.from_json(wordpiece())
    library = tokenizers.Tokenizer.from_str(wordpiece())
    library.enable_truncation(4)
    library.enable_padding(length=128)
    ours = Tokenizer.from_json(library.to_str())
    assert ours.encode_batch([*SENTENCES, "the"]) == plain.encode_batch([*SENTENCES, "the"])
    assert ours.fingerprint == plain.fingerprint
    ours.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["padding"] is saved["truncation"] is None


@kinds
def test_what_is_saved_is_loaded_again(make: Callable[[], str], tmp_path: Path) -> None:
    config = {"model_max_length": 512, "größe": [1, None], "eos_token": "</s>"}
    special = {"eos_token": {"content": "</s>", "lstrip": True}, "additional_special_tokens": ["x"]}
    ours = Tokenizer.from_json(make(), config, special)
    ours.save(tmp_path)
    ours.save(tmp_path)
    names = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert json.loads((tmp_path / names[0]).read_text(encoding="utf-8")) == special
    assert json.loads((tmp_path / names[2]).read_text(encoding="utf-8")) == config
    for path in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        again = Tokenizer.load(path)
        assert again.fingerprint == ours.fingerprint
        assert again.config == config
        assert again.encode(SENTENCES[1]) == ours.encode(SENTENCES[1])


def test_a_failure_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer.from_json(wordpiece()).save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        Tokenizer.from_json(unigram()).save(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_roles_come_from_both_tables() -> None:
    config = {"bos_token": "<s>", "eos_token": None, "mask_token": {"content": "<0x41>"}, "pad_token": "[new]"}
    tokenizer = Tokenizer.from_json(byte_fallback(), config, {"bos_token": "</s>", "eos_token": "</s>"})
    assert tokenizer.special_tokens == {"bos": "<s>", "eos": "</s>", "mask": "<0x41>", "pad": "[new]"}
    assert [tokenizer.special_id(role) for role in ("bos", "eos", "pad", "cls")] == [1, 2, None, None]
    with pytest.raises(InputError, match=r"^'padd' is not the role of a special token; did you mean pad\?$"):
        tokenizer.special_id("padd")


def test_the_fingerprint_is_that_of_what_decides_ids() -> None:
    document = json.loads(byte_level())
    shuffled = {key: document[key] for key in reversed(document)}
    shuffled["model"]["vocab"] = dict(reversed(document["model"]["vocab"].items()))
    same = [byte_level(), json.dumps(document, indent=4), json.dumps(shuffled, ensure_ascii=False)]
    assert len({Tokenizer.from_json(text, {"eos_token": str(n)}).fingerprint for n, text in enumerate(same)}) == 1
    merges = document["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    assert Tokenizer.from_json(json.dumps(document)).fingerprint != Tokenizer.from_json(byte_level()).fingerprint
    assert len(Tokenizer.from_json(byte_level()).fingerprint) == 64


def test_the_length_reaches_over_holes() -> None:
    tokenizer = Tokenizer.from_json(small(WORDS | {"vocab": {"[UNK]": 0, "b": 7}}))
    assert len(tokenizer) == 8
    assert tokenizer.id_to_token(7) == "b"
    with pytest.raises(InputError, match=r"^id 3 is not in the vocabulary; give ids below 8, the vocabulary size\.$"):
        tokenizer.decode([7, 3])


# Mistakes and bad will.


@pytest.mark.parametrize("ids", [[-1], [3], [10**30], [1.5], ["a"], [None], 1, [[1]]])
def test_ids_that_are_none_are_refused(ids: Any) -> None:  # noqa: ANN401
    tokenizer = Tokenizer.from_json(small(WORDS))
    for decode in (tokenizer.decode, tokenizer.decode_bytes):
        with pytest.raises(
            InputError, match=r"^(id -?\d+ is not in the vocabulary|ids is .* a list of whole numbers)"
        ):
            decode(ids)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (5, "the text is of type int"),
        (None, "the text is of type NoneType"),
        (["a"], "the text is of type list"),
        (b"ab\xff", "not UTF-8 at byte 2"),
        ("ab\ud800", "a lone surrogate at index 2"),
    ],
)
def test_texts_that_are_none_are_refused(text: Any, sentence: str) -> None:  # noqa: ANN401
    tokenizer = Tokenizer.from_json(small(WORDS))
    with pytest.raises(InputError, match=sentence):
        tokenizer.encode(text)
    with pytest.raises(InputError, match=sentence):
        tokenizer.encode_batch(["a", text])


def test_a_single_text_is_no_batch() -> None:
    with pytest.raises(InputError, match="texts is a single text; put it in a list"):
        Tokenizer.from_json(small(WORDS)).encode_batch("a b")


def test_a_text_that_the_library_cannot_take_is_a_sentence() -> None:
    nameless = Tokenizer.from_json(small({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}))
    with pytest.raises(InputError, match=r"^the text cannot be encoded: .*unk_id.*\.$"):
        nameless.encode("b")
    chunks = Tokenizer.from_json(small(WORDS, pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(InputError, match=r"^the texts cannot be encoded: .*\.$"):  # a panic, which is no Exception
        chunks.encode_batch(["ab"])


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def template(number: int, known: bool = True) -> dict[str, Any]:
    tokens = {"x": {"id": "x", "ids": [number], "tokens": ["x"]}} if known else {}
    pieces = [{"SpecialToken": {"id": "x", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": tokens}


SLOW = {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""}
HOSTILE = {
    "nothing": ("", "is not JSON"),
    "half a file": (small(WORDS)[:-5], "is not JSON"),
    "a number too long": ('{"version": ' + "1" * 10_000 + "}", "is not JSON"),
    "too deep": ("[" * 200_000, "is nested too deep"),
    "deep": (small(WORDS, normalizer=json.loads("[" * 500 + "]" * 500)), "cannot be used: .*recursion limit"),
    "a list": ("[]", "contains list instead of a JSON object"),
    "a string": ('"x"', "contains str instead"),
    "no version": ("{}", "is of version None, but only '1.0' is supported"),
    "another version": ('{"version": "2.0"}', "is of version '2.0'"),
    "no model": ('{"version": "1.0"}', "contains no model"),
    "a list for a model": (small([]), "contains no model"),  # type: ignore[arg-type]
    "an unknown model": (small({"type": "Magic", "vocab": {}}), "cannot be used"),
    "a number for a vocabulary": (small(WORDS | {"vocab": 5}), "cannot be used"),
    "an id too large": (small(WORDS | {"vocab": {"a": 2**40}}), "gives a token the id"),
    "an id below 0": (small(WORDS | {"vocab": {"a": -1}}), "gives a token the id"),
    "half a character": (small(WORDS | {"vocab": {"\ud800": 0}}), "cannot be used"),
    "not a number": (small({"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 0}), "cannot be used"),
    "unknown outside": (small({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9}), "cannot be used"),
    "a merge of nothing": (small({"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), "cannot be used"),
    "numbers for merges": (small({"type": "BPE", "vocab": {"a": 0}, "merges": [5]}), "cannot be used"),
    "added tokens of numbers": (small(WORDS, 5), "cannot be used"),  # type: ignore[arg-type]
    "a panic at once": (
        small(WORDS, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "cannot be used: Precompiled",
    ),
    "a panic at the first text": (small(WORDS, post_processor=template(1, known=False)), "cannot be used"),
    "an id of no token": (small(WORDS, post_processor=template(99)), "adds id 99 to every text"),
    # The library would cut é in half, and end the process as it tries to say so.
    "an end of the process": (
        small(
            {
                "type": "BPE",
                "vocab": {"a": 0, "é": 1, "aé": 2},
                "merges": [["a", "é"]],
                "continuing_subword_prefix": "x",
            }
        ),
        r"merges \['a', 'é'\], but the second part must start with 'x'",
    ),
    "a slow split": (small(WORDS, pre_tokenizer=split("(a+)+$")), r"refused: the pattern '\(a\+\)\+\$' repeats"),
    "a slow normalizer": (small(WORDS, normalizer={"type": "Sequence", "normalizers": [SLOW]}), "refused: the pat"),
    "a slow decoder": (small(WORDS, decoder={"type": "Sequence", "decoders": [SLOW]}), "refused: the pattern"),
    "an unknown property": (small(WORDS, pre_tokenizer=split(r"\p{Nonsense}")), "cannot be used: Oniguruma error"),
}


@pytest.mark.parametrize(("text", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_a_bad_file_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"^'tokenizer.json' (is )?{sentence}.*[.]$"):
        Tokenizer.from_json(text)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match=f"tokenizer.json' (is )?{sentence}"):
        Tokenizer.load(tmp_path)


def test_what_is_checked_is_what_is_used() -> None:
    # A reader that takes the first of two equal keys would use the slow one, and never come back.
    fast, twice = '{"Regex": "a"}', '{"Regex": "(a+)+$", "Regex": "a"}'
    tokenizer = Tokenizer.from_json(small(WORDS, pre_tokenizer=split("a")).replace(fast, twice))
    assert tokenizer.encode("a" * 50 + "b") == [1] * 50 + [2]


@pytest.mark.parametrize("value", [{"AutoTokenizer": ["x--tok.Tok", None]}, "x"])
def test_a_folder_that_asks_to_run_code_is_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(small(WORDS))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": value}))
    with pytest.raises(
        StoreError, match=r"tokenizer.json' asks to run code with 'auto_map'; choose one that needs none"
    ):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("value", [5, ["<s>"], {"text": "<s>"}, {"content": 5}, True])
def test_a_special_token_must_be_a_string(value: object) -> None:
    with pytest.raises(StoreError, match=r"^the eos_token of 'tokenizer.json' is .*, but it must be a string"):
        Tokenizer.from_json(small(WORDS), {"eos_token": value})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_files_that_cannot_be_read_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(small(WORDS))
    for content, sentence in ((b"\xff", "not UTF-8 at byte 0"), (b"{", "is not JSON"), (b"[]", "contains list")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StoreError, match=f"{name}' .*{sentence}|{name}' {sentence}"):
            Tokenizer.load(tmp_path)
    with (tmp_path / name).open("wb") as file:
        file.truncate(200_000_001)  # a hole, which takes no room on the disk
    with pytest.raises(StoreError, match=f"{name}' has 200000001 bytes, but at most 200000000 are allowed"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreError, match=r"^there is no '.*tokenizer.json'; give a folder with"):
            Tokenizer.load(folder)


def test_an_interrupt_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "tokenizers", SimpleNamespace(Tokenizer=SimpleNamespace(from_str=interrupt)))
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_json(small(WORDS))


def test_text_package_does_not_import_torch() -> None:
    code = "import sys, glasshouse.text; print({'torch', 'transformers', 'huggingface_hub'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_chat_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    theirs.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    theirs.save_pretrained(tmp_path / "theirs")
    Tokenizer.load(tmp_path / "theirs").save(tmp_path / "ours")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again.chat_template == theirs.chat_template


def test_special_tokens_may_be_changed() -> None:
    tok = Tokenizer.train(texts=["to be"], vocab_size=266)
    tok.special_tokens = {"eos": "<|end|>"}
    assert tok.special_id("eos") == tok.token_to_id("<|end|>")
    assert tok.special_id("pad") is None


def test_a_corpus_cannot_spell_a_special_token_that_is_a_word_of_the_vocabulary() -> None:
    token = {"id": 1, "content": "<s>", "special": True, "single_word": False}
    document = {
        "version": "1.0",
        "added_tokens": [token | dict.fromkeys(("lstrip", "rstrip", "normalized"), False)],
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "<s>": 1, "a": 2}, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
    }
    encoder = Tokenizer.from_json(json.dumps(document)).corpus_encoder()
    ids, ends = encoder.encode([b"a <s> a", b"<s>"])
    assert (ids.tolist(), ends.tolist()) == ([2, 0, 2, 0], [3, 4])
    assert encoder.backend == "tokenizers, as gigatoken could produce special tokens from text here"
