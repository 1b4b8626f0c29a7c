"""Streamed text is the decoded text, of whole characters, and is cut at the first stop string."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import tokenizers
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


def made(tokens: Iterable[str], *decoders: dict[str, Any]) -> Tokenizer:
    """Make a tokenizer of these tokens after one that is special; only the decoder matters to the way back."""
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
    """Byte level without tokens for most of the bytes, as a vocabulary that was trained without them."""
    tokens = ["a", "b", "Ġ", "Ġa", "ä", "½", "ł", "½łb", "ä½", "ð", "Ł", "Ļ", "Ĥ", "ðŁ", "ÿ"]  # 你 is ä½ł, 🙂 is ðŁĻĤ
    tokenizer = made(tokens, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True})
    assert not tokenizer.byte_level
    return tokenizer


@functools.cache
def wordpiece() -> Tokenizer:
    tokens = ["a", "##b", "##", "do", ".", "##.", "!", "'", "'s", "n't", "do not", "你", "##é", "🙂"]
    return made(tokens, {"type": "WordPiece", "prefix": "##", "cleanup": True})


@functools.cache
def metaspace() -> Tokenizer:
    return made(SPACED, METASPACE)


@functools.cache
def llama() -> Tokenizer:
    return made([*SPACED, MARK, *BYTES], REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP)


@functools.cache
def gemma() -> Tokenizer:
    return made([*SPACED, *BYTES], REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"})


@functools.cache
def fallback_then_metaspace() -> Tokenizer:
    return made([*SPACED, *BYTES], {"type": "ByteFallback"}, METASPACE)


@functools.cache
def word_ends() -> Tokenizer:
    return made(["a</w>", "b", "</w>", "é</w>", "."], {"type": "BPEDecoder", "suffix": "</w>"})


@functools.cache
def words() -> Tokenizer:
    return made(["a", "b", "é", "a b", ""])


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
drawn = settings(max_examples=60, derandomize=True, deadline=None)


@st.composite
def lists_of_ids(draw: st.DrawFn, tokenizer: Tokenizer, max_size: int = 60) -> list[int]:
    """Draw ids of all tokens alike, of a few tokens that come again and again, and some that stand for none."""
    every = st.integers(0, len(tokenizer) - 1)
    few = st.sampled_from(draw(st.lists(every, min_size=1, max_size=4)))
    return draw(st.lists(every | few | few | st.just(len(tokenizer) + 5), max_size=max_size))


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    return tokenizer.decode([number for number in ids if number in tokenizer.ids], skip_special_tokens=True)


def cut(text: str, stop: Iterable[str]) -> str:
    return text[: min((text.index(one) for one in stop if one in text), default=len(text))]


def agreed(texts: Iterable[str]) -> str:
    """Return what all texts begin with."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)


def write(tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = ()) -> Detokenizer:
    transcript = Detokenizer(tokenizer, stop)
    pieces = [transcript.add(number) for number in ids]
    pieces.append(transcript.finish())
    assert "".join(pieces) == transcript.text
    return transcript


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    return [number for number in ids if number is not None]


@functools.cache
def single_bytes() -> Tokenizer:
    return Tokenizer.train(texts=["a"], vocab_size=263)


# Streamed is decoded.


@kinds
@drawn
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(lists_of_ids(tokenizer))
    transcript = write(tokenizer, ids)
    assert transcript.text == decode(tokenizer, ids)
    assert not transcript.stopped
    assert transcript.n_kept == len(ids)


@kinds
@settings(drawn, max_examples=20)
@given(data=st.data())
def test_text_comes_as_soon_as_nothing_can_change_it(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(lists_of_ids(tokenizer, max_size=6))
    transcript = Detokenizer(tokenizer)
    for number in ids:
        transcript.add(number)
    # Three of the same byte complete any character that a first byte begins.
    ends = [[number] * times for number in sorted(tokenizer.ids) for times in range(4)]
    certain = agreed(decode(tokenizer, ids + end) for end in ends)
    assert certain.startswith(transcript.text)
    # Marks may come later than they could: a run of bytes is not looked at before it ends.
    assert set(certain.removeprefix(transcript.text)) <= {MARK}


@pytest.mark.parametrize("make", [byte_level, gemma], ids=lambda make: make.__name__)
@drawn
@given(text=st.text() | st.sampled_from(TEXTS))
def test_the_librarys_own_stream_gives_the_same_of_good_text(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    if make is gemma:
        ids = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))
    else:
        ids = tokenizer.encode(text)
    library, stream = tokenizers.Tokenizer.from_str(tokenizer._text), DecodeStream(skip_special_tokens=True)
    theirs = "".join(stream.step(library, number) or "" for number in ids)
    assert write(tokenizer, ids).text == text
    if not text.endswith(MARK):  # which it holds back for ever
        assert theirs == text


