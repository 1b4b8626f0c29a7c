"""Direct logit attribution: which parts of a model a logit is the sum of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.forward_pass import (
    check_full_sequence,
    eval_mode,
    final_stack,
    ids_of,
    layout_of,
    resolve_indices,
)
from glasshouse.inspection.html_display import MOST_TEXTS, HtmlDisplay, bars, not_drawn
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import unwrap_compiled, unwrap_model
from glasshouse.layers.layout import Layout
from glasshouse.layers.lora import LoRALinear
from glasshouse.layers.residual import PostNorm, SandwichNorm
from glasshouse.models import Model, check_tokenizer
from glasshouse.models.heads import LMHead
from glasshouse.text import Tokenizer

MOST_BARS = 30
# The sublayers of a block: the name, that of its last map, and the sites of the stream before it and of what the map
# is given.
SELF = ("attention", "out", "resid_pre", "z")
CROSS = ("cross", "out", "resid_mid", "cross_z")
ORDER = {
    "": [SELF, ("feedforward", "down", "resid_mid", "hidden")],
    "decoder.": [SELF, CROSS, ("feedforward", "down", "cross_resid_mid", "hidden")],
}


@dataclass(frozen=True, eq=False)
class Attribution(HtmlDisplay):
    """What each part of a model adds to one logit of each row, or to the difference of two; all add up to it."""

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
        "against": ("batch",),
    }
    heads: Tensor
    cross_heads: Tensor | None  # in an encoder-decoder
    feedforward: Tensor
    embedding: Tensor
    bias: Tensor  # all of them together
    logit: Tensor  # as the model itself computes it
    neurons: dict[int, Tensor]  # by layer, those that were asked for
    position: Tensor
    token: Tensor
    incorrect_token: Tensor | None

    def components(self) -> dict[str, Tensor]:
        """Return each part [batch] by its name; they add up to the logit.

        >>> import torch, glasshouse as gh
        >>> from glasshouse.inspection.attribution import attribute
        >>> model = gh.build(gh.preset("tiny-decoder", n_layers=1))
        >>> print(*attribute(model, torch.tensor([[1, 2, 3]]), token=4).parts(), sep=", ")
        embed, head 0.0, head 0.1, head 0.2, head 0.3, ffn 0, bias
        """
        parts = {"embed": self.embedding}
        for layer in range(self.feedforward.shape[1]):
            for kind, values in (("head", self.heads), ("cross head", self.cross_heads)):
                if values is not None:
                    parts |= {f"{kind} {layer}.{head}": values[:, layer, head] for head in range(values.shape[2])}
            parts[f"ffn {layer}"] = self.feedforward[:, layer]
        return {**parts, "bias": self.bias}

    def _drawing(self) -> str:
        parts = self.components()
        values, names = torch.stack(list(parts.values()), 1).cpu(), list(parts)
        drawn = []
        for text, row in enumerate(values[:MOST_TEXTS]):
            order = row.abs().argsort(descending=True)
            most, rest = order[:MOST_BARS], order[MOST_BARS:]
            less = "" if self.incorrect_token is None else f" less that of {int(self.incorrect_token[text])}"
            caption = (
                f"text {text}, position {int(self.position[text])}: what adds up to {float(self.logit[text]):.3g}, "
                f"the logit of token {int(self.token[text])}{less}"
            )
            other = [row[rest].sum()[None]] if len(rest) else []
            shown = [names[number] for number in most.tolist()] + ["other"] * len(other)
            drawn.append(bars(torch.cat([row[most], *other]), names=shown, caption=caption))
        return "".join(drawn) + (f"<p>{note}</p>" if (note := not_drawn(texts=len(values) - MOST_TEXTS)) else "")


def attribute(
    model: nn.Module,
    *inputs: Tensor,
    token: int | str | Tensor,
    position: int | Tensor = -1,
    incorrect_token: int | str | Tensor | None = None,
    neurons: Sequence[int] = (),
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Attribution:
    """Split a token's logit at a position into what each head and feed-forward layer, embedding and biases add.

    With `against` it is the difference to that token's logit. `token`, `against` and `position` may be one for all
    rows or one for each, [B]; with `tok`, a token may be given as text, such as " the". `neurons` names layers of
    which the neurons are wanted one by one.

    A logit is linear in what is added to the stream, but for the norms on the way: those are held at the mean and
    the scale they had in this pass, and the activation in the head of a masked model at its ratio of output to
    input. So a part says what it adds to this sum, and not what the logit would be without it. What an edit puts
    into the stream itself is no part.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.attribution import attribute
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> split = attribute(model, torch.tensor([[1, 2, 3]]), token=4)
    >>> split.heads.shape, torch.allclose(sum(split.parts().values()), split.logit, atol=1e-5)
    (torch.Size([1, 2, 4]), True)
    """
    whole = unwrap_model(model)
    check_tokens(whole)
    check_full_sequence(model_kwargs)
    if tok is not None:
        check_tokenizer(whole, tok)
    ids = ids_of(whole, inputs)
    prefix, stack = final_stack(whole)
    length, size = ids.shape[1], whole.spec.vocab_size
    asked = resolve_indices(neurons, len(stack.blocks), "neurons")
    place = _for_each_row(position, "position", ids, -length, length) % length
    said = _for_each_row(_id_of(token, "token", tok), "token", ids, 0, size)
    unsaid = (
        None
        if incorrect_token is None
        else _for_each_row(_id_of(incorrect_token, "against", tok), "against", ids, 0, size)
    )

    first, last = (int(edge) for edge in place.aminmax())
    rows = torch.arange(len(ids), device=ids.device)
    with eval_mode(whole):
        names = [f"{prefix}{name}[position={first}:{last + 1}]" for name in attribution_sites(whole)]
        with record(whole, *names, stop=True) as seen:
            whole(*inputs, **model_kwargs)

        def at(site: str) -> Tensor:
            return seen[prefix + site].movedim(-2, 1)[rows, place - first]

        return attribute_logit(whole, at, layout_of(whole, ids, model_kwargs), place, said, unsaid, asked)


def attribution_sites(model: Model) -> list[str]:
    """Return the sites of the stack that the head reads, `*` for every layer, from which `split` works.

    >>> import glasshouse as gh
    >>> print(*summands(gh.build(gh.preset("tiny-decoder"))))
    resid_pre.* z.* resid_mid.* hidden.* resid_post.1 final
    """
    prefix, stack = final_stack(model)
    inner = [f"{site}.*" for _, _, before, given in ORDER[prefix] for site in (before, given)]
    return [*inner, f"resid_post.{len(stack.blocks) - 1}", "final"]


def attribute_logit(
    model: Model,
    at: Callable[[str], Tensor],
    layout: Layout,
    position: Tensor,
    token: Tensor,
    incorrect_token: Tensor | None = None,
    neurons: Sequence[int] = (),
) -> Attribution:
    """Split the logit of each row's token [B], less that of another, by what was seen where it was said.

    `at` gives what stood at a site of `summands` at each row's position, [B, ...]. Call it in a `quiet` model.
    """
    head = check_tokens(model)
    prefix, stack = final_stack(model)
    table, rows = model.token_embedding.table.weight, torch.arange(len(token), device=token.device)

    def differ(of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what there is of the token, less what there is of the other."""
        return of(token) if incorrect_token is None else of(token) - of(incorrect_token)

    # By forward, past the hooks of who looks at or changes the model meanwhile: this is no part of a call.
    logits = head.forward(at("final")[:, None], layout, table)[:, 0]
    exact = torch.promote_types(logits.dtype, torch.float32)
    matrix = head.unembedding(table)
    shift = torch.zeros(len(matrix), device=token.device) if head.bias is None else head.bias
    back = _WayBack(
        direction=differ(lambda one: matrix[one].to(exact)) * head.scale,
        constant=differ(lambda one: shift[one].to(exact)),
    )
    if isinstance(head.transform, nn.Sequential):
        back.through_transform(head.transform, at("final"))
    back.through_norm(stack.norm, at(f"resid_post.{len(stack.blocks) - 1}"))
    found: dict[str, list[Tensor]] = {name: [] for name, *_ in ORDER[prefix]}
    by_neuron = {}
    for layer, block in reversed(list(enumerate(stack.blocks))):
        for name, last_map, before, given in reversed(ORDER[prefix]):
            values = at(f"{given}.{layer}")
            residual = unwrap_compiled(unwrap_compiled(block).get_submodule(name))
            each = back.through_sublayer(residual, last_map, at(f"{before}.{layer}"), values.flatten(1))
            found[name].insert(0, each.view_as(values).sum(-1))
            if name == "feedforward" and layer in neurons:
                by_neuron[layer] = each
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
    """Return the head, which must give logits of tokens."""
    head = unwrap_compiled(model.head)
    if not isinstance(head, LMHead):
        raise InputError(
            f"the head is {model.spec.head.kind!r}, which gives no logits of tokens; "
            "use a model with next_token or masked_token."
        )
    return head


