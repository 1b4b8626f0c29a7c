"""Sequence to sequence: an encoder-decoder predicts the target of each source."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from glasshouse.data import Corpus, Seq2SeqDataset
from glasshouse.data.item_datasets import source_prefix_suffix
from glasshouse.objectives.metrics import Report
from glasshouse.objectives.objective import Evaluation, Objective, items_for_tokens
from glasshouse.objectives.translation import bleu, chrf


class Seq2SeqLM(Objective[Seq2SeqDataset]):
    """Targets of sources; generated targets are compared with the references, as translations are."""

    models = "encoder-decoders"
    model_kinds = ("seq2seq",)
    data_kind = "pairs"
    compares_answers = True

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> Seq2SeqDataset:
        """Return pairs of at most `seq_len` ids on either side."""
        return Seq2SeqDataset(corpus, batch_size, max_len=seq_len, seed=seed, start=start_id)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many pairs have about `tokens` tokens."""
        special = sum(map(len, source_prefix_suffix(corpus)))
        return items_for_tokens(corpus.lengths[(corpus.lengths <= seq_len - special).all(1)], tokens)

    def evaluate(self, evaluation: Evaluation, samples: Seq2SeqDataset) -> Report:
        """Evaluate the loss per target token; compare generated targets by exact match, BLEU and chrF."""
        sums = evaluation.sums(samples)
        items = [evaluation.corpus.item(item) for item in sorted(samples.items(range(evaluation.n_generate)))]
        pairs = [(samples.source(source.tolist()), target.tolist()) for source, target in items]
        report = evaluation.report_answers(sums, pairs, end=samples.end)
        if not report.examples or importlib.util.find_spec("sacrebleu") is None:
            return report
        predictions = [one.prediction for one in report.examples]
        references = [one.reference for one in report.examples]
        scores = {"bleu": bleu(predictions, references), "chrf": chrf(predictions, references)}
        return replace(
            report,
            metrics=report.metrics | {name: score.value for name, score in scores.items()},
            signatures={name: score.signature for name, score in scores.items()},
        )
