"""Two models of one shape on one text: where their streams, their heads and their answers part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection.attention_recompute import recompute_attention
from glasshouse.inspection.forward_pass import eval_mode, next_tokens
from glasshouse.inspection.hooks import Hook, HookedExplicit, hook_manager_of
from glasshouse.inspection.html_display import MOST_COLUMNS, MOST_TEXTS, HtmlDisplay, bars, heatmap, labels, not_drawn
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.sites import Selection, Site, unwrap_model
from glasshouse.inspection.stack_input import StackInput, make_stack_input
from glasshouse.layers.attend import Explicit, Fused
from glasshouse.layers.mask import Mask
from glasshouse.models import Model, Seq2Seq, check_tokenizer
from glasshouse.text import Tokenizer

LOGITS = 2**22  # turned into probabilities at once
LINE = 16  # tokens in a line of drawn text
MOST_TOKENS = 8  # named as those that differ most

SHAPE = ("kind", "n_layers", "n_heads", "d_head", "d_model", "vocab_size")


@dataclass(frozen=True, eq=False)
class Comparison(HtmlDisplay):
    """How far two models are apart on a text. Distances are relative to the first: 0 is equal, 1 as far as from 0.

    At padding they are NaN, and so are a divergence where the head gives no logits at a position, and a loss where
    there is no next token.
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "stream": ("layer", "batch", "position"),
        "heads": ("layer", "head"),
        "writes": ("layer", "head"),
        "ffn": ("layer",),
        "divergence": ("batch", "position"),
        "loss_a": ("batch", "position"),
        "loss_b": ("batch", "position"),
        "ids": ("batch", "position"),
    }
    residual_distance: Tensor  # distance of the stream, embedded and after each layer
    pattern_distance: (
        Tensor  # total variation of the attention weights, mean over queries: 0 is equal, 1 looks elsewhere
    )
    z_distance: Tensor  # distance of what each head gathered
    ffn_out_distance: Tensor  # distance of what each feed-forward layer adds
    kl_divergence: Tensor  # of the second's predictions from the first's: KL, in nats
    loss_a: Tensor  # of the next token, in nats
    loss_b: Tensor
    ids: Tensor  # what the stack was given
    tok: Tokenizer | None = None

    def _drawing(self) -> str:
        depth, n_heads = self.pattern_distance.shape
        layers, heads = [f"layer {layer}" for layer in range(depth)], [f"head {head}" for head in range(n_heads)]
        return "".join(
            [
                *(self._draw_text(text, ["embed", *layers]) for text in range(min(len(self.ids), MOST_TEXTS))),
                self._draw_most(),
                heatmap(self.pattern_distance, rows=layers, columns=heads, caption="where heads look elsewhere"),
                heatmap(self.z_distance, rows=layers, columns=heads, caption="where heads gather something else"),
                bars(self.ffn_out_distance, names=layers, caption="where feed-forward layers add something else"),
            ]
        )

    def _draw_text(self, text: int, layers: list[str]) -> str:
        """Draw the tokens of a text, the darker the further apart the answers there, and its stream."""
        n_texts, length = self.ids.shape
        count = min(length, MOST_COLUMNS)
        note = not_drawn(positions=length - count, texts=n_texts - MOST_TEXTS)
        words = labels(self.ids[text, :count], self.tok)
        starts = range(0, count, LINE)
        blank = -count % LINE
        return heatmap(
            F.pad(self.kl_divergence[text, :count], (0, blank), value=torch.nan).unflatten(0, (-1, LINE)),
            rows=[str(start) for start in starts],
            columns=[""] * LINE,
            caption=f"text {text}: where the answers differ{note}",
            words=[[*words, *[""] * blank][start : start + LINE] for start in starts],
        ) + heatmap(
            self.residual_distance[:, text, :count],
            rows=layers,
            columns=words,
            caption=f"text {text}: how far the streams are apart{note}",
        )

    def _draw_most(self) -> str:
        most, where = self.kl_divergence.nan_to_num(-torch.inf).flatten().topk(min(MOST_TOKENS, self.ids.numel()))
        some = most > 0
        words = labels(self.ids.flatten()[where[some]], self.tok)
        places = [divmod(place, self.ids.shape[1]) for place in where[some].tolist()]
        names = [f"text {text}, {place}: {word}" for (text, place), word in zip(places, words, strict=True)]
        return bars(most[some], names=names, caption="after which tokens the answers differ most, in nats")


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    *inputs: Tensor | str,
    tok: Tokenizer | None = None,
    **call: Any,  # noqa: ANN401 - whatever the models take
) -> Comparison:
    """Show where two models of one shape part ways on a text, such as a model before and after it was tuned.

    With `tok` the text may be given as such, for an encoder-decoder the source and the target. Each model is called
    once; attention weights are compared a few queries at a time. In an encoder-decoder it is the decoder that is
    looked at.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.comparison import compare
    >>> one, other = (gh.build(gh.preset("tiny-decoder")) for _ in range(2))
    >>> seen = compare(one, other, torch.tensor([[1, 2, 3]]))
    >>> seen.stream.shape, seen.heads.shape, seen.divergence.shape
    (torch.Size([3, 1, 3]), torch.Size([2, 4]), torch.Size([1, 3]))
    >>> compare(one, one, torch.tensor([[1, 2, 3]])).stream.max()
    tensor(0.)
    """
    first, second = unwrap_model(model_a), unwrap_model(model_b)
    _check_shapes(first, second)
    if tok is not None:
        check_tokenizer(first, tok)
        check_tokenizer(second, tok)
    given = tuple(
        _encoded(first, text, tok, is_target=number > 0) if isinstance(text, str) else text
        for number, text in enumerate(inputs)
    )
    text, others = make_stack_input(first, given, call), make_stack_input(second, given, call)
    depth, heads = second.spec.n_layers, second.spec.n_heads
    exact = _exact(first.token_embedding.table.weight, second.token_embedding.table.weight)

    def none(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=exact, device=text.ids.device)

    stream, weights, writes, ffn = (
        none(depth + 1, *text.ids.shape),
        none(depth, heads),
        none(depth, heads),
        none(depth),
    )
    with eval_mode(first, second):
        names = ("embed", "resid_post.*", "q.*", "k.*", "z.*", "ffn_out.*")
        with record(first, *(text.prefix + name for name in names)) as seen:
            answer = first(*given, **call)
        uses = [
            _comparing(text, seen, site, result, axes)
            for sites, results, axes in (
                (others.stream(), stream, (2,)),
                (others.sites("z"), writes, (0, 2, 3)),
                (others.sites("ffn_out"), ffn, (0, 1, 2)),
            )
            for site, result in zip(sites, results, strict=True)
        ]
        masks = text.stack.masks(text.layout, None, first.token_embedding.table.weight.dtype)
        for layer, sum_of_rows in enumerate(weights):
            uses += _comparing_weights(text, seen, others, layer, masks, sum_of_rows)
        with hook_manager_of(second).registered(uses):
            other_answer = second(*given, **call)
        divergence, loss_a, loss_b = _answers(text, answer, other_answer)
    return Comparison(
        residual_distance=stream.where(text.real, torch.nan),
        pattern_distance=weights / text.real.sum(),
        z_distance=writes,
        ffn_out_distance=ffn,
        kl_divergence=divergence,
        loss_a=loss_a,
        loss_b=loss_b,
        ids=text.ids,
        tok=tok,
    )