class _WayBack:
    """The way back from a logit: a vector x at this place adds x . direction; what is constant is summed up."""

    def __init__(self, direction: Tensor, constant: Tensor) -> None:
        self.direction = direction  # [B, D]
        self.constant = constant  # [B]

    def product(self, x: Tensor) -> Tensor:
        """Return what vectors x [B, D] at this place add."""
        return (x * self.direction).sum(-1)

    def through_norm(self, norm: nn.Module, x: Tensor) -> None:
        """Go back through a norm that was given x [B, D]."""
        self.direction, constant = _held(norm, x, self.direction)
        self.constant = self.constant + constant

    def through_transform(self, transform: nn.Sequential, x: Tensor) -> None:
        """Go back through what a masked model has ahead of its logits: a map, an activation and a norm."""
        linear, activation, norm = transform
        given = linear(x)
        made = activation(given)
        self.through_norm(norm, made)
        self.direction = self.direction * torch.where(given == 0, 0, made / given)
        weight, bias = _matrix(linear, self.direction)
        self.constant = self.constant + self.product(bias)
        self.direction = self.direction @ weight

    def through_sublayer(self, residual: nn.Module, last: str, before: Tensor, given: Tensor) -> Tensor:
        """Go back through a sublayer: the stream `before` it was [B, D], its last map was `given` [B, N].

        Returned is what each of those N numbers adds.
        """
        layer = unwrap_compiled(residual.get_submodule("layer"))
        weight, bias = _matrix(layer.get_submodule(last), self.direction)
        made = F.linear(given.to(weight), weight, bias)
        if isinstance(residual, PostNorm):
            self.through_norm(residual.norm, before + made)
        direction = self.direction
        if isinstance(residual, SandwichNorm):
            direction, constant = _held(residual.norm_out, made, direction)
            self.constant = self.constant + constant
        self.constant = self.constant + (bias * direction).sum(-1)
        return given * (direction @ weight)


