"""Merges: by the fast trainer, the readable one, one that counts all again at each step, and two Rust libraries."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections import Counter

import gigatoken
import pytest
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from glasshouse.text.bpe import algorithm as bpe
from glasshouse.text.bpe import fast as fast_bpe
from glasshouse.text.bpe import pretokenizer
from glasshouse.text.bpe.byte_level import BYTE_TO_UNICODE, INITIAL_ALPHABET, bytes_to_unicode, unicode_to_bytes

ENGLISH = "\n".join(map(str, pydoc_data.topics.topics.values()))


def count_again(counts: dict[bytes, int], vocab_size: int) -> list[tuple[bytes, bytes]]:
    """The obvious way: at each step count all pairs of all words from nothing."""
    alphabet = [unicode_to_bytes(character) for character in sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {token: number for number, token in enumerate(alphabet)}
    texts = [([bytes([byte]) for byte in word], count) for word, count in counts.items()]
    learned = []
    while len(ids) < vocab_size:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in texts:
            for i in range(len(word) - 1):
                pairs[word[i], word[i + 1]] += count
        if not pairs:
            break
        most = max(pairs.values())
        best = min((pair for pair in pairs if pairs[pair] == most), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        learned.append(best)
        ids[best[0] + best[1]] = len(ids)
        for word, _ in texts:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1
    return learned


def by_tokenizers(text: str, vocab_size: int) -> list[tuple[bytes, bytes]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    return [(unicode_to_bytes(a), unicode_to_bytes(b)) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]


def fast(counts: dict[bytes, int], vocab_size: int) -> list[tuple[bytes, bytes]]:
    return [pair for pair, _ in fast_bpe.learn(counts, vocab_size)]


def readable(counts: dict[bytes, int], vocab_size: int) -> list[tuple[bytes, bytes]]:
    return [merge.pair for merge in bpe.learn(counts, vocab_size)]


# Few letters, so that pairs overlap, tie, and lead to one token in several ways.
few = st.dictionaries(
    st.text("ab ", min_size=1, max_size=12).map(str.encode), st.integers(1, 5), min_size=1, max_size=12
)


@given(few, st.integers(256, 300))
@settings(max_examples=up_to(400))
def test_three_ways_to_learn_agree(counts: dict[bytes, int], vocab_size: int) -> None:
    expected = count_again(counts, vocab_size)
    assert readable(counts, vocab_size) == expected
    assert fast(counts, vocab_size) == expected
    assert len({left + right for left, right in expected}) == len(expected)  # no two merges make one token


@given(few, st.integers(1, 4))
@settings(max_examples=up_to(200))
def test_the_number_of_pairs_looked_at_at_a_time_changes_nothing(counts: dict[bytes, int], frequent: int) -> None:
    expected = list(fast_bpe.learn(counts, 290))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_bpe, "FREQUENT", frequent)
        assert list(fast_bpe.learn(counts, 290)) == expected


@given(st.text(st.sampled_from("ab\n 'é中1")), st.integers(256, 290))
@settings(max_examples=up_to(200))
def test_merges_are_those_of_tokenizers(text: str, vocab_size: int) -> None:
    counts = pretokenizer.count([text.encode()]).counts
    assert fast(counts, vocab_size) == by_tokenizers(text, vocab_size)


@pytest.mark.long
def test_merges_of_english_are_those_of_everyone() -> None:
    counts = pretokenizer.count([ENGLISH.encode()]).counts
    learned = fast(counts, 2000)
    assert learned == by_tokenizers(ENGLISH, 2000)
    assert learned == gigatoken.train_bpe(ENGLISH.encode(), 2000, [])[1]
    few_words = dict(Counter(counts).most_common(500))
    assert fast(few_words, 600) == readable(few_words, 600) == count_again(few_words, 600)


def test_counts_are_those_of_the_text() -> None:
    """Worked by hand: "ab" 3 times in "abab" and "ab", then the pair of two of them."""
    assert list(fast_bpe.learn({b"abab": 2, b"ab": 1}, 258)) == [((b"a", b"b"), 5), ((b"ab", b"ab"), 2)]


def test_a_run_is_merged_from_left_to_right() -> None:
    """Worked by hand: aaaaa has four pairs; then aa aa a has (aa, aa) and (aa, a) once each, and 'a' comes first."""
    assert list(fast_bpe.learn({b"aaaaa": 1}, 258)) == [((b"a", b"a"), 4), ((b"aa", b"a"), 1)]
    assert fast({b"aaaaa": 1}, 300) == count_again({b"aaaaa": 1}, 300)


def test_nothing_to_merge() -> None:
    assert list(fast_bpe.learn({}, 300)) == []
    assert list(fast_bpe.learn({b"a": 5, b"b": 1}, 300)) == []
    assert list(fast_bpe.learn({b"ab": 0}, 300)) == []


def test_the_alphabet_is_that_of_tokenizers() -> None:
    assert sorted(BYTE_TO_UNICODE.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(0x80):  # a single character through the library's own map
        assert (
            pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(chr(byte))[0][0]
            == BYTE_TO_UNICODE[byte]
        )
    assert [bytes_to_unicode(bytes([byte])) for byte in INITIAL_ALPHABET] == sorted(
        pre_tokenizers.ByteLevel.alphabet()
    )


@given(st.binary())
def test_written_bytes_are_spelled_back(token: bytes) -> None:
    assert unicode_to_bytes(bytes_to_unicode(token)) == token


def test_steps_end_where_the_tokenizer_does() -> None:
    counts = pretokenizer.count([ENGLISH.encode()]).counts
    ranks = {pair: rank for rank, pair in enumerate(fast(counts, 1500))}
    tokenizer = Tokenizer(
        models.BPE(
            {
                bytes_to_unicode(token): i
                for i, token in enumerate([bytes([b]) for b in INITIAL_ALPHABET] + [a + b for a, b in ranks])
            },
            [(bytes_to_unicode(a), bytes_to_unicode(b)) for a, b in ranks],
        )
    )
    for word in sorted(counts)[:: len(counts) // 300]:
        *_, last = bpe.merge_steps(word, ranks)
        assert [bytes_to_unicode(token) for token in last] == tokenizer.encode(bytes_to_unicode(word)).tokens


def test_a_tree_holds_the_bytes_of_its_token() -> None:
    ranks = {(b"u", b"g"): 0, (b"h", b"ug"): 1, (b"s", b"t"): 2, (b"hug", b"st"): 3}
    assert bpe.merge_tree(b"hugst", ranks) == [
        "hugst",
        "├─ hug",
        "│  ├─ h",
        "│  └─ ug",
        "│     ├─ u",
        "│     └─ g",
        "└─ st",
        "   ├─ s",
        "   └─ t",
    ]
    assert bpe.merge_tree(b"zz", ranks) == ["zz"]
    assert bpe.merge_tree(b"\xff", ranks) == ["\\xff"]
