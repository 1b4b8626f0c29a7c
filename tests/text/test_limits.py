"""What would fill the memory, hang or fail while text is read: each is bounded, or refused by a sentence."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import signal
import socket
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st

from glasshouse.errors import InputError
from glasshouse.text import Tokenizer, sources
from glasshouse.text.bpe import pretokenizer
from glasshouse.text.sources import chunking, file, find_files, read_chunks, read_parallel, read_records, tabular
from glasshouse.text.sources.chunking import chunk


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Fail instead of waiting for ever: all of this takes milliseconds."""

    def too_long(*_: object) -> None:
        pytest.fail("not done after a minute")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# One text.


@settings(max_examples=up_to(200), deadline=None)
@given(st.text("aé字\n ", max_size=120), st.integers(1, 30), st.lists(st.integers(0, 400), max_size=4))
def test_no_piece_is_longer_than_the_longest(text: str, piece: int, places: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "MAX_CHUNK_BYTES", 24)
        data = text.encode()
        whole = list(chunk(iter([(data, True)]), piece))
        bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
        stretches = [(data[a:b], False) for a, b in itertools.pairwise(bounds)]
        assert list(chunk(iter([*stretches, (b"", True)]), piece)) == whole  # however the text came
    assert b"".join(part for part, _ in whole) == data
    assert all(len(part) <= max(piece, 24) and part.decode() for part, _ in whole)


def test_a_text_without_a_place_is_cut_after_a_newline_or_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "MAX_CHUNK_BYTES", 8)
    for text, parts in {
        "字" * 5: ["字字", "字字", "字"],
        "字字\n\n字字": ["字字\n\n", "字字"],
        "a" * 8: ["a" * 8],
        "a" * 9: ["a" * 8, "a"],
        "a" * 7 + " b": ["a" * 7, " b"],
    }.items():
        found = chunk(iter([(text.encode(), True)]), 4)
        assert [part.decode() for part, _ in found] == parts


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_memory_stays_flat_where_nothing_can_be_cut(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "MAX_CHUNK_BYTES", 2**20)
    data = b"a" * 2**25
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packing]
    (tmp_path / f"x.txt{packing}").write_bytes(pack(data))
    del data
    tracemalloc.start()
    lengths = [len(one.text) for one in read_chunks([tmp_path / f"x.txt{packing}"], chunk_bytes=2**18)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(lengths) == 2**25
    assert max(lengths) == 2**20
    # What a step unpacks and what is held: 2,048 bytes of zstd can be more than all of this file.
    assert peak < {"": 8, ".gz": 16, ".zst": 80}[packing] * 2**20


def test_words_of_megabytes_are_not_all_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretokenizer, "BATCH", 1)
    long = [bytes([letter]) * 5_000 for letter in b"abcdefgh"]
    counted = pretokenizer.count([*[b" often"] * 3, *long], limit=256)
    assert sum(map(len, counted.counts)) <= 256 * pretokenizer.MEAN_WORD_BYTES
    assert counted.counts[b" often"] == 3
    assert counted.total == 3 + 8
    assert counted.dropped > 0


# One line, one row, one value.


def parquet(values: Any, **settings: object) -> bytes:  # noqa: ANN401 - a list or an array of pyarrow's
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": values, "n": [1] * len(values)}), written, **settings)
    return written.getvalue()


