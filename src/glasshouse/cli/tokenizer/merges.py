"""Prints byte-pair encoding step by step: the merges of a word, and the training of merges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from itertools import pairwise

from rich.text import Text

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.escaping import show_whitespace

Pair = tuple[bytes, bytes]

MOST = 20_000  # distinct words; the reference implementation takes minutes with many more


def draw_word(tok: gh.Tokenizer, text: str, words: Iterable[bytes]) -> None:
    """Print how a tokenizer merges the words of a text, and the merge tree of each token."""
    final: list[bytes] = []
    for word in words:
        print(f"\nword {show_whitespace(word)}")
        states = list(gh.text.bpe.algorithm.merge_steps(word, tok.merge_ranks))
        screen.table(_steps(states, tok.merge_ranks), header=("rank", "merge", "tokens"), right=[0])
        for token in states[-1]:
            print("\n".join(gh.text.bpe.algorithm.merge_tree(token, tok.merge_ranks, show_whitespace)))
        final += states[-1]
    # Some tokenizers take a whole word as a token, and some normalize the text before pre-tokenization.
    if (made := [tok.decode_bytes([number]) for number in tok.encode(text, add_special_tokens=False)]) != final:
        print(f"\nthe tokenizer encodes this text differently: {' '.join(map(show_whitespace, made))}")


def _steps(states: list[list[bytes]], ranks: Mapping[Pair, int]) -> Iterator[tuple[str, str, str]]:
    yield "", "", " ".join(map(show_whitespace, states[0]))
    for before, after in pairwise(states):
        left, right = min((pair for pair in pairwise(before) if pair in ranks), key=ranks.__getitem__)
        yield (
            str(ranks[left, right]),
            f"{show_whitespace(left)} + {show_whitespace(right)}",
            " ".join(map(show_whitespace, after)),
        )


def draw_training(texts: Iterable[bytes], merges: int, runners_up: int, pattern: str, sample: str | None) -> None:
    """Print the first merges that BPE learns from a text, the runners-up, and the effect on a sample."""
    texts = list(texts)
    counted = gh.text.bpe.pretokenizer.count(texts, pattern)
    if not counted.counts:
        raise gh.InputError("there is no text to train on; give files that are not empty.")
    counts = counted.counts
    kept = nsmallest(MOST, counts, key=lambda word: (-counts[word], word))
    print(f"{counted.n_bytes:,} bytes, {counted.total:,} words, {len(counts):,} of them distinct")
    if len(kept) < len(counts):
        share = sum(counts[word] for word in kept) / counted.total
        print(f"only the {MOST:,} most frequent words are used, {share:.1%} of all, to save time")
    if sample is None:
        sample = texts[0].decode()[:60]
    now = [
        [bytes([byte]) for byte in word.encode(errors="surrogateescape")]
        for word in gh.text.bpe.pretokenizer.split(sample, pattern)
    ]
    number = 0
    learned = gh.text.bpe.algorithm.learn({word: counts[word] for word in kept}, 256 + merges, runners_up)
    for number, merge in enumerate(learned, 1):
        token = merge.pair[0] + merge.pair[1]
        after = [gh.text.bpe.algorithm.merge_pair(word, merge.pair, token) for word in now]
        times = f"{merge.count:,} time{'s' * (merge.count > 1)}"
        print(f"\nmerge {number}: {_pair(merge.pair)} = {show_whitespace(token)}, {times}")
        if merge.runners_up:
            print(f"  next    {', '.join(f'{_pair(pair)} {count:,}' for pair, count in merge.runners_up)}")
        if after == now:
            print("  sample  does not contain it")
        else:
            screen.console().print(_sample("  before  ", now), soft_wrap=True)
            screen.console().print(_sample("  after   ", after, token), soft_wrap=True)
        now = after
    if number < merges:
        print(f"\nno pairs are left to merge after {number:,}")


def _pair(pair: Pair) -> str:
    return f"{show_whitespace(pair[0])} + {show_whitespace(pair[1])}"


def _sample(title: str, words: list[list[bytes]], new: bytes | None = None) -> Text:
    """Return the tokens of a sample; the new one in brackets, or in colour."""
    text = Text(title)
    for token in (token for word in words for token in word):
        if token != new:
            text.append(f"{show_whitespace(token)} ")
        elif screen.in_colour():
            text.append(show_whitespace(token), "bold black on green").append(" ")
        else:
            text.append(f"[{show_whitespace(token)}] ")
    text.rstrip()
    return text
