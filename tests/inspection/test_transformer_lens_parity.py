"""Recorded activations equal those of TransformerLens, site by site, by the table of docs/inspection.md.

TransformerLens 3 is the last with its own models; `make inspection` installs it, since it has many dependencies.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from hub.hf_models import make
from torch import Tensor

import glasshouse as gh

lens = pytest.importorskip("transformer_lens", reason="it comes by `make inspection`")

OURS = {  # by theirs; L stands for the layer
    "blocks.L.hook_resid_pre": "resid_pre.L",
    "blocks.L.attn.hook_q": "q.L",
    "blocks.L.attn.hook_k": "k.L",
    "blocks.L.attn.hook_v": "v.L",
    "blocks.L.attn.hook_attn_scores": "scores.L",
    "blocks.L.attn.hook_pattern": "pattern.L",
    "blocks.L.attn.hook_z": "z.L",
    "blocks.L.hook_attn_out": "attn_out.L",
    "blocks.L.hook_resid_mid": "resid_mid.L",
    "blocks.L.mlp.hook_post": "hidden.L",
    "blocks.L.hook_mlp_out": "ffn_out.L",
    "blocks.L.hook_resid_post": "resid_post.L",
    "unembed.hook_in": "final",
}


def settings(act: str) -> dict[str, object]:
    sizes = {"n_layers": 3, "d_model": 40, "n_ctx": 48, "d_head": 8, "n_heads": 5, "d_vocab": 61}
    return {**sizes, "act_fn": act, "normalization_type": "LN", "device": "cpu"}


# With norms after the sum, theirs call the sum resid_mid and resid_post before the norm; there is no norm at the end.
OURS_NORM_AFTER = {
    **{theirs: ours for theirs, ours in OURS.items() if ours not in ("resid_mid.L", "resid_post.L", "final")},
    "blocks.L.hook_normalized_resid_post": "resid_post.L",
}


def equal(cache: dict[str, Tensor], ours: gh.models.Model, ids: Tensor, table: dict[str, str]) -> None:
    with torch.no_grad(), gh.record(ours, "*") as seen:
        ours(ids)
    compared = set()
    for name, theirs in cache.items():
        form = re.sub(r"blocks\.\d+", "blocks.L", name)
        if form not in table:
            continue
        value = seen[table[form].replace("L", (re.findall(r"\d+", name) or ["0"])[0])]
        if form.rpartition("_")[2] in "qkvz":
            theirs = theirs.transpose(1, 2)  # theirs have the heads after the positions
        assert value.shape == theirs.shape, name
        shown = theirs > -1e4  # scores that are hidden have a large negative number there, and -inf here
        assert (value - theirs)[shown].abs().max() <= 1e-5 * theirs[shown].abs().max(), name
        compared.add(form)
    assert compared == set(table)


def test_a_gpt2_shape(tmp_path: Path) -> None:
    from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights

    published = make("gpt2")
    published.save_pretrained(tmp_path)
    ours, _ = gh.load(tmp_path)
    theirs = lens.HookedTransformer(lens.HookedTransformerConfig(**settings("gelu_new"), d_mlp=160))
    theirs.load_state_dict(convert_gpt2_weights(published, theirs.cfg), strict=False)
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, cache = theirs.run_with_cache(ids)
    equal(dict(cache), ours, ids, OURS)


def test_a_bert_shape(tmp_path: Path) -> None:
    from transformer_lens.pretrained.weight_conversions.bert import convert_bert_weights

    published = make("bert-masked")
    published.save_pretrained(tmp_path)
    ours, _ = gh.load(tmp_path)
    shape = {"d_mlp": 56, "eps": 1e-12, "attention_dir": "bidirectional"}
    theirs = lens.HookedEncoder(lens.HookedTransformerConfig(**settings("gelu"), **shape))
    whole = hf.BertForPreTraining(published.config)  # which has the modules that their loader needs
    whole.load_state_dict(published.state_dict(), strict=False)
    theirs.load_state_dict(convert_bert_weights(whole, theirs.cfg), strict=False)
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, cache = theirs.run_with_cache(ids)
    equal(dict(cache), ours, ids, OURS_NORM_AFTER)
