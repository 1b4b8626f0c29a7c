"""A module as a graph of a few operations, which the page runs in the browser."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from glasshouse.config import JsonDict
from glasshouse.errors import InputError
from glasshouse.page.live.operations import ARITHMETIC, CHECKS, DTYPES, IDENTITIES, OPERATIONS

_library = torch.library.Library("glasshouse", "FRAGMENT")
_library.define("site(Tensor x, str name) -> Tensor")
_library.impl("site", lambda x, name: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("glasshouse::site", lambda x, name: torch.empty_like(x), lib=_library)


def mark(name: str) -> Callable[[Tensor], Tensor]:
    """Return an edit that changes nothing, and by which the graph knows an activation by its name."""
    return lambda x: torch.ops.glasshouse.site(x, name)


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they are computed; values are numbered, and "$7" refers to value 7."""

    inputs: dict[str, object]  # "$" references by name, or lists of them
    weights: dict[str, str]  # references by the name of the parameter
    constants: dict[str, JsonDict]  # by reference
    nodes: list[JsonDict]
    outputs: dict[str, object]

    def to_json(self) -> JsonDict:
        """Return it as the interpreter reads it."""
        return dict(vars(self))


def export_graph(
    module: nn.Module, inputs: dict[str, object], dynamic: dict[str, object], outputs: Iterable[str]
) -> Graph:
    """Return the graph of a module, called with these examples of its inputs; `dynamic` has their dynamic axes.

    The module returns a tuple with the outputs in this order, each a tensor or a list of tensors.
    """
    # Not strict: hooks of the module, which mark sites, run as they would in a call.
    program = torch.export.export(module, (inputs,), dynamic_shapes=(dynamic,), strict=False)
    return _Reader(program).read(inputs, list(outputs))


@dataclass
class _Reader:
    """Reads an exported program node by node."""

    program: ExportedProgram
    known: dict[Node, object] = field(default_factory=dict)  # a reference, or what is a constant
    constants: dict[str, JsonDict] = field(default_factory=dict)
    constant_references: dict[Node, str] = field(default_factory=dict)
    nodes: list[JsonDict] = field(default_factory=list)
    count: int = 0

    def read(self, inputs: dict[str, object], outputs: list[str]) -> Graph:
        weights: dict[str, str] = {}
        given = []
        for node, spec in zip(
            (node for node in self.program.graph.nodes if node.op == "placeholder"),
            self.program.graph_signature.input_specs,
            strict=True,
        ):
            if spec.kind == InputKind.USER_INPUT:
                self.known[node] = self._new()
                given.append(self.known[node])
            elif spec.kind == InputKind.PARAMETER or spec.kind == InputKind.BUFFER:
                assert spec.target is not None
                self.known[node] = weights[spec.target.removeprefix("model.")] = self._new()
            else:
                assert spec.target is not None
                self.known[node] = self.program.constants[spec.target]
        made: list[object] = []
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                made = [self._argument(one) for one in node.args[0]]
        nodes = _needed(self.nodes, made)
        used = {one for node in nodes for one in _references(node["args"])} | {*_references(made)}
        return Graph(
            inputs=_like(inputs, iter(given)),
            weights={name: reference for name, reference in weights.items() if reference in used},
            constants={reference: one for reference, one in self.constants.items() if reference in used},
            nodes=nodes,
            outputs=_unflattened(self.program, outputs, made),
        )

    def _new(self) -> str:
        self.count += 1
        return f"${self.count}"

    def _read_call(self, node: Node) -> None:
        target = node.target
        name = _name_of(target)
        if name in CHECKS:
            return
        if name in IDENTITIES or _changes_nothing(name, node):
            self.known[node] = self._value(node.args[0])
            return
        arguments = _arguments(node)
        if self._is_constant(arguments) and name != "site":
            self.known[node] = target(
                *map(self._value, node.args), **{k: self._value(v) for k, v in node.kwargs.items()}
            )  # type: ignore[operator]
            return
        if name == "getitem":
            arguments = {"list": node.args[0], "index": node.args[1]}
        elif name == "sym_size":
            name = "size"
        elif isinstance(target, torch._ops.OpOverload):
            if name not in OPERATIONS and name != "site":
                raise InputError(
                    f"the model computes {target.name()!r}, which the interpreter of a live page lacks; "
                    "save a snapshot instead."
                )
        elif name in ARITHMETIC:
            name = ARITHMETIC[name]
            arguments = dict(zip("ab", node.args, strict=False))
        else:
            raise InputError(
                f"the model computes {name!r} of sizes, which the interpreter of a live page lacks; "
                "save a snapshot instead."
            )
        self.known[node] = reference = self._new()
        held = {key: self._argument(one) for key, one in arguments.items()}
        value = node.meta["val"]
        dtype = {"dtype": _dtype(value.dtype)} if isinstance(value, Tensor) else {}
        self.nodes.append({"op": name, "args": held, "out": reference, **dtype})

    def _is_constant(self, value: object) -> bool:
        match value:
            case Node():
                known = self.known[value]
                return not (isinstance(known, str) and known.startswith("$"))
            case list() | tuple():
                return all(map(self._is_constant, value))
            case dict():
                return all(map(self._is_constant, value.values()))
        return True

    def _value(self, argument: object) -> object:
        """Return an argument with its nodes replaced by what is known of them."""
        match argument:
            case Node():
                return self.known[argument]
            case list() | tuple():
                return [self._value(one) for one in argument]
        return argument

    def _argument(self, argument: object) -> object:
        """Return an argument as JSON; a tensor that is constant becomes a constant of the graph."""
        match argument:
            case Node():
                known = self.known[argument]
                if not isinstance(known, Tensor):
                    return self._argument(known)
                if argument not in self.constant_references:
                    self.constant_references[argument] = reference = self._new()
                    self.constants[reference] = encode_constant(known)
                return self.constant_references[argument]
            case list() | tuple():
                return [self._argument(one) for one in argument]
            case torch.dtype():
                return _dtype(argument)
            case float() if argument in (float("inf"), float("-inf")):
                return "inf" if argument > 0 else "-inf"
            case None | bool() | int() | float() | str():
                return argument
        raise InputError(
            f"the model has an argument {argument!r}, which the interpreter of a live page lacks; "
            "save a snapshot instead."
        )


