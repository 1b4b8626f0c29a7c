"""What a family of published models is: a two-way table between its config.json and a spec, its tensors and ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glasshouse import config
from glasshouse.errors import ConfigError, StoreError
from glasshouse.hub.config_reader import ConfigReader
from glasshouse.spec import Spec, parse

ConfigDict = dict[str, Any]

# Fields that shape how a model is trained and no number of a forward pass.
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


class KeyMapping(NamedTuple):
    """One key of config.json and the field of a spec (dots reach into a choice) that says the same."""

    hf_key: str
    spec_field: str
    default: Any  # what transformers takes where the key is absent
    values: ConfigDict | None = None  # their word -> what a spec says instead


class TensorMapping(NamedTuple):
    """Where one of our tensors is found: under this name, as it is or changed in shape."""

    name: str
    transposed: bool = False  # kept as [in, out] instead of [out, in]
    row: bool = False  # kept as [1, n] instead of [n]
    chunk: int = 0  # which of
    n_chunks: int = 1  # as many equal parts, side by side, that share the name

    def shape(self, ours: Sequence[int]) -> list[int]:
        """Return the shape of their tensor, given that of ours."""
        shape = [ours[0] * self.n_chunks, *ours[1:]]
        return shape[::-1] if self.transposed else [1, *shape] if self.row else shape

    def view(self, tensor: Tensor) -> Tensor:
        """Return our tensor as a view of theirs, so that nothing is copied."""
        tensor = tensor.flatten() if self.row else tensor
        return (tensor.T if self.transposed else tensor).chunk(self.n_chunks)[self.chunk]


def transposed(name: str, part: int = 0, parts: int = 1) -> TensorMapping:
    """Name a matrix that is kept as [in, out], or one of several that are kept as one."""
    return TensorMapping(name, transposed=True, chunk=part, n_chunks=parts)


def as_row(name: str) -> TensorMapping:
    """Name a vector that is kept as a matrix of one row."""
    return TensorMapping(name, row=True)


def join(pieces: Sequence[tuple[TensorMapping, Tensor]]) -> Tensor:
    """Undo `view`: make their tensor from ours that share its name."""
    piece, whole = pieces[0]
    if len(pieces) > 1:
        whole = torch.cat([tensor for _, tensor in sorted(pieces, key=lambda pair: pair[0].chunk)])
    return whole.T if piece.transposed else whole[None] if piece.row else whole


def nothing(keys: ConfigReader, table: ConfigDict) -> None:
    """Leave the table as it is."""


def the_same(name: str, spec: Spec) -> str:
    """Leave a name as it is."""
    return name


def nothing_more(spec: Spec) -> ConfigDict:
    """Add nothing to the config."""
    return {}


@dataclass(frozen=True)
class Family:
    """The tables of one model_type. `read` and `write` are each other's inverse over what both sides can say."""

    model_type: str
    base: ConfigDict  # what all models of the family share
    key_mappings: tuple[KeyMapping, ...]
    heads: ConfigDict  # architecture -> head; the first is taken where config.json names none
    names: Mapping[str, TensorMapping | str]  # our module or tensor -> theirs; `*` is the number of a block
    prefix: str = ""  # before every name below the head; left out where a model has no head
    tied_tensors: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # one tensor, saved under other names as well
    ignored_tensors: str = r"(?!)"  # tensors that no forward pass reads, as a regular expression
    ignored_keys: Collection[str] = ()
    tied: bool | None = True  # whether the head is the token table where config.json does not say; None: as files do
    adjust: Callable[[ConfigReader, ConfigDict], None] = nothing  # what a row cannot say, config -> spec
    extra: Callable[[Spec], ConfigDict] = nothing_more  # and spec -> config
    rename: Callable[[str, Spec], str] = the_same  # their names, where they depend on a choice

    def spec_from_config(
        self,
        table: Mapping[str, Any],
        held: Collection[str],
        ignore: Collection[str] = (),
        source: str = "config.json",
    ) -> Spec:
        """Turn config.json into a spec; where it leaves a choice open, the tensors held decide."""
        keys = ConfigReader(table, source, ignore)
        result: ConfigDict = deepcopy(self.base)
        for row in self.key_mappings:
            if row.values is None:
                _put(result, row.spec_field, keys.get_typed(row.hf_key, row.default))
            else:
                _put(result, row.spec_field, keys.get_choice(row.hf_key, row.default, row.values))
        for name in ("n_layers", "n_encoder_layers"):
            if result.get(name, 0) > len(held):  # ahead of anything that grows with it
                raise StoreError(
                    f"{source!r} asks for {result[name]} layers, but the files hold {len(held)} tensors."
                )
        result["head"] = self._read_head(keys, held)
        self._read_ids(keys, result)
        self.adjust(keys, result)
        keys.reject_unused(self.ignored_keys)
        return parse(result)

    def _read_head(self, keys: ConfigReader, held: Collection[str]) -> ConfigDict:
        architectures = keys.get("architectures") or list(self.heads)[:1]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(architecture, str) or architecture not in self.heads:
            known = ", ".join(self.heads)
            raise StoreError(
                f"{keys.source!r} names the architecture {architecture!r}, but only {known} can be read."
            )
        head = dict(self.heads[architecture])
        said = self.tied is None or keys.get_typed("tie_word_embeddings", self.tied)
        if head["kind"] in ("next_token", "masked_token"):
            # As transformers does: a file with a matrix of its own for the head overrules what the config says.
            head["tied"] = said and self._their("head.weight") not in held
            head["bias"] = self._their("head.bias") in held
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
        """Turn a spec into config.json, as far as it can be said there; `obstacles` tells how far that is."""
        table = config.dump(spec)
        result: ConfigDict = {"architectures": [self._architecture(table["head"])], "model_type": self.model_type}
        for row in self.key_mappings:
            value = _get(table, row.spec_field)
            if row.values is not None:
                value = next((word for word, meant in row.values.items() if meant == value), row.default)
            result[row.hf_key] = row.default if value is None else value
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

    def unsupported_fields(self, spec: Spec, held: Collection[str]) -> list[str]:
        """List the fields of a spec that this family cannot express: those that do not come back."""
        if spec.kind != self.base["kind"]:
            return ["kind"]
        try:
            back = self.spec_from_config(self.config_from_spec(spec), held)
        except ConfigError as error:  # a size that the family's fixed choices rule out; the field comes first
            return [str(error).split()[0]]
        return differing_fields(spec, back)

    def tensor_mapping(self, ours: str, spec: Spec) -> TensorMapping | None:
        """Return where our tensor is found, or None where the family has no such thing."""
        piece = self._find(ours)
        return None if piece is None else piece._replace(name=self.rename(piece.name, spec))

    def _find(self, ours: str) -> TensorMapping | None:
        block = re.search(r"(?<=blocks\.)\d+", ours)
        general = ours if block is None else f"{ours[: block.start()]}*{ours[block.end() :]}"
        module, _, end = general.rpartition(".")
        found = self.names.get(general)
        if found is None:
            found, end = self.names.get(module), f".{end}"
        else:
            end = ""
        if found is None:
            return None
        piece = TensorMapping(found) if isinstance(found, str) else found
        number = "" if block is None else block.group()
        name = piece.name.replace("*", number) + end
        return piece._replace(name=name, transposed=piece.transposed and end == ".weight")

    def _their(self, ours: str) -> str | None:
        piece = self._find(ours)
        return None if piece is None else piece.name

    def canonical_names(self, names: Collection[str]) -> dict[str, str]:
        """Return the name each tensor would have in the newest file of a model with a head."""
        modern = {name: re.sub(r"LayerNorm\.(gamma|beta)$", _modern_norm, name) for name in names}
        if any(name.startswith(self.prefix) for name in names):
            return modern
        named = (found if isinstance(found, str) else found.name for found in self.names.values())
        heads = {name.partition(".")[0] for name in named if not name.startswith(self.prefix)}
        return {
            name: full if full.partition(".")[0] in heads else self.prefix + full for name, full in modern.items()
        }