def _check_shapes(one: Model, other: Model) -> None:
    mine, its = ({name: getattr(model.spec, name) for name in SHAPE} for model in (one, other))
    for model, shape in ((one, mine), (other, its)):
        shape["head"] = model.spec.head.kind
        shape["n_labels"] = getattr(model.spec.head, "n_labels", None)
    for name, value in mine.items():
        if value != its[name]:
            raise InputError(
                f"the first model has {name} = {value}, but the second {its[name]}; compare two of one shape."
            )
    here, there = (model.token_embedding.table.weight.device for model in (one, other))
    if here != there:
        raise InputError(f"the first model is on {here}, but the second on {there}; move them to one device.")


def _encoded(model: Model, text: str, tok: Tokenizer | None, *, is_target: bool) -> Tensor:
    """Return the ids of a text, [1, S], as the model was trained on texts in that place."""
    if tok is None:
        raise InputError(f"the text {text[:40]!r} was given without a tokenizer; give tok, or ids.")
    s = model.spec
    if not isinstance(model, Seq2Seq):
        ids = tok.encode(text)
    elif is_target:
        if s.start_id is None:
            raise InputError("the spec has no start_id, with which a target begins; give the target as ids.")
        ids = [s.start_id, *tok.encode(text, add_special_tokens=False)]
    else:
        ids = tok.encode(text)
        if s.end_ids and not (ids and ids[-1] in s.end_ids):
            ids.append(s.end_ids[0])
    return torch.tensor([ids], dtype=torch.long, device=model.token_embedding.table.weight.device)


