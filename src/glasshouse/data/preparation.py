"""Text to ids on disk: any source, any kind of item, in batches on all cores; one that was stopped goes on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse.data.corpus import FORMAT, TOKENIZER, Corpus, Kind, is_source
from glasshouse.data.encoding import end_id, make_encoder, start_id
from glasshouse.data.feed import Feed, open_feed
from glasshouse.data.shards import PROGRESS, SHARD, Writer, writing
from glasshouse.errors import StoreError
from glasshouse.text import Tokenizer
from glasshouse.text.ahead import ahead
from glasshouse.text.sources import LONGEST, Errors, Piece, Record
from glasshouse.text.training import Progress, silent

BATCH = 2**24  # bytes encoded at a time
ROWS = 2**14  # records encoded at a time
SEAM = 256  # bytes on both sides of a cut that show whether it changes ids


def prepare(
    source: str | Path | Iterable[str | Path],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    kind: Kind | None = None,
    fields: str | Iterable[str] = (),
    split: str = "train",
    separator: str | None = None,
    errors: Errors = "strict",
    shard: int = SHARD,
    progress: Progress = silent,
) -> Corpus:
    r"""Encode files, folders, globs or a built-in set into a folder, and open it.

    `kind` says what an item is: "text", "pairs", "labelled", "tagged" or "chat"; `fields` names the columns of jsonl,
    csv, tsv and parquet files that hold it; without them, the names of the columns tell. A text ends with the
    tokenizer's end-of-text token. Called again after it was stopped, it goes on; called again when all is done, it
    only opens the folder.

    >>> import tempfile, glasshouse as gh
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(place, "pairs.tsv").write_text("en\tde\nyes\tja\nno\tnein\n")
    >>> tok = gh.Tokenizer.train(texts=["yes no ja nein"], vocab_size=263)
    >>> corpus = gh.data.prepare(f"{place}/pairs.tsv", tok, f"{place}/ids", kind="pairs", fields=["en", "de"])
    >>> [tok.decode(part) for part in corpus.item(1)]
    ['no', 'nein']
    """
    fields = (fields,) if isinstance(fields, str) else tuple(fields)
    feed = open_feed(source, kind=kind, fields=fields, split=split, separator=separator, errors=errors)
    job = {
        "kind": feed.kind,
        "tokenizer": tokenizer.fingerprint,
        "start": start_id(tokenizer),
        "end": end_id(tokenizer),
        "template": tokenizer.chat_template if feed.kind == "chat" else None,
        "sources": feed.stamp,
        "labels": list(feed.labels),
        "fields": list(fields),
        "separator": separator,
        "errors": errors,
        "shard": shard,
    }
    folder = Path(folder)
    small = max(len(tokenizer), len(feed.labels) + 1) <= 2**16  # tags are counted from 1
    with Writer(folder, job, np.uint16 if small else np.uint32, shard) as writer:
        if not writer.done:
            with writing(folder):
                tokenizer.save(folder / TOKENIZER)
            _write(feed, tokenizer, writer, progress)
    return Corpus.open(folder, tokenizer=tokenizer, verify=writer.done)  # what was just written needs no second look


def _write(feed: Feed, tokenizer: Tokenizer, writer: Writer, progress: Progress) -> None:
    place, inside = [0, 0], False
    known: list[dict[str, Any]] = [{"items": 0} for _ in feed.names]
    match writer.state:
        case {"place": [int(source), int(number)], "inside": bool(inside), "sources": list(known)} if (
            0 <= source < len(feed.names) == len(known) and number >= 0 and all(map(is_source, known))
        ):
            place = [source, number]
        case _ if writer.shards:  # to start again would add to them
            raise StoreError(
                f"{str(writer.folder / PROGRESS)!r} is damaged; delete the folder and prepare the text again."
            )
    found = [{"name": name, **one} for name, one in zip(feed.names, known, strict=True)]
    done = feed.passed((place[0], place[1]))

    def on_bytes(number: int) -> None:
        nonlocal done
        done += number
        progress("tokenizing", done, feed.size)

    def on_hash(number: int, size: int, sha256: str) -> None:
        found[number] |= {"bytes": size, "sha256": sha256}

    def now() -> dict[str, Any]:
        return {"place": place, "inside": inside, "sources": found}

    bulk = tokenizer.bulk()
    encode = make_encoder(feed, tokenizer, bulk, writer.dtype, inside)
    stream = feed.read((place[0], place[1]), on_bytes, on_hash)
    for batch, (ids, ends) in ahead(encode, _batches(_seamless(stream, tokenizer, feed.names))):
        for entry in batch:
            found[entry.source]["items"] += entry.ends if isinstance(entry, Piece) else 1
        last = batch[-1]
        place, inside = [last.source, last.number + 1], isinstance(last, Piece) and not last.ends
        writer.add(ids, ends, now)
    about = {
        "format": FORMAT,
        "kind": feed.kind,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": len(tokenizer),
        "start": start_id(tokenizer),
        "end": end_id(tokenizer),
        "items": sum(one["items"] for one in found),
        "labels": list(feed.labels),
        "engine": "tokenizers, turn by turn" if feed.kind == "chat" else bulk.engine,
        "sources": found,
        "fields": list(feed.fields),
    }
    writer.finish(now(), about)


def _seamless(
    stream: Iterator[Piece | Record], tokenizer: Tokenizer, names: tuple[str, ...]
) -> Iterator[Piece | Record]:
    """Put pieces of a document together again where the tokenizer would not have split it, up to `LONGEST` bytes."""
    held: Piece | None = None
    for entry in stream:
        if held is not None and isinstance(entry, Piece):
            sides = held.text[-SEAM:].decode(errors="ignore"), entry.text[:SEAM].decode(errors="ignore")
            apart = [number for side in sides for number in tokenizer.encode(side, special=False)]
            if tokenizer.encode("".join(sides), special=False) == apart:
                yield held
            elif len(held.text) + len(entry.text) > LONGEST:
                warnings.warn(
                    f"a text in {names[entry.source]!r} is longer than the {LONGEST} bytes that are encoded as one: "
                    "tokens where it was cut may differ from those of the whole; divide it by a separator.",
                    stacklevel=2,
                )
                yield held
            else:
                entry = Piece(held.text + entry.text, entry.source, entry.number, entry.ends)
            held = None
        if isinstance(entry, Piece) and not entry.ends:
            held = entry
        else:
            yield entry


def _batches(stream: Iterator[Piece | Record]) -> Iterator[list[Any]]:
    batch: list[Piece | Record] = []
    size = 0
    for entry in stream:
        batch.append(entry)
        size += len(entry.text) if isinstance(entry, Piece) else max(BATCH // ROWS, _length(entry.values))
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _length(value: object) -> int:
    """Return how many characters the texts in a value have, however deep they lie.

    >>> _length(("ab", [{"content": "cde"}, None]))
    5
    """
    length, waiting = 0, [value]
    while waiting:
        match waiting.pop():
            case str(text):
                length += len(text)
            case list(inner) | tuple(inner):
                waiting.extend(inner)
            case dict(inner):
                waiting.extend(inner.values())
    return length
