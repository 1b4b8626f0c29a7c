"""Load and save LoRA adapters in PEFT's format, under the names of the transformers model."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glasshouse import store
from glasshouse.errors import ConfigError, InputError, StoreError
from glasshouse.hub.adapters.fused import LoRAWeights, fuse, split_fused
from glasshouse.hub.adapters.modules import WholeWeights, hf_name, save_whole
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import Family, TensorMapping, tensor_mapping
from glasshouse.hub.model_folder import ModelFolder, write_json
from glasshouse.hub.pooling import without_pooling
from glasshouse.hub.serialization import matching_family
from glasshouse.layers.lora import FrozenWeights, LoRA, LoRALinear, attach, block_linears, lora_layers
from glasshouse.models import Model, build

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = r"adapter_config\.json|adapter_model\.safetensors"
KEY = "base_model.model.{}.lora_{}.weight"

READ = {
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "trainable_token_indices",
    "use_rslora",
}
# Names, versions, initialization and training, and the adapted modules, which the tensor names give as well.
IGNORED_KEYS = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
}
TASKS = {"decoder": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}  # for models with a language-model head


# Save --------------------------------------------------------------------------------------------------------


def save_adapter(model: Model, config: LoRA, folder: str | Path, base: str) -> None:
    """Save the LoRA weights of a model as a folder that PEFT loads onto `base`, a transformers folder or hub id.

    An adapter folder is replaced; a folder with anything else in it is refused. Trained on quantized weights, the
    header of its file of weights says so: `base_weights` is "int8" or "int4".

    >>> import json, tempfile, glasshouse as gh
    >>> shape = {"d_model": 8, "n_heads": 2, "n_kv_heads": 1, "d_head": 4, "d_ff": 8, "vocab_size": 9}
    >>> model = gh.build(gh.preset("llama-1b", n_layers=1, **shape))
    >>> attach(model, LoRA(rank=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_adapter(model, LoRA(rank=2), f"{folder}/adapter", base="my-model")
    ...     json.loads(Path(folder, "adapter", "adapter_config.json").read_text())["target_modules"]
    ['q_proj', 'v_proj']
    """
    layers = lora_layers(model)
    if not layers:
        raise InputError("the model has no LoRA to save; attach it first.")
    if other := next((layer.config for layer in layers.values() if layer.config != config), None):
        raise InputError(f"config is {config}, but {other} is attached; give that.")
    family = _family(model)
    chunks: dict[str, list[tuple[TensorMapping, LoRALinear]]] = defaultdict(list)
    for ours, layer in layers.items():
        mapping = _module_mapping(family, model, f"{ours}.weight")
        chunks[hf_name(family, model, mapping.name)].append((mapping, layer))
    tensors: dict[str, Tensor] = {}
    for theirs, of_name in chunks.items():
        tensors[KEY.format(theirs, "A")], tensors[KEY.format(theirs, "B")] = fuse(of_name)
    ranks = {theirs: config.rank * len(of_name) for theirs, of_name in chunks.items()}
    table = _adapter_config(model, family, config, ranks, base)
    more, settings = save_whole(model, config, family)
    tensors, table = tensors | more, table | settings
    table["fan_in_fan_out"] = any(mapping.transposed for of_name in chunks.values() for mapping, _ in of_name)

    # In the header, as older versions of PEFT refuse settings that they do not know.
    trained_on = {} if config.weights == "own" else {"base_weights": config.weights}

    def write(folder: Path) -> None:
        write_json(folder / CONFIG, table)
        store.write_tensors(folder / WEIGHTS, tensors, trained_on)

    store.replace_folder(Path(folder).expanduser(), write, ADAPTER_FILES)


def _adapter_config(
    model: Model, family: Family, config: LoRA, ranks: Mapping[str, int], base: str
) -> dict[str, Any]:
    """Return adapter_config.json; if ranks differ, patterns name the modules above the lowest."""
    plain = build(model.spec, device="meta")
    every = {
        hf_name(family, model, _module_mapping(family, model, name).name) for name, _ in plain.named_parameters()
    }
    # Also those outside the blocks that this model lacks: the transformers model may have a pooler all the same.
    named = (found if isinstance(found, str) else found.name for found in family.names.values())
    every |= {name for name in named if "*" not in name}
    rank = min(ranks.values())
    higher = {theirs: other for theirs, other in ranks.items() if other != rank}
    patterns = {
        name: next(r for theirs, r in higher.items() if _ends(theirs, name)) for name in _select(higher, every)
    }
    has_lm_head = model.spec.head.kind == "next_token"
    return {
        "peft_type": "LORA",
        "task_type": TASKS[model.spec.kind] if has_lm_head else None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _alpha(config, rank),
        "lora_dropout": config.dropout,
        "target_modules": _select(ranks, every),
        "rank_pattern": patterns,
        "alpha_pattern": {name: _alpha(config, other) for name, other in patterns.items()},
        "bias": "none",
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }


def _alpha(config: LoRA, rank: int) -> float | int:
    """Return the alpha that gives the same scale at another rank."""
    alpha = config.alpha * rank / config.rank
    return int(alpha) if alpha.is_integer() else alpha


def _select(modules: Collection[str], every: Collection[str]) -> list[str]:
    """Return the last components of some modules' names, or their full names if others share a last component."""
    lasts = {name.rpartition(".")[2] for name in modules}
    others = {name.rpartition(".")[2] for name in every if name not in modules}
    return sorted(modules if lasts & others else lasts)


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


# Load ---------------------------------------------------------------------------------------------------------


def load_adapter(model: Model, folder: str | Path, weights: FrozenWeights = "own") -> LoRA:
    """Attach to a model the LoRA adapter of a folder that PEFT or `save_adapter` wrote, and return its config.

    The outputs are those of PEFT. If only some layers are adapted, the linear layers of the same name in the others
    get an adapter with zero output. Each chunk of a fused matrix gets its own adapter, with its own dropout. With
    `weights` "int8" or "int4", the linear layers below are quantized, as in a run with `train.lora.weights`.

    >>> import tempfile, glasshouse as gh
    >>> one, two = (gh.build(gh.preset("tiny-decoder")) for _ in range(2))
    >>> attach(one, LoRA(rank=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_adapter(one, LoRA(rank=2), f"{folder}/adapter", base="my-model")
    ...     load_adapter(two, f"{folder}/adapter").rank
    2
    """
    linears = block_linears(model)
    family = _family(model)
    adapter = ModelFolder(store.surviving_folder(Path(folder).expanduser()))
    table, file = adapter.json(CONFIG), adapter.file(WEIGHTS)
    if table is None or file is None:
        missing = str(adapter.path / (CONFIG if table is None else WEIGHTS))
        raise StoreError(f"there is no {missing!r}; give the folder of an adapter, saved by PEFT as safetensors.")
    keys = ConfigReader(table, str(adapter.path / CONFIG))
    _check_plain_lora(keys)
    theirs: dict[str, dict[int, str]] = defaultdict(dict)
    stored: dict[str, TensorMapping] = {}
    for ours in linears:
        mapping = _module_mapping(family, model, f"{ours}.weight")
        theirs[mapping.name][mapping.chunk] = ours
        stored[mapping.name] = mapping
    found: dict[str, LoRAWeights] = {}
    tensors = store.read_tensors(file)
    whole = WholeWeights.take(tensors, keys, model, family, str(file))
    pairs = _pairs(tensors, str(file))
    for name, full in family.canonical_names(pairs).items():
        if full not in theirs:
            raise StoreError(
                f"{str(file)!r} has LoRA weights of {name}, which is not a linear layer in this model's blocks."
            )
        linear = linears[theirs[full][stored[full].chunk]]
        d_in, d_out = linear.in_features, stored[full].whole(linear.out_features)
        fused = _lora_weights(keys, name, pairs[name], d_in, d_out, str(file))
        found |= {theirs[full][chunk]: own for chunk, own in split_fused(fused, stored[full]).items()}
    highest = max(found.values(), key=lambda lora: len(lora.lora_a))
    targets = tuple(dict.fromkeys(ours.rpartition(".")[2] for ours in linears if ours in found))
    try:
        dropout = keys.get_typed("lora_dropout", 0.0)
        config = LoRA(len(highest.lora_a), highest.alpha, dropout, targets, whole.modules, whole.token_ids)
    except ConfigError as error:
        raise StoreError(f"{keys.source!r} is not a valid LoRA config: {error}") from None
    config = replace(config, weights=weights)
    attach(model, config)
    _copy(found, lora_layers(model), config)
    whole.copy_to(model)
    return config


def _check_plain_lora(keys: ConfigReader) -> None:
    """Raise StoreError for any adapter other than plain LoRA."""
    keys.expect("peft_type", "LORA")
    keys.expect("bias", "none")
    # Other initializations also change the frozen weights before training.
    keys.expect("init_lora_weights", True, False, "gaussian", "orthogonal", "eva")
    for name, value in keys.table.items():
        if value and name not in READ | IGNORED_KEYS:  # an option that is off or empty has no effect
            raise StoreError(f"{keys.source!r} has {name} = {value!r}, which is not supported; only plain LoRA is.")


def _pairs(tensors: Mapping[str, Tensor], source: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the A and B matrices of each module by its name in the transformers model."""
    pairs = {}
    for key in tensors:
        match = re.fullmatch(re.escape(KEY).replace(r"\{\}", "(.+)", 1).replace(r"\{\}", "[AB]"), key)
        if match is None:
            raise StoreError(f"{source!r} contains {key}, which is not a LoRA weight of a linear layer.")
        both = [KEY.format(match[1], end) for end in "AB"]
        for one in both:
            if one not in tensors:
                raise StoreError(f"{source!r} lacks {one}; download it again.")
            if not tensors[one].is_floating_point() or tensors[one].dim() != 2:
                raise StoreError(f"{source!r} contains {one}, which is not a floating-point matrix.")
        pairs[match[1]] = (tensors[both[0]], tensors[both[1]])
    if not pairs:
        raise StoreError(f"{source!r} contains no LoRA weights; download it again.")
    return pairs


def _lora_weights(
    keys: ConfigReader, name: str, pair: tuple[Tensor, Tensor], d_in: int, d_out: int, source: str
) -> LoRAWeights:
    """Return the LoRA matrices of a module, with their shapes checked."""
    lora_a, lora_b = pair
    rank = _pattern(keys, "rank_pattern", name, keys.get_int("r", 8))
    if lora_a.shape != (rank, d_in) or lora_b.shape != (d_out, rank):
        shapes = f"{list(lora_a.shape)} and {list(lora_b.shape)}"
        raise StoreError(
            f"{source!r} has LoRA weights of {name} with shapes {shapes}, but the model and a rank of {rank} "
            f"need {[rank, d_in]} and {[d_out, rank]}."
        )
    alpha = _pattern(keys, "alpha_pattern", name, keys.get_typed("lora_alpha", 8.0))
    return LoRAWeights(lora_a, lora_b, alpha * math.sqrt(rank) if keys.get_typed("use_rslora", False) else alpha)


def _pattern(keys: ConfigReader, pattern: str, name: str, default: float) -> float:
    """Return the value of a pattern for a module: the first whose key its name ends with."""
    given = keys.get(pattern) or {}
    if not isinstance(given, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in given):
        raise StoreError(
            f"{keys.source!r} has a {pattern} whose keys are not all module names; only those are supported."
        )
    end = next((key for key in given if _ends(name, key)), None)
    return default if end is None else ConfigReader(given, keys.source).get_typed(end, default)


@torch.no_grad()
def _copy(found: Mapping[str, LoRAWeights], layers: Mapping[str, LoRALinear], config: LoRA) -> None:
    """Copy LoRA matrices; at a lower rank the remaining columns of B stay zero, so those of A have no effect."""
    for ours, lora in found.items():
        layer, rank = layers[ours], len(lora.lora_a)
        layer.lora_a[:rank] = lora.lora_a
        layer.lora_b[:, :rank] = lora.lora_b.to(layer.lora_b) * (lora.scale / config.scale)


# Names ------------------------------------------------------------------------------------------------------


def _family(model: Model) -> Family:
    plain = build(model.spec, device="meta")
    family, _ = matching_family(model.spec, [name for name, _ in plain.named_parameters()])
    if family is None:
        raise ConfigError(
            "no transformers family can express this model, so PEFT has no names for its linear layers; save the "
            "tensors of lora.adapter_state_dict(model) with store.write instead."
        )
    return family


def _module_mapping(family: Family, model: Model, ours: str) -> TensorMapping:
    """Return the mapping of one of our tensors, with the name of their module instead of the tensor's."""
    mapping = tensor_mapping(family, ours, without_pooling(model.spec))
    return mapping._replace(name=mapping.name.rpartition(".")[0])
