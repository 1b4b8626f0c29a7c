"""Tensor parallelism: the heads, neurons and vocabulary of a model split over neighbouring processes.

Query, key, value, gate and up are split by columns, out and down by rows, so that each sublayer communicates once
forward and once backward; the token embedding and the head are split by vocabulary, and the loss is computed on these
shards.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.errors import ConfigError
from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.position import AlibiPosition, RelativePosition
from glasshouse.layers.softcap import softcap
from glasshouse.layers.sublayer import Sublayer
from glasshouse.layers.value_embedding import ValueEmbedding
from glasshouse.models import Model
from glasshouse.models.heads import LMHead, ShardedLogits
from glasshouse.models.stack import Stack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLUMNS, ROWS, HEAD_NORMS = ("query", "key", "value", "gate", "up"), ("out", "down"), ("q_norm", "k_norm")
VALUE_COLUMNS = "value_embedding.table", "value_embedding.gate"


def check_divisible(s: spec.Spec, size: int) -> None:
    """Raise unless heads and neurons divide by the number of processes that share them, each on its own.

    >>> check_divisible(spec.preset("tiny-decoder"), 3)
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: train.parallel.tensor is 3, but it must divide n_heads = 4; choose another.
    """
    for name in ("n_heads", "n_kv_heads", "d_ff"):
        if (count := getattr(s, name)) % size:
            raise ConfigError(
                f"train.parallel.tensor is {size}, but it must divide {name} = {count}; choose another."
            )
    if size > 1 and s.qk_norm and s.qk_norm_over == "projection":
        raise ConfigError(
            f"train.parallel.tensor is {size}, but qk_norm_over is 'projection', a norm over the heads of all "
            "processes; set train.parallel.tensor = 1."
        )


def split(model: Model, mesh: DeviceMesh) -> None:
    """Split the matrices of a model over a mesh of one dimension; what it computes does not change."""
    check_divisible(model.spec, mesh.size())
    # It warns of weights that are gathered in two steps, which happens at checkpoints and in Muon.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for stack in model.modules():
        if isinstance(stack, Stack):
            for layer in stack.blocks.modules():
                if isinstance(layer, Sublayer):
                    _split_sublayer(layer, mesh)
            _split_position(stack, mesh)
    _split_vocabulary(model, mesh)


def _split_sublayer(layer: Sublayer, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    children = dict(layer.named_children())
    if any(not isinstance(children[name], nn.Linear) for name in (*COLUMNS, *ROWS) if name in children):
        raise ConfigError("train.lora is set, but adapters are trained with train.parallel.tensor = 1 only; set it.")
    plan: dict[str, ParallelStyle] = {}
    plan |= {name: ColwiseParallel() for name in COLUMNS if name in children}
    plan |= {name: RowwiseParallel() for name in ROWS if name in children}
    if isinstance(children.get("value_embedding"), ValueEmbedding):
        plan |= {name: ColwiseParallel() for name in VALUE_COLUMNS}
    # The gain of a norm over each head gets its gradient from the heads of every process.
    norms = [name for name in HEAD_NORMS if name in children and list(children[name].parameters())]
    plan |= {name: SequenceParallel(sequence_dim=1, use_local_output=True) for name in norms}
    parallelize_module(layer, mesh, plan, src_data_rank=None)
    # Marked once for all projections of x, so that their gradients are summed over processes together.
    inputs = (Replicate(), None)
    parallelize_module(layer, mesh, PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs))


def _split_position(stack: Stack, mesh: DeviceMesh) -> None:
    """Give each process the position bias of its own heads."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    position: Any = stack.position
    if isinstance(position, RelativePosition):
        parallelize_module(position, mesh, {"table": ColwiseParallel()}, src_data_rank=None)
    elif isinstance(position, AlibiPosition):
        every, rank, size = position.bias, mesh.get_local_rank(), mesh.size()
        position.bias = lambda queries, keys: every(queries, keys).chunk(size, 1)[rank]  # type: ignore[method-assign]


def _split_vocabulary(model: Model, mesh: DeviceMesh) -> None:
    head, table = model.head, model.token_embedding.table
    _split_rows(table, mesh)
    # In torch 2.10, a second embedding of the same shape breaks what RowwiseParallel keeps of the first.
    table.forward = functools.partial(_embed, table, mesh)  # type: ignore[method-assign]
    if isinstance(head, LMHead):
        _split_rows(head, mesh)
        head.forward = functools.partial(_head_forward, head, mesh)  # type: ignore[method-assign,assignment]


def _split_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the first dimension, the vocabulary, of a module's own parameters."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, weight in list(module.named_parameters(recurse=False)):
        shards = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shards, requires_grad=weight.requires_grad))


def _first_row(count: int, mesh: DeviceMesh) -> int:
    """Return the first row of this process, as DTensor splits a dimension."""
    return min(mesh.get_local_rank() * -(-count // mesh.size()), count)


def _embed(table: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    """Look up the ids of this process, and add the vectors of the others."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    rows = _local(table.weight)
    own = ids - _first_row(table.num_embeddings, mesh)
    is_others = (own < 0) | (own >= len(rows))
    vectors = F.embedding(own.masked_fill(is_others, 0), rows).masked_fill(is_others[..., None], 0)
    partial = DTensor.from_local(vectors, mesh, [Partial()], run_check=False)
    return _local(partial.redistribute(placements=[Replicate()]))


def _head_forward(head: LMHead, mesh: DeviceMesh, x: Tensor, layout: Layout, table: Tensor) -> Tensor | ShardedLogits:
    """Return this process's logits in training, where the loss is computed on them, and else all of them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    inputs, weight, bias, cap = head.unprojected(x, table)
    n_classes = len(weight)
    # Every process has the gradient of its own logits, so that of x is the sum over processes.
    inputs = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    logits = softcap(F.linear(inputs, _local(weight), None if bias is None else _local(bias)), cap)
    if head.training:
        return ShardedLogits(logits, _first_row(n_classes, mesh), n_classes, mesh.get_group())
    shape = torch.Size((*logits.shape[:-1], n_classes))
    stride = (shape[1] * n_classes, n_classes, 1)
    whole: Tensor = DTensor.from_local(
        logits, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return whole


def _local(tensor: Any) -> Tensor:  # noqa: ANN401 - a DTensor
    shard: Tensor = tensor.to_local()
    return shard
