"""Recorded activations equal those of TransformerLens, site by site, by the table of docs/inspection.md.

TransformerLens 3 is the last with its own models; `make inspection` installs it, since it has many dependencies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hub.hf_models import make
from torch import Tensor

import glasshouse as gh

lens = pytest.importorskip("transformer_lens", reason="it comes by `make inspection`")

OURS = {  # by theirs; L stands for the layer
    "hook_embed": "token_embed",
    "blocks.L.ln1.hook_scale": "attn_norm_scale.L",
    "blocks.L.attn.hook_result": "result.L",
    "blocks.L.ln2.hook_scale": "ffn_norm_scale.L",
    "blocks.L.mlp.hook_pre": "hidden_pre.L",
    "ln_final.hook_scale": "final_norm_scale",
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


WITH_NORM_BEFORE = {
    "resid_mid.L", "resid_post.L", "final", "attn_norm_scale.L", "ffn_norm_scale.L", "final_norm_scale", "result.L",
    "token_embed",
}  # fmt: skip
# With norms after the sum, theirs call the sum resid_mid and resid_post before the norm; there is no norm at the end.
OURS_NORM_AFTER = {
    **{theirs: ours for theirs, ours in OURS.items() if ours not in WITH_NORM_BEFORE},
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
        if form.rpartition("_")[2] in ("q", "k", "v", "z", "result"):
            theirs = theirs.transpose(1, 2)  # theirs have the heads after the positions
        if form.endswith("scale"):
            theirs = theirs[..., 0]
        assert value.shape == theirs.shape, name
        shown = theirs > -1e4  # scores that are hidden have a large negative number there, and -inf here
        assert (value - theirs)[shown].abs().max() <= 1e-5 * theirs[shown].abs().max(), name
        compared.add(form)
    assert compared == set(table)


def gpt2_pair(folder: Path) -> tuple[gh.models.Model, Any]:
    """Return our model and theirs with the same weights."""
    from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights

    published = make("gpt2")
    published.save_pretrained(folder)
    ours, _ = gh.load(folder)
    config = lens.HookedTransformerConfig(**settings("gelu_new"), d_mlp=160, use_attn_result=True)
    theirs = lens.HookedTransformer(config)
    theirs.load_state_dict(convert_gpt2_weights(published, theirs.cfg), strict=False)
    return ours, theirs


def test_a_gpt2_shape(tmp_path: Path) -> None:
    ours, theirs = gpt2_pair(tmp_path)
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


NAMES = [f"{kind}_{name}" for kind in "Wb" for name in ("Q", "K", "V", "O", "in", "out", "U")] + ["W_E", "W_pos"]


def test_patching_every_head_at_every_position(tmp_path: Path) -> None:
    """Their sweep and ours, one patch at a time, and the estimate by the product of theirs with their gradients."""
    from transformer_lens import patching

    ours, theirs = gpt2_pair(tmp_path)
    corrupted, clean = torch.randint(0, 61, (2, 1, 7), generator=torch.Generator().manual_seed(0))

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, 3] - logits[0, -1, 4]

    with torch.no_grad():
        _, cache = theirs.run_with_cache(clean)
        swept = patching.get_act_patch_attn_head_out_by_pos(
            theirs, corrupted, cache, metric
        )  # [layer, position, head]
    axis = ("position", "head")
    found = gh.inspection.activation_patching(ours, corrupted, clean, "z", axis=axis, metric=metric)
    # Rounding of some hundred float32 operations in either, relative to the largest.
    assert (found.metric_values - swept).abs().max() <= 1e-5 * swept.abs().max()

    seen: dict[int, Tensor] = {}

    def keep(z: Tensor, hook: Any) -> None:  # noqa: ANN401 - their HookPoint
        seen[hook.layer()] = z

    value = metric(theirs.run_with_hooks(corrupted, fwd_hooks=[(lambda name: name.endswith("hook_z"), keep)]))
    slopes = torch.autograd.grad(value, list(seen.values()))
    each = [
        ((cache[f"blocks.{layer}.attn.hook_z"] - z) * slope).sum((0, 3))
        for (layer, z), slope in zip(seen.items(), slopes, strict=True)
    ]
    expected = torch.stack(each).detach()
    estimated = gh.inspection.attribution_patching(ours, corrupted, clean, "z", axis=axis, metric=metric)
    gain = estimated.metric_values - estimated.corrupted_baseline
    assert (gain - expected).abs().max() <= 1e-5 * estimated.metric_values.abs().max()
    assert gain.abs().max() > 1e-3


@pytest.mark.parametrize("fold_norm", [False, True])
def test_the_weights_of_a_gpt2_shape(tmp_path: Path, fold_norm: bool) -> None:
    """All in float32: rounding of a norm or a product of 40 terms is 1e-6 of the largest."""
    from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights

    published = make("gpt2")
    published.save_pretrained(tmp_path)
    model, _ = gh.load(tmp_path)
    ours = gh.weights(model, fold_norm=fold_norm)
    theirs = lens.HookedTransformer(lens.HookedTransformerConfig(**settings("gelu_new"), d_mlp=160))
    converted = convert_gpt2_weights(published, theirs.cfg)
    if fold_norm:  # theirs also centre the weights, which changes nothing on a centred stream
        converted = theirs.fold_layer_norm({**theirs.state_dict(), **converted}, center_weights=False)
    theirs.load_state_dict(converted, strict=False)
    with torch.no_grad():
        for name in NAMES:
            own = getattr(ours, name, None)
            if own is None:  # no bias of the logits, which theirs have as zeros
                assert name == "b_U"
                assert not getattr(theirs, name).any()
                continue
            value = own if isinstance(own, Tensor) else own.stack()
            assert value.shape == getattr(theirs, name).shape, name
            assert (value - getattr(theirs, name)).abs().max() <= 1e-6 * value.abs().max(), name
        for circuit in ("QK", "OV"):
            expected = getattr(theirs, circuit).AB
            assert (getattr(ours, circuit).stack().matrix() - expected).abs().max() <= 1e-5 * expected.abs().max()
        for mode in ("Q", "K", "V"):
            expected = theirs.all_composition_scores(mode).permute(2, 3, 0, 1)  # theirs have the writer first
            assert (ours.composition(mode).scores - expected).abs().max() <= 1e-5
        virtual = theirs.W_E @ theirs.OV @ theirs.W_U
        eigenvalues = virtual.eigenvalues
        expected = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
        assert (ours.copying_scores() - expected).abs().max() <= 1e-5
