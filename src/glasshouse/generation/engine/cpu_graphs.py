"""CPU graphs: the operations of a decode step, recorded once and then run without Python.

A small model takes longer to call its modules than to compute. TorchScript's interpreter runs the same operations
with the same arguments, and needs no compiler on the machine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glasshouse.layers.host_reads import no_host_reads

HOT = 24  # runs of a key before it is recorded
REPAID = 32  # runs of a graph that save what its recording takes (docs/lab/generation.md)
MOST_GRAPHS = 64  # those that ran last
MOST_FAILURES = 3  # keys that cannot be recorded, after which no others are tried: it is the model, most likely
FURTHER = 4  # how much longer the second recording is than the first, plus the tokens between them
Tensors = tuple[Tensor, ...]


class Work(Protocol):
    """Computes with the first `length` positions of a cache, or more: the ones after a sequence's end are masked."""

    def __call__(self, length: int) -> Tensors: ...


class Value(NamedTuple):
    """The name of a tensor in a recording."""

    name: str


class Operation(NamedTuple):
    """An operation of a recording; its arguments have values in place of tensors."""

    function: Any  # torch._ops.OpOverload
    args: list[Any]
    kwargs: dict[str, Any]


class Recording(TorchDispatchMode):
    """Records the operations that run while it is open."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.operations: list[Operation] = []
        self.outside: list[Tensor] = []
        self.results: Any = ()
        self.valid = True
        self._values: dict[int, Value] = {}
        self._alive: list[Any] = []  # ids are of living tensors, while it records

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, for a second, to keep this from being compiled."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and record it."""
        given = self.value_of(args), self.value_of(kwargs or {})
        result = func(*args, **(kwargs or {}))
        several = isinstance(result, tuple | list)
        tensors = list(result) if several else [result]
        if not all(isinstance(one, Tensor) for one in tensors):
            if not any(isinstance(one, Tensor) for one in tree_leaves((args, kwargs))):
                return result  # it told about types alone, which are the same each time
            self.valid = False  # the host read a value, and may have computed with it
        new = {id(one): index for index, one in enumerate(tensors) if id(one) not in self._values}
        if new or func._schema.is_mutable:  # otherwise it returned what it was given
            name = f"result_{len(self.operations)}"
            self._values |= {key: Value(f"{name}[{index}]" if several else name) for key, index in new.items()}
            self._alive.append(result)
            self.operations.append(Operation(func, *given))
        return result

    def finish(self, results: Tensors) -> None:
        """Keep the names of the results, and of tensors only those from outside."""
        self.results = self.value_of(results)
        self._values, self._alive = {}, []

    def value_of(self, given: Any) -> Any:  # noqa: ANN401
        """Return arguments with a value in place of each tensor."""
        match given:
            case Tensor():
                if id(given) not in self._values:
                    self._values[id(given)] = Value(f"outside_{len(self.outside)}")
                    self.outside.append(given)
                return self._values[id(given)]
            case list() | tuple():
                return [self.value_of(one) for one in given]
            case dict():
                return {name: self.value_of(one) for name, one in given.items()}
        return given


