"""A kind of attention and an objective, registered when this module is imported; and a callback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.inspection import walkthrough
from glasshouse.layers.attention import Attention, merge_heads, split_heads
from glasshouse.layers.context import Context
from glasshouse.layers.flops import FlopCount
from glasshouse.layers.linear import Linear
from glasshouse.layers.sublayer import VECTORS, LayerSite
from glasshouse.objectives import CausalLM, cross_entropy
from glasshouse.spec import TransformerSpec


@dataclass(frozen=True)
class Gated(gh.spec.SoftmaxAttention):
    """Softmax attention whose heads are multiplied by a gate before the output projection."""

    kind: ClassVar[str] = "gated"
    bias: bool = True  # a bias of the gate


class Gate(nn.Module):
    """Multiplies by a sigmoid; a module, so that its output is a site."""

    def forward(self, z: Tensor, gate: Tensor) -> Tensor:
        return z * gate.sigmoid()


class GatedAttention(Attention):
    """Self-attention with an output gate."""

    residual_input = "gated_z"

    def __init__(self, s: TransformerSpec, index: int) -> None:
        super().__init__(s, index)
        assert isinstance(s.attention, Gated)
        self.gate = Linear(s.d_model, s.n_heads * s.d_head, bias=s.attention.bias)
        self.output_gate = Gate()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v, gate = (split_heads(one(x), self.d_head) for one in (self.query, self.key, self.value, self.gate))
        return self.out(merge_heads(self.output_gate(self.attend_heads(q, k, v, ctx), gate)))

    def sites(self) -> list[LayerSite]:
        return [*super().sites(), LayerSite("gated_z", VECTORS, "output_gate", "output")]

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        count.add(self.gate, trained)
        return super().add_flops(count, trained)


@walkthrough.steps.register
def _(layer: GatedAttention, token: walkthrough.TokenView) -> Iterator[walkthrough.WalkthroughStep]:
    *most, out = walkthrough.attention_steps(layer, token)
    yield from most
    gate = layer.gate(token.x)
    yield walkthrough.LinearStep(name="gate", title="Output gate", linear=layer.gate, x=token.x, y=gate)
    yield out


@dataclass(frozen=True)
class ZLoss(CausalLM):
    """Cross-entropy and a penalty on the squared log-partition, which keeps logits small."""

    kind: ClassVar[str] = "z_loss"
    weight: float = 1e-4  # of the penalty

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        logits = batch.forward(model)
        z = logits.logsumexp(-1).square() * batch.loss_mask
        return cross_entropy(logits, batch, smoothing) + self.weight * z.sum()


class GateNorm(gh.training.Callback):
    """Adds the norm of the first gate's weights to the metrics."""

    def on_step_end(self, trainer: gh.training.Trainer, step: int, metrics: dict[str, Any]) -> None:
        gate = trainer.model.get_parameter("stack.blocks.0.attention.layer.gate.weight")
        metrics["gate_norm"] = gate.detach().norm().item()


gh.register(Gated, GatedAttention)
gh.register(ZLoss)
