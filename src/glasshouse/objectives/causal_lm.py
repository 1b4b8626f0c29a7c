"""Causal language modelling: a decoder predicts each next token of running text."""

from __future__ import annotations

from torch import Tensor

from glasshouse.data import CausalLMDataset, Corpus
from glasshouse.objectives.metrics import SHOWN, Report, token_bytes
from glasshouse.objectives.objective import Evaluation, Objective
from glasshouse.text import Tokenizer

EXAMPLE_TOKENS = 64  # of a text in a report: half prompt, half reference


class CausalLM(Objective[CausalLMDataset]):
    """Next tokens of running text; the report continues the first halves of some texts."""

    models = "causal language models"
    model_kinds = ("decoder",)
    head_kind = "next_token"
    data_kind = "text"

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> CausalLMDataset:
        """Return sequences of `seq_len` ids."""
        return CausalLMDataset(corpus, seq_len, seed=seed)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many sequences have about `tokens` tokens."""
        return max(1, tokens // seq_len)

    def token_bytes(self, tok: Tokenizer) -> Tensor | None:
        """Return the number of bytes of each token id, if they do not depend on its neighbours."""
        return token_bytes(tok) if tok.byte_level else None

    def evaluate(self, evaluation: Evaluation, samples: CausalLMDataset) -> Report:
        """Evaluate the loss in nats per token and bits per byte; generate the second halves of some texts."""
        sums = evaluation.sums(samples)
        begin = [samples.end] if samples.start in (None, samples.end) else []  # else texts include their start token
        pairs = []
        for number in range(min(SHOWN, evaluation.n_generate, len(evaluation.corpus))):
            text = evaluation.corpus.item(number)[0][:EXAMPLE_TOKENS].tolist()
            half = min(len(text), evaluation.seq_len) // 2
            if half:
                pairs.append((begin + text[:half], text[half : 2 * half]))
        return evaluation.report(sums, examples=evaluation.generate(pairs, EXAMPLE_TOKENS // 2, end=samples.end))
