"""FSDP2: replicated, fully sharded and hybrid-sharded models differ only in the shape of the device mesh.

Parameters are DTensors, of which each process has its shard. Plain replication is a shard dimension of size 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from glasshouse import device as machine
from glasshouse.errors import ConfigError
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.models.builder import count_parameters, instantiate_unfilled
from glasshouse.models.stack import Stack
from glasshouse.models.weights import assign_weights, init_weights
from glasshouse.training.distributed import tensor_parallel
from glasshouse.training.distributed.layout import Layout, choose_layout
from glasshouse.training.distributed.processes import Parallel, Processes

if TYPE_CHECKING:  # takes a second to import, which one process need not wait for
    from torch.distributed.device_mesh import DeviceMesh

WEIGHT_BYTES = 4  # per parameter, in float32
SHARE = 0.25  # of memory for the weights of a whole model

# Meshes -----------------------------------------------------------------------------------------------------


def choose_run_layout(choice: Parallel, processes: Processes, n_parameters: int, device: torch.device) -> Layout:
    """Return the parallel layout of a run, chosen by the memory of the process that has the least."""
    memory = least_memory(device, processes)
    return choose_layout(
        choice.kind, processes.world_size, processes.local_world_size, processes.tensor, n_parameters, memory
    )


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh of all processes, with the dimensions replicate, shard and tensor, as far as they are used."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"replicate": layout.replicas, "shard": layout.shards, "tensor": layout.tensor}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def parallelize(
    model: Model, choice: Parallel, processes: Processes, device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Spread a model over all processes; one on the meta device gets the weights that one process would draw."""
    check_shardable(model)
    is_new = next(model.parameters()).is_meta
    layout = choose_run_layout(choice, processes, count_parameters(model.spec), device)
    mesh = make_mesh(layout, device)
    if processes.tensor > 1:
        tensor_parallel.split(model, mesh["tensor"])
    shard(model, mesh, compute_dtype)
    if is_new:
        model.to_empty(device=device)
        with FullDraws():  # type: ignore[no-untyped-call]
            init_weights(model, model.spec)


def check_shardable(model: nn.Module) -> None:
    """Raise ConfigError for a parameter that FSDP cannot split."""
    for name, weight in model.named_parameters():
        if weight.dim() == 0:
            raise ConfigError(
                f"{name} is a scalar, which several processes cannot share; make it a tensor of one element, [1]."
            )


def fits_one_device(model: Model, processes: Processes, device: torch.device) -> bool:
    """Whether a process can gather the whole model, to probe it and to sample from it."""
    weights = WEIGHT_BYTES * count_parameters(model.spec)
    return weights <= SHARE * least_memory(device, processes)


