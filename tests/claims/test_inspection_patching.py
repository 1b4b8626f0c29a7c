"""Looking inside by patching: statement V4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.inspection.patching import activation_patching, patch
from glasshouse.spec import DecoderSpec, Learned, NextToken, RMSNorm

TOKENS, PLACES, HEADS = 7, 5, 3
TOKEN, PLACE, ANSWER = 0, TOKENS, TOKENS + PLACES  # where each part of a vector begins
WIDTH = TOKENS + PLACES + TOKENS
BEFORE, ITSELF, EVERYWHERE = range(HEADS)


def set_part(weight: Tensor, row: int, column: int, part: Tensor) -> None:
    weight[row : row + part.shape[0], column : column + part.shape[1]] = part


@pytest.fixture
def copier() -> nn.Module:
    """Make a model whose every weight is set by hand: it answers with the token before.

    A vector has room for a token, a place and an answer, each one-hot. Head 0 looks at the place before and copies
    its token to the answer. Head 1 looks at its own place and copies the token as well, at half the strength. Head 2
    looks everywhere alike and copies to the room of the tokens, which nothing reads again.
    """
    spec = DecoderSpec(
        vocab_size=TOKENS,
        d_model=WIDTH,
        n_layers=1,
        n_heads=HEADS,
        d_head=TOKENS,
        d_ff=1,
        max_len=PLACES,
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
            if "norm" not in name:  # those stay at 1: all vectors are of one length, so a norm only scales
                weight.zero_()
        token, place = torch.eye(TOKENS), torch.eye(PLACES)
        one_before = torch.diag(torch.ones(PLACES - 1), 1)  # maps a place to the one before, the first to nothing
        set_part(names["token_embedding.table.weight"], 0, TOKEN, token)
        set_part(names["stack.position.table.weight"], 0, PLACE, place)
        set_part(names["head.weight"], 0, ANSWER, token)
        attention = model.stack.blocks[0].attention.layer
        for head, looks_at in ((BEFORE, one_before), (ITSELF, place)):
            # Scores of 1000 and more apart leave weights of 1 and 0: exp(-1000) is 0 in float64.
            set_part(attention.query.weight, head * TOKENS, PLACE, 1000 * looks_at)
            set_part(attention.key.weight, head * TOKENS, PLACE, place)
        for head, room, strength in ((BEFORE, ANSWER, 1.0), (ITSELF, ANSWER, 0.5), (EVERYWHERE, TOKEN, 1.0)):
            set_part(attention.value.weight, head * TOKENS, TOKEN, token)
            set_part(attention.out.weight, room, head * TOKENS, strength * token)
    return model


HERE = torch.tensor([[2, 5, 1, 4, 3]])
THERE = torch.tensor([[2, 5, 1, 6, 3]])
CHANGED, LAST = 3, 4


def test_v4_the_copier_answers_with_the_token_before(copier: nn.Module) -> None:
    """What the other tests here start from: the answers, and where the head looks, at any text."""
    ids = torch.randint(TOKENS, (20, PLACES))
    with gh.record(copier, "pattern.0") as seen:
        logits = copier(ids)
    assert torch.equal(logits[:, 1:].argmax(-1), ids[:, :-1])
    looks = seen["pattern.0"][:, BEFORE, 1:]
    assert torch.equal(looks, torch.eye(PLACES, dtype=torch.float64)[:-1].expand_as(looks))


def test_v4_patching_shows_which_head_moved_the_token(copier: nn.Module) -> None:
    """Of all heads, the one that copies alone takes the answer with it, and takes all of it."""
    found = activation_patching(copier, HERE, THERE, "z")
    assert found.effect.tolist() == [[1.0, 0.0, 0.0]]
    answer = patch(copier, HERE, THERE, f"z.0[head={BEFORE}]")[0, LAST]
    assert answer.argmax() == THERE[0, CHANGED]
    assert torch.equal(answer, copier(THERE)[0, LAST])


def test_v4_patching_shows_from_which_token_to_which(copier: nn.Module) -> None:
    """The head reads the change at the token before, and writes it at the last; nowhere else does it matter."""
    read, written = (activation_patching(copier, HERE, THERE, site, axis="position").effect[0] for site in ("v", "z"))
    assert read.tolist() == [float(i == CHANGED) for i in range(PLACES)]
    assert written.tolist() == [float(i == LAST) for i in range(PLACES)]
    plain = copier(HERE)
    patched = patch(copier, HERE, THERE, f"v.0[head={BEFORE}, position={CHANGED}]")
    moved = (patched != plain).any(-1)[0]
    assert moved.tolist() == [i == LAST for i in range(PLACES)]


def test_v4_without_the_head_nothing_is_moved(copier: nn.Module) -> None:
    """With that head silenced, the changed token reaches the last position in no other way."""
    last = [patch(copier, HERE, THERE, f"embed[position={CHANGED}]")[0, LAST], copier(THERE)[0, LAST]]
    assert torch.equal(*last)
    with gh.edit(copier, {"z.0": gh.ablate_head(BEFORE)}):
        silenced = copier(HERE)[0, LAST]
        assert torch.equal(patch(copier, HERE, THERE, f"embed[position={CHANGED}]")[0, LAST], silenced)
