"""Saliency: how much each input token moved a prediction, by gradients or by attention rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError, check_count
from glasshouse.inspection.display.html import (
    MAX_COLUMNS,
    MAX_TEXTS,
    Drawing,
    Heatmap,
    HtmlDisplay,
    Picture,
    labels,
    not_drawn,
)
from glasshouse.inspection.geometry import attention_rollout
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import check_full_sequence, eval_mode, ids_of, layout_of, token_id
from glasshouse.inspection.inputs.targets import Named, choose_targets
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.logit_lens import label_names
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import unwrap_compiled, unwrap_model
from glasshouse.inspection.token_gradients import (
    Of,
    Predictions,
    check_differentiable,
    integrate,
    midpoints,
    repeatable_backward,
)
from glasshouse.models import Model, Seq2Seq
from glasshouse.text import Tokenizer

Method = Literal["integrated_gradients", "gradient_x_input", "attention_rollout"]

MAX_NUMBERED = 16  # columns of a heatmap with numbers; a wider one is an image


@dataclass(frozen=True, eq=False, repr=False)
class Saliency(HtmlDisplay):
    """How much each input token moved the prediction of each target.

    A score is 0 where the prediction cannot depend on the token: after it, at padding, in another document.
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scores": ("batch", "target", "position"),
        "source_scores": ("batch", "target", "source"),
        "target_value": ("batch", "target"),
        "baseline_value": ("batch", "target"),
        "completeness_gap": ("batch", "target"),
        "position": ("batch", "target"),
        "target": ("batch", "target"),
        "incorrect_token": ("batch", "target"),
        "ids": ("batch", "position"),
        "source_ids": ("batch", "source"),
    }
    scores: Tensor
    source_scores: Tensor | None  # in an encoder-decoder, whose `scores` are over the decoder's input
    target_value: Tensor  # the logit or log-probability of each target; NaN where a sequence has fewer targets
    baseline_value: Tensor | None  # the same at the baseline; integrated gradients only
    position: Tensor | None  # where each target is predicted, -1 for none; None: one prediction per sequence
    target: Tensor  # the id of the predicted token, or the label
    incorrect_token: Tensor | None
    ids: Tensor
    source_ids: Tensor | None
    method: Method
    of: Of
    tok: Tokenizer | None = None
    label_names: tuple[str, ...] = ()  # of a classifier

    @property
    def completeness_gap(self) -> Tensor | None:
        """What the scores of each target sum to beyond the change of its value; 0 if integrated exactly.

        >>> import torch, glasshouse as gh
        >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
        >>> found = gh.saliency(model, torch.tensor([[1, 2, 3]]))
        >>> change = found.target_value - found.baseline_value
        >>> torch.allclose(found.scores.sum(-1) - change, found.completeness_gap)
        True
        """
        if self.baseline_value is None:
            return None
        total = self.scores.sum(-1) + (0 if self.source_scores is None else self.source_scores.sum(-1))
        return total - (self.target_value - self.baseline_value)

    @property
    def str_targets(self) -> list[list[str]]:
        """The targets of each text as text: tokens, with visible spaces, or labels; ids if no tok was given.

        >>> import torch, glasshouse as gh
        >>> gh.saliency(gh.build(gh.preset("tiny-decoder")), torch.tensor([[1, 2, 3]])).str_targets
        [['2', '3']]
        """
        return [self._names(text, self.target[text] >= 0) for text in range(len(self.target))]

    def _names(self, text: int, there: Tensor) -> list[str]:
        target = self.target[text, there]
        if self.label_names:
            return [self.label_names[number] for number in target.tolist()]
        names = labels(target, self.tok)
        if self.incorrect_token is None:
            return names
        incorrect = labels(self.incorrect_token[text, there], self.tok)
        return [f"{one} - {other}" for one, other in zip(names, incorrect, strict=True)]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{self._gap(slice(None))})"

    def _gap(self, texts: slice) -> str:
        """Return the largest completeness gap of some texts, and the change of that target's value."""
        if self.completeness_gap is None or self.baseline_value is None:
            return ""
        gaps = self.completeness_gap[texts].flatten()
        largest = gaps.abs().nan_to_num(-1).argmax()  # NaN: not a target
        change = (self.target_value - self.baseline_value)[texts].flatten()[largest]
        return f", completeness gap {float(gaps[largest].abs()):.2g} of {float(change):.3g}"

    def _drawings(self) -> list[Drawing]:
        drawn: list[Drawing] = []
        for text, names in enumerate(self.str_targets[:MAX_TEXTS]):
            if not names:
                continue
            if self.source_scores is not None and self.source_ids is not None:
                drawn.append(self._heatmap(text, names, self.source_scores, self.source_ids, "source token", 0))
            # Of a long text the tokens up to the last prediction are drawn.
            last = 0 if self.position is None else int(self.position[text, :MAX_COLUMNS].max()) + 1
            drawn.append(self._heatmap(text, names, self.scores, self.ids, "token", max(0, last - MAX_COLUMNS)))
        return drawn

    def _heatmap(
        self, text: int, names: Sequence[str], scores: Tensor, ids: Tensor, each: str, first: int
    ) -> Drawing:
        columns = slice(first, first + MAX_COLUMNS)
        values = scores[text, self.target[text] >= 0, columns][:MAX_COLUMNS]
        tokens = labels(ids[text, columns], self.tok)
        left = not_drawn(
            targets=len(names) - len(values), tokens=ids.shape[1] - len(tokens), texts=len(ids) - MAX_TEXTS
        )
        value = "" if self.method == "attention_rollout" else f" of the {self.of.replace('_prob', '-probability')}"
        what = f"{self.method.replace('_', ' ')}{value} by {each}"
        caption = f"text {text}: {what}{self._gap(slice(text, text + 1))}{left}"
        if len(values) == 1 or len(tokens) <= MAX_NUMBERED:
            return Heatmap(values.masked_fill(values == 0, torch.nan), names[:MAX_COLUMNS], tokens, caption)
        return Picture(values, caption, names[:MAX_COLUMNS], tokens)


