"""LoRA adapters in and out of the folders that PEFT writes, under the names of the transformers model.

A family may keep several of our maps as one matrix (GPT-2's queries, keys and values). There the thin maps down are
stacked, and the maps up stand on the diagonal of one that reads them all, which is the same sum.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glasshouse import store
from glasshouse.errors import ConfigError, InputError, StoreError
from glasshouse.hub.config_reader import ConfigReader
from glasshouse.hub.family import Family, TensorMapping
from glasshouse.hub.model_folder import ModelFolder, write_json
from glasshouse.hub.pooling import without_pooling
from glasshouse.hub.serialization import matching_family
from glasshouse.layers.lora import LoRA, LoRALinear, attach, block_linears, lora_layers
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
    "peft_type",
    "r",
    "rank_pattern",
    "use_rslora",
}
# Names, versions, how it was drawn and trained, and which maps have one, which the tensors say themselves.
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
TASKS = {"decoder": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}  # by what a model with a head over the vocabulary is


class LoRAWeights(NamedTuple):
    """The thin map beside one of ours, as a file has it; its product is multiplied by alpha / rank."""

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def scale(self) -> float:
        """What its output is multiplied by."""
        return self.alpha / len(self.down)


# Out --------------------------------------------------------------------------------------------------------


def save_adapter(model: Model, config: LoRA, folder: str | Path, base: str) -> None:
    """Write what LoRA has trained as a folder that PEFT loads onto the transformers model `base`, a folder or hub id.

    A folder written before is replaced; one that holds anything else is left alone.

    >>> import json, tempfile, glasshouse as gh
    >>> shape = {"d_model": 8, "n_heads": 2, "n_kv_heads": 1, "d_head": 4, "d_ff": 8, "vocab_size": 9}
    >>> model = gh.build(gh.preset("llama-1b", n_layers=1, **shape))
    >>> attach(model, LoRA(rank=2))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save_adapter(model, LoRA(rank=2), f"{place}/adapter", base="my-model")
    ...     json.loads(Path(place, "adapter", "adapter_config.json").read_text())["target_modules"]
    ['q_proj', 'v_proj']
    """
    layers = lora_layers(model)
    if not layers:
        raise InputError("the model has no LoRA to save; attach it first.")
    if other := next((layer.config for layer in layers.values() if layer.config != config), None):
        raise InputError(f"choice is {config}, but {other} is attached; give that.")
    family = _family(model)
    shared: dict[str, list[tuple[TensorMapping, LoRALinear]]] = defaultdict(list)
    for ours, layer in layers.items():
        piece = _piece(family, model, f"{ours}.weight")
        shared[_bare(family, model, piece.name)].append((piece, layer))
    tensors: dict[str, Tensor] = {}
    for theirs, parts in shared.items():
        tensors[KEY.format(theirs, "A")], tensors[KEY.format(theirs, "B")] = _fuse(parts)
    ranks = {theirs: config.rank * len(parts) for theirs, parts in shared.items()}
    table = _describe(model, family, config, ranks, base)
    table["fan_in_fan_out"] = any(piece.transposed for parts in shared.values() for piece, _ in parts)

    def fill(place: Path) -> None:
        write_json(place / CONFIG, table)
        store.write_tensors(place / WEIGHTS, tensors)

    store.replace_folder(Path(folder).expanduser(), fill, ADAPTER_FILES)


def _fuse(parts: list[tuple[TensorMapping, LoRALinear]]) -> tuple[Tensor, Tensor]:
    """Return the thin map of a matrix that several of ours, or one, are kept as."""
    parts = sorted(parts, key=lambda pair: pair[0].chunk)
    down = torch.cat([layer.lora_a.detach() for _, layer in parts])
    piece, first = parts[0]
    count, rank = first.lora_b.shape
    up = first.lora_b.new_zeros(count * piece.n_chunks, rank * len(parts))
    for i, (piece, layer) in enumerate(parts):
        up[piece.chunk * count : (piece.chunk + 1) * count, i * rank : (i + 1) * rank] = layer.lora_b.detach()
    return down, up


def _describe(model: Model, family: Family, config: LoRA, ranks: Mapping[str, int], base: str) -> dict[str, Any]:
    """Return adapter_config.json; where ranks differ, patterns name those above the least."""
    plain = build(model.spec, device="meta")
    every = {_bare(family, model, _piece(family, model, name).name) for name, _ in plain.named_parameters()}
    # Those outside the blocks too that this model lacks: transformers may give its model a pooler all the same.
    named = (found if isinstance(found, str) else found.name for found in family.names.values())
    every |= {name for name in named if "*" not in name}
    rank = min(ranks.values())
    wide = {theirs: wider for theirs, wider in ranks.items() if wider != rank}
    patterns = {name: next(r for theirs, r in wide.items() if _ends(theirs, name)) for name in _select(wide, every)}
    has_vocabulary = model.spec.head.kind == "next_token"
    return {
        "peft_type": "LORA",
        "task_type": TASKS[model.spec.kind] if has_vocabulary else None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _alpha(config, rank),
        "lora_dropout": config.dropout,
        "target_modules": _select(ranks, every),
        "rank_pattern": patterns,
        "alpha_pattern": {name: _alpha(config, wider) for name, wider in patterns.items()},
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _alpha(config: LoRA, rank: int) -> float | int:
    """Return the alpha that keeps the scale at another rank."""
    alpha = config.alpha * rank / config.rank
    return int(alpha) if alpha.is_integer() else alpha


def _select(wanted: Collection[str], every: Collection[str]) -> list[str]:
    """Name some modules by the last part of their names, or in full where that would name others too."""
    lasts = {name.rpartition(".")[2] for name in wanted}
    others = {name.rpartition(".")[2] for name in every if name not in wanted}
    return sorted(wanted if lasts & others else lasts)


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


# In ---------------------------------------------------------------------------------------------------------


def load_adapter(model: Model, folder: str | Path) -> LoRA:
    """Attach to a model the LoRA of a folder that PEFT or `save_adapter` wrote, and return what was attached.

    The model gives what PEFT's would. A map with the name of an adapted one that has no adapter itself, as where only
    some layers do, gets a thin map that gives zero. Where the family keeps several of our maps as one matrix, each
    gets a thin map of its own, with a dropout of its own.

    >>> import tempfile, glasshouse as gh
    >>> one, two = (gh.build(gh.preset("tiny-decoder")) for _ in range(2))
    >>> attach(one, LoRA(rank=2))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save_adapter(one, LoRA(rank=2), f"{place}/adapter", base="my-model")
    ...     load_adapter(two, f"{place}/adapter").rank
    2
    """
    maps = block_linears(model)
    family = _family(model)
    place = ModelFolder(store.surviving_folder(Path(folder).expanduser()))
    table, weights = place.json(CONFIG), place.file(WEIGHTS)
    if table is None or weights is None:
        missing = str(place.path / (CONFIG if table is None else WEIGHTS))
        raise StoreError(f"there is no {missing!r}; give the folder of an adapter, saved by PEFT as safetensors.")
    keys = ConfigReader(table, str(place.path / CONFIG))
    _check(keys)
    theirs: dict[str, dict[int, str]] = defaultdict(dict)
    parts: dict[str, int] = {}
    for ours in maps:
        piece = _piece(family, model, f"{ours}.weight")
        theirs[piece.name][piece.chunk] = ours
        parts[piece.name] = piece.n_chunks
    found: dict[str, LoRAWeights] = {}
    pairs = _pairs(store.read_tensors(weights), str(weights))
    for name, full in family.canonical_names(pairs).items():
        if full not in theirs:
            raise StoreError(f"{str(weights)!r} holds a LoRA of {name}, which is no map in the blocks of this model.")
        linear = maps[next(iter(theirs[full].values()))]
        thin = _thin(keys, name, pairs[name], linear.in_features, linear.out_features * parts[full], str(weights))
        found |= {theirs[full][part]: own for part, own in _split_fused(thin, parts[full]).items()}
    widest = max(found.values(), key=lambda thin: len(thin.down))
    targets = tuple(dict.fromkeys(ours.rpartition(".")[2] for ours in maps if ours in found))
    try:
        choice = LoRA(len(widest.down), widest.alpha, keys.get_typed("lora_dropout", 0.0), targets)
    except ConfigError as error:
        raise StoreError(f"{keys.source!r} describes no LoRA: {error}") from None
    attach(model, choice)
    _copy(found, lora_layers(model), choice)
    return choice


def _check(keys: ConfigReader) -> None:
    """Refuse whatever makes more, or other, of an adapter than plain LoRA."""
    keys.expect("peft_type", "LORA")
    keys.expect("bias", "none")
    # Others change the frozen matrices as well before training begins.
    keys.expect("init_lora_weights", True, False, "gaussian", "orthogonal", "eva")
    for name, value in keys.table.items():
        if value and name not in READ | IGNORED_KEYS:  # what is off or empty does nothing, known or not
            raise StoreError(f"{keys.source!r} has {name} = {value!r}, which is not supported; only plain LoRA is.")


def _pairs(tensors: Mapping[str, Tensor], source: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the two matrices of each module by its name in the transformers model."""
    pairs = {}
    for key in tensors:
        match = re.fullmatch(re.escape(KEY).replace(r"\{\}", "(.+)", 1).replace(r"\{\}", "[AB]"), key)
        if match is None:
            raise StoreError(f"{source!r} holds {key}, which is no LoRA of a linear map.")
        both = [KEY.format(match[1], end) for end in "AB"]
        for one in both:
            if one not in tensors:
                raise StoreError(f"{source!r} lacks {one}; fetch it again.")
            if not tensors[one].is_floating_point() or tensors[one].dim() != 2:
                raise StoreError(f"{source!r} holds {one}, but it must be a matrix of floating-point numbers.")
        pairs[match[1]] = (tensors[both[0]], tensors[both[1]])
    if not pairs:
        raise StoreError(f"{source!r} holds no LoRA; fetch it again.")
    return pairs


