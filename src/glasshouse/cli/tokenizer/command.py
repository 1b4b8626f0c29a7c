"""`glasshouse tokenizer`: train, use and inspect tokenizers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts
from glasshouse.cli.tokenizer import merges
from glasshouse.cli.tokenizer import stats as tokenizer_stats
from glasshouse.escaping import escape_control, show_whitespace

app = typer.Typer(help="Train, use and inspect tokenizers.", no_args_is_help=True)

TokenizerArgument = Annotated[
    str, typer.Argument(metavar="TOKENIZER", help="A folder with a tokenizer.json, such as a model's.")
]
Pattern = Annotated[
    Literal["gpt2", "gpt4"], typer.Option(help="Pre-tokenization: how text is split into words before BPE.")
]

START = 10**6  # bytes of the training text for the statistics of a new tokenizer
MEASURED = 10**7  # bytes of a text for statistics, without --all
WATCHED = 5 * 10**6  # bytes of a text for `watch`


@app.command(epilog="Example: glasshouse tokenizer train 'books/**/*.txt' --vocab-size 16384 --out runs/tok")
def train(
    paths: texts.Paths,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    vocab_size: Annotated[
        int, typer.Option(help="Tokens in the vocabulary, bytes and special tokens included.")
    ] = 8192,
    pattern: Pattern = "gpt2",
    column: texts.Column = "text",
    errors: texts.Errors = "strict",
    max_words: Annotated[
        int, typer.Option(help="Distinct words kept in memory; beyond that the rarest are dropped.")
    ] = 750_000,
) -> None:
    """Train a byte-level BPE tokenizer, and print its compression in characters per token."""
    start: list[bytes] = []
    with screen.progress(merging="tokens", **texts.units(paths)) as progress:
        stream = texts.read(paths, column, errors, progress)
        tok = gh.Tokenizer.train(
            texts=_keeping(stream, start),
            vocab_size=vocab_size,
            pattern=pattern,
            max_words=max_words,
            progress=progress,
        )
    tok.save(out)
    found = tokenizer_stats.measure(tok, start)
    screen.table(
        [
            ("folder", escape_control(str(out))),
            ("vocabulary", f"{len(tok):,} tokens"),
            ("characters per token", f"{found.characters / found.tokens:.3f} (on the first {found.bytes:,} bytes)"),
        ]
    )


def _keeping(stream: Iterable[bytes], start: list[bytes]) -> Iterator[bytes]:
    """Pass texts on and keep their start: a pipe cannot be read twice."""
    left = START
    for text in stream:
        if left > 0:
            start += gh.text.bpe.pretokenizer.take_bytes([text], left)
            left -= len(text)
        yield text


@app.command(epilog="Example: glasshouse tokenizer encode runs/tok 'to be or not to be'")
def encode(
    tokenizer: TokenizerArgument,
    text: Annotated[str | None, typer.Argument(help="The text; stdin if neither it nor --file is given.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file to encode.")] = None,
    allow_special: Annotated[
        bool, typer.Option("--allow-special", help="Parse special tokens in the text; only for trusted text.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, also on a terminal.")] = False,
) -> None:
    """Encode text: coloured tokens on a terminal, else one line of ids for `decode` and scripts."""
    if text is not None and file is not None:
        raise gh.InputError("a text and --file were both given; give one of them.")
    tok = gh.Tokenizer.load(tokenizer)
    data = os.fsencode(text) if text is not None else file.read_bytes() if file else sys.stdin.buffer.read()
    numbers = tok.encode(data, parse_special_tokens=allow_special)
    if ids or not sys.stdout.isatty():
        print(*numbers)
        return
    console = screen.console()
    console.print(screen.alternate(map(partial(gh.text.visible_token, tok), numbers)))
    console.print(f"ids: {' '.join(map(str, numbers))}")
    characters = len(data.decode(errors="replace"))
    ratio = f", {characters / len(numbers):.2f} characters per token" if numbers else ""
    console.print(f"{len(numbers):,} tokens, {characters:,} characters, {len(data):,} bytes{ratio}")


@app.command(epilog="Example: glasshouse tokenizer encode runs/tok < in.txt | glasshouse tokenizer decode runs/tok")
def decode(
    tokenizer: TokenizerArgument,
    ids: Annotated[list[str] | None, typer.Argument(help="The ids; stdin if none are given.")] = None,
) -> None:
    """Decode ids to bytes on stdout."""
    tok = gh.Tokenizer.load(tokenizer)
    words = ids or sys.stdin.buffer.read().decode(errors="replace").split()
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 20):
            raise gh.InputError(f"{word!r} is not an id; give whole numbers, separated by spaces.")
    data = tok.decode_bytes(map(int, words))
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@app.command(epilog="Example: glasshouse tokenizer show runs/tok --word unbelievable --text books --compare gpt2")
def show(
    tokenizer: TokenizerArgument,
    word: Annotated[str | None, typer.Option(help="A word or text to merge step by step (byte-level BPE).")] = None,
    text: Annotated[str | None, typer.Option(help="A file, folder, glob or built-in dataset for statistics.")] = None,
    compare: Annotated[str | None, typer.Option(help="The folder of another tokenizer; needs --text.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Use all of the text, not only the first 10 MB.")] = False,
    column: texts.Column = "text",
    errors: texts.Errors = "strict",
) -> None:
    """Describe a tokenizer: its special tokens, the merges of a word, and statistics on a text."""
    if compare is not None and text is None:
        raise gh.InputError("--compare needs a text; give one with --text.")
    names = [tokenizer] if compare is None else [tokenizer, compare]
    toks = [gh.Tokenizer.load(name) for name in names]
    # Whatever can fail runs before anything is printed.
    split = [] if word is None else toks[0].pretokenize(word)
    measured = []
    if text is not None:
        for tok in toks:
            with screen.progress(**texts.units([text])) as progress:
                stream: Iterable[bytes] = texts.read([text], column, errors, progress)
                if not everything:
                    stream = gh.text.bpe.pretokenizer.take_bytes(stream, MEASURED)
                measured.append(tokenizer_stats.measure(tok, stream))
    for name, tok in zip(names, toks, strict=True):
        _describe(name, tok)
    if word is not None:
        merges.draw_word(toks[0], word, split)
    if measured:
        print()
        tokenizer_stats.draw(toks, names, measured)
    if compare is not None:
        print()
        tokenizer_stats.draw_beginning(toks, names, measured[0].beginning)


def _describe(name: str, tok: gh.Tokenizer) -> None:
    roles = {
        number: [role for role in tok.special_tokens if tok.special_id(role) == number] for number in tok.special_ids
    }
    print(f"{escape_control(name)}: {tok!r}")
    screen.table(
        [
            ("fingerprint", tok.fingerprint[:12]),
            ("corpus backend", tok.corpus_encoder().backend),
            *(
                ("special", f"{number} {show_whitespace(tok.id_to_token(number))} {' '.join(roles[number])}")
                for number in sorted(tok.special_ids)
            ),
        ]
    )


@app.command(epilog="Example: glasshouse tokenizer watch books --merges 50 --sample 'the theatre'")
def watch(
    paths: texts.Paths,
    merges_: Annotated[int, typer.Option("--merges", min=1, help="The number of merges.")] = 20,
    runners_up: Annotated[int, typer.Option(min=0, help="Next most frequent pairs to print per merge.")] = 3,
    pattern: Pattern = "gpt2",
    sample: Annotated[
        str | None, typer.Option(help="A text to apply the merges to.", show_default="the first 60 characters")
    ] = None,
    column: texts.Column = "text",
    errors: texts.Errors = "strict",
) -> None:
    """Train byte-pair encoding step by step on the first 5 MB of a text, and print each merge."""
    with screen.progress(**texts.units(paths)) as progress:
        start = gh.text.bpe.pretokenizer.take_bytes(texts.read(paths, column, errors, progress), WATCHED)
    merges.draw_training(start, merges_, runners_up, pattern, sample)
