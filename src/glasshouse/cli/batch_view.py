"""Prints a batch: its sequences token by token, and which tokens are in the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

from rich.text import Text

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.escaping import DOCUMENT_BREAK, NEWLINE, REPLACED_MARK, escape_control

CONTEXT = "dim"
TARGET = ("green", "bright_green")  # two shades, to tell adjacent tokens apart
TARGETS = {"labelled": "label in the loss", "tagged": "token and its tag in the loss"}
MASKED, RANDOM = "black on yellow", "black on red"


@dataclass(frozen=True)
class Token:
    """A token to print."""

    text: str
    in_loss: bool = False
    original: str = ""  # the target, if the input was replaced
    masked: bool = False  # the input is the mask token
    starts: bool = False  # it starts a document


Line = tuple[str, list[Token], int]  # name, tokens, and the amount of padding


def lines(batch: gh.data.Batch, row: int, corpus: gh.data.Corpus, masked: bool) -> Iterator[Line]:
    """Yield the inputs and targets of one sequence of a batch."""
    show = partial(gh.text.visible_token, corpus.tokenizer)
    if isinstance(batch, gh.data.PreferenceBatch):
        yield from _answers(batch, row, show)
        return
    ids, width = batch.ids[row].tolist(), batch.ids.shape[1]
    length = width if batch.lengths is None else int(batch.lengths[row])
    documents = [0] * width if batch.documents is None else batch.documents[row].tolist()
    starts = [False] + [before != after for before, after in pairwise(documents)]
    if batch.source is not None and batch.source_lengths is not None:
        real = int(batch.source_lengths[row])
        source = [Token(show(number)) for number in batch.source[row, :real].tolist()]
        yield "source", source, batch.source.shape[1] - real
    if batch.targets.ndim == 1:
        yield "text", [Token(show(number)) for number in ids[:length]], width - length
        yield "label", [Token(escape_control(corpus.labels[int(batch.targets[row])]), in_loss=True)], 0
        return
    targets, loss_mask = batch.targets[row].tolist(), batch.loss_mask[row].tolist()
    if masked:
        mask = corpus.tokenizer.special_id("mask")
        yield (
            "tokens",
            [
                Token(show(number), in_loss, show(target) if number != target else "", number == mask, new)
                for number, target, in_loss, new in zip(ids, targets, loss_mask, starts, strict=True)
            ],
            0,
        )
        return
    if corpus.kind == "tagged":
        tags = (escape_control(corpus.labels[target]) for target in targets)
        tagged = zip(map(show, ids), tags, loss_mask, strict=True)
        words = (Token(f"{text}/{tag}", in_loss=True) if in_loss else Token(text) for text, tag, in_loss in tagged)
        yield "words", list(islice(words, length)), width - length
        return
    # The target is the next token: so the first is only an input, and the last only a target.
    after = zip(targets, loss_mask, [*starts[1:], False], strict=True)
    tokens = [Token(show(number), in_loss, starts=new) for number, in_loss, new in islice(after, length)]
    name = "tokens" if batch.source is None else "target"
    yield name, [Token(show(ids[0])), *tokens], width - length


def _answers(batch: gh.data.PreferenceBatch, pair: int, show: Callable[[int], str]) -> Iterator[Line]:
    """Yield the prompt with its chosen and with its rejected answer."""
    assert batch.lengths is not None
    for row, name in enumerate(("chosen", "rejected"), 2 * pair):
        length, ids = int(batch.lengths[row]), batch.ids[row].tolist()
        after = zip(batch.answers[row].tolist(), batch.answer_mask[row].tolist(), strict=True)
        tokens = [Token(show(number), in_loss) for number, in_loss in islice(after, length)]
        yield name, [Token(show(ids[0])), *tokens], len(ids) - length


def legend(kind: str, masked: bool) -> str | Text:
    """Explain the marks, or the colours."""
    target = TARGETS.get(kind, "token in the loss")
    if not screen.in_colour():
        marks = [f"[x/y] {target}" if kind == "tagged" else f"[x] {target}"]
        if masked:
            marks.append(f"[x{REPLACED_MARK}y] input x, target y")
        if kind == "text":
            marks.append(f"{DOCUMENT_BREAK} next document, which does not attend to the one before")
        return "; ".join(marks)
    text = Text.assemble((target, TARGET[0]), "  ", ("not in the loss", CONTEXT))
    if masked:
        text.append("  ").append("masked", MASKED).append(" or ").append("random token", RANDOM).append(" (target)")
    if kind == "text":
        text.append(f"  {DOCUMENT_BREAK} next document")
    return text


def plain(line: Line) -> str:
    r"""Return a line without colours: tokens separated by spaces, those in the loss in brackets.

    >>> plain(("tokens", [Token("to"), Token("[be]"), Token("or", in_loss=True), Token("[", in_loss=True)], 2))
    'tokens (2 padding): to \\[be] [or] [[]'
    """
    name, tokens, padding = line
    words = []
    for token in tokens:
        if token.starts:
            words.append(DOCUMENT_BREAK)
        if token.in_loss:
            words.append(f"[{token.text}{REPLACED_MARK}{token.original}]" if token.original else f"[{token.text}]")
        else:
            words.append(f"\\{token.text}" if token.text.startswith("[") else token.text)
    return f"{name}{f' ({padding} padding)' if padding else ''}: {' '.join(words)}"


def coloured(line: Line) -> Text:
    """Return a line in colours, with a line break after each newline sign."""
    name, tokens, padding = line
    text = Text(overflow="fold").append(name, "bold").append(f" ({padding} padding): " if padding else ": ")
    for number, token in enumerate(tokens):
        if token.starts:
            text.append(f"\n{DOCUMENT_BREAK}\n", "bold magenta")
        style = TARGET[number % 2] if token.in_loss else CONTEXT
        if token.original:
            style = MASKED if token.masked else RANDOM
        text.append(token.text.replace(NEWLINE, f"{NEWLINE}\n"), style)
        if token.original:
            text.append(f"({token.original})", TARGET[0])
    return text


def summary(batch: gh.data.Batch) -> str:
    """Return the number of tokens of a batch, the share in the loss, and the share of padding."""
    cells = tokens = 0
    for ids, lengths in ((batch.ids, batch.lengths), (batch.source, batch.source_lengths)):
        if ids is not None:
            cells += ids.numel()
            tokens += ids.numel() if lengths is None else int(lengths.sum())
    targets = int(batch.loss_mask.sum())
    noun = "pairs" if isinstance(batch, gh.data.PreferenceBatch) else "labels"
    in_loss = f"{targets:,} {noun}" if batch.targets.ndim == 1 else f"{targets / tokens:.1%}"
    return f"{tokens:,} tokens, {in_loss} in the loss, {1 - tokens / cells:.1%} padding"


def draw(lines_: Iterable[Line], write: Callable[[Text], None]) -> None:
    """Print the lines of a sequence, in colours if the terminal has them."""
    for line in lines_:
        if screen.in_colour():
            write(coloured(line))
        else:
            print(f"  {plain(line)}")
