"""Sites: the activations of a model that can be recorded or edited, and their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from glasshouse import hints
from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.layers.attention import MultiHeadAttention
from glasshouse.layers.norm import Norm
from glasshouse.layers.residual import OutputNorm, PostNorm
from glasshouse.layers.sublayer import STREAM, TOKENS, VECTORS, HookPoint, Sublayer
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.models.stack import Stack

Index = int | slice
Span = Literal["prompt", "new"]  # of the positions of a request that is generated

# The parts of a block in order, each with the site of its output and that of the residual stream after it.
PARTS = {
    "attention": ("attn_out", "resid_mid"),
    "cross": ("cross_attn_out", "cross_resid_mid"),
    "feedforward": ("ffn_out", "resid_post"),
}


@dataclass(frozen=True)
class Site:
    """One activation of one model: a module's input or output, or something inside it, such as a pattern."""

    name: str
    axes: tuple[str, ...]
    model: nn.Module = field(repr=False)
    path: str  # of the module in the model
    hook_point: HookPoint

    @property
    def is_cached(self) -> bool:
        """Whether it is keys or values, which include those in a KV cache."""
        return self.hook_point in (1, 2)

    @property
    def module(self) -> nn.Module:
        """The module at this path now: an edit may have replaced it."""
        return self.model.get_submodule(self.path)


@dataclass(frozen=True)
class Selection:
    """A site, or a slice of it: an index for each axis."""

    site: Site
    index: tuple[Index, ...]
    index_text: str = ""  # "[head=2, query=-1]"
    span: Span | None = None  # of its positions, besides the index

    @property
    def name(self) -> str:
        """The site's name with its index."""
        return self.site.name + self.index_text

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the remaining axes: an integer index removes its axis, as in NumPy."""
        return tuple(axis for axis, one in zip(self.site.axes, self.index, strict=True) if isinstance(one, slice))

    @property
    def whole(self) -> bool:
        """Whether it selects the whole activation."""
        return all(one == slice(None) for one in self.index)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise InputError for an index out of range for this shape."""
        for axis, size, one in zip(self.site.axes, shape, self.index, strict=True):
            if isinstance(one, int) and not -size <= one < size:
                raise InputError(
                    f"{self.name} has {axis} index {one}, but that axis has size {size}; use 0 to {size - 1}."
                )

    def part(self, value: Tensor) -> Tensor:
        """Return a view of the selected slice that keeps every axis."""
        self.check(value.shape)
        return value[tuple(slice(one, one + 1 or None) if isinstance(one, int) else one for one in self.index)]

    def of(self, value: Tensor) -> Tensor:
        """Return the selected slice of an activation."""
        self.check(value.shape)
        return value[self.index]


def sites(model: nn.Module) -> dict[str, Site]:
    """Return every site of a model, in the order of the forward pass.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", n_layers=1))
    >>> print(*sites(model))  # doctest: +NORMALIZE_WHITESPACE
    token_embed embed resid_pre.0 attn_norm_scale.0 attn_norm.0 q.0 k.0 v.0 scores.0 pattern.0 z.0 result.0 attn_out.0
    resid_mid.0 ffn_norm_scale.0 ffn_norm.0 gate.0 hidden_pre.0 hidden.0 ffn_out.0 resid_post.0 final_norm_scale final
    """
    model = unwrap_model(model)
    # Each stack with the module that the token embeddings go into.
    match model:
        case Seq2Seq():
            stacks: list[tuple[str, str, Stack, str]] = [
                ("encoder.", "encoder", model.encoder, "encoder"),
                ("decoder.", "decoder", model.decoder, "decoder"),
            ]
        case Encoder():
            stacks = [("", "stack", model.stack, "segment")]
        case Decoder():
            stacks = [("", "stack", model.stack, "stack")]
    found: dict[str, Site] = {}
    for prefix, path, stack, entry in stacks:
        found[f"{prefix}token_embed"] = Site(f"{prefix}token_embed", STREAM, model, entry, 0)
        for name, axes, inner, hook_point in _stack_sites(stack):
            found[prefix + name] = Site(prefix + name, axes, model, f"{path}.{inner}", hook_point)
    return found


