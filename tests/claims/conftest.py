"""Fixtures: a fixed seed, a small float64 model, recorded module calls, and a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from claims.figures import Drawn
from glasshouse.spec import parse

SIZES = {"vocab_size": 23, "d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "max_len": 32}


class Call(NamedTuple):
    """One recorded call of a module."""

    args: tuple[Any, ...]
    output: Any


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Fix the seed."""
    torch.manual_seed(0)


@pytest.fixture
def build_model() -> Callable[..., nn.Module]:
    """Build a small float64 model of a kind, in eval mode, with all parameters random.

    As initialised, biases are 0, norms are 1 and attention is nearly uniform, which would hide missing terms.
    """

    def build(kind: str, **choices: object) -> nn.Module:
        spec = parse({"kind": kind, **SIZES, "init": {"kind": "normal", "std": 0.3}, **choices})
        model = gh.build(spec, dtype=torch.float64).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    return build


@pytest.fixture
def record_calls() -> Iterator[Callable[[nn.Module], list[Call]]]:
    """Register a forward hook on a module and return the list of its calls."""
    handles = []

    def start(module: nn.Module) -> list[Call]:
        calls: list[Call] = []
        handles.append(module.register_forward_hook(lambda _, args, output: calls.append(Call(args, output))))
        return calls

    yield start
    for handle in handles:
        handle.remove()


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Assert that two tensors differ by at most `within` of the second's largest entry."""

    def check(actual: Tensor, expected: Tensor, within: float = 1e-12) -> None:
        largest = expected.detach().abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=within * largest)

    return check


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Iterator[Drawn]:
    """What a card draws; a test of it looks at every kind of piece."""
    found = request.param.draw()
    yield found
    assert not found.unread, f"pieces that the test did not look at: {found.unread}"