def _comparing(text: StackInput, seen: Recording, site: Site, result: Tensor, axes: tuple[int, ...]) -> Hook:
    """Have what stands at a site of the second model set beside what stood there in the first."""

    def read(value: Tensor) -> None:
        real = text.real[..., None] if value.dim() == 3 else text.real[:, None, :, None]
        here, there = (vectors.to(result.dtype).where(real, 0) for vectors in (seen[site.name], value))
        apart = torch.linalg.vector_norm(here - there, dim=axes)
        # Where both are 0 they are equal.
        result.copy_((apart / torch.linalg.vector_norm(here, dim=axes)).where(apart > 0, 0))

    return Hook(Selection(site, (slice(None),) * len(site.axes)), read=read)


def _comparing_weights(
    text: StackInput, seen: Recording, others: StackInput, layer: int, masks: Mapping[int, Mask], result: Tensor
) -> list[Hook]:
    """Have the weights of the second model in a layer set beside those that the first one's queries and keys make."""
    site = text.sites("pattern")[layer]
    q, k = (seen[f"{text.prefix}{name}.{layer}"] for name in ("q", "k"))
    mask = masks[text.model.spec.window(layer)]

    def read(queries: slice, there: Tensor) -> None:
        here = _weights(Selection(site, (slice(None), slice(None), queries, slice(None))), q, k, mask)
        variation = (here - there).abs().sum(-1) / 2
        result.add_(variation.where(text.real[:, None, queries], 0).sum((0, 2)))

    return others.tiled_hooks(others.sites("pattern")[layer], read)


def _weights(asked: Selection, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return the attention weights asked for, as changed where someone changes them."""
    kernel = asked.site.module
    if isinstance(kernel, HookedExplicit):
        return asked.of(kernel.pattern(kernel.scores(q, k, mask)))
    assert isinstance(kernel, Fused | Explicit)
    return recompute_attention(asked, kernel, q, k, mask)


def _answers(text: StackInput, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence of two models' predictions, and the loss of each, all [B, S]."""
    head = text.model.spec.head
    result = torch.full((3, *text.ids.shape), torch.nan, dtype=_exact(one, other), device=one.device)
    if not isinstance(head, spec.NextToken | spec.MaskedToken | spec.TokenClassification):
        return result[0], result[1], result[2]
    rows, length = text.ids.shape
    foretold = isinstance(head, spec.NextToken)
    goals = next_tokens(text.ids, text.layout) if foretold else torch.full_like(text.ids, -1, dtype=torch.long)
    step = max(1, LOGITS // (rows * one.shape[-1]))
    for start in range(0, length, step):
        part = slice(start, start + step)
        here, there = (logits[:, part].to(result.dtype).log_softmax(-1) for logits in (one, other))
        divergence = F.kl_div(there, here, reduction="none", log_target=True).sum(-1)
        result[0, :, part] = divergence.where(text.real[:, part], torch.nan)
        goal = goals[:, part, None]
        for loss, logs in zip(result[1:], (here, there), strict=True):
            loss[:, part] = -logs.gather(-1, goal.clamp(min=0)).where(goal >= 0, torch.nan)[..., 0]
    return result[0], result[1], result[2]


def _exact(one: Tensor, other: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
