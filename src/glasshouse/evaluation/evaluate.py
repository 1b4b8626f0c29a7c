"""Evaluates a model on data: loss and accuracy of its head, and metrics of the text it generates."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasshouse import device as machine
from glasshouse.config import did_you_mean
from glasshouse.data import (
    Batch,
    CausalLMDataset,
    ChatDataset,
    ClassificationDataset,
    Corpus,
    Dataset,
    MaskedLMDataset,
    Seq2SeqDataset,
    TokenClassificationDataset,
    prepare,
)
from glasshouse.data.builtin import is_builtin
from glasshouse.data.corpus import MANIFEST, Kind
from glasshouse.data.dataset import make_dataset, required_kind
from glasshouse.errors import InputError
from glasshouse.evaluation.eval_loop import MetricSums, evaluate_samples, token_bytes
from glasshouse.evaluation.metrics import exact_match, f1
from glasshouse.evaluation.translation import Score, bleu, chrf
from glasshouse.generation import Request, SamplingParams
from glasshouse.generation.generate import generate_requests
from glasshouse.generation.validation import check_count, check_length, check_model
from glasshouse.models import Decoder, Model, Seq2Seq, check_tokenizer
from glasshouse.spec import SequenceClassification, Spec, TokenClassification
from glasshouse.text import Tokenizer
from glasshouse.text.sources import Errors
from glasshouse.text.tokenizer_training import ProgressCallback, no_progress

Source = str | Path | Iterable[str | Path] | Corpus

SHOWN = 3  # examples in a report
EXAMPLE_TOKENS = 64  # of running text: half prompt, half reference


@dataclass(frozen=True)
class Example:
    """One example: the input, the reference and the model's prediction.

    `n_best` has the texts of a beam search with their scores, best first; the best is the prediction.

    >>> Example(input="yes", reference="ja", prediction="nein").prediction
    'nein'
    """

    input: str
    reference: str
    prediction: str
    n_best: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """Metrics of an evaluation over `n_targets` tokens or labels, and a few examples.

    `loss` is in nats per target; `accuracy`, `exact_match` and `f1` (macro) are from 0 to 1, `bleu` and `chrf` from
    0 to 100, with sacrebleu's `signatures`.

    Of `n_items` in the data `n_evaluated` were evaluated on, and for `n_generated` of those an answer was generated:
    exact_match, bleu and chrf cover these, all other metrics every evaluated item.

    >>> Report("labelled", {"accuracy": 0.75}, n_targets=4, examples=[]).metrics["accuracy"]
    0.75
    """

    kind: Kind  # of the corpus
    metrics: dict[str, float]
    n_targets: int
    examples: list[Example]
    n_too_long: int = 0  # items dropped because they are too long
    n_items: int = 0  # sequences of running text, or pairs, texts and conversations, without those too long
    n_evaluated: int = 0
    n_generated: int = 0
    signatures: dict[str, str] = field(default_factory=dict)


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
    progress: ProgressCallback = no_progress,
) -> Report:
    """Evaluate a model on files, folders, globs, a built-in dataset's `split`, or a corpus or its folder.

    `kind`, `columns` and `errors` are those of `data.prepare`; without a kind it is inferred from the model and the
    columns. Samples have up to `seq_len` tokens, by default the model's max_len, in batches of `batch_size`; `limit`
    takes a fixed random subset. For pairs and conversations the model also generates answers, to all items or to
    `generate` of them: greedily, or by a beam search of width `beams`, whose `n_best` are in the examples. With a
    `device` the model moves there.

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
            path, tok, model.spec, kind=kind, columns=columns, split=split, errors=errors, progress=progress
        ) as corpus:
            samples = make_dataset(model.spec, corpus, batch_size=1, seq_len=seq_len)
            count = len(samples) if limit is None else min(limit, len(samples))
            n_generate = count if generate is None else min(generate, count)
            job = _Job(model, tok, corpus, seq_len, batch_size, count, n_generate, beams, n_best, progress)
            report = job.evaluate(samples)
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
    columns: str | Iterable[str] = (),
    split: str = "validation",
    errors: Errors = "strict",
    progress: ProgressCallback = no_progress,
) -> Iterator[Corpus]:
    """Open the data of `evaluate` as a corpus of this tokenizer; files are prepared in a temporary folder.

    Without a `kind`, files are of the kind that a model of spec `s` needs, if there is only one.

    >>> import glasshouse as gh
    >>> with opened("dates", gh.Tokenizer.train(texts=["May"], vocab_size=263)) as corpus:
    ...     corpus.kind, len(corpus)
    ('pairs', 2000)
    """
    if isinstance(path, Corpus):
        if path.manifest["tokenizer"] != tok.fingerprint:
            raise InputError(
                f"the corpus was tokenized by another tokenizer ({path.manifest['tokenizer'][:12]}, not "
                f"{tok.fingerprint[:12]}); prepare its text with the model's."
            )
        yield _of_kind(path, kind)
        return
    paths = [path] if isinstance(path, str | Path) else list(path)
    if len(paths) == 1 and (Path(paths[0]) / MANIFEST).is_file():
        yield _of_kind(Corpus.open(paths[0], tokenizer=tok), kind)
        return
    if kind is None and s is not None and not is_builtin(paths):
        kind = required_kind(s)
    with tempfile.TemporaryDirectory() as folder:
        yield prepare(paths, tok, folder, kind=kind, columns=columns, split=split, errors=errors, progress=progress)


