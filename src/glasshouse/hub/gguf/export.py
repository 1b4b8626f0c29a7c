"""Writes a decoder as a GGUF file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from glasshouse import store
from glasshouse.errors import ConfigError, InputError
from glasshouse.hub.families.family import Family, TensorMapping, find_mapping, join
from glasshouse.hub.gguf.architectures import ARCHITECTURES, Architecture
from glasshouse.hub.gguf.vocabulary import read_vocabulary
from glasshouse.layers.position import make_scaling
from glasshouse.models import Model
from glasshouse.spec import LayerNorm, LinearScaling, Llama3Scaling, RMSNorm, Rotary, TransformerSpec
from glasshouse.text import Tokenizer

if TYPE_CHECKING:
    import gguf

GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
IN_FLOAT32 = "position_embd", "rope_freqs"  # matrices or not, as llama.cpp expects them
FINER = "token_embd", "output"  # in q8_0 where the rest has four bits, as they make the logits


def write_gguf(
    file: Path,
    model: Model,
    tok: Tokenizer | None,
    family: Family,
    weights: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    dtype: GgufType,
) -> str:
    """Write a model that a family expresses, atomically; return llama.cpp's name of its architecture.

    Tensors are read, converted and written one by one.
    """
    package = _package()
    if dtype not in TYPES:
        raise InputError(f"the type is {dtype!r}, which is not written; {', '.join(TYPES)} are.")
    s = model.spec
    architecture = ARCHITECTURES.get(family.model_type)
    if architecture is None or not isinstance(s, TransformerSpec) or s.head.kind != "next_token":
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"this model is written as {family.model_type}, but only decoders with a head for tokens of the families "
            f"{known} go to GGUF; export a folder instead."
        )
    if unsupported := list(architecture.unsupported(s)):
        raise ConfigError(f"llama.cpp's {architecture.name} has no such {', '.join(unsupported)}; export a folder.")
    file = file.expanduser()
    if file.is_dir():
        raise InputError(f"{str(file)!r} is a folder; name a file.")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    writer = package.GGUFWriter(unfinished, architecture.name)
    try:
        _add_settings(writer, s, architecture)
        writer.add_file_type(package.LlamaFileType[TYPES[dtype]])
        _add_vocabulary(writer, s, tok)
        _write_tensors(writer, s, architecture, weights, read, dtype)
        writer.close()
        store.flush(unfinished)
        unfinished.replace(file)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)
    return architecture.name


def _package() -> Any:  # noqa: ANN401 - a module
    try:
        import gguf
    except ImportError:
        raise InputError("GGUF files need gguf; install it with pip install 'glasshouse[gguf]'.") from None
    return gguf


def _add_settings(writer: gguf.GGUFWriter, s: TransformerSpec, architecture: Architecture) -> None:
    """Add what llama.cpp reads of a spec."""
    writer.add_context_length(s.max_len)
    writer.add_vocab_size(s.vocab_size)
    writer.add_embedding_length(s.d_model)
    writer.add_block_count(s.n_layers)
    writer.add_feed_forward_length(s.d_ff)
    writer.add_head_count(s.n_heads)
    writer.add_head_count_kv(s.n_kv_heads)
    writer.add_key_length(s.d_head)
    writer.add_value_length(s.d_head)
    match s.norm:
        case RMSNorm(eps=eps):
            writer.add_layer_norm_rms_eps(eps)
        case LayerNorm(eps=eps):
            writer.add_layer_norm_eps(eps)
    if isinstance(s.position, Rotary):
        writer.add_rope_dimension_count(s.position.width(s.d_head))
        writer.add_rope_freq_base(s.position.theta)
        if isinstance(s.position.scaling, LinearScaling):
            writer.add_rope_scaling_type(_package().RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(s.position.scaling.factor)
    if architecture.name == "gptneox":
        writer.add_parallel_residual(s.norm_placement == "parallel")
    if architecture.name == "gemma2":
        assert s.attention_softcap is not None
        writer.add_sliding_window(s.window(0) or s.max_len)
        writer.add_attn_logit_softcapping(s.attention_softcap)
    if architecture.name == "gemma3" and isinstance(s.position, Rotary):
        if s.window(0):
            writer.add_sliding_window(s.window(0))
        local_theta = s.position.theta if s.position.local_theta is None else s.position.local_theta
        writer.add_float32(_package().Keys.Rope.FREQ_BASE_SWA.format(arch=writer.arch), local_theta)
    if s.logit_softcap is not None:
        writer.add_final_logit_softcapping(s.logit_softcap)


def _add_vocabulary(writer: gguf.GGUFWriter, s: TransformerSpec, tok: Tokenizer | None) -> None:
    if tok is None:
        writer.add_tokenizer_model("no_vocab")
        return
    eos = tok.token_to_id(tok.special_tokens["eos"]) if "eos" in tok.special_tokens else None
    ends = list(s.end_ids) or ([] if eos is None else [eos])
    if not ends:
        raise ConfigError(
            "the model has no end_ids, and llama.cpp would take token 11 for the end; set end_ids of its "
            "spec, or write it without the tokenizer, by gh.hub.export_gguf(model, None, ...)."
        )
    vocabulary = read_vocabulary(tok, s.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.first is not None)
    writer.add_bos_token_id(next((one for one in (vocabulary.first, s.start_id) if one is not None), ends[0]))
    writer.add_eos_token_id(ends[0])
    if len(ends) > 1:
        writer.add_eot_token_id(ends[1])
    if s.pad_id is not None:
        writer.add_pad_token_id(s.pad_id)
    if tok.chat_template is not None:
        writer.add_chat_template(tok.chat_template)


def _write_tensors(
    writer: gguf.GGUFWriter,
    s: TransformerSpec,
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    dtype: GgufType,
) -> None:
    parts: dict[str, list[tuple[TensorMapping, str]]] = defaultdict(list)
    for ours in weights:
        mapping = find_mapping(architecture.names, ours)
        assert mapping is not None, f"{ours} has no name in GGUF"
        parts[mapping.name].append((mapping, ours))
    if architecture.stores_tied_head and "output.weight" not in parts:
        parts["output.weight"] = parts["token_embd.weight"]
    shapes = {name: _joined_shape([weights[ours] for _, ours in found]) for name, found in parts.items()}
    extra: dict[str, Tensor] = {}
    if isinstance(s.position, Rotary) and isinstance(s.position.scaling, Llama3Scaling):
        extra["rope_freqs.weight"] = _frequency_factors(s.position, s.d_head)
        shapes["rope_freqs.weight"] = list(extra["rope_freqs.weight"].shape)
    kinds = {name: _tensor_type(name, shape, dtype) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        writer.add_tensor_info(name, *_stored(shape, kinds[name]), kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, found in parts.items():
        whole = join([(mapping, read(ours).detach()) for mapping, ours in found]).to("cpu", torch.float32)
        if architecture.rotates_pairs and (heads := _rotated_heads(name, s)):
            whole = whole.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(whole.shape)
        writer.write_tensor_data(_converted(name, whole, kinds[name]))
    for name, whole in extra.items():
        writer.write_tensor_data(_converted(name, whole, kinds[name]))


def _joined_shape(parts: list[Tensor]) -> list[int]:
    return [sum(part.shape[0] for part in parts), *parts[0].shape[1:]]


def _rotated_heads(name: str, s: TransformerSpec) -> int:
    """Return the heads whose rows go in the order of pairs: ours are those of first halves, then of second ones."""
    return {"attn_q": s.n_heads, "attn_k": s.n_kv_heads}.get(name.split(".")[-2], 0)


def _tensor_type(name: str, shape: list[int], dtype: GgufType) -> gguf.GGMLQuantizationType:
    """Return the type of a tensor: vectors and rows that blocks do not divide keep more bits."""
    types = _package().GGMLQuantizationType
    place = name.rpartition(".")[0]
    if len(shape) < 2 or place in IN_FLOAT32 or dtype == "f32":
        return types.F32
    found = types["Q8_0" if dtype == "q4_0" and place in FINER else dtype.upper()]
    return types.F16 if shape[-1] % _package().GGML_QUANT_SIZES[found][0] else found


def _stored(shape: list[int], kind: gguf.GGMLQuantizationType) -> tuple[list[int], np.dtype, int]:
    """Return the shape, dtype and bytes of a tensor as it is stored."""
    types = _package().GGMLQuantizationType
    if kind in (types.F32, types.F16):
        dtype = np.dtype(np.float32 if kind == types.F32 else np.float16)
        return shape, dtype, int(np.prod(shape)) * dtype.itemsize
    block, size = _package().GGML_QUANT_SIZES[kind]
    stored = [*shape[:-1], shape[-1] // block * size]
    return stored, np.dtype(np.uint8), int(np.prod(stored))


def _converted(name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    found: np.ndarray = _package().quants.quantize(tensor.contiguous().numpy(), kind)
    if found.dtype == np.float16 and not np.isfinite(found).all():
        raise InputError(f"{name} has numbers beyond float16's {np.finfo(np.float16).max:,.0f}; choose bf16.")
    return found


def _frequency_factors(position: Rotary, d_head: int) -> Tensor:
    """Return what llama.cpp divides each frequency by."""
    scale, _ = make_scaling(position.scaling, d_head, position.theta)
    width = position.width(d_head)
    frequencies = position.theta ** -(torch.arange(0, width, 2).double() / width)
    return (frequencies / scale(frequencies)).float()