class CpuGraphs:
    """Runs functions that read and write tensors in place; those that run often are recorded.

    A function is recorded twice, at two lengths. Integers that differ by as much as the lengths follow the length;
    if anything else differs, or the host read a value, the function stays as it is.
    """

    def __init__(self) -> None:
        self._runs: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, Recording] = {}
        self._graphs = OrderedDict[Hashable, Callable[[int], Tensors]]()  # the one that ran last at the end
        self._failed: set[Hashable] = set()  # cannot be recorded

    def run(self, key: Hashable, work: Work, length: int, longest: int, left: int) -> Tensors:
        """Run a function for a length; `key` identifies it, and everything but the length that it depends on.

        It works for lengths up to `longest`, and so many runs are `left`, as far as the caller knows.
        """
        if (graph := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            return graph(length)
        self._runs[key] += 1
        first = self._recorded.get(key)
        waits = length + FURTHER > longest or (first is not None and length < first.length)
        if waits or not self._pays(key, left):
            return work(length)
        recording = Recording(length if first is None else length + FURTHER)
        with no_host_reads(), recording:
            results = work(recording.length)
        recording.finish(results)
        if first is None:
            self._recorded[key] = recording
        else:
            self._keep(key, make_graph(self._recorded.pop(key), recording))
        return results

    def _pays(self, key: Hashable, left: int) -> bool:
        """Whether a graph may be made, and is likely to save more than it takes.

        That a key will run as often as it did is the best guess where requests come and go; a quarter of it is safe.
        """
        if key in self._failed or len(self._failed) >= MOST_FAILURES:
            return False
        runs = self._runs[key]
        return key in self._recorded or (runs > HOT and max(left, runs // 4) >= REPAID)

    def _keep(self, key: Hashable, graph: Callable[[int], Tensors] | None) -> None:
        """Keep a graph, instead of the one that was not used for longest if there are too many."""
        if graph is None:
            self._failed.add(key)
            return
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            del self._runs[oldest]  # it has to repay its next recording, too


def make_graph(first: Recording, second: Recording) -> Callable[[int], Tensors] | None:
    """Return a function of the length that runs what was recorded at two lengths; None if they differ otherwise.

    >>> cache = torch.arange(10.0)
    >>> recordings = [Recording(length) for length in (2, 5)]
    >>> for one in recordings:
    ...     with one:
    ...         total = cache[: one.length].cumsum(0)
    ...     one.finish((total,))
    >>> make_graph(*recordings)(4)
    (tensor([0., 1., 3., 6.]),)
    """
    alike = len(first.operations) == len(second.operations) and len(first.outside) == len(second.outside)
    if not (first.valid and second.valid and alike):
        return None
    if not all(one is other for one, other in zip(first.outside, second.outside, strict=True)):
        return None
    try:
        source = "".join(f"{line}\n" for line in _source(first, second))
        script = torch.jit.CompilationUnit(source).step
    # Recordings differ, TorchScript does not know an operation, or this torch has no TorchScript.
    except (ValueError, RuntimeError, AttributeError):
        return None
    outside = first.outside

    def run(length: int) -> Tensors:
        # Profiling and optimising take the first two calls as long as twenty, and make later ones no faster.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            results: Tensors = script(length, *outside)
        return results

    return run


def _source(first: Recording, second: Recording) -> Iterator[str]:
    """Yield the lines of a TorchScript function; raise ValueError where two recordings differ."""
    lengths = first.length, second.length
    yield f"def step(length: int, {', '.join(f'outside_{index}: Tensor' for index in range(len(first.outside)))}):"
    pairs = zip(first.operations, second.operations, strict=True)
    for number, (one, other) in enumerate(pairs):
        if one.function is not other.function or one.kwargs.keys() != other.kwargs.keys():
            raise ValueError("the operations differ")
        arguments = [_literal(*both, lengths) for both in zip(one.args, other.args, strict=True)]
        arguments += [f"{name}={_literal(value, other.kwargs[name], lengths)}" for name, value in one.kwargs.items()]
        function = one.function._schema.name.replace("::", ".")
        yield f"    result_{number} = torch.ops.{function}({', '.join(arguments)})"
    results = (_literal(*both, lengths) for both in zip(first.results, second.results, strict=True))
    yield f"    return ({''.join(f'{one}, ' for one in results)})"


def _literal(one: Any, other: Any, lengths: tuple[int, int]) -> str:  # noqa: ANN401
    """Return the source of an argument that was recorded at two lengths."""
    match one, other:
        case Value(name), Value() if one == other:
            return name
        case list(), list() if len(one) == len(other):
            return f"[{', '.join(_literal(*both, lengths) for both in zip(one, other, strict=True))}]"
        case int(), int() if other - one == lengths[1] - lengths[0]:
            return f"(length + {one - lengths[0]})"
        case torch.device(), torch.device() if one == other:
            return f'torch.device("{one}")'
        case float(), float() if repr(one) == repr(other):
            return f'float("{one}")'
        case ((bool() | int() | str() | torch.dtype() | torch.layout() | torch.memory_format() | None), _) if (
            one == other
        ):
            return repr(one)
    raise ValueError(f"{one!r} and {other!r} differ, or cannot be written")