def saliency(
    model: nn.Module,
    *inputs: Input,
    method: Method = "integrated_gradients",
    positions: Sequence[int] | None = None,
    token: Named | None = None,
    incorrect_token: Named | None = None,
    label: Named | None = None,
    of: Of = "logit",
    steps: int = 100,
    baseline: int | str | Tensor | None = None,
    tok: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Saliency:
    """Return how much each input token moved the prediction of each target.

    Targets are the predictions at `positions`, counted without padding; by default of every next token, or with a
    masked-token head of every token. The value that is explained is the logit of `token`; by default of the next
    token (of the token itself), or after the last one of the top prediction. With `incorrect_token` it is the logit
    difference, with a classification head the logit of `label`, by default the predicted one. With `of="log_prob"`
    it is the log-probability.

    - "integrated_gradients" (Sundararajan et al. 2017): along the straight line from a baseline to the token
      embeddings, by the midpoint rule with `steps`. The scores of a target sum to its value minus that at the
      baseline, up to `completeness_gap`. The baseline replaces every token: by default the mean token embedding, or
      the embedding of a token, such as padding, or a tensor. Zeros (`torch.zeros(d_model)`) are a poor one with
      pre-norm and rotary positions: norms undo the scale, so that nearly all change is in the first thousandth.
    - "gradient_x_input": the gradient at the token embeddings, times these.
    - "attention_rollout": the last layer of `gh.inspection.attention_rollout`, which has no sign and no target.

    After each backward pass `progress` is called with the number of gradients computed and in all.

    >>> import glasshouse as gh
    >>> model, tok = gh.load("python-3m")
    >>> found = gh.saliency(model, "for i in", tok=tok)
    >>> found.str_targets, found.scores.shape
    ([['␣i', '␣in']], torch.Size([1, 2, 3]))
    >>> found = gh.saliency(model, "for i in", positions=[-1], tok=tok)  # the top prediction after the last token
    >>> found.str_targets, found.scores.shape
    ([['␣range']], torch.Size([1, 1, 3]))
    """
    whole = unwrap_model(model)
    for name, value, known in (("method", method, get_args(Method)), ("of", of, get_args(Of))):
        if value not in known:
            raise InputError(f"{name} is {value!r}, which does not exist; {did_you_mean(str(value), known)}")
    check_count("steps", steps)
    if baseline is not None and method != "integrated_gradients":
        raise InputError(f"baseline was given, but {method} has none; leave it out, or use integrated_gradients.")
    if method == "attention_rollout" and isinstance(whole, Seq2Seq):
        raise InputError(
            "method is 'attention_rollout', which is defined for one stack, but this is an encoder-decoder; use "
            "another method, or gh.inspection.attention_rollout with stack."
        )
    check_differentiable(whole)
    check_full_sequence(model_kwargs)
    call = CallArguments(*encode_inputs(whole, inputs, model_kwargs, tok))
    ids = ids_of(whole, call.inputs)
    targets = choose_targets(whole, call, positions, token, incorrect_token, label, tok)
    with eval_mode(whole), repeatable_backward(whole):
        with record(whole, "*token_embed", stop=True) as seen:
            call.run(whole)
        embedded = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in seen.items()}
        predictions = Predictions(whole, call, targets, of)
        vectors = predictions.vectors(embedded)
        chosen = torch.where(targets.chosen < 0, predictions.top(vectors), targets.chosen)
        predictions = replace(predictions, targets=targets._replace(chosen=chosen))
        target_value, _ = predictions.values(vectors)
        baseline_value: Tensor | None = None
        if method == "attention_rollout":
            scores = [_rollout(whole, call, targets.columns)]
        elif method == "gradient_x_input":  # a line from zeros, with one point, at its end
            zeros = {name: torch.zeros_like(x) for name, x in embedded.items()}
            scores = integrate(predictions, zeros, embedded, [1.0], progress)
        else:
            start = {name: _baseline(whole, baseline, tok, x) for name, x in embedded.items()}
            baseline_value, _ = predictions.values(predictions.vectors(start))
            scores = integrate(predictions, start, embedded, midpoints(steps), progress)

    missing = ~targets.exists
    *of_source, own = [one.masked_fill(missing[..., None], 0) for one in scores]
    return Saliency(
        scores=own,
        source_scores=of_source[0] if of_source else None,
        target_value=target_value.masked_fill(missing, torch.nan),
        baseline_value=None if baseline_value is None else baseline_value.masked_fill(missing, torch.nan),
        position=None if targets.columns is None else targets.columns.masked_fill(missing, -1),
        target=chosen.masked_fill(missing, -1),
        incorrect_token=targets.incorrect,
        ids=ids,
        source_ids=call.inputs[0] if of_source else None,
        method=method,
        of=of,
        tok=tok,
        label_names=label_names(whole),
    )


