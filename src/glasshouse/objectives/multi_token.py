"""Multi-token prediction: draft heads of a decoder predict the tokens after the next one, as drafts of generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.config import JsonDict, Settings, require
from glasshouse.data import Batch, Corpus
from glasshouse.layers.attend.layout import make_layout
from glasshouse.models import Decoder, Model
from glasshouse.models.heads import LMHead
from glasshouse.models.surgery import with_draft_heads
from glasshouse.objectives.causal_lm import CausalLM
from glasshouse.objectives.loss.cross_entropy import cross_entropy
from glasshouse.objectives.metrics import MetricSums, sum_metrics


@dataclass(frozen=True)
class MultiToken(Settings, CausalLM):
    """Next tokens of running text, and the n - 1 tokens after each (Gloeckle et al., 2024).

    The loss is that of the next token, and `weight` times the mean loss of the others. Metrics are those of the next
    token, as without draft heads, and the acceptance rate: the fraction of drafts that the model itself would have
    written after the text so far, with all drafts before them.

    >>> MultiToken(n=4).head_settings(None)
    {'n_draft_heads': 3}
    """

    kind: ClassVar[str] = "multi_token"
    parallel = False

    n: int = 4  # tokens that are predicted at each position: the next one, and n - 1 by a draft head each
    weight: float = 0.3  # of the mean loss of the draft heads, beside that of the next token
    keep: bool = True  # whether the saved model has the draft heads, for generation; false: it is a plain decoder

    def check(self) -> None:
        require(self.n > 1, "multi_token.n", self.n, "at least 2")
        require(0 < self.weight < torch.inf, "multi_token.weight", self.weight, "above 0")

    def head_settings(self, corpus: Corpus | None) -> JsonDict:
        """Return the number of draft heads."""
        return {"n_draft_heads": self.n - 1}

    def fit_head(self, model: Model, corpus: Corpus) -> Model:
        """Return a copy of the model with this many draft heads, or itself."""
        if getattr(model.spec.head, "n_draft_heads", None) == self.n - 1:
            return model
        return with_draft_heads(model, self.n - 1)

    def finish(self, model: Model) -> Model:
        """Return the model to save, with or without draft heads."""
        return model if self.keep else with_draft_heads(model, 0)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss of the next token and of those after it, summed over positions."""
        x, head, table = _hidden_states(model, batch)
        assert head.drafts is not None
        # From hidden states: the logits of all heads would take n times the memory.
        loss = cross_entropy(head.unprojected(x, table), batch, smoothing)
        for distance, draft in enumerate(head.drafts, 1):
            further = cross_entropy(head.unprojected(draft(x), table), shifted(batch, distance), smoothing)
            loss = loss + self.weight / len(head.drafts) * further
        return loss

    @torch.no_grad()
    def evaluate_batch(self, model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
        """Return the sums of the next token's metrics, and how many drafts would be accepted."""
        x, head, table = _hidden_states(model, batch)
        logits = head.unprojected(x, table).logits()
        sums = sum_metrics(logits, batch, token_bytes)
        if head.drafts is None:
            return sums
        drafts = torch.stack([head.unprojected(draft(x), table).logits().argmax(-1) for draft in head.drafts])
        accepted, counted = accepted_drafts(logits.argmax(-1), drafts, batch)
        return replace(sums, others={**sums.others, "acceptance_rate": (int(accepted), int(counted))})


def _hidden_states(model: nn.Module, batch: Batch) -> tuple[Tensor, LMHead, Tensor]:
    """Return the hidden states that the head is given, the head, and the token embedding matrix."""
    assert isinstance(model, Decoder)
    assert isinstance(model.head, LMHead)
    layout = make_layout(batch.ids, lengths=batch.lengths, documents=batch.documents)
    return model.stack(model.token_embedding(batch.ids), layout), model.head, model.token_embedding.table.weight


def shifted(batch: Batch, distance: int) -> Batch:
    """Return the batch with the targets of `distance` tokens further on; none is in another document.

    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> documents = torch.tensor([[0, 0, 1, 1]])
    >>> further = shifted(Batch(ids, ids + 1, ids > 0, documents), 1)
    >>> further.targets.tolist(), further.loss_mask.tolist()
    ([[3, 4, 5, 0]], [[True, False, True, False]])
    """
    mask = _ahead(batch.loss_mask, distance)
    if batch.documents is not None:
        mask = mask & (_ahead(batch.documents, distance) == batch.documents)
    return replace(batch, targets=_ahead(batch.targets, distance), loss_mask=mask)


def _ahead(values: Tensor, distance: int) -> Tensor:
    """Return what is `distance` positions further on, in values [B, S]; 0 beyond the end."""
    return F.pad(values[:, distance:], (0, min(distance, values.shape[1])))


def accepted_drafts(own: Tensor, drafts: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return how many drafts [K, B, S] would be accepted, and how many there are.

    `own` [B, S] are the tokens that the model itself predicts. A draft is accepted if it is the model's own token
    there and all drafts before it are accepted. The first draft is made at position 0 for what follows position 1:

    >>> ids = torch.tensor([[5, 6, 7, 8]])
    >>> drafts = torch.tensor([[[7, 0, 9, 0]], [[8, 9, 0, 0]]])
    >>> accepted, counted = accepted_drafts(own=ids + 1, drafts=drafts, batch=Batch(ids, ids + 1, ids > 0))
    >>> accepted.item(), counted.item()  # all of three and two; the second one fails, and that after it with it
    (3, 5)
    """
    accepted = counted = own.new_zeros(())
    so_far = torch.ones_like(own, dtype=torch.bool)
    for distance, guesses in enumerate(drafts, 1):
        so_far = so_far & (guesses == _ahead(own, distance))
        mask = shifted(batch, distance).loss_mask
        accepted, counted = accepted + (so_far & mask).sum(), counted + mask.sum()
    return accepted, counted
