"""Statistics of a tokenizer on a text, for one tokenizer or two side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from rich.text import Text

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.escaping import escape_control

SHOWN = 20  # tokens per list
BATCH = 2**22  # bytes encoded at a time
BEGINNING = 300  # characters on which two tokenizers are compared token by token


@dataclass(frozen=True)
class TokenizerStats:
    """Counts of a tokenized text."""

    characters: int
    bytes: int
    words: int  # separated by white space
    counts: Counter[int]  # occurrences of each id
    beginning: str

    @property
    def tokens(self) -> int:
        """Number of ids of the text."""
        return self.counts.total()


def measure(tok: gh.Tokenizer, texts: Iterable[bytes]) -> TokenizerStats:
    """Tokenize texts, which are streamed once, and count."""
    encode = tok.corpus_encoder().encode
    characters = size = words = 0
    counts: Counter[int] = Counter()
    beginning: list[str] = []
    for batch in gh.text.bpe.pretokenizer.batches(texts, BATCH):
        counts.update(encode(batch)[0].tolist())
        for text in map(bytes.decode, batch):
            characters += len(text)
            words += len(text.split())
            if sum(map(len, beginning)) < BEGINNING:
                beginning.append(text[:BEGINNING])
        size += sum(map(len, batch))
    return TokenizerStats(characters, size, words, counts, "\n".join(beginning)[:BEGINNING])


def draw(toks: Sequence[gh.Tokenizer], names: Sequence[str], measured: Sequence[TokenizerStats]) -> None:
    """Print the statistics of each tokenizer in a column, then lists of its tokens."""
    columns = [dict(_rows(tok, stats)) for tok, stats in zip(toks, measured, strict=True)]
    rows = [(key, *(column[key] for column in columns)) for key in columns[0]]
    screen.table(rows, header=("", *map(escape_control, names)) if len(names) > 1 else ())
    for name, tok, stats in zip(names, toks, measured, strict=True):
        print(f"\ntokens of {escape_control(name)}")
        screen.table(_tokens(tok, stats))


def _rows(tok: gh.Tokenizer, stats: TokenizerStats) -> Iterator[tuple[str, str]]:
    tokens = stats.tokens or 1
    yield "vocabulary", f"{len(tok):,}"
    yield "bytes", f"{stats.bytes:,}"
    yield "characters", f"{stats.characters:,}"
    yield "words", f"{stats.words:,}"
    yield "tokens", f"{stats.tokens:,}"
    yield "characters per token", f"{stats.characters / tokens:.3f}"
    yield "bytes per token", f"{stats.bytes / tokens:.3f}"
    yield "tokens per word", f"{stats.tokens / (stats.words or 1):.3f}"
    ordinary = _ordinary(tok)
    used = sum(number in stats.counts for number in ordinary)
    yield "never used", f"{1 - used / (len(ordinary) or 1):.2%} of {len(ordinary):,}"


def _tokens(tok: gh.Tokenizer, stats: TokenizerStats) -> Iterator[tuple[str, str]]:
    show = partial(gh.text.visible_token, tok)
    ordinary = _ordinary(tok)
    unused = [number for number in ordinary if number not in stats.counts]
    yield "never used", " ".join(map(show, unused[:SHOWN])) or "-"
    most = sorted(stats.counts, key=lambda number: (-stats.counts[number], number))[:SHOWN]
    yield "most used", " ".join(f"{stats.counts[number]:,}x{show(number)}" for number in most)
    longest = sorted(ordinary, key=lambda number: (-len(tok.decode_bytes([number])), number))[:SHOWN]
    yield "longest", " ".join(map(show, longest))


def _ordinary(tok: gh.Tokenizer) -> list[int]:
    """Return the ids without special tokens, which text never produces."""
    return sorted(set(tok.ids) - tok.special_ids)


def draw_beginning(toks: Sequence[gh.Tokenizer], names: Sequence[str], text: str) -> None:
    """Print the tokens of a text by each tokenizer, one above the other; line by line in colour."""
    drawn = [
        screen.alternate(map(partial(gh.text.visible_token, tok), tok.encode(text, add_special_tokens=False)))
        for tok in toks
    ]
    console = screen.console()
    if not all(isinstance(one, Text) for one in drawn):
        for name, one in zip(names, drawn, strict=True):
            print(f"{name}: {one}")
        return
    lines = [one.wrap(console, console.width) for one in drawn if isinstance(one, Text)]
    for both in zip_longest(*lines, fillvalue=Text()):
        for line in both:
            console.print(line)
        console.print()