LONG = {
    "x.jsonl": (b'{"text": "a", "n": 1}\n' + json.dumps({"text": "a" * 200, "n": 1}).encode(), "line 2 of"),
    "y.jsonl": (b'{"text": "a", "n": 1}\n' * 9 + b" " * 200, "line 10 of"),
    "x.csv": (b"text,n\na,1\n" + b"a" * 200 + b",2\n", "line 3 of"),
    "y.csv": (b'text,n\na,1\n"' + b"a\n" * 100 + b'",2\n', "the row that ends after line"),
    "x.parquet": (parquet(["a", "a" * 200]), "row 2 of"),
    "y.parquet": (parquet(pyarrow.array(["a", "a" * 200]).dictionary_encode()), "row 2 of"),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_to_be_read_whole_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, where = LONG[name]
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(tabular, "_ROW", 100)
    monkeypatch.setattr(sources, "MAX_CHUNK_BYTES", 120)
    monkeypatch.setattr(file, "BLOCK", 50)
    with pytest.raises(InputError, match=f"{where}.* is longer than the limit of 100 bytes; split"):
        list(read_chunks([tmp_path / name]))
    with pytest.raises(InputError, match=f"{where}.* is longer than the limit of 120 bytes"):
        list(read_records([tmp_path / name], ["text", "n"]))


def test_parallel_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_CHUNK_BYTES", 100)
    (tmp_path / "a").write_text("short\n")
    (tmp_path / "b").write_text("long" * 100)
    with pytest.raises(InputError, match=r"line 1 of '.*b' is longer than the limit of 100 bytes"):
        list(read_parallel(tmp_path / "a", tmp_path / "b"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", b'{"text": "%s"}\n' % (b"a" * 88)),
        ("x.csv", b"%s\n%s\n" % (b"text".ljust(99, b"x"), b"a" * 99)),  # of a row of CSV the newline counts
    ],
)
def test_the_limit_itself_is_not_too_long(
    name: str, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_CHUNK_BYTES", 100)
    (tmp_path / name).write_bytes(data)
    column = "text" if name == "x.jsonl" else "text".ljust(99, "x")
    (record,) = read_records([tmp_path / name], [column])
    assert set(record.values[0]) == {"a"}
    (tmp_path / name).write_bytes(data.replace(b"aa", b"aaa", 1))
    with pytest.raises(InputError, match="is longer than the limit of 100 bytes"):
        list(read_records([tmp_path / name], [column]))


def test_rows_that_are_many_together_are_not_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "_ROW", 100)
    for name, data in (("x.csv", "text\n" + '"a\nb"\n' * 90), ("x.jsonl", '{"text": "a"}\n' * 90)):
        (tmp_path / name).write_text(data)
        assert len(list(read_chunks([tmp_path / name]))) == 90


def test_a_value_that_is_written_once_is_read_once(tmp_path: Path) -> None:
    value = "word " * 200_000
    same = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 60 + [None, 1], pyarrow.int32()), [value, "last"])
    (tmp_path / "x.parquet").write_bytes(parquet(same))
    tracemalloc.start()
    found = [record.values[0] for record in read_records([tmp_path / "x.parquet"], ["text"])]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [value] * 60 + [None, "last"]
    assert peak < 10 * len(value)  # and not 60 times


def test_an_error_looks_at_a_hundred_fields(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(dict.fromkeys(map(str, range(10**4)), 0)))
    with pytest.raises(InputError, match=r"line 1 of '.*' has no column 'text'; it has 0, 1, .*, 23 and 76 more\.$"):
        list(read_chunks([tmp_path / "x.jsonl"]))


# What is no file.


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(tmp_path)  # as the path of a socket is short
        one.bind("socket.txt")
        os.chdir(here)
        yield tmp_path


KINDS = {
    "pipe": "pipe.txt' is a pipe, but text is read from files",
    "zero": "zero.txt' is a device, through a link to '/dev/zero', but",
    "socket": "socket.txt' is a socket",
}


@pytest.mark.parametrize("name", KINDS)
def test_pipes_and_devices_are_named_and_refused(folder: Path, name: str) -> None:
    path = folder / f"{name}.txt"
    for paths in (path, str(path), [folder / "texts", path]):
        with pytest.raises(InputError, match=KINDS[name]):
            find_files(paths)
    with pytest.raises(InputError, match=KINDS[name] if name != "socket" else "cannot be read"):
        list(read_chunks([path]))  # as one that became a pipe since
    with pytest.raises(InputError, match=KINDS[name]):
        Tokenizer.train(path)
    path.rename(folder / "texts" / path.name)
    for place in (folder, f"{folder}/**/*.txt"):
        with pytest.raises(InputError, match=" is a "):
            find_files(place)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no 'a\\x00b'"):
        find_files("a\0b")
    with pytest.raises(InputError, match=r"cannot be read \(File name too long"):
        find_files("x" * 5000)


# Packed files.


def test_zeros_after_a_gzip_stream_are_padding(tmp_path: Path) -> None:
    one, two = gzip.compress(b"one "), gzip.compress(b"two")
    for data in (one + two + b"\0" * 5000, one + b"\0" * 512 + two, one + b"\0" + two + b"\0"):
        (tmp_path / "x.txt.gz").write_bytes(data)
        assert [part.text for part in read_chunks([tmp_path / "x.txt.gz"])] == [b"one two"]
    for data in (b"\0" * 10 + one, one + b"\0" * 10 + b"more", b"\0" * 100):
        (tmp_path / "x.txt.gz").write_bytes(data)
        with pytest.raises(InputError, match="is corrupt"):
            list(read_chunks([tmp_path / "x.txt.gz"]))


# The disk.


def test_a_disk_that_fails_is_a_sentence_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "x.parquet").write_bytes(parquet(["text"]))

    class Broken(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(file, "FileIO", Broken)
        with pytest.raises(InputError, match=r"x.txt' cannot be read \(Input/output error\); check the file, its"):
            list(read_chunks([tmp_path / "x.txt"]))

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(InputError, match=r"x.txt' cannot be read \(Permission denied\)"):
            list(read_chunks([tmp_path / "x.txt"]))
    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet, "ParquetFile", denied)
        with pytest.raises(InputError, match=r"x.parquet' cannot be read \(Permission denied\)"):
            list(read_chunks([tmp_path / "x.parquet"]))


def test_an_error_of_who_is_told_of_the_bytes_is_not_one_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")

    def closed(_: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        list(read_chunks([tmp_path / "x.txt"], on_bytes=closed))
