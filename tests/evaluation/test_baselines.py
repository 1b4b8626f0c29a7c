"""Baselines: by hand, and against counting in exact fractions, one byte at a time."""

from __future__ import annotations

import gzip
import math
import pydoc_data.topics
import shutil
import subprocess
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import ConfigError, InputError
from glasshouse.evaluation import ByteModel, baselines, compressed_bits

ENGLISH = "\n".join(map(str, pydoc_data.topics.topics.values())).encode()

# A probability goes through 7 orders of 3 roundings at most, each of 2**-53: 3e-15 of itself, which its logarithm
# makes 4e-15 bits; logarithms below 64 and their mean are rounded by 7e-15 each.
CLOSE = 1e-13

few = st.lists(st.sampled_from(b"\0ab\xff"), max_size=12).map(bytes)  # contexts recur, and are met in other texts
texts = st.lists(few | st.binary(max_size=12), max_size=5)
orders = st.integers(0, baselines.HIGHEST)


class Slow:
    """The formula as it is written down, in fractions; a text begins with marks that are no byte."""

    def __init__(self, order: int, texts: list[bytes]) -> None:
        self.order = order
        self.followed: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            marked = [-1] * order + list(text)
            for at in range(order, len(marked)):
                for n in range(order + 1):
                    self.followed.setdefault(tuple(marked[at - n : at]), Counter())[marked[at]] += 1

    def probability(self, byte: int, after: bytes) -> Fraction:
        marked = [-1] * self.order + list(after)
        chance = Fraction(1, 256)
        for n in range(self.order + 1):
            counts = self.followed.get(tuple(marked[len(marked) - n :]), Counter())
            if counts:
                chance = (counts[byte] + len(counts) * chance) / (counts.total() + len(counts))
        return chance

    def bits(self, data: bytes) -> float:
        return sum(-math.log2(self.probability(byte, data[:at])) for at, byte in enumerate(data)) / len(data)


def trained(order: int, texts: list[bytes]) -> ByteModel:
    model = ByteModel(order)
    model.train(texts)
    return model


def test_one_byte_compressed_by_hand() -> None:
    # A header of 10; 3 bits for a block, 8 for a letter and 7 for its end, in 3 bytes; 8 bytes of CRC and length.
    assert compressed_bits(b"a", by="gzip") == 8 * (10 + 3 + 8)
    # A header; a block's header; a chunk of 3 + 1 and its end, filled up to 8; CRC64; an index of 4 + 4; a footer.
    assert compressed_bits(b"a", by="xz") == 8 * (12 + 12 + 8 + 8 + 8 + 12)


def test_lower_levels_of_gzip_need_more_bits() -> None:
    ours = compressed_bits(ENGLISH, by="gzip")
    assert all(ours < 8 * len(gzip.compress(ENGLISH, level)) / len(ENGLISH) for level in range(6))


def test_xz_uses_its_largest_dictionary() -> None:
    # The second half repeats the first over 9 MB, where levels up to 6 remember 8 MiB and would hold 200,000 bytes.
    # The 9 MB of zeros between cost little.
    random = np.random.default_rng(0).bytes(100_000)
    far = random + bytes(9_000_000) + random
    assert 8 * 100_000 < compressed_bits(far, by="xz") * len(far) < 8 * 110_000


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is not installed")
def test_xz_equals_the_command_at_its_highest_level() -> None:
    done = subprocess.run(["xz", "-9", "--extreme", "-T1", "-c"], input=ENGLISH, capture_output=True, check=True)
    assert compressed_bits(ENGLISH, by="xz") == 8 * len(done.stdout) / len(ENGLISH)


def test_order_0_by_hand() -> None:
    # Shares of 1/2, 1/4, 1/8, 1/8 have an entropy of 1/2 + 2/4 + 3/8 + 3/8 = 1.75 bits. Smoothing of 4 kinds moves
    # 4 counts among 8004 away: no probability falls by more than 8000/8004, and no other code can be shorter.
    text = b"aaaabbcd" * 1000
    assert 1.75 < trained(0, [text]).bits(text) <= 1.75 + math.log2(8004 / 8000)
    assert trained(0, [bytes(range(256))]).bits(b"any") == 8.0
    assert ByteModel(0).bits(b"any") == ByteModel(5).bits(b"any") == 8.0


