"""Streamed text equals the decoded text, in whole characters, and ends at the first stop string."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import tokenizers
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from glasshouse.generation.detokenizer import CONTEXT, Detokenizer
from glasshouse.text import Tokenizer

MARK = "\ufffd"
TEXTS = ["to be or not to be 你好 世界 🙂🙃 né!\n\nUser: ", "aab aaab abab \n你好\n"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
SPACED = ["▁", "▁a", "b", "ab", "▁▁", "▁na", "é", "你", "🙂", "▁a▁b", "\n", ""]


def make_tokenizer(tokens: Iterable[str], *decoders: dict[str, Any]) -> Tokenizer:
    """Make a tokenizer of a special token and these; only the decoder matters here."""
    vocab = {token: number for number, token in enumerate(["<end>", *tokens])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<end>", "special": True, **flags}],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<end>"},
        "decoder": {"type": "Sequence", "decoders": decoders} if decoders else None,
    }
    return Tokenizer.from_json(json.dumps(document))


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer.train(texts=TEXTS * 3, vocab_size=300)


@functools.cache
def some_bytes() -> Tokenizer:
    """Byte level without tokens for most bytes, like a vocabulary trained without them."""
    tokens = ["a", "b", "Ġ", "Ġa", "ä", "½", "ł", "½łb", "ä½", "ð", "Ł", "Ļ", "Ĥ", "ðŁ", "ÿ"]  # 你 is ä½ł, 🙂 is ðŁĻĤ
    tokenizer = make_tokenizer(tokens, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True})
    assert not tokenizer.byte_level
    return tokenizer


@functools.cache
def wordpiece() -> Tokenizer:
    tokens = ["a", "##b", "##", "do", ".", "##.", "!", "'", "'s", "n't", "do not", "你", "##é", "🙂"]
    return make_tokenizer(tokens, {"type": "WordPiece", "prefix": "##", "cleanup": True})


@functools.cache
def metaspace() -> Tokenizer:
    return make_tokenizer(SPACED, METASPACE)


@functools.cache
def llama() -> Tokenizer:
    return make_tokenizer([*SPACED, MARK, *BYTES], REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP)


@functools.cache
def gemma() -> Tokenizer:
    return make_tokenizer([*SPACED, *BYTES], REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"})


@functools.cache
def fallback_then_metaspace() -> Tokenizer:
    return make_tokenizer([*SPACED, *BYTES], {"type": "ByteFallback"}, METASPACE)


@functools.cache
def word_ends() -> Tokenizer:
    return make_tokenizer(["a</w>", "b", "</w>", "é</w>", "."], {"type": "BPEDecoder", "suffix": "</w>"})


@functools.cache
def words() -> Tokenizer:
    return make_tokenizer(["a", "b", "é", "a b", ""])


KINDS = [
    byte_level,
    some_bytes,
    wordpiece,
    metaspace,
    llama,
    gemma,
    fallback_then_metaspace,
    word_ends,
    words,
]
kinds = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
drawn = settings(max_examples=up_to(60), derandomize=True, deadline=None)


@st.composite
def lists_of_ids(draw: st.DrawFn, tokenizer: Tokenizer, max_size: int = 60) -> list[int]:
    """Draw ids of any token, of a few repeated tokens, and outside the vocabulary."""
    every = st.integers(0, len(tokenizer) - 1)
    few = st.sampled_from(draw(st.lists(every, min_size=1, max_size=4)))
    return draw(st.lists(every | few | few | st.just(len(tokenizer) + 5), max_size=max_size))


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    return tokenizer.decode([number for number in ids if number in tokenizer.ids], skip_special_tokens=True)


def cut(text: str, stop: Iterable[str]) -> str:
    return text[: min((text.index(one) for one in stop if one in text), default=len(text))]


def common_prefix(texts: Iterable[str]) -> str:
    """Return the common prefix of all texts."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)


def detokenize(tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = ()) -> Detokenizer:
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = [detokenizer.add(number) for number in ids]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return detokenizer


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    return [number for number in ids if number is not None]


