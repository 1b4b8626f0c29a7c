"""Edges: all and none give the two runs, and any choice equals a model written out edge by edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspected_models import IDS, Model, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.inspection import (
    activation_patching,
    attribution_patching,
    edge_attribution,
    edge_attribution_by_position,
    edge_patching,
)
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.patching.edge_graph import EdgeGraph
from glasshouse.inspection.patching.edge_runner import EdgeScorer
from glasshouse.inspection.patching.path_patching import path_patching
from glasshouse.models import Decoder

many = settings(max_examples=up_to(25), deadline=None, suppress_health_check=list(HealthCheck))
OTHER = (IDS + torch.tensor([[0, 3, 0, 5, 0, 1], [2, 0, 0, 0, 4, 0]])) % 11


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def runner(model: Model) -> EdgeScorer:
    return EdgeScorer(model, CallArguments(inputs(model), {}), CallArguments(inputs(model, OTHER), {}), weighted_sum)


def weighted_sum(output: Tensor) -> Tensor:
    """Return a metric with another weight for each element of an output, so that every change shows."""
    weights = torch.arange(output.numel(), dtype=output.dtype).sin()
    return (output * weights.view(output.shape)).sum()


def with_edges(s: spec.Spec) -> spec.Spec:
    """Return a spec with edges: those of norms before the sublayers, and over single heads."""
    placement = s.norm_placement if s.norm_placement == "parallel" else "pre"
    return replace(s, norm_placement=placement, qk_norm_over="head", value_embeddings=False)


@many
@given(specs())
def test_all_edges_and_none_are_the_two_runs(s: spec.Spec) -> None:
    model = build_random(with_edges(s))
    edges = runner(model)
    exists = edges.graph.exists
    embedding = torch.zeros_like(exists)
    embedding[:, [name.endswith("embed") for name in edges.graph.writer_names]] = True
    everything, nothing = exists, torch.zeros_like(exists)
    found = edges.run(
        torch.stack([everything, everything, nothing, nothing]),
        torch.stack([embedding & exists, nothing, nothing, exists]),
    )
    normal, clean = model(*inputs(model)), model(*inputs(model, OTHER))
    for output, expected in zip(found, (clean, normal, normal, clean), strict=True):
        assert_close(output, expected)


@many
@given(
    specs().filter(lambda one: isinstance(one, spec.DecoderSpec)),
    st.integers(0, 2**31),
    st.sampled_from([0.3, 0.7, 0.95]),
)
def test_drawn_edges_equal_a_model_written_out(s: spec.Spec, seed: int, density: float) -> None:
    """By recursion: each reader's input is summed writer by writer, and each head is run alone."""
    model = build_random(with_edges(s))
    assert isinstance(model, Decoder)
    edges = runner(model)
    graph, made = edges.graph, torch.Generator().manual_seed(seed)
    chosen, patched = (
        (torch.rand(graph.exists.shape, generator=made) < share) & graph.exists for share in (density, 0.2)
    )
    chosen &= ~patched
    normal, clean = written(model, IDS), written(model, OTHER)
    assert list(normal) == graph.writer_names
    own = {"embed": normal["embed"]}

    def given_to(reader: str) -> Tensor:
        row = graph.reader_names.index(reader)
        total = stream(model, IDS, reader)
        for column, writer in enumerate(graph.writer_names):
            if chosen[row, column]:
                total = total + own[writer] - normal[writer]
            if patched[row, column]:
                total = total + clean[writer] - normal[writer]
        return total

    for layer, block in enumerate(model.stack.blocks):
        group = model.spec.n_heads // model.spec.n_kv_heads
        for head in range(model.spec.n_heads):
            kv = head // group
            # The whole layer is run with the input of one reader, and one head's slice is kept.
            inputs = {
                "q": given_to(f"q.{layer}[head={head}]"),
                "k": given_to(f"k.{layer}[head={kv}]"),
                "v": given_to(f"v.{layer}[head={kv}]"),
            }
            slices = {}
            for name, x in inputs.items():
                with gh.edit(model, {f"resid_pre.{layer}": x}), gh.record(model, f"{name}.{layer}") as seen:
                    model(IDS)
                slices[name] = seen[f"{name}.{layer}"]
            given = {f"{name}.{layer}": value for name, value in slices.items()}
            with gh.edit(model, given), gh.record(model, f"result.{layer}") as seen:
                model(IDS)
            own[f"z.{layer}[head={head}]"] = seen[f"result.{layer}"][:, head]
        x = given_to(f"ffn.{layer}")
        own[f"ffn_out.{layer}"] = block.feedforward.layer(block.feedforward.norm(x), None)
    with gh.edit(model, {f"resid_post.{len(model.stack.blocks) - 1}": given_to("logits")}):
        expected = model(IDS)
    assert_close(edges.run(chosen[None], patched[None])[0], expected)


