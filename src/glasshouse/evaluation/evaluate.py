"""Evaluates a model on data by its objective: loss and accuracy of its head, and the text it generates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glasshouse import device as machine
from glasshouse.data import Corpus, Dataset, prepare
from glasshouse.data.builtin import is_builtin
from glasshouse.data.corpus import MANIFEST, Kind
from glasshouse.errors import InputError, check_count, distinct
from glasshouse.evaluation.eval_loop import evaluate_samples
from glasshouse.generation import Request, SamplingParams
from glasshouse.generation.offline import generate_requests
from glasshouse.generation.validation import check_model
from glasshouse.models import Model, check_tokenizer
from glasshouse.models.checks import check_length
from glasshouse.objectives import Evaluation, Objective, find_objective, required_kind
from glasshouse.objectives.metrics import SHOWN, Example, MetricSums, Report
from glasshouse.objectives.objective import Pair
from glasshouse.spec import Spec
from glasshouse.text import Tokenizer
from glasshouse.text.bpe.training import ProgressCallback, no_progress
from glasshouse.text.sources import Errors

Source = str | Path | Iterable[str | Path] | Corpus


def evaluate(
    model: Model,
    tok: Tokenizer,
    path: Source,
    *,
    kind: Kind | None = None,
    columns: str | Iterable[str] = (),
    split: str = "validation",
    errors: Errors = "strict",
    seq_len: int | None = None,
    batch_size: int = 32,
    limit: int | None = None,
    generate: int | None = None,
    beams: int = 1,
    n_best: int = 1,
    device: torch.device | str | None = None,
    objective: Objective[Any] | None = None,
    progress: ProgressCallback = no_progress,
) -> Report:
    """Evaluate a model on files, folders, globs, a built-in dataset's `split`, or a corpus or its folder.

    `kind`, `columns` and `errors` are those of `data.prepare`; without a kind it is inferred from the model and the
    columns. Samples have up to `seq_len` tokens, by default the model's max_len, in batches of `batch_size`; `limit`
    takes a fixed random subset. For pairs and conversations the model also generates answers, to all items or to
    `generate` of them: greedily, or by a beam search of width `beams`, whose `n_best` are in the examples. With a
    `device` the model moves there. An `objective` of your own takes the place of the one for the model and the data.

    A model whose head is all zeros predicts every token with the same probability.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=263, max_len=64))
    >>> _ = torch.nn.init.zeros_(model.head.weight)
    >>> report = gh.evaluate(model, tok, "stdlib", limit=8)
    >>> round(report.metrics["perplexity"], 2), report.n_targets
    (263.0, 512)
    """
    if not isinstance(tok, Tokenizer):
        raise InputError(f"tok is {tok!r}, but a tokenizer is needed to evaluate; give the model's.")
    check_tokenizer(model, tok)
    seq_len = check_length(model.spec, seq_len, "seq_len")
    check_count("batch_size", batch_size)
    if limit is not None:
        check_count("limit", limit)
    if generate:
        check_count("generate", generate)
    check_count("beams", beams)
    if check_count("n_best", n_best) > beams:
        raise InputError(
            f"n_best is {n_best}, but a beam search of width {beams} finds no more than {beams}; raise beams."
        )
    if device is not None:
        model.to(machine.resolve(device))
    was_training = model.training
    model.eval()
    try:
        with opened(
            path,
            tok,
            model.spec,
            kind=kind,
            objective=objective,
            columns=columns,
            split=split,
            errors=errors,
            progress=progress,
        ) as corpus:
            objective = find_objective(model.spec, corpus, objective)
            samples = objective.dataset_for(model.spec, corpus, batch_size=1, seq_len=seq_len)
            count = len(samples) if limit is None else min(limit, len(samples))
            n_generate = count if generate is None else min(generate, count)
            if n_generate and objective.compares_answers:
                check_model(model)  # fail before the evaluation
            evaluation = _Evaluation(
                model, tok, corpus, seq_len, count, n_generate, objective, batch_size, beams, n_best, progress
            )
            report = objective.evaluate(evaluation, samples)
            return replace(
                report,
                examples=report.examples[:SHOWN],
                n_too_long=getattr(samples, "n_too_long", 0),
                n_items=len(samples),
                n_evaluated=count,
            )
    finally:
        model.train(was_training)


@contextmanager
def opened(
    path: Source,
    tok: Tokenizer,
    s: Spec | None = None,
    *,
    kind: Kind | None = None,
    objective: Objective[Any] | None = None,
    columns: str | Iterable[str] = (),
    split: str = "validation",
    errors: Errors = "strict",
    progress: ProgressCallback = no_progress,
) -> Iterator[Corpus]:
    """Open the data of `evaluate` as a corpus of this tokenizer; files are prepared in a temporary folder.

    Without a `kind`, files are of the kind that the `objective` or else a model of spec `s` needs, if it is one.

    >>> import glasshouse as gh
    >>> with opened("dates", gh.Tokenizer.train(texts=["May"], vocab_size=263)) as corpus:
    ...     corpus.kind, len(corpus)
    ('pairs', 2000)
    """
    if isinstance(path, Corpus):
        if path.manifest["tokenizer"] != tok.fingerprint:
            found, own = distinct(path.manifest["tokenizer"], tok.fingerprint)
            raise InputError(
                f"the corpus was tokenized by another tokenizer ({found}, not {own}); prepare its text with the "
                "model's."
            )
        yield _of_kind(path, kind)
        return
    paths = [path] if isinstance(path, str | Path) else list(path)
    if len(paths) == 1 and (Path(paths[0]) / MANIFEST).is_file():
        yield _of_kind(Corpus.open(paths[0], tokenizer=tok), kind)
        return
    if kind is None and s is not None and not is_builtin(paths):
        kind = required_kind(s.kind, s.head.kind, objective)
    with tempfile.TemporaryDirectory() as folder:
        yield prepare(paths, tok, folder, kind=kind, columns=columns, split=split, errors=errors, progress=progress)


def _of_kind(corpus: Corpus, kind: Kind | None) -> Corpus:
    if kind not in (None, corpus.kind):
        raise InputError(f"kind is {kind!r}, but the corpus is of kind {corpus.kind}; leave the kind out.")
    return corpus


@dataclass(frozen=True)
class _Evaluation(Evaluation):
    objective: Objective[Any]
    batch_size: int
    beams: int
    n_best: int
    progress: ProgressCallback

    def sums(self, samples: Dataset) -> MetricSums:
        done = 0

        def on_batch() -> None:
            nonlocal done
            self.progress("evaluating", done, self.count)
            done += self.batch_size

        total = evaluate_samples(
            self.model,
            samples,
            self.batch_size,
            limit=self.count,
            token_bytes=self.objective.token_bytes(self.tok),
            evaluate_batch=self.objective.evaluate_batch,
            on_batch=on_batch,
        )
        self.progress("evaluating", self.count, self.count)
        return total

    def generate(
        self, pairs: Sequence[Pair], max_new_tokens: int, *, end: int, show_special: bool = False
    ) -> list[Example]:
        return generate_answers(
            self.model,
            self.tok,
            pairs,
            max_new_tokens,
            end=end,
            show_special=show_special,
            max_len=self.max_len,
            beams=self.beams,
            n_best=self.n_best,
            progress=self.progress,
        )


def generate_answers(
    model: Model,
    tok: Tokenizer,
    pairs: Sequence[Pair],
    max_new_tokens: int,
    *,
    end: int,
    show_special: bool,
    max_len: int,
    beams: int,
    n_best: int,
    progress: ProgressCallback,
) -> list[Example]:
    """Generate after each prompt, greedily or by beam search; `show_special` keeps the role tokens of a chat."""
    if not pairs:
        return []
    ends = {reference[-1] for _, reference in pairs if reference} & tok.special_ids | {end}
    done, total = 0, max_new_tokens * len(pairs)

    def on_tokens(new: int) -> None:
        nonlocal done
        done += new
        progress("generating", done, total)

    found = generate_requests(
        model,
        tok,
        [prompt for prompt, _ in pairs],
        SamplingParams(max_new_tokens=max_new_tokens, beams=beams, stop_token_ids=tuple(sorted(ends))),
        n=n_best,
        max_len=max_len,
        progress=on_tokens,
    )
    progress("generating", total, total)
    return [
        _example(
            tok.decode(prompt, skip_special_tokens=not show_special),
            tok.decode(reference, skip_special_tokens=True),
            request,
            n_best,
        )
        for (prompt, reference), request in zip(pairs, found, strict=True)
    ]


def _example(prompt: str, reference: str, request: Request, n_best: int) -> Example:
    best = request.completions()
    listed = tuple((one.score, one.text) for one in best if one.score is not None) if n_best > 1 else ()
    return Example(prompt, reference, best[0].text, listed)
