"""How good a model is on data: what its head is asked for, and what it writes where it writes."""

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
from glasshouse.data.corpus import MANIFEST, Kind
from glasshouse.data.dataset import make_dataset, required_kind
from glasshouse.data.dataset_reader import is_builtin
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
GLIMPSE = 64  # tokens of running text in an example: half are read, half are to be written


@dataclass(frozen=True)
class Example:
    """One thing that was asked: what the model read, what it should have said, and what it said.

    `n_best` has the texts of a beam search by their scores, the best of which is what it said.

    >>> Example(read="yes", expected="ja", said="nein").said
    'nein'
    """

    input: str
    reference: str
    prediction: str
    n_best: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """What was measured: figures by name, over so many places that counted, and a few examples.

    `loss` is in nats a place; `accuracy`, `exact_match` and `f1` (macro) are shares from 0 to 1, `bleu` and `chrf`
    scores from 0 to 100, of which `signatures` has sacrebleu's line of how they were computed.

    Of `items` in the data `measured` were read, and to `written` of those the model wrote an answer: exact_match,
    bleu and chrf are over these, all other figures over what was read.

    >>> Report("labelled", {"accuracy": 0.75}, asked=4, examples=[]).figures["accuracy"]
    0.75
    """

    kind: Kind  # of the corpus
    metrics: dict[str, float]
    n_targets: int
    examples: list[Example]
    n_too_long: int = 0  # items that are too long to be asked about
    n_items: int = 0  # rows of running text, or pairs, texts and conversations; those left out are not counted
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
    """Measure a model on files, folders, globs, a built-in set's `split`, or a corpus: open, or the folder of one.

    `kind`, `fields` and `errors` are those of `data.prepare`; without a kind, the model and the columns tell it.
    Samples have up to `length` tokens, the model's max_len unless told, and run so many `rows` at a time; `limit`
    takes a sample of so many instead of all, the same each time. Of pairs and conversations the model also writes the
    answers, all of them unless `written` says to how many: the likeliest token each time, or by a search of so many
    `beams`, whose `n` best are in the examples. With a `device` the model moves there.

    A model whose head is all zeros takes every token for as likely as any other.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=263, max_len=64))
    >>> _ = torch.nn.init.zeros_(model.head.weight)
    >>> report = gh.evaluate(model, tok, "stdlib", limit=8)
    >>> round(report.figures["perplexity"], 2), report.asked
    (263.0, 512)
    """
    if not isinstance(tok, Tokenizer):
        raise InputError(f"tok is {tok!r}, but data are measured as its tokens; give the model's tokenizer.")
    check_tokenizer(model, tok)
    seq_len = check_length(model.spec, seq_len, "length")
    check_count("rows", batch_size)
    if limit is not None:
        check_count("limit", limit)
    if generate:
        check_count("written", generate)
    check_count("beams", beams)
    if check_count("n_best", n_best) > beams:
        raise InputError(f"n_best is {n_best}, but a search of {beams} beams finds no more than these; raise beams.")
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
            answers = count if generate is None else min(generate, count)
            job = _Job(model, tok, corpus, seq_len, batch_size, count, answers, beams, n_best, progress)
            report = job.ask(samples)
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
    """Open what `evaluate` takes as a corpus of this tokenizer; what is not yet prepared is, until the end.

    Files are of the kind that the model of the spec `s` learns from, if it is one alone and no other is given.

    >>> import glasshouse as gh
    >>> with opened("dates", gh.Tokenizer.train(texts=["May"], vocab_size=263)) as corpus:
    ...     corpus.kind, len(corpus)
    ('pairs', 2000)
    """
    if isinstance(path, Corpus):
        if path.manifest["tokenizer"] != tok.fingerprint:
            raise InputError(
                f"the corpus was made by another tokenizer ({path.manifest['tokenizer'][:12]}, not "
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


Turn = tuple[list[int], list[int]]  # what is read, and what should be written


@dataclass(frozen=True)
class _Job:
    model: Model
    tok: Tokenizer
    corpus: Corpus
    length: int
    rows: int
    count: int  # samples to read
    written: int  # items to answer
    beams: int
    n: int
    progress: ProgressCallback

    @property
    def room(self) -> int:
        """How many tokens of prompt and answer there is room for."""
        return max(self.length, self.model.spec.max_len)

    def ask(self, samples: Dataset) -> Report:
        match samples:
            case CausalLMDataset():
                return self._running(samples)
            case MaskedLMDataset():
                return self._masked(samples)
            case ClassificationDataset():
                return self._labelled(samples)
            case TokenClassificationDataset():
                return self._tagged(samples)
            case Seq2SeqDataset() | ChatDataset():
                return self._answered(samples)
        raise AssertionError(f"{samples} are no samples of a corpus")

    def _running(self, samples: CausalLMDataset) -> Report:
        # Where tokens are no rows of bytes, what one spells depends on its neighbours, so it has no size of its own.
        total = self._measure(samples, token_bytes(self.tok) if self.tok.byte_level else None)
        begin = [samples.end] if samples.start in (None, samples.end) else []  # other texts bring their start along
        turns = []
        for number in range(min(SHOWN, self.written, len(self.corpus))):
            text = self.corpus.item(number)[0][:GLIMPSE].tolist()
            half = min(len(text), self.length) // 2
            if half:
                turns.append((begin + text[:half], text[half : 2 * half]))
        return self._report(total, total.metrics(), self._write(turns, GLIMPSE // 2, end=samples.end))

    def _masked(self, samples: MaskedLMDataset) -> Report:
        total = self._measure(samples)
        batch = samples.batch(range(min(SHOWN, self.count)))
        with torch.no_grad():
            said = batch.to(next(self.model.parameters()).device).forward(self.model).argmax(-1).cpu()

        def spell(ids: Tensor) -> str:
            return " | ".join(self.tok.decode([number]) for number in ids.tolist() if number in self.tok.ids)

        examples = [
            Example(self.tok.decode(ids), spell(targets[asked]), spell(answers[asked]))
            for ids, targets, answers, asked in zip(batch.ids, batch.targets, said, batch.loss_mask, strict=True)
        ]
        return self._report(total, total.metrics(), examples)

    def _labelled(self, samples: ClassificationDataset) -> Report:
        total, names, answers = self._choices(samples)
        items = [self.corpus.item(item) for item in samples.items(range(self.count))]
        expected = [self.corpus.labels[int(label[0])] for _, label in items]
        said = [names[int(number)] for number in answers]
        texts = [self.tok.decode(text) for text, _ in items[:SHOWN]]
        return self._report(total, _label_figures(total, said, expected), list(map(Example, texts, expected, said)))

    def _tagged(self, samples: TokenClassificationDataset) -> Report:
        total, names, answers = self._choices(samples)
        expected: list[str] = []
        said: list[str] = []
        examples: list[Example] = []
        for item, answer in zip(samples.items(range(self.count)), answers, strict=True):
            ids, tags = (part[: samples.max_len - 2] for part in self.corpus.item(item))
            asked = np.flatnonzero(tags)
            right = [self.corpus.labels[number - 1] for number in tags[asked].tolist()]
            given = [names[number] for number in answer[asked + 1].tolist()]  # after the token that starts a row
            expected += right
            said += given
            if len(examples) < SHOWN:
                words = [self.tok.decode(word).strip() for word in np.split(ids, asked)[1:]]
                wanted, named = (" ".join(map("/".join, zip(words, one, strict=True))) for one in (right, given))
                examples.append(Example(self.tok.decode(ids), wanted, named))
        return self._report(total, _label_figures(total, said, expected), examples)

    def _choices(
        self, samples: ClassificationDataset | TokenClassificationDataset
    ) -> tuple[MetricSums, Sequence[str], list[Tensor]]:
        """Measure, and return also the names of the model's labels and, for each sample, the numbers it chose."""
        names, numbers = _match_labels(self.model, self.corpus)
        answers: list[Tensor] = []
        hook = self.model.register_forward_hook(lambda *run: answers.extend(run[-1].argmax(-1).cpu()))
        try:
            total = self._measure(_Renumbered(samples, numbers))
        finally:
            hook.remove()
        return total, names, answers

    def _answered(self, samples: Seq2SeqDataset | ChatDataset) -> Report:
        if self.written:
            check_model(self.model)  # one that cannot write had better say so before it is measured
        total = self._measure(samples)
        items = [self.corpus.item(item) for item in sorted(samples.items(range(self.written)))]
        if isinstance(samples, Seq2SeqDataset):
            turns = [(samples.source(source.tolist()), target.tolist()) for source, target in items]
        else:
            turns = [_last_answer(*item) for item in items]
            turns = [turn for turn in turns if 0 < len(turn[0]) <= self.room]
        # An answer twice as long as the longest is wrong, however it goes on.
        limit = min(self.length, 2 * max((len(wanted) for _, wanted in turns), default=0) + 1)
        examples = self._write(turns, limit, end=samples.end, roles=isinstance(samples, ChatDataset))
        figures = total.metrics()
        scores: dict[str, Score] = {}
        if examples:
            said, expected = [one.prediction for one in examples], [one.reference for one in examples]
            figures["exact_match"] = exact_match(said, expected)
            if isinstance(samples, Seq2SeqDataset) and importlib.util.find_spec("sacrebleu") is not None:
                scores = {"bleu": bleu(said, expected), "chrf": chrf(said, expected)}
        figures |= {name: score.value for name, score in scores.items()}
        signatures = {name: score.signature for name, score in scores.items()}
        return replace(self._report(total, figures, examples), n_generated=len(examples), signatures=signatures)

    def _report(self, total: MetricSums, figures: dict[str, float], examples: list[Example]) -> Report:
        return Report(self.corpus.kind, figures, total.n_targets, examples)

    def _measure(self, samples: Dataset, sizes: Tensor | None = None) -> MetricSums:
        done = 0

        def before() -> None:
            nonlocal done
            self.progress("measuring", done, self.count)
            done += self.rows

        total = evaluate_samples(self.model, samples, self.rows, limit=self.count, token_bytes=sizes, on_batch=before)
        self.progress("measuring", self.count, self.count)
        return total

    def _write(self, turns: Sequence[Turn], limit: int, *, end: int, roles: bool = False) -> list[Example]:
        """Let the model write up to `limit` tokens; `roles` shows the special tokens that say who speaks."""
        if not turns:
            return []
        ends = {wanted[-1] for _, wanted in turns if wanted} & self.tok.special_ids | {end}
        done, total = 0, limit * len(turns)

        def on_tokens(new: int) -> None:
            nonlocal done
            done += new
            self.progress("writing", done, total)

        writer = cast("Decoder | Seq2Seq", self.model)
        reads = [read for read, _ in turns]
        options = SamplingParams(max_new_tokens=limit, beams=self.beams, stop_token_ids=tuple(sorted(ends)))
        found = generate_requests(writer, self.tok, reads, options, n=self.n, max_len=self.room, progress=on_tokens)
        self.progress("writing", total, total)
        return [
            self._example(
                self.tok.decode(read, skip_special_tokens=not roles),
                self.tok.decode(wanted, skip_special_tokens=True),
                request,
            )
            for (read, wanted), request in zip(turns, found, strict=True)
        ]

    def _example(self, read: str, expected: str, request: Request) -> Example:
        best = request.completions()
        listed = tuple((one.score, one.text) for one in best if one.score is not None) if self.n > 1 else ()
        return Example(read, expected, best[0].text, listed)


def _last_answer(ids: NDArray[np.int64], runs: NDArray[np.int64]) -> Turn:
    """Return a conversation up to the last answer, and that answer.

    >>> _last_answer(np.array([5, 6, 7, 8, 9]), np.array([1, 1, 1, 2]))
    ([5, 6, 7], [8, 9])
    """
    answer = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    stop = int(np.flatnonzero(answer)[-1]) + 1
    start = int(np.flatnonzero(~answer[:stop])[-1]) + 1 if not answer[:stop].all() else 0
    return ids[:start].tolist(), ids[start:stop].tolist()


def _label_figures(total: MetricSums, said: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    figures = {name: value for name, value in total.metrics().items() if name != "perplexity"}
    return figures | {"f1": f1(said, expected, average="macro")}


def _match_labels(model: Model, corpus: Corpus) -> tuple[Sequence[str], Tensor]:
    """Return the names of a model's labels, and the number it has for each of a corpus.

    A model without names is taken to number labels as the corpus does.
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
class _Renumbered:
    """Labelled or tagged samples, with the numbers that a model has for their labels."""

    samples: ClassificationDataset | TokenClassificationDataset
    numbers: Tensor  # by those of the corpus

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, numbers: Sequence[int]) -> Batch:
        batch = self.samples.batch(numbers)
        return replace(batch, targets=self.numbers[batch.targets])

    def origin(self, number: int) -> str:
        return self.samples.origin(number)
