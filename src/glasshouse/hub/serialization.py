"""Load and save model folders, in the format of transformers where a family can express the spec."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from glasshouse import config, registry, spec, store
from glasshouse import device as machine
from glasshouse.errors import ConfigError, InputError, StoreError
from glasshouse.hub.families import config_reader
from glasshouse.hub.families.bart import BART, MARIAN
from glasshouse.hub.families.bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from glasshouse.hub.families.family import Family, TensorMapping, differing_fields, join, special_ids, tensor_mapping
from glasshouse.hub.families.gemma2 import GEMMA2
from glasshouse.hub.families.gemma3 import GEMMA3
from glasshouse.hub.families.gpt2 import GPT2
from glasshouse.hub.families.gpt_neox import GPT_NEOX
from glasshouse.hub.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from glasshouse.hub.families.modernbert import MODERNBERT
from glasshouse.hub.families.olmo2 import OLMO2
from glasshouse.hub.families.phi3 import PHI3
from glasshouse.hub.families.t5 import T5
from glasshouse.hub.gguf.export import GgufType, write_gguf
from glasshouse.hub.model_files import check_weights, describe, with_checksums
from glasshouse.hub.model_folder import (
    CONFIG,
    EXTRA_FILES,
    TOKENIZER,
    ModelFolder,
    write_json,
    write_weights,
)
from glasshouse.hub.onnx import write_onnx
from glasshouse.hub.pooling import read_pooling, without_pooling, write_pooling
from glasshouse.hub.remote import resolve_folder
from glasshouse.hub.weight_loading import load_weights
from glasshouse.layers.lora import lora_layers
from glasshouse.models import Decoder, Model, Seq2Seq, check_tokenizer, checked_weights
from glasshouse.models.generation_config import FILE as GENERATION_CONFIG
from glasshouse.models.generation_config import with_end_ids
from glasshouse.models.surgery import with_draft_heads
from glasshouse.text import Tokenizer

FAMILIES = {
    family.model_type: family
    for family in (
        *(GPT2, GPT_NEOX, LLAMA, MISTRAL, GEMMA2, GEMMA3, OLMO2, PHI3, QWEN2, QWEN3),
        *(BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MODERNBERT, T5, BART, MARIAN),
    )
}
ReadWeight = Callable[[str], Tensor]  # a weight by its name
Device = torch.device | str | None
Dtype = torch.dtype | str | None
NATIVE = "glasshouse"  # the model_type of specs that no family can express
FORMAT = 2
MODEL_FILES = (
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|"
    r"added_tokens\.json|vocab\.(json|txt)|merges\.txt|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|verified\.json|"
    r"checksums\.json|(tokenizer|spiece|sentencepiece\.bpe)\.model|"
    r"chat_template\.jinja|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json|1_Pooling"
)


@overload  # the models that come with the package
def load(
    path_or_repo_id: Literal["python-3m"], *, device: Device = ..., dtype: Dtype = ..., check: bool = ...
) -> tuple[Decoder, Tokenizer]: ...
@overload
def load(
    path_or_repo_id: Literal["dates-1m"], *, device: Device = ..., dtype: Dtype = ..., check: bool = ...
) -> tuple[Seq2Seq, Tokenizer]: ...
@overload
def load(
    path_or_repo_id: str | Path,
    *,
    revision: str | None = ...,
    device: Device = ...,
    dtype: Dtype = ...,
    ignore: Collection[str] = ...,
    check: bool = ...,
) -> tuple[Model, Tokenizer | None]: ...
def load(
    path_or_repo_id: str | Path,
    *,
    revision: str | None = None,
    device: Device = None,
    dtype: Dtype = None,
    ignore: Collection[str] = (),
    check: bool = True,
) -> tuple[Model, Tokenizer | None]:
    """Load a model, in eval mode, and its tokenizer (None if there is none) from a folder, a run or the hub.

    From a run folder the final model is loaded, or with a warning its latest intact checkpoint.

    Weights are memory-mapped. They keep the dtype they are stored in, except that on the CPU half precision becomes
    float32, which is many times faster there; `dtype` overrides this, as torch.bfloat16 or "bfloat16", or "stored".
    Keys of config.json listed in `ignore` are treated as having no effect. `check` compares the weights files that
    `save` wrote with their hashes, at a gigabyte a second or more.

    >>> import tempfile, glasshouse as gh
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gh.save(gh.build(gh.preset("tiny-decoder")), None, f"{folder}/model")
    ...     model, tok = gh.load(f"{folder}/model")
    >>> model.spec == gh.preset("tiny-decoder"), tok
    (True, None)
    """
    target = machine.resolve(torch.get_default_device() if device is None else device)
    if dtype not in (None, "stored"):
        dtype = machine.parse_dtype(dtype)
    folder = resolve_folder(path_or_repo_id, revision)
    table = folder.json(CONFIG)
    if table is None:
        raise StoreError(f"there is no {str(folder.path / CONFIG)!r}; give a model folder or a run folder.")
    tensors = folder.tensors(meta=target.type == "meta")
    try:
        family, s, duplicates = _read_config(folder, table, tensors, ignore)
    except ConfigError as error:
        raise StoreError(f"{str(folder.path / CONFIG)!r} is not a valid model: {error}") from None
    s = with_end_ids(s, folder.json(GENERATION_CONFIG) or {}, str(folder.path / GENERATION_CONFIG))
    model = load_weights(folder, s, family, tensors, duplicates, target, dtype)
    if check and target.type != "meta":  # after errors that say more
        check_weights(folder)
    model.extra_files = {name: folder.values(name) for name in EXTRA_FILES if folder.file(name)}
    if legacy := {key: table[key] for key in sorted(config_reader.GENERATION_KEYS & table.keys())}:
        model.extra_files.setdefault(GENERATION_CONFIG, legacy)
    tok = folder.tokenizer()
    model.tokenizer_fingerprint = _native(table).get("tokenizer_fingerprint")
    if tok is not None:
        file = folder.file(TOKENIZER) or folder.path
        check_tokenizer(model, tok, repr(str(file)))
        model.tokenizer_fingerprint = tok.fingerprint
    if verified := describe(folder):
        print(f"{folder.path}: {verified}", file=sys.stderr)
    return model.eval(), tok


def _read_config(
    folder: ModelFolder, table: Mapping[str, Any], tensors: dict[str, Tensor], ignore: Collection[str]
) -> tuple[Family | None, spec.Spec, set[str]]:
    """Return the family (None: native), the spec, and the duplicates of tied tensors; make tensor names canonical."""
    source = str(folder.path / CONFIG)
    kind = table.get("model_type")
    if kind == NATIVE:
        config_reader.ConfigReader(table, source, ignore).reject_unused(ignored=())
        return None, _native_spec(table, source), set()
    family = FAMILIES.get(str(kind)) or registry.load_entry_point(registry.FAMILIES, str(kind), Family)
    if family is None:
        raise StoreError(
            f"{source!r} has model_type = {kind!r}, which is not supported; {', '.join(FAMILIES)} are, and others "
            "where a package that adds them is installed."
        )
    canonical = family.canonical_names(tensors)
    if twice := sorted(new for name, new in canonical.items() if new != name and new in tensors):
        raise StoreError(f"{folder.weights!r} contains {twice[0]} under two names; download it again.")
    for name, new in canonical.items():
        tensors[new] = tensors.pop(name)
    duplicates = family.find_duplicates(tensors)
    s = read_pooling(folder, family.spec_from_config(table, tensors.keys() - duplicates, ignore, source))
    if NATIVE in table:  # our own spec, which also has the training settings
        native = _native_spec(table, source)
        if names := differing_fields(native, s):
            raise StoreError(
                f"{source!r} contradicts its own section {NATIVE!r} (in {', '.join(names)}); "
                f"remove {NATIVE!r} if the rest was edited on purpose."
            )
        return family, native, duplicates
    return family, s, duplicates


def _native_spec(table: Mapping[str, Any], source: str) -> spec.Spec:
    native = _native(table)
    if "spec" not in native:
        raise StoreError(f"{source!r} has no spec under {NATIVE!r}; save the model again.")
    if native.get("format") != FORMAT:
        raise StoreError(
            f"{source!r} has format {native.get('format')!r}, but this version reads format {FORMAT}; "
            "use the version of glasshouse that wrote it."
        )
    return spec.parse(native["spec"])


def _native(table: Mapping[str, Any]) -> dict[str, Any]:
    native = table.get(NATIVE)
    return native if isinstance(native, dict) else {}


def save(model: Model, tok: Tokenizer | None, folder: str | Path, *, read: ReadWeight | None = None) -> None:
    """Save a model and its tokenizer as a folder, atomically.

    If a transformers family can express the spec, transformers loads the folder as it is; otherwise it has the native
    format, which `load` reads. A model folder is replaced; a folder with anything else in it is refused. A model
    whose modules do not match its spec is refused: it would load as another model, or not at all. `read` returns the
    weights, one by one, of a model on the meta device.

    >>> import tempfile, glasshouse as gh
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gh.save(gh.build(gh.preset("tiny-encoder")), None, f"{folder}/model")
    ...     sorted(path.name for path in Path(folder, "model").iterdir())
    ['checksums.json', 'config.json', 'model.safetensors']
    """
    write = with_checksums(folder_writer(model, tok, read=read))
    store.replace_folder(Path(folder).expanduser(), write, MODEL_FILES)


def folder_writer(
    model: Model, tok: Tokenizer | None, *, read: ReadWeight | None = None, weights: bool = True
) -> Callable[[Path], None]:
    """Return a function that writes a model and its tokenizer into a new folder that will have other files, too.

    Without `weights` that is all but the weights, in the native format, of a model that may be on the device meta.
    """
    if not weights:
        return _writer(model, tok, {}, None)
    named = _weights(model, read)
    return _writer(model, tok, named, matching_family(model.spec, named)[0], read)


def export(model: Model, tok: Tokenizer | None, folder: str | Path, *, read: ReadWeight | None = None) -> str:
    """Save a folder that transformers loads, and return its model_type; raise ConfigError if no family fits.

    Draft heads are left out, as no family has them. `read` returns the weights, one by one, of a model on the device
    meta.
    """
    model, weights, family = _published(model, read)
    write = with_checksums(_writer(model, tok, weights, family, read))
    store.replace_folder(Path(folder).expanduser(), write, MODEL_FILES)
    return family.model_type


def export_gguf(
    model: Model, tok: Tokenizer | None, file: str | Path, *, dtype: GgufType = "f16", read: ReadWeight | None = None
) -> str:
    """Write a decoder as the GGUF file that llama.cpp runs, with its tokenizer; return llama.cpp's architecture.

    Matrices are in `dtype`, and vectors in float32; with q4_0 the embedding and the head are in q8_0. What llama.cpp
    does not have, a pre-tokenizer for one, raises ConfigError.

    >>> import tempfile, glasshouse as gh
    >>> model, tok = gh.load("python-3m")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_gguf(model, tok, f"{folder}/python-3m.gguf", dtype="q8_0")
    'qwen3'
    """
    model, weights, family = _published(model, read)
    if tok is not None:
        check_tokenizer(model, tok)
    return write_gguf(Path(file), model, tok, family, weights, read or weights.__getitem__, dtype)


def export_onnx(model: Model, tok: Tokenizer | None, file: str | Path) -> str:
    """Write an encoder or a decoder as an ONNX graph in float32, its tokenizer's files beside it; return its kind.

    The inputs are `input_ids` and `attention_mask` [batch, length], 1 for real tokens, and `token_type_ids` where the
    model has segments; the output is `logits`, `last_hidden_state` or, of a pooled encoder, `sentence_embedding`.
    Weights beyond 2 GB are a file of their own beside it. It takes the extra `onnx`.
    """
    if getattr(model.spec.head, "n_draft_heads", 0):
        model = with_draft_heads(model, 0)
    _weights(model)
    if tok is not None:
        check_tokenizer(model, tok)
    write_onnx(Path(file), model, tok)
    return model.spec.kind


def _published(model: Model, read: ReadWeight | None) -> tuple[Model, dict[str, Tensor], Family]:
    """Return a model without draft heads, its weights, and the family that expresses it; ConfigError if none does."""
    if getattr(model.spec.head, "n_draft_heads", 0):
        model = with_draft_heads(model, 0)
    weights = _weights(model, read)
    family, unsupported = matching_family(model.spec, weights)
    if family is None:
        nearest = min(unsupported, key=lambda name: (unsupported[name] == ["kind"], len(unsupported[name])))
        raise ConfigError(
            f"no transformers family can express this model; the nearest is {nearest}, which does not support its "
            f"{', '.join(unsupported[nearest])}."
        )
    return model, weights, family


def matching_family(s: spec.Spec, weights: Iterable[str]) -> tuple[Family | None, dict[str, list[str]]]:
    """Return the first family that can express these weights, and the unsupported fields of each one tried."""
    s, unsupported = without_pooling(s), {}
    for name, family in _families():
        found = [family.tensor_mapping(ours, s) for ours in weights]
        tensor_names = {mapping.name for mapping in found if mapping is not None}
        unsupported[name] = family.unsupported_fields(s, tensor_names)
        if not unsupported[name] and None not in found:
            return family, unsupported
    return None, unsupported


def _families() -> Iterator[tuple[str, Family]]:
    """Yield ours first: packages are imported only for a model that none of ours can express."""
    yield from FAMILIES.items()
    yield from registry.load_entry_points(registry.FAMILIES, Family).items()


def _weights(model: Model, read: ReadWeight | None = None) -> dict[str, Tensor]:
    """Return the weights to save, after checking that `load` can read them."""
    if lora_layers(model):
        raise InputError("the model has LoRA attached; merge it by lora.merge, or save it by hub.save_adapter.")
    weights = checked_weights(model)
    for name, weight in weights.items():
        if weight.is_meta and read is None:
            raise InputError(f"{name} is on the device 'meta' and has no data; build the model on another.")
        if isinstance(weight, nn.Parameter) and weight.dtype not in machine.FLOATS:
            raise InputError(
                f"{name} is {weight.dtype}, which cannot be saved; convert the model, as by model.float()."
            )
    return weights


def _writer(
    model: Model,
    tok: Tokenizer | None,
    weights: Mapping[str, Tensor],
    family: Family | None,
    read: ReadWeight | None = None,
) -> Callable[[Path], None]:
    if tok is not None:
        check_tokenizer(model, tok)
    fingerprint = model.tokenizer_fingerprint if tok is None else tok.fingerprint
    s = without_pooling(model.spec)
    table = {"model_type": NATIVE} if family is None else family.config_from_spec(s)
    dtype = str(model.token_embedding.table.weight.dtype).removeprefix("torch.")
    native: dict[str, Any] = {"format": FORMAT, "spec": config.dump(model.spec)}
    if fingerprint:
        native["tokenizer_fingerprint"] = fingerprint
    table |= {"dtype": dtype, NATIVE: native}
    headless = family is not None and s.head.kind == "none"
    chunks: dict[str, list[tuple[TensorMapping, str]]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for ours, weight in weights.items():
        mapping = tensor_mapping(family, ours, s)
        name = mapping.name.removeprefix(family.prefix) if family and headless else mapping.name
        chunks[name].append((mapping, ours))
        sizes[name] += weight.numel() * weight.element_size()

    def joined(name: str) -> Tensor:
        return join([(mapping, (read or weights.__getitem__)(ours).detach()) for mapping, ours in chunks[name]])

    def write(folder: Path) -> None:
        write_json(folder / CONFIG, table)
        if weights:
            write_weights(folder, sizes, joined)
        if family is not None:
            write_pooling(folder, model.spec)
        for name, values in model.extra_files.items():
            write_json(folder / name, values)
        if s.kind != "encoder":
            ids = {name: value for name, value in special_ids(s).items() if value is not None}
            write_json(folder / GENERATION_CONFIG, model.extra_files.get(GENERATION_CONFIG, {}) | ids)
        if tok is not None:
            tok.save(folder)

    return write


def convert(
    path_or_repo_id: str | Path,
    out: str | Path,
    *,
    gguf: GgufType | None = None,
    onnx: bool = False,
    revision: str | None = None,
    ignore: Collection[str] = (),
) -> tuple[str, Tokenizer | None]:
    """Export a saved model to a folder that transformers loads; return its model_type and tokenizer.

    With `gguf`, the type of its matrices, it is a file that llama.cpp runs, and the architecture is returned; with
    `onnx` an ONNX graph, and the kind of the model is.

    The weights of a sharded checkpoint are put together one by one, so that memory is needed for one file of the new
    folder, at most 5 GB, and not for the model.

    >>> import tempfile, glasshouse as gh
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gh.save(gh.build(gh.preset("tiny-decoder")), None, f"{folder}/model")
    ...     convert(f"{folder}/model", f"{folder}/published")
    ('qwen3', None)
    """
    source = resolve_folder(path_or_repo_id, revision)
    if onnx:
        model, tok = load(source.path, device="cpu", dtype="float32", ignore=ignore)
        return export_onnx(model, tok, out), tok
    sharded = source.sharded_weights()
    model, tok = load(source.path, device="cpu" if sharded is None else "meta", dtype="stored", ignore=ignore)
    read = None if sharded is None else sharded.__getitem__
    if gguf is not None:
        return export_gguf(model, tok, out, dtype=gguf, read=read), tok
    return export(model, tok, out, read=read), tok
