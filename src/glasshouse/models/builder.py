"""Build a model from a spec and initialize its weights."""

from __future__ import annotations

from typing import assert_never, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from glasshouse import device as machine
from glasshouse import registry, spec
from glasshouse.errors import ConfigError
from glasshouse.layers.linear.linear import left_to_spec
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.seq2seq import Seq2Seq
from glasshouse.models.weights import init_weights

Model = Decoder | Encoder | Seq2Seq
Device = torch.device | str | None


@overload
def build(s: spec.DecoderSpec, *, device: Device = ..., dtype: torch.dtype | str = ...) -> Decoder: ...
@overload
def build(s: spec.EncoderSpec, *, device: Device = ..., dtype: torch.dtype | str = ...) -> Encoder: ...
@overload
def build(s: spec.Seq2SeqSpec, *, device: Device = ..., dtype: torch.dtype | str = ...) -> Seq2Seq: ...
@overload
def build(s: spec.Spec, *, device: Device = ..., dtype: torch.dtype | str = ...) -> Model: ...
def build(s: spec.Spec, *, device: Device = None, dtype: torch.dtype | str = torch.float32) -> Model:
    """Build a model in train mode, its weights initialized with torch's random generator.

    Registered parts keep the values that they give themselves. The default device is torch's, as in
    `with torch.device("cuda"):`. On the device "meta" weights have shapes but no data. A model that does not fit in
    memory is refused before anything is allocated.

    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder"))
    >>> sum(weight.numel() for weight in model.parameters())
    106880
    """
    device = machine.resolve(torch.get_default_device() if device is None else device)
    dtype = machine.parse_dtype(dtype)
    if device.type != "meta":
        check_memory(s, device, dtype)
    if device.type != "meta" and has_registered_parts(s):
        return _build_with_own_values(s).to(device, dtype)
    with torch.device("meta"):  # skips torch's own weight initialization
        model = instantiate(s).to(dtype)
    if device.type != "meta":
        model.to_empty(device=device)
        init_weights(model, s)
    return model


def _build_with_own_values(s: spec.Spec) -> Model:
    """Build a model on the CPU whose registered parts have the values that they give themselves."""
    with torch.device("cpu"), left_to_spec():
        model = instantiate(s)
    init_weights(model, s, needs_values=_is_unset)
    for name, weight in model.named_parameters():
        if _is_unset(weight):
            raise ConfigError(
                f"{name} has no values; initialize it in the registered module's __init__, as by torch.zeros, or "
                "make it a glasshouse.layers.linear.Linear, which the spec initializes."
            )
    return model


def _is_unset(weight: Tensor) -> bool:
    return bool(weight.isnan().any())


def instantiate(s: spec.Spec) -> Model:
    """Create the modules of a spec, without initializing them."""
    model: Model
    match s:
        case spec.DecoderSpec():
            model = Decoder(s)
        case spec.EncoderSpec():
            model = Encoder(s)
        case spec.Seq2SeqSpec():
            model = Seq2Seq(s)
        case _:
            assert_never(s)
    if lazy := [name for name, weight in model.state_dict(keep_vars=True).items() if is_lazy(weight)]:
        raise ConfigError(
            f"{lazy[0]} has no shape before its first call; give the registered module's layers their sizes, as "
            "nn.Linear does and nn.LazyLinear does not."
        )
    return model


def instantiate_unfilled(s: spec.Spec) -> Model:
    """Create modules for `assign_weights`: on the meta device, or on the CPU where registered parts hold more.

    Non-persistent buffers, and other attributes of a registered module, come from its own __init__.
    """
    if not has_registered_parts(s):
        with torch.device("meta"):
            return instantiate(s)
    with torch.random.fork_rng(devices=()), torch.device("cpu"), left_to_spec():
        return instantiate(s)


def has_registered_parts(s: spec.Spec) -> bool:
    """Whether modules of a model are built by functions that `gh.register` was given."""
    return any(registry.has_builder(choice) for choice in (s.attention, s.position, s.feedforward, s.norm))


def count_parameters(s: spec.Spec) -> int:
    """Count the parameters of a model: by arithmetic, or where it has registered parts by building it on meta.

    >>> from glasshouse.spec import preset
    >>> f"{count_parameters(preset('gpt2')):,}"
    '124,439,808'
    """
    if not has_registered_parts(s):
        return spec.count_by_arithmetic(s)
    with torch.device("meta"):
        return sum(weight.numel() for weight in instantiate(s).parameters())


def check_memory(s: spec.Spec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for a spec whose weights alone exceed the device's memory."""
    count = count_parameters(s)
    needed, available = count * dtype.itemsize, machine.memory_bytes(device)
    if needed > available:
        sizes = f"d_model = {s.d_model}, n_layers = {s.n_layers}, d_ff = {s.d_ff}, vocab_size = {s.vocab_size}"
        raise ConfigError(
            f"a model with {sizes} has {count:,} parameters and needs {needed / 2**30:,.1f} GiB, but the memory of "
            f"{device.type!r} is {available / 2**30:,.1f} GiB; choose smaller sizes."
        )