def unwrap_model(model: nn.Module) -> Model:
    """Return the model without the wrapper of torch.compile."""
    model = unwrap_compiled(model)
    if not isinstance(model, Decoder | Encoder | Seq2Seq):
        raise InputError(
            f"the model is a {type(model).__name__}, but it must be one that gh.build or gh.load returned."
        )
    return model


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module without the wrapper of torch.compile, if it has one."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def select(model: nn.Module, name: str) -> list[Selection]:
    """Return the sites that a name matches: one, or with `*` several; an index in brackets selects a slice of each.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> [one.name for one in select(model, "pattern.*[head=2,query=-1]")]
    ['pattern.0[head=2, query=-1]', 'pattern.1[head=2, query=-1]']
    """
    known = sites(model)
    if not isinstance(name, str):
        raise InputError(f"a site name must be a string such as resid_post.*, but {name!r} was given.")
    form = re.fullmatch(r"\s*([^\s\[\]]+)\s*(?:\[(.*)\]\s*)?", name)
    if form is None:
        raise InputError(f"the site {name!r} is not a name and an index such as pattern.3[head=2, query=-1].")
    found = [site for known_name, site in known.items() if fnmatchcase(known_name, form[1])]
    if not found:
        raise InputError(f"the model has no site {form[1]!r}; {advice(form[1], known)}")
    return [_parse_index(site, form[2] or "") for site in found]


def _parse_index(site: Site, text: str) -> Selection:
    index: dict[str, Index] = {axis: slice(None) for axis in site.axes}
    given: dict[str, str] = {}
    span: Any = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, value = (piece.strip() for piece in part.partition("="))
        if axis in given:
            raise InputError(f"{site.name} is indexed by {axis} twice; give two names, one for each index.")
        if axis not in index:
            raise InputError(f"{site.name} has no axis {axis!r}; {did_you_mean(axis, site.axes)}")
        if axis == "position" and value in get_args(Span):
            given[axis] = span = value
            continue
        if not re.fullmatch(r"-?\d+|(-?\d+)?:(-?\d+)?", value):
            raise InputError(f"{site.name} is indexed by {axis} = {value!r}, which is neither an integer nor a:b.")
        given[axis] = value
        index[axis] = slice(*(int(end) if end else None for end in value.split(":"))) if ":" in value else int(value)
    index_text = ", ".join(f"{axis}={given[axis]}" for axis in site.axes if axis in given)
    return Selection(site, tuple(index.values()), f"[{index_text}]" if index_text else "", span)


def advice(name: str, known: Collection[str]) -> str:
    """Return what may have been meant by a name that is no site."""
    if exact := exact_advice(name, known):
        return exact
    inner = [one for one in known if one.endswith(f".{name}")]
    return f"did you mean {' or '.join(inner)}?" if inner else suggest_site(name, known)


def exact_advice(name: str, known: Collection[str]) -> str:
    """Return what a name of TransformerLens is called here, or which layers there are; empty for other names."""
    ours, remark = _translated(name)
    if ours:
        inner = [one for one in known if one.endswith(f".{ours}")] or [ours]  # of one stack or both
        said = f"it is called {' or '.join(inner)} here{remark}"
        return f"{said}." if {*inner} & {*known} or "*" in ours else f"{said}, and {advice(ours, known)}"
    stem, _, layer = name.rpartition(".")
    there = [one for one in known if one.rpartition(".")[0] == stem]
    return f"its layers are 0 to {len(there) - 1}." if there and layer.isdigit() else ""