@functools.cache
def single_bytes() -> Tokenizer:
    return Tokenizer.train(texts=["a"], vocab_size=263)


# Streamed text equals decoded text.


@kinds
@drawn
@given(data=st.data())
def test_streamed_text_equals_decoded_text(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(lists_of_ids(tokenizer))
    detokenizer = detokenize(tokenizer, ids)
    assert detokenizer.text == decode(tokenizer, ids)
    assert not detokenizer.stopped
    assert detokenizer.n_kept == len(ids)


@pytest.mark.few(3)
@kinds
@settings(drawn, max_examples=20)
@given(data=st.data())
def test_text_is_returned_as_soon_as_it_is_final(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(lists_of_ids(tokenizer, max_size=6))
    detokenizer = Detokenizer(tokenizer)
    for number in ids:
        detokenizer.add(number)
    # Three of the same byte complete any character that a first byte begins.
    ends = [[number] * times for number in sorted(tokenizer.ids) for times in range(4)]
    final = common_prefix(decode(tokenizer, ids + end) for end in ends)
    assert final.startswith(detokenizer.text)
    # Replacement characters may come later than possible: a run of bytes is not decoded before it ends.
    assert set(final.removeprefix(detokenizer.text)) <= {MARK}


@pytest.mark.parametrize("make", [byte_level, gemma], ids=lambda make: make.__name__)
@drawn
@given(text=st.text() | st.sampled_from(TEXTS))
def test_equals_decode_stream_of_tokenizers_on_valid_text(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    if make is gemma:
        ids = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))
    else:
        ids = tokenizer.encode(text)
    library, stream = tokenizers.Tokenizer.from_str(tokenizer._text), DecodeStream(skip_special_tokens=True)
    theirs = "".join(stream.step(library, number) or "" for number in ids)
    assert detokenize(tokenizer, ids).text == text
    if not text.endswith(MARK):  # which DecodeStream never returns
        assert theirs == text


def test_characters_are_whole() -> None:
    tokenizer = single_bytes()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(number) for number in tokenizer.encode("né你🙂!")]
    assert pieces == ["n", "", "é", "", "", "你", "", "", "", "🙂", "!"]
    assert detokenizer.finish() == ""


def test_invalid_utf8_becomes_a_replacement_character_at_once() -> None:
    tokenizer = single_bytes()
    detokenizer = Detokenizer(tokenizer)
    # f0 9f is half of 🙂; ff is never valid; e4 begins a character that does not follow.
    pieces = [detokenizer.add(number) for number in tokenizer.encode(b"\xf0\x9f!\xff\xe4")]
    assert pieces == ["", "", MARK + "!", MARK, ""]
    assert detokenizer.finish() == MARK


def test_byte_fallback_run_is_returned_when_it_ends() -> None:
    tokenizer = llama()
    detokenizer = Detokenizer(tokenizer)
    tokens = ["▁a", "<0x0A>", "<0xC3>", "<0xA9>", "b", "<0xC3>", "<0xA9>", "<0xFF>", "▁a", "<0xE4>"]
    pieces = [detokenizer.add(number) for number in ids_of(tokenizer, *tokens)]
    assert pieces == ["a", "", "", "", "\néb", "", "", "", 3 * MARK + " a", ""]
    assert detokenizer.finish() == MARK


def test_only_the_first_token_loses_its_space() -> None:
    for make in (metaspace, llama):
        tokenizer = make()
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.add(number) for number in ids_of(tokenizer, *["▁a"] * (3 * CONTEXT))]
        assert pieces == ["a"] + [" a"] * (3 * CONTEXT - 1)


@pytest.mark.parametrize("times", [1, CONTEXT, 5 * CONTEXT])
def test_tokens_without_text_do_not_count_as_the_beginning(times: int) -> None:
    for make in (metaspace, llama, fallback_then_metaspace):
        tokenizer = make()
        ids = ids_of(tokenizer, "▁a", *[""] * times, "▁a")
        assert detokenize(tokenizer, ids).text == "a a"


