"""Plans: one small model worked by hand, what autograd stores, and the choices that follow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import glasshouse as gh
from glasshouse import ConfigError, InputError
from glasshouse.data import Batch
from glasshouse.layers import lora
from glasshouse.layers.lora import FrozenWeights, LoRA
from glasshouse.objectives.loss import linear as linear_cross_entropy
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.training.optimizer import AdamW, Muon
from glasshouse.training.plan import (
    Gpu,
    Layout,
    MemoryModel,
    activation_bytes,
    choose_layout,
    find_gpu,
    load_meta_decoder,
    plan_serving,
    plan_training,
    step_traffic,
)
from glasshouse.training.plan.memory import loss_bytes
from glasshouse.training.plan.speed import update_flops
from glasshouse.training.plan.training import USABLE, choose_grad_accum
from glasshouse.training.run import Train
from glasshouse.training.setup.build import estimate_grad_accum
from glasshouse.training.step import LowPrecisionCopy

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
# A decoder of d_model 8: two layers, two rotated heads of 4 over one KV head, SwiGLU of 16, a tied vocabulary of 64.
SMALL = {
    **{"preset": "tiny-decoder", "vocab_size": 64, "d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1},
    **{"d_ff": 16, "qk_norm": False, "head": {"kind": "next_token", "tied": True}},
}
# Parameters of a block: query 8x8, key and value 8x4 each, out 8x8, gate, up and down 8x16 each, two RMS norms of 8.
BLOCK = 64 + 2 * 32 + 64 + 3 * 128 + 2 * 8
OUTSIDE = 64 * 8 + 8  # the vocabulary and the final norm
TOTAL = 2 * BLOCK + OUTSIDE
# Bytes per token and block in bfloat16: twice input and output of a norm, and 8 for its statistics; queries 8,
# keys 4, values 4, attention output 8, by head and with merged heads, and a float32 log-sum-exp per head; gate, up
# and their product.
STORED = 2 * (2 * 8 * 2 + 8) + (2 * (8 + 4 + 4 + 8 + 8) + 2 * 4) + 2 * 3 * 16
# A GPU on which times are round numbers.
ROUND = Gpu("round", memory=2**20, flops=1e12, bandwidth=1e9, link=1e6, network=1e6)


def small_run(**train: object) -> gh.Run:
    table = {"steps": 1000, "batch_tokens": 64, **train}
    return gh.Run.from_dict({"model": SMALL, "data": {"seq_len": 16, "vocab_size": 64}, "train": table})


def test_one_small_model_worked_by_hand() -> None:
    plan = plan_training(small_run(), ROUND, price=2.0)
    assert plan.n_parameters == plan.n_trained == TOTAL == 1704
    # Six FLOPs per element of a matrix; two products of queries and keys, with two gradients each, over 16 keys.
    assert plan.flops_per_token.matmul == 6 * (2 * (BLOCK - 16) + 64 * 8)
    assert plan.flops_per_token.attention == 2 * 12 * 8 * 16
    assert (plan.rows, plan.grad_accum, plan.batch_tokens) == (4, 1, 64)
    # At the loss: float32 weights and a copy in bfloat16, two float32 averages; no gradients yet.
    assert plan.memory.moment == "the loss"
    assert plan.memory.parts == {
        "weights": 6 * TOTAL,
        "optimizer": 8 * TOTAL,
        "activations": 64 * (2 * STORED + 2 * 8 * 2 + 8),  # and input, output and statistics of the final norm
        # Logits of 64 tokens in bfloat16, whose place their gradient takes; the gradient of the vocabulary: a float32
        # sum and a bfloat16 term; two gradients of the hidden states.
        "logits": 2 * 64 * 64 + (4 + 2) * 64 * 8 + 2 * 2 * 64 * 8,
    }
    assert plan.memory.peak == sum(plan.memory.parts.values())
    assert plan.usable_memory == int(USABLE * 2**20)
    memory = MemoryModel(gh.build(gh.preset(**_preset()), device="meta"), AdamW(), precision=torch.bfloat16)
    largest = plan.largest_rows
    assert memory.at(largest, 16, 1).peak <= plan.usable_memory < memory.at(largest + 1, 16, 1).peak
    # Time: matmuls at 0.89 of the rate, attention at 0.5; memory moves activations 4 times, logits 5 times, and per
    # parameter 10 bytes of gradients and 46 of the update.
    products = 64 * (plan.flops_per_token.matmul / 0.89 + plan.flops_per_token.attention / 0.5) / 1e12
    moved = 64 * (4 * (2 * STORED + 40) + 5 * 64 * 2) + TOTAL * (10 + 46)
    assert plan.compute_seconds == pytest.approx(max(products + moved / 1e9, 2 * 150e-6), rel=1e-12)
    assert plan.step_seconds == plan.compute_seconds
    assert plan.traffic.total == plan.traffic_seconds == 0
    ideal = 64 * (plan.flops_per_token.matmul + plan.flops_per_token.attention) / 1e12
    assert plan.mfu == pytest.approx(ideal / plan.step_seconds)
    assert plan.tokens_per_second == pytest.approx(64 / plan.step_seconds)
    assert plan.days == pytest.approx(1000 * plan.step_seconds / 86_400)
    assert plan.cost == pytest.approx(1000 * plan.step_seconds / 3600 * 2.0)
    # Two layers, keys and values of 4 numbers of two bytes, for two heads or for one.
    assert plan.kv_bytes == {"multi-head": 2 * 2 * 4 * 2 * 2, "multi-query": 2 * 2 * 4 * 2}


def _preset() -> dict[str, object]:
    return {"name": SMALL["preset"], "max_len": 16, **{key: value for key, value in SMALL.items() if key != "preset"}}


def test_the_moments_of_a_step_by_hand() -> None:
    model = gh.build(gh.preset(**_preset()), device="meta")
    # One token: the peak is where float32 and bfloat16 gradients of all parameters are there.
    parts = MemoryModel(model, AdamW(), precision=torch.bfloat16).at(1, 1).parts
    assert parts == {"weights": 6 * TOTAL, "optimizer": 8 * TOTAL, "gradients": 6 * TOTAL}
    # With Muon: one average of the matrices of the blocks, and 22 bytes for each element of the largest group of
    # matrices of one shape, gate and up of both layers.
    muon = MemoryModel(model, Muon(), precision=torch.bfloat16).at(1, 1)
    matrices = 2 * (BLOCK - 16)
    assert muon.moment == "the update"
    assert muon.parts == {
        "weights": 6 * TOTAL,
        "optimizer": 4 * matrices + 8 * (TOTAL - matrices),
        "gradients": 4 * TOTAL,
        "working": 22 * 4 * 128,
    }
    # In float32 there is no copy, and gradients are of one kind; an EMA is another copy of the weights.
    float32 = MemoryModel(model, AdamW(), ema=True).at(1, 1)
    assert float32.moment == "the end of the backward pass"
    assert float32.parts == {"weights": 4 * TOTAL, "optimizer": 8 * TOTAL, "ema": 4 * TOTAL, "gradients": 4 * TOTAL}
    # With checkpointing, the backward pass starts from the inputs of the blocks and recomputes one.
    memory = MemoryModel(model, AdamW(), precision=torch.bfloat16, checkpointing=True)
    assert memory.activations.stored == 2 * 8 * 2 + 2 * 8 * 2 + 8
    assert memory.activations.recomputed == STORED
    # Accumulating, the float32 sum is there from the second micro-batch on.
    once, twice = (MemoryModel(model, AdamW(), precision=torch.bfloat16).at(64, 16, n) for n in (1, 2))
    assert twice.parts["gradients"] - once.parts.get("gradients", 0) == 4 * TOTAL


def test_adapters_on_every_layer_are_planned() -> None:
    model = gh.build(gh.preset(**_preset()), device="meta")
    before = activation_bytes(model, itemsize=4)
    lora.attach(model, LoRA(rank=3, targets=("*",)))
    # A row for each input and a column for each output: of query and out, key and value, gate and up, and down.
    adapters = 2 * 3 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16))
    assert MemoryModel(model, AdamW()).at(1, 1).parts["optimizer"] == 8 * adapters
    assert activation_bytes(model, itemsize=4) == before


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["own", "int8", "int4"])
def test_the_weights_under_adapters_are_planned_as_they_are_allocated(
    weights: FrozenWeights, precision: torch.dtype
) -> None:
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ff": 96, "vocab_size": 128}
    s, config = gh.preset("llama-small", **sizes), LoRA(rank=4, weights=weights)
    meta, model = gh.build(s, device="meta"), gh.build(s)
    n_parameters = sum(weight.numel() for weight in meta.parameters())
    inside = sum(one.weight.numel() for one in lora.block_linears(meta).values())
    for one in (meta, model):
        lora.attach(one, config)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    memory = MemoryModel(meta, AdamW(), precision=precision)
    planned = memory.at(1, 16).parts["weights"]
    # By hand: 4 bytes, or 6 with the copy in bfloat16; or an int8 and a float32 per row, or 9 halves of a nibble.
    each = 4 if precision == torch.float32 else 6
    rows = sum(one.out_features for one in lora.block_linears(gh.build(s, device="meta")).values())
    quantized = {"own": each * inside, "int8": inside + 4 * rows, "int4": inside // 2 + inside // 32 * 2}[weights]
    assert planned == each * (n_parameters - inside + trained) + quantized

    held = [model] if precision == torch.float32 else [model, LowPrecisionCopy(model, precision).model]
    tensors = [one for part in held for one in (*part.parameters(), *(part.state_dict().values()))]
    allocated = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    scales = 2 * rows if weights == "int8" and precision == torch.bfloat16 else 0  # the copy's own, too few to plan
    assert sum(allocated.values()) == planned + scales


def test_every_gpu_has_the_quantized_weights_whole() -> None:
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ff": 96, "vocab_size": 128}
    model = gh.build(gh.preset("llama-small", **sizes), device="meta")
    inside = sum(one.weight.numel() for one in lora.block_linears(model).values())
    lora.attach(model, LoRA(rank=4, weights="int4"))
    memory = MemoryModel(model, AdamW(), layout=Layout("shard", shards=2)).at(64, 16)
    assert memory.moment in ("the loss", "the start of the backward pass")
    parameters = sum(weight.numel() for weight in model.parameters())  # whose rows are even in number
    # Half of the parameters; gathered, two blocks and what is outside, which is all; 9/16 of a byte a weight.
    assert memory.parts["weights"] == 4 * (parameters // 2 + parameters) + inside * 9 // 16


@pytest.mark.long
@pytest.mark.slow
def test_quantized_layers_store_no_more_than_plain_ones_under_adapters() -> None:
    """For the backward pass, as torch's partitioner decides, beside the weights themselves."""
    sizes = {"vocab_size": 64, "d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "d_ff": 96, "max_len": 64}
    stored = {}
    for weights in ("own", "int4"):
        model = gh.build(gh.preset("llama-small", **sizes))
        lora.attach(model, LoRA(rank=2, weights=weights))  # type: ignore[arg-type]
        assert activation_bytes(model, itemsize=4) == activation_bytes(gh.build(model.spec), itemsize=4)
        stored[weights] = stored_by_step(model, rows=2, length=64)
    assert stored["int4"] == stored["own"] <= 2 * 64 * activation_bytes(model, itemsize=4).stored


def test_micro_batches_of_every_size() -> None:
    run = small_run(batch_tokens=16 * 11)
    plan = plan_training(run, find_gpu("h200"))
    assert [(one.rows, one.grad_accum) for one in plan.micro_batches] == [(1, 11), (2, 6), (4, 3), (8, 2), (11, 1)]
    whole = plan.micro_batches[-1]
    assert (plan.rows, whole.memory, whole.tokens_per_second) == (11, plan.memory.peak, plan.tokens_per_second)
    memories = [one.memory for one in plan.micro_batches]
    assert sorted(memories) == memories
    little = find_gpu("h200", memory=1.1 * memories[1] / 0.88 / 2**30)  # two sequences fit
    small = plan_training(run, little)
    assert small.largest_rows == small.rows == 2
    assert [one.rows for one in small.micro_batches] == [1, 2, 4]


def test_muon_iterations_by_hand() -> None:
    model = gh.build(gh.preset(**_preset()), device="meta")
    # Of an r x c matrix with r <= c: x x' and the last product take 2 r r c FLOPs each, the square in between 2 r**3.
    square, key, wide = (4 * r * r * c + 2 * r**3 for r, c in ((8, 8), (4, 8), (8, 16)))
    assert update_flops(model, Muon(ns_steps=3)) == 3 * 2 * (2 * square + 2 * key + 3 * wide)
    assert update_flops(model, AdamW()) == 0


def test_logits_are_chunked_and_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gh.build(gh.preset("tiny-decoder", vocab_size=100, d_model=64), device="meta")
    monkeypatch.setattr("glasshouse.training.plan.memory.CHUNK_LOGITS", 1280)  # ten tokens of 128 padded logits
    matrices = (4 + 2 + 2) * 128 * 64  # the last: a padded copy
    assert loss_bytes(model, 50, 2, deferred=True) == 2 * 10 * 128 + matrices + 2 * 2 * 50 * 64
    assert loss_bytes(model, 50, 4, deferred=False) == 16 * 50 * 100
    assert linear_cross_entropy.ALIGNED == 64


KINDS = {
    "gpt2": ("gpt2", NO_DROPOUT),
    "squared relu, sandwich": ("gpt2", {**NO_DROPOUT, "feedforward": "relu2", "norm_placement": "sandwich"}),
    "relu, post": ("gpt2", {**NO_DROPOUT, "feedforward": "relu", "norm_placement": "post"}),
    "parallel": (
        "gpt2",
        {**NO_DROPOUT, "position": {"kind": "rotary", "fraction": 0.5}, "norm_placement": "parallel"},
    ),
    "output": ("llama-small", {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"}),
    "value embeddings": ("llama-small", {"value_embeddings": True}),
    "llama": ("llama-small", {}),
    "qwen3": ("qwen3-small", {}),
    "modern": ("modern-small", {}),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "qwen3",
        *(pytest.param(one, marks=pytest.mark.long) for one in KINDS if one not in ("gpt2", "qwen3")),
    ],
)
def test_activations_are_what_the_compiled_model_stores(name: str) -> None:
    """As torch's partitioner of forward and backward pass decides, whatever the device."""
    preset, fields = KINDS[name]
    sizes = {"vocab_size": 64, "d_model": 192, "n_layers": 3, "n_heads": 6, "d_ff": 512, "max_len": 64}
    s = gh.preset(preset, **{**fields, **sizes, "n_kv_heads": 2})
    model = gh.build(s)
    low = LowPrecisionCopy(model, torch.bfloat16, defer_logits=True).model
    rows, length = 4, 64
    planned = rows * length * activation_bytes(low, itemsize=2).stored
    assert stored_by_step(low, rows, length) == pytest.approx(planned, rel=0.06)


def stored_by_step(model: nn.Module, rows: int, length: int) -> int:
    """Return the bytes that the compiled loss stores for the backward pass, without those of the model itself."""
    ids = torch.randint(64, (rows, length))
    stored: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.state_dict().values())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = Batch(ids, targets=ids, loss_mask=torch.ones_like(ids, dtype=torch.bool))
    torch._dynamo.reset()  # its limit of compiled forms of one function is that of all models together
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = torch.compile(compute_loss, backend="aot_eager_decomp_partition", dynamic=False)(model, batch, 0.0)
    assert math.isfinite(loss)
    return sum(stored.values())


@given(st.integers(1, 200), st.integers(1, 64), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_largest_micro_batch_is_the_largest(kib: int, most: int, checkpointing: bool, muon: bool) -> None:
    model = gh.build(gh.preset(**_preset()), device="meta")
    optimizer = Muon() if muon else AdamW()
    memory = MemoryModel(model, optimizer, precision=torch.bfloat16, checkpointing=checkpointing)
    limit = kib * 2**10
    rows = memory.largest_micro_batch(16, limit, most)
    assert rows == 0 or memory.at(rows, 16, 2).peak <= limit
    assert rows == most or memory.at(rows + 1, 16, 2).peak > limit
    grad_accum = choose_grad_accum(memory, most, 16, limit)
    assert 1 <= grad_accum <= most
    if memory.at(1, 16, grad_accum).peak <= limit:
        assert memory.at(-(-most // grad_accum), 16, grad_accum).peak <= limit


def test_the_first_guess_of_gradient_accumulation_fills_the_memory() -> None:
    model = gh.build(gh.preset("gpt2", **NO_DROPOUT), device="meta")
    memory = MemoryModel(model, AdamW(), precision=torch.bfloat16)
    for gib in (16, 24, 40, 80, 141):
        guess = estimate_grad_accum(model, Train(), 4096, 1024, torch.bfloat16, gib * 2**30)
        peak = memory.at(-(-4096 // guess), 1024, guess).peak
        assert 0.7 * gib * 2**30 < peak <= USABLE * gib * 2**30, (gib, guess)
    small = estimate_grad_accum(model, Train(activation_checkpointing=True), 512, 1024, torch.bfloat16, 16 * 2**30)
    assert small < estimate_grad_accum(model, Train(), 512, 1024, torch.bfloat16, 16 * 2**30)


def test_layouts() -> None:
    def kind(gpus: int, n_parameters: int, wanted: str = "auto", tensor: int = 1) -> tuple[object, ...]:
        one = choose_layout(wanted, gpus, 8, tensor, n_parameters, memory=80 * 2**30)  # type: ignore[arg-type]
        return one.kind, one.replicas, one.shards, one.tensor

    assert kind(1, 10**12) == ("replicate", 1, 1, 1)
    assert kind(64, 10**9) == ("replicate", 64, 1, 1)  # 16 GB of 20 GiB
    assert kind(64, 7 * 10**9) == ("hybrid", 8, 8, 1)
    assert kind(64, 70 * 10**9) == ("shard", 1, 64, 1)
    assert kind(8, 7 * 10**9) == ("shard", 1, 8, 1)  # within one node, hybrid would be the same
    assert kind(64, 70 * 10**9, "hybrid") == ("hybrid", 8, 8, 1)
    assert kind(64, 10**9, "shard", tensor=4) == ("shard", 1, 16, 4)
    assert kind(64, 10**9, "hybrid", tensor=4) == ("hybrid", 8, 2, 4)
    for gpus, tensor in ((8, 3), (12, 1)):
        with pytest.raises(ConfigError, match="do not split into groups"):
            kind(gpus, 10**9, tensor=tensor)


def test_traffic_by_hand() -> None:
    sizes = {"in_blocks": 800, "outside": 80, "itemsize": 2}
    # A GPU receives three of four shards: of the blocks twice for each of two micro-batches; gradients once.
    shard = step_traffic(Layout("shard", shards=4), **sizes, grad_accum=2)
    assert shard.all_gather == 3 * (2 * (2 * 800 + 80) * 2) // 4
    assert shard.reduce_scatter == 3 * 880 * 4 // 4
    assert shard.all_reduce == shard.tensor == 0
    # A ring of replicas passes gradients around twice, of their shard alone.
    hybrid = step_traffic(Layout("hybrid", replicas=2, shards=4), **sizes, grad_accum=2)
    assert (hybrid.all_gather, hybrid.reduce_scatter) == (shard.all_gather, shard.reduce_scatter)
    assert hybrid.all_reduce == 2 * (880 * 4 // 4) // 2
    assert step_traffic(Layout("replicate", replicas=2), **sizes, grad_accum=2).total == 880 * 4
    tensor = step_traffic(Layout("replicate", tensor=2), **sizes, grad_accum=1, activations=1000)
    assert tensor.total == tensor.tensor == 1000
    gpu = Gpu("g", 1, 1, 1, link=100.0, network=10.0)
    # Eight shards on two nodes of four: what comes from the other node comes by four adapters.
    wide = step_traffic(Layout("shard", shards=8, per_node=4), **sizes, grad_accum=1)
    seconds = (wide.all_gather + wide.reduce_scatter) / 40
    assert wide.seconds(Layout("shard", shards=8, per_node=4), gpu) == (pytest.approx(seconds), 0)
    inside = hybrid.all_gather + hybrid.reduce_scatter
    apart = Layout("hybrid", replicas=2, shards=4, per_node=4)
    assert hybrid.seconds(apart, gpu)[0] == pytest.approx(inside / 100 + hybrid.all_reduce / 10)


def test_communication_that_takes_longer_than_computing_sets_the_pace() -> None:
    alone = plan_training(small_run(), ROUND)
    shared = plan_training(small_run(parallel={"kind": "shard"}), ROUND, gpus=4, per_node=4)
    assert (shared.rows, shared.batch_tokens, shared.layout.shards) == (1, 64, 4)
    assert shared.traffic_seconds == pytest.approx(shared.traffic.total / 1e6)
    assert shared.step_seconds == max(shared.compute_seconds, shared.traffic_seconds) > alone.step_seconds
    assert plan_training(small_run(), ROUND, mfu=0.25).mfu == 0.25
    # A shard of weights, gathered weights of what is outside of the blocks and of two blocks.
    assert shared.memory.parts["weights"] == 4 * TOTAL // 4 + 2 * (OUTSIDE + 2 * BLOCK)
    assert shared.memory.parts["optimizer"] == 8 * TOTAL // 4


def test_serving_by_hand() -> None:
    model = gh.build(gh.preset(**{**_preset(), "max_len": 128}), device="meta").to(torch.bfloat16)
    gpu = Gpu("g", memory=2**20, flops=1e9, bandwidth=1e9, link=1, network=1)
    plan = plan_serving(model, gpu, requests=8, prompt=50, new=20)
    # A key and a value of four numbers of two bytes in both layers, of 70 tokens and a slot for padding.
    assert (plan.kv_bytes_per_token, plan.kv_bytes_per_request) == (32, 71 * 32)
    own = plan.choices[0]
    assert (own.weights, own.weight_bytes, own.read_bytes) == ("own", 2 * TOTAL, 2 * TOTAL)
    assert own.largest_batch == int(0.9 * 2**20 - 2 * TOTAL) // (71 * 32)
    step = (2 * TOTAL + 8 * 32 * 60) / 0.79e9 + 2 * 8 * TOTAL / 1e9 + 2 * 20e-6
    assert own.step_seconds == pytest.approx(step)
    assert own.tokens_per_second == pytest.approx(8 / step)
    prefill = 50 * (2 * TOTAL + 4 * 2 * 8 * 25) / 0.63e9
    assert own.first_token_seconds == pytest.approx(prefill + step)
    assert own.last_first_token_seconds == pytest.approx(8 * prefill + step)
    assert [one.weights for one in plan.choices] == ["own", "copy"]
    (*_, int8) = plan_serving(model, gpu, requests=1, prompt=50, new=20).choices
    assert (int8.weights, int8.read_bytes < own.read_bytes) == ("int8", True)


def test_what_cannot_be_planned_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"16 sequences of 256 tokens, but 64 GPUs need one each"):
        plan_training(gh.Run.load("stdlib"), find_gpu("h200"), gpus=64)
    with pytest.raises(ConfigError, match="mfu is 40"):
        plan_training(small_run(), ROUND, mfu=40)
    with pytest.raises(InputError, match="is of kind encoder, but serving is planned for decoders"):
        load_meta_decoder("bert-base")
    with pytest.raises(ConfigError, match="tflops is -1"):
        find_gpu("h200", tflops=-1)
