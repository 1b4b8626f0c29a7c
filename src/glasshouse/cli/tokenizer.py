"""Commands for tokenizers: learn one, use one, and look into one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

import glasshouse as gh
from glasshouse.cli import merges, screen, texts, tokenizer_stats
from glasshouse.escaping import escape_control, show_whitespace

app = typer.Typer(help="Learn a tokenizer, use one, look into one.", no_args_is_help=True)

TokenizerArgument = Annotated[
    str, typer.Argument(metavar="TOKENIZER", help="A folder that holds a tokenizer.json, such as a model's.")
]
Pattern = Annotated[Literal["gpt2", "gpt4"], typer.Option(help="How text is split into words before merging.")]

START = 10**6  # bytes of the training text on which a new tokenizer is measured
MEASURED = 10**7  # bytes of a text on which one is measured unless all is asked for
WATCHED = 5 * 10**6  # bytes of a text that learning is watched on


@app.command(epilog="Example: glasshouse tokenizer train 'books/**/*.txt' --vocab-size 16384 --out runs/tok")
def train(
    paths: texts.Paths,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary, with bytes and special tokens.")] = 8192,
    pattern: Pattern = "gpt2",
    field: texts.Field = "text",
    errors: texts.Errors = "strict",
    max_words: Annotated[
        int, typer.Option(help="Distinct words held in memory; beyond that the rarest are left out.")
    ] = 750_000,
) -> None:
    """Learn a byte-level BPE from text, and say how many characters its tokens stand for."""
    start: list[bytes] = []
    with screen.progress(merging="tokens", **texts.units(paths)) as progress:
        stream = texts.read(paths, field, errors, progress)
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
    """Pass texts on and keep the start of them: a pipe cannot be read twice."""
    wanted = START
    for text in stream:
        if wanted > 0:
            start += gh.text.pretokenizer.take_bytes([text], wanted)
            wanted -= len(text)
        yield text


@app.command(epilog="Example: glasshouse tokenizer encode runs/tok 'to be or not to be'")
def encode(
    tokenizer: TokenizerArgument,
    text: Annotated[str | None, typer.Argument(help="The text; stdin, where neither it nor --file is given.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file to encode, as it is.")] = None,
    trusted: Annotated[bool, typer.Option("--trusted", help="Take special tokens in the text for tokens.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the ids alone, as off a terminal.")] = False,
) -> None:
    """Turn text into ids: tokens in colours at a terminal, else one line of ids for `decode` and scripts."""
    if text is not None and file is not None:
        raise gh.InputError("a text and --file were both given; give one of them.")
    tok = gh.Tokenizer.load(tokenizer)
    data = os.fsencode(text) if text is not None else file.read_bytes() if file else sys.stdin.buffer.read()
    numbers = tok.encode(data, parse_special_tokens=trusted)
    if ids or not sys.stdout.isatty():
        print(*numbers)
        return
    there = screen.console()
    there.print(screen.alternate(map(screen.speller(tok), numbers)))
    there.print(f"ids: {' '.join(map(str, numbers))}")
    characters = len(data.decode(errors="replace"))
    share = f", {characters / len(numbers):.2f} characters per token" if numbers else ""
    there.print(f"{len(numbers):,} tokens, {characters:,} characters, {len(data):,} bytes{share}")


@app.command(epilog="Example: glasshouse tokenizer encode runs/tok < in.txt | glasshouse tokenizer decode runs/tok")
def decode(
    tokenizer: TokenizerArgument,
    ids: Annotated[list[str] | None, typer.Argument(help="The ids; stdin, where none are given.")] = None,
) -> None:
    """Write the bytes that ids stand for, and nothing else."""
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
    text: Annotated[str | None, typer.Option(help="A file, folder, pattern or built-in set to measure on.")] = None,
    compare: Annotated[str | None, typer.Option(help="Another tokenizer's folder, measured on the text too.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Measure on all of the text, not the first 10 MB.")
    ] = False,
    field: texts.Field = "text",
    errors: texts.Errors = "strict",
) -> None:
    """Say what a tokenizer is, how it puts a word together, and how well it fits a text."""
    if compare is not None and text is None:
        raise gh.InputError("two tokenizers are compared on a text; give one by --text.")
    names = [tokenizer] if compare is None else [tokenizer, compare]
    toks = [gh.Tokenizer.load(name) for name in names]
    # All that can fail comes before anything is printed.
    split = [] if word is None else toks[0].pretokenize(word)
    measured = []
    if text is not None:
        for tok in toks:
            with screen.progress(**texts.units([text])) as progress:
                stream: Iterable[bytes] = texts.read([text], field, errors, progress)
                if not everything:
                    stream = gh.text.pretokenizer.take_bytes(stream, MEASURED)
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
            ("for corpora", tok.corpus_encoder().backend),
            *(
                ("special", f"{number} {show_whitespace(tok.id_to_token(number))} {' '.join(roles[number])}")
                for number in sorted(tok.special_ids)
            ),
        ]
    )


@app.command(epilog="Example: glasshouse tokenizer watch books --merges 50 --sample 'the theatre'")
def watch(
    paths: texts.Paths,
    merges_: Annotated[int, typer.Option("--merges", min=1, help="Merges to learn.")] = 20,
    rivals: Annotated[int, typer.Option(min=0, help="Pairs to name that came next.")] = 3,
    pattern: Pattern = "gpt2",
    sample: Annotated[
        str | None, typer.Option(help="A text to merge along.", show_default="the first 60 characters")
    ] = None,
    field: texts.Field = "text",
    errors: texts.Errors = "strict",
) -> None:
    """Watch byte-pair encoding learn from the first 5 MB of a text: each merge, what came next, what it does."""
    with screen.progress(**texts.units(paths)) as progress:
        start = gh.text.pretokenizer.take_bytes(texts.read(paths, field, errors, progress), WATCHED)
    merges.draw_learning(start, merges_, rivals, pattern, sample)
