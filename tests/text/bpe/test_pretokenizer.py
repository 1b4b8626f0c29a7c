from __future__ import annotations

import warnings
from collections import Counter

import pytest
from examples import up_to
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from glasshouse import InputError
from glasshouse.text.bpe import pretokenizer
from glasshouse.text.bpe.byte_level import unicode_to_bytes

PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt4": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pretokenizer.PATTERNS["gpt4"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
nasty = st.text(st.sampled_from("ab1²٣ \t\n\r\u00a0\u3000\u2028'sSlv\u2019.,-_éñ中\u0301😀\U000e0041"), max_size=40)


@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
@given(texts=st.lists(nasty, max_size=4))
def test_words_are_those_of_tokenizers(pattern: str, texts: list[str]) -> None:
    expected = Counter(
        unicode_to_bytes(w) for text in texts for w, _ in PRE_TOKENIZERS[pattern].pre_tokenize_str(text)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # gigatoken is used, or the pattern is not its own
        counted = pretokenizer.count([text.encode() for text in texts], pattern)
    assert counted.counts == expected
    assert counted.n_bytes == sum(len(text.encode()) for text in texts)
    assert counted.total == expected.total()


# Every way in which spaces, other whitespace, letters, digits and punctuation can follow one another, with repeats.
blanks = (" ", "  ", "\n", "\r\n", "\t", "\x1c", "\x85", "\u1680", "\u2003", "\u3000")
signs = ("a", "é", "я", "中", "ა", "7", "²", "'s", "'LL", "\u017f", ".", "…", " to", " be")
spaced = st.lists(st.sampled_from(blanks + signs), max_size=16).map("".join)


@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
@given(texts=st.lists(spaced, max_size=3), times=st.integers(1, 3))
@example(["a  \tb", "a  \x85b", "a  \xa0b", "a  \u1680b", "a  \u2003b", "a  \u3000b", "a \n b"], 2)
@settings(max_examples=up_to(1000))
def test_counting_in_pieces_is_counting_the_words_of_each_text(pattern: str, texts: list[str], times: int) -> None:
    texts = texts * times
    expected = Counter(word.encode() for text in texts for word in pretokenizer.split(text, pattern))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretokenizer, "gigatoken", None)
        assert pretokenizer.count([text.encode() for text in texts], pattern).counts == expected


@pytest.mark.parametrize("pattern", pretokenizer.PATTERNS)
def test_a_word_never_crosses_two_texts(pattern: str) -> None:
    assert pretokenizer.count([b"half", b"way"], pattern).counts == {b"half": 1, b"way": 1}


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"the text number {n} of many\n".encode() for n in range(100)]
    whole = pretokenizer.count(texts)
    monkeypatch.setattr(pretokenizer, "BATCH", 50)
    assert pretokenizer.count(texts) == whole


def test_without_gigatoken_the_counts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Il était une fois, 3 fois… 中文 \n\n fin".encode()] * 3
    fast = pretokenizer.count(texts)
    monkeypatch.setattr(pretokenizer, "gigatoken", None)
    assert pretokenizer.count(texts) == fast


def test_a_counter_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def pretokenized_counts(text: bytes, separator: bytes) -> list[tuple[bytes, int]]:
            return [(b"all the same", 1)]

    monkeypatch.setattr(pretokenizer, "gigatoken", Wrong)
    with pytest.warns(UserWarning, match="gigatoken splits this text differently"):
        assert pretokenizer.count([b"to be"]).counts == {b"to": 1, b" be": 1}


def test_rare_words_go_first_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretokenizer, "BATCH", 1)  # the limit is looked at after each batch
    common = [b" often"] * 50 + [b" twice"] * 2
    rare = [f" word{n}".encode() for n in range(300)]
    counted = pretokenizer.count([*common, *(text for text in rare)], limit=256)
    assert len(counted.counts) <= 256
    assert counted.counts[b" often"] == 50
    assert counted.counts[b" twice"] == 2
    assert counted.dropped > 0
    # " word12" is two words to the pattern, a name and a number.
    assert counted.total == 52 + 2 * 300


def test_the_limit_and_the_pattern_are_checked() -> None:
    with pytest.raises(InputError, match="limit on distinct words is 5"):
        pretokenizer.count([b"a"], limit=5)
    with pytest.raises(InputError, match=r"pattern is 'gtp2'.*gpt2"):
        pretokenizer.count([b"a"], "gtp2")


def test_rust_output_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    pretokenizer.count([b"to be or not to be"])
    assert capfd.readouterr() == ("", "")


@given(st.lists(st.text(max_size=8).map(str.encode), max_size=5), st.integers(0, 30))
def test_the_start_of_texts(texts: list[bytes], size: int) -> None:
    taken = pretokenizer.take_bytes(texts, size)
    assert b"".join(texts).startswith(b"".join(taken))
    assert sum(map(len, taken)) <= size
    b"".join(taken).decode()
    if sum(map(len, texts)) >= size:
        assert sum(map(len, taken)) > size - 4 * max(1, len(texts))


def test_the_start_of_texts_is_whole_where_characters_are_bytes() -> None:
    assert [pretokenizer.take_bytes([b"ab", b"c", b"d"], size) for size in range(5)] == [
        [],
        [b"a"],
        [b"ab"],
        [b"ab", b"c"],
        [b"ab", b"c", b"d"],
    ]