def least_memory(device: torch.device, processes: Processes) -> int:
    """Return the memory in bytes of the process with the least; on CPUs, the processes of a node share its memory."""
    own = machine.memory_bytes(device)
    return -processes.max(-(own if device.type == "cuda" else own // processes.local_world_size))


# Sharding ---------------------------------------------------------------------------------------------------


def shard(model: Model, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard every block, and what is outside the blocks, over a mesh; matrix products are in `compute_dtype`.

    A model on the meta device has no weights afterwards either.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # Logits are a view where the head has a bias; the loss does not change them in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view tensor")
    names = [name for name in mesh.mesh_dim_names or () if name != "tensor"]
    data = mesh[tuple(names)]
    # A replica need not be gathered again in the backward pass.
    settings: dict[str, Any] = {"mesh": data, "reshard_after_forward": data["shard"].size() > 1}
    if compute_dtype != torch.float32:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for stack in model.modules():
        if isinstance(stack, Stack):
            for block in stack.blocks:
                fully_shard(block, **settings)
    # The loss may still need the unembedding matrix, after the model's forward pass.
    fully_shard(model, **{**settings, "reshard_after_forward": False})
    for module in model.modules():
        if isinstance(module, FSDPModule):  # by default gradients are averaged; on gloo, only sums are there
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free gathered weights after a forward pass without backward: a later one would not see that they changed."""
    for module in model.modules():
        if (free := getattr(module, "reshard", None)) is not None:
            free()


class FullDraws(TorchDispatchMode):
    """Draws random numbers for whole tensors and keeps this process's shard: sharding does not change the weights."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        draws = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        if func in draws and is_sharded(args[0]):
            whole = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
            copy_whole_(args[0], func(whole, *args[1:], **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


def describe_layout(model: nn.Module) -> str:
    """Return how a sharded model is spread, as `2 replicas in 4 shards each`."""
    mesh: Any = max((weight.device_mesh for weight in cast(Any, model.parameters())), key=lambda mesh: mesh.ndim)
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    replicas, shards = sizes.get("replicate", 1), sizes["shard"]
    parts = [f"{replicas} replica{'s' * (replicas != 1)}" if shards == 1 or replicas > 1 else ""]
    parts.append(f"{shards} shards{' each' * (replicas > 1)}" if shards > 1 else "")
    parts.append(f"tensor parallel over {sizes['tensor']}" if "tensor" in sizes else "")
    return ", ".join(filter(None, parts))


# Tensors ----------------------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Tensor:  # noqa: ANN401 - a DTensor, whose type takes a second to import
    """Return the shard of this process, which shares memory with the tensor; a plain tensor is its own shard.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    shard: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def whole(tensor: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return the whole tensor, gathered from all processes, which must all call this.

    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered


def whole_like(shard: Tensor, like: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return the whole tensor of a shard that is laid out as another tensor is."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return whole(DTensor.from_local(shard, like.device_mesh, like.placements, **layout))


def shard_like(values: Tensor, like: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Return this process's shard of a whole tensor that every process has."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None))


@torch.no_grad()
def copy_whole_(tensor: Tensor, values: Tensor) -> None:
    """Copy a whole tensor into a sharded one, without communication, or into a plain one."""
    local(tensor).copy_(shard_like(values.to(tensor.device, tensor.dtype), tensor))


def gathered(model: Model, device: torch.device, *, keep: bool = True) -> Model | None:
    """Return a plain copy of a sharded model; all processes take part, those without `keep` get None.

    One tensor is gathered at a time, so a process that keeps none never has the whole model.
    """
    weights = {}
    for name, weight in model.state_dict().items():
        tensor = whole(weight.detach())
        if keep:
            weights[name] = tensor.to(device, copy=True)
    if not keep:
        return None
    copied = instantiate_unfilled(model.spec)
    if choice := lora.attached(model):
        with torch.device("meta"):
            lora.attach(copied, choice)
    assign_weights(copied, weights, buffers_of=model)
    copied.tokenizer_fingerprint, copied.extra_files = model.tokenizer_fingerprint, model.extra_files
    return copied


# Gradients --------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(weights: Iterable[Any], max_norm: float) -> Tensor:
    """Clip the gradients of sharded weights to a norm over all processes, and return it.

    As `torch.nn.utils.clip_grad_norm_`, which takes one mesh only, and with one communication for all weights.
    """
    by_copies: dict[float, list[Tensor]] = {}
    for weight in weights:
        if weight.grad is not None:
            by_copies.setdefault(copies(weight), []).append(local(weight.grad))
    grads = [grad for group in by_copies.values() for grad in group]
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for count, group in by_copies.items():
        total += torch.stack(torch._foreach_norm(group)).double().square().sum() / count
    dist.all_reduce(total)
    norm = total.sqrt().to(grads[0].dtype)
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch does it
    return norm


def copies(weight: Any) -> float:  # noqa: ANN401 - likewise
    """Return how many processes have the same shard of a weight."""
    shards = 1
    for size, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
        shards *= 1 if placement.is_replicate() else size
    return dist.get_world_size() / shards
