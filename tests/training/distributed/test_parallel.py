"""Several processes compute what one does: the same loss, the same gradients, the same weights."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import VOCABULARY, Case, Outcome, in_processes, run, run_cases
from torch import Tensor

import glasshouse as gh
from glasshouse.errors import ConfigError
from glasshouse.training.distributed.fsdp import copy_whole_, parallelize, whole
from glasshouse.training.distributed.processes import Parallel, Processes, join_processes
from glasshouse.training.distributed.tensor_parallel import check_divisible
from glasshouse.training.optimizer import AdamW, Muon, make_optimizer

MODELS = ("decoder", "seq2seq", "encoder")
# `make test` has time for a few of the cases; `make distributed` runs the product of all choices.
CASES = [
    Case("seq2seq", kind="replicate", grad_accum=2),
    Case("decoder", kind="shard", grad_accum=2, activation_checkpointing=True),
    Case("t5", tensor=2, smoothing=0.1),
    Case("neox", tensor=2, activation_checkpointing=True),
    Case("value embeddings", "muon", tensor=2, dtype="float64", steps=3),
    Case("decoder", "adamw", "shard", dtype="float64", steps=20, grad_accum=2),
    Case("seq2seq", "muon", "shard", tensor=2, dtype="float64", steps=5),
]
MORE = [
    Case("decoder", kind="replicate"),
    Case("encoder", kind="shard"),
    *(Case(model, tensor=2, smoothing=0.1) for model in ("alibi", "seq2seq", "output norms")),
    Case("decoder", precision="bfloat16", grad_accum=2),
    Case("decoder", "adamw", "shard", dtype="float64", steps=50, grad_accum=2),
    Case("encoder", "muon", "replicate", dtype="float64", steps=50, activation_checkpointing=True),
]


@functools.cache
def alone(case: Case) -> Outcome:
    return run(case, Processes())


def assert_equal(case: Case, outcome: Outcome) -> None:
    """Compare with one process; what differs is the order of sums."""
    expected = alone(case.reference)
    assert outcome.weights.keys() == expected.weights.keys()
    assert outcome.gradients.keys() == expected.gradients.keys()
    if case.dtype == "float64":
        torch.testing.assert_close(outcome.weights, expected.weights, rtol=0, atol=1e-10)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=0, atol=1e-10)
        return
    if case.precision == "bfloat16":  # a number is off by up to 2 ** -9 of it, in every operation
        ours, its = (
            torch.cat([one.gradients[name].flatten() for name in one.gradients]) for one in (outcome, expected)
        )
        assert float((ours - its).norm()) <= 2**-6 * float(its.norm())
        assert outcome.losses == pytest.approx(expected.losses, rel=2**-9)
        return
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)  # two float32 numbers at 6 are 5e-7 apart
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in outcome.gradients.items():
        assert float((gradient - expected.gradients[name]).abs().max()) <= 1e-5 * largest, name


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """What two processes compute, the same two for all cases."""
    outcomes: dict[Case, Outcome] = in_processes(tmp_path_factory.mktemp("two"), 2, run_cases, CASES)[0]
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_equal_one(case: Case, two_processes: dict[Case, Outcome]) -> None:
    assert_equal(case, two_processes[case])


@pytest.mark.long
def test_two_processes_equal_one_in_more_cases(tmp_path: Path) -> None:
    for case, outcome in in_processes(tmp_path, 2, run_cases, MORE)[0].items():
        assert_equal(case, outcome)


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "local"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_every_number_of_processes_equals_one(world_size: int, local: int, tmp_path: Path) -> None:
    layouts = [("replicate", 1), ("shard", 1), ("hybrid", 1)]
    layouts += [("shard", 2), ("replicate", 2)] if world_size > 1 else []
    choices = [
        Case(model, optimizer, kind, tensor, grad_accum=grad_accum, activation_checkpointing=recompute)
        for model, optimizer, (kind, tensor), grad_accum, recompute in product(
            MODELS, ("adamw", "muon"), layouts, (1, 2), (False, True)
        )
    ]
    # Accumulation and recomputation of many steps are drawn, one of each for every layout.
    many = [replace(case, dtype="float64", steps=50) for case in choices]
    many = [case for number, case in enumerate(many) if (number // 4 + number) % 4 == 0]
    outcomes = in_processes(tmp_path, world_size, run_cases, [*choices, *many], local=local)[0]
    for case, outcome in outcomes.items():
        assert_equal(case, outcome)


# Parts of it ------------------------------------------------------------------------------------------------


def _gradient(name: str, weight: Tensor) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))


CHOICES = Muon(), Muon(beta2=0.9, cautious=True, embedding=AdamW(lr=0.01))


def _initial_and_updated(group: Processes, tensor: int, choice: Muon) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the initial weights of a model, and those after two steps of Muon by given gradients."""
    torch.manual_seed(3)
    s = gh.preset("tiny-decoder", vocab_size=VOCABULARY, init="depth_scaled")
    model = gh.build(s, device="meta" if group.is_parallel else "cpu")
    if group.is_parallel:
        layout = Parallel(kind="shard", tensor=tensor)
        parallelize(model, layout, group, torch.device("cpu"), torch.float32)
    optimizer = make_optimizer(model, choice)
    initial = {name: whole(weight.detach()).clone() for name, weight in model.named_parameters()}
    for _ in range(2):
        for name, weight in model.named_parameters():
            weight.grad = torch.zeros_like(weight)
            copy_whole_(weight.grad, _gradient(name, weight))
        optimizer.step()
    return initial, {name: whole(weight.detach()) for name, weight in model.named_parameters()}


