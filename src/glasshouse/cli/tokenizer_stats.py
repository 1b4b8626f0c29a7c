"""How well a tokenizer fits a text, in figures: of one, or of two side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.escaping import escape_control

SHOWN = 20  # tokens in a list
BATCH = 2**22  # bytes encoded at a time
BEGINNING = 300  # characters on which two tokenizers are compared token by token


@dataclass(frozen=True)
class TokenizerStats:
    """What was counted in a text."""

    characters: int
    bytes: int
    words: int  # stretches between white space
    counts: Counter[int]  # how often each id was used
    beginning: str

    @property
    def tokens(self) -> int:
        """How many ids the text has."""
        return self.counts.total()


def measure(tok: gh.Tokenizer, texts: Iterable[bytes]) -> TokenizerStats:
    """Count what a tokenizer makes of texts, which are read once as a stream."""
    encode = tok.corpus_encoder().encode
    characters = size = words = 0
    counts: Counter[int] = Counter()
    beginning: list[str] = []
    for batch in gh.text.pretokenizer.batches(texts, BATCH):
        counts.update(encode(batch)[0].tolist())
        for text in map(bytes.decode, batch):
            characters += len(text)
            words += len(text.split())
            if sum(map(len, beginning)) < BEGINNING:
                beginning.append(text[:BEGINNING])
        size += sum(map(len, batch))
    return TokenizerStats(characters, size, words, counts, "\n".join(beginning)[:BEGINNING])


def draw(toks: Sequence[gh.Tokenizer], names: Sequence[str], measured: Sequence[TokenizerStats]) -> None:
    """Print the figures of each tokenizer in a column of its own, then its most telling tokens."""
    columns = [dict(_figures(tok, figures)) for tok, figures in zip(toks, measured, strict=True)]
    rows = [(key, *(column[key] for column in columns)) for key in columns[0]]
    screen.table(rows, header=("", *map(escape_control, names)) if len(names) > 1 else ())
    for name, tok, figures in zip(names, toks, measured, strict=True):
        print(f"\ntokens of {escape_control(name)}")
        screen.table(_tokens(tok, figures))


def _figures(tok: gh.Tokenizer, figures: TokenizerStats) -> Iterator[tuple[str, str]]:
    tokens = figures.tokens or 1
    yield "vocabulary", f"{len(tok):,}"
    yield "bytes", f"{figures.bytes:,}"
    yield "characters", f"{figures.characters:,}"
    yield "words", f"{figures.words:,}"
    yield "tokens", f"{figures.tokens:,}"
    yield "characters per token", f"{figures.characters / tokens:.3f}"
    yield "bytes per token", f"{figures.bytes / tokens:.3f}"
    yield "tokens per word", f"{figures.tokens / (figures.words or 1):.3f}"
    ordinary = _ordinary(tok)
    used = sum(number in figures.counts for number in ordinary)
    yield "never used", f"{1 - used / (len(ordinary) or 1):.2%} of {len(ordinary):,}"


def _tokens(tok: gh.Tokenizer, figures: TokenizerStats) -> Iterator[tuple[str, str]]:
    show = screen.speller(tok)
    ordinary = _ordinary(tok)
    unused = [number for number in ordinary if number not in figures.counts]
    yield "never used", " ".join(map(show, unused[:SHOWN])) or "-"
    most = sorted(figures.counts, key=lambda number: (-figures.counts[number], number))[:SHOWN]
    yield "most used", " ".join(f"{figures.counts[number]:,}x{show(number)}" for number in most)
    longest = sorted(ordinary, key=lambda number: (-len(tok.decode_bytes([number])), number))[:SHOWN]
    yield "longest", " ".join(map(show, longest))


def _ordinary(tok: gh.Tokenizer) -> list[int]:
    """Return the ids that a text can have: no text makes a special token, so it is no news that none was used."""
    return sorted(set(tok.ids) - tok.special_ids)


def draw_beginning(toks: Sequence[gh.Tokenizer], names: Sequence[str], text: str) -> None:
    """Print what each tokenizer makes of a text, one above the other: line by line where colours mark the borders."""
    drawn = [screen.alternate(map(screen.speller(tok), tok.encode(text, add_special_tokens=False))) for tok in toks]
    there = screen.console()
    if not all(isinstance(one, Text) for one in drawn):
        for name, one in zip(names, drawn, strict=True):
            print(f"{name}: {one}")
        return
    lines = [one.wrap(there, there.width) for one in drawn if isinstance(one, Text)]
    for both in zip_longest(*lines, fillvalue=Text()):
        for line in both:
            there.print(line)
        there.print()
