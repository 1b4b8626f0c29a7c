"""Site names for every kind of model: what they select, and the errors for those that select nothing."""

from __future__ import annotations

import pytest
import torch

import glasshouse as gh
from glasshouse.inspection.sites import select, sites


def names(preset: str, name: str, **settings: object) -> list[str]:
    return [one.name for one in select(gh.build(gh.preset(preset, **settings)), name)]


def test_star_stands_for_every_layer_and_nothing_else() -> None:
    assert names("tiny-decoder", "resid_post.*", n_layers=3) == ["resid_post.0", "resid_post.1", "resid_post.2"]
    assert names("tiny-seq2seq", "decoder.pattern.*") == ["decoder.pattern.0", "decoder.pattern.1"]
    assert names("tiny-seq2seq", "decoder.cross_pattern.*") == ["decoder.cross_pattern.0", "decoder.cross_pattern.1"]


def test_a_printed_site_leaves_the_model_out() -> None:
    (site,) = select(gh.build(gh.preset("tiny-decoder")), "z.0")
    assert repr(site.site) == (
        "Site(name='z.0', axes=('batch', 'head', 'position', 'width'), "
        "path='stack.blocks.0.attention.layer.attend', hook_point='output')"
    )


def test_an_encoder_decoder_has_the_sites_of_both_stacks() -> None:
    one, both = (sites(gh.build(gh.preset(name, n_layers=1))) for name in ("tiny-encoder", "tiny-seq2seq"))
    assert [name for name in both if name.startswith("encoder.")] == [f"encoder.{name}" for name in one]
    decoder = [name.removeprefix("decoder.") for name in both if name.startswith("decoder.")]
    assert [name for name in decoder if not name.startswith("cross_")] == list(one)
    cross = {"q", "k", "v", "scores", "pattern", "z", "result", "attn_out", "attn_norm_scale", "resid_mid"}
    assert {name for name in decoder if name.startswith("cross_")} == {f"cross_{name}.0" for name in cross}


@pytest.mark.long
def test_a_compiled_model_has_the_sites_of_the_wrapped_model() -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    assert sites(torch.compile(model)) == sites(model)


def test_an_index_is_normalized() -> None:
    (one,) = select(gh.build(gh.preset("tiny-decoder")), " pattern.0 [ query = 1: ,head=-1,key=:3]")
    assert one.name == "pattern.0[head=-1, query=1:, key=:3]"
    assert one.index == (slice(None), -1, slice(1, None), slice(None, 3))
    assert one.axes == ("batch", "query", "key")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("patern.0", "no site 'patern.0'; did you mean pattern.0?"),
        ("pattern.7", "no site 'pattern.7'; its layers are 0 to 1."),
        ("pattern.0[hed=1]", "no axis 'hed'; did you mean head?"),
        ("pattern.0[position=1]", "no axis 'position'"),
        ("resid_pre.0[head=1]", "no axis 'head'"),
        ("pattern.0[head=one]", "head = 'one', which is neither an integer nor a:b"),
        ("pattern.0[head=1:2:3]", "neither an integer nor a:b"),
        ("pattern.0[head]", "head = '', which is neither an integer"),
        ("pattern.0[head=1, head=2]", "pattern.0 is indexed by head twice"),
        ("pattern.0[head=1", "is not a name and an index"),
        ("", "is not a name and an index"),
    ],
)
def test_invalid_names_are_refused_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(gh.InputError) as caught:
        names("tiny-decoder", name)
    assert sentence in str(caught.value)


def test_a_name_without_its_stack_suggests_both() -> None:
    with pytest.raises(gh.InputError, match=r"did you mean encoder\.pattern\.0 or decoder\.pattern\.0\?"):
        names("tiny-seq2seq", "pattern.0")


def test_other_modules_are_refused() -> None:
    with pytest.raises(gh.InputError, match="is a Linear, but it must be one that gh"):
        sites(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("blocks.0.hook_resid_pre", "it is called resid_pre.0 here."),
        ("blocks.1.attn.hook_z[head=2]", "it is called z.1 here."),
        ("blocks.1.attn.hook_q", "it is called q.1 here, after norm and rotation."),
        ("blocks.*.mlp.hook_post", "it is called hidden.* here."),
        ("blocks.12.hook_mlp_out", "it is called ffn_out.12 here, and its layers are 0 to 1."),
        ("ln_final.hook_normalized", "it is called final here, after scale and shift."),
        ("hook_embed", "it is called token_embed here."),
        ("blocks.1.attn.hook_result", "it is called result.1 here."),
        ("blocks.0.ln2.hook_scale", "it is called ffn_norm_scale.0 here."),
        ("blocks.0.mlp.hook_pre", "it is called hidden_pre.0 here, or gate with a gate."),
    ],
)
def test_names_of_transformer_lens_are_translated(name: str, advice: str) -> None:
    with pytest.raises(gh.InputError) as error:
        select(gh.build(gh.preset("tiny-decoder")), name)
    assert str(error.value).endswith(advice)
    pair = gh.build(gh.preset("tiny-seq2seq"))
    with pytest.raises(gh.InputError, match=r"is called encoder\.z\.0 or decoder\.z\.0 here\.$"):
        select(pair, "blocks.0.attn.hook_z")
    with pytest.raises(gh.InputError, match=r"is called decoder\.cross_pattern\.1 here\.$"):
        select(pair, "decoder.1.cross_attn.hook_pattern")


def test_a_wrong_site_lists_each_once_for_all_layers() -> None:
    model = gh.build(gh.preset("tiny-decoder", n_layers=6))
    with pytest.raises(gh.InputError) as error:
        select(model, "xyz")
    listed = str(error.value).partition("it has ")[2].rstrip(".").split(", ")
    assert {name.replace("*", "5") for name in listed} == {
        name for name in sites(model) if not name[-1].isdigit() or name.endswith("5")
    }
    with gh.record(model, "resid_post.*", "pattern.*") as seen, pytest.raises(gh.InputError) as error:
        _ = seen["xyz"]
    assert str(error.value).endswith(r"it has resid_post.*, pattern.*.")
