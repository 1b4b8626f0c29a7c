"""Direct logit attribution: a logit as the sum of the contributions of each component of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.display.html import MAX_TEXTS, Bars, Drawing, HtmlDisplay, labels, not_drawn
from glasshouse.inspection.inputs.forward_pass import (
    check_full_sequence,
    columns_of,
    eval_mode,
    final_stack,
    ids_of,
    layout_of,
    per_sequence,
    resolve_indices,
    token_id,
)
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.parameters.linear_weights import weight_and_bias
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import PARTS, parts_of, sublayer_of, unwrap_compiled, unwrap_model
from glasshouse.layers.norm import Norm
from glasshouse.layers.residual import OutputNorm, PostNorm, SandwichNorm
from glasshouse.layers.sublayer import Sublayer
from glasshouse.models import Model
from glasshouse.models.heads import LMHead
from glasshouse.text import Tokenizer

MAX_BARS = 30


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(HtmlDisplay):
    """The contribution of each component to one logit per sequence, or to a logit difference; they sum to it."""

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "heads": ("batch", "layer", "head"),
        "cross_heads": ("batch", "layer", "head"),
        "feedforward": ("batch", "layer"),
        "embedding": ("batch",),
        "bias": ("batch",),
        "logit": ("batch",),
        "neurons": ("batch", "neuron"),
        "position": ("batch",),
        "token": ("batch",),
        "incorrect_token": ("batch",),
        "ids": ("batch", "position"),
    }
    heads: Tensor
    cross_heads: Tensor | None  # in an encoder-decoder
    feedforward: Tensor
    embedding: Tensor
    bias: Tensor  # the sum over all biases
    logit: Tensor  # as the model computes it
    neurons: dict[int, Tensor]  # by layer, for the requested layers
    position: Tensor
    token: Tensor
    incorrect_token: Tensor | None
    ids: Tensor | None = None  # the input
    tok: Tokenizer | None = None

    def components(self) -> dict[str, Tensor]:
        """Return the contribution [batch] of each component by name; they sum to the logit.

        >>> import torch, glasshouse as gh
        >>> from glasshouse.inspection.attribution import attribute
        >>> model = gh.build(gh.preset("tiny-decoder", n_layers=1))
        >>> print(*attribute(model, torch.tensor([[1, 2, 3]]), token=4).components(), sep=", ")
        embed, head 0.0, head 0.1, head 0.2, head 0.3, ffn 0, bias
        """
        found = {"embed": self.embedding}
        for layer in range(self.feedforward.shape[1]):
            for kind, values in (("head", self.heads), ("cross head", self.cross_heads)):
                if values is not None:
                    found |= {f"{kind} {layer}.{head}": values[:, layer, head] for head in range(values.shape[2])}
            found[f"ffn {layer}"] = self.feedforward[:, layer]
        return {**found, "bias": self.bias}

    def _drawings(self) -> list[Drawing]:
        components = self.components()
        values, names = torch.stack(list(components.values()), 1).cpu(), list(components)
        drawn: list[Drawing] = []
        note = not_drawn(texts=len(values) - MAX_TEXTS)
        for text, row in enumerate(values[:MAX_TEXTS]):
            order = row.abs().argsort(descending=True)
            most, rest = order[:MAX_BARS], order[MAX_BARS:]
            minus = "" if self.incorrect_token is None else f" minus that of {self._word(self.incorrect_token[text])}"
            position = int(self.position[text])
            after = "" if self.ids is None or self.tok is None else f" ({self._word(self.ids[text, position])})"
            caption = (
                f"text {text}, position {position}{after}: contributions to {float(self.logit[text]):.3g}, "
                f"the logit of {self._word(self.token[text])}{minus}{note}"
            )
            other = [row[rest].sum()[None]] if len(rest) else []
            shown = [names[number] for number in most.tolist()] + ["other"] * len(other)
            drawn.append(Bars(torch.cat([row[most], *other]), shown, caption))
        return drawn

    def _word(self, token: Tensor) -> str:
        return f"token {int(token)}" if self.tok is None else repr(labels(token[None], self.tok)[0])


def attribute(
    model: nn.Module,
    *inputs: Input,
    token: int | str | Tensor,
    position: int | Tensor = -1,
    incorrect_token: int | str | Tensor | None = None,
    neurons: Sequence[int] = (),
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Attribution:
    """Decompose a logit into the contributions of attention heads, feed-forward layers, embedding and biases.

    The logit is that of `token` at `position`, counted without padding; with `incorrect_token`, minus that token's.
    Each of the three may be one for the batch or one per sequence, [B]; with `tok`, the input may be a text, or
    several, and a token given as text, such as " the". `neurons` lists the layers whose neurons are attributed one
    by one.

    A logit is linear in the outputs added to the residual stream, except for the norms: their mean and scale are
    frozen at those of this forward pass, and the activation in the head of a masked language model at its ratio of
    output to input. So a contribution is a term of this sum, not the change of the logit under ablation. An edit of
    the residual stream itself is not a component.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.attribution import attribute
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> found = attribute(model, torch.tensor([[1, 2, 3]]), token=4)
    >>> found.heads.shape, torch.allclose(sum(found.components().values()), found.logit, atol=1e-5)
    (torch.Size([1, 2, 4]), True)
    """
    whole = unwrap_model(model)
    check_tokens(whole)
    check_full_sequence(model_kwargs)
    given, kwargs = encode_inputs(whole, inputs, model_kwargs, tok)
    ids = ids_of(whole, given)
    prefix, stack = final_stack(whole)
    length, size = ids.shape[1], whole.spec.vocab_size
    neuron_layers = resolve_indices(neurons, len(stack.blocks), "neurons")
    layout = layout_of(whole, ids, kwargs)
    positions = columns_of(per_sequence(position, "position", ids, -length, length), layout, "position")
    correct = per_sequence(token_id(token, "token", tok), "token", ids, 0, size)
    incorrect = (
        None
        if incorrect_token is None
        else per_sequence(token_id(incorrect_token, "incorrect_token", tok), "incorrect_token", ids, 0, size)
    )

    first, last = (int(edge) for edge in positions.aminmax())
    rows = torch.arange(len(ids), device=ids.device)
    with eval_mode(whole):
        names = [f"{prefix}{name}[position={first}:{last + 1}]" for name in attribution_sites(whole)]
        with record(whole, *names, stop=True) as seen:
            whole(*given, **kwargs)

        def at(site: str) -> Tensor:
            return seen[prefix + site].movedim(-2, 1)[rows, positions - first]

        found = attribute_logit(whole, at, positions, correct, incorrect, neuron_layers)
    return replace(found, ids=ids, tok=tok)


def attribution_sites(model: Model) -> list[str]:
    """Return the sites that `attribute_logit` needs, `*` for every layer, in the stack that feeds the head.

    >>> import glasshouse as gh
    >>> print(*attribution_sites(gh.build(gh.preset("tiny-decoder"))))
    resid_pre.* z.* resid_mid.* hidden.* resid_post.1 final
    """
    _, stack = final_stack(model)
    inner = [
        f"{site}.*" for _, layer, before in _sublayers(stack.blocks[0]) for site in (before, layer.residual_input)
    ]
    return [*inner, f"resid_post.{len(stack.blocks) - 1}", "final"]


def _sublayers(block: nn.Module) -> Iterator[tuple[nn.Module, Sublayer, str]]:
    """Yield the residual connection of each part of a block, its layer, and the site of the stream before it."""
    before = "resid_pre"
    for part in parts_of(block):
        yield unwrap_compiled(unwrap_compiled(block).get_submodule(part)), sublayer_of(block, part), before
        before = PARTS[part][1]


def attribute_logit(
    model: Model,
    at: Callable[[str], Tensor],
    position: Tensor,
    token: Tensor,
    incorrect_token: Tensor | None = None,
    neurons: Sequence[int] = (),
) -> Attribution:
    """Decompose the logit of each sequence's token [B], minus that of another, using recorded activations.

    It is that before the soft-cap, which is not linear, where the model has one.

    `at` returns the activation of one of `attribution_sites` at each sequence's position, [B, ...]. Call it inside
    `eval_mode`.
    """
    head = check_tokens(model)
    _, stack = final_stack(model)
    table, rows = model.token_embedding.table.weight, torch.arange(len(token), device=token.device)

    def differ(of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a value of the token, minus that of the incorrect token."""
        return of(token) if incorrect_token is None else of(token) - of(incorrect_token)

    # By `forward`, which bypasses hooks: this is not part of a forward pass of the model.
    logits = F.linear(*head.unprojected(at("final"), table)[:3])
    exact = torch.promote_types(logits.dtype, torch.float32)
    matrix = head.unembedding(table)
    shift = torch.zeros(len(matrix), device=token.device) if head.bias is None else head.bias
    back = _Backward(
        direction=differ(lambda one: matrix[one].to(exact)) * head.scale,
        constant=differ(lambda one: shift[one].to(exact)),
    )
    if isinstance(head.transform, nn.Sequential):
        back.through_transform(head.transform, at("final"))
    back.through_norm(stack.norm, at(f"resid_post.{len(stack.blocks) - 1}"))
    found: dict[str, list[Tensor]] = {part: [] for part in parts_of(stack.blocks[0])}
    by_neuron = {}
    for number, block in reversed(list(enumerate(stack.blocks))):
        for part, (residual, layer, before) in reversed(list(zip(found, _sublayers(block), strict=True))):
            values = at(f"{layer.residual_input}.{number}")
            each = back.through_sublayer(residual, layer, at(f"{before}.{number}"), values.flatten(1))
            found[part].insert(0, each.view_as(values).sum(-1))
            if part == "feedforward" and number in neurons:
                by_neuron[number] = each
    return Attribution(
        heads=torch.stack(found["attention"], 1),
        cross_heads=torch.stack(found["cross"], 1) if "cross" in found else None,
        feedforward=torch.stack(found["feedforward"], 1),
        embedding=back.product(at("resid_pre.0")),
        bias=back.constant,
        logit=differ(lambda one: logits[rows, one].to(exact)),
        neurons={layer: by_neuron[layer] for layer in neurons},
        position=position,
        token=token,
        incorrect_token=incorrect_token,
    )