def _work(rank: int, world_size: int) -> object:
    found = []
    for tensor in (1, 2):
        with join_processes(Parallel(kind="shard", tensor=tensor), torch.device("cpu")) as (group, _):
            found.append([_initial_and_updated(group, tensor, choice) for choice in CHOICES])
    return found


def test_initial_weights_and_muon_are_bit_equal_to_one_process(tmp_path: Path) -> None:
    expected = [_initial_and_updated(Processes(), 1, choice) for choice in CHOICES]
    for found in in_processes(tmp_path, 2, _work)[0]:
        for ours, its in zip(chain(*expected), chain(*found), strict=True):
            assert ours.keys() == its.keys()
            for name, weight in ours.items():
                assert torch.equal(weight, its[name]), name
    assert not torch.equal(expected[0][0]["head.weight"], expected[0][1]["head.weight"])


def _count_reductions(rank: int, world_size: int) -> list[int]:
    """Return how many sums over replicas there are in a step with 1 and with 3 micro-batches."""
    counts, all_reduce = [], torch.distributed.all_reduce

    def count(*arguments: Any, **settings: Any) -> Any:  # noqa: ANN401
        counts[-1] += 1
        return all_reduce(*arguments, **settings)

    torch.distributed.all_reduce = count
    for grad_accum in (1, 3):
        counts.append(0)
        run_cases(rank, world_size, [Case("decoder", kind="replicate", grad_accum=grad_accum)])
    return counts


def test_gradients_are_communicated_once_per_step(tmp_path: Path) -> None:
    for one, three in in_processes(tmp_path, 2, _count_reductions):
        assert one == three
        assert one >= 3  # two blocks, and what is outside of them


def test_a_number_of_processes_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    choice, cpu = Parallel(tensor=2), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"tensor is 2, .* number of processes, 3"), join_processes(choice, cpu):
        pass
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match=r"tensor is 2, .* number of processes, 1"), join_processes(choice, cpu):
        pass


def test_a_process_alone_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join_processes(Parallel(), torch.device("cpu")) as (group, device):
        assert group == Processes()
        assert device == torch.device("cpu")
    assert not torch.distributed.is_initialized()


def test_a_norm_over_the_heads_of_all_processes_is_refused() -> None:
    s = gh.preset("tiny-decoder", qk_norm=True, qk_norm_over="projection")
    check_divisible(s, 1)
    with pytest.raises(ConfigError, match=r"^train.parallel.tensor is 2, but qk_norm_over is 'projection', .*= 1\.$"):
        check_divisible(s, 2)
