"""Models in and out of folders: published ones as they are, ours in the same form wherever a family can say it."""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse import config, spec, store
from glasshouse import device as machine
from glasshouse.errors import ConfigError, InputError, StoreError
from glasshouse.hub import config_reader
from glasshouse.hub.bart import BART, MARIAN
from glasshouse.hub.bert import BERT, DISTILBERT, ROBERTA
from glasshouse.hub.family import Family, TensorMapping, differing_fields, join, special_ids
from glasshouse.hub.gpt2 import GPT2
from glasshouse.hub.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from glasshouse.hub.model_folder import (
    CONFIG,
    EXTRA_FILES,
    GENERATION_CONFIG,
    OTHER_TOKENIZERS,
    TOKENIZER,
    TOKENIZER_FILES,
    ModelFolder,
    write_json,
    write_weights,
)
from glasshouse.hub.pooling import read_pooling, without_pooling, write_pooling
from glasshouse.hub.remote import resolve_folder
from glasshouse.hub.t5 import T5
from glasshouse.hub.verified import describe
from glasshouse.layers.lora import lora_layers
from glasshouse.models import Model, build, check_tokenizer, checked_parameters
from glasshouse.text import Tokenizer

FAMILIES = {
    family.model_type: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, BERT, ROBERTA, DISTILBERT, T5, BART, MARIAN)
}
NATIVE = "glasshouse"  # the model_type of a folder that no family can express
FORMAT = 2
MODEL_FILES = (
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|"
    r"added_tokens\.json|vocab\.(json|txt)|merges\.txt|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|verified\.json|"
    r"chat_template\.jinja|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json|1_Pooling"
)


def load(
    path_or_repo_id: str | Path,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    ignore: Collection[str] = (),
) -> tuple[Model, Tokenizer | None]:
    """Load a model, in eval mode, and its tokenizer (None where there is none) from a folder, a run or the hub.

    Of a run's folder the finished model is taken, or its newest intact checkpoint, with a warning.

    Weights are mapped into memory and read when first used. They keep the type they are stored in, except that on the
    CPU half precision becomes float32, which is many times faster there; `dtype` is another, as torch.bfloat16 or
    "bfloat16", or "stored". Keys of config.json listed in `ignore` are taken to change nothing.

    >>> import tempfile, glasshouse as gh
    >>> with tempfile.TemporaryDirectory() as place:
    ...     gh.save(gh.build(gh.preset("tiny-decoder")), None, f"{place}/model")
    ...     model, tok = gh.load(f"{place}/model")
    >>> model.spec == gh.preset("tiny-decoder"), tok
    (True, None)
    """
    target = machine.resolve(torch.get_default_device() if device is None else device)
    if dtype not in (None, "stored"):
        dtype = machine.parse_dtype(dtype)
    folder = resolve_folder(path_or_repo_id, revision)
    table = folder.json(CONFIG)
    if table is None:
        raise StoreError(f"there is no {str(folder.path / CONFIG)!r}; give the folder of a model or of a run.")
    tensors = folder.tensors()
    try:
        family, s, spare = _read_config(folder, table, tensors, ignore)
    except ConfigError as error:
        raise StoreError(f"{str(folder.path / CONFIG)!r} describes no model: {error}") from None
    s = _with_generation_ids(s, folder)
    model = _load_weights(folder, s, family, tensors, spare, target, dtype)
    model.extra_files = {name: folder.values(name) for name in EXTRA_FILES if folder.file(name)}
    if formerly := {key: table[key] for key in sorted(config_reader.GENERATION_KEYS & table.keys())}:
        model.extra_files.setdefault(GENERATION_CONFIG, formerly)
    tok = _load_tokenizer(folder)
    model.tokenizer_fingerprint = _own(table).get("tokenizer_fingerprint")
    if tok is not None:
        check_tokenizer(model, tok, repr(str(folder.path / TOKENIZER)))
        model.tokenizer_fingerprint = tok.fingerprint
    if verified := describe(folder):
        print(f"{folder.path}: {verified}", file=sys.stderr)
    return model.eval(), tok


def _read_config(
    folder: ModelFolder, table: Mapping[str, Any], tensors: dict[str, Tensor], ignore: Collection[str]
) -> tuple[Family | None, spec.Spec, set[str]]:
    """Return the family (None: our own layout), the spec, and which tensors repeat others; names become full."""
    source = str(folder.path / CONFIG)
    kind = table.get("model_type")
    if kind == NATIVE:
        config_reader.ConfigReader(table, source, ignore).reject_unused(inert=())
        return None, _own_spec(table, source), set()
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise StoreError(f"{source!r} has model_type = {kind!r}, but only {', '.join(FAMILIES)} can be read.")
    family = FAMILIES[kind]
    full_names = family.canonical_names(tensors)
    if twice := sorted(full for name, full in full_names.items() if full != name and full in tensors):
        raise StoreError(f"{folder.weights!r} holds {twice[0]} under two names; fetch it again.")
    for name, full in full_names.items():
        tensors[full] = tensors.pop(name)
    spare = _find_copies(family, tensors)
    s = read_pooling(folder, family.spec_from_config(table, tensors.keys() - spare, ignore, source))
    if NATIVE in table:  # the spec we wrote beside, which knows about training too
        own = _own_spec(table, source)
        if names := differing_fields(own, s):
            raise StoreError(
                f"{source!r} says one thing for itself and another under {NATIVE!r} (in {', '.join(names)}); "
                f"remove {NATIVE!r} if the rest was edited on purpose."
            )
        return family, own, spare
    return family, s, spare