def test_special_tokens_and_unknown_ids_add_no_text() -> None:
    tokenizer = single_bytes()
    end, (first, second) = min(tokenizer.special_ids), tokenizer.encode("é")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(number) for number in (end, first, end, len(tokenizer), -1, second)] == [""] * 5 + ["é"]
    assert (detokenizer.text, detokenizer.n_kept) == ("é", 6)


def test_added_token_of_a_byte_level_tokenizer_decodes_to_its_text() -> None:
    # tokenizers' decoder takes the letters of such a token for bytes.
    document = json.loads(single_bytes()._text)
    token = {"id": len(single_bytes()), "content": "éé", "special": False}
    document["added_tokens"].append(document["added_tokens"][0] | token)
    tokenizer = Tokenizer.from_json(json.dumps(document))
    assert detokenize(tokenizer, tokenizer.encode("ééa")).text == "ééa"


# Stop strings.


@pytest.mark.few(3)
@kinds
@drawn
@given(data=st.data())
def test_text_ends_at_the_first_stop_string(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(lists_of_ids(tokenizer, max_size=20))
    whole = decode(tokenizer, ids)
    start, length = st.integers(0, max(0, len(whole) - 1)), st.integers(1, 4)
    inside = st.builds(lambda start, length: whole[start : start + length], start, length).filter(bool)
    near = st.builds(str.__add__, inside, st.sampled_from("a .b"))
    stop = data.draw(st.lists(inside | near if whole else st.just("a"), max_size=3))
    detokenizer = detokenize(tokenizer, ids, stop)
    assert detokenizer.text == cut(whole, stop)
    assert detokenizer.stopped == any(one in whole for one in stop)
    if not detokenizer.stopped:
        assert detokenizer.n_kept == len(ids)
        return
    before = [k for k in range(len(ids)) if detokenizer.text.startswith(decode(tokenizer, ids[:k]))]
    assert detokenizer.n_kept in before
    if MARK not in whole:  # half a character decodes to a replacement character, which the text may have anyway
        assert detokenizer.n_kept == max(before)


@drawn
@given(
    text=st.text(st.sampled_from("ab"), max_size=9),
    stop=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
)
def test_pending_text_is_what_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    tokenizer = single_bytes()
    detokenizer = Detokenizer(tokenizer, stop)
    longest = max(map(len, stop), default=0)
    ends = ["".join(end) for length in range(longest) for end in itertools.product("abz", repeat=length)] or [""]
    for length, number in enumerate(tokenizer.encode(text), 1):
        detokenizer.add(number)
        cuts = {cut(text[:length] + end, stop) for end in ends}
        assert detokenizer.text == common_prefix(cuts)
        found = any(one in text[:length] for one in stop)
        assert detokenizer.stopped == (found and len(cuts) == 1)


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "kept"),
    [
        (["a", "b"], ["b"], "a", 1),
        (["xaby"], ["ab"], "x", 0),  # inside one token
        (["x", "za", "by"], ["ab"], "xz", 1),  # begins inside one, ends inside another
        (["a", "a", "a", "b"], ["aab"], "a", 1),  # overlaps itself
        (["a", "b", "a", "b", "c"], ["ababc", "bab"], "", 0),  # the longer begins first
        (["a", "b", "a", "b", "d"], ["ababc", "bab"], "a", 1),
        (["a", "b", "a", "b"], ["ababc", "bab"], "a", 1),  # the end decides
        (["x", "a", "b", "c"], ["ab", "abc"], "x", 1),
        (["a", "b", "c"], ["abd", "bd"], "abc", 3),  # no stop string after all
        (["a", "<end>", "b"], ["b"], "a", 2),
        (["a", "b", "<end>", "c"], ["bc"], "a", 1),
        (["é", "<end>"], ["é"], "", 0),
        (["a"], ["ab"], "a", 1),
        ([], ["a"], "", 0),
    ],
)
def test_stop_strings_by_hand(tokens: list[str], stop: list[str], text: str, kept: int) -> None:
    tokenizer = make_tokenizer(dict.fromkeys(t for t in tokens if t != "<end>"), {"type": "Fuse"})
    detokenizer = detokenize(tokenizer, ids_of(tokenizer, *tokens), stop)
    assert (detokenizer.text, detokenizer.n_kept) == (text, kept)
    assert detokenizer.stopped == (text != "".join(tokens).replace("<end>", ""))