def _baseline(model: Model, given: int | str | Tensor | None, tok: Tokenizer | None, x: Tensor) -> Tensor:
    """Return the baseline of token embeddings x [B, S, D]."""
    embedding = model.token_embedding
    if given is None:
        return (embedding.table.weight.to(x.dtype).mean(0) * embedding.scale).expand_as(x)
    if isinstance(given, Tensor):
        try:
            return given.to(x).expand_as(x)
        except RuntimeError:
            raise InputError(
                f"baseline has shape {list(given.shape)}, which does not broadcast to the token embeddings, "
                f"{list(x.shape)}; give one vector [d_model], or one that does."
            ) from None
    number = token_id(given, "baseline", tok)
    if not isinstance(number, int):
        raise InputError(f"baseline is {given!r}, but it must be a token, as id or text, or a tensor.")
    ids = torch.full(x.shape[:2], number, device=x.device)
    return embedding(ids, "baseline").to(x.dtype)


def _rollout(model: Model, call: CallArguments, columns: Tensor | None) -> Tensor:
    """Return the attention rollout of the last layer at the predictions, [B, T, S]."""
    rolled = attention_rollout(model, *call.inputs, **call.model_kwargs)[-1]
    if columns is not None:
        return rolled.gather(1, columns[..., None].expand(-1, -1, rolled.shape[-1]))
    real = layout_of(model, call.inputs[-1], call.model_kwargs).real
    every = torch.ones_like(call.inputs[-1], dtype=torch.bool)
    head = cast(Any, unwrap_compiled(model.head))
    picked: Tensor = head.pool.pick(rolled, every if real is None else real)
    return picked[:, None]
