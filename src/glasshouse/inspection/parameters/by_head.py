"""The weights of a model by attention head, under TransformerLens' names, and its QK and OV circuits."""

# ruff: noqa: N802, N815 (the names are TransformerLens')

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.attribution import check_tokens
from glasshouse.inspection.inputs.forward_pass import final_stack
from glasshouse.inspection.parameters.composition import Composition, Mode, compose
from glasshouse.inspection.parameters.linear_weights import weight_and_bias
from glasshouse.inspection.parameters.low_rank import LowRank, exact
from glasshouse.inspection.sites import sublayer_of, unwrap_compiled, unwrap_model
from glasshouse.layers.attention import MultiHeadAttention, ProjectionNorm
from glasshouse.layers.feedforward import FeedForward
from glasshouse.layers.lora import LoRALinear
from glasshouse.layers.norm import LayerNorm, RMSNorm
from glasshouse.layers.position import LearnedPosition
from glasshouse.models import Model, Seq2Seq

T = TypeVar("T", Tensor, LowRank)
StackName = Literal["decoder", "encoder"]
CIRCUIT = ("layer", "head", "d_model", "d_model")


def weights(model: nn.Module, *, fold_norm: bool = False, stack: StackName = "decoder") -> Weights:
    """Return the weights of a model by layer and head, in TransformerLens' orientation: a row vector times them.

    They are views of the parameters: writing to one changes the model, and gradients flow through it. Copies are
    weights with LoRA, which is merged in them, and with `fold_norm` those that read from a norm: its gain, and the
    bias of a LayerNorm, are folded into W_Q, W_K, W_V, W_in, W_gate and W_U (with the spec's `logit_scale`) and their
    biases, so that they apply to what the norm has only centred (LayerNorm) and divided by its scale. Keys and values
    of cross-attention read from the final norm of the encoder; the norm of a layer's output, if it has one, is not
    folded. `stack` chooses the stack of an encoder-decoder.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", d_model=64, n_heads=4, n_kv_heads=2))
    >>> found = gh.weights(model)
    >>> found.W_Q[1, 3].shape, found.W_O[1, 3].shape, found.W_K.shape, found.W_E.shape
    (torch.Size([64, 16]), torch.Size([16, 64]), torch.Size([2, 2, 64, 16]), torch.Size([256, 64]))
    >>> found.OV[1, 3]
    LowRank([64, 16] @ [16, 64])
    """
    whole = unwrap_model(model)
    if stack not in get_args(StackName):
        raise InputError(f"stack is {stack!r}, but it must be 'decoder' or 'encoder'.")
    if fold_norm and whole.spec.norm_placement == "post":
        raise InputError(
            "fold_norm is True, but norm_placement is 'post', where each norm is read by the next residual sum, too; "
            "use fold_norm=False."
        )
    return Weights(whole, fold_norm=fold_norm, stack=stack)


class MissingWeightError(InputError, AttributeError):
    """The model has no such weight; an AttributeError too, so that `hasattr` and `getattr` with a default work."""


class LayerWeights(Generic[T]):
    """A weight of every layer, indexed by layer, or by layer and head; `axes` names its axes.

    >>> import glasshouse as gh
    >>> queries = gh.weights(gh.build(gh.preset("tiny-decoder"))).W_Q
    >>> queries.axes, queries.shape, queries[1, -1].shape
    (('layer', 'head', 'd_model', 'd_head'), torch.Size([2, 4, 64, 16]), torch.Size([64, 16]))
    """

    def __init__(self, name: str, axes: tuple[str, ...], n_layers: int, of: Callable[[int], T]) -> None:
        self.name, self.axes = name, axes
        self._n_layers = n_layers
        self._of: Callable[[int], T] = of

    def __len__(self) -> int:
        return self._n_layers

    def __iter__(self) -> Iterator[T]:
        return map(self._of, range(self._n_layers))

    def __getitem__(self, index: Any) -> T:  # noqa: ANN401 - a layer, then what a tensor takes
        first, *rest = index if isinstance(index, tuple) else (index,)
        try:
            layer = operator.index(first)
        except TypeError:
            raise InputError(
                f"{self.name} is indexed by {first!r}, but each layer has a parameter of its own; give the "
                f"number of one, or index the copy of all, {self.name}.stack()."
            ) from None
        shape = (self._n_layers, *(self._of(0).shape if rest else ()))
        named = (layer, *itertools.takewhile(lambda one: one is not None and one is not Ellipsis, rest))
        for axis, size, one in zip(self.axes, shape, named, strict=False):
            if isinstance(one, int) and not -size <= one < size:
                raise InputError(f"{self.name} has {axis} index {one}, but there are {size}; use 0 to {size - 1}.")
        weight = self._of(layer)
        return weight[tuple(rest)] if rest else weight

    @property
    def shape(self) -> torch.Size:
        """The size of each axis."""
        return torch.Size([self._n_layers, *self._of(0).shape])

    def stack(self) -> T:
        """Return all layers as one, a copy."""
        layers = list(self)
        if isinstance(layers[0], LowRank):
            return LowRank(torch.stack([one.left for one in layers]), torch.stack([one.right for one in layers]))
        return torch.stack(layers)

    def __repr__(self) -> str:
        return f"{self.name} {list(self.shape)}"


