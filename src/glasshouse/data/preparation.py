"""Tokenizes a dataset to disk: any source and kind of item, on all cores; an interrupted job resumes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from glasshouse import store
from glasshouse.data.corpus import FORMAT, MANIFEST, TOKENIZER, Corpus, Kind, is_source, read_json
from glasshouse.data.dataset_reader import DatasetReader, file_name, open_reader
from glasshouse.data.encoding import end_id, make_encoder, start_id
from glasshouse.data.parts import check_part, id_dtype, part_folder, part_range
from glasshouse.data.shards import PROGRESS, SHARD_TOKENS, ShardWriter, write_errors
from glasshouse.errors import StoreError
from glasshouse.text import Tokenizer
from glasshouse.text.bpe.training import ProgressCallback, no_progress
from glasshouse.text.chat.tokens import with_chat_template
from glasshouse.text.prefetch import prefetch_map
from glasshouse.text.sources import MAX_CHUNK_BYTES, Chunk, Errors, Record, file_size
from glasshouse.text.sources.file import read_errors

TEMPLATED = ("chat", "preferences")  # kinds that a chat template encodes
BATCH_BYTES = 2**24  # bytes encoded at a time
BATCH_RECORDS = 2**14  # records encoded at a time
CUT_CONTEXT_BYTES = 256  # bytes on both sides of a chunk boundary, to check whether it changes ids


def prepare(
    source: str | Path | Iterable[str | Path],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    kind: Kind | None = None,
    columns: str | Iterable[str] = (),
    split: str = "train",
    separator: str | None = None,
    errors: Errors = "strict",
    shard_tokens: int = SHARD_TOKENS,
    part: tuple[int, int] | None = None,
    progress: ProgressCallback = no_progress,
) -> Corpus:
    r"""Tokenize files, folders, globs or a built-in dataset into a folder, and open it.

    `kind` is the kind of item: "text", "pairs", "labelled", "tagged", "chat" or "preferences"; `columns` are its
    columns in json, jsonl, csv, tsv, parquet and arrow files: `t.de` is a field of the column t, and "1", "2" are
    those of a file without a header. Both are inferred from the column names if not given. A text ends with the
    tokenizer's end-of-text token. Called again after an interruption, it resumes; after
    completion, it only opens the folder.

    `part=(3, 64)` prepares the third of 64 parts, a contiguous run of the files, into a folder of its own in
    `folder`, for `join` to make one corpus of; parts may be prepared at once, on as many machines.

    >>> import tempfile, glasshouse as gh
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(folder, "pairs.tsv").write_text("en\tde\nyes\tja\nno\tnein\n")
    >>> tok = gh.Tokenizer.train(texts=["yes no ja nein"], vocab_size=263)
    >>> corpus = gh.data.prepare(f"{folder}/pairs.tsv", tok, f"{folder}/ids", kind="pairs", columns=["en", "de"])
    >>> [tok.decode(ids) for ids in corpus.item(1)]
    ['no', 'nein']
    """
    if part is not None:
        check_part(part)
    columns = (columns,) if isinstance(columns, str) else tuple(columns)
    reader = open_reader(source, kind=kind, columns=columns, split=split, separator=separator, errors=errors)
    if reader.kind in TEMPLATED:
        tokenizer = with_chat_template(tokenizer)
    folder = Path(folder)
    units = (0, len(reader.sizes))
    if part is not None:
        folder, units = part_folder(folder, part), part_range(reader.sizes, part)
    job: dict[str, Any] = {
        "kind": reader.kind,
        "tokenizer": tokenizer.fingerprint,
        "start_id": start_id(tokenizer),
        "end_id": end_id(tokenizer),
        "chat_template": tokenizer.chat_template if reader.kind in TEMPLATED else None,
        "sources": _same_sources(reader, units, folder) or reader.fingerprint,
        "labels": list(reader.labels),
        "columns": list(columns),
        "separator": separator,
        "errors": errors,
        "shard_tokens": shard_tokens,
    }
    if part is not None:
        job["part"] = list(part)
    with ShardWriter(folder, job, id_dtype(len(tokenizer), len(reader.labels)), shard_tokens) as writer:
        if not writer.complete:
            with write_errors(folder):
                tokenizer.save(folder / TOKENIZER)
            _write(reader, units, tokenizer, writer, progress)
    # What was just written need not be verified.
    return Corpus.open(folder, tokenizer=tokenizer, verify=writer.complete)


def _same_sources(reader: DatasetReader, units: tuple[int, int], folder: Path) -> str | None:
    """Return the fingerprint that a folder was prepared with, if its files have other times and the same content.

    Files that were not read to the end have no hash in the folder yet, and cannot be compared.
    """
    with write_errors(folder):
        path = next((folder / name for name in (MANIFEST, PROGRESS) if (folder / name).exists()), None)
    if path is None or not reader.files:
        return None
    match read_json(path):
        case {"job": {"sources": str(known)}, "sources": list(found)}:
            pass
        case {"job": {"sources": str(known)}, "state": {"sources": list(found)}}:
            pass
        case _:  # the writer says what is wrong
            return None
    files = reader.files if units == (0, len(reader.sizes)) else reader.files[slice(*units)]
    if known == reader.fingerprint or len(found) != len(files):
        return None
    return known if all(map(_is_unchanged, files, found)) else None


def _is_unchanged(file: Path, known: object) -> bool:
    """Whether a file has the name, the size and the SHA-256 that a folder recorded."""
    match known:
        case {"name": str(name), "bytes": int(size), "sha256": str(sha256)}:
            if name != file_name(file) or size != file_size(file):
                return False
            with read_errors(file):
                return store.sha256(file) == sha256
    return False


def _write(
    reader: DatasetReader,
    units: tuple[int, int],
    tokenizer: Tokenizer,
    writer: ShardWriter,
    progress: ProgressCallback,
) -> None:
    """Encode the files from one index to before another (two aligned files count as one) and write their ids."""
    first, stop = units
    cursor, mid_document = [first, 0], False
    whole = stop - first == len(reader.sizes)
    names = reader.file_names if whole else reader.file_names[first:stop]
    known: list[dict[str, Any]] = [{"items": 0} for _ in names]
    match writer.state:
        case {"cursor": [int(file), int(index)], "mid_document": bool(mid_document), "sources": list(known)} if (
            first <= file <= stop and len(known) == len(names) and index >= 0 and all(map(is_source, known))
        ):
            cursor = [file, index]
        case _ if writer.shards:  # starting over would append to them
            raise StoreError(
                f"{str(writer.folder / PROGRESS)!r} is corrupt; delete the folder and prepare the text again."
            )
    found = [{"name": name, **one} for name, one in zip(names, known, strict=True)]
    size = sum(reader.sizes[first:stop])
    done = reader.size_before((cursor[0], cursor[1])) - sum(reader.sizes[:first])

    def on_bytes(number: int) -> None:
        nonlocal done
        done += number
        progress("tokenizing", done, size)

    def on_hash(file: int, size: int, sha256: str) -> None:
        found[file - first] |= {"bytes": size, "sha256": sha256}

    def state() -> dict[str, Any]:
        return {"cursor": cursor, "mid_document": mid_document, "sources": found}

    encoder = tokenizer.corpus_encoder()
    encode = make_encoder(reader, tokenizer, encoder, writer.dtype, mid_document)
    stream: Iterator[Chunk | Record] = iter(())
    if first < stop:
        stream = reader.read((cursor[0], cursor[1]), None if whole else stop, on_bytes, on_hash)
    for batch, (ids, ends) in prefetch_map(encode, _batches(_rejoin_chunks(stream, tokenizer, reader.file_names))):
        writer.add(ids, ends, state)
        for entry in batch:
            found[entry.file_index - first]["items"] += entry.ends_document if isinstance(entry, Chunk) else 1
        last = batch[-1]
        cursor = [last.file_index, last.index + 1]
        mid_document = isinstance(last, Chunk) and not last.ends_document
    manifest = {
        "format": FORMAT,
        "kind": reader.kind,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": len(tokenizer),
        "start_id": start_id(tokenizer),
        "end_id": end_id(tokenizer),
        "items": sum(one["items"] for one in found),
        "labels": list(reader.labels),
        "backend": "tokenizers, one segment at a time" if reader.kind in TEMPLATED else encoder.backend,
        "sources": found,
        "columns": list(reader.columns),
    }
    writer.finish(state(), manifest)


def _rejoin_chunks(
    stream: Iterator[Chunk | Record], tokenizer: Tokenizer, names: tuple[str, ...]
) -> Iterator[Chunk | Record]:
    """Rejoin chunks where the boundary changes the ids, up to `MAX_CHUNK_BYTES` bytes."""
    previous: Chunk | None = None
    for entry in stream:
        if previous is not None and isinstance(entry, Chunk):
            sides = (
                previous.text[-CUT_CONTEXT_BYTES:].decode(errors="ignore"),
                entry.text[:CUT_CONTEXT_BYTES].decode(errors="ignore"),
            )
            apart = [number for side in sides for number in tokenizer.encode(side, add_special_tokens=False)]
            if tokenizer.encode("".join(sides), add_special_tokens=False) == apart:
                yield previous
            elif len(previous.text) + len(entry.text) > MAX_CHUNK_BYTES:
                warnings.warn(
                    f"a text in {names[entry.file_index]!r} is longer than the limit of {MAX_CHUNK_BYTES} bytes per "
                    "chunk: tokens at chunk boundaries may differ from the whole text's; split it with a separator.",
                    stacklevel=2,
                )
                yield previous
            else:
                entry = Chunk(previous.text + entry.text, entry.file_index, entry.index, entry.ends_document)
            previous = None
        if isinstance(entry, Chunk) and not entry.ends_document:
            previous = entry
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
    """Return the number of characters of all strings in a nested value.

    >>> _length(("ab", [{"content": "cde"}, None]))
    5
    """
    length, stack = 0, [value]
    while stack:
        match stack.pop():
            case str(text):
                length += len(text)
            case list(inner) | tuple(inner):
                stack.extend(inner)
            case dict(inner):
                stack.extend(inner.values())
    return length
