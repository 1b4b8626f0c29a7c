"""Small valid folders of each kind, which the tests damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from hub.damage import CONFIG, FIRST, INDEX, SECOND, WEIGHTS, Table, edit, read, tokenizer
from safetensors.torch import load_file, save_file

import glasshouse as gh

SMALL = {"vocab_size": 61, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_len": 16}
LLAMA = {**SMALL, "n_kv_heads": 2, "d_ff": 24}
BART: Table = {
    "position": {"kind": "learned", "offset": 2},
    "embed_norm": True,
    "embed_scale": False,
    "qkv_bias": True,
    "out_bias": True,
    "init": "normal",
    "head": {"kind": "next_token", "bias": True},
}
NEOX: Table = {
    "position": {"kind": "rotary", "fraction": 0.5},
    "norm_placement": "parallel",
    "head": {"kind": "next_token", "tied": False},
}
GEMMA2: Table = {
    "norm_placement": "sandwich",
    "embed_scale": True,
    "feedforward": {"kind": "geglu", "tanh": True},
    "windows": (4, 0),
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
OLMO2: Table = {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"}
GEMMA3: Table = {
    "norm_placement": "sandwich",
    "embed_scale": True,
    "qk_norm": True,
    "feedforward": {"kind": "geglu", "tanh": True},
    "position": {"kind": "rotary", "theta": 1e6, "local_theta": 1e4},
    "windows": (4, 0),
}
PHI3: Table = {"position": {"kind": "rotary", "fraction": 0.5}}
MODERNBERT: Table = {
    "position": {"kind": "rotary", "theta": 1e5, "local_theta": 1e4},
    "norm": {"kind": "layer", "bias": False},
    "norm_placement": "pre",
    "first_norm": False,
    "final_norm": True,
    "feedforward": "geglu",
    "windows": (0, 4),
    "n_segments": 0,
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "head": {"kind": "masked_token", "transform_bias": False},
}
SPECS = {
    "gpt2": gh.preset("gpt2", **SMALL),
    "own": gh.preset("gpt2", **SMALL, position="alibi"),
    "llama": gh.preset("llama-small", **LLAMA),
    "mistral": gh.preset("llama-small", **LLAMA, windows=[5]),
    "qwen2": gh.preset("llama-small", **LLAMA, windows=[5, 0], qkv_bias=True),
    "gpt_neox": gh.preset("gpt2", **SMALL, **NEOX),
    "gemma2": gh.preset("llama-small", **LLAMA, **GEMMA2),
    "gemma3_text": gh.preset("llama-small", **LLAMA, **GEMMA3),
    "olmo2": gh.preset("llama-small", **LLAMA, **OLMO2),
    "phi3": gh.preset("llama-small", **LLAMA, **PHI3),
    "bert": gh.preset("tiny-encoder", **SMALL),
    "bert-bare": gh.preset("tiny-encoder", **SMALL, head="none"),
    "bert-labels": gh.preset("tiny-encoder", **SMALL, head={"kind": "sequence_classification", "n_labels": 3}),
    "modernbert": gh.preset("tiny-encoder", **SMALL, **MODERNBERT),
    "llama-labels": gh.preset(
        "llama-small",
        **LLAMA,
        head={"kind": "sequence_classification", "n_labels": 3, "pooling": "last", "dense": False, "bias": False},
    ),
    "t5": gh.preset("t5-small", **SMALL, d_ff=24),
    "bart": gh.preset("tiny-seq2seq", **SMALL, **BART),
}


def write_valid_checkpoints(place: Path) -> None:
    """Make a small valid folder of each kind; all but `own` are in the format of transformers."""
    for name, spec in SPECS.items():
        torch.manual_seed(0)
        gh.save(gh.build(spec), None, place / name)
        kind = read(place / name / CONFIG)["model_type"]
        assert kind == {"own": "glasshouse"}.get(name, name.partition("-")[0])
        if name != "own":
            edit(CONFIG, lambda t: t.pop("glasshouse"))(place / name)
    shutil.copytree(place / "gpt2", place / "sharded")
    shard(place / "sharded")
    gh.save(gh.build(SPECS["gpt2"]), None, place / "ours")  # of a family, with our spec
    shutil.copytree(place / "gpt2", place / "worded")
    tokenizer()(place / "worded")


def shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    half = len(tensors) // 2
    names = sorted(tensors)
    weight_map = {name: FIRST if number < half else SECOND for number, name in enumerate(names)}
    for file in (FIRST, SECOND):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
