"""PEFT's trainable tokens and `modules_to_save`: weights of an adapter in addition to the LoRA matrices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glasshouse.errors import ConfigError, StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import Family, TensorMapping, join, tensor_mapping
from glasshouse.hub.pooling import without_pooling
from glasshouse.layers.lora import LoRA, saved_weights, trained_rows
from glasshouse.models import Model, build

PREFIX = "base_model.model."
ROWS = ".token_adapter.trainable_tokens_delta"  # the trained rows themselves, not what they differ by


def save_whole(model: Model, config: LoRA, family: Family) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an adapter beside LoRA's, and the settings that name them."""
    s, rows, whole = without_pooling(model.spec), {}, defaultdict(list)
    if s.kind == "seq2seq" and len(trained_rows(model)) > 1:
        raise ConfigError(
            "PEFT takes the head of an encoder-decoder for tied, but this one has trained rows of its own."
        )
    for ours, (_, one) in trained_rows(model).items():
        mapping = tensor_mapping(family, f"{ours}.weight", s)
        rows[hf_name(family, model, mapping.name).removesuffix(".weight")] = one.rows.detach()
    for ours, weight in saved_weights(model, config).items():
        if ours.startswith("token_embedding.") and getattr(s.head, "tied", False):
            raise ConfigError(f"{ours} is tied to the head, which PEFT would leave as it was; train only rows of it.")
        mapping = tensor_mapping(family, ours, s)
        whole[hf_name(family, model, mapping.name)].append((mapping, weight.detach()))
    tensors = {f"{PREFIX}{name}{ROWS}": one for name, one in rows.items()}
    for name, chunks in whole.items():
        if len(chunks) < len(chunks[0][0].shares):
            raise ConfigError(f"{name} is one matrix in transformers, and only a part of it was trained whole.")
        tensors[PREFIX + name] = join(chunks).contiguous()
    settings = {
        "trainable_token_indices": {name.rpartition(".")[2]: list(config.token_ids) for name in rows} or None,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
    }
    return tensors, settings


@dataclass(frozen=True)
class WholeWeights:
    """The weights of an adapter that are not LoRA's, under our names."""

    modules: tuple[str, ...]  # trained whole
    token_ids: tuple[int, ...]  # with trained rows
    weights: dict[str, Tensor]
    rows: dict[str, Tensor]  # by the name of the matrix

    @classmethod
    def take(
        cls, tensors: dict[str, Tensor], keys: ConfigReader, model: Model, family: Family, source: str
    ) -> WholeWeights:
        """Take them out of an adapter's tensors; what they are is checked against the model."""
        named: dict[str, list[tuple[str, TensorMapping, torch.Size]]] = defaultdict(list)
        for ours, weight in build(model.spec, device="meta").named_parameters():
            mapping = tensor_mapping(family, ours, without_pooling(model.spec))
            named[mapping.name].append((ours, mapping, weight.shape))
        theirs = [key for key in tensors if ".lora_" not in key and key.startswith(PREFIX)]
        short = {key: key.removeprefix(PREFIX).replace(ROWS, ".weight") for key in theirs}
        full = family.canonical_names(dict.fromkeys(short.values()))
        ids = _token_ids(keys)
        weights: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for key, name in short.items():
            tensor, found = tensors.pop(key), named.get(full[name], [])
            if not found:
                raise StoreError(f"{source!r} contains {key}, which this model has no weight for.")
            for ours, mapping, shape in found:
                expected = [len(ids), *shape[1:]] if key.endswith(ROWS) else mapping.shape(shape)
                if list(tensor.shape) != expected or not tensor.is_floating_point():
                    raise StoreError(
                        f"{source!r} has {key} with shape {list(tensor.shape)}, but the model needs {expected}."
                    )
                (rows if key.endswith(ROWS) else weights)[ours] = (
                    tensor if key.endswith(ROWS) else mapping.view(tensor)
                )
        for setting, taken in (("modules_to_save", weights), ("trainable_token_indices", rows)):
            if keys.get(setting) and not taken:
                raise StoreError(
                    f"{keys.source!r} has {setting} = {keys.get(setting)!r}, but {source!r} has no weights of them."
                )
        modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in weights))
        return cls(modules, ids if rows else (), weights, rows)

    @torch.no_grad()
    def copy_to(self, model: Model) -> None:
        """Copy them into a model with this LoRA attached."""
        parameters = dict(model.named_parameters())
        for name, weight in self.weights.items():
            parameters[name].copy_(weight)
        for name, (_, one) in trained_rows(model).items():
            if f"{name}.weight" in self.rows:
                one.rows.copy_(self.rows[f"{name}.weight"])


def _token_ids(keys: ConfigReader) -> tuple[int, ...]:
    """Return the tokens with trained rows, which must be the same for every matrix."""
    given = keys.get("trainable_token_indices") or []
    lists = list(given.values()) if isinstance(given, dict) else [given]
    if not all(isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids) for ids in lists):
        raise StoreError(f"{keys.source!r} has trainable_token_indices = {given!r}, but they must be lists of ids.")
    if any(ids != lists[0] for ids in lists):
        raise StoreError(f"{keys.source!r} trains rows of other tokens in other modules, which is not supported.")
    return tuple(lists[0]) if lists else ()


def hf_name(family: Family, model: Model, name: str) -> str:
    """Return the name of a module in transformers: without the prefix if the model has no head."""
    return name.removeprefix(family.prefix) if without_pooling(model.spec).head.kind == "none" else name
