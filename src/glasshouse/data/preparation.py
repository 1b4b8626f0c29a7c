"""Text to ids on disk: any source, any kind of item, in batches on all cores; one that was stopped goes on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse.data.corpus import FORMAT, TOKENIZER, Corpus, Kind, is_source
from glasshouse.data.dataset_reader import DatasetReader, open_reader
from glasshouse.data.encoding import end_id, make_encoder, start_id
from glasshouse.data.shards import PROGRESS, SHARD_TOKENS, ShardWriter, write_errors
from glasshouse.errors import StoreError
from glasshouse.text import Tokenizer
from glasshouse.text.prefetch import prefetch_map
from glasshouse.text.sources import MAX_CHUNK_BYTES, Chunk, Errors, Record
from glasshouse.text.tokenizer_training import ProgressCallback, no_progress

BATCH_BYTES = 2**24  # bytes encoded at a time
BATCH_RECORDS = 2**14  # records encoded at a time
CUT_CONTEXT_BYTES = 256  # bytes on both sides of a cut that show whether it changes ids


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
    shard_tokens: int = SHARD_TOKENS,
    progress: ProgressCallback = no_progress,
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
    feed = open_reader(source, kind=kind, fields=fields, split=split, separator=separator, errors=errors)
    job = {
        "kind": feed.kind,
        "tokenizer": tokenizer.fingerprint,
        "start": start_id(tokenizer),
        "end": end_id(tokenizer),
        "template": tokenizer.chat_template if feed.kind == "chat" else None,
        "sources": feed.fingerprint,
        "labels": list(feed.labels),
        "fields": list(fields),
        "separator": separator,
        "errors": errors,
        "shard": shard_tokens,
    }
    folder = Path(folder)
    small = max(len(tokenizer), len(feed.labels) + 1) <= 2**16  # tags are counted from 1
    with ShardWriter(folder, job, np.uint16 if small else np.uint32, shard_tokens) as writer:
        if not writer.complete:
            with write_errors(folder):
                tokenizer.save(folder / TOKENIZER)
            _write(feed, tokenizer, writer, progress)
    return Corpus.open(
        folder, tokenizer=tokenizer, verify=writer.complete
    )  # what was just written needs no second look


def _write(feed: DatasetReader, tokenizer: Tokenizer, writer: ShardWriter, progress: ProgressCallback) -> None:
    place, inside = [0, 0], False
    known: list[dict[str, Any]] = [{"items": 0} for _ in feed.file_names]
    match writer.state:
        case {"place": [int(source), int(number)], "inside": bool(inside), "sources": list(known)} if (
            0 <= source < len(feed.file_names) == len(known) and number >= 0 and all(map(is_source, known))
        ):
            place = [source, number]
        case _ if writer.shards:  # to start again would add to them
            raise StoreError(
                f"{str(writer.folder / PROGRESS)!r} is damaged; delete the folder and prepare the text again."
            )
    found = [{"name": name, **one} for name, one in zip(feed.file_names, known, strict=True)]
    done = feed.size_before((place[0], place[1]))

    def on_bytes(number: int) -> None:
        nonlocal done
        done += number
        progress("tokenizing", done, feed.size)

    def on_hash(number: int, size: int, sha256: str) -> None:
        found[number] |= {"bytes": size, "sha256": sha256}

    def now() -> dict[str, Any]:
        return {"place": place, "inside": inside, "sources": found}

    bulk = tokenizer.corpus_encoder()
    encode = make_encoder(feed, tokenizer, bulk, writer.dtype, inside)
    stream = feed.read((place[0], place[1]), on_bytes, on_hash)
    for batch, (ids, ends) in prefetch_map(encode, _batches(_rejoin_chunks(stream, tokenizer, feed.file_names))):
        for entry in batch:
            found[entry.source]["items"] += entry.ends_document if isinstance(entry, Chunk) else 1
        last = batch[-1]
        place, inside = [last.source, last.number + 1], isinstance(last, Chunk) and not last.ends_document
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
        "engine": "tokenizers, turn by turn" if feed.kind == "chat" else bulk.backend,
        "sources": found,
        "fields": list(feed.fields),
    }
    writer.finish(now(), about)


def _rejoin_chunks(
    stream: Iterator[Chunk | Record], tokenizer: Tokenizer, names: tuple[str, ...]
) -> Iterator[Chunk | Record]:
    """Put pieces of a document together again where the tokenizer would not have split it, up to `LONGEST` bytes."""
    held: Chunk | None = None
    for entry in stream:
        if held is not None and isinstance(entry, Chunk):
            sides = (
                held.text[-CUT_CONTEXT_BYTES:].decode(errors="ignore"),
                entry.text[:CUT_CONTEXT_BYTES].decode(errors="ignore"),
            )
            apart = [number for side in sides for number in tokenizer.encode(side, add_special_tokens=False)]
            if tokenizer.encode("".join(sides), add_special_tokens=False) == apart:
                yield held
            elif len(held.text) + len(entry.text) > MAX_CHUNK_BYTES:
                warnings.warn(
                    f"a text in {names[entry.file_index]!r} is longer than the {MAX_CHUNK_BYTES} bytes that are encoded as one: "
                    "tokens where it was cut may differ from those of the whole; divide it by a separator.",
                    stacklevel=2,
                )
                yield held
            else:
                entry = Chunk(held.text + entry.text, entry.file_index, entry.index, entry.ends_document)
            held = None
        if isinstance(entry, Chunk) and not entry.ends_document:
            held = entry
        else:
            yield entry


def _batches(stream: Iterator[Chunk | Record]) -> Iterator[list[Any]]:
    batch: list[Chunk | Record] = []
    size = 0
    for entry in stream:
        batch.append(entry)
        size += (
            len(entry.text) if isinstance(entry, Chunk) else max(BATCH_BYTES // BATCH_RECORDS, _length(entry.values))
        )
        if size >= BATCH_BYTES:
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
