"""What the overview draws, against loops over heads, queries and keys, in models of every kind.

Models are float64, and numbers go to the page as float32: 6e-8 of their size.
"""

from __future__ import annotations

import pytest
import torch
from test_residual_stream import FORWARD_PASS, SPECS, asked, laid_open, near, unpacked
from torch import Tensor

import glasshouse as gh
from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.models import Model, Seq2Seq
from glasshouse.page.forward_pass import ForwardPass, PagePrompt

OUT = {"attention": "attn_out", "cross": "cross_attn_out", "feedforward": "ffn_out"}


def recorded(model: Model, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    with torch.no_grad(), gh.record(model.eval(), "*") as seen:
        model(*inputs)
    return {name: seen[name][0] for name in seen}


def head_outputs(
    model: Model, seen: dict[str, Tensor], prefix: str, part: str, layer: int
) -> list[list[list[Tensor]]]:
    """Return what head h adds at query i from key j, one product at a time: [h][i][j]."""
    stack = {"encoder.": "encoder", "decoder.": "decoder", "": ""}[prefix]
    block = (getattr(model, stack) if stack else model.stack).blocks[layer]
    out = getattr(block, part).layer.out.weight.detach()
    start = "cross_" if part == "cross" else ""
    pattern, v = seen[f"{prefix}{start}pattern.{layer}"], seen[f"{prefix}{start}v.{layer}"]
    n_heads, d_head = len(pattern), v.shape[-1]
    made = []
    for h in range(n_heads):
        columns = out[:, h * d_head : (h + 1) * d_head]
        values = v[h * len(v) // n_heads]
        made.append([[weight * (columns @ values[j]) for j, weight in enumerate(row)] for row in pattern[h]])
    return made


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "choices"), SPECS)
def test_shares_and_sources(kind: str, choices: JsonDict) -> None:
    traces = laid_open(kind, choices)
    model, inputs = traces.loader.get("").model, traces.trace(FORWARD_PASS).inputs
    seen = recorded(model, inputs)
    shown = asked(traces, "overview", forward_pass=FORWARD_PASS)["stacks"]
    assert [one["name"] for one in shown] == (["encoder", "decoder"] if isinstance(model, Seq2Seq) else [kind[5:]])
    for stack in shown:
        prefix = f"{stack['name']}." if isinstance(model, Seq2Seq) else ""
        length = inputs[0 if stack["name"] == "encoder" else -1].shape[1]
        assert (stack["start"], stack["stop"], stack["of"]) == (0, length, length)
        depth = unpacked(stack["stream"]).shape[0] - 1
        sites = ["embed", *(f"resid_post.{layer}" for layer in range(depth))]
        near(unpacked(stack["stream"]), torch.stack([seen[prefix + site].norm(dim=-1) for site in sites]))
        middle = {"attention": "resid_pre", "cross": "resid_mid", "feedforward": "resid_mid"}
        if "cross" in stack["added"]:
            middle["feedforward"] = "cross_resid_mid"
        for part, added in stack["added"].items():
            for layer in range(depth):
                out, stream = seen[f"{prefix}{OUT[part]}.{layer}"], seen[f"{prefix}{middle[part]}.{layer}"]
                near(unpacked(added)[layer], out.norm(dim=-1) / stream.norm(dim=-1))
        for part, heads in stack["heads"].items():
            for layer in range(depth):
                outputs = head_outputs(model, seen, prefix, part, layer)
                stream = seen[f"{prefix}{middle[part]}.{layer}"]
                scale = _scale_after(model, seen, prefix, part, layer, outputs)
                for h, rows in enumerate(outputs):
                    for i, row in enumerate(rows):
                        sizes = [float(one.norm()) for one in row]
                        best = max(range(len(sizes)), key=sizes.__getitem__)
                        assert int(unpacked(heads["source"])[layer, h, i]) == best
                        start = "cross_" if part == "cross" else ""
                        weight = seen[f"{prefix}{start}pattern.{layer}"][h, i, best]
                        near(unpacked(heads["weight"])[layer, h, i], weight)
                        added = torch.stack(row).sum(0).norm() * scale[i] / stream[i].norm()
                        near(unpacked(heads["norm"])[layer, h, i], added)


def _scale_after(
    model: Model, seen: dict[str, Tensor], prefix: str, part: str, layer: int, outputs: list[list[list[Tensor]]]
) -> list[float]:
    """Return by how much a norm after the heads changes their sum at each query: 1 where there is none."""
    added = seen[f"{prefix}{OUT[part]}.{layer}"]
    block = (getattr(model, prefix[:-1]) if prefix else model.stack).blocks[layer]
    bias = getattr(block, part).layer.out.bias
    found = []
    for i, one in enumerate(added):
        whole = sum(torch.stack(rows[i]).sum(0) for rows in outputs) + (0 if bias is None else bias)
        found.append(float(one.norm() / whole.detach().norm()))
    if model.spec.norm_placement != "sandwich":
        assert found == pytest.approx([1.0] * len(found))
    return found


@pytest.mark.parametrize(
    ("kind", "attention"), [("tiny-decoder", "pattern"), ("tiny-seq2seq", "decoder.cross_pattern")]
)
def test_one_layer_at_one_position(kind: str, attention: str) -> None:
    traces = laid_open(kind, {})
    model, inputs = traces.loader.get("").model, traces.trace(FORWARD_PASS).inputs
    seen = recorded(model, inputs)
    prefix, part = ("", "attention") if kind == "tiny-decoder" else ("decoder.", "cross")
    position = inputs[-1].shape[1] - 1
    shown = asked(traces, "layer_heads", forward_pass=FORWARD_PASS, attention=attention, layer=1, position=position)
    near(unpacked(shown["weights"]), seen[f"{attention}.1"][:, position])
    outputs = head_outputs(model, seen, prefix, part, 1)
    near(unpacked(shown["moved"]), torch.tensor([[one.norm() for one in rows[position]] for rows in outputs]))


def test_a_long_text_is_drawn_in_windows() -> None:
    traces = laid_open("tiny-decoder", {"max_len": 128})
    forward_pass = ForwardPass(PagePrompt("", appended=tuple(i % 40 for i in range(100))))
    whole = asked(traces, "overview", forward_pass=forward_pass)["stacks"][0]
    later = asked(traces, "overview", forward_pass=forward_pass, start=36)["stacks"][0]
    assert (whole["start"], whole["stop"], later["start"], later["stop"], later["of"]) == (0, 64, 36, 100, 100)
    near(unpacked(later["stream"])[:, :28], unpacked(whole["stream"])[:, 36:])
    for name in ("norm", "source", "weight"):
        near(
            unpacked(later["heads"]["attention"][name])[..., :28],
            unpacked(whole["heads"]["attention"][name])[..., 36:],
        )


@pytest.mark.parametrize(
    ("name", "body"),
    [("overview", {"start": 99}), ("layer_heads", {"position": -1}), ("layer_heads", {"layer": 7})],
)
def test_what_is_outside_is_refused(name: str, body: dict[str, int]) -> None:
    with pytest.raises(GlasshouseError, match="within"):
        asked(laid_open("tiny-decoder", {}), name, forward_pass=FORWARD_PASS, **body)


def test_one_forward_pass_is_enough() -> None:
    traces = laid_open("tiny-decoder", {})
    model = traces.loader.get("").model
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    asked(traces, "overview", forward_pass=FORWARD_PASS)
    assert len(calls) == 1