def written(model: Decoder, ids: Tensor) -> dict[str, Tensor]:
    """Return what each writer writes, by name."""
    with gh.record(model, "embed", "result.*", "ffn_out.*") as seen:
        model(ids)
    found = {"embed": seen["embed"]}
    for layer in range(len(model.stack.blocks)):
        found |= {f"z.{layer}[head={head}]": seen[f"result.{layer}"][:, head] for head in range(model.spec.n_heads)}
        found[f"ffn_out.{layer}"] = seen[f"ffn_out.{layer}"]
    return found


def stream(model: Decoder, ids: Tensor, reader: str) -> Tensor:
    """Return the residual stream that a reader is given in a plain run."""
    layer = reader.partition(".")[2].partition("[")[0]
    before = "pre" if model.spec.norm_placement == "parallel" else "mid"
    name = {"l": f"resid_post.{len(model.stack.blocks) - 1}", "f": f"resid_{before}.{layer}"}.get(
        reader[0], f"resid_pre.{layer}"
    )
    with gh.record(model, name) as seen:
        model(ids)
    return seen[name]


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ("z.0[head=1]", "q.2[head=3]"),
        ("z.0[head=2]", "k.1[head=0]"),
        ("z.1[head=0]", "v.2[head=1]"),
        ("encoder.z.0[head=2]", "encoder.k.1[head=1]"),
        ("decoder.z.0[head=1]", "decoder.cross_q.2[head=3]"),
        ("decoder.cross_z.0[head=1]", "decoder.q.1[head=0]"),
    ],
)
def test_a_path_equals_path_patching(sender: str, receiver: str) -> None:
    """One edge with what its writer writes in the clean run, and all edges after it."""
    kind = "tiny-seq2seq" if sender.startswith(("encoder", "decoder")) else "tiny-decoder"
    model = small(kind, n_layers=3, n_kv_heads=2, norm_placement="pre", final_norm=True)
    edges = runner(model)
    graph = edges.graph
    patched = torch.zeros_like(graph.exists)
    patched[graph.reader_names.index(receiver), graph.writer_names.index(sender)] = True
    found = edges.run(graph.exists[None], patched[None])[0]
    prompts = inputs(model), inputs(model, OTHER)
    assert_close(found, path_patching(model, *prompts, sender, receiver, metric=torch.mean).output)


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_slopes_are_the_limit_of_small_patches(kind: str) -> None:
    """The gradient of each edge, times the difference, is the metric's change for a small share of the difference."""
    model = small(kind, n_layers=2, n_kv_heads=2, norm_placement="pre", final_norm=True)
    edges = runner(model)
    graph = edges.graph
    found = edges.slopes(0.0)
    step = 1e-5
    # `patched` takes shares too: what an edge carries is then part of the way to the clean run.
    each = torch.zeros(2 * int(graph.exists.sum()), *graph.exists.shape, dtype=torch.float64)
    for number, (row, column) in enumerate(graph.exists.nonzero().tolist()):
        each[2 * number, row, column], each[2 * number + 1, row, column] = step, -step
    outputs = edges.run(graph.exists.expand(len(each), -1, -1), each)
    values = torch.stack([edges.metric(one) for one in outputs]).view(-1, 2)
    # A central difference is off by the step's square and by rounding over the step: 1e-10 and 1e-10 here.
    assert_close((values[:, 0] - values[:, 1]) / (2 * step), found[graph.exists], 1e-7)


