"""A family of transformers models: its config.json and tensor names, mapped to specs and our names and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from glasshouse import config
from glasshouse.errors import ConfigError, StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.spec import Spec, parse

ConfigDict = dict[str, Any]

# Fields that affect training but not inference.
TRAINING_ONLY = ("init", "dropout", "attention_dropout", "embed_dropout")

PLAIN: ConfigDict = {
    "gelu": {"kind": "gelu", "tanh": False},
    "gelu_new": {"kind": "gelu", "tanh": True},
    "gelu_pytorch_tanh": {"kind": "gelu", "tanh": True},
    "gelu_fast": {"kind": "gelu", "tanh": True},
    "relu": {"kind": "relu"},
    "relu2": {"kind": "relu2"},
    "silu": {"kind": "silu"},
    "swish": {"kind": "silu"},
}
GATED: ConfigDict = {
    "silu": {"kind": "swiglu"},
    "swish": {"kind": "swiglu"},
    "gelu": {"kind": "geglu", "tanh": False},
    "gelu_pytorch_tanh": {"kind": "geglu", "tanh": True},
    "gelu_new": {"kind": "geglu", "tanh": True},
}


# The head of decoders that classify sequences: a linear layer on the vector of the last token.
LAST_TOKEN: ConfigDict = {"kind": "sequence_classification", "pooling": "last", "dense": False, "bias": False}

# A matrix of queries, keys and values: head by head, or all queries, then all keys and all values.
Fusion = Literal["each head", "in turn"]


class KeyMapping(NamedTuple):
    """One key of config.json and the equivalent field of a spec (with dots for nested fields)."""

    hf_key: str
    spec_field: str
    default: Any  # of transformers, if the key is absent
    values: ConfigDict | None = None  # value in config.json -> value in a spec


class TensorMapping(NamedTuple):
    """The Hugging Face tensor that one of ours is stored in, and how their shapes differ."""

    name: str
    transposed: bool = False  # stored as [in, out] instead of [out, in]
    row: bool = False  # stored as [1, n] instead of [n]
    chunk: int = 0  # index among
    shares: tuple[int, ...] = (1,)  # the chunks of a fused tensor, by their relative sizes
    fused: Fusion | None = None  # how the chunks follow from the spec
    n_groups: int = 1  # of rows, each with all chunks
    offset: float = 0.0  # ours minus theirs

    def shape(self, ours: Sequence[int]) -> list[int]:
        """Return the shape of the Hugging Face tensor, given that of ours."""
        shape = [self.whole(size) for size in ours[:1]] + [*ours[1:]]  # a scalar has none
        return shape[::-1] if self.transposed else [1, *shape] if self.row else shape

    def view(self, tensor: Tensor) -> Tensor:
        """Return our tensor, a view of the Hugging Face tensor unless that is fused head by head or has an offset."""
        tensor = tensor.flatten() if self.row else tensor
        tensor = tensor.T if self.transposed else tensor
        tensor = tensor + self.offset if self.offset else tensor
        return self.rows(tensor) if len(self.shares) > 1 else tensor

    def whole(self, size: int) -> int:
        """Return the number of rows of the fused tensor, given that of its chunk."""
        return size * sum(self.shares) // self.shares[self.chunk]

    def rows(self, fused: Tensor) -> Tensor:
        """Return the rows of the chunk."""
        groups = fused.unflatten(0, (self.n_groups, -1))
        share = groups.shape[1] // sum(self.shares)
        start = share * sum(self.shares[: self.chunk])
        return groups[:, start : start + share * self.shares[self.chunk]].flatten(0, 1)


def transposed(name: str, chunk: int = 0, n_chunks: int = 1) -> TensorMapping:
    """Return the mapping of a matrix stored as [in, out], or of one chunk of a fused matrix."""
    return TensorMapping(name, transposed=True, chunk=chunk, shares=(1,) * n_chunks)


def fused_qkv(name: str, how: Fusion) -> dict[str, TensorMapping]:
    """Return the mappings of the queries, keys and values of a block that are stored as one matrix."""
    return {
        f"stack.blocks.*.attention.layer.{part}": TensorMapping(name, chunk=chunk, shares=(1, 1, 1), fused=how)
        for chunk, part in enumerate(("query", "key", "value"))
    }


def fused_gate(name: str) -> dict[str, TensorMapping]:
    """Return the mappings of the gate and the projection up of a block that are stored as one matrix."""
    return {
        f"stack.blocks.*.feedforward.layer.{part}": TensorMapping(name, chunk=chunk, shares=(1, 1))
        for chunk, part in enumerate(("gate", "up"))
    }


def minus_one(name: str) -> TensorMapping:
    """Return the mapping of a norm that multiplies by 1 + its weight."""
    return TensorMapping(name, offset=1.0)


def as_row(name: str) -> TensorMapping:
    """Return the mapping of a vector stored as a matrix of one row."""
    return TensorMapping(name, row=True)


def join(chunks: Sequence[tuple[TensorMapping, Tensor]]) -> Tensor:
    """Join our tensors into the Hugging Face tensor that stores them: the inverse of `view`."""
    mapping, whole = chunks[0]
    whole = whole - mapping.offset if mapping.offset else whole
    if len(chunks) > 1:
        ordered = [tensor for _, tensor in sorted(chunks, key=lambda pair: pair[0].chunk)]
        groups = [tensor.unflatten(0, (mapping.n_groups, -1)) for tensor in ordered]
        whole = torch.cat(groups, 1).flatten(0, 1)
    return whole.T if mapping.transposed else whole[None] if mapping.row else whole


def no_adjustment(keys: ConfigReader, table: ConfigDict) -> None:
    """Leave the spec unchanged."""


def same_name(name: str, spec: Spec) -> str:
    """Return a name unchanged."""
    return name


def no_extra_keys(spec: Spec) -> ConfigDict:
    """Add nothing to the config."""
    return {}


@dataclass(frozen=True)
class Family:
    """The mappings of one model_type; `spec_from_config` and `config_from_spec` are inverses of each other."""

    model_type: str
    base: ConfigDict  # spec fields that all models of the family share
    key_mappings: tuple[KeyMapping, ...]
    heads: ConfigDict  # architecture -> head; the first is the default
    names: Mapping[str, TensorMapping | str]  # our module or tensor -> theirs; `*` is the index of a block
    prefix: str = ""  # of every name below the head; absent from models without a head
    tied_tensors: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # tensor -> other names it is saved under
    ignored_tensors: str = r"(?!)"  # tensors without effect, as a regular expression
    ignored_keys: Collection[str] = ()  # config keys without effect
    tied: bool | None = True  # the default of tie_word_embeddings; None: decided by the tensors
    adjust: Callable[[ConfigReader, ConfigDict], None] = no_adjustment  # what a key mapping cannot express
    extra: Callable[[Spec], ConfigDict] = no_extra_keys  # the inverse of `adjust`
    rename: Callable[[str, Spec], str] = same_name  # for tensor names that depend on the spec

    def find_duplicates(self, tensors: dict[str, Tensor]) -> set[str]:
        """Return the names of tensors that duplicate a tied one; a missing original is added from its duplicate."""
        duplicates = set()
        for name, others in self.tied_tensors.items():
            for other in others:
                if other not in tensors:
                    continue
                original, duplicate = tensors.setdefault(name, tensors[other]), tensors[other]
                if original.dtype == duplicate.dtype and original.equal(duplicate):
                    duplicates.add(other)
        return duplicates

    def spec_from_config(
        self,
        table: Mapping[str, Any],
        tensor_names: Collection[str],
        ignore: Collection[str] = (),
        source: str = "config.json",
    ) -> Spec:
        """Convert config.json to a spec; the stored tensors decide what it leaves open."""
        keys = ConfigReader(table, source, ignore)
        result: ConfigDict = deepcopy(self.base)
        for mapping in self.key_mappings:
            if mapping.values is None:
                _put(result, mapping.spec_field, keys.get_typed(mapping.hf_key, mapping.default))
            else:
                _put(result, mapping.spec_field, keys.get_choice(mapping.hf_key, mapping.default, mapping.values))
        for name in ("n_layers", "n_encoder_layers"):
            if result.get(name, 0) > len(tensor_names):  # before allocating anything per layer
                raise StoreError(
                    f"{source!r} has {result[name]} layers, but the files contain {len(tensor_names)} tensors."
                )
        result["head"] = self._read_head(keys, tensor_names)
        self._read_ids(keys, result)
        self.adjust(keys, result)
        keys.reject_unused(self.ignored_keys)
        return parse(result)

    def _read_head(self, keys: ConfigReader, tensor_names: Collection[str]) -> ConfigDict:
        architectures = keys.get("architectures") or list(self.heads)[:1]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(architecture, str) or architecture not in self.heads:
            known = ", ".join(self.heads)
            raise StoreError(
                f"{keys.source!r} has the architecture {architecture!r}, which is not supported; {known} are."
            )
        head = dict(self.heads[architecture])
        tied = self.tied is None or keys.get_typed("tie_word_embeddings", self.tied)
        if head["kind"] in ("next_token", "masked_token"):
            # As transformers does: a stored matrix for the head overrides the config.
            head["tied"] = tied and self._hf_name("head.weight") not in tensor_names
            head["bias"] = self._hf_name("head.bias") in tensor_names
        elif head["kind"] in ("sequence_classification", "token_classification"):
            names, count = keys.get("id2label"), keys.get_int("num_labels", 2)
            head |= _labels(keys.source, names) if names else {"n_labels": count}
        return head

    def _read_ids(self, keys: ConfigReader, table: ConfigDict) -> None:
        start = "decoder_start_token_id" if table["kind"] == "seq2seq" else "bos_token_id"
        size = table["vocab_size"]
        table["start_id"] = next(iter(_ids(keys, start, size)), None)
        table["pad_id"] = next(iter(_ids(keys, "pad_token_id", size)), None)
        table["end_ids"] = _ids(keys, "eos_token_id", size)

    def config_from_spec(self, spec: Spec) -> ConfigDict:
        """Convert a spec to config.json; fields that it cannot express are listed by `unsupported_fields`."""
        table = config.dump(spec)
        result: ConfigDict = {"architectures": [self._architecture(table["head"])], "model_type": self.model_type}
        for mapping in self.key_mappings:
            value = _get(table, mapping.spec_field)
            if mapping.values is not None:
                value = next((word for word, meant in mapping.values.items() if meant == value), mapping.default)
            result[mapping.hf_key] = mapping.default if value is None else value
        if "tied" in table["head"]:
            result["tie_word_embeddings"] = table["head"]["tied"]
        if labels := table["head"].get("n_labels"):
            names = table["head"]["labels"] or [f"LABEL_{i}" for i in range(labels)]
            result["id2label"] = {str(i): name for i, name in enumerate(names)}
            result["label2id"] = {name: i for i, name in enumerate(names)}
        result["is_encoder_decoder"] = spec.kind == "seq2seq"
        result |= special_ids(spec)
        return result | self.extra(spec)

    def _architecture(self, head: ConfigDict) -> str:
        fits = (name for name, needs in self.heads.items() if needs.items() <= head.items())
        return next(fits, next(iter(self.heads)))

    def unsupported_fields(self, spec: Spec, tensor_names: Collection[str]) -> list[str]:
        """List the fields of a spec that this family cannot express: those that do not survive a round trip."""
        if spec.kind != self.base["kind"]:
            return ["kind"]
        try:
            back = self.spec_from_config(self.config_from_spec(spec), tensor_names)
        except ConfigError as error:  # a size that the family's base rules out; messages begin with the field
            return [str(error).split()[0]]
        return differing_fields(spec, back)

    def tensor_mapping(self, ours: str, spec: Spec) -> TensorMapping | None:
        """Return the mapping of our tensor, or None if the family has no such tensor."""
        mapping = find_mapping(self.names, ours)
        if mapping is None:
            return None
        match mapping.fused:
            case "each head":
                mapping = mapping._replace(n_groups=spec.n_heads)
            case "in turn":
                mapping = mapping._replace(shares=(spec.n_heads, spec.n_kv_heads, spec.n_kv_heads))
        return mapping._replace(name=self.rename(mapping.name, spec))

    def _hf_name(self, ours: str) -> str | None:
        mapping = find_mapping(self.names, ours)
        return None if mapping is None else mapping.name

    def canonical_names(self, names: Collection[str]) -> dict[str, str]:
        """Return the name that each tensor has in a current checkpoint of a model with a head."""
        modern = {name: re.sub(r"LayerNorm\.(gamma|beta)$", _modern_norm, name) for name in names}
        if any(name.startswith(self.prefix) for name in names):
            return modern
        named = (found if isinstance(found, str) else found.name for found in self.names.values())
        heads = {name.partition(".")[0] for name in named if not name.startswith(self.prefix)}
        return {
            name: full if full.partition(".")[0] in heads else self.prefix + full for name, full in modern.items()
        }


def find_mapping(names: Mapping[str, TensorMapping | str], ours: str) -> TensorMapping | None:
    """Return where our tensor is stored, from names of modules or tensors in which `*` is the index of a block.

    >>> find_mapping({"stack.blocks.*.attention.norm": "h.*.ln_1"}, "stack.blocks.3.attention.norm.weight").name
    'h.3.ln_1.weight'
    """
    block = re.search(r"(?<=blocks\.)\d+", ours)
    general = ours if block is None else f"{ours[: block.start()]}*{ours[block.end() :]}"
    module, _, end = general.rpartition(".")
    found = names.get(general)
    if found is None:
        found, end = names.get(module), f".{end}"
    else:
        end = ""
    if found is None:
        return None
    mapping = TensorMapping(found) if isinstance(found, str) else found
    number = "" if block is None else block.group()
    name = mapping.name.replace("*", number) + end
    return mapping._replace(name=name, transposed=mapping.transposed and end == ".weight")


def _modern_norm(match: re.Match[str]) -> str:
    return {"gamma": "LayerNorm.weight", "beta": "LayerNorm.bias"}[match.group(1)]


def differing_fields(spec: Spec, other: Spec) -> list[str]:
    """List the fields in which two specs differ, except those that affect training only."""
    if spec.kind != other.kind:
        return ["kind"]
    other = replace(other, **{name: getattr(spec, name) for name in TRAINING_ONLY})
    return [f.name for f in fields(spec) if getattr(spec, f.name) != getattr(other, f.name)]


def special_ids(spec: Spec) -> ConfigDict:
    """Return the special token ids of a spec under the keys of config.json and generation_config.json."""
    ends = list(spec.end_ids)
    start = "decoder_start_token_id" if spec.kind == "seq2seq" else "bos_token_id"
    return {
        start: spec.start_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": spec.pad_id,
    }


def _ids(keys: ConfigReader, name: str, size: int) -> list[int]:
    """Read one id or several; ids outside the vocabulary are unused defaults, and dropped."""
    value = keys.get(name)
    given = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    if not all(type(i) is int for i in given):
        raise StoreError(f"{keys.source!r} has {name} = {value!r}, but it must be a token id.")
    return [i for i in given if 0 <= i < size]


def _labels(source: str, names: object) -> ConfigDict:
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise StoreError(f"{source!r} has an id2label that does not map ids to names; correct it.")
    ordered = [names.get(str(i)) for i in range(len(names))]
    if None in ordered:
        raise StoreError(f"{source!r} has an id2label that lacks some of the ids 0 to {len(names) - 1}; correct it.")
    plain = ordered == [f"LABEL_{i}" for i in range(len(names))]
    return {"n_labels": len(names), "labels": [] if plain else ordered}


def _put(table: ConfigDict, path: str, value: object) -> None:
    *outer, last = path.split(".")
    for name in outer:
        table = table[name]
    table[last] = value


def _get(table: ConfigDict, path: str) -> Any:  # noqa: ANN401 - plain values of any type
    value: Any = table
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def tensor_mapping(family: Family | None, name: str, s: Spec) -> TensorMapping:
    """Return where a tensor of ours is stored in a family; in the native format (None) under its own name.

    >>> from glasshouse.spec import preset
    >>> tensor_mapping(None, "head.bias", preset("tiny-decoder")).name
    'head.bias'
    """
    mapping = TensorMapping(name) if family is None else family.tensor_mapping(name, s)
    assert mapping is not None, f"{name} has no tensor mapping in its family"
    return mapping
