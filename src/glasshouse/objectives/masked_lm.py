"""Masked language modelling: an encoder predicts the masked tokens of running text."""

from __future__ import annotations

import torch
from torch import Tensor

from glasshouse.data import Corpus, MaskedLMDataset
from glasshouse.objectives.metrics import SHOWN, Example, Report
from glasshouse.objectives.objective import Evaluation, Objective


class MaskedLM(Objective[MaskedLMDataset]):
    """Masked tokens of running text; the report shows those of some texts."""

    models = "masked language models"
    model_kinds = ("encoder",)
    head_kind = "masked_token"
    data_kind = "text"

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> MaskedLMDataset:
        """Return sequences of `seq_len` ids."""
        return MaskedLMDataset(corpus, seq_len, seed=seed)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many sequences have about `tokens` tokens."""
        return max(1, tokens // seq_len)

    def evaluate(self, evaluation: Evaluation, samples: MaskedLMDataset) -> Report:
        """Evaluate the loss per masked token; predict those of the first samples."""
        model, tok = evaluation.model, evaluation.tok
        sums = evaluation.sums(samples)
        batch = samples.batch(range(min(SHOWN, evaluation.count)))
        with torch.no_grad():
            predicted = batch.to(next(model.parameters()).device).forward(model).argmax(-1).cpu()

        def decode(ids: Tensor) -> str:
            return " | ".join(tok.decode([number]) for number in ids.tolist() if number in tok.ids)

        examples = [
            Example(tok.decode(ids), decode(targets[masked]), decode(predictions[masked]))
            for ids, targets, predictions, masked in zip(
                batch.ids, batch.targets, predicted, batch.loss_mask, strict=True
            )
        ]
        return evaluation.report(sums, examples=examples)