def test_character_split_over_two_tokens_is_kept_or_dropped_as_a_whole() -> None:
    tokenizer = some_bytes()
    half, rest, rest_and_more = ids_of(tokenizer, "ä½", "ł", "½łb")
    a, b, e4 = ids_of(tokenizer, "a", "b", "ä")
    assert detokenize(tokenizer, [a, half, rest, b], ["你"]).n_kept == 1
    assert detokenize(tokenizer, [a, half, rest, b], ["b"]).n_kept == 3
    detokenizer = detokenize(tokenizer, [a, e4, rest_and_more], ["b"])
    assert (detokenizer.text, detokenizer.n_kept) == ("a你", 1)


def test_byte_fallback_tokens_are_kept_by_character() -> None:
    tokenizer = llama()
    ids = ids_of(tokenizer, "▁a", "<0x0A>", "<0xC3>", "<end>", "<0xA9>", "b")
    assert [detokenize(tokenizer, ids, [stop]).n_kept for stop in ("a", "\n", "é", "b")] == [0, 1, 2, 5]
    assert detokenize(tokenizer, ids_of(tokenizer, "<0x20>", "<0x0A>"), ["\n"]).n_kept == 1
    ids = ids_of(
        tokenizer, MARK, "<0x0A>", "b", "é"
    )  # a replacement character as a token may be half a character until the next
    assert [detokenize(tokenizer, ids, [stop]).n_kept for stop in ("b", "é")] == [2, 3]


def test_stop_string_found_at_the_end() -> None:
    half = single_bytes().encode(b"a\xe4")
    for tokenizer, ids, stop, text, kept in (
        (single_bytes(), half, MARK, "a", 1),
        (single_bytes(), half, "a" + MARK, "", 0),
        (llama(), ids_of(llama(), "▁a", "<0x0A>"), "\n", "a", 1),
    ):
        detokenizer = Detokenizer(tokenizer, [stop])
        pieces = [detokenizer.add(number) for number in ids]
        assert not detokenizer.stopped
        assert "".join(pieces) + detokenizer.finish() == detokenizer.text == text
        assert detokenizer.stopped
        assert detokenizer.n_kept == kept


def test_no_text_after_a_stop_string() -> None:
    tokenizer = single_bytes()
    detokenizer = Detokenizer(tokenizer, ["b"])
    ids = tokenizer.encode("abcabc")
    assert [detokenizer.add(number) for number in ids] == ["a", "", "", "", "", ""]
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.stopped, detokenizer.n_kept) == ("a", True, 1)


# Cost.


@pytest.mark.few(2)
@pytest.mark.slow
@kinds
def test_cost_is_linear_in_the_tokens(make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, draw, decoded = make(), random.Random(0), 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: Tokenizer, ids: list[int], *args: bool) -> Any:  # noqa: ANN401 - the method's own
            nonlocal decoded
            decoded += len(ids)
            return method(self, ids, *args)

        return count

    rows = [draw.choices(range(len(tokenizer)), k=20_000)]
    rows += [[number] * 1000 for number in draw.sample(range(len(tokenizer)), min(len(tokenizer), 12))]
    expected = [decode(tokenizer, ids) for ids in rows]
    monkeypatch.setattr(Tokenizer, "decode", counted(Tokenizer.decode))
    monkeypatch.setattr(Tokenizer, "decode_bytes", counted(Tokenizer.decode_bytes))
    for ids, text in zip(rows, expected, strict=True):
        decoded = 0
        assert detokenize(tokenizer, ids, ["never"]).text == text
        # With each token a window below 2 * CONTEXT is decoded, before it where it ends a run, and where it slides.
        assert decoded <= 3 * 2 * CONTEXT * len(ids)
