from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse import InputError
from glasshouse.data.shuffle import Bucketed, Shuffled, _mix, permute


def test_bits_are_mixed_as_by_splitmix64() -> None:
    """The first numbers of the generator for the seed 1234567, as Rosetta Code lists them."""
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert _mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_each_index_occurs_once_per_epoch(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@given(st.integers(1, 10**12), st.integers(0, 100), st.data())
def test_a_number_alone_goes_where_it_goes_among_others(n: int, seed: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    together = permute(np.array(numbers), n, seed, 0)
    alone = [int(permute(np.array([number]), n, seed, 0)[0]) for number in numbers]
    assert together.tolist() == alone
    assert all(0 <= number < n for number in alone)


@pytest.mark.long
def test_all_permutations_of_four_are_about_equally_frequent() -> None:
    draws = 8000
    orders, counts = np.unique(
        [permute(np.arange(4), 4, seed, 0) for seed in range(draws)], axis=0, return_counts=True
    )
    assert len(orders) == 24
    # Chi-square with 23 degrees of freedom is above 64 once in 100,000. Orders that are a tenth too frequent in one
    # half and too rare in the other add 80 to the 23 expected.
    assert ((counts - draws / 24) ** 2 / (draws / 24)).sum() < 64


def test_neighbours_are_separated_by_the_shuffle() -> None:
    places = permute(np.arange(100_000), 100_000, 3, 0)
    # The mean distance of two random places is n / 3; its standard error over n draws is n / sqrt(18 n).
    assert abs(np.abs(np.diff(places)).mean() / 100_000 - 1 / 3) < 6 / np.sqrt(18 * 100_000)
    assert abs(np.corrcoef(np.arange(100_000), places)[0, 1]) < 6 / np.sqrt(100_000)


def test_epochs_and_seeds_differ() -> None:
    base = permute(np.arange(1000), 1000, 0, 0)
    for other in (permute(np.arange(1000), 1000, 0, 1), permute(np.arange(1000), 1000, 1, 0)):
        assert (base == other).mean() < 0.02


@given(st.integers(1, 50), st.integers(0, 5))
def test_an_epoch_is_all_items(n: int, seed: int) -> None:
    order = Shuffled(n, seed)
    for epoch in (0, 1, 7):
        epochs, items = order(np.arange(epoch * n, (epoch + 1) * n))
        assert set(epochs.tolist()) == {epoch}
        assert sorted(items.tolist()) == list(range(n))


ORDERS = {
    "shuffled": lambda seed: Shuffled(60, seed),
    "one length": lambda seed: Bucketed(np.full((60, 1), 7), 5, seed),
    "all lengths": lambda seed: Bucketed(np.arange(1, 61)[:, None], 5, seed),  # batches alone can change places
}


@pytest.mark.parametrize("kind", ORDERS)
def test_each_epoch_and_each_seed_has_an_order_of_its_own(kind: str) -> None:
    orders = [ORDERS[kind](seed)(np.arange(60 * e, 60 * (e + 1)))[1].tolist() for seed in (0, 1) for e in range(5)]
    assert all(sorted(items) == list(range(60)) for items in orders)
    for first in range(10):
        for second in range(first):
            # By chance one of the items, or of 12 batches, is where it was; six batches in one pair of 1,700.
            agree = sum(a == b for a, b in zip(orders[first], orders[second], strict=True))
            assert agree < 30, (first, second)


def up_and_down(pair: list[int]) -> tuple[int, int]:
    """The second length rises where the first is even and falls where it is odd, so that neighbours stay alike."""
    return pair[0], -pair[1] if pair[0] % 2 else pair[1]


lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=60).map(np.array)


@given(lengths, st.integers(1, 8), st.integers(0, 3))
def test_a_bucketed_epoch_meets_items_once_and_leaves_out_less_than_a_batch(
    lengths: np.ndarray, batch_size: int, seed: int
) -> None:
    if len(lengths) < batch_size:
        return
    order = Bucketed(lengths, batch_size, seed)
    assert len(lengths) - batch_size < order.n <= len(lengths)
    for epoch in (0, 3):
        _, items = order(np.arange(epoch * order.n, (epoch + 1) * order.n))
        assert len(set(items.tolist())) == order.n
        for batch in items.reshape(-1, batch_size):
            # A batch is a stretch of the sorted items: between its extremes no other lengths are passed over.
            inside = sorted(lengths[batch].tolist(), key=up_and_down)
            everything = sorted(lengths.tolist(), key=up_and_down)
            assert any(everything[at : at + batch_size] == inside for at in range(len(everything)))


def test_left_out_items_change_and_so_do_companions() -> None:
    order = Bucketed(np.full((103, 1), 7), 10, 0)
    left_out = [set(range(103)) - set(order(np.arange(e * 100, e * 100 + 100))[1].tolist()) for e in range(6)]
    assert all(len(items) == 3 for items in left_out)
    assert len({frozenset(items) for items in left_out}) > 1
    first = {frozenset(order(np.arange(at, at + 10))[1].tolist()) for at in range(0, 100, 10)}
    later = {frozenset(order(np.arange(at, at + 10))[1].tolist()) for at in range(100, 200, 10)}
    assert not first & later


@pytest.mark.parametrize("n", [1, 2, 3, 5, 10**9])
def test_constant_time(n: int) -> None:
    """Few rounds, whatever n is: numbers are at most four times as many as those wanted."""
    assert len(permute(np.arange(min(n, 1000)), n, 0, 0)) == min(n, 1000)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_is_checked(seed: int) -> None:
    with pytest.raises(InputError, match=f"seed is {seed}, but it must be"):
        Shuffled(3, seed)
