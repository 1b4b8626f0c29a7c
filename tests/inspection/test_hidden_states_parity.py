"""Recorded hidden states and attention weights equal those of transformers, for every family.

The systems differ in the order of sums, float32: 1e-5 of the largest entry, as in tests/hub/test_parity.py.
"""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import pytest
import torch
from hub.hf_models import EACH_FAMILY, make
from table_rows import table_row
from torch import Tensor

import glasshouse as gh
from glasshouse.models import Seq2Seq
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.views.attention import Tile, map_tiles

LENGTHS = torch.tensor([11, 7])


def draw(vocab_size: int, pad: int | None) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, vocab_size - 1, (2, 11), generator=torch.Generator().manual_seed(0))
    real = torch.arange(11) < LENGTHS[:, None]
    return torch.where(real, ids, pad or 0), real


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_hidden_states_and_attention_weights_equal(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours, _ = gh.load(tmp_path)
    ids, real = draw(ours.spec.vocab_size, ours.spec.pad_id)
    kwargs = {"attention_mask": real.long(), "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad(), gh.record(ours, "*") as seen:
        if isinstance(ours, Seq2Seq):
            out = theirs(input_ids=ids, decoder_input_ids=ids, decoder_attention_mask=real.long(), **kwargs)
            ours(ids, ids, lengths=LENGTHS, target_lengths=LENGTHS)
        else:
            out = theirs(input_ids=ids, **kwargs)
            ours(ids, lengths=LENGTHS)
    if isinstance(ours, Seq2Seq):
        for side in ("encoder", "decoder"):
            compare_stack(seen, f"{side}.", out[f"{side}_hidden_states"], out[f"{side}_attentions"], real)
        for layer, weights in enumerate(out.cross_attentions):
            cross = seen[f"decoder.cross_pattern.{layer}"]
            for row, length in enumerate(LENGTHS.tolist()):
                assert_close(cross[row, :, :length, :length], weights[row, :, :length, :length])
    else:
        compare_stack(seen, "", out.hidden_states, out.attentions, real)


def compare_stack(
    seen: gh.inspection.Recording,
    prefix: str,
    hidden: tuple[Tensor, ...],
    attentions: tuple[Tensor, ...],
    real: Tensor,
) -> None:
    depth = len(attentions)
    assert_close(seen[f"{prefix}embed"][real], hidden[0][real])
    for layer in range(depth):
        assert_close(seen[f"{prefix}resid_pre.{layer}"][real], hidden[layer][real])
        if layer < depth - 1:  # theirs has the last one after the final norm
            assert_close(seen[f"{prefix}resid_post.{layer}"][real], hidden[layer + 1][real])
        for row, length in enumerate(LENGTHS.tolist()):
            mine = seen[f"{prefix}pattern.{layer}"][row, :, :length, :length]
            assert_close(mine, attentions[layer][row, :, :length, :length])
    assert_close(seen[f"{prefix}final"][real], hidden[depth][real])


@table_row("BertViz `head_view`, `model_view`")
def test_the_attention_view_draws_what_bertviz_is_given(tmp_path: Path) -> None:
    """BertViz draws `attentions` of transformers' output."""
    theirs = make("gpt2")
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours, _ = gh.load(tmp_path)
    look = gh.look(ours, None, "3 1 4 1 5 9 2 6", view="attention")
    with torch.no_grad():
        weights = theirs(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), output_attentions=True).attentions
    prompt = ForwardPass(PagePrompt("3 1 4 1 5 9 2 6"))
    for layer, heads in enumerate(weights):
        for head, expected in enumerate(heads[0]):
            packed = map_tiles.tile(look.traces, Tile(prompt, "pattern", layer, head))["cells"]
            shown = torch.frombuffer(bytearray(b64decode(packed["f32"])), dtype=torch.float32).view(8, 8)
            assert_close(shown.clamp(min=0), expected)  # below 0 where masked
