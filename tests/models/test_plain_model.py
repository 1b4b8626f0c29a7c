"""A model of our own kinds has the modules, tensors, hooks and graph of its layers and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.layers.attention import Attention
from glasshouse.layers.feedforward import FeedForward
from glasshouse.layers.norm import Norm
from glasshouse.layers.position import Position

SIZES: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "n_heads": 4, "d_ff": 24, "n_layers": 1, "max_len": 32}
KINDS: dict[str, Any] = {"position": "rotary", "norm": "rms", "feedforward": "swiglu"}
BIASES = {"qkv_bias": False, "out_bias": False, "ffn_bias": False}


def make() -> gh.models.Decoder:
    torch.manual_seed(0)
    head = {"kind": "next_token", "tied": False}
    return gh.build(spec.parse({"kind": "decoder", **SIZES, **KINDS, **BIASES, "head": head})).eval()  # type: ignore[return-value]


# By hand, from layers/block.py down; the norms of queries and keys are identities.
ATTENTION = ["query", "key", "value", "q_norm", "k_norm", "attend", "out", "value_embedding"]
FEEDFORWARD = ["gate", "up", "activation", "down"]
SUBLAYERS = ("attention", "feedforward")
MODULES = [
    "token_embedding",
    "token_embedding.table",
    "stack",
    "stack.position",
    "stack.embed_norm",
    "stack.drop",
    "stack.blocks",
    "stack.blocks.0",
    *(f"stack.blocks.0.{part}{end}" for part in SUBLAYERS for end in ("", ".norm", ".layer", ".drop")),
    *(f"stack.blocks.0.attention.layer.{name}" for name in ATTENTION),
    *(f"stack.blocks.0.feedforward.layer.{name}" for name in FEEDFORWARD),
    "stack.norm",
    "head",
    "head.transform",
]
TENSORS = [
    "token_embedding.table.weight",
    *(f"stack.blocks.0.{part}.norm.weight" for part in SUBLAYERS),
    *(f"stack.blocks.0.attention.layer.{name}.weight" for name in ("query", "key", "value", "out")),
    *(f"stack.blocks.0.feedforward.layer.{name}.weight" for name in ("gate", "up", "down")),
    "stack.norm.weight",
    "head.weight",
]


def test_modules_tensors_and_hooks() -> None:
    model = make()
    assert sorted(name for name, _ in model.named_modules() if name) == sorted(MODULES)
    assert sorted(model.state_dict()) == sorted(TENSORS)
    for module in model.modules():
        for name, held in vars(module).items():
            if "hooks" in name:
                assert not held, f"{type(module).__name__} has {name}"


def graph(model: nn.Module) -> str:
    """Return the code of the one graph that torch.compile takes of a model."""
    taken: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:  # noqa: ANN401 - torch's
        taken.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(torch.tensor([[3, 14, 15, 9]]))
    (found,) = taken
    targets = Counter(getattr(node.target, "__name__", str(node.target)) for node in found.graph.nodes)
    assert targets["linear"] == 4 + 3 + 1  # attention, feed-forward, head
    assert targets["scaled_dot_product_attention"] == targets["embedding"] == targets["silu"] == 1
    assert targets["rms_norm"] == targets["dropout"] == 2 + 1  # sublayers, and those of the stack
    assert targets["mul"] == 1 + 2 + 2 * 4 + 1  # angles, scaled waves, queries and keys turned, gate
    assert targets["add"] == 2 + 2  # queries and keys turned, residuals
    return found.code


@dataclass(frozen=True)
class OtherAttention(spec.SoftmaxAttention):
    kind = "other"


@dataclass(frozen=True)
class OtherPosition(spec.Position):
    kind = "other"


@dataclass(frozen=True)
class OtherFeedForward(spec.FeedForward):
    kind = "other"


@dataclass(frozen=True)
class OtherNorm(spec.Norm):
    kind = "other"


@pytest.mark.long
def test_registered_kinds_change_no_plain_model() -> None:
    before = make()
    code = graph(before)
    gh.register(OtherAttention, Attention)
    gh.register(OtherPosition, lambda s, causal: Position())
    gh.register(OtherFeedForward, lambda s: FeedForward(s, nn.Tanh()))
    gh.register(OtherNorm, lambda settings, width: Norm())
    after = make()
    assert repr(after) == repr(before)
    assert graph(after) == code
    ids = torch.tensor([[3, 14, 15]])
    assert torch.equal(after(ids), before(ids))