def _of_kind(corpus: Corpus, kind: Kind | None) -> Corpus:
    if kind not in (None, corpus.kind):
        raise InputError(f"kind is {kind!r}, but the corpus is of kind {corpus.kind}; leave the kind out.")
    return corpus


Pair = tuple[list[int], list[int]]  # prompt and reference


@dataclass(frozen=True)
class _Job:
    model: Model
    tok: Tokenizer
    corpus: Corpus
    seq_len: int
    batch_size: int
    count: int  # samples to evaluate on
    n_generate: int  # items to generate answers for
    beams: int
    n_best: int
    progress: ProgressCallback

    @property
    def max_len(self) -> int:
        """Maximum length of prompt and answer."""
        return max(self.seq_len, self.model.spec.max_len)

    def evaluate(self, samples: Dataset) -> Report:
        match samples:
            case CausalLMDataset():
                return self._causal_lm(samples)
            case MaskedLMDataset():
                return self._masked_lm(samples)
            case ClassificationDataset():
                return self._classification(samples)
            case TokenClassificationDataset():
                return self._token_classification(samples)
            case Seq2SeqDataset() | ChatDataset():
                return self._generation(samples)
        raise AssertionError(f"{samples} is not a dataset of a corpus")

    def _causal_lm(self, samples: CausalLMDataset) -> Report:
        # Unless it is byte-level, the bytes of a token depend on its neighbours, so bits per byte are undefined.
        total = self._evaluate_samples(samples, token_bytes(self.tok) if self.tok.byte_level else None)
        begin = [samples.end] if samples.start in (None, samples.end) else []  # else texts include their start token
        pairs = []
        for number in range(min(SHOWN, self.n_generate, len(self.corpus))):
            text = self.corpus.item(number)[0][:EXAMPLE_TOKENS].tolist()
            half = min(len(text), self.seq_len) // 2
            if half:
                pairs.append((begin + text[:half], text[half : 2 * half]))
        return self._report(total, total.metrics(), self._generate(pairs, EXAMPLE_TOKENS // 2, end=samples.end))

    def _masked_lm(self, samples: MaskedLMDataset) -> Report:
        total = self._evaluate_samples(samples)
        batch = samples.batch(range(min(SHOWN, self.count)))
        with torch.no_grad():
            predicted = batch.to(next(self.model.parameters()).device).forward(self.model).argmax(-1).cpu()

        def decode(ids: Tensor) -> str:
            return " | ".join(self.tok.decode([number]) for number in ids.tolist() if number in self.tok.ids)

        examples = [
            Example(self.tok.decode(ids), decode(targets[masked]), decode(predictions[masked]))
            for ids, targets, predictions, masked in zip(
                batch.ids, batch.targets, predicted, batch.loss_mask, strict=True
            )
        ]
        return self._report(total, total.metrics(), examples)

    def _classification(self, samples: ClassificationDataset) -> Report:
        total, names, predicted = self._predict_labels(samples)
        items = [self.corpus.item(item) for item in samples.items(range(self.count))]
        references = [self.corpus.labels[int(label[0])] for _, label in items]
        predictions = [names[int(number)] for number in predicted]
        texts = [self.tok.decode(text) for text, _ in items[:SHOWN]]
        return self._report(
            total, _label_metrics(total, predictions, references), list(map(Example, texts, references, predictions))
        )

    def _token_classification(self, samples: TokenClassificationDataset) -> Report:
        total, names, predicted = self._predict_labels(samples)
        references: list[str] = []
        predictions: list[str] = []
        examples: list[Example] = []
        for item, labels in zip(samples.items(range(self.count)), predicted, strict=True):
            ids, tags = (part[: samples.max_len - 2] for part in self.corpus.item(item))
            starts = np.flatnonzero(tags)
            expected = [self.corpus.labels[number - 1] for number in tags[starts].tolist()]
            found = [names[number] for number in labels[starts + 1].tolist()]  # after the start token
            references += expected
            predictions += found
            if len(examples) < SHOWN:
                words = [self.tok.decode(word).strip() for word in np.split(ids, starts)[1:]]
                reference, prediction = (
                    " ".join(map("/".join, zip(words, one, strict=True))) for one in (expected, found)
                )
                examples.append(Example(self.tok.decode(ids), reference, prediction))
        return self._report(total, _label_metrics(total, predictions, references), examples)

    def _predict_labels(
        self, samples: ClassificationDataset | TokenClassificationDataset
    ) -> tuple[MetricSums, Sequence[str], list[Tensor]]:
        """Evaluate; return the sums, the model's label names and the predicted label ids of each sample."""
        names, numbers = _match_labels(self.model, self.corpus)
        predicted: list[Tensor] = []
        hook = self.model.register_forward_hook(lambda *run: predicted.extend(run[-1].argmax(-1).cpu()))
        try:
            total = self._evaluate_samples(_RelabelledDataset(samples, numbers))
        finally:
            hook.remove()
        return total, names, predicted

    def _generation(self, samples: Seq2SeqDataset | ChatDataset) -> Report:
        if self.n_generate:
            check_model(self.model)  # fail before the evaluation
        total = self._evaluate_samples(samples)
        items = [self.corpus.item(item) for item in sorted(samples.items(range(self.n_generate)))]
        if isinstance(samples, Seq2SeqDataset):
            pairs = [(samples.source(source.tolist()), target.tolist()) for source, target in items]
        else:
            pairs = [_last_answer(*item) for item in items]
            pairs = [pair for pair in pairs if 0 < len(pair[0]) <= self.max_len]
        # An answer longer than twice the longest reference is wrong anyway.
        limit = min(self.seq_len, 2 * max((len(reference) for _, reference in pairs), default=0) + 1)
        examples = self._generate(pairs, limit, end=samples.end, show_special=isinstance(samples, ChatDataset))
        metrics = total.metrics()
        scores: dict[str, Score] = {}
        if examples:
            predictions, references = [one.prediction for one in examples], [one.reference for one in examples]
            metrics["exact_match"] = exact_match(predictions, references)
            if isinstance(samples, Seq2SeqDataset) and importlib.util.find_spec("sacrebleu") is not None:
                scores = {"bleu": bleu(predictions, references), "chrf": chrf(predictions, references)}
        metrics |= {name: score.value for name, score in scores.items()}
        signatures = {name: score.signature for name, score in scores.items()}
        return replace(self._report(total, metrics, examples), n_generated=len(examples), signatures=signatures)

    def _report(self, total: MetricSums, metrics: dict[str, float], examples: list[Example]) -> Report:
        return Report(self.corpus.kind, metrics, total.n_targets, examples)

    def _evaluate_samples(self, samples: Dataset, token_bytes: Tensor | None = None) -> MetricSums:
        done = 0

        def on_batch() -> None:
            nonlocal done
            self.progress("evaluating", done, self.count)
            done += self.batch_size

        total = evaluate_samples(
            self.model, samples, self.batch_size, limit=self.count, token_bytes=token_bytes, on_batch=on_batch
        )
        self.progress("evaluating", self.count, self.count)
        return total

    def _generate(self, pairs: Sequence[Pair], limit: int, *, end: int, show_special: bool = False) -> list[Example]:
        """Generate up to `limit` tokens after each prompt; `show_special` keeps the role tokens of a chat."""
        if not pairs:
            return []
        ends = {reference[-1] for _, reference in pairs if reference} & self.tok.special_ids | {end}
        done, total = 0, limit * len(pairs)

        def on_tokens(new: int) -> None:
            nonlocal done
            done += new
            self.progress("generating", done, total)

        model = cast("Decoder | Seq2Seq", self.model)
        prompts = [prompt for prompt, _ in pairs]
        params = SamplingParams(max_new_tokens=limit, beams=self.beams, stop_token_ids=tuple(sorted(ends)))
        found = generate_requests(
            model, self.tok, prompts, params, n=self.n_best, max_len=self.max_len, progress=on_tokens
        )
        self.progress("generating", total, total)
        return [
            self._example(
                self.tok.decode(prompt, skip_special_tokens=not show_special),
                self.tok.decode(reference, skip_special_tokens=True),
                request,
            )
            for (prompt, reference), request in zip(pairs, found, strict=True)
        ]

    def _example(self, prompt: str, reference: str, request: Request) -> Example:
        best = request.completions()
        listed = tuple((one.score, one.text) for one in best if one.score is not None) if self.n_best > 1 else ()
        return Example(prompt, reference, best[0].text, listed)


def _last_answer(ids: NDArray[np.int64], runs: NDArray[np.int64]) -> Pair:
    """Return a conversation up to its last answer, and that answer.

    >>> _last_answer(np.array([5, 6, 7, 8, 9]), np.array([1, 1, 1, 2]))
    ([5, 6, 7], [8, 9])
    """
    answer = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    stop = int(np.flatnonzero(answer)[-1]) + 1
    start = int(np.flatnonzero(~answer[:stop])[-1]) + 1 if not answer[:stop].all() else 0
    return ids[:start].tolist(), ids[start:stop].tolist()


def _label_metrics(total: MetricSums, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    metrics = {name: value for name, value in total.metrics().items() if name != "perplexity"}
    return metrics | {"f1": f1(predictions, references, average="macro")}


def _match_labels(model: Model, corpus: Corpus) -> tuple[Sequence[str], Tensor]:
    """Return the label names of a model, and its label id for each label of the corpus.

    A model without label names is assumed to use the label ids of the corpus.
    """
    head = model.spec.head
    assert isinstance(head, SequenceClassification | TokenClassification)
    if not head.labels:
        spare = [f"label {number}" for number in range(len(corpus.labels), head.n_labels)]
        return [*corpus.labels, *spare], torch.arange(len(corpus.labels))
    for label in corpus.labels:
        if label not in head.labels:
            raise InputError(
                f"the corpus has the label {label!r}, which the model lacks; {did_you_mean(label, head.labels)}"
            )
    return head.labels, torch.tensor([head.labels.index(label) for label in corpus.labels])


@dataclass(frozen=True)
class _RelabelledDataset:
    """Labelled or tagged samples with the label ids of a model."""

    samples: ClassificationDataset | TokenClassificationDataset
    numbers: Tensor  # by label id of the corpus

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, numbers: Sequence[int]) -> Batch:
        batch = self.samples.batch(numbers)
        return replace(batch, targets=self.numbers[batch.targets])

    def origin(self, number: int) -> str:
        return self.samples.origin(number)