def _own_spec(table: Mapping[str, Any], source: str) -> spec.Spec:
    own = _own(table)
    if "spec" not in own:
        raise StoreError(f"{source!r} holds no spec under {NATIVE!r}; write the folder again.")
    if own.get("format") != FORMAT:
        raise StoreError(
            f"{source!r} is of format {own.get('format')!r}, but this version reads format {FORMAT}; "
            "use the version of glasshouse that wrote it."
        )
    return spec.parse(own["spec"])


def _own(table: Mapping[str, Any]) -> dict[str, Any]:
    own = table.get(NATIVE)
    return own if isinstance(own, dict) else {}


def _with_generation_ids(s: spec.Spec, folder: ModelFolder) -> spec.Spec:
    """Take the end tokens from generation_config.json, which chat models keep up to date instead of config.json."""
    given = (folder.json(GENERATION_CONFIG) or {}).get("eos_token_id")
    if given is None:
        return s
    ends = given if isinstance(given, list) else [given]
    if not all(type(i) is int for i in ends):
        raise StoreError(
            f"{str(folder.path / GENERATION_CONFIG)!r} has eos_token_id = {given!r}, but it must be numbers of tokens."
        )
    if not all(0 <= i < s.vocab_size for i in ends):
        return s
    return replace(s, end_ids=tuple(ends))


def _find_copies(family: Family, tensors: dict[str, Tensor]) -> set[str]:
    """Return the names of tensors that repeat another; a missing original gets its copy's values."""
    spare = set()
    for name, others in family.tied_tensors.items():
        for other in others:
            if other not in tensors:
                continue
            one, two = tensors.setdefault(name, tensors[other]), tensors[other]
            if one.dtype == two.dtype and one.equal(two):
                spare.add(other)
    return spare


def _load_weights(
    folder: ModelFolder,
    s: spec.Spec,
    family: Family | None,
    tensors: Mapping[str, Tensor],
    spare: set[str],
    device: torch.device,
    dtype: torch.dtype | str | None,
) -> Model:
    place = folder.weights
    held = sum(tensor.numel() for tensor in tensors.values())
    if (needed := spec.count_parameters(s)) > held:  # ahead of building anything
        raise StoreError(f"{place!r} describes a model of {needed:,} parameters, but holds {held:,}; fetch it again.")
    if max(s.n_layers, getattr(s, "n_encoder_layers", 0)) > len(tensors):
        raise StoreError(f"{place!r} holds {len(tensors)} tensors, but its config asks for {s.n_layers} layers.")
    model = build(s, device="meta")
    pieces = {name: _piece(family, name, s) for name, _ in model.named_parameters()}
    wanted = {piece.name for piece in pieces.values()}
    if missing := sorted(wanted - tensors.keys()):
        raise StoreError(f"{place!r} lacks the tensor {missing[0]} ({len(missing)} missing in all); fetch it again.")
    unused = family.ignored_tensors if family else r"(?!)"
    extra = sorted(n for n in tensors.keys() - wanted - spare if not re.fullmatch(unused, n))
    if extra:
        raise StoreError(f"{place!r} holds {extra[0]}, which the model of its config does not have.")
    for name in sorted(wanted):
        if tensors[name].dtype not in machine.FLOATS:
            raise StoreError(f"{place!r} holds {name} as {tensors[name].dtype}; quantised weights are not supported.")
    if not isinstance(dtype, torch.dtype):
        stored = tensors[pieces["token_embedding.table.weight"].name].dtype
        slow = device.type == "cpu" and stored in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if slow and dtype is None else stored
    for ours, weight in model.named_parameters():
        name, shape = pieces[ours].name, pieces[ours].shape(weight.shape)
        if list(tensors[name].shape) != shape:
            raise StoreError(
                f"{place!r} holds {name} with shape {list(tensors[name].shape)}, but its config asks for {shape}."
            )
    # On the CPU and in the type that is stored, nothing is copied: the file stays mapped until it is used.
    moved = {name: tensors[name].to(device, dtype) for name in wanted}
    state = {ours: piece.view(moved[piece.name]) for ours, piece in pieces.items()}
    if device.type != "cpu":  # where sharding and fused optimizers want them so
        state = {ours: tensor.contiguous() for ours, tensor in state.items()}
    model.load_state_dict(state, assign=True)
    return model


def _piece(family: Family | None, name: str, s: spec.Spec) -> TensorMapping:
    piece = TensorMapping(name) if family is None else family.tensor_mapping(name, s)
    assert piece is not None, f"{name} has no name in its family's table"
    return piece