def test_characters_are_whole() -> None:
    tokenizer = single_bytes()
    transcript = Detokenizer(tokenizer)
    pieces = [transcript.add(number) for number in tokenizer.encode("né你🙂!")]
    assert pieces == ["n", "", "é", "", "", "你", "", "", "", "🙂", "!"]
    assert transcript.finish() == ""


def test_a_broken_character_is_marked_as_soon_as_it_is_broken() -> None:
    tokenizer = single_bytes()
    transcript = Detokenizer(tokenizer)
    # f0 9f is half of 🙂; the next byte belongs to no character; e4 begins one that never comes.
    pieces = [transcript.add(number) for number in tokenizer.encode(b"\xf0\x9f!\xff\xe4")]
    assert pieces == ["", "", MARK + "!", MARK, ""]
    assert transcript.finish() == MARK


def test_a_run_of_bytes_to_fall_back_on_comes_when_it_ends() -> None:
    tokenizer = llama()
    transcript = Detokenizer(tokenizer)
    tokens = ["▁a", "<0x0A>", "<0xC3>", "<0xA9>", "b", "<0xC3>", "<0xA9>", "<0xFF>", "▁a", "<0xE4>"]
    pieces = [transcript.add(number) for number in ids_of(tokenizer, *tokens)]
    assert pieces == ["a", "", "", "", "\néb", "", "", "", 3 * MARK + " a", ""]
    assert transcript.finish() == MARK


def test_the_first_token_loses_its_space_and_no_other() -> None:
    for make in (metaspace, llama):
        tokenizer = make()
        transcript = Detokenizer(tokenizer)
        pieces = [transcript.add(number) for number in ids_of(tokenizer, *["▁a"] * (3 * CONTEXT))]
        assert pieces == ["a"] + [" a"] * (3 * CONTEXT - 1)


@pytest.mark.parametrize("times", [1, CONTEXT, 5 * CONTEXT])
def test_tokens_without_text_are_no_beginning(times: int) -> None:
    for make in (metaspace, llama, fallback_then_metaspace):
        tokenizer = make()
        ids = ids_of(tokenizer, "▁a", *[""] * times, "▁a")
        assert write(tokenizer, ids).text == "a a"


def test_special_tokens_and_ids_of_no_token_add_nothing() -> None:
    tokenizer = single_bytes()
    end, (first, second) = min(tokenizer.special_ids), tokenizer.encode("é")
    transcript = Detokenizer(tokenizer)
    assert [transcript.add(number) for number in (end, first, end, len(tokenizer), -1, second)] == [""] * 5 + ["é"]
    assert (transcript.text, transcript.n_kept) == ("é", 6)


def test_an_added_token_of_byte_level_is_its_text() -> None:
    # The library's decoder takes the letters of such a token for bytes.
    document = json.loads(single_bytes()._text)
    token = {"id": len(single_bytes()), "content": "éé", "special": False}
    document["added_tokens"].append(document["added_tokens"][0] | token)
    tokenizer = Tokenizer.from_json(json.dumps(document))
    assert write(tokenizer, tokenizer.encode("ééa")).text == "ééa"


# Stop strings.


