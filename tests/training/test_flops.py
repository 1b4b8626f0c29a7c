"""FLOPs of a step: derived by hand, and as torch counts them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.layers import lora
from glasshouse.models.flops import FlopEstimator
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.training.setup.model import freeze

D, V, LENGTH, ROWS, SOURCE = 32, 50, 12, 3, 7
FROZEN: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "embedding": ("token_embedding",),
    "below": ("token_embedding", "stack.position", "stack.blocks.0"),
    "blocks": ("stack.blocks.*",),
    "all but the head": ("token_embedding", "segment", "stack"),
    "norms alone learn": ("token_embedding", "*.layer", "head"),
    "encoder": ("token_embedding", "encoder"),
    "decoder": ("decoder",),
}


def make(kind: str, **choices: Any) -> tuple[gh.models.Model, Batch]:  # noqa: ANN401
    sizes = {"vocab_size": V, "d_model": D, "n_layers": 2, "n_heads": 4, "max_len": 16}
    model = gh.build(gh.spec.parse({"kind": kind, **sizes, **choices}))
    ids = torch.randint(V, (ROWS, LENGTH))
    if kind == "seq2seq":
        return model, Batch(ids, ids, ids >= 0, source=torch.randint(V, (ROWS, SOURCE)))
    if choices.get("head", {}).get("kind") == "sequence_classification":
        labels = torch.zeros(ROWS, dtype=torch.long)
        return model, Batch(ids, labels, labels == 0)
    return model, Batch(ids, ids, ids >= 0)


def test_frozen_matrices_by_hand() -> None:
    model, batch = make("decoder", n_layers=2)
    tokens = ROWS * LENGTH
    block, scores, table = 12 * D**2, 4 * D * LENGTH, V * D  # numbers in a block; operations of attention, forward
    assert FlopEstimator(model)(batch.ids, batch.source) == tokens * (2 * (6 * block + 3 * scores) + 6 * table)

    # The first block and the embeddings are frozen: forward alone there. Behind the first trained norm all is as
    # ever, but the head, which is the frozen table, has no gradient of its own.
    freeze(model, ["token_embedding", "stack.position", "stack.blocks.0"])
    below, above = 2 * block + scores, 6 * block + 3 * scores
    assert FlopEstimator(model)(batch.ids, batch.source) == tokens * (below + above + 4 * table)

    # Adapters on the queries and values: no gradient goes below those of the first block. There the maps of queries,
    # keys and values, D^2 each, are read forward; the map out and the feed-forward pass a gradient on (4). In the
    # second block every frozen map does. An adapter is 2 matrices of 4 * D; only the first block's lower ones have
    # an input that needs no gradient.
    model, batch = make("decoder", n_layers=2)
    lora.attach(model, lora.LoRA(rank=4))
    thin = 4 * D
    first = 2 * 3 * D**2 + 4 * 9 * D**2 + 2 * (4 * thin + 6 * thin)
    second = 4 * 12 * D**2 + 2 * (6 * thin + 6 * thin)
    assert FlopEstimator(model)(batch.ids, batch.source) == tokens * (first + second + 2 * 3 * scores + 4 * table)


def test_an_encoder_decoder_by_hand() -> None:
    model, batch = make("seq2seq", n_layers=1, position="rotary")
    # A block of the decoder has 14 D^2 numbers that read the target (attention 4, the queries and output of
    # cross-attention 2, feed-forward 8), and 2 D^2 for the keys and values of the source.
    reads, writes, table = ROWS * SOURCE, ROWS * LENGTH, V * D
    scores = 4 * D * LENGTH + 4 * D * SOURCE
    decoder = writes * (6 * 14 * D**2 + 3 * scores + 6 * table)
    encoder = reads * (6 * 12 * D**2 + 3 * 4 * D * SOURCE)
    assert FlopEstimator(model)(batch.ids, batch.source) == decoder + encoder + reads * 6 * 2 * D**2
    freeze(
        model, ["encoder", "token_embedding"]
    )  # nothing below the encoder's output is trained, so no gradient reaches it
    decoder = writes * (6 * 14 * D**2 + 3 * scores + 4 * table)
    encoder = reads * (2 * 12 * D**2 + 4 * D * SOURCE)
    assert FlopEstimator(model)(batch.ids, batch.source) == decoder + encoder + reads * 4 * 2 * D**2


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("decoder", {}),
    "modern": ("decoder", {"feedforward": "swiglu", "n_kv_heads": 2, "qk_norm": True, "position": "rotary"}),
    "parallel": ("decoder", {"position": {"kind": "rotary", "fraction": 0.5}, "norm_placement": "parallel"}),
    "output": ("decoder", {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"}),
    "value embeddings": ("decoder", {"value_embeddings": True, "n_layers": 3}),
    "own head": ("decoder", {"head": {"kind": "next_token", "tied": False}, "norm_placement": "post"}),
    "encoder": ("encoder", {"n_segments": 2}),
    "labels": ("encoder", {"head": {"kind": "sequence_classification", "n_labels": 5}}),
    "seq2seq": ("seq2seq", {"position": "relative"}),
}


@pytest.mark.long
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_torchs_count(name: str, frozen: str) -> None:
    kind, choices = MODELS[name]
    model, batch = make(kind, **choices)
    names = [name for name, _ in model.named_modules()]
    freeze(model, [one for one in FROZEN[frozen] if any(fnmatchcase(name, one) for name in names)])
    _assert_equals_torch(model, batch)


@pytest.mark.long
@pytest.mark.parametrize("targets", [("query", "value"), ("down",), ("*",)])
@pytest.mark.parametrize("name", MODELS)
def test_lora_flops_equal_torchs_count(name: str, targets: tuple[str, ...]) -> None:
    kind, choices = MODELS[name]
    model, batch = make(kind, **choices)
    lora.attach(model, lora.LoRA(rank=2, targets=targets))
    _assert_equals_torch(model, batch)


def _assert_equals_torch(model: gh.models.Model, batch: Batch) -> None:
    """Compare with a real step, less attention's own products, which torch does not count on a CPU."""
    with FlopCounterMode(display=False) as counter:
        loss = compute_loss(model, batch)
        if loss.requires_grad:
            loss.backward()
    counts = counter.get_flop_counts()["Global"]
    counted = sum(number for op, number in counts.items() if "bmm" not in str(op) and "mm" in str(op))
    flops = FlopEstimator(model)
    flops.stack.scores = flops.stack.cross_scores = flops.source_stack.scores = 0
    assert flops(batch.ids, batch.source) == counted