def _thin(
    keys: ConfigReader, name: str, pair: tuple[Tensor, Tensor], d_in: int, d_out: int, source: str
) -> LoRAWeights:
    """Return the thin map of a module, with its shapes checked."""
    down, up = pair
    rank = _pattern(keys, "rank_pattern", name, keys.get_int("r", 8))
    if down.shape != (rank, d_in) or up.shape != (d_out, rank):
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise StoreError(
            f"{source!r} holds a LoRA of {name} with shapes {shapes}, but the model and a rank of {rank} "
            f"ask for {[rank, d_in]} and {[d_out, rank]}."
        )
    alpha = _pattern(keys, "alpha_pattern", name, keys.get_typed("lora_alpha", 8.0))
    return LoRAWeights(down, up, alpha * math.sqrt(rank) if keys.get_typed("use_rslora", False) else alpha)


def _pattern(keys: ConfigReader, pattern: str, name: str, default: float) -> float:
    """Return the number that a pattern has for a module: the first whose key its name ends with."""
    given = keys.get(pattern) or {}
    if not isinstance(given, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in given):
        raise StoreError(
            f"{keys.source!r} has a {pattern} that is not a table of modules' names, which alone is supported."
        )
    end = next((key for key in given if _ends(name, key)), None)
    return default if end is None else ConfigReader(given, keys.source).get_typed(end, default)


