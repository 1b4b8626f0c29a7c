"""Linear probes: logistic regression on activations, to see whether they contain a property of texts or tokens."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse import store
from glasshouse.errors import InputError, StoreError
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import advice, sites, unwrap_model
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.layers.sublayer import TOKENS
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.models.prompt import Prompt, encode_prompt
from glasshouse.text import Tokenizer

KIND = "linear probe"
MAX_ITERATIONS = 1000  # of L-BFGS, which needs tens to a few hundred


@dataclass(frozen=True)
class HeldOut:
    """How well a probe's scores separate the positive from the negative among examples that it was not fitted on."""

    accuracy: float  # balanced: the mean of the two classes' accuracies at the threshold 0; 0.5 is chance
    auc: float  # probability that a positive example scores higher than a negative one; a tie counts half
    positive: int  # number of examples
    negative: int


@dataclass(frozen=True, eq=False, repr=False)
class LinearProbe:
    """A direction and a bias that score the activations of one model at one site.

    `held_out` is over tokens; in `held_out_texts` each text is one example, with the mean score of its tokens. It is
    None if some text has tokens of both classes.
    """

    direction: Tensor  # [D], float32
    bias: float
    site: str  # such as resid_post.3
    fingerprint: str  # of the model that it was made for
    held_out: HeldOut
    held_out_texts: HeldOut | None = None

    def __repr__(self) -> str:
        return (
            f"LinearProbe({self.site!r}, {len(self.direction)} dimensions, "
            f"held out: accuracy {self.accuracy:.3f}, AUC {self.auc:.3f})"
        )

    @property
    def accuracy(self) -> float:
        """Balanced accuracy over the tokens of held-out texts."""
        return self.held_out.accuracy

    @property
    def auc(self) -> float:
        """Area under the ROC curve over the tokens of held-out texts."""
        return self.held_out.auc

    def scores(self, activations: Tensor) -> Tensor:
        """Return the score (logit) of activations [..., D] as [...]: above 0 is positive.

        >>> held_out = HeldOut(accuracy=1.0, auc=1.0, positive=1, negative=1)
        >>> one = LinearProbe(torch.tensor([2.0, 0.0]), -1.0, "resid_post.0", "", held_out)
        >>> one.scores(torch.tensor([[1.0, 5.0], [0.0, 5.0]]))
        tensor([ 1., -1.])
        """
        if not activations.dim() or activations.shape[-1] != len(self.direction):
            raise InputError(
                f"the activations have shape {list(activations.shape)}, but the probe reads {len(self.direction)} "
                f"dimensions in the last axis; give those of {self.site}."
            )
        return activations.float() @ self.direction.to(activations.device) + self.bias

    def check(self, model: Model, name: str = "the probe") -> None:
        """Raise InputError for another model than the one that it was made for."""
        if self.fingerprint != model_fingerprint(model):
            raise InputError(f"{name} was made for another model, whose weights differ; make one for this model.")

    def save(self, path: str | Path) -> None:
        """Write it as a safetensors file."""
        measured = {"tokens": asdict(self.held_out)}
        if self.held_out_texts is not None:
            measured["texts"] = asdict(self.held_out_texts)
        metadata = {
            "kind": KIND,
            "site": self.site,
            "fingerprint": self.fingerprint,
            "held_out": json.dumps(measured),
        }
        tensors = {"direction": self.direction, "bias": torch.tensor(self.bias, dtype=torch.float64)}
        store.write_tensors(Path(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> LinearProbe:
        """Read a file of `save`."""
        if not Path(path).is_file():
            raise StoreError(f"there is no {str(path)!r}; make it with glasshouse probe make.")
        metadata, tensors = store.read_metadata(Path(path)), store.read_tensors(Path(path))
        direction, bias = tensors.get("direction"), tensors.get("bias")
        measured = _read_measured(metadata.get("held_out", ""))
        if (
            metadata.get("kind") != KIND
            or direction is None
            or direction.dim() != 1
            or not direction.is_floating_point()
            or bias is None
            or bias.dim() != 0
            or not bias.is_floating_point()
            or "site" not in metadata
            or "tokens" not in measured
        ):
            raise StoreError(f"{str(path)!r} is no linear probe; make one with glasshouse probe make.")
        if not bool(direction.isfinite().all() and bias.isfinite()):
            raise StoreError(f"{str(path)!r} has numbers that are not finite; make it again.")
        return cls(
            direction.float().clone(),
            float(bias),
            metadata["site"],
            metadata.get("fingerprint", ""),
            measured["tokens"],
            measured.get("texts"),
        )


def probe(
    model: Model,
    tok: Tokenizer | None,
    texts: Sequence[Prompt],
    labels: Sequence[bool | Sequence[bool]],
    *,
    site: str | None = None,
    l2: float = 1.0,
    held_out_fraction: float = 0.2,
    seed: int = 0,
) -> LinearProbe:
    """Fit a linear probe: logistic regression on the activations of a site, at the tokens of labelled texts.

    `labels` has a bool for each text, which is that of its tokens, or a list with one for each token. `site` is one
    with a vector for each position, by default resid_post of the middle layer.

    Each text weighs the same whatever its length, and so do the two classes together: 0 is the threshold where both
    are equally common. The first token is left out of longer texts: it is an attention sink. Before anything is
    fitted, `held_out_fraction` of the texts is set aside by a shuffle with `seed`; accuracy and AUC are over their
    tokens, and the probe that is returned has not seen them.

    `l2` is the L2 penalty in units of one text, for activations scaled to unit variance: a prior that counts as much
    as one text whatever the number of them, since the tokens of a text are no independent examples.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder")).eval()
    >>> odd = [[1, 3, 5], [7, 9, 11], [3, 7, 1], [9, 5, 7]]
    >>> even = [[2, 4, 6], [8, 10, 12], [4, 8, 2], [10, 6, 8]]
    >>> made = gh.probe(model, None, odd + even, [True] * 4 + [False] * 4, site="resid_post.0")
    >>> made.site, made.direction.shape, made.held_out_texts.positive, made.held_out_texts.negative
    ('resid_post.0', torch.Size([64]), 1, 1)
    >>> with gh.record(model, made.site) as seen:
    ...     _ = model(torch.tensor([[1, 3, 4, 6]]))
    >>> made.scores(seen[made.site]).shape
    torch.Size([1, 4])
    """
    whole = unwrap_model(model)
    if isinstance(whole, Seq2Seq):
        raise InputError("the model is a Seq2Seq, but probes are of decoders and encoders; give one.")
    site = _checked_site(whole, site)
    if not 0 < l2 < math.inf:
        raise InputError(f"l2 is {l2!r}, but it must be a number above 0; the default is 1.0.")
    given = _labelled(whole, tok, texts, labels)
    train, test = _split(given, held_out_fraction, seed)
    values = _activations(whole, [*train, *test], site)
    direction, bias = _logistic_regression(
        torch.cat(values[: len(train)]),
        torch.cat([one.labels for one in train]),
        torch.cat([one.weights for one in train]),
        l2 / len(train),
    )
    scores = [one @ direction + bias for one in values[len(train) :]]
    held_out = _measure(torch.cat(scores), torch.cat([one.labels for one in test]))
    held_out_texts = None
    if all(len(one.classes) == 1 for one in given):
        means = torch.stack([one.mean() for one in scores])
        held_out_texts = _measure(means, torch.stack([one.labels[0] for one in test]))
    return LinearProbe(direction, bias, site, model_fingerprint(whole), held_out, held_out_texts)


def _read_measured(text: str) -> dict[str, HeldOut]:
    """Return what `save` writes of held-out examples; empty for any other text."""
    try:
        return {
            name: HeldOut(float(one["accuracy"]), float(one["auc"]), int(one["positive"]), int(one["negative"]))
            for name, one in json.loads(text).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


class _Labelled(NamedTuple):
    """The ids of a text, and the labels of those that count: of a longer text, all but the first."""

    ids: list[int]
    labels: Tensor  # [counted], bool

    @property
    def classes(self) -> frozenset[bool]:
        """The labels that it has."""
        return frozenset(self.labels.tolist())

    @property
    def weights(self) -> Tensor:
        """The weight of each token that counts: together those of one text."""
        return torch.full((len(self.labels),), 1 / len(self.labels), dtype=torch.float64)


def _checked_site(model: Decoder | Encoder, site: str | None) -> str:
    """Return the name of a site that has one vector for each position."""
    known = {name: one for name, one in sites(model).items() if len(one.axes) == 3 and one.axes[:2] == TOKENS}
    site = f"resid_post.{model.spec.n_layers // 2}" if site is None else site
    if site not in known:
        raise InputError(
            f"the site is {site!r}, but a probe reads one with a vector per token; {advice(site, known)}"
        )
    return site


def _labelled(
    model: Decoder | Encoder,
    tok: Tokenizer | None,
    texts: Sequence[Prompt],
    labels: Sequence[bool | Sequence[bool]],
) -> list[_Labelled]:
    """Return the ids of texts with the label of each token."""
    if isinstance(texts, str | bytes) or len(texts) != len(labels):
        raise InputError(
            f"there are {len(texts)} texts and {len(labels)} labels; give a list of texts, and for each a bool or "
            "one bool per token."
        )
    found = []
    for number, (text, label) in enumerate(zip(texts, labels, strict=True)):
        ids = encode_prompt(text, tok, model.spec)
        plain = label.tolist() if isinstance(label, Tensor | np.ndarray | np.bool_) else label
        by_token = list(plain) if isinstance(plain, Sequence) else [plain] * len(ids)
        if len(by_token) != len(ids):
            raise InputError(
                f"text {number} has {len(ids)} tokens and {len(by_token)} labels; give one bool for each token."
            )
        if wrong := [one for one in by_token if not isinstance(one, bool)]:
            raise InputError(f"text {number} has the label {wrong[0]!r}, but labels are True or False.")
        found.append(_Labelled(ids, torch.tensor(by_token[min(1, len(ids) - 1) :])))
    return found


def _split(given: list[_Labelled], fraction: float, seed: int) -> tuple[list[_Labelled], list[_Labelled]]:
    """Return the texts to fit on and those held out, with both classes on each side.

    The fraction is of the positive texts, of the negative ones and of those with tokens of both classes.
    """
    if not 0 < fraction < 1:
        raise InputError(f"held_out_fraction is {fraction!r}, but it must be above 0 and below 1, such as 0.2.")
    kinds: dict[frozenset[bool], list[_Labelled]] = {
        frozenset({True}): [],
        frozenset({False}): [],
        frozenset({True, False}): [],
    }
    for one in given:
        kinds[one.classes].append(one)
    positive, negative, both = map(len, kinds.values())
    if min(positive, negative) < 2 and both < 2:
        raise InputError(
            f"{positive} texts are positive, {negative} negative, and {both} have tokens of both classes; give at "
            "least 2 positive and 2 negative ones, or 2 with both, since some are held out."
        )
    draw, train, test = random.Random(seed), [], []
    for members in kinds.values():
        draw.shuffle(members)
        count = min(max(1, round(fraction * len(members))), len(members) - 1) if members else 0
        test += members[:count]
        train += members[count:]
    return train, test


def _activations(model: Decoder | Encoder, texts: list[_Labelled], site: str) -> list[Tensor]:
    """Return the activations of the tokens that count of each text, [counted, D], in float32 on the CPU."""
    device = model.token_embedding.table.weight.device
    found = []
    with eval_mode(model):
        for one in texts:
            with record(model, site, stop=True) as seen:
                model(torch.tensor([one.ids], device=device))
            found.append(seen[site][0, -len(one.labels) :].float().cpu())
            if not bool(found[-1].isfinite().all()):
                raise InputError(
                    f"the activations at {site} have NaN or infinite numbers; check the model's weights."
                )
    return found


def _logistic_regression(values: Tensor, labels: Tensor, weights: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Return direction [D] and bias that minimize the weighted log loss plus an L2 penalty on the direction.

    `penalty` is for values [N, D] of unit variance; both classes are given half of the weight. The loss is strictly
    convex in the direction, so that full-batch L-BFGS from zeros finds the one optimum, the same every time.
    """
    weights = weights.clone()
    for label in (True, False):
        weights[labels == label] /= 2 * weights[labels == label].sum()
    # In float64, since gradients near the optimum are small differences of large sums.
    values, signs = values.double(), labels.double() * 2 - 1
    mean = weights @ values
    scale = (weights @ (values - mean).square()).sqrt()
    # A constant coordinate has no variance but that of rounding, which must not be scaled up.
    scale = scale.where(scale > torch.finfo(torch.float32).eps * values.abs().amax(0), 1.0)
    values = (values - mean) / scale
    fitted = torch.zeros(values.shape[1] + 1, dtype=torch.float64)  # the bias is last
    optimizer = torch.optim.LBFGS(
        [fitted], max_iter=MAX_ITERATIONS, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def loss_and_gradient() -> Tensor:
        margins = signs * (values @ fitted[:-1] + fitted[-1])
        pull = -weights * signs * torch.sigmoid(-margins)  # derivative of the loss with respect to each score
        fitted.grad = torch.cat([pull @ values + penalty * fitted[:-1], pull.sum()[None]])
        return weights @ F.softplus(-margins) + penalty / 2 * fitted[:-1].square().sum()

    optimizer.step(loss_and_gradient)
    direction, shift = fitted[:-1] / scale, fitted[-1]
    return direction.float(), float(shift - mean @ direction)


def _measure(scores: Tensor, labels: Tensor) -> HeldOut:
    """Return balanced accuracy and AUC of scores [N].

    >>> _measure(torch.tensor([2.0, -1.0, -1.0, -3.0]), torch.tensor([True, True, False, False]))
    HeldOut(accuracy=0.75, auc=0.875, positive=2, negative=2)
    """
    positive, negative = int(labels.sum()), int((~labels).sum())
    right = (scores > 0) == labels
    accuracy = (int(right[labels].sum()) / positive + int(right[~labels].sum()) / negative) / 2
    # The Mann-Whitney statistic; tied scores share the mean of their ranks.
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[place]
    wins = float(ranks[labels].sum()) - positive * (positive + 1) / 2
    return HeldOut(accuracy, wins / (positive * negative), positive, negative)
