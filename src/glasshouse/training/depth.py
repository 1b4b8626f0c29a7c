"""`model.depth`: one number that sets width, heads, learning rates, batch and steps of a decoder.

It is expanded when a run is loaded, so that `run.toml` holds what it stands for and not the number itself; what the
user sets stays as it is, and what follows from it follows the user's value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from glasshouse import config
from glasshouse.config import JsonDict
from glasshouse.errors import ConfigError

PRESET = "qwen3-small"  # which can be exported, unlike `modern-small`
WIDTH = 64  # of d_model for each layer
NARROW, WIDE = 64, 128  # d_head, below a d_model of WIDE_FROM and from there on
WIDE_FROM = 1024
INIT = "fan_in"
MUON_LR = 0.02  # moves with neither width nor depth, as updates are orthogonal
WEIGHT_DECAY = 0.1  # of the matrices of the blocks
EMBEDDING_LR, HEAD_LR, GAIN_LR = 0.3, 4e-3, 0.01  # of AdamW, for what Muon leaves to it
MOMENTUM_WARMUP = 300  # steps, at most
TOKENS_PER_PARAMETER = 20  # of the blocks (Chinchilla)
BATCH = 3.0  # times the square root of all tokens: 4,096 of 2 million, as in the recipe stdlib
SMALLEST_BATCH = 1024  # tokens
WARMUP, MOST_WARMUP = 20, 100  # one in so many steps, and at most so many steps
DECAY_FRACTION = 0.4  # of the steps after the warm-up


def expand(table: Mapping[str, Any]) -> JsonDict:
    """Return the table of a run with `model.depth` replaced by the settings that follow from it.

    >>> run = expand({"model": {"depth": 12}})
    >>> {name: run["model"][name] for name in ("n_layers", "d_model", "n_heads", "d_ff")}
    {'n_layers': 12, 'd_model': 768, 'n_heads': 12, 'd_ff': 2048}
    >>> run["train"]["batch_tokens"], run["train"]["steps"]
    (131072, 12960)
    >>> expand({"model": {"depth": 12, "d_model": 256}})["model"]["n_heads"]
    4
    """
    model, train = dict(table["model"]), dict(table.get("train", {}))
    depth = config.parse(int, model.pop("depth"), "model.depth")
    config.require(depth > 0, "model.depth", depth, "at least 1")
    for name in ("preset", "kind", "from"):
        if name in model:
            raise ConfigError(
                f"model.depth is {depth}, which sets the sizes of a new decoder, but model.{name} is "
                f"{model[name]!r}; remove one of them."
            )
    model = {"preset": PRESET, "init": INIT, **_sizes(depth, model)}
    return {**table, "model": model, "train": _over(_training(model, train), train)}


def _over(rule: JsonDict, given: Mapping[str, Any]) -> JsonDict:
    """Return the rule's settings with the given ones over them; a table with a kind of its own takes the place."""
    merged = {**rule, **given}
    for name, own in given.items():
        below = rule.get(name)
        if isinstance(own, Mapping) and isinstance(below, dict) and "kind" not in own:
            merged[name] = _over(below, own)
    return merged


def _sizes(depth: int, given: JsonDict) -> JsonDict:
    """Return the sizes of a decoder: those given, and the others by the rule."""
    d_model = config.parse(int, given.get("d_model", _width(depth)), "model.d_model")
    n_heads = max(1, d_model // _head_width(d_model))
    n_heads = config.parse(int, given.get("n_heads", n_heads), "model.n_heads")
    d_ff = WIDTH * math.ceil(8 / 3 * d_model / WIDTH)  # as many parameters as 4 * d_model without a gate
    return {"n_layers": depth, "d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_heads, "d_ff": d_ff, **given}


def _width(depth: int) -> int:
    width = WIDTH * depth
    head = _head_width(width)
    return head * math.ceil(width / head)


def _head_width(d_model: int) -> int:
    return NARROW if d_model < WIDE_FROM else WIDE


def _training(model: JsonDict, given: JsonDict) -> JsonDict:
    """Return learning rates, batch and steps for a model."""
    tokens = TOKENS_PER_PARAMETER * block_parameters(model)
    batch = config.parse(int, given.get("batch_tokens", batch_tokens(tokens)), "train.batch_tokens")
    config.require(batch > 0, "train.batch_tokens", batch, "at least 1")
    steps = math.ceil(tokens / batch)
    length = {} if {"steps", "epochs", "minutes"} & given.keys() else {"steps": steps}
    steps = config.parse(int, given.get("steps", steps), "train.steps")
    return {"batch_tokens": batch, **length, "optimizer": optimizer(steps), "schedule": schedule(steps)}


def optimizer(steps: int) -> JsonDict:
    """Return the optimizer of so many steps: Muon with normalized rows, and AdamW at a rate for each kind of weight.

    >>> made = optimizer(100)
    >>> made["momentum_warmup"], made["embedding"]["lr"], made["head"]["lr"]
    (100, 0.3, 0.004)
    """
    adamw = {"beta1": 0.8, "eps": 1e-10, "weight_decay": 0.0}
    return {
        "kind": "muon",
        "lr": MUON_LR,
        "weight_decay": WEIGHT_DECAY,
        "momentum_warmup": min(MOMENTUM_WARMUP, max(0, steps)),
        "beta2": 0.95,
        "cautious": True,
        "adamw": {"lr": GAIN_LR, **adamw},
        "embedding": {"lr": EMBEDDING_LR, **adamw},
        "head": {"lr": HEAD_LR, **adamw},
    }


def schedule(steps: int) -> JsonDict:
    """Return the learning-rate schedule of so many steps: constant, then down to zero.

    >>> schedule(400)
    {'kind': 'wsd', 'warmup': 20, 'decay_fraction': 0.4, 'final_factor': 0.0}
    """
    warmup = min(MOST_WARMUP, max(0, steps) // WARMUP)
    return {"kind": "wsd", "warmup": warmup, "decay_fraction": DECAY_FRACTION, "final_factor": 0.0}


def block_parameters(model: Mapping[str, Any]) -> int:
    """Return the parameters of the blocks' matrices, without embeddings, from a model's table.

    >>> block_parameters({"n_layers": 2, "d_model": 64, "n_heads": 1, "n_kv_heads": 1, "d_ff": 192})
    106496
    """
    sizes = {name: config.parse(int, model[name], f"model.{name}") for name in ("n_layers", "d_model", "d_ff")}
    return int(sizes["n_layers"] * sizes["d_model"] * (4 * sizes["d_model"] + 3 * sizes["d_ff"]))


def batch_tokens(tokens: float) -> int:
    """Return the tokens of a step for a run of `tokens` in all: a power of two, which grows with its square root.

    >>> batch_tokens(2e6), batch_tokens(1.7e9)
    (4096, 131072)
    """
    return max(SMALLEST_BATCH, 2 ** round(math.log2(BATCH * math.sqrt(max(1.0, tokens)))))
