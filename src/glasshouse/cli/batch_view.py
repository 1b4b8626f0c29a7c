"""A batch as the model meets it: its rows token by token, and which of them it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from rich.text import Text

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.escaping import DOCUMENT_BREAK, NEWLINE, REPLACED_MARK, escape_control

READ = "dim"
ASKED = ("green", "bright_green")  # two shades, so that tokens can be told apart
ASKED_FOR = {"labelled": "the label the model is asked for", "tagged": "a token and the tag it is asked for"}
HIDDEN, CHANGED = "black on yellow", "black on red"


@dataclass(frozen=True)
class Token:
    """A token as it is shown: whether it carries loss, what stood in its place, whether it starts a new document."""

    text: str
    asked: bool = False
    was: str = ""  # where the model is shown another token than the one it is asked for
    hidden: bool = False  # it is shown the mask
    starts: bool = False


Line = tuple[str, list[Token], int]  # what it is, its tokens, and how much padding follows


def lines(batch: gh.data.Batch, row: int, corpus: gh.data.Corpus, masked: bool) -> Iterator[Line]:
    """Yield what is read and asked for in a row of a batch."""
    show = screen.speller(corpus.tokenizer)
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
        yield "label", [Token(escape_control(corpus.labels[int(batch.targets[row])]), asked=True)], 0
        return
    targets, loss = batch.targets[row].tolist(), batch.loss_mask[row].tolist()
    if masked:
        mask = corpus.tokenizer.special_id("mask")
        yield (
            "tokens",
            [
                Token(show(number), asked, show(target) if number != target else "", number == mask, new)
                for number, target, asked, new in zip(ids, targets, loss, starts, strict=True)
            ],
            0,
        )
        return
    if corpus.kind == "tagged":
        tagged = zip(map(show, ids), (escape_control(corpus.labels[target]) for target in targets), loss, strict=True)
        words = (Token(f"{text}/{tag}", asked=True) if asked else Token(text) for text, tag, asked in tagged)
        yield "words", list(islice(words, length)), width - length
        return
    # What is asked for is the token after: so the first is only read, and the last only asked for.
    after = zip(targets, loss, [*starts[1:], False], strict=True)
    tokens = [Token(show(number), asked, starts=new) for number, asked, new in islice(after, length)]
    name = "tokens" if batch.source is None else "target"
    yield name, [Token(show(ids[0])), *tokens], width - length


def legend(kind: str, masked: bool) -> str | Text:
    """Say what the marks, or the colours, mean."""
    asked = ASKED_FOR.get(kind, "a token the model is asked for")
    if not screen.in_colour():
        marks = [f"[x/y] {asked}" if kind == "tagged" else f"[x] {asked}"]
        if masked:
            marks.append(f"[x{REPLACED_MARK}y] it reads x and is asked for y")
        if kind == "text":
            marks.append(f"{DOCUMENT_BREAK} another text begins, which does not see the one before")
        return "; ".join(marks)
    text = Text.assemble((asked, ASKED[0]), "  ", ("one that is only read", READ))
    if masked:
        text.append("  ").append("masked", HIDDEN).append(" or ").append("changed", CHANGED).append(" (asked for)")
    if kind == "text":
        text.append(f"  {DOCUMENT_BREAK} another text begins")
    return text


def plain(line: Line) -> str:
    r"""Return a line without colours: tokens between spaces, those that carry loss in brackets.

    >>> plain(("tokens", [Token("to"), Token("[be]"), Token("or", asked=True), Token("[", asked=True)], 2))
    'tokens (2 padding): to \\[be] [or] [[]'
    """
    name, tokens, padding = line
    words = []
    for token in tokens:
        if token.starts:
            words.append(DOCUMENT_BREAK)
        if token.asked:
            words.append(f"[{token.text}{REPLACED_MARK}{token.was}]" if token.was else f"[{token.text}]")
        else:
            words.append(f"\\{token.text}" if token.text.startswith("[") else token.text)
    return f"{name}{f' ({padding} padding)' if padding else ''}: {' '.join(words)}"


def coloured(line: Line) -> Text:
    """Return a line in colours, with a new line after each newline sign."""
    name, tokens, padding = line
    text = Text(overflow="fold").append(name, "bold").append(f" ({padding} padding): " if padding else ": ")
    for number, token in enumerate(tokens):
        if token.starts:
            text.append(f"\n{DOCUMENT_BREAK}\n", "bold magenta")
        style = ASKED[number % 2] if token.asked else READ
        if token.was:
            style = HIDDEN if token.hidden else CHANGED
        text.append(token.text.replace(NEWLINE, f"{NEWLINE}\n"), style)
        if token.was:
            text.append(f"({token.was})", ASKED[0])
    return text


def summary(batch: gh.data.Batch) -> str:
    """Return how many tokens a batch has, how many carry loss, and how much of it is padding."""
    cells = tokens = 0
    for ids, lengths in ((batch.ids, batch.lengths), (batch.source, batch.source_lengths)):
        if ids is not None:
            cells += ids.numel()
            tokens += ids.numel() if lengths is None else int(lengths.sum())
    asked = int(batch.loss_mask.sum())
    carried = f"{asked:,} labels" if batch.targets.ndim == 1 else f"{asked / tokens:.1%}"
    return f"{tokens:,} tokens, {carried} carry loss, {1 - tokens / cells:.1%} padding"


def draw(lines_: Iterable[Line], write: Callable[[Text], None]) -> None:
    """Print the lines of a row, in colours where there are any."""
    for line in lines_:
        if screen.in_colour():
            write(coloured(line))
        else:
            print(f"  {plain(line)}")
