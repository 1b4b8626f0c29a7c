"""Parts of a corpus, prepared on several machines, and joined: byte for byte the result of one machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse.data.corpus import MANIFEST, TOKENIZER, Corpus
from glasshouse.data.shards import PROGRESS, ShardWriter, write_errors
from glasshouse.errors import InputError, StoreError
from glasshouse.text.bpe.training import ProgressCallback, no_progress

Part = tuple[int, int]  # a number from 1, and the number of parts
MAX_PARTS = 99_999


def check_part(part: Part) -> None:
    """Refuse a part that does not exist."""
    number, count = part
    if not 1 <= number <= count <= MAX_PARTS:
        raise InputError(
            f"part {number}/{count} does not exist; parts are numbered from 1 to their number, at most {MAX_PARTS}: "
            f"1/{max(1, min(count, MAX_PARTS))} is the first."
        )


def part_folder(folder: Path, part: Part) -> Path:
    """Return the folder of a part.

    >>> part_folder(Path("parts"), (3, 64)).as_posix()
    'parts/00003-of-00064'
    """
    return folder / f"{part[0]:05}-of-{part[1]:05}"


def part_range(sizes: Sequence[int], part: Part) -> tuple[int, int]:
    """Return the first file of a part, and the one after its last; a file belongs to the part that its start is in.

    >>> [part_range([50, 10, 40], (number, 4)) for number in (1, 2, 3, 4)]
    [(0, 1), (1, 1), (1, 3), (3, 3)]
    """
    number, count = part
    total = max(1, sum(sizes))
    parts = [before * count // total for before in accumulate(sizes, initial=0)][: len(sizes)]
    parts = [min(one, count - 1) for one in parts]  # empty files at the end
    return sum(one < number - 1 for one in parts), sum(one < number for one in parts)


def id_dtype(vocab_size: int, n_labels: int) -> type[np.unsignedinteger[Any]]:
    """Return the type of the ids of a corpus, which tags, counted from 1, are stored as too."""
    return np.uint16 if max(vocab_size, n_labels + 1) <= 2**16 else np.uint32


def join(parts: str | Path, folder: str | Path, *, progress: ProgressCallback = no_progress) -> Corpus:
    """Join the parts that `prepare(..., part=(1, 64))` and so on wrote into one folder; resumes if interrupted.

    >>> import tempfile, glasshouse as gh
    >>> at = tempfile.mkdtemp()
    >>> for name in ("a", "b"):
    ...     _ = Path(at, f"{name}.txt").write_text("to be or not to be")
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> for number in (1, 2):
    ...     _ = gh.data.prepare(f"{at}/*.txt", tok, f"{at}/parts", part=(number, 2))
    >>> gh.data.join(f"{at}/parts", f"{at}/ids")
    Corpus(text, 2 items, 38 tokens)
    """
    opened = _open_parts(Path(parts))
    manifest = {key: value for key, value in opened[0].manifest.items() if key not in ("job", "shards")}
    manifest["sources"] = [source for one in opened for source in one.manifest["sources"]]
    manifest["items"] = sum(one.manifest["items"] for one in opened)
    if not manifest["items"]:
        raise InputError(f"the parts in {str(parts)!r} contain no text; prepare files that are not empty.")
    job = {key: value for key, value in opened[0].manifest["job"].items() if key != "part"}
    dtype = id_dtype(manifest["vocab_size"], len(manifest["labels"]))
    folder = Path(folder)
    with ShardWriter(folder, job, dtype, job["shard_tokens"]) as writer:
        if not writer.complete:
            with write_errors(folder):
                opened[0].tokenizer.save(folder / TOKENIZER)
            writer.finish(_copy(opened, writer, progress), manifest)
    return Corpus.open(folder, verify=writer.complete)


def _copy(parts: list[Corpus], writer: ShardWriter, progress: ProgressCallback) -> dict[str, Any]:
    """Write the ids of all parts, those already written passed over; return the state at their end."""
    match writer.state:
        case {"joined": [int(ids_written), int(ends_written)]}:
            writer.skip = (ids_written + writer.skip[0], ends_written + writer.skip[1])
        case _ if writer.shards:
            raise StoreError(f"{str(writer.folder / PROGRESS)!r} is corrupt; delete the folder and join again.")
    joined = [0, 0]

    def state() -> dict[str, Any]:
        return {"joined": joined}

    total = sum(int(one.lengths.sum()) for one in parts)
    for part in parts:
        for ids, ends in part.blocks():
            writer.add(ids, ends, state)
            joined = [joined[0] + len(ids), joined[1] + len(ends)]
            progress("joining", joined[0], total)
    return state()


def _open_parts(folder: Path) -> list[Corpus]:
    """Open and verify all parts; refuse a missing or corrupt one, and parts that do not belong together."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    counts = sorted({int(name[-5:]) for name in names if re.fullmatch(r"[0-9]{5}-of-[0-9]{5}", name)})
    if not counts:
        raise InputError(f"there are no parts in {str(folder)!r}; give the folder into which parts were prepared.")
    if len(counts) > 1:
        raise StoreError(
            f"{str(folder)!r} has parts of {counts[0]} and parts of {counts[1]}; delete those of one of the two."
        )
    opened: list[Corpus] = []
    for number in range(1, counts[0] + 1):
        part = f"{number}/{counts[0]}"
        path = part_folder(folder, (number, counts[0]))
        if not (path / MANIFEST).exists():
            state = "not complete" if path.exists() else "missing"
            raise StoreError(f"part {part} is {state}; prepare it with `glasshouse data prepare` and that part.")
        opened.append(Corpus.open(path))
        match opened[-1].manifest:
            case {"job": {"part": list(own), "shard_tokens": int()}} if own == [number, *counts]:
                pass
            case _:
                raise StoreError(f"{str(path)!r} is not part {part}; delete it and prepare that part.")
        one, first = _settings(opened[-1]), _settings(opened[0])
        for key in sorted({*one, *first}):
            if one.get(key) != first.get(key):
                raise StoreError(
                    f"parts 1/{counts[0]} and {part} were prepared with different {key}, or {key} changed in "
                    "between; delete one of the two and prepare it again."
                )
    return opened


def _settings(part: Corpus) -> dict[str, Any]:
    """Return what the parts of a corpus have in common; two backends need not encode every text alike."""
    job = {key: value for key, value in part.manifest["job"].items() if key != "part"}
    return {**job, "backend": part.manifest.get("backend")}
