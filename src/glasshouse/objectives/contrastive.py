"""Contrastive learning: an encoder embeds the two texts of a pair nearer to each other than to other texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.config import JsonDict, Settings, require_positive
from glasshouse.data import Batch, ContrastiveDataset, Corpus
from glasshouse.embeddings import with_pooling
from glasshouse.errors import InputError
from glasshouse.models import Encoder, Model
from glasshouse.objectives.metrics import SHOWN, Example, MetricSums, Report
from glasshouse.objectives.objective import Evaluation, Objective, items_for_tokens

ROWS = 1024  # texts compared with all matches at once


@dataclass(frozen=True)
class Contrastive(Settings, Objective[ContrastiveDataset]):
    """Embeddings of pairs: each text is nearer to its match than to the matches of the other pairs of its batch.

    The vectors are those of `gh.embed`, by the pooling of the model or else the mean over its tokens; the same
    encoder embeds both texts. Negatives are all other pairs of a step, so a step is one batch in one process, without
    gradient accumulation. Pairs that share a text are no negatives of each other.

    >>> Contrastive(temperature=0.1).kind
    'contrastive'
    """

    kind: ClassVar[str] = "contrastive"
    models = "text encoders"
    model_kinds = ("encoder",)
    head_kind = "pooled"
    data_kind = "pairs"
    parallel = False
    whole_batch = True
    sequences_per_sample = 2

    temperature: float = 0.05  # of the softmax over cosine similarities; lower: the nearest negatives count for more

    def check(self) -> None:
        require_positive(self, "temperature")

    def head_settings(self, corpus: Corpus) -> JsonDict:
        """Return a pooling head, of the mean if no other is set."""
        return {"kind": "pooled"}

    def fit_head(self, model: Model, corpus: Corpus) -> Model:
        """Return the model with the pooling that `gh.embed` uses."""
        return with_pooling(model) if isinstance(model, Encoder) else model

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> ContrastiveDataset:
        """Return pairs of at most `seq_len` ids on either side."""
        return ContrastiveDataset(corpus, batch_size, max_len=seq_len, seed=seed)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many pairs have about `tokens` tokens; one alone would have no negatives."""
        special = sum(map(len, corpus.tokenizer.prefix_suffix_ids))
        return max(2, items_for_tokens(corpus.lengths[(corpus.lengths <= seq_len - special).all(1)], tokens))

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss of `contrastive_loss`, summed over the pairs of a batch."""
        if smoothing:
            raise InputError(
                f"train.label_smoothing is {smoothing}, but contrastive pairs have no labels to smooth; leave it out."
            )
        pairs = batch.forward(model).unflatten(0, (-1, 2))
        return contrastive_loss(pairs, batch.targets, batch.loss_mask, self.temperature)

    @torch.no_grad()
    def evaluate_batch(self, model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
        """Return the loss of a batch, and its vectors, among which all texts look for their matches."""
        pairs = batch.forward(model).unflatten(0, (-1, 2))
        loss = contrastive_loss(pairs, batch.targets, batch.loss_mask, self.temperature)
        counted = batch.loss_mask
        return PairSums(
            float(loss), n_targets=int(counted.sum()), pairs=(pairs[counted],), numbers=(batch.targets[counted],)
        )

    def evaluate(self, evaluation: Evaluation, samples: ContrastiveDataset) -> Report:
        """Evaluate the loss among the pairs of a batch, and recall at 1 among all of them."""
        sums = evaluation.sums(samples)
        assert isinstance(sums, PairSums)
        items, examples = samples.items(range(evaluation.count)), []
        for item, found in zip(items[:SHOWN], sums.nearest().tolist(), strict=False):
            ids = (*evaluation.corpus.item(item), evaluation.corpus.item(items[found])[1])
            text, match, nearest = map(evaluation.tok.decode, ids)
            examples.append(Example(text, match, nearest))
        return evaluation.report(sums, examples=examples)


@dataclass(frozen=True)
class PairSums(MetricSums):
    """The loss of pairs, and the vectors of all of them: recall at 1 is among all pairs of an evaluation."""

    pairs: tuple[Tensor, ...] = ()  # [B, 2, D] of each batch
    numbers: tuple[Tensor, ...] = ()  # [B, 2]: equal for equal texts

    def __add__(self, other: MetricSums) -> MetricSums:
        assert isinstance(other, PairSums)
        return PairSums(
            self.loss + other.loss,
            n_targets=self.n_targets + other.n_targets,
            pairs=self.pairs + other.pairs,
            numbers=self.numbers + other.numbers,
        )

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> MetricSums:
        """Return itself: one process has all pairs."""
        return self

    def nearest(self) -> Tensor:
        """Return for each text the index of the match that is nearest by cosine similarity, [n]."""
        texts, matches = F.normalize(torch.cat(self.pairs), dim=-1).unbind(1)
        return torch.cat([(some @ matches.T).argmax(1) for some in texts.split(ROWS)])

    def metrics(self) -> dict[str, float]:
        """Return the mean loss and the fraction of texts whose nearest match is their own.

        The second text is nearest to the third match:

        >>> texts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]])
        >>> matches = torch.tensor([[3.0, 1.0], [1.0, 1.0], [1.0, 3.0]])
        >>> numbers = torch.arange(6).view(3, 2)
        >>> PairSums(1.5, n_targets=3, pairs=(torch.stack([texts, matches], 1),), numbers=(numbers,)).metrics()
        {'loss': 0.5, 'recall_at_1': 0.6666666666666666}
        """
        loss = super().metrics()["loss"]
        numbers = torch.cat(self.numbers)[:, 1]
        correct = int((numbers[self.nearest()] == numbers).sum())  # another copy of the same text is as good
        return {"loss": loss, "recall_at_1": correct / self.n_targets}


def contrastive_loss(pairs: Tensor, numbers: Tensor, counted: Tensor, temperature: float) -> Tensor:
    """Return the symmetric InfoNCE loss of pairs [B, 2, D] in nats, summed over those that are counted [B].

    Each text chooses among all matches of the batch, and each match among all texts, by a softmax over their cosine
    similarities, divided by the temperature; the loss of a pair is the mean of the two cross-entropies. Two pairs
    with a text in common, by its number in `numbers` [B, 2], are left out of each other's choice.

    With two opposite pairs, the right one has the probability 1 / (1 + exp(-2 / temperature)):

    >>> pairs = torch.tensor([[[1.0], [2.0]], [[-1.0], [-3.0]]])
    >>> loss = contrastive_loss(pairs, torch.arange(4).view(2, 2), torch.tensor([True, True]), temperature=1.0)
    >>> torch.isclose(loss, 2 * torch.tensor(1 + torch.e**-2).log())
    tensor(True)
    """
    texts, matches = F.normalize(pairs.to(torch.promote_types(pairs.dtype, torch.float32)), dim=-1).unbind(1)
    shared = (numbers[:, None, :, None] == numbers[None, :, None, :]).flatten(2).any(-1)
    others = shared & ~torch.eye(len(shared), dtype=torch.bool, device=shared.device)
    scores = (texts @ matches.T / temperature).masked_fill(others, -torch.inf)
    own = torch.arange(len(scores), device=scores.device)
    losses = F.cross_entropy(scores, own, reduction="none") + F.cross_entropy(scores.T, own, reduction="none")
    return torch.where(counted, losses / 2, 0).sum()
