"""Chat: a decoder predicts the assistant's turns of conversations, or completions of prompts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glasshouse.data import ChatDataset, Corpus
from glasshouse.objectives.metrics import Report
from glasshouse.objectives.objective import Evaluation, Objective, Pair, items_for_tokens


class Chat(Objective[ChatDataset]):
    """The assistant's turns; the last of each conversation is generated and compared with the reference."""

    models = "causal language models"
    model_kinds = ("decoder",)
    head_kind = "next_token"
    data_kind = "chat"
    compares_answers = True

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> ChatDataset:
        """Return conversations of at most `seq_len` ids."""
        return ChatDataset(corpus, batch_size, max_len=seq_len, seed=seed)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many conversations have about `tokens` tokens."""
        lengths = corpus.lengths[:, :1]
        return items_for_tokens(lengths[lengths[:, 0] < seq_len], tokens)

    def evaluate(self, evaluation: Evaluation, samples: ChatDataset) -> Report:
        """Evaluate the loss per token of the assistant; compare its generated last turns by exact match."""
        sums = evaluation.sums(samples)
        items = sorted(samples.items(range(evaluation.n_generate)))
        pairs = [last_answer(*evaluation.corpus.item(item)) for item in items]
        pairs = [pair for pair in pairs if 0 < len(pair[0]) <= evaluation.max_len]
        return evaluation.report_answers(sums, pairs, end=samples.end, show_special=True)


def last_answer(ids: NDArray[np.int64], runs: NDArray[np.int64]) -> Pair:
    """Return a conversation up to its last answer, and that answer.

    >>> last_answer(np.array([5, 6, 7, 8, 9]), np.array([1, 1, 1, 2]))
    ([5, 6, 7], [8, 9])
    """
    answer = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    stop = int(np.flatnonzero(answer)[-1]) + 1
    start = int(np.flatnonzero(~answer[:stop])[-1]) + 1 if not answer[:stop].all() else 0
    return ids[:start].tolist(), ids[start:stop].tolist()