def _translated(name: str) -> tuple[str, str]:
    """Return our name of a hook of TransformerLens, with its layer, and a remark; both empty for other names.

    >>> _translated("blocks.3.attn.hook_pattern"), _translated("hook_embed"), _translated("pattern.3")
    (('pattern.3', ''), ('token_embed', ''), ('', ''))
    """
    block = re.match(r"(blocks|encoder|decoder)\.(\d+|\*)\.", name)
    ours, comma, remark = hints.SITES.get(name[block.end() :] if block else name, "").partition(", ")
    prefix = f"{block[1]}." if block and block[1] != "blocks" else ""
    return (f"{prefix}{ours}.{block[2]}" if ours and block else ours), comma + remark


def suggest_site(name: str, known: Collection[str]) -> str:
    """Suggest the nearest of some sites, in the layer that was meant, or list them, each once for all layers.

    >>> known = ["embed", "resid_post.0", "resid_post.1", "pattern.0", "pattern.1"]
    >>> suggest_site("resid_pos.1", known), suggest_site("x", known)
    ('did you mean resid_post.1?', 'it has embed, resid_post.*, pattern.*.')
    """
    layer = re.search(r"\.(\d+)(?=\[|$)", name)
    every = list(dict.fromkeys(re.sub(r"\.\d+(?=\[|$)", ".*", one) for one in known))
    advice = did_you_mean(re.sub(r"\.\d+(?=\[|$)", ".*", name), every)
    if layer is not None and advice.startswith("did"):
        there = advice.replace(".*", layer[0])
        return there if there.removeprefix("did you mean ").removesuffix("?") in known else advice
    return advice


_Place = tuple[str, tuple[str, ...], str, HookPoint]  # name, axes, path within the stack, hook point


def _stack_sites(stack: Stack) -> Iterator[_Place]:
    """Yield the sites of a stack, in order."""
    yield "embed", STREAM, "drop", "output"
    for number, block in enumerate(stack.blocks):
        here = f"blocks.{number}"
        yield f"resid_pre.{number}", STREAM, here, 0
        for part in parts_of(block):
            added, after = PARTS[part]
            residual = unwrap_compiled(unwrap_compiled(block).get_submodule(part))
            is_post, is_output = isinstance(residual, PostNorm), isinstance(residual, OutputNorm)
            inner = "norm_out" if is_output else "norm"
            norm, norm_path = f"{added.removesuffix('_out')}_norm", f"{here}.{part}.{inner}"
            scale: list[_Place] = []
            if has_scale(residual.get_submodule(inner)):
                scale.append((f"{norm}_scale.{number}", TOKENS, norm_path, "scale"))
            if not (is_post or is_output):
                yield from scale
                yield f"{norm}.{number}", STREAM, norm_path, "output"
            layer, path = sublayer_of(block, part), f"{here}.{part}.layer"
            for site in layer.sites():
                yield f"{site.name}.{number}", site.axes, f"{path}.{site.path}", site.hook_point
            if isinstance(layer, MultiHeadAttention):
                yield f"{layer.prefix}result.{number}", VECTORS, f"{path}.out", "result"
            if is_output:
                yield from scale
            # Dropout is the last module before the residual sum.
            yield f"{added}.{number}", STREAM, f"{here}.{part}.drop", "output"
            if is_post:
                yield from scale
            yield f"{after}.{number}", STREAM, here if after == "resid_post" else f"{here}.{part}", "output"
    if has_scale(stack.norm):
        yield "final_norm_scale", TOKENS, "norm", "scale"
    yield "final", STREAM, "norm", "output"


def has_scale(norm: nn.Module) -> bool:
    """Whether a norm has a scale to record and edit: an identity has none, nor need a registered norm."""
    norm = unwrap_compiled(norm)
    return isinstance(norm, Norm) and type(norm).scale is not Norm.scale


def sublayer_of(block: nn.Module, part: str) -> Sublayer:
    """Return the attention or feed-forward layer of a part of a block."""
    return cast(Sublayer, unwrap_compiled(unwrap_compiled(block).get_submodule(f"{part}.layer")))


def parts_of(block: nn.Module) -> list[str]:
    """Return the parts of a block, in order: attention, cross in a decoder with cross-attention, feedforward."""
    return [part for part in PARTS if hasattr(block, part)]
