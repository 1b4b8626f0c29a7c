"""Tokenization: statements T1 to T6."""

from __future__ import annotations

import copy
import pydoc_data.topics
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import glasshouse as gh
from glasshouse import InputError
from glasshouse.text.bpe import fast as fast_bpe
from glasshouse.text.bpe import pretokenizer
from glasshouse.text.bpe.byte_level import INITIAL_ALPHABET

# The manual of Python: English prose with some code, 466 kB in 3.11; every tenth topic is held out.
TOPICS = [str(text) for _, text in sorted(pydoc_data.topics.topics.items())]
TRAIN = "\n".join(text for number, text in enumerate(TOPICS) if number % 10)
HELD_OUT = "\n".join(TOPICS[::10])


@pytest.fixture(scope="module")
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=[TRAIN], vocab_size=2048)


@pytest.mark.slow
def test_t1_ids_are_below_vocab_size_and_decode_to_the_same_bytes(tok: gh.Tokenizer) -> None:
    rng = random.Random(0)
    texts = [HELD_OUT.encode(), "naïve 中文 😀\r\n".encode(), b"\x00\xff\xfe", b""]
    texts += [rng.randbytes(rng.randrange(200)) for _ in range(50)]
    for text in texts:
        ids = tok.encode(text)
        assert all(0 <= number < len(tok) for number in ids)
        assert tok.decode_bytes(ids) == text
    # The inverse, too: every token has distinct bytes.
    ordinary = [number for number in range(len(tok)) if number not in tok.special_ids]
    assert len({tok.decode_bytes([number]) for number in ordinary}) == len(ordinary)


def test_t2_tokenizer_is_trained_without_a_model_and_another_is_rejected(tok: gh.Tokenizer, tmp_path: Path) -> None:
    other = gh.Tokenizer.train(texts=[HELD_OUT], vocab_size=2048)
    assert len(other) == len(tok)  # only the fingerprint distinguishes them
    assert other.encode("the manual") != tok.encode("the manual")
    torch.manual_seed(0)
    gh.save(gh.build(gh.preset("tiny-encoder", vocab_size=2048)), tok, tmp_path / "model")
    model, own = gh.load(tmp_path / "model")
    assert own is not None
    assert own.fingerprint == model.tokenizer_fingerprint == tok.fingerprint
    assert gh.embed(model, tok, ["the manual"]).shape == (1, 64)
    calls = (
        lambda: gh.embed(model, other, ["the manual"]),
        lambda: gh.save(model, other, tmp_path / "again"),
        lambda: gh.embed(copy.deepcopy(model), other, ["the manual"]),
    )
    for call in calls:
        with pytest.raises(InputError, match="is not the one that the model was trained with"):
            call()
    assert not (tmp_path / "again").exists()
    other.save(tmp_path / "model")  # as if copied by mistake
    with pytest.raises(InputError, match=r"tokenizer\.json.*is not the one that the model was trained with"):
        gh.load(tmp_path / "model")


def test_t3_smaller_tokens_give_longer_sequences_and_no_unknown_words(tok: gh.Tokenizer) -> None:
    def unknown(tokens: list[object], vocabulary: set[object]) -> float:
        return sum(token not in vocabulary for token in tokens) / len(tokens)

    tokenizations = {
        "bytes": (set(range(256)), list(HELD_OUT.encode())),
        "BPE": (set(range(len(tok))), tok.encode(HELD_OUT)),
        "words": (set(TRAIN.split()), HELD_OUT.split()),
    }
    table = {
        name: (len(known), len(tokens), unknown(tokens, known)) for name, (known, tokens) in tokenizations.items()
    }
    for name, (vocabulary, length, fraction) in table.items():
        print(f"T3 {name}: vocabulary {vocabulary:,}, {length:,} tokens, {fraction:.1%} unknown words")
    sizes, lengths, fractions = zip(*table.values(), strict=True)
    assert sizes[0] < sizes[1] < sizes[2]
    assert lengths[0] > lengths[1] > lengths[2]
    assert fractions[0] == fractions[1] == 0 < fractions[2]