def test_edges_that_lead_nowhere_do_nothing() -> None:
    model = small(n_layers=3, n_kv_heads=2)
    edges = runner(model)
    graph = edges.graph
    for seed in range(20):
        chosen = (torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(seed)) < 0.1) & graph.exists
        kept = graph.connected(chosen)
        assert not (kept & ~chosen).any()
        into = torch.zeros_like(chosen)
        into[:, 0] = True
        with_all, with_kept = edges.run(torch.stack([chosen, kept]), torch.stack([chosen & into, kept & into]))
        assert_close(with_all, with_kept)


def test_connected_by_hand() -> None:
    graph = EdgeGraph(small(n_layers=1, n_heads=2, n_kv_heads=1))
    names = [("q.0[head=1]", "embed"), ("logits", "z.0[head=0]"), ("ffn.0", "embed")]

    def kept(*edges: tuple[str, str]) -> set[tuple[str, str]]:
        chosen = torch.zeros_like(graph.exists)
        for reader, writer in edges:
            chosen[graph.reader_names.index(reader), graph.writer_names.index(writer)] = True
        return {
            (graph.reader_names[row], graph.writer_names[column]) for row, column in graph.connected(chosen).nonzero()
        }

    assert kept(*names) == set()  # the head that reads is not read, and the other way round
    assert kept(*names, ("logits", "z.0[head=1]")) == {names[0], ("logits", "z.0[head=1]")}
    assert kept(("k.0[head=0]", "embed"), ("logits", "z.0[head=0]")) == {
        ("k.0[head=0]", "embed"),
        ("logits", "z.0[head=0]"),
    }
    assert kept(("ffn.0", "embed"), ("ffn.0", "z.0[head=0]"), ("logits", "ffn_out.0")) == {
        ("ffn.0", "embed"),
        ("logits", "ffn_out.0"),
    }


def test_models_without_such_edges_are_refused() -> None:
    for model, sentence in (
        (small(norm_placement="post"), r"norm_placement is 'post', but edges need 'pre' or 'parallel'"),
        (small(norm_placement="output"), r"norm_placement is 'output', but edges need 'pre' or 'parallel'"),
        (small(qk_norm=True, qk_norm_over="projection"), r"qk_norm_over is 'projection', but edges need 'head'"),
        (small(value_embeddings=True), r"value_embeddings is true, but edges need a value that is a projection"),
    ):
        with pytest.raises(gh.InputError, match=sentence):
            EdgeGraph(model)


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
@pytest.mark.parametrize("steps", [1, 3])
def test_positions_of_an_edge_sum_to_its_effect(kind: str, steps: int) -> None:
    """The embedding acts where the tokens differ alone, and what is written to the logits where these are read."""
    model = small(kind, n_kv_heads=2, norm_placement="pre")
    here, there = (inputs(model, IDS), inputs(model, IDS.clone().index_fill(1, torch.tensor([2]), 9)))
    options = {"metric": lambda output: output[:, -1, 3].sum(), "steps": steps}
    effects = edge_attribution(model, here, there, **options)
    known = effects.effect.isfinite().nonzero().tolist()
    for row, column in known[:: len(known) // 12]:
        edge = (effects.writers[column], effects.readers[row])
        found = edge_attribution_by_position(model, here, there, edge, **options)
        assert_close(found.sum(), effects.effect[row, column])
        old, new = (one[0 if edge[0].startswith("encoder.") else -1] for one in (here, there))
        assert found.shape == old.shape[1:]
        moved = found.nonzero().flatten().tolist()
        if edge[0].endswith("embed"):
            assert all((old != new).any(0)[moved])
        if edge[1] == "logits":
            assert {*moved} <= {old.shape[1] - 1}


OVERRIDDEN = [
    "attn_norm.1",
    "ffn_norm_scale.0",
    "resid_mid.0",
    "resid_post.1",
    "attn_out.0",
    "final",
    "final_norm_scale",
]


@pytest.mark.parametrize("site", OVERRIDDEN)
def test_edits_that_the_runs_would_override_are_refused(site: str) -> None:
    model = small(norm_placement="pre", final_norm=True)
    with (
        gh.edit(model, {site: lambda value: 1.5 * value}),
        pytest.raises(gh.InputError, match=rf"{site} is edited, but edges take apart"),
    ):
        edge_patching(model, IDS, OTHER, [("embed", "logits")], metric=weighted_sum)


@pytest.mark.parametrize(
    "site", ["z.0", "result.1", "q.1", "pattern.0", "hidden.1", "ffn_out.0", "embed", "token_embed"]
)
def test_all_edges_and_none_are_the_two_runs_under_an_edit(site: str) -> None:
    model = small(norm_placement="pre", final_norm=True)
    with gh.edit(model, {site: lambda value: 1.5 * value}):
        edges = runner(model)
        exists = edges.graph.exists
        clean = exists.clone()  # from the embedding alone: everything else is computed from it
        clean[:, 1:] = False
        found = edges.effects(torch.stack([exists, exists]), torch.stack([clean, torch.zeros_like(exists)]))
        assert_close(edges.clean_output, model(OTHER))
    assert_close(found, torch.tensor([1.0, 0.0]).to(found))


def test_prompts_that_do_not_match_row_by_row_are_refused() -> None:
    model = small(norm_placement="pre")
    lengths = (torch.tensor([4, 6]), torch.tensor([6, 4]))
    for work in (edge_attribution, edge_patching):
        with pytest.raises(gh.InputError, match=r"lengths is \[6, 4\] on clean, but \[4, 6\] on corrupted"):
            work(model, IDS, OTHER, metric=weighted_sum, lengths=lengths)
    tok = gh.Tokenizer.train(texts=["a b c d e"] * 3, vocab_size=266)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok)))
    for work in (activation_patching, attribution_patching):
        with pytest.raises(gh.InputError, match="lengths is"):
            work(model, ["a b c", "b"], ["a", "b c d"], "resid_post", metric=weighted_sum, tok=tok)