def _held(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return a direction behind a norm as one ahead of it, and the constant: the norm held as it was for x [B, D]."""
    x, norm = x.to(direction), unwrap_compiled(norm)
    match norm:
        case nn.LayerNorm():
            scaled = direction * norm.weight
            deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
            constant = 0.0 if norm.bias is None else (direction * norm.bias).sum(-1)
            return (scaled - scaled.mean(-1, keepdim=True)) / deviation, constant
        case nn.RMSNorm():
            assert norm.eps is not None  # a spec always says
            return direction * norm.weight / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt(), 0.0
        case nn.Identity():  # a stack without a final norm
            return direction, 0.0
        case _:
            raise InputError(
                f"{type(norm).__name__} is no norm that attribution knows; put a layer or RMS norm there."
            )


def _matrix(linear: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix and the bias of a linear map as it acts, with what LoRA has beside it."""
    linear = unwrap_compiled(linear)
    base = linear.base if isinstance(linear, LoRALinear) else linear
    assert isinstance(base, nn.Linear)
    weight = base.weight.to(like)
    if isinstance(linear, LoRALinear):
        weight = weight + linear.config.scale * (linear.lora_b @ linear.lora_a).to(like)
    bias = base.bias.to(like) if base.bias is not None else weight.new_zeros(len(weight))
    return weight, bias


def _id_of(token: int | str | Tensor, name: str, tok: Tokenizer | None) -> int | Tensor:
    """Return the id of a token that is given as text; ids stay as they are."""
    if not isinstance(token, str):
        return token
    if tok is None:
        raise InputError(f"{name} is {token!r}, a text; give its id, tok.encode({token!r})[0], or give tok as well.")
    number = tok.token_to_id(token)
    ids = (
        [number] if number is not None and number in tok.special_ids else tok.encode(token, add_special_tokens=False)
    )
    if len(ids) != 1:
        parts = ", ".join(repr(tok.id_to_token(one)) for one in ids) or "none"
        raise InputError(f"{name} is {token!r}, but that is {len(ids)} tokens ({parts}); give one of them.")
    return ids[0]


def _for_each_row(value: int | Tensor, name: str, ids: Tensor, low: int, high: int) -> Tensor:
    """Return one number for each row of ids [B, S], from low to below high."""
    try:
        given = torch.as_tensor(value, device=ids.device)
    except (RuntimeError, TypeError, ValueError):  # a text, None, or lists that make no tensor
        raise InputError(
            f"{name} is {value!r}, but it must be one whole number, or one for each of {len(ids)} rows."
        ) from None
    if given.dtype not in (torch.int64, torch.int32) or given.shape not in ((), ids.shape[:1]):
        raise InputError(
            f"{name} has shape {list(given.shape)} and type {given.dtype}, but it must be one whole number, or one "
            f"for each of {len(ids)} rows."
        )
    lowest, highest = (int(edge) for edge in given.aminmax())
    if lowest < low or highest >= high:
        wrong = lowest if lowest < low else highest
        raise InputError(f"{name} holds {wrong}, but it must stay within {low} and {high - 1}.")
    return given.long().expand(len(ids))