def _load_tokenizer(folder: ModelFolder) -> Tokenizer | None:
    files = [folder.file(name) for name in TOKENIZER_FILES]
    if files[0] is not None:
        return Tokenizer.load(folder.path)
    for name in OTHER_TOKENIZERS:
        if folder.file(name):
            message = (
                f"{str(folder.path)!r} has {name} but no {TOKENIZER}, so it loads without a tokenizer; make one with "
                "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
            warnings.warn(message, stacklevel=3)
            break
    return None


def save(model: Model, tok: Tokenizer | None, folder: str | Path) -> None:
    """Write a model and its tokenizer as a folder, whole or not at all.

    Where a published family can express the spec, transformers loads the folder as it is; otherwise it is of our own
    layout, which `load` reads. A folder saved before is replaced; one that holds anything else is left alone. A model
    whose modules are no longer those of its spec is refused: it would load as another model, or not at all.

    >>> import tempfile, glasshouse as gh
    >>> with tempfile.TemporaryDirectory() as place:
    ...     gh.save(gh.build(gh.preset("tiny-encoder")), None, f"{place}/model")
    ...     sorted(path.name for path in Path(place, "model").iterdir())
    ['config.json', 'model.safetensors']
    """
    store.replace_folder(Path(folder).expanduser(), folder_writer(model, tok), MODEL_FILES)


def folder_writer(model: Model, tok: Tokenizer | None) -> Callable[[Path], None]:
    """Return what writes a model and its tokenizer into a new folder, for one that will hold more than that."""
    weights = _weights(model)
    return _filler(model, tok, weights, matching_family(model.spec, weights)[0])


def export(model: Model, tok: Tokenizer | None, folder: str | Path) -> str:
    """Write a folder that transformers loads, and return its model_type; or say which field stands in the way."""
    weights = _weights(model)
    family, obstacles = matching_family(model.spec, weights)
    if family is None:
        nearest = min(obstacles, key=lambda name: (obstacles[name] == ["kind"], len(obstacles[name])))
        raise ConfigError(
            f"no published family can express this model; the nearest is {nearest}, where "
            f"{', '.join(obstacles[nearest])} would have to be different."
        )
    store.replace_folder(Path(folder).expanduser(), _filler(model, tok, weights, family), MODEL_FILES)
    return family.model_type


def matching_family(s: spec.Spec, weights: Iterable[str]) -> tuple[Family | None, dict[str, list[str]]]:
    """Return the first family that can express these weights, and what stood in the way of those before."""
    s = without_pooling(s)
    obstacles = {}
    for name, family in FAMILIES.items():
        found = [family.tensor_mapping(ours, s) for ours in weights]
        held = {piece.name for piece in found if piece is not None}
        obstacles[name] = family.unsupported_fields(s, held)
        if not obstacles[name] and None not in found:
            return family, obstacles
    return None, obstacles


def _weights(model: Model) -> dict[str, nn.Parameter]:
    """Return the weights to be saved, if `load` will be able to read them."""
    if lora_layers(model):
        raise InputError("the model has LoRA attached; fold it in by lora.merge, or write it by hub.save_adapter.")
    weights = checked_parameters(model)
    for name, weight in weights.items():
        if weight.is_meta:
            raise InputError(f"{name} is on the device 'meta' and has no values; build the model on another.")
        if weight.dtype not in machine.FLOATS:
            raise InputError(
                f"{name} is {weight.dtype}, which cannot be saved; convert the model, as by model.float()."
            )
    return weights


def _filler(
    model: Model, tok: Tokenizer | None, weights: Mapping[str, Tensor], family: Family | None
) -> Callable[[Path], None]:
    if tok is not None:
        check_tokenizer(model, tok)
    fingerprint = model.tokenizer_fingerprint if tok is None else tok.fingerprint
    s = without_pooling(model.spec)
    table = {"model_type": NATIVE} if family is None else family.config_from_spec(s)
    dtype = str(model.token_embedding.table.weight.dtype).removeprefix("torch.")
    own = {"format": FORMAT, "spec": config.dump(model.spec)} | ({"tokenizer_fingerprint": fingerprint} if fingerprint else {})
    table |= {"dtype": dtype, NATIVE: own}
    bare = family is not None and s.head.kind == "none"
    shared: dict[str, list[tuple[TensorMapping, Tensor]]] = defaultdict(list)
    for ours, weight in weights.items():
        piece = _piece(family, ours, s)
        name = piece.name.removeprefix(family.prefix) if family and bare else piece.name
        shared[name].append((piece, weight.detach()))
    tensors = {name: join(pieces) for name, pieces in shared.items()}

    def fill(place: Path) -> None:
        write_json(place / CONFIG, table)
        write_weights(place, tensors)
        if family is not None:
            write_pooling(place, model.spec)
        for name, values in model.extra_files.items():
            write_json(place / name, values)
        if s.kind != "encoder":
            ids = {name: value for name, value in special_ids(s).items() if value is not None}
            write_json(place / GENERATION_CONFIG, model.extra_files.get(GENERATION_CONFIG, {}) | ids)
        if tok is not None:
            tok.save(place)

    return fill