def test_order_1_by_hand() -> None:
    model = trained(1, [b"abab"])
    a = b = (2 + 2 / 256) / (4 + 2)  # order 0: four bytes of two kinds
    c = (0 + 2 / 256) / (4 + 2)
    first = model.probabilities(after=b"")  # one text, which began with a
    assert first[ord("a")] == pytest.approx((1 + 1 * a) / (1 + 1), rel=CLOSE, abs=0)
    assert first[ord("c")] == pytest.approx((0 + 1 * c) / (1 + 1), rel=CLOSE, abs=0)
    after_a = model.probabilities(after=b"xa")  # b twice
    assert after_a[ord("b")] == pytest.approx((2 + 1 * b) / (2 + 1), rel=CLOSE, abs=0)
    assert after_a[ord("a")] == pytest.approx((0 + 1 * a) / (2 + 1), rel=CLOSE, abs=0)
    never = model.probabilities(after=b"x")
    assert never[ord("a")] == pytest.approx(a, rel=CLOSE, abs=0)
    # a begins; b follows a; c follows b, which a alone followed, once
    expected = -(math.log2((1 + a) / 2) + math.log2((2 + b) / 3) + math.log2(c / 2)) / 3
    assert model.bits(b"abc") == pytest.approx(expected, abs=CLOSE)


@given(order=orders, texts=texts, data=few.filter(len) | st.binary(min_size=1, max_size=12), block=st.integers(1, 30))
def test_equals_exact_fractions(order: int, texts: list[bytes], data: bytes, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "BLOCK", block)
        model = trained(order, texts)
        assert model.bits(data) == pytest.approx(Slow(order, texts).bits(data), abs=CLOSE)


@given(order=orders, texts=texts, after=few | st.binary(max_size=12))
def test_probabilities_are_positive_and_sum_to_1(order: int, texts: list[bytes], after: bytes) -> None:
    model, slow = trained(order, texts), Slow(order, texts)
    contexts = [after, b"", *(text[:at] for text in texts for at in range(len(text) + 1))]
    for context in contexts:
        probabilities = model.probabilities(after=context)
        assert probabilities.shape == (256,)
        assert (probabilities > 0).all()
        assert math.fsum(probabilities) == pytest.approx(1, abs=CLOSE)
    exact = [slow.probability(byte, after) for byte in range(256)]
    assert sum(exact) == 1
    np.testing.assert_allclose(model.probabilities(after=after), [float(chance) for chance in exact], rtol=CLOSE)


@given(order=orders, texts=texts, more=texts)
def test_training_is_incremental(order: int, texts: list[bytes], more: list[bytes]) -> None:
    model = trained(order, texts)
    model.bits(b"ab")  # the tables built from the first texts must not stay
    model.train(iter(more))
    assert model.bits(b"abba") == trained(order, texts + more).bits(b"abba")


def test_more_context_helps_on_english() -> None:
    half = len(ENGLISH) // 2
    bits = [trained(order, [ENGLISH[:half]]).bits(ENGLISH[half:]) for order in range(5)]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] < 8
    # What a text's own letters say is the least that order 0 could need for it.
    shares = np.array(list(Counter(ENGLISH[half:]).values())) / (len(ENGLISH) - half)
    assert bits[0] >= -float(shares @ np.log2(shares)) > bits[1]


@pytest.mark.parametrize("wrong", ["text", None, 7])
def test_an_invalid_text_leaves_the_model_unchanged(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "BLOCK", 4)  # so that blocks have been counted before
    model = trained(2, [b"abcabc"])
    before = model.bits(b"abd")
    with pytest.raises(InputError, match=f"type {type(wrong).__name__}, but it must be bytes"):
        model.train([b"abdabdabd", wrong])  # type: ignore[list-item]
    assert model.bits(b"abd") == before
    model.train([b"abe"])
    assert model.bits(b"abd") == trained(2, [b"abcabc", b"abe"]).bits(b"abd")


def test_the_number_of_ngrams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MOST", 3)
    model = trained(1, [b"aaaa" * 100, b"ab"])  # begin-a, aa, ab
    before = model.bits(b"ab")
    with pytest.raises(InputError, match="more than 3 distinct runs of 2 bytes; train on less"):
        model.train([b"ac"])
    assert model.bits(b"ab") == before


def test_invalid_arguments_are_refused() -> None:
    for by in ("gzip", "xz"):
        with pytest.raises(InputError, match="data is empty"):
            compressed_bits(b"", by=by)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="by is 'zip', but it must be 'gzip' or 'xz'"):
        compressed_bits(b"a", by="zip")  # type: ignore[arg-type]
    for order in (-1, 7):
        with pytest.raises(ConfigError, match=f"order is {order}, but it must be a number of bytes from 0 to 6"):
            ByteModel(order)
    with pytest.raises(InputError, match="data is empty"):
        ByteModel(1).bits(b"")
    with pytest.raises(InputError, match="type str, but it must be bytes"):
        ByteModel(1).bits("text")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"texts is one bytes, but it must be a list of texts; pass \[text\]"):
        ByteModel(1).train(b"text")  # type: ignore[arg-type]