def _split_fused(thin: LoRAWeights, parts: int) -> dict[int, LoRAWeights]:
    """Return the thin maps of the parts of a matrix: those that `_join` put together, or the whole map down for each.

    >>> whole = Thin(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]]), alpha=6.0)
    >>> for part, own in _split_fused(whole, 3).items():
    ...     print(part, own.down.tolist(), own.up.tolist(), own.alpha)
    0 [[1.0]] [[3.0]] 3.0
    2 [[2.0]] [[4.0]] 3.0
    """
    rows = thin.up.chunk(parts)
    used = [part for part in range(parts) if rows[part].any()]
    if used and len(thin.down) % len(used) == 0:
        rank = len(thin.down) // len(used)
        blocks = {part: slice(i * rank, (i + 1) * rank) for i, part in enumerate(used)}
        if all(_only(rows[part], block) for part, block in blocks.items()):
            alpha = thin.alpha / len(used)
            return {
                part: LoRAWeights(thin.down[block], rows[part][:, block], alpha) for part, block in blocks.items()
            }
    return {part: LoRAWeights(thin.down, rows[part], thin.alpha) for part in range(parts)}


def _only(up: Tensor, block: slice) -> bool:
    """Whether a map up reads nothing outside a block of its input."""
    return not up[:, : block.start].any() and not up[:, block.stop :].any()


@torch.no_grad()
def _copy(found: Mapping[str, LoRAWeights], layers: Mapping[str, LoRALinear], config: LoRA) -> None:
    """Fill the thin maps; one of lower rank than the widest leaves the rest as drawn, and zero on the way up."""
    for ours, thin in found.items():
        layer, rank = layers[ours], len(thin.down)
        layer.lora_a[:rank] = thin.down
        layer.lora_b[:, :rank] = thin.up.to(layer.lora_b) * (thin.scale / config.scale)


# Names ------------------------------------------------------------------------------------------------------


def _family(model: Model) -> Family:
    plain = build(model.spec, device="meta")
    family, _ = matching_family(model.spec, [name for name, _ in plain.named_parameters()])
    if family is None:
        raise ConfigError(
            "no published family can express this model, so PEFT has no names for its maps; keep the tensors of "
            "lora.adapter_state_dict(model) with store.write instead."
        )
    return family


def _piece(family: Family, model: Model, ours: str) -> TensorMapping:
    """Return where a tensor of ours is found, with the name of their module instead of the tensor's."""
    piece = family.tensor_mapping(ours, without_pooling(model.spec))
    assert piece is not None, f"{ours} has no name in its family's table"
    return piece._replace(name=piece.name.rpartition(".")[0])


def _bare(family: Family, model: Model, name: str) -> str:
    """Return the name of a module as transformers has it: without the prefix where the model has no head."""
    return name.removeprefix(family.prefix) if without_pooling(model.spec).head.kind == "none" else name