def test_t4_merges_equal_naive_bpe() -> None:
    """Start from bytes; count all pairs; merge the most frequent; repeat until the vocabulary is full."""
    counts = dict(Counter(pretokenizer.count([TRAIN.encode()]).counts).most_common(400))
    texts = [([bytes([byte]) for byte in word], number) for word, number in counts.items()]
    vocabulary = [bytes([byte]) for byte in INITIAL_ALPHABET]
    expected = []
    while len(vocabulary) < 500:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for text, number in texts:
            for pair in pairwise(text):
                pairs[pair] += number
        best = max(pairs, key=lambda p: (pairs[p], -vocabulary.index(p[0]), -vocabulary.index(p[1])))
        expected.append((best, pairs[best]))
        vocabulary.append(best[0] + best[1])
        for text, _ in texts:
            for i in range(len(text)):
                if tuple(text[i : i + 2]) == best:
                    text[i : i + 2] = [best[0] + best[1]]
    assert list(fast_bpe.learn(counts, 500)) == expected


def test_t5_characters_per_token_grow_with_vocab_size() -> None:
    """About four characters per token on English; the manual has some code and names, whose tokens are shorter."""
    counts = pretokenizer.count([TRAIN.encode()]).counts
    assert sum(counts.values()) > 50_000
    curve = {}
    for size in (263, 512, 1024, 2048, 4096, 8192):
        trained = gh.Tokenizer.train(texts=[TRAIN], vocab_size=size)
        curve[size] = len(HELD_OUT) / len(trained.encode(HELD_OUT))
        print(f"T5 vocabulary {size}: {curve[size]:.2f} characters per token")
    assert sorted(curve.values()) == list(curve.values())
    assert curve[263] == pytest.approx(1, abs=0.01)  # bytes only, in a nearly ASCII text
    assert 3.5 < curve[8192] < 4.5
    # Each doubling gains less than the one before.
    gains = [b - a for a, b in pairwise(list(curve.values())[1:])]
    assert gains == sorted(gains, reverse=True)


def changed(before: list[object], after: list[object]) -> int:
    """Return how many tokens are left of a sequence without the longest prefix and suffix that it shares."""
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first]:
        first += 1
    last = 0
    while last < min(len(before), len(after)) - first and before[-1 - last] == after[-1 - last]:
        last += 1
    return len(after) - first - last


def test_t6_a_typo_changes_one_byte_a_few_tokens_or_a_whole_word(tok: gh.Tokenizer) -> None:
    """Each letter of a held-out text is replaced in turn; the words after it are tokenized as before."""
    text, words = TOPICS[10][:600], set(TRAIN.split())
    found: dict[str, list[int]] = {"bytes": [], "BPE": [], "words": []}
    unknown = 0
    for at, letter in enumerate(text):
        if not letter.isalpha():
            continue
        typo = text[:at] + ("q" if letter != "q" else "z") + text[at + 1 :]
        found["bytes"].append(changed(list(text.encode()), list(typo.encode())))
        found["BPE"].append(changed(tok.encode(text), tok.encode(typo)))
        found["words"].append(changed(text.split(), typo.split()))
        unknown += next(new for old, new in zip(text.split(), typo.split(), strict=True) if old != new) not in words
    means = {name: sum(each) / len(each) for name, each in found.items()}
    print(f"\nT6 {len(found['bytes'])} typos: ids changed on average {means}; {unknown} made a word unknown")
    assert set(found["bytes"]) == set(found["words"]) == {1}
    assert means["BPE"] > 2  # a learned token falls apart
    longest = max(len(tok.encode(f" {word}")) for word in text.split())
    assert max(found["BPE"]) < 2 * longest + 2  # and no other word does
    assert unknown > 0.95 * len(found["words"])