def check_tokens(model: Model) -> LMHead:
    """Return the head, which must be a language-model head."""
    head = unwrap_compiled(model.head)
    if not isinstance(head, LMHead):
        raise InputError(
            f"the head is {model.spec.head.kind!r}, which has no logits over the vocabulary; "
            "use a model with a next_token or masked_token head."
        )
    return head


class _Backward:
    """Walks back from a logit: a vector x at this point contributes x . direction; constants are summed."""

    def __init__(self, direction: Tensor, constant: Tensor) -> None:
        self.direction = direction  # [B, D]
        self.constant = constant  # [B]

    def product(self, x: Tensor) -> Tensor:
        """Return the contribution of vectors x [B, D] at this point."""
        return (x * self.direction).sum(-1)

    def through_norm(self, norm: nn.Module, x: Tensor) -> None:
        """Go back through a norm whose input was x [B, D]."""
        self.direction, constant = _through_frozen_norm(norm, x, self.direction)
        self.constant = self.constant + constant

    def through_transform(self, transform: nn.Sequential, x: Tensor) -> None:
        """Go back through the head transform of a masked language model: a linear layer, an activation and a norm."""
        linear, activation, norm = transform
        given = linear(x)
        activated = activation(given)
        self.through_norm(norm, activated)
        self.direction = self.direction * torch.where(given == 0, 0, activated / given)
        weight, bias = weight_and_bias(linear, self.direction)
        self.constant = self.constant + self.product(bias)
        self.direction = self.direction @ weight

    def through_sublayer(self, residual: nn.Module, layer: Sublayer, before: Tensor, given: Tensor) -> Tensor:
        """Go back through a sublayer, with the residual stream `before` it [B, D] and the projection's input [B, N].

        Return the contribution of each of the N inputs.
        """
        weight, bias = weight_and_bias(layer.residual_projection, self.direction)
        output = F.linear(given.to(weight), weight, bias)
        if isinstance(residual, PostNorm):
            self.through_norm(residual.norm, before + output)
        direction = self.direction
        if isinstance(residual, SandwichNorm | OutputNorm):
            direction, constant = _through_frozen_norm(residual.norm_out, output, direction)
            self.constant = self.constant + constant
        self.constant = self.constant + (bias * direction).sum(-1)
        return given * (direction @ weight)


def _through_frozen_norm(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return a direction after a norm as one before it, and a constant, with the norm frozen as for x [B, D]."""
    norm = unwrap_compiled(norm)
    if isinstance(norm, nn.Identity):  # a stack without a final norm
        return direction, 0.0
    if not isinstance(norm, Norm):
        raise InputError(f"{type(norm).__name__} is not a norm that attribution supports; use one that a spec has.")
    return norm.frozen(x.to(direction), direction)