class _Projection:
    """Declares an attribute of `Weights`: the weight or bias of one linear layer of each block."""

    def __init__(self, part: str, linear: str, *axes: str) -> None:
        self.part, self.linear, self.axes = part, linear, ("layer", *axes)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.is_bias = name, "b_" in name

    def __get__(self, weights: Weights, owner: type) -> LayerWeights[Tensor]:
        return weights._per_layer(self)


class Weights:
    """The weights of a stack, as `gh.weights` returns them.

    In grouped-query attention, W_K and W_V have one entry per KV head; `kv_head` gives that of a head. What the model
    lacks, such as biases or a gate, is an InputError, and `hasattr` says so.
    """

    W_Q = _Projection("attention", "query", "head", "d_model", "d_head")
    W_K = _Projection("attention", "key", "kv_head", "d_model", "d_head")
    W_V = _Projection("attention", "value", "kv_head", "d_model", "d_head")
    W_O = _Projection("attention", "out", "head", "d_head", "d_model")
    b_Q = _Projection("attention", "query", "head", "d_head")
    b_K = _Projection("attention", "key", "kv_head", "d_head")
    b_V = _Projection("attention", "value", "kv_head", "d_head")
    b_O = _Projection("attention", "out", "d_model")
    cross_W_Q = _Projection("cross", "query", "head", "d_model", "d_head")
    cross_W_K = _Projection("cross", "key", "kv_head", "d_model", "d_head")
    cross_W_V = _Projection("cross", "value", "kv_head", "d_model", "d_head")
    cross_W_O = _Projection("cross", "out", "head", "d_head", "d_model")
    cross_b_Q = _Projection("cross", "query", "head", "d_head")
    cross_b_K = _Projection("cross", "key", "kv_head", "d_head")
    cross_b_V = _Projection("cross", "value", "kv_head", "d_head")
    cross_b_O = _Projection("cross", "out", "d_model")
    W_in = _Projection("feedforward", "up", "d_model", "d_ff")
    W_gate = _Projection("feedforward", "gate", "d_model", "d_ff")  # act(x W_gate) * (x W_in)
    W_out = _Projection("feedforward", "down", "d_ff", "d_model")
    b_in = _Projection("feedforward", "up", "d_ff")
    b_gate = _Projection("feedforward", "gate", "d_ff")
    b_out = _Projection("feedforward", "down", "d_model")

    def __init__(self, model: Model, *, fold_norm: bool, stack: StackName) -> None:
        self.fold_norm = fold_norm
        self._model = model
        self._has_head = not (isinstance(model, Seq2Seq) and stack == "encoder")
        self._stack = final_stack(model)[1] if self._has_head else cast(Seq2Seq, model).encoder
        self._n_layers = len(self._stack.blocks)

    @property
    def W_E(self) -> Tensor:
        """The token embeddings, [vocab_size, d_model]; with embed_scale the model multiplies by sqrt(d_model)."""
        table = unwrap_compiled(self._model.token_embedding.table)
        if not isinstance(table, nn.Embedding):
            raise self._missing("W_E", f"its table is {type(table).__name__}", "use the model before quantization")
        return table.weight

    @property
    def W_pos(self) -> Tensor:
        """The learned position embeddings, [max_len, d_model]."""
        position = unwrap_compiled(self._stack.position)
        if not isinstance(position, LearnedPosition):
            raise self._missing("W_pos", f"its positions are {self._model.spec.position.kind!r}")
        return position.table.weight[position.offset :]

    @property
    def W_U(self) -> Tensor:
        """The unembedding, [d_model, vocab_size]; with logit_scale the model divides by sqrt(d_model) before it."""
        return self._unembedding("W_U")[0]

    @property
    def b_U(self) -> Tensor:
        """The bias of the logits, [vocab_size]."""
        bias = self._unembedding("b_U")[1]
        if bias is None:
            raise self._missing("b_U", "its logits have no bias")
        return bias

    @property
    def QK(self) -> LayerWeights[LowRank]:
        """W_Q @ W_K^T of each head, queries on the left: scores without scale, biases and rotation.

        With rotary positions it is the product at distance 0. With qk_norm it contains the gains of both norms (and
        how a LayerNorm centres), while each query and key is still to be divided by its scale.
        """
        queries, keys = self.W_Q, self.W_K

        def of(layer: int) -> LowRank:
            attention = cast(MultiHeadAttention, sublayer_of(self._stack.blocks[layer], "attention"))
            read = self._for_each_head(_without_scale(keys[layer], attention.k_norm))
            return LowRank(_without_scale(queries[layer], attention.q_norm), read.mT)

        return LayerWeights("QK", CIRCUIT, self._n_layers, of)

    @property
    def OV(self) -> LayerWeights[LowRank]:
        """W_V @ W_O of each head: what it writes where it attends to x alone is x @ OV, without biases."""
        values, outs = self.W_V, self.W_O
        return LayerWeights(
            "OV", CIRCUIT, self._n_layers, lambda layer: LowRank(self._for_each_head(values[layer]), outs[layer])
        )

    def kv_head(self, head: int) -> int:
        """Return the KV head whose keys and values a head uses.

        >>> import glasshouse as gh
        >>> found = gh.weights(gh.build(gh.preset("tiny-decoder", n_heads=4, n_kv_heads=2)))
        >>> [found.kv_head(head) for head in range(4)]
        [0, 0, 1, 1]
        """
        s = self._model.spec
        if not 0 <= head < s.n_heads:
            raise InputError(f"head is {head}, but there are {s.n_heads}; use 0 to {s.n_heads - 1}.")
        return head // (s.n_heads // s.n_kv_heads)

    def composition(self, mode: Mode) -> Composition:
        """Return how much each head reads, by its queries, keys or values, of what each earlier head writes.

        As Elhage et al. (2021) define it, in Frobenius norms, here for row vectors: |OV_w QK_r| / (|OV_w| |QK_r|) of
        writer w and reader r for "Q", with QK_r transposed for "K", with OV_r for "V". It is 0 where the writer is
        not in an earlier layer, and where a matrix is 0.

        >>> import glasshouse as gh
        >>> model = gh.build(gh.preset("gpt2", n_layers=3, d_model=48, n_heads=4))
        >>> gh.weights(model).composition("K").scores.shape
        torch.Size([3, 4, 3, 4])
        """
        if mode not in get_args(Mode):
            raise InputError(f"mode is {mode!r}, but it must be 'Q', 'K' or 'V'.")
        return compose(self.OV, self.OV if mode == "V" else self.QK, mode)

    @torch.no_grad()
    def copying_scores(self) -> Tensor:
        """Return [layer, head], from -1 to 1: how far a head raises the logits of the very tokens it attends to.

        That is the sum of the real parts of the eigenvalues of W_E @ OV @ W_U divided by the sum of their magnitudes
        (Elhage et al., 2021); 0 where OV is 0. The gains of the norms count with `fold_norm` alone.

        >>> import glasshouse as gh
        >>> model = gh.build(gh.preset("gpt2", n_layers=3, d_model=48, n_heads=4))
        >>> gh.weights(model, fold_norm=True).copying_scores().shape
        torch.Size([3, 4])
        """
        around = exact(self.W_U) @ exact(self.W_E)  # [D, D]: AB has the eigenvalues of BA, and 0
        values = torch.stack([(heads @ around).eigenvalues() for heads in self.OV])
        return values.real.sum(-1) / values.abs().sum(-1).clamp(min=torch.finfo(around.dtype).tiny)

    def __repr__(self) -> str:
        own = [name for name, one in vars(Weights).items() if isinstance(one, _Projection) and hasattr(self, name)]
        return f"Weights({', '.join(repr(getattr(self, name)) for name in own)})"

    def _missing(self, name: str, reason: str, advice: str = "leave it out") -> MissingWeightError:
        return MissingWeightError(f"the model has no {name}, since {reason}; {advice}.")

    def _per_layer(self, what: _Projection) -> LayerWeights[Tensor]:
        def of(layer: int) -> Tensor:
            found = self._weight_and_bias(what, layer)[what.is_bias]
            if found is None:
                raise self._missing(what.name, f"its {what.linear!r} layers have no bias")
            return found

        of(0)  # raises if the model lacks it
        return LayerWeights(what.name, what.axes, self._n_layers, of)

    def _weight_and_bias(self, what: _Projection, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return a weight [..., in, out] and its bias [..., out], by head; with fold_norm, the norm is folded in."""
        linear = unwrap_compiled(self._linear(what, layer))
        base = linear.base if isinstance(linear, LoRALinear) else linear
        if not isinstance(base, nn.Linear):
            reason = f"{what.linear!r} of layer {layer} is {type(base).__name__}"
            raise self._missing(what.name, reason, "use the model before quantization")
        weight, bias = weight_and_bias(linear, base.weight)
        by_head = (-1, self._model.spec.d_head)
        match what.linear:
            case "query" | "key" | "value":
                weight, bias = weight.unflatten(0, by_head).mT, bias.unflatten(0, by_head)
            case "out":
                weight = weight.T.unflatten(0, by_head)
            case _:
                weight = weight.T
        given = None if base.bias is None else bias
        return _folded(self._norm_before(what, layer), weight, given) if self.fold_norm else (weight, given)

    def _linear(self, what: _Projection, layer: int) -> nn.Module:
        block = self._stack.blocks[layer]
        if not hasattr(block, what.part):
            raise self._missing(what.name, "it has no cross-attention")
        sublayer = sublayer_of(block, what.part)
        ours = FeedForward if what.part == "feedforward" else MultiHeadAttention
        if not isinstance(sublayer, ours) or not hasattr(sublayer, what.linear):
            reason = f"the {what.part} of layer {layer} is {type(sublayer).__name__} without a layer {what.linear!r}"
            raise self._missing(what.name, reason, "see the parameters of that module")
        return sublayer.get_submodule(what.linear)

    def _norm_before(self, what: _Projection, layer: int) -> nn.Module:
        """Return the norm that a weight reads from, or an identity."""
        if what.linear in ("out", "down"):
            return nn.Identity()
        if what.part == "cross" and what.linear != "query":
            return cast(Seq2Seq, self._model).encoder.norm
        residual = unwrap_compiled(self._stack.blocks[layer].get_submodule(what.part))
        norm: nn.Module = getattr(residual, "norm", nn.Identity())  # none where the output alone is normalised
        return norm

    def _unembedding(self, name: str) -> tuple[Tensor, Tensor | None]:
        if not self._has_head:
            raise self._missing(name, "no head reads from its encoder", "use stack='decoder'")
        head = check_tokens(self._model)
        weight = head.unembedding(self.W_E).T
        if not self.fold_norm:
            return weight, head.bias
        if not isinstance(head.transform, nn.Identity):
            raise InputError(
                f"{name} cannot be folded, since a layer with an activation, the head's transform, is between the "
                "final norm and the unembedding; use fold_norm=False."
            )
        return _folded(self._stack.norm, weight * head.scale, head.bias)

    def _for_each_head(self, weight: Tensor) -> Tensor:
        """Repeat the weight of each KV head for the heads that use it."""
        share = self._model.spec.n_heads // len(weight)
        return weight if share == 1 else weight.repeat_interleave(share, 0)


def _affine(norm: nn.Module) -> LayerNorm | RMSNorm | None:
    """Return a norm, which must have a gain; None for an identity."""
    norm = unwrap_compiled(norm)
    if isinstance(norm, LayerNorm | RMSNorm):
        return norm
    if isinstance(norm, nn.Identity):
        return None
    raise InputError(f"a norm is {type(norm).__name__}, whose gain is unknown; use a norm that a spec has by itself.")


def _folded(norm: nn.Module, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a weight [..., in, out] and its bias [..., out] with the gain and the bias of the norm before it."""
    if (found := _affine(norm)) is None:
        return weight, bias
    shift = getattr(found, "bias", None)
    if shift is not None:
        bias = shift @ weight if bias is None else bias + shift @ weight
    return found.weight[:, None] * weight, bias


def _without_scale(weight: Tensor, norm: nn.Module) -> Tensor:
    """Return a weight [head, in, out] with the norm of its output, which is not divided."""
    norm = unwrap_compiled(norm)
    over_all = isinstance(norm, ProjectionNorm)
    if (found := _affine(norm.norm if isinstance(norm, ProjectionNorm) else norm)) is None:
        return weight
    if isinstance(found, LayerNorm):
        weight = weight - weight.mean((0, -1) if over_all else -1, keepdim=True)
    return weight * (found.weight.unflatten(0, (len(weight), 1, -1)) if over_all else found.weight)