@kinds
@drawn
@given(data=st.data())
def test_text_is_cut_at_the_first_stop_string(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(lists_of_ids(tokenizer, max_size=20))
    whole = decode(tokenizer, ids)
    place, length = st.integers(0, max(0, len(whole) - 1)), st.integers(1, 4)
    inside = st.builds(lambda place, length: whole[place : place + length], place, length).filter(bool)
    near = st.builds(str.__add__, inside, st.sampled_from("a .b"))
    stop = data.draw(st.lists(inside | near if whole else st.just("a"), max_size=3))
    transcript = write(tokenizer, ids, stop)
    assert transcript.text == cut(whole, stop)
    assert transcript.stopped == any(one in whole for one in stop)
    if not transcript.stopped:
        assert transcript.n_kept == len(ids)
        return
    before = [k for k in range(len(ids)) if transcript.text.startswith(decode(tokenizer, ids[:k]))]
    assert transcript.n_kept in before
    if MARK not in whole:  # half a character decodes to a mark, which a text may hold for another reason
        assert transcript.n_kept == max(before)


@drawn
@given(
    text=st.text(st.sampled_from("ab"), max_size=9),
    stop=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
)
def test_what_is_held_back_is_what_a_stop_string_may_still_take(text: str, stop: list[str]) -> None:
    tokenizer = single_bytes()
    transcript = Detokenizer(tokenizer, stop)
    longest = max(map(len, stop), default=0)
    ends = ["".join(end) for length in range(longest) for end in itertools.product("abz", repeat=length)] or [""]
    for length, number in enumerate(tokenizer.encode(text), 1):
        transcript.add(number)
        cuts = {cut(text[:length] + end, stop) for end in ends}
        assert transcript.text == agreed(cuts)
        found = any(one in text[:length] for one in stop)
        assert transcript.stopped == (found and len(cuts) == 1)


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
        (["a", "b", "c"], ["abd", "bd"], "abc", 3),  # held back in vain
        (["a", "<end>", "b"], ["b"], "a", 2),
        (["a", "b", "<end>", "c"], ["bc"], "a", 1),
        (["é", "<end>"], ["é"], "", 0),
        (["a"], ["ab"], "a", 1),
        ([], ["a"], "", 0),
    ],
)
def test_stop_strings_by_hand(tokens: list[str], stop: list[str], text: str, kept: int) -> None:
    tokenizer = made(dict.fromkeys(t for t in tokens if t != "<end>"), {"type": "Fuse"})
    transcript = write(tokenizer, ids_of(tokenizer, *tokens), stop)
    assert (transcript.text, transcript.n_kept) == (text, kept)
    assert transcript.stopped == (text != "".join(tokens).replace("<end>", ""))


def test_a_character_in_two_tokens_is_kept_whole_or_not_at_all() -> None:
    tokenizer = some_bytes()
    half, rest, rest_and_more = ids_of(tokenizer, "ä½", "ł", "½łb")
    a, b, e4 = ids_of(tokenizer, "a", "b", "ä")
    assert write(tokenizer, [a, half, rest, b], ["你"]).n_kept == 1
    assert write(tokenizer, [a, half, rest, b], ["b"]).n_kept == 3
    transcript = write(tokenizer, [a, e4, rest_and_more], ["b"])
    assert (transcript.text, transcript.n_kept) == ("a你", 1)


def test_bytes_to_fall_back_on_are_kept_by_character() -> None:
    tokenizer = llama()
    ids = ids_of(tokenizer, "▁a", "<0x0A>", "<0xC3>", "<end>", "<0xA9>", "b")
    assert [write(tokenizer, ids, [stop]).n_kept for stop in ("a", "\n", "é", "b")] == [0, 1, 2, 5]
    assert write(tokenizer, ids_of(tokenizer, "<0x20>", "<0x0A>"), ["\n"]).n_kept == 1
    ids = ids_of(tokenizer, MARK, "<0x0A>", "b", "é")  # a mark that is a token may be half a character until the next
    assert [write(tokenizer, ids, [stop]).n_kept for stop in ("b", "é")] == [2, 3]


def test_a_stop_string_may_come_with_the_end_only() -> None:
    half = single_bytes().encode(b"a\xe4")
    for tokenizer, ids, stop, text, kept in (
        (single_bytes(), half, MARK, "a", 1),
        (single_bytes(), half, "a" + MARK, "", 0),
        (llama(), ids_of(llama(), "▁a", "<0x0A>"), "\n", "a", 1),
    ):
        transcript = Detokenizer(tokenizer, [stop])
        pieces = [transcript.add(number) for number in ids]
        assert not transcript.stopped
        assert "".join(pieces) + transcript.finish() == transcript.text == text
        assert transcript.stopped
        assert transcript.n_kept == kept


def test_nothing_comes_after_a_stop_string() -> None:
    tokenizer = single_bytes()
    transcript = Detokenizer(tokenizer, ["b"])
    ids = tokenizer.encode("abcabc")
    assert [transcript.add(number) for number in ids] == ["a", "", "", "", "", ""]
    assert transcript.finish() == ""
    assert (transcript.text, transcript.stopped, transcript.n_kept) == ("a", True, 1)


# Cost.


@kinds
def test_work_grows_with_the_tokens_only(make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert write(tokenizer, ids, ["never"]).text == text
        # With each token a window below 2 * CONTEXT is decoded, before it where it ends a run, and where it slides.
        assert decoded <= 3 * 2 * CONTEXT * len(ids)