def _name_of(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def _arguments(node: Node) -> dict[str, object]:
    """Return the arguments of a call by name, without those about devices and memory."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(enumerate(node.args))  # type: ignore[arg-type]
    schema = node.target._schema.arguments
    given = dict(zip((one.name for one in schema), node.args, strict=False)) | dict(node.kwargs)
    every = {one.name: given.get(one.name, one.default_value if one.has_default_value() else None) for one in schema}
    # A rounding mode is a word; all other words are of layouts and devices.
    dropped = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit")
    return {name: one for name, one in every.items() if name not in dropped}


def _changes_nothing(name: str, node: Node) -> bool:
    """Whether an operation returns its first argument: reading a site leaves many such slices behind."""
    if name not in ("to", "expand", "slice"):
        return False
    (before, after) = (one.meta["val"] for one in (node.args[0], node) if isinstance(one, Node))
    # By their texts: comparing sizes would add conditions on them to the exported program.
    return bool(before.dtype == after.dtype) and str(before.shape) == str(after.shape)


def _dtype(dtype: torch.dtype) -> str:
    if str(dtype) not in DTYPES:
        raise InputError(
            f"the model computes in {dtype}, which the interpreter of a live page lacks; save a snapshot instead."
        )
    return DTYPES[str(dtype)]


def encode_constant(tensor: Tensor) -> JsonDict:
    """Return a tensor as JSON: shape, dtype and base64 data.

    >>> encode_constant(torch.tensor([1.0, 2.0]))
    {'shape': [2], 'dtype': 'float32', 'data': 'AACAPwAAAEA='}
    """
    dtype = _dtype(tensor.dtype)
    held = tensor.to({"int64": torch.int32, "bool": torch.uint8}.get(dtype, tensor.dtype))
    data = base64.b64encode(held.contiguous().cpu().numpy().tobytes()).decode()
    return {"shape": list(tensor.shape), "dtype": dtype, "data": data}


def _references(value: object) -> Iterable[str]:
    match value:
        case str() if value.startswith("$"):
            yield value
        case list():
            for one in value:
                yield from _references(one)
        case dict():
            for one in value.values():
                yield from _references(one)


def _needed(nodes: list[JsonDict], outputs: object) -> list[JsonDict]:
    """Return the nodes that lead to an output or to a site."""
    needed, kept = {*_references(outputs)}, []
    for node in reversed(nodes):
        if node["op"] == "site" or node["out"] in needed:
            needed.update(_references(node["args"]))
            kept.append(node)
    return kept[::-1]


def _like(example: object, given: Iterable[object]) -> dict[str, object]:
    """Return references in the structure of the inputs."""
    given = iter(given)

    def fill(value: object) -> object:
        return [fill(one) for one in value] if isinstance(value, list) else next(given)

    assert isinstance(example, dict)
    return {name: fill(value) for name, value in example.items()}


def _unflattened(program: ExportedProgram, names: list[str], made: list[object]) -> dict[str, object]:
    spec = program.call_spec.out_spec
    assert spec is not None
    return dict(zip(names, torch.utils._pytree.tree_unflatten(made, spec), strict=True))
