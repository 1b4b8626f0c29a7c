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
from table_rows import table_row
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


# Gated: their `hook_pre` is the gate. Rotated queries and keys have hooks of their own.
OURS_GATED = {
    **{
        theirs: ours
        for theirs, ours in OURS.items()
        if theirs not in ("blocks.L.attn.hook_q", "blocks.L.attn.hook_k")
    },
    "blocks.L.attn.hook_rot_q": "q.L",
    "blocks.L.attn.hook_rot_k": "k.L",
    "blocks.L.mlp.hook_pre": "gate.L",
    "blocks.L.mlp.hook_pre_linear": "hidden_pre.L",
}
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


@table_row(
    "`hook_embed`",
    "`hook_embed` + `hook_pos_embed`",
    "`blocks.L.hook_resid_pre`",
    "`blocks.L.attn.hook_q`",
    "`blocks.L.attn.hook_attn_scores`",
    "`blocks.L.attn.hook_pattern`",
    "`blocks.L.attn.hook_z`",
    "`blocks.L.attn.hook_result`",
    "`blocks.L.hook_attn_out`",
    "`blocks.L.mlp.hook_post`",
    "`blocks.L.mlp.hook_pre`",
    "`blocks.L.ln1.hook_scale`",
    "`blocks.L.ln1.hook_normalized`",
    "`unembed.hook_in`",
    "`run_with_cache(ids)`",
)
def test_a_gpt2_shape(tmp_path: Path) -> None:
    ours, theirs = gpt2_pair(tmp_path)
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, cache = theirs.run_with_cache(ids)
    equal(dict(cache), ours, ids, OURS)
    with torch.no_grad(), gh.record(ours, "*") as seen:
        ours(ids)

    def same(value: Tensor, expected: Tensor) -> None:
        assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()

    same(seen["embed"], cache["hook_embed"] + cache["hook_pos_embed"])
    # Theirs are normalized alone; ours are what the layer after the norm receives.
    for layer, block in enumerate(theirs.blocks):
        for name, norm in (("attn_norm", block.ln1), ("ffn_norm", block.ln2)):
            normalized = cache[f"blocks.{layer}.{'ln1' if norm is block.ln1 else 'ln2'}.hook_normalized"]
            same(seen[f"{name}.{layer}"], normalized * norm.w + norm.b)
    same(seen["final"], cache["ln_final.hook_normalized"] * theirs.ln_final.w + theirs.ln_final.b)


def test_a_llama_shape(tmp_path: Path) -> None:
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights

    published = make("llama")
    published.save_pretrained(tmp_path)
    ours, _ = gh.load(tmp_path)
    sizes = {"n_layers": 3, "d_model": 48, "n_ctx": 64, "d_head": 8, "n_heads": 6, "n_key_value_heads": 2}
    gated = {"d_vocab": 61, "d_mlp": 72, "act_fn": "silu", "gated_mlp": True, "normalization_type": "RMS"}
    rotary = {"positional_embedding_type": "rotary", "rotary_dim": 8, "rotary_adjacent_pairs": False}
    more = {"eps": published.config.rms_norm_eps, "final_rms": True, "device": "cpu", "use_attn_result": True}
    config = lens.HookedTransformerConfig(**sizes, **gated, **rotary, **more)
    theirs = lens.HookedTransformer(config)
    theirs.load_state_dict(convert_llama_weights(published, config), strict=False)
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, cache = theirs.run_with_cache(ids)
    shared = {name: value for name, value in cache.items() if not name.endswith(("hook_v",))}
    equal(shared, ours, ids, {theirs: ours for theirs, ours in OURS_GATED.items() if not theirs.endswith("hook_v")})
    with torch.no_grad(), gh.record(ours, "v.1") as seen:
        ours(ids)
    assert (seen["v.1"] - cache["blocks.1.attn.hook_v"].transpose(1, 2)).abs().max() <= 1e-5  # by KV head


@table_row("`run_with_hooks(ids, fwd_hooks=[...])`")
def test_hooks_that_change_activations(tmp_path: Path) -> None:
    ours, theirs = gpt2_pair(tmp_path)
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))

    def without_a_head(z: Tensor, hook: Any) -> Tensor:  # noqa: ANN401 - their HookPoint
        z[:, :, 3] = 0
        return z

    def doubled(neurons: Tensor, hook: Any) -> Tensor:  # noqa: ANN401 - their HookPoint
        return 2 * neurons

    hooks = [("blocks.1.attn.hook_z", without_a_head), ("blocks.2.mlp.hook_post", doubled)]
    with torch.no_grad():
        expected = theirs.run_with_hooks(ids, fwd_hooks=hooks)
        with gh.edit(ours, {"z.1": gh.ablate_head(3), "hidden.2": gh.inspection.scale(2.0)}):
            found = ours(ids)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (found - ours(ids)).abs().max() > 0.1


@table_row("`cache.logit_attrs`, `logit_lens`, `stack_head_results`")
def test_attribution_and_lens(tmp_path: Path) -> None:
    """Theirs takes the gain of the last norm from the unembedding, into which it is folded before."""
    from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights

    published = make("gpt2")
    published.save_pretrained(tmp_path)
    ours, _ = gh.load(tmp_path)
    theirs = lens.HookedTransformer(
        lens.HookedTransformerConfig(**settings("gelu_new"), d_mlp=160, use_attn_result=True)
    )
    converted = {**theirs.state_dict(), **convert_gpt2_weights(published, theirs.cfg)}
    theirs.load_state_dict(theirs.fold_layer_norm(converted, center_weights=False), strict=False)
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    tokens, wrong = torch.tensor([7, 8]), torch.tensor([9, 10])
    with torch.no_grad():
        _, cache = theirs.run_with_cache(ids)
        heads, names = cache.stack_head_results(return_labels=True, pos_slice=-1)
        # Biases are a part of their own in ours.
        mlps = torch.stack([cache[f"blocks.{layer}.hook_mlp_out"][:, -1] - theirs.b_out[layer] for layer in range(3)])
        expected = [cache.logit_attrs(one, tokens, wrong, pos_slice=-1) for one in (heads, mlps)]
        split = gh.attribute(ours, ids, position=-1, token=tokens, incorrect_token=wrong)
        depths, _ = cache.accumulated_resid(return_labels=True, apply_ln=True)
        read = (depths @ theirs.W_U + theirs.b_U).log_softmax(-1)
        found = gh.lens(ours, ids, top_k=3)
    assert len(names) == split.heads[0].numel()
    for own, other in ((split.heads.flatten(1), expected[0].T), (split.feedforward, expected[1].T)):
        assert (own - other).abs().max() <= 1e-5 * other.abs().max()
    best = read.topk(3)
    # Theirs has the layers 0, 1, 2 and the end, as ours: the embedding, then after each block.
    assert torch.equal(found.tokens, best.indices)
    assert (found.probabilities - best.values.exp()).abs().max() <= 1e-5


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


@table_row("`patching.get_act_patch_attn_head_out_by_pos")
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


@table_row("`model.W_Q`", "`FactoredMatrix`", "`fold_ln=True`", '`all_composition_scores("K")`')
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
