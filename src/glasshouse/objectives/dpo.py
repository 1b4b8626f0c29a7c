"""Direct preference optimisation (DPO): a decoder prefers one of two answers, without a reward model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.config import Settings, require_positive
from glasshouse.data import Batch, Corpus, PreferenceBatch, PreferenceDataset
from glasshouse.errors import ConfigError
from glasshouse.layers.attend.kernel import Attend
from glasshouse.layers.linear.frozen_quantized import copy_sharing_quantized
from glasshouse.models import Model
from glasshouse.objectives.loss.cross_entropy import reference_precision
from glasshouse.objectives.loss.softmax_gradient import IGNORED
from glasshouse.objectives.metrics import SHOWN, MetricSums, Report
from glasshouse.objectives.objective import Evaluation, Objective, items_for_tokens


@dataclass(frozen=True)
class DPO(Settings, Objective[PreferenceDataset]):
    """Direct preference optimisation (Rafailov et al., 2023), with the initial weights as the reference.

    The reward of an answer is beta * log(p / p_reference), and the loss of a pair is -log sigmoid of the margin: the
    reward of the chosen answer less that of the rejected one. Label smoothing is the probability that a preference is
    the wrong way round (conservative DPO). Without `prepare`, as in `gh.evaluate`, there is no reference: answers are
    compared by their own log-probabilities.
    """

    kind: ClassVar[str] = "dpo"
    models = "causal language models"
    model_kinds = ("decoder",)
    head_kind = "next_token"
    data_kind = "preferences"
    parallel = False
    sequences_per_sample = 2
    reference: ClassVar[Model | None] = None  # set on the copy that `prepare` returns

    beta: float = 0.1  # how closely the model keeps to the reference; lower: it may move further away

    def check(self) -> None:
        require_positive(self, "beta")

    def extra_parameters(self, model: Model) -> int:
        """Return the size of the reference, which is that of the model."""
        return sum(weight.numel() for weight in model.parameters())

    def prepare(self, model: Model, corpus: Corpus, seq_len: int) -> DPO:
        """Return a copy with the model as it is now for the reference; both compute without dropout.

        Its noise would be larger than the margins of the first steps.
        """
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, Attend):
                module.dropout = 0.0
        ready = copy.copy(self)
        object.__setattr__(ready, "reference", copy_sharing_quantized(model).requires_grad_(False).eval())
        return ready

    def frozen_models(self) -> dict[str, Model]:
        """Return the reference."""
        return {} if self.reference is None else {"reference": self.reference}

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> PreferenceDataset:
        """Return pairs of at most `seq_len` ids, each answer with its prompt."""
        return PreferenceDataset(corpus, batch_size, max_len=seq_len, seed=seed)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many pairs have about `tokens` tokens."""
        lengths = corpus.lengths[:, :1] + corpus.lengths[:, 1:] - 1
        return items_for_tokens(lengths[(lengths <= seq_len).all(1)], tokens)

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return -(1 - smoothing) * log sigmoid(margin) - smoothing * log sigmoid(-margin), summed over pairs."""
        if smoothing >= 0.5:
            raise ConfigError(
                f"train.label_smoothing is {smoothing}, but with dpo it is the probability that a preference is the "
                "wrong way round, which must be below 0.5."
            )
        margins = self._margins(model, batch)[0]
        each = (smoothing - 1) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
        return each.masked_fill(~batch.loss_mask, 0.0).sum()

    def _margins(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the margin of each pair, and the log-probabilities of its answers, [B, 2]."""
        assert isinstance(batch, PreferenceBatch)
        logits = batch.forward(model)
        log_probs = answer_log_probs(logits, batch)
        rewards = log_probs
        if self.reference is not None:
            with torch.no_grad(), reference_precision(logits):
                expected = answer_log_probs(batch.forward(self.reference), batch)
            rewards = log_probs - expected
        return self.beta * (rewards[:, 0] - rewards[:, 1]), log_probs

    @torch.no_grad()
    def evaluate_batch(self, model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
        """Return the sums of loss, preference accuracy (a tie is half), margin, and loss per token of the answers."""
        assert isinstance(batch, PreferenceBatch)
        margins, log_probs = (one[batch.loss_mask] for one in self._margins(model, batch))
        tokens = batch.answer_mask.sum(1).view(-1, 2)[batch.loss_mask].sum(0)
        correct = (margins > 0).sum() + (margins == 0).sum() / 2
        n_pairs, (chosen, rejected) = len(margins), (-log_probs).double().sum(0).tolist()
        others = {
            "margin": (float(margins.double().sum()), n_pairs),
            "chosen_loss": (chosen, int(tokens[0])),
            "rejected_loss": (rejected, int(tokens[1])),
        }
        loss = float(-F.logsigmoid(margins).double().sum())
        return MetricSums(loss, float(correct), n_pairs, others=others, is_likelihood=False)

    def evaluate(self, evaluation: Evaluation, samples: PreferenceDataset) -> Report:
        """Evaluate the metrics of the pairs, and answer some prompts, beside the answers that are preferred."""
        sums = evaluation.sums(samples)
        items = sorted(samples.items(range(min(SHOWN, evaluation.n_generate))))
        pairs = [tuple(part.tolist() for part in evaluation.corpus.item(item)[:2]) for item in items]
        limit = 2 * max((len(chosen) for _, chosen in pairs), default=0) + 1
        examples = evaluation.generate(pairs, limit, end=samples.end, show_special=True)
        return evaluation.report(sums, examples=examples)


def answer_log_probs(logits: Tensor, batch: PreferenceBatch) -> Tensor:
    """Return the log-probability of each answer, [B, 2], the sum over its tokens.

    Two tokens of which each has one of two values, equally likely:

    >>> ids = torch.zeros(2, 2, dtype=torch.long)
    >>> pair = torch.zeros(1, dtype=torch.long)
    >>> mask = torch.tensor([[True, True], [False, True]])
    >>> batch = PreferenceBatch(ids, pair, pair == 0, answers=ids, answer_mask=mask)
    >>> answer_log_probs(torch.zeros(2, 2, 2), batch).exp()
    tensor([[0.2500, 0.5000]])
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = batch.answers.masked_fill(~batch.answer_mask, IGNORED)
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -each.view(len(batch), 2, -1).sum(-1)
