"""Activation patching: statement V4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.inspection.patching.activation_patching import activation_patching, patch
from glasshouse.spec import DecoderSpec, Learned, NextToken, RMSNorm

TOKENS, POSITIONS, HEADS = 7, 5, 3
TOKEN, POSITION, OUTPUT = 0, TOKENS, TOKENS + POSITIONS  # where each subspace of a vector begins
WIDTH = TOKENS + POSITIONS + TOKENS
PREVIOUS, CURRENT, UNIFORM = range(HEADS)


def set_block(weight: Tensor, row: int, column: int, block: Tensor) -> None:
    weight[row : row + block.shape[0], column : column + block.shape[1]] = block


@pytest.fixture
def copy_model() -> nn.Module:
    """Return a model with hand-set weights that predicts the previous token.

    A vector has one-hot subspaces for token, position and output. Head 0 attends to the previous position and copies
    its token to the output. Head 1 attends to its own position and copies the token at half the strength. Head 2
    attends uniformly and copies to the token subspace, which nothing reads again.
    """
    spec = DecoderSpec(
        vocab_size=TOKENS,
        d_model=WIDTH,
        n_layers=1,
        n_heads=HEADS,
        d_head=TOKENS,
        d_ff=1,
        max_len=POSITIONS,
        position=Learned(),
        norm=RMSNorm(eps=1e-6),
        final_norm=False,
        head=NextToken(tied=False),
        attention_scale=1.0,
    )
    model = gh.build(spec, dtype=torch.float64).eval()
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in names.items():
            if "norm" not in name:  # those stay at 1: all vectors have the same norm, so normalising only scales
                weight.zero_()
        token, position = torch.eye(TOKENS), torch.eye(POSITIONS)
        previous = torch.diag(torch.ones(POSITIONS - 1), 1)  # maps a position to the one before, the first to none
        set_block(names["token_embedding.table.weight"], 0, TOKEN, token)
        set_block(names["stack.position.table.weight"], 0, POSITION, position)
        set_block(names["head.weight"], 0, OUTPUT, token)
        attention = model.stack.blocks[0].attention.layer
        for head, attends_to in ((PREVIOUS, previous), (CURRENT, position)):
            # A difference of 1000 or more between scores gives weights of 1 and 0: exp(-1000) is 0 in float64.
            set_block(attention.query.weight, head * TOKENS, POSITION, 1000 * attends_to)
            set_block(attention.key.weight, head * TOKENS, POSITION, position)
        for head, target, strength in ((PREVIOUS, OUTPUT, 1.0), (CURRENT, OUTPUT, 0.5), (UNIFORM, TOKEN, 1.0)):
            set_block(attention.value.weight, head * TOKENS, TOKEN, token)
            set_block(attention.out.weight, target, head * TOKENS, strength * token)
    return model


CORRUPTED = torch.tensor([[2, 5, 1, 4, 3]])
CLEAN = torch.tensor([[2, 5, 1, 6, 3]])
CHANGED, LAST = 3, 4


def test_v4_copy_model_predicts_the_previous_token(copy_model: nn.Module) -> None:
    """The model's predictions and the pattern of head 0, on random text."""
    ids = torch.randint(TOKENS, (20, POSITIONS))
    with gh.record(copy_model, "pattern.0") as recording:
        logits = copy_model(ids)
    assert torch.equal(logits[:, 1:].argmax(-1), ids[:, :-1])
    pattern = recording["pattern.0"][:, PREVIOUS, 1:]
    assert torch.equal(pattern, torch.eye(POSITIONS, dtype=torch.float64)[:-1].expand_as(pattern))


def test_v4_patching_identifies_the_head(copy_model: nn.Module) -> None:
    """Patching the copying head alone restores the prediction, and restores all of it."""
    found = activation_patching(copy_model, CORRUPTED, CLEAN, "z")
    assert found.effect.tolist() == [[1.0, 0.0, 0.0]]
    logits = patch(copy_model, CORRUPTED, CLEAN, f"z.0[head={PREVIOUS}]")[0, LAST]
    assert logits.argmax() == CLEAN[0, CHANGED]
    assert torch.equal(logits, copy_model(CLEAN)[0, LAST])


def test_v4_patching_identifies_source_and_destination_positions(copy_model: nn.Module) -> None:
    """The head reads the changed token at the previous position and writes it at the last; no other matters."""
    source, destination = (
        activation_patching(copy_model, CORRUPTED, CLEAN, site, axis="position").effect[0] for site in ("v", "z")
    )
    assert source.tolist() == [float(i == CHANGED) for i in range(POSITIONS)]
    assert destination.tolist() == [float(i == LAST) for i in range(POSITIONS)]
    baseline = copy_model(CORRUPTED)
    patched = patch(copy_model, CORRUPTED, CLEAN, f"v.0[head={PREVIOUS}, position={CHANGED}]")
    changed = (patched != baseline).any(-1)[0]
    assert changed.tolist() == [i == LAST for i in range(POSITIONS)]


def test_v4_ablating_the_head_stops_the_copy(copy_model: nn.Module) -> None:
    """With that head ablated, the changed token does not reach the last position."""
    last = [patch(copy_model, CORRUPTED, CLEAN, f"embed[position={CHANGED}]")[0, LAST], copy_model(CLEAN)[0, LAST]]
    assert torch.equal(*last)
    with gh.edit(copy_model, {"z.0": gh.ablate_head(PREVIOUS)}):
        ablated = copy_model(CORRUPTED)[0, LAST]
        assert torch.equal(patch(copy_model, CORRUPTED, CLEAN, f"embed[position={CHANGED}]")[0, LAST], ablated)
