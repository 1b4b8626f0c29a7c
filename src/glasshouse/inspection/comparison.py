"""Compare two models of one shape on a text: residual stream, attention heads, feed-forward layers, predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection.attention_map import recompute_attention
from glasshouse.inspection.display.html import (
    MAX_COLUMNS,
    MAX_TEXTS,
    Bars,
    Drawing,
    Heatmap,
    HtmlDisplay,
    labels,
    not_drawn,
)
from glasshouse.inspection.hooks import Hook, HookedAttend, hook_manager_of
from glasshouse.inspection.inputs.forward_pass import eval_mode, next_tokens
from glasshouse.inspection.inputs.stack_input import StackInput, make_stack_input
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.sites import Selection, Site, unwrap_model
from glasshouse.layers.attend.kernel import Attend
from glasshouse.layers.attend.mask import Mask
from glasshouse.models import Model, check_tokenizer
from glasshouse.text import Tokenizer

MAX_LOGITS = 2**22  # turned into probabilities at once
TOKENS_PER_LINE = 16  # of drawn text
MAX_TOKENS = 8  # listed as those that differ most

SHAPE = ("kind", "n_layers", "n_heads", "d_head", "d_model", "vocab_size")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(HtmlDisplay):
    """How much two models differ on a text. Distances are relative to the norm of the first model's activations.

    They are NaN at padding, as is the KL divergence where the head has no logits at a position, and the loss where
    there is no next token.
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "residual_distance": ("layer", "batch", "position"),
        "pattern_distance": ("layer", "head"),
        "z_distance": ("layer", "head"),
        "ffn_out_distance": ("layer",),
        "kl_divergence": ("batch", "position"),
        "loss_a": ("batch", "position"),
        "loss_b": ("batch", "position"),
        "ids": ("batch", "position"),
    }
    residual_distance: Tensor  # of the residual stream, after the embedding and each layer
    pattern_distance: Tensor  # total variation distance of the attention weights, mean over queries: from 0 to 1
    z_distance: Tensor  # of each head's output
    ffn_out_distance: Tensor  # of each feed-forward layer's output
    kl_divergence: Tensor  # KL(a || b) of the predictions, in nats
    loss_a: Tensor  # of the next token, in nats
    loss_b: Tensor
    ids: Tensor  # the input of the stack
    tok: Tokenizer | None = None

    def _drawings(self) -> list[Drawing]:
        depth, n_heads = self.pattern_distance.shape
        layers, heads = [f"layer {layer}" for layer in range(depth)], [f"head {head}" for head in range(n_heads)]
        texts = range(min(len(self.ids), MAX_TEXTS))
        return [
            *(one for text in texts for one in self._draw_text(text, ["embed", *layers])),
            self._draw_largest(),
            Heatmap(self.pattern_distance, layers, heads, "distance of attention patterns"),
            Heatmap(self.z_distance, layers, heads, "distance of head outputs"),
            Bars(self.ffn_out_distance, layers, "distance of feed-forward outputs"),
        ]

    def _draw_text(self, text: int, layers: list[str]) -> list[Drawing]:
        """Draw the tokens of a text, shaded by KL divergence, and the distances of the residual stream."""
        n_texts, length = self.ids.shape
        count = min(length, MAX_COLUMNS)
        note = not_drawn(positions=length - count, texts=n_texts - MAX_TEXTS)
        words = labels(self.ids[text, :count], self.tok)
        width = TOKENS_PER_LINE
        starts = range(0, count, width)
        blank = -count % width
        divergence = Heatmap(
            F.pad(self.kl_divergence[text, :count], (0, blank), value=torch.nan).unflatten(0, (-1, width)),
            rows=[str(start) for start in starts],
            columns=[""] * width,
            caption=f"text {text}: KL divergence of the predictions{note}",
            words=[[*words, *[""] * blank][start : start + width] for start in starts],
        )
        caption = f"text {text}: distance of the residual streams{note}"
        return [divergence, Heatmap(self.residual_distance[:, text, :count], layers, words, caption)]

    def _draw_largest(self) -> Drawing:
        top, where = self.kl_divergence.nan_to_num(-torch.inf).flatten().topk(min(MAX_TOKENS, self.ids.numel()))
        some = top > 0
        words = labels(self.ids.flatten()[where[some]], self.tok)
        indices = [divmod(index, self.ids.shape[1]) for index in where[some].tolist()]
        names = [f"text {text}, {position}: {word}" for (text, position), word in zip(indices, words, strict=True)]
        return Bars(top[some], names, "tokens with the largest KL divergence, in nats")


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    *inputs: Input,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the models take
) -> Comparison:
    """Compare two models of one shape on a text, such as a model before and after fine-tuning.

    With `tok` the input may be a text, or several, for an encoder-decoder the source and the target. Each model runs
    once; attention weights are compared a few queries at a time. Of an encoder-decoder the decoder is compared.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.comparison import compare
    >>> a, b = (gh.build(gh.preset("tiny-decoder")) for _ in range(2))
    >>> found = compare(a, b, torch.tensor([[1, 2, 3]]))
    >>> found.residual_distance.shape, found.pattern_distance.shape, found.kl_divergence.shape
    (torch.Size([3, 1, 3]), torch.Size([2, 4]), torch.Size([1, 3]))
    >>> compare(a, a, torch.tensor([[1, 2, 3]])).residual_distance.max()
    tensor(0.)
    """
    first, second = unwrap_model(model_a), unwrap_model(model_b)
    _check_shapes(first, second)
    if tok is not None:
        check_tokenizer(second, tok)
    given, kwargs = encode_inputs(first, inputs, model_kwargs, tok)
    text, others = make_stack_input(first, given, kwargs), make_stack_input(second, given, kwargs)
    depth, heads = second.spec.n_layers, second.spec.n_heads
    exact = _exact(first.token_embedding.table.weight, second.token_embedding.table.weight)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=exact, device=text.ids.device)

    stream, weights, z, ffn = (
        zeros(depth + 1, *text.ids.shape),
        zeros(depth, heads),
        zeros(depth, heads),
        zeros(depth),
    )
    with eval_mode(first, second):
        names = ("embed", "resid_post.*", "q.*", "k.*", "z.*", "ffn_out.*")
        with record(first, *(text.prefix + name for name in names)) as seen:
            logits_a = first(*given, **kwargs)
        hooks = [
            _distance_hook(text, seen, site, result, axes)
            for sites, results, axes in (
                (others.stream(), stream, (2,)),
                (others.sites("z"), z, (0, 2, 3)),
                (others.sites("ffn_out"), ffn, (0, 1, 2)),
            )
            for site, result in zip(sites, results, strict=True)
        ]
        dtype = first.token_embedding.table.weight.dtype
        masks = {window: text.stack.mask(text.layout, text.layout, dtype, window) for window in text.stack.windows}
        for layer, total in enumerate(weights):
            hooks += _pattern_hooks(text, seen, others, layer, masks, total)
        with hook_manager_of(second).registered(hooks):
            logits_b = second(*given, **kwargs)
        divergence, loss_a, loss_b = _compare_predictions(text, logits_a, logits_b)
    return Comparison(
        residual_distance=stream.where(text.real, torch.nan),
        pattern_distance=weights / text.real.sum(),
        z_distance=z,
        ffn_out_distance=ffn,
        kl_divergence=divergence,
        loss_a=loss_a,
        loss_b=loss_b,
        ids=text.ids,
        tok=tok,
    )


