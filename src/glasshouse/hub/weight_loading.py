"""Loads the weights of a model folder; names, shapes and dtypes are checked against the spec."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from glasshouse import device as machine
from glasshouse import spec
from glasshouse.errors import StoreError
from glasshouse.hub.families.family import Family, tensor_mapping
from glasshouse.hub.model_folder import ModelFolder
from glasshouse.models import Model, build, count_parameters
from glasshouse.models.builder import instantiate_unfilled
from glasshouse.models.weights import assign_weights, first_names


def load_weights(
    folder: ModelFolder,
    s: spec.Spec,
    family: Family | None,
    tensors: Mapping[str, Tensor],
    duplicates: set[str],
    device: torch.device,
    dtype: torch.dtype | str | None,
) -> Model:
    """Build the model of a spec with the tensors of a folder, which stay memory-mapped where they can."""
    path = folder.weights
    stored = sum(tensor.numel() for tensor in tensors.values())
    if max(s.n_layers, getattr(s, "n_encoder_layers", 0)) > len(tensors):  # before building anything
        raise StoreError(f"{path!r} contains {len(tensors)} tensors, but its config has {s.n_layers} layers.")
    if (needed := count_parameters(s)) > stored:
        raise StoreError(f"{path!r} has {stored:,} parameters, but its config needs {needed:,}; download it again.")
    model = build(s, device="meta") if device.type == "meta" else instantiate_unfilled(s)
    weights, first = model.state_dict(keep_vars=True), first_names(model)
    mappings = {name: tensor_mapping(family, name, s) for name in weights if first[name] == name}
    needed_names = {mapping.name for mapping in mappings.values()}
    if missing := sorted(needed_names - tensors.keys()):
        raise StoreError(
            f"{path!r} lacks the tensor {missing[0]} ({len(missing)} missing in all); download it again."
        )
    ignored = family.ignored_tensors if family else r"(?!)"
    extra = sorted(n for n in tensors.keys() - needed_names - duplicates if not re.fullmatch(ignored, n))
    if extra:
        raise StoreError(f"{path!r} contains {extra[0]}, which the model of its config does not have.")
    for ours, mapping in mappings.items():
        stored_as = tensors[mapping.name].dtype
        if stored_as not in machine.FLOATS and weights[ours].is_floating_point():
            raise StoreError(f"{path!r} has {mapping.name} in {stored_as}; quantized weights are not supported.")
    if not isinstance(dtype, torch.dtype):
        stored_dtype = tensors[mappings["token_embedding.table.weight"].name].dtype
        slow = device.type == "cpu" and stored_dtype in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if slow and dtype is None else stored_dtype
    for ours, mapping in mappings.items():
        name, shape = mapping.name, mapping.shape(weights[ours].shape)
        if list(tensors[name].shape) != shape:
            raise StoreError(
                f"{path!r} has {name} with shape {list(tensors[name].shape)}, but its config needs {shape}."
            )
    # On the CPU and in the stored dtype nothing is copied: the file stays memory-mapped.
    floats = {name for name in needed_names if tensors[name].is_floating_point()}
    moved = {name: tensors[name].to(device, dtype if name in floats else None) for name in needed_names}
    state = {ours: mapping.view(moved[mapping.name]) for ours, mapping in mappings.items()}
    if device.type != "cpu":  # sharding and fused optimizers need contiguous tensors
        state = {ours: tensor.contiguous() for ours, tensor in state.items()}
    assign_weights(model, state)
    return model if device.type == "meta" else model.to(device, dtype)