@pytest.mark.parametrize("work", [edge_attribution, lambda *given, **more: attribution_patching(*given, "z", **more)])
def test_estimates_need_a_gradient(work: Callable[..., object]) -> None:
    model = small(norm_placement="pre")
    with pytest.raises(gh.InputError, match=r"without a gradient.*without \.item\(\)"):
        work(model, IDS, OTHER, metric=lambda output: output[0, -1, 3].item())
    with torch.inference_mode(), pytest.raises(gh.InputError, match="inference_mode is on"):
        work(model, IDS, OTHER, metric=weighted_sum)


def test_slips_in_names_are_answered() -> None:
    model = small(norm_placement="pre", n_kv_heads=2)
    for path, sentence in (
        (("z.0[head=1]", "q.1[head=9]"), r"q\.1\[head=9\]', but there are 4 heads"),
        (("z.0[head=1]", "k.1[head=3]"), r"k\.1\[head=3\]', but there are 2 KV heads"),
        (("z.0[head=1]", []), "a place is empty"),
    ):
        with pytest.raises(gh.InputError, match=sentence):
            path_patching(model, IDS, OTHER, *path, metric=weighted_sum)
    for edges, sentence in (
        ([], "must be a list of pairs"),
        (("embed", "logits"), "must be a list of pairs"),
        ([("z.0[head=0]", "k.1[head=3]")], r"it has k\.1\[head=0\] to k\.1\[head=1\]"),
    ):
        with pytest.raises(gh.InputError, match=sentence):
            edge_patching(model, IDS, OTHER, edges, metric=weighted_sum)
    for site, sentence in (
        ("z[position=new]", "selects positions of a request"),
        ("resid_post[position=7:9]", "selects nothing of these prompts"),
        ("blocks.0.attn.hook_z", r"it is called z\.0 here"),
        ("resid_post.7", "its layers are 0 to 1"),
    ):
        with pytest.raises(gh.InputError, match=sentence):
            activation_patching(model, IDS, OTHER, site, metric=weighted_sum)
