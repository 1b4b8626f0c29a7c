"""Weights by head: they give the recorded activations, head by head; circuits against matrices multiplied out.

All in float64, where rounding is 1e-16 of the largest term: `assert_close` leaves room for sums of a hundred terms a
few layers deep, 1e-10.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from inspected_models import IDS, Model, assert_close, build_random, inputs, small
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.inspection.display.html import Heatmap
from glasshouse.inspection.parameters.by_head import Weights
from glasshouse.layers import lora
from glasshouse.layers.attention import ProjectionNorm
from glasshouse.layers.cache import KVShape
from glasshouse.layers.linear.int4 import quantize_int4
from glasshouse.layers.linear.int8 import quantize_int8
from glasshouse.layers.module_swap import clone_sharing_parameters
from glasshouse.layers.sublayer import VECTORS, LayerSite, Sublayer
from glasshouse.models import Seq2Seq

GPT2 = {"kind": "gpt2", "n_layers": 3, "d_model": 24, "n_heads": 3}
LLAMA = {"kind": "llama-small", "n_layers": 3, "d_model": 24, "n_heads": 4, "n_kv_heads": 2}
PAIR = {"kind": "tiny-seq2seq", "d_model": 24, "n_heads": 4, "n_kv_heads": 2, "qkv_bias": True, "out_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, head of its own": {**GPT2, "d_head": 5, "head": {"kind": "next_token", "tied": False, "bias": True}},
    "llama": LLAMA,
    "modern": {**LLAMA, "qk_norm": True, "norm_placement": "sandwich"},
    "qk_norm by LayerNorm": {**LLAMA, "qk_norm": True, "norm": {"kind": "layer", "bias": False}, "ffn_bias": True},
    "neox": {**GPT2, "position": {"kind": "rotary", "fraction": 0.5}, "norm_placement": "parallel"},
    "olmo 2": {**LLAMA, "norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"},
    "qk_norm over all by LayerNorm": {
        **LLAMA,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "norm": {"kind": "layer", "bias": False},
        "ffn_bias": True,
    },
    "bert": {"kind": "tiny-encoder", "d_model": 24, "n_heads": 3},
    "encoder-decoder": PAIR,
    "encoder-decoder, pre-norm": {**PAIR, "norm_placement": "pre", "final_norm": True, "norm": "layer"},
    "t5": {"kind": "t5-small", "n_layers": 2, "n_encoder_layers": 3, "d_model": 24, "n_heads": 3},
}
FOLDED = ["neox", "olmo 2", "gpt2", "gpt2, head of its own", "llama", "modern", "encoder-decoder, pre-norm", "t5"]


def made(name: str) -> Model:
    return small(**MODELS[name])


def unit(norm: Any, x: Tensor) -> Tensor:  # noqa: ANN401 - a norm, of which only epsilon counts
    """Normalise without gain and bias, row by row."""
    y = torch.empty_like(x)
    for index in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).tolist():
        row = x[tuple(index)]
        row = row - row.sum() / len(row) if isinstance(norm, nn.LayerNorm) else row
        y[tuple(index)] = row / math.sqrt(float((row**2).sum()) / len(row) + norm.eps)
    return y


class Check:
    """Runs one stack of a model again from its recorded residual stream, by its weights and plain loops."""

    def __init__(self, model: Any, stack: str, fold_norm: bool) -> None:  # noqa: ANN401 - any of the three
        self.model, self.fold_norm = model, fold_norm
        self.weights = gh.weights(model, fold_norm=fold_norm, stack=stack)
        self.stack = getattr(model, stack) if isinstance(model, Seq2Seq) else model.stack
        self.prefix = f"{stack}." if isinstance(model, Seq2Seq) else ""
        with torch.no_grad(), gh.record(model, "*") as self.seen:
            self.logits = model(*inputs(model))

    def at(self, site: str) -> Tensor:
        return self.seen[self.prefix + site]

    def bias(self, name: str, layer: int) -> Tensor:
        """Return a bias, 0 where there is none."""
        found = getattr(self.weights, name, None)
        return torch.zeros(()) if found is None else found[layer]

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return unit(norm, x) if self.fold_norm else norm(x)

    def attention(self, part: str, layer: int, reads: Tensor, memory: Tensor) -> None:
        """Compare queries, keys and values, head by head, and what the heads write together."""
        w, module = self.weights, getattr(self.stack.blocks[layer], part).layer
        cross = "cross_" if part == "cross" else ""
        names = {name: getattr(w, f"{cross}W_{name}") for name in "QKVO"}
        rotate = self.stack.position.rotation(torch.arange(reads.shape[1])[None], reads.dtype)
        rotate = (lambda x: x) if part == "cross" else rotate
        for head in range(module.n_heads):
            group = w.kv_head(head)
            for name, x, index, norm in (("Q", reads, head, module.q_norm), ("K", memory, group, module.k_norm)):
                shift = self.bias(f"{cross}b_{name}", layer)
                heads = [
                    x @ weight + (shift[number] if shift.ndim else shift)
                    for number, weight in enumerate(names[name][layer])
                ]
                is_over_all = isinstance(norm, ProjectionNorm)
                made = norm(torch.stack(heads, 1))[:, index] if is_over_all else norm(heads[index])
                made = rotate(made[:, None])[:, 0]
                assert_close(made, self.at(f"{cross}{name.lower()}.{layer}")[:, index])
            shift = self.bias(f"{cross}b_V", layer)
            value = memory @ names["V"][layer, group] + (shift[group] if shift.ndim else shift)
            assert_close(value, self.at(f"{cross}v.{layer}")[:, group])
        z = self.at(f"{cross}z.{layer}")
        out = sum(z[:, head] @ names["O"][layer, head] for head in range(module.n_heads))
        self.added(part, f"{cross}attn_out.{layer}", out + self.bias(f"{cross}b_O", layer), layer)

    def feedforward(self, layer: int, reads: Tensor) -> None:
        w, module = self.weights, self.stack.blocks[layer].feedforward.layer
        hidden = reads @ w.W_in[layer] + self.bias("b_in", layer)
        if hasattr(w, "W_gate"):
            hidden = hidden * module.activation(reads @ w.W_gate[layer] + self.bias("b_gate", layer))
        else:
            hidden = module.activation(hidden)
        assert_close(hidden, self.at(f"hidden.{layer}"))
        self.added("feedforward", f"ffn_out.{layer}", hidden @ w.W_out[layer] + self.bias("b_out", layer), layer)

    def added(self, part: str, site: str, out: Tensor, layer: int) -> None:
        residual = getattr(self.stack.blocks[layer], part)
        assert_close(residual.norm_out(out) if hasattr(residual, "norm_out") else out, self.at(site))

    def run(self) -> None:
        s = self.model.spec
        post = s.norm_placement in ("post", "output")
        memory = None
        if self.prefix == "decoder.":
            norm = self.model.encoder.norm
            memory = self.seen["encoder.final"]
            if self.fold_norm:
                memory = unit(norm, self.seen[f"encoder.resid_post.{len(self.model.encoder.blocks) - 1}"])
        for layer, block in enumerate(self.stack.blocks):
            x = self.at(f"resid_pre.{layer}")
            x = x if post else self.normed(block.attention.norm, x)
            self.attention("attention", layer, x, x)
            before = "resid_pre" if s.norm_placement == "parallel" else "resid_mid"
            if memory is not None:
                x = self.at(f"resid_mid.{layer}")
                self.attention("cross", layer, x if post else self.normed(block.cross.norm, x), memory)
                before = "cross_resid_mid"
            x = self.at(f"{before}.{layer}")
            self.feedforward(layer, x if post else self.normed(block.feedforward.norm, x))

    def run_ends(self) -> None:
        """Compare the embedding and the logits."""
        model, w = self.model, self.weights
        table = w.W_E * model.token_embedding.scale
        embedded = table[inputs(model)[-1]]
        if hasattr(w, "W_pos"):
            embedded = embedded + w.W_pos[: embedded.shape[1]]
            if model.spec.kind == "decoder":  # an encoder adds segments, and a norm
                assert_close(embedded, self.at("embed"))
        last = self.at(f"resid_post.{len(self.stack.blocks) - 1}")
        x = unit(self.stack.norm, last) if self.fold_norm else self.at("final")
        x = x if self.fold_norm else model.head.transform(x) * model.head.scale
        assert_close(x @ w.W_U + getattr(w, "b_U", 0.0), self.logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "fold_norm"), [*((name, False) for name in MODELS), *((name, True) for name in FOLDED)]
)
def test_weights_give_the_recorded_activations(name: str, fold_norm: bool) -> None:
    model = made(name)
    checks = ["encoder", "decoder"] if isinstance(model, Seq2Seq) else ["decoder"]
    for stack in checks:
        check = Check(model, stack, fold_norm)
        check.run()
    check.run_ends()


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "modern", "neox", "olmo 2", "qk_norm by LayerNorm", "qk_norm over all by LayerNorm"],
)
def test_qk_gives_the_scores_at_distance_0(name: str) -> None:
    """Without the query and key biases of gpt2, which QK leaves out.

    Cosines and sines of rotary positions are float32, off by up to 2**-25, so that the squares of a pair sum to 1 up
    to 1e-7; 1e-6 of the largest score leaves room for a sum of pairs that cancel.
    """
    model = small(**{**MODELS[name], "qkv_bias": False})
    w = gh.weights(model)
    with gh.record(model, "resid_pre.*", "scores.*") as seen:
        model(IDS)
    for layer, block in enumerate(model.stack.blocks):
        x = getattr(block.attention, "norm", nn.Identity())(seen[f"resid_pre.{layer}"])
        attention = block.attention.layer
        for head in range(attention.n_heads):
            for row in range(len(IDS)):
                for i in range(IDS.shape[1]):
                    score = x[row, i] @ w.QK[layer, head].matrix() @ x[row, i]
                    for weights, own, norm in (
                        (w.W_Q[layer], head, attention.q_norm),
                        (w.W_K[layer], w.kv_head(head), attention.k_norm),
                    ):
                        if isinstance(norm, ProjectionNorm):
                            score = score / norm.norm.scale(torch.cat([x[row, i] @ one for one in weights]))
                        elif not isinstance(norm, nn.Identity):
                            score = score / norm.scale(x[row, i] @ weights[own])
                    assert_close(score * attention.d_head**-0.5, seen[f"scores.{layer}"][row, head, i, i], 1e-6)


@torch.no_grad()
def test_ov_gives_what_a_head_writes_where_all_attend_to_one_token() -> None:
    """With one token in the sequence; without biases."""
    model = made("llama")
    with gh.record(model, "resid_pre.1", "attn_out.1") as seen:
        model(IDS[:, :1])
    x = model.stack.blocks[1].attention.norm(seen["resid_pre.1"])[:, 0]
    ov = gh.weights(model).OV
    assert_close(sum((x @ ov[1, head]).matrix() for head in range(4)), seen["attn_out.1"][:, 0])
    assert_close(torch.stack([row @ ov[1] for row in x]).sum(1), seen["attn_out.1"][:, 0])


def names_of(w: Weights, start: str = "") -> Iterator[str]:
    own = [name for name in dir(Weights) if name.removeprefix("cross_").startswith(("W_", "b_"))]
    return (name for name in own if name.startswith(start) and hasattr(w, name))


@pytest.mark.parametrize("name", ["gpt2", "llama", "encoder-decoder"])
def test_weights_are_views_of_the_parameters(name: str) -> None:
    model = made(name)
    w = gh.weights(model)
    memory = {one.untyped_storage().data_ptr(): path for path, one in model.named_parameters()}
    found = set()
    for one in names_of(w):
        value = getattr(w, one)
        for layer in [value] if isinstance(value, Tensor) else value:
            found.add(memory[layer.untyped_storage().data_ptr()])
            assert layer.requires_grad
    stacks = "decoder" if isinstance(model, Seq2Seq) else "stack"
    linears = {path for path in memory.values() if path.startswith(f"{stacks}.blocks") and "norm" not in path}
    assert found == {*linears, *(path for path in memory.values() if path.endswith("table.weight"))}
    assert w.W_Q[1, 2]._base is model.get_parameter(f"{stacks}.blocks.1.attention.layer.query.weight")


def test_writing_to_a_view_changes_the_model_and_a_copy_does_not() -> None:
    model = made("gpt2")
    w = gh.weights(model)
    with torch.no_grad():
        before = model(IDS)
        with gh.edit(model, {"z.1": gh.ablate_head(2)}):
            ablated = model(IDS)
        w.W_O.stack().zero_()
        gh.weights(model, fold_norm=True).W_V[1].zero_()
        assert torch.equal(model(IDS), before)
        w.W_O[1, 2].zero_()
        assert_close(model(IDS), ablated)


def test_gradients_flow_to_the_heads_own_rows() -> None:
    model = made("llama")
    w = gh.weights(model)
    w.OV[1, 3].norm().backward()
    layer = model.stack.blocks[1].attention.layer
    rows = layer.value.weight.grad.unflatten(0, (2, -1)).abs().amax((1, 2))
    columns = layer.out.weight.grad.unflatten(1, (4, -1)).abs().amax((0, 2))
    assert (rows > 0).tolist() == [False, True]  # the KV head of heads 2 and 3
    assert (columns > 0).tolist() == [False, False, False, True]
    assert layer.query.weight.grad is None


def test_shapes_axes_and_indices() -> None:
    w = gh.weights(small(**{**LLAMA, "d_head": 6}))
    assert (w.W_Q.shape, w.W_Q.axes) == ((3, 4, 24, 6), ("layer", "head", "d_model", "d_head"))
    assert (w.W_K.shape, w.W_K.axes) == ((3, 2, 24, 6), ("layer", "kv_head", "d_model", "d_head"))
    assert w.W_O.shape == (3, 4, 6, 24)
    assert w.W_in.shape == w.W_gate.shape == (3, 24, w.W_out.shape[1])
    assert w.QK.shape == w.OV.shape == w.QK.stack().shape == (3, 4, 24, 24)
    assert w.W_Q.stack().shape == w.W_Q.shape
    assert len(list(w.W_Q)) == len(w.W_Q) == 3
    assert torch.equal(w.W_Q.stack()[-1, 2], w.W_Q[-1, 2])
    assert torch.equal(w.W_Q[torch.tensor(2), 1, :, 0], w.W_Q[2][1, :, 0])
    assert torch.equal(w.OV.stack()[1, 2].matrix(), w.OV[1, 2].matrix())
    assert repr(w.W_Q) == "W_Q [3, 4, 24, 6]"
    assert repr(w).startswith("Weights(W_Q [3, 4, 24, 6], W_K")


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (3, "W_Q has layer index 3, but there are 3; use 0 to 2."),
        ((0, 4), "W_Q has head index 4, but there are 4; use 0 to 3."),
        ((-4, 0), "W_Q has layer index -4, but there are 3; use 0 to 2."),
        (
            (slice(None), 1),
            "W_Q is indexed by slice(None, None, None), but each layer has a parameter of its own; give the number "
            "of one, or index the copy of all, W_Q.stack().",
        ),
    ],
)
def test_indices_out_of_range_are_refused(index: Any, sentence: str) -> None:  # noqa: ANN401
    with pytest.raises(gh.InputError) as error:
        gh.weights(made("llama")).W_Q[index]
    assert str(error.value) == sentence


@torch.no_grad()
@pytest.mark.parametrize("fold_norm", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "modern"])
def test_composition_equals_matrices_multiplied_out(name: str, fold_norm: bool) -> None:
    w = gh.weights(made(name), fold_norm=fold_norm)
    layers, heads = w.QK.shape[:2]
    for mode in ("Q", "K", "V"):
        scores = w.composition(mode).scores  # type: ignore[arg-type]
        assert scores.shape == (layers, heads, layers, heads)
        for layer, head, other, writer in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
            if other >= layer:
                assert scores[layer, head, other, writer] == 0
                continue
            # As in the paper, by which a matrix multiplies columns from the left: W_OV = W_O W_V, W_QK = W_Q^T W_K.
            write = (w.W_V[other, w.kv_head(writer)] @ w.W_O[other, writer]).T
            qk = w.QK[layer, head].left @ w.QK[layer, head].right
            ov = (w.W_V[layer, w.kv_head(head)] @ w.W_O[layer, head]).T
            reads = {"Q": qk.T, "K": qk, "V": ov}[mode]
            expected = (reads @ write).norm() / (reads.norm() * write.norm())
            assert_close(scores[layer, head, other, writer], expected)


@torch.no_grad()
def test_composition_by_hand() -> None:
    """The head of the first layer writes along axis 0; that of the second reads axis 0 by its queries, 1 by its keys.

    Its values read axis 0 with the weight 3 and axis 1 with the weight 4: 3 of 5.
    """
    model = small("gpt2", n_layers=2, d_model=4, n_heads=1, d_head=2)
    w = gh.weights(model)
    for one in (w.W_Q, w.W_K, w.W_V, w.W_O):
        for layer in one:
            layer.zero_()
    w.W_V[0, 0][:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    w.W_O[0, 0][0, 0] = 7.0
    w.W_Q[1, 0][0, 0], w.W_K[1, 0][1, 0] = 2.0, 5.0
    w.W_V[1, 0][0, 0], w.W_V[1, 0][1, 1], w.W_O[1, 0][0, 2], w.W_O[1, 0][1, 3] = 3.0, 4.0, 1.0, 1.0
    found = [float(w.composition(mode).scores[1, 0, 0, 0]) for mode in ("Q", "K", "V")]
    assert found == pytest.approx([1.0, 0.0, 0.6], abs=1e-12)
    w.W_V[0].zero_()
    assert w.composition("Q").scores.abs().max() == 0  # not NaN


@torch.no_grad()
@pytest.mark.parametrize("fold_norm", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "gpt2, head of its own", "llama"])
def test_copying_scores_equal_eigenvalues_of_the_vocabulary(name: str, fold_norm: bool) -> None:
    """The matrix of the vocabulary has rank d_head; its other eigenvalues, 0, are multiple.

    Such an eigenvalue is off by up to the square root of rounding, 1e-8 of the largest, and there are a few: 1e-6.
    """
    w = gh.weights(made(name), fold_norm=fold_norm)
    scores = w.copying_scores()
    assert scores.shape == w.QK.shape[:2]
    for layer, row in enumerate(scores):
        for head, score in enumerate(row):
            values = torch.linalg.eigvals(w.W_E @ w.OV[layer, head].matrix() @ w.W_U)
            assert float(score) == pytest.approx(float(values.real.sum() / values.abs().sum()), abs=1e-6)


@torch.no_grad()
def test_copying_scores_by_hand() -> None:
    """With tied embeddings, a head that writes what it reads copies wholly, and one that writes its negative, not."""
    model = small("gpt2", n_layers=1, d_model=6, n_heads=3)
    w = gh.weights(model)
    w.W_O[0].copy_(w.W_V[0].mT)
    w.W_O[0, 1].neg_()
    w.W_O[0, 2].zero_()
    assert_close(w.copying_scores(), torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("fold_norm", [False, True])
def test_lora_is_merged(fold_norm: bool) -> None:
    model = made("llama")
    lora.attach(model, lora.LoRA(rank=2, targets=("*",), token_ids=(3,)))
    with torch.no_grad():
        for tensor in lora.adapter_state_dict(model).values():
            tensor.normal_()
    w = gh.weights(model, fold_norm=fold_norm)
    before = {name: [one.clone() for one in getattr(w, name)] for name in names_of(w)}
    lora.merge(model)
    after = gh.weights(model, fold_norm=fold_norm)
    assert list(before) == list(names_of(after))
    for name, layers in before.items():
        for one, other in zip(layers, getattr(after, name), strict=True):
            assert_close(one, other.detach())


@pytest.mark.slow
def test_compiled_models_and_layers_are_unwrapped() -> None:
    """Nothing runs, so nothing is compiled."""
    model = made("encoder-decoder, pre-norm")
    expected = gh.weights(model, fold_norm=True)
    plain = {name: [*getattr(expected, name)] for name in names_of(expected)}
    for number, block in enumerate(model.decoder.blocks):
        block.attention.layer.query = torch.compile(block.attention.layer.query)
        block.attention.norm = torch.compile(block.attention.norm)
        block.feedforward.layer = torch.compile(block.feedforward.layer)
        block.cross = torch.compile(block.cross)
        model.decoder.blocks[number] = torch.compile(block)
    model.encoder.norm = torch.compile(model.encoder.norm)
    model.head = torch.compile(model.head)
    w = gh.weights(torch.compile(model), fold_norm=True)
    for name, layers in plain.items():
        assert all(torch.equal(one, other) for one, other in zip(layers, getattr(w, name), strict=True)), name


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_quantized_copies_are_refused(quantize: Any) -> None:  # noqa: ANN401
    model = build_random(gh.preset("gpt2", vocab_size=64, n_layers=1, d_model=64, n_heads=2), torch.float32)
    copy = clone_sharing_parameters(model)
    quantize(copy)
    w, kind = gh.weights(copy), "Int8Linear" if quantize is quantize_int8 else "Int4Linear"
    for name, sentence in {
        "W_Q": "the attention of layer 0 is FusedQKVAttention without a layer 'query'",
        "W_O": f"'out' of layer 0 is {kind}; use the model before quantization.",
        "b_O": f"'out' of layer 0 is {kind}; use the model before quantization.",
        "W_in": f"'up' of layer 0 is {kind}; use the model before quantization.",
        "W_E": "its table is Int8Embedding; use the model before quantization.",
    }.items():
        with pytest.raises(gh.InputError) as error:
            getattr(w, name)
        assert f"the model has no {name}, since {sentence}" in str(error.value)
    assert gh.weights(model).W_Q.shape == (1, 2, 64, 32)


@dataclass(frozen=True)
class Averaged(gh.spec.Attention):
    kind: ClassVar[str] = "averaged"


class Average(Sublayer):
    """Writes the mean of all positions."""

    residual_input = "mean"

    def __init__(self, s: gh.spec.TransformerSpec, index: int) -> None:
        super().__init__()
        self.kv_shape = KVShape(1, 1)
        self.query = nn.Linear(s.d_model, s.d_model)
        self.out = nn.Linear(s.d_model, s.d_model)

    @property
    def residual_projection(self) -> nn.Linear:
        return self.out

    def sites(self) -> list[LayerSite]:
        return [LayerSite("mean", VECTORS, "out", 0)]

    def forward(self, x: Tensor, ctx: object) -> Tensor:
        return self.out(x.mean(1, keepdim=True).expand_as(x))


def test_registered_attention_is_refused_by_name_and_the_rest_is_there() -> None:
    gh.register(Averaged, Average)
    model = small(attention="averaged", n_heads=2, d_model=8)
    w = gh.weights(model)
    for name in ("W_Q", "W_O", "QK", "OV"):
        assert not hasattr(w, name)
        with pytest.raises(gh.InputError, match=r"the attention of layer 0 is Average without"):
            getattr(w, name)
    assert w.W_in.shape[1] == 8
    assert repr(w) == f"Weights({w.W_in!r}, {w.W_gate!r}, {w.W_out!r})"
    assert gh.nearest(model, w.W_out[1][3]).ids.shape == (10,)


@dataclass(frozen=True)
class Doubled(gh.spec.Norm):
    kind: ClassVar[str] = "doubled"


class Double(gh.layers.norm.Norm):
    def __init__(self, s: Doubled, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_registered_norm_is_not_folded() -> None:
    gh.register(Doubled, Double)
    model = small(norm="doubled", qk_norm=False)
    assert gh.weights(model).W_Q.shape[0] == 2
    with pytest.raises(gh.InputError, match=r"a norm is Double, whose gain is unknown"):
        _ = gh.weights(model, fold_norm=True).W_Q


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("llama", "b_Q", "the model has no b_Q, since its 'query' layers have no bias; leave it out."),
        ("llama", "b_U", "the model has no b_U, since its logits have no bias; leave it out."),
        ("llama", "W_pos", "the model has no W_pos, since its positions are 'rotary'; leave it out."),
        ("llama", "cross_W_Q", "the model has no cross_W_Q, since it has no cross-attention; leave it out."),
        ("gpt2", "W_gate", "the feedforward of layer 0 is FeedForward without a layer 'gate'"),
    ],
)
def test_what_a_model_lacks_is_named(kind: str, name: str, sentence: str) -> None:
    w = gh.weights(made(kind))
    with pytest.raises(gh.InputError) as error:
        getattr(w, name)
    assert sentence in str(error.value)
    assert not hasattr(w, name)
    assert getattr(w, name, None) is None


def test_wrong_calls_are_refused() -> None:
    model = made("encoder-decoder")
    with pytest.raises(gh.InputError, match=r"fold_norm is True, but norm_placement is 'post'"):
        gh.weights(model, fold_norm=True)
    with pytest.raises(gh.InputError, match=r"stack is 'both', but it must be 'decoder' or 'encoder'"):
        gh.weights(model, stack="both")  # type: ignore[arg-type]
    with pytest.raises(gh.InputError, match=r"the model has no W_U, since no head reads from its encoder"):
        gh.weights(model, stack="encoder").copying_scores()
    with pytest.raises(gh.InputError, match=r"mode is 'O', but it must be 'Q', 'K' or 'V'"):
        gh.weights(model).composition("O")  # type: ignore[arg-type]
    with pytest.raises(gh.InputError, match=r"head is 4, but there are 4; use 0 to 3"):
        gh.weights(model).kv_head(4)
    with pytest.raises(gh.InputError, match=r"the head is 'none', which has no logits over the vocabulary"):
        _ = gh.weights(small(head="none")).W_U
    masked = small("tiny-encoder", norm_placement="pre", head={"kind": "masked_token"})
    assert gh.weights(masked, fold_norm=True).W_Q.shape[0] == 2
    with pytest.raises(gh.InputError, match=r"W_U cannot be folded, since .* the head's transform, is between"):
        _ = gh.weights(masked, fold_norm=True).W_U
    with pytest.raises(gh.InputError, match="the model is a Linear"):
        gh.weights(nn.Linear(2, 2))


def test_the_norm_is_folded_without_a_bias_too() -> None:
    model = small(**{**GPT2, "norm": {"kind": "layer", "bias": False}, "qkv_bias": False})
    w = gh.weights(model, fold_norm=True)
    assert not hasattr(w, "b_Q")
    assert hasattr(gh.weights(small(**{**GPT2, "qkv_bias": False}), fold_norm=True), "b_Q")  # the norm's
    gain = model.stack.blocks[1].attention.norm.weight
    assert_close(w.W_Q[1, 2], torch.diag(gain) @ gh.weights(model).W_Q[1, 2])


def test_composition_is_drawn() -> None:
    found = gh.weights(made("gpt2")).composition("K")
    (drawn,) = found._drawings()
    assert isinstance(drawn, Heatmap)
    assert drawn.values[drawn.rows.index("2.1"), drawn.columns.index("1.2")] == found.scores[2, 1, 1, 2] > 0
    assert drawn.values[drawn.rows.index("1.0"), drawn.columns.index("0.1")] == found.scores[1, 0, 0, 1] > 0
    assert drawn.values[drawn.rows.index("1.0"), drawn.columns.index("1.1")].isnan()  # and is left blank
    page = found._repr_html_()
    assert "K-composition of each head (row) with each of an earlier layer (column)" in page
    for name in ("1.0", "2.2", "0.0", "1.2"):
        assert f">{name}<" in page
    assert repr(found) == "Composition(scores [3, 3, 3, 3], mode 'K')"
    large = dataclasses.replace(found, scores=torch.rand(8, 12, 8, 12))
    assert "<img" in large._repr_html_()