def _check_shapes(model_a: Model, model_b: Model) -> None:
    shape_a, shape_b = ({name: getattr(model.spec, name) for name in SHAPE} for model in (model_a, model_b))
    for model, shape in ((model_a, shape_a), (model_b, shape_b)):
        shape["head"] = model.spec.head.kind
        shape["n_labels"] = getattr(model.spec.head, "n_labels", None)
    for name, value in shape_a.items():
        if value != shape_b[name]:
            raise InputError(
                f"the first model has {name} = {value}, but the second {shape_b[name]}; compare two of one shape."
            )
    here, there = (model.token_embedding.table.weight.device for model in (model_a, model_b))
    if here != there:
        raise InputError(f"the first model is on {here}, but the second on {there}; move them to one device.")


def _distance_hook(text: StackInput, seen: Recording, site: Site, result: Tensor, axes: tuple[int, ...]) -> Hook:
    """Return a hook that compares an activation of the second model with the recorded one of the first."""

    def read(value: Tensor) -> None:
        real = text.real[..., None] if value.dim() == 3 else text.real[:, None, :, None]
        here, there = (vectors.to(result.dtype).where(real, 0) for vectors in (seen[site.name], value))
        distance = torch.linalg.vector_norm(here - there, dim=axes)
        # 0 where both are 0, not NaN.
        result.copy_((distance / torch.linalg.vector_norm(here, dim=axes)).where(distance > 0, 0))

    return Hook(Selection(site, (slice(None),) * len(site.axes)), read=read)