def _modern_norm(match: re.Match[str]) -> str:
    return {"gamma": "LayerNorm.weight", "beta": "LayerNorm.bias"}[match.group(1)]


def differing_fields(spec: Spec, other: Spec) -> list[str]:
    """List the fields in which two specs differ and that a forward pass depends on."""
    if spec.kind != other.kind:
        return ["kind"]
    other = replace(other, **{name: getattr(spec, name) for name in TRAINING_ONLY})
    return [f.name for f in fields(spec) if getattr(spec, f.name) != getattr(other, f.name)]


def special_ids(spec: Spec) -> ConfigDict:
    """Return the special tokens of a spec in the words of config.json and generation_config.json."""
    ends = list(spec.end_ids)
    start = "decoder_start_token_id" if spec.kind == "seq2seq" else "bos_token_id"
    return {
        start: spec.start_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": spec.pad_id,
    }


def _ids(keys: ConfigReader, name: str, size: int) -> list[int]:
    """Read one id or several; those beyond the vocabulary are defaults that a small model never met."""
    value = keys.get(name)
    given = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
    if not all(type(i) is int for i in given):
        raise StoreError(f"{keys.source!r} has {name} = {value!r}, but it must be the number of a token.")
    return [i for i in given if 0 <= i < size]


def _labels(source: str, names: object) -> ConfigDict:
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise StoreError(f"{source!r} has an id2label that is not a table of numbers to names; correct it.")
    ordered = [names.get(str(i)) for i in range(len(names))]
    if None in ordered:
        raise StoreError(f"{source!r} has an id2label without some of 0 to {len(names) - 1}; correct it.")
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
