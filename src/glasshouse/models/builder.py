"""Build a model from a spec and initialize its weights."""

from __future__ import annotations

from typing import assert_never, overload

import torch

from glasshouse import device as machine
from glasshouse import spec
from glasshouse.errors import ConfigError
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.seq2seq import Seq2Seq
from glasshouse.models.weight_init import init_weights

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

    The default device is torch's, as in `with torch.device("cuda"):`. On the device "meta" weights have shapes but no
    data. A model that does not fit in memory is refused before anything is allocated.

    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder"))
    >>> sum(weight.numel() for weight in model.parameters())
    106880
    """
    device = machine.resolve(torch.get_default_device() if device is None else device)
    dtype = machine.parse_dtype(dtype)
    if device.type != "meta":
        check_memory(s, device, dtype)
    with torch.device("meta"):  # skips torch's own weight initialization
        model = instantiate(s).to(dtype)
    if device.type != "meta":
        model.to_empty(device=device)
        init_weights(model, s)
    return model


def instantiate(s: spec.Spec) -> Model:
    """Create the modules of a spec, without initializing them."""
    match s:
        case spec.DecoderSpec():
            return Decoder(s)
        case spec.EncoderSpec():
            return Encoder(s)
        case spec.Seq2SeqSpec():
            return Seq2Seq(s)
        case _:
            assert_never(s)


def check_memory(s: spec.Spec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for a spec whose weights alone exceed the device's memory."""
    count = spec.count_parameters(s)
    needed, available = count * dtype.itemsize, machine.memory_bytes(device)
    if needed > available:
        sizes = f"d_model = {s.d_model}, n_layers = {s.n_layers}, d_ff = {s.d_ff}, vocab_size = {s.vocab_size}"
        raise ConfigError(
            f"a model with {sizes} has {count:,} parameters and needs {needed / 2**30:,.1f} GiB, but the memory of "
            f"{device.type!r} is {available / 2**30:,.1f} GiB; choose smaller sizes."
        )