def _pattern_hooks(
    text: StackInput, seen: Recording, others: StackInput, layer: int, masks: Mapping[int, Mask], result: Tensor
) -> list[Hook]:
    """Return hooks that compare a pattern of the second model with that of the first one's queries and keys."""
    site = text.sites("pattern")[layer]
    q, k = (seen[f"{text.prefix}{name}.{layer}"] for name in ("q", "k"))
    mask = masks[text.model.spec.window(layer)]

    def read(queries: slice, there: Tensor) -> None:
        here = _weights(Selection(site, (slice(None), slice(None), queries, slice(None))), q, k, mask)
        variation = (here - there).abs().sum(-1) / 2
        result.add_(variation.where(text.real[:, None, queries], 0).sum((0, 2)))

    return others.tiled_hooks(others.sites("pattern")[layer], read)


def _weights(selection: Selection, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return the selected attention weights, with edits applied."""
    kernel = selection.site.module
    if isinstance(kernel, HookedAttend):
        return selection.of(kernel.pattern(kernel.scores(q, k, mask.to_dense(q.shape[2], k.shape[2], q.device))))
    assert isinstance(kernel, Attend)
    return recompute_attention(selection, kernel, q, k, mask)


def _compare_predictions(text: StackInput, logits_a: Tensor, logits_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the KL divergence of two models' predictions, and the loss of each, all [B, S]."""
    head = text.model.spec.head
    result = torch.full((3, *text.ids.shape), torch.nan, dtype=_exact(logits_a, logits_b), device=logits_a.device)
    if not isinstance(head, spec.NextToken | spec.MaskedToken | spec.TokenClassification):
        return result[0], result[1], result[2]
    rows, length = text.ids.shape
    causal = isinstance(head, spec.NextToken)
    targets = next_tokens(text.ids, text.layout) if causal else torch.full_like(text.ids, -1, dtype=torch.long)
    step = max(1, MAX_LOGITS // (rows * logits_a.shape[-1]))
    for start in range(0, length, step):
        part = slice(start, start + step)
        here, there = (logits[:, part].to(result.dtype).log_softmax(-1) for logits in (logits_a, logits_b))
        divergence = F.kl_div(there, here, reduction="none", log_target=True).sum(-1)
        result[0, :, part] = divergence.where(text.real[:, part], torch.nan)
        target = targets[:, part, None]
        for loss, logprobs in zip(result[1:], (here, there), strict=True):
            loss[:, part] = -logprobs.gather(-1, target.clamp(min=0)).where(target >= 0, torch.nan)[..., 0]
    return result[0], result[1], result[2]


def _exact(a: Tensor, b: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
