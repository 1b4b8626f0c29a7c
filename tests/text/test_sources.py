"""Files to documents: as a slow reading of the whole has them, cut without a trace, safe with anyone's file."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from examples import up_to
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from glasshouse.errors import ConfigError, GlasshouseError, InputError
from glasshouse.text import sources
from glasshouse.text.sources import (
    Chunk,
    Record,
    chunking,
    file,
    find_files,
    read_chunks,
    read_parallel,
    read_records,
)
from glasshouse.text.sources.chunking import chunk

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT4 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt4": pre_tokenizers.Split(Regex(GPT4), "isolated"),
    "gpt4o": pre_tokenizers.Split(Regex(GPT4O), "isolated"),
}
NASTY = [
    *" \n\r\t\x0b\x1c\x85\u00a0\u1680\u2003\u2028\u202f\u205f\u3000",
    *"aZ\u017féß漢\u0627\u093f1२\u2167'\u2019.!/-_\\\ufeff\u200b\u0301🙂👍🏽\0",
]
COMMON = [*"  \n\nab1'.,/é漢\r\u3000", "'s", "'LL", " \n", "\n/", "ab cd", "!\n", "\n\n", "🙂"]
TEXTS = st.lists(st.sampled_from(COMMON) | st.sampled_from(NASTY), max_size=80).map("".join)
SMALL = st.integers(1, 64)
READS = st.sampled_from([1, 2, 3, 5, 17, 2**20])


PLACE = tempfile.TemporaryDirectory()


def written(name: str, data: bytes | str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=PLACE.name))
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder / name


def parquet(table: object, **settings: object) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, **settings)
    return file.getvalue()


def zipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # the same in every process, as the names of tests must be


def packed(data: bytes, packing: str) -> bytes:
    return {"": bytes, ".gz": zipped, ".zst": zstandard.ZstdCompressor().compress}[packing](data)


def documents(found: Iterator[Chunk]) -> list[bytes]:
    """Put the pieces of each document together again."""
    texts, begun = [], b""
    for piece in found:
        begun += piece.text
        if piece.ends_document:
            texts.append(begun)
            begun = b""
    assert begun == b""
    return texts


def reading(size: int) -> mock._patch[int]:
    return mock.patch.object(file, "BLOCK", size)


# Finding files.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    seen = "b.txt a/z.md a-b.txt a/Q.TXT a/B.py a/deep/x.jsonl.zst a/deep/y.csv.GZ"
    unseen = ".hidden.txt .git/c.txt a/.d/e.txt p.png f.bin.gz g.json none"
    for name in f"{seen} {unseen}".split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def names(root: Path, found: list[Path]) -> list[str]:
    return [path.relative_to(root).as_posix() for path in found]


def test_a_folder_gives_its_text_files_sorted_by_their_paths(tree: Path) -> None:
    expected = ["a-b.txt", "a/B.py", "a/Q.TXT", "a/deep/x.jsonl.zst", "a/deep/y.csv.GZ", "a/z.md", "b.txt"]
    assert names(tree, find_files(tree)) == names(tree, find_files(str(tree))) == expected
    assert names(tree, find_files([tree / "b.txt", tree, tree / "p.png"])) == [
        *expected,
        "p.png",
    ]  # each once, all sorted
    assert names(tree, find_files(tree / ".git")) == [".git/c.txt"]  # hidden, but asked for by name


def test_the_order_is_not_that_of_the_disk(tree: Path) -> None:
    walk = os.walk

    def backwards(*args: object, **named: object) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, folders, files in walk(*args, **named):
            folders.sort(reverse=True)
            yield place, folders, sorted(files, reverse=True)

    before = find_files(tree)
    with mock.patch("os.walk", backwards):
        assert find_files(tree) == before


def test_a_pattern_gives_every_file_it_matches(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(tree, find_files(f"{tree}/**/*.txt")) == ["a-b.txt", "b.txt"]
    assert names(tree, find_files(tree / "*")) == ["a-b.txt", "b.txt", "f.bin.gz", "g.json", "none", "p.png"]
    assert names(tree, find_files(f"{tree}/a/**")) == names(tree, find_files(f"{tree}/a/**/*"))
    assert names(tree, find_files(f"{tree}/?/[zB]*")) == ["a/B.py", "a/z.md"]
    assert names(tree, find_files(f"{tree}/.git/*")) == [".git/c.txt"]
    monkeypatch.chdir(tree)
    assert find_files("**/*.md") == [Path("a/z.md")]
    (tree / "odd[1].txt").write_bytes(b"x")
    assert find_files("odd[1].txt") == [Path("odd[1].txt")]


def test_links_that_lead_in_circles_end(tree: Path) -> None:
    before = names(tree, find_files(tree)), names(tree, find_files(f"{tree}/**/*.md"))
    for number in range(3):
        (tree / "a" / f"loop{number}").symlink_to(tree)
    (tree / "self.txt").symlink_to(tree / "self.txt")
    (tree / "a" / "linked.md").symlink_to(tree / "a" / "z.md")
    with pytest.raises(InputError, match=r"self.txt' cannot be read \(Too many levels of symbolic links\)"):
        find_files(tree)
    (tree / "self.txt").unlink()
    assert names(tree, find_files(tree)) == sorted([*before[0], "a/linked.md"])
    assert names(tree, find_files(f"{tree}/**/*.md")) == sorted([*before[1], "a/linked.md"])


def test_a_folder_that_cannot_be_read_is_not_left_out(tree: Path) -> None:
    def walk(folder: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
        onerror(PermissionError(13, "Permission denied", "a/deep"))
        yield str(folder), [], ["b.txt"]

    with mock.patch("os.walk", walk), pytest.raises(InputError, match=r"'a/deep' cannot be read \(Permission"):
        find_files(tree)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("missing.txt", r"there is no '.*missing.txt'; give a file, a folder or a glob"),
        ("*.rtf", r"the glob '.*\*.rtf' matches no file; fix it."),
        ("missing/**/*.txt", r"matches no file"),
        ("a**/x", r"is not a valid glob"),
        ("only", r"'.*only' has no file of a known kind \(.txt, .jsonl, ...\); name files, or give a glob."),
    ],
)
def test_what_matches_nothing_is_an_error(tree: Path, path: str, sentence: str) -> None:
    (tree / "only").mkdir()
    (tree / "only" / "p.png").write_bytes(b"")
    with pytest.raises(InputError, match=sentence):
        find_files([tree / "b.txt", tree / path])


def test_no_paths_are_an_error() -> None:
    with pytest.raises(InputError, match="no paths were given"):
        find_files([])


# Cutting.


def slow_cuts(text: str, piece: int) -> list[str]:
    """Cut a text as the brief says, one character at a time."""

    def alone(i: int) -> bool:
        return 0 < i < len(text) - 1 and not text[i - 1].isspace() and not text[i + 1].isspace()

    def size(i: int) -> int:
        return len(text[:i].encode())

    parts = []
    while size(len(text)) > piece:
        newlines = [i + 1 for i, c in enumerate(text) if c == "\n" and alone(i) and text[i + 1] != "/"]
        spaces = [i for i, c in enumerate(text) if c == " " and alone(i)]
        short = [i for i in newlines if size(i) <= piece] or [i for i in spaces if size(i) <= piece]
        later = [i for i in newlines + spaces if size(i) > piece]
        if not short and not later:
            break
        place = max(short) if short else min(later)
        parts.append(text[:place])
        text = text[place:]
    return [*parts, text] if text else parts


@pytest.mark.parametrize(
    ("text", "piece", "parts"),
    [
        ("one\ntwo\nthree", 8, ["one\ntwo\n", "three"]),
        ("one\ntwo\nthree", 7, ["one\n", "two\n", "three"]),
        ("a\n\nb c", 3, ["a\n\nb", " c"]),  # a newline beside another is no place; the first place comes too late
        ("a\r\nb c d", 6, ["a\r\nb c", " d"]),
        ("aé\u3000\nb", 2, ["aé\u3000\nb"]),
        ("a \u00a0b", 1, ["a \u00a0b"]),
        ("long words without a\nplace", 10, ["long words", " without", " a\nplace"]),
        ("aaaaaaaa b\ncd", 4, ["aaaaaaaa", " b\n", "cd"]),
        ("!\n/x", 2, ["!\n/x"]),
        ("\na", 1, ["\na"]),
        ("a b", 1, ["a", " b"]),
        ("ab", 2, ["ab"]),
        ("a\n", 1, ["a\n"]),
    ],
)
def test_cuts_worked_by_hand(text: str, piece: int, parts: list[str]) -> None:
    found = list(read_chunks([written("x.txt", text)], chunk_bytes=piece))
    assert [one.text.decode() for one in found] == parts
    assert [one.index for one in found] == [*range(len(parts))]
    assert [one.ends_document for one in found] == [False] * (len(parts) - 1) + [True]


@settings(max_examples=up_to(250), deadline=None)
@given(TEXTS.filter(bool), SMALL)
@example("漢!\u3000\n\n/ab's 12345\r\n a", 8)
def test_the_words_of_the_parts_are_those_of_the_whole(text: str, piece: int) -> None:
    parts = [part.decode() for part, _ in chunk(iter([(text.encode(), True)]), piece)]
    assert parts == slow_cuts(text, piece)
    assert "".join(parts) == text
    for pattern in PATTERNS.values():
        whole = [word for word, _ in pattern.pre_tokenize_str(text)]
        assert [word for part in parts for word, _ in pattern.pre_tokenize_str(part)] == whole


@pytest.mark.parametrize("mark", ["\n", " "])
def test_every_place_between_two_characters_is_judged_as_python_does(mark: str) -> None:
    """All white space there is, and its neighbours, on either side; each way of cutting, with each pattern."""
    spaces = [c for c in map(chr, range(0x10000)) if c.isspace()]
    beside = [chr(ord(c) + step) for c in spaces for step in (-1, 1)]
    for c in dict.fromkeys([*spaces, *beside, *NASTY]):
        texts = (f"a{c}{mark}b", f"a{mark}{c}b", f"aa{mark}{c}b", f"{c}{mark}{c}", f"!{mark}{c}")
        for text, piece in itertools.product(texts, (1, 4, 6)):
            parts = [part.decode() for part, _ in chunk(iter([(text.encode(), True)]), piece)]
            assert parts == slow_cuts(text, piece)
            bytewise = iter([*((bytes([byte]), False) for byte in text.encode()), (b"", True)])
            assert [part.decode() for part, _ in chunk(bytewise, piece)] == parts
            for pattern in PATTERNS.values():
                words = [word for part in parts for word, _ in pattern.pre_tokenize_str(part)]
                assert words == [word for word, _ in pattern.pre_tokenize_str(text)]


@settings(max_examples=up_to(200), deadline=None)
@given(TEXTS, SMALL, st.lists(st.integers(0, 200), max_size=12))
def test_cuts_do_not_depend_on_how_the_text_came(text: str, piece: int, places: list[int]) -> None:
    data = text.encode()
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    stretches = [(data[a:b], False) for a, b in itertools.pairwise(bounds)]
    whole = list(chunk(iter([(data, True)]), piece))
    assert list(chunk(iter([*stretches, (b"", True)]), piece)) == whole


def test_a_text_without_a_place_is_searched_a_few_times() -> None:
    path = written("x.txt", b"a" * 2**16)
    with reading(64), mock.patch.object(chunking, "_chunk_end", wraps=chunking._chunk_end) as chunk_end:
        assert [len(one.text) for one in read_chunks([path], chunk_bytes=8)] == [2**16]
    assert chunk_end.call_count < 20  # twice as much each time: 16 doublings, not 1024 blocks


def test_memory_stays_flat() -> None:
    line = b"some words in a line, and more of them\n"
    path = written("x.txt", line * (2**25 // len(line)))
    tracemalloc.start()
    total = sum(len(one.text) for one in read_chunks([path], chunk_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == path.stat().st_size
    assert peak < 8 * 2**20  # of 32: two blocks, their sum, a piece, its forerunner and the one in hand


# Plain text.


@settings(max_examples=up_to(120), deadline=None)
@given(
    TEXTS,
    READS,
    st.sampled_from(["", ".gz", ".zst"]),
    st.sampled_from([None, "\n", "\n\n", "ab", "<|end|>", "é", "aab"]),
)
def test_plain_text_is_that_of_the_whole_file(text: str, read: int, packing: str, separator: str | None) -> None:
    path = written(f"x.txt{packing}", packed(f"{text}a".encode(), packing))
    text = f"{text}a".removeprefix("\ufeff")
    expected = [part for part in (text.split(separator) if separator else [text]) if part]
    with reading(read), mock.patch.object(file, "_STEP", read):
        found = list(read_chunks([path], separator=separator, chunk_bytes=9))
        assert [one.text.decode() for one in found] == [part for whole in expected for part in slow_cuts(whole, 9)]
    assert [text.decode() for text in documents(iter(found))] == expected


@settings(max_examples=up_to(200), deadline=None)
@given(
    st.lists(st.binary(max_size=5) | st.sampled_from(["é", "漢", "🙂", "\ufeff"]).map(str.encode), max_size=8).map(
        b"".join
    ),
    READS,
)
@example(b"\xef\xbb\xbf\xef\xbb\xbfa", 1)
@example(b"\xf0\x9f\x99", 1)
@example(b"a\xe2\x82", 2)
def test_bad_bytes_are_those_that_python_finds(data: bytes, read: int) -> None:
    assume(data.removeprefix(codecs.BOM_UTF8))
    path = written("x", data)
    with reading(read):
        (found,) = read_chunks([path], errors="replace")
        assert found.text.decode() == data.decode(errors="replace").removeprefix("\ufeff")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            sentence = rf"'.*' is not UTF-8 at byte {error.start}; fix it, or set errors \(.*\) to 'replace'"
            with pytest.raises(InputError, match=sentence):
                list(read_chunks([path]))
        else:
            assert documents(read_chunks([path])) == [text.removeprefix("\ufeff").encode()]


@pytest.mark.parametrize("read", [1, 2, 3, 4, 5, 100])
def test_separators_worked_by_hand(read: int) -> None:
    path = written("x.txt", "aaab aab\n\n\nc<|end|><|end|>\n\n")
    with reading(read):
        assert documents(read_chunks([path], separator="aab")) == [b"a", b" ", b"\n\n\nc<|end|><|end|>\n\n"]
        assert documents(read_chunks([path], separator="\n\n")) == [b"aaab aab", b"\nc<|end|><|end|>"]
        assert documents(read_chunks([path], separator="<|end|>")) == [b"aaab aab\n\n\nc", b"\n\n"]


def test_a_byte_order_mark_and_line_ends() -> None:
    first, second = written("x.py", b"\xef\xbb\xbfa\r\n\xef\xbb\xbfb"), written("y.odd", b"\xef\xbb\xbf")
    assert [one.text for one in read_chunks([first, second])] == [b"a\r\n\xef\xbb\xbfb"]
    table = written("z.csv", b"\xef\xbb\xbftext\na\n")
    assert documents(read_chunks([table])) == [b"a"]


def test_the_offset_counts_the_mark_and_the_unpacked_text() -> None:
    path = written("x.gz", zipped(b"\xef\xbb\xbf" + b"a" * 100_000 + b"\xff"))
    with pytest.raises(InputError, match="at byte 100003;"):
        list(read_chunks([path]))


def test_packed_files_may_have_several_streams() -> None:
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    for packing, between in ((".gz", b""), (".zst", skippable)):
        path = written(f"x.txt{packing}", packed(b"one ", packing) + between + packed(b"two", packing))
        for step in (1, 7, 2**13):
            with mock.patch.object(file, "_STEP", step):
                assert documents(read_chunks([path])) == [b"one two"]


# Rows.


def test_json_lines_worked_by_hand() -> None:
    lines = [
        r'{"text": "one \u2028\n two", "n": NaN}',
        "",
        "  \t\r",
        '{"text": "U+2028: \u2028.", "text": "the last counts", "n": [1e999, -Infinity]}\r',
        r'{"n": 12345678901234567890123456789, "text": "\ud83d\ude00 \\ud800"}',
        '{"n": {"role": "user"}, "text": ""}',
    ]
    path = written("x.jsonl", "\n".join(lines))
    expected = ["one \u2028\n two", "the last counts", "😀 \\ud800"]
    assert [text.decode() for text in documents(read_chunks([path]))] == expected  # the empty one is left out
    found = list(read_records([path], ["n", "text"]))
    assert [record.values[1] for record in found] == [*expected, ""]
    assert [record.index for record in found] == [0, 1, 2, 3]
    assert found[2].values[0] == 12345678901234567890123456789
    assert found[3] == Record(({"role": "user"}, ""), 0, 3)


def test_half_characters_in_json() -> None:
    line = r'{"other": ["\ud800\uD83D\uDE00"], "text": "a\uDC00b \\\ud800 \\ud800 \ud800\ud800\udc00"}'
    path = written("x.ndjson", '{"text": "", "other": ""}\n' + line)
    with pytest.raises(InputError, match=r"line 2 of '.*' has a lone surrogate; .*errors .*'replace'"):
        list(read_chunks([path]))
    (_, record) = read_records([path], ["other", "text"], errors="replace")
    assert record.values == (["\ufffd😀"], "a\ufffdb \\\ufffd \\ud800 \ufffd\U00010000")
    for line in (r'{"text": "\ud800"}', r'{"text": "\uDfff"}'):
        with pytest.raises(InputError, match="lone surrogate"):
            list(read_chunks([written("x.jsonl", line)]))
        assert documents(read_chunks([written("x.jsonl", line)], errors="replace")) == ["\ufffd".encode()]
    bad = written("x.jsonl", r'{"text": "\ud8zz"}')
    with pytest.raises(InputError, match=r"line 1 of .* is not valid JSON"):
        list(read_chunks([bad], errors="replace"))


@settings(max_examples=up_to(60), deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5), READS, st.booleans(), st.sampled_from(["", ".gz", ".zst"]))
def test_json_lines_are_those_of_the_whole_file(texts: list[str], read: int, plain: bool, packing: str) -> None:
    data = "\n".join(json.dumps({"id": 1, "body": text}, ensure_ascii=plain) for text in texts).encode()
    path = written(f"x.jsonl{packing}", packed(data, packing))
    with reading(read):
        assert [one.values for one in read_records([path], ["body", "id"])] == [(text, 1) for text in texts]
        found = [one.text.decode() for one in read_chunks([path], column="body", chunk_bytes=9)] if any(texts) else []
    assert found == [part for text in texts for part in slow_cuts(text, 9)]


CELLS = st.text(st.sampled_from([*'ab",\t\n\r é🙂\u2028\x1e']), max_size=8)


@settings(max_examples=up_to(80), deadline=None)
@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6), READS, st.sampled_from(["x.csv", "x.tsv", "x.csv.gz"])
)
def test_csv_comes_back_as_it_was_written(rows: list[tuple[str, str]], read: int, name: str) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter="\t" if "tsv" in name else ",").writerows([("left", "text"), *rows])
    path = written(name, packed(file.getvalue().encode(), ".gz" if name.endswith("gz") else ""))
    with reading(read):
        assert [one.values for one in read_records([path], ["text", "left"])] == [(b, a) for a, b in rows]


def test_csv_lines_worked_by_hand() -> None:
    path = written("x.csv", '\n"text",n\r\n"one\n""two"", three",1\n\n,2\nlast,3')
    assert [one.values for one in read_records([path], ["n", "text"])] == [
        ("1", 'one\n"two", three'),
        ("2", ""),
        ("3", "last"),
    ]
    assert documents(read_chunks([path])) == [b'one\n"two", three', b"last"]


@pytest.mark.long
def test_a_line_of_many_megabytes() -> None:
    long = "wörd " * 3_000_000
    for name, data in (
        ("x.csv", f'text,n\n"{long}",1\n'),
        ("x.jsonl", json.dumps({"text": long}, ensure_ascii=False)),
    ):
        found = list(read_chunks([written(name, data)]))
        assert "".join(one.text.decode() for one in found) == long
        assert len(found) == 2  # 18 MB, and a piece holds 16.8
        assert max(len(one.text) for one in found) <= sources.CHUNK_BYTES


def test_parquet_worked_by_hand() -> None:
    talk = [[{"role": "user", "content": "hi"}], [], None] * 50
    texts = ["one two", "", "漢"] * 50
    columns = {
        "text": pyarrow.array(texts),
        "large": pyarrow.array(texts, pyarrow.large_string()),
        "view": pyarrow.array(texts, pyarrow.string_view()),
        "few": pyarrow.array(texts).dictionary_encode(),
        "talk": pyarrow.array(talk),
        "label": pyarrow.array([*range(149), None]),
    }
    data = parquet(pyarrow.table(columns), row_group_size=70)
    path = written("x.parquet", data)
    for column in ("text", "large", "view", "few"):
        assert documents(read_chunks([path], column=column)) == [b"one two", "漢".encode()] * 50
    assert [one.text for one in read_chunks([path], chunk_bytes=3)][:3] == [b"one", b" two", "漢".encode()]
    found = list(read_records([path], ["label", "talk", "text"]))
    assert [one.values for one in found] == list(zip([*range(149), None], talk, texts, strict=True))
    assert [one.index for one in found] == [*range(150)]
    read: list[int] = []
    hashes: list[tuple[int, int, str]] = []
    list(read_chunks([path], on_bytes=read.append, on_hash=lambda *about: hashes.append(about)))
    assert sum(read) == len(data)
    assert len(read) > 2
    assert hashes == [(0, len(data), hashlib.sha256(data).hexdigest())]
    with pytest.raises(
        InputError, match=r"row 1 of '.*' has a value of type int in 'label', but it must be a string"
    ):
        list(read_chunks([path], column="label"))


def test_parquet_strings_are_checked() -> None:
    bad = pyarrow.array([b"fine"] * 140 + [None, b"a\xff"], pyarrow.binary()).view(pyarrow.string())
    path = written("x.parquet", parquet(pyarrow.table({"text": bad})))
    with pytest.raises(InputError, match=r"row 142 of '.*' is not UTF-8 at byte 1; .*errors .*'replace'"):
        list(read_records([path], ["text"]))
    assert list(read_records([path], ["text"], errors="replace"))[-2:] == [
        Record((None,), 0, 140),
        Record(("a\ufffd",), 0, 141),
    ]
    with pytest.raises(InputError, match=r"row 141 of '.*' has a value of type null in 'text'"):
        list(read_chunks([path], errors="replace"))
    few = written("z.parquet", parquet(pyarrow.table({"text": bad.dictionary_encode()})))
    assert list(read_records([few], ["text"], errors="replace"))[-1].values == ("a\ufffd",)
    nested = pyarrow.ListArray.from_arrays([0, 1], bad[-1:])
    with pytest.raises(InputError, match="is not a valid Parquet file"):
        list(read_records([written("y.parquet", parquet(pyarrow.table({"text": nested})))], ["text"]))


def test_parquet_without_rows() -> None:
    data = parquet(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}))
    read: list[int] = []
    with pytest.raises(InputError, match="contains no text"):
        list(read_chunks([written("x.parquet", data)], on_bytes=read.append))
    assert sum(read) == len(data)


JSON = st.recursive(st.none() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3))


@given(st.lists(st.dictionaries(st.just("text"), JSON, min_size=1), min_size=1), st.integers(1, 9), st.booleans())
@settings(max_examples=up_to(100))
def test_json_files_are_what_the_whole_is(rows: list[dict[str, object]], step: int, indented: bool) -> None:
    texts = [
        json.dumps(rows, indent=2 if indented else None),
        "\n".join(map(json.dumps, rows)),
        json.dumps(rows) + "\n",
    ]
    for text in texts:
        with reading(step):
            found = list(read_records([written("x.json", text)], ["text"]))
        assert [one.values[0] for one in found] == [row["text"] for row in rows]
        assert [one.line for one in found] == [*range(1, len(rows) + 1)]


def test_a_json_array_takes_the_memory_of_one_value() -> None:
    path = written("x.json", json.dumps([{"text": "a" * 1000}] * 12_000))
    tracemalloc.start()
    assert sum(1 for _ in read_records([path], ["text"])) == 12_000
    assert tracemalloc.get_traced_memory()[1] < 8e6  # of 12 MB
    tracemalloc.stop()


NESTED = [
    {"id": 1, "translation": {"de": "ja", "en": "yes", "more": {"note": "a"}}, "a.b": "dot"},
    {"id": 2, "translation": {"de": "nein", "en": None, "more": {"note": "b"}}, "a.b": "dots"},
]
NESTED_NAMES = ["translation.en", "translation.more.note", "id", "a.b"]


def arrow(table: pyarrow.Table, is_file: bool = False, rows: int = 1000) -> bytes:
    """Write a stream, as Hugging Face `datasets` does, or Arrow's file format."""
    file = io.BytesIO()
    with (pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file.getvalue()


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.arrow"])
def test_fields_of_columns(name: str) -> None:
    data = {
        "x.jsonl": "".join(json.dumps(row) + "\n" for row in NESTED).encode(),
        "x.parquet": parquet(pyarrow.Table.from_pylist(NESTED)),
        "x.arrow": arrow(pyarrow.Table.from_pylist(NESTED)),
    }
    path = written(name, data[name])
    assert sources.columns(path) == ("id", "translation.de", "translation.en", "translation.more.note", "a.b")
    found = [one.values for one in read_records([path], NESTED_NAMES)]
    assert found == [("yes", "a", 1, "dot"), (None, "b", 2, "dots")]
    assert [one.values[0]["de"] for one in read_records([path], ["translation"])] == ["ja", "nein"]
    for missing in ("translation.fr", "translation.de.x", "id.de", "translations"):
        with pytest.raises(InputError, match=rf"no column '{missing}'.*(id, translation.de|did you mean)"):
            list(read_records([path], [missing]))


def test_a_field_of_a_column_that_is_null() -> None:
    table = pyarrow.table({"t": pyarrow.array([{"de": "ja"}, None])})
    for name, data in (("x.parquet", parquet(table)), ("x.arrow", arrow(table))):
        assert [one.values for one in read_records([written(name, data)], ["t.de"])] == [("ja",), (None,)]
    with pytest.raises(InputError, match=r"line 2 of '.*' has no column 't.de'; it has t\."):
        list(read_records([written("x.jsonl", '{"t": {"de": "ja"}}\n{"t": null}')], ["t.de"]))


@pytest.mark.parametrize("is_file", [False, True])
def test_arrow_worked_by_hand(is_file: bool) -> None:
    table = pyarrow.table({"text": [f"text {n}" for n in range(1000)], "n": [*range(1000)]})
    data = arrow(table, is_file, rows=300)
    path = written("x.arrow", data)
    read: list[int] = []
    hashes: list[tuple[int, int, str]] = []
    found = [*read_records([path], ["n", "text"], on_bytes=read.append, on_hash=lambda *about: hashes.append(about))]
    assert [one.values for one in found] == [(n, f"text {n}") for n in range(1000)]
    assert [one.line for one in found] == [*range(1, 1001)]
    assert sum(read) == len(data)
    assert len(read) in (4, 5)  # a call for each batch of the file, and for the end of a stream
    assert hashes == [(0, len(data), hashlib.sha256(data).hexdigest())]
    assert list(read_records([path], ["n", "text"], start=(0, 990))) == found[990:]
    assert len(list(read_chunks([path]))) == 1000


def test_arrow_takes_the_memory_of_few_rows() -> None:
    path = written(
        "x.arrow", arrow(pyarrow.table({"text": ["漢" * 40_000] * 1000}), rows=1000)
    )  # 120 MB in one batch
    pyarrow.default_memory_pool().release_unused()
    before, tallest = pyarrow.total_allocated_bytes(), 0
    tracemalloc.start()
    for _ in read_records([path], ["text"]):
        tallest = max(tallest, pyarrow.total_allocated_bytes() - before)
    assert tallest + tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()


@pytest.mark.parametrize("is_file", [False, True])
def test_an_arrow_file_that_is_cut_anywhere_is_refused(is_file: bool) -> None:
    data = arrow(pyarrow.table({"text": ["a", "b", "c"] * 20}), is_file, rows=20)
    for length in range(1, len(data), 7):
        with pytest.raises(InputError, match=r"download it again\.$"):
            list(read_records([written("x.arrow", data[:length])], ["text"]))


def test_columns_of_a_file_without_a_header() -> None:
    path = written("x.tsv", "ja\tyes\t1\n\nnein\tno\t2\n")
    found = list(read_records([path], ["2", "1"]))
    assert [(one.values, one.line) for one in found] == [(("yes", "ja"), 1), (("no", "nein"), 3)]
    assert list(read_records([path], ["2", "1"], start=(0, 1))) == found[1:]
    assert [one.values for one in read_records([written("x.csv", '"a, b",c\n')], ["1"])] == [("a, b",)]
    assert documents(read_chunks([path], column="2")) == [b"yes", b"no"]
    wrong = {
        ("x.tsv", "ja\tyes\nnein\n"): r"line 2 of '.*x.tsv' has 1 cells, but the first line has 2; fix it\.",
        ("x.tsv", "ja\n"): r"line 1 of '.*x.tsv' has 1 cells, so there is no column 2; name those that it has\.",
        ("x.csv", "0,1,2\n"): r"line 1 of '.*x.csv' has the cells 1, 2, which may be names of columns or data",
    }
    for (name, text), sentence in wrong.items():
        with pytest.raises(InputError, match=sentence):
            list(read_records([written(name, text)], ["1", "2"]))
    with pytest.raises(InputError, match="no column '1'"):  # objects have no order
        list(read_records([written("x.jsonl", '{"a": "b"}')], ["1"]))


# Two files, line by line.


def test_parallel_lines() -> None:
    left, right = written("x.de", "ja\r\n\nü\u2028b\n"), written("x.en.gz", zipped(b"\xef\xbb\xbfyes\n\nu"))
    read: list[int] = []
    hashes: list[tuple[int, int]] = []
    found = list(
        read_parallel(left, right, on_bytes=read.append, on_hash=lambda n, size, _: hashes.append((n, size)))
    )
    assert found == [Record(("ja", "yes"), 0, 0), Record(("", ""), 0, 1), Record(("ü\u2028b", "u"), 0, 2)]
    assert sorted(hashes) == [(0, left.stat().st_size), (1, right.stat().st_size)]
    assert sum(read) == sum(size for _, size in hashes)
    assert list(read_parallel(left, right, start=(0, 1))) == found[1:]


@pytest.mark.parametrize(("left", "right"), [(3, 5), (5, 3), (0, 2), (1, 0)])
def test_parallel_files_of_different_length(left: int, right: int) -> None:
    paths = written("l", "a\n" * left), written("r", "b\n" * right)
    with pytest.raises(
        InputError,
        match=rf"'.*l' has {left} lines, but '.*r' has {right}, from line {min(left, right) + 1} on alone; line n of",
    ):
        list(read_parallel(*paths))


def test_parallel_files_without_a_line() -> None:
    with pytest.raises(InputError, match=r"'.*l' to '.*r' .*contains no text"):
        list(read_parallel(written("l", ""), written("r", "")))


# Going on, progress, hashes.


@pytest.fixture(scope="module")
def mixed() -> list[Path]:
    lines = "".join(json.dumps({"text": f"line {n}\nof a longer text"}) + "\n" for n in range(5))
    return [
        written("a.txt", "several words in one\ntext of three\nlines"),
        written("empty.txt", ""),
        written("b.jsonl.zst", packed(lines.encode(), ".zst")),
        written("c.csv.gz", packed(b"text,n\none two,1\nthree,2\n", ".gz")),
        written("d.parquet", parquet(pyarrow.table({"text": ["a b", "c"]}))),
        written("e.gz", packed(b"plain\ntext", ".gz")),
    ]


def test_going_on_gives_the_rest(mixed: list[Path]) -> None:
    whole = list(read_chunks(mixed, chunk_bytes=8))
    assert {one.file_index for one in whole} == {0, 2, 3, 4, 5}
    for at, one in enumerate(whole):
        assert list(read_chunks(mixed, chunk_bytes=8, start=(one.file_index, one.index))) == whole[at:]
    assert list(read_chunks(mixed, chunk_bytes=8, start=(1, 0))) == [one for one in whole if one.file_index > 1]
    assert list(read_chunks(mixed, chunk_bytes=8, start=(0, 1000))) == [one for one in whole if one.file_index > 0]
    assert list(read_chunks(mixed, start=(6, 0))) == []
    tables = mixed[2:5]
    rows = list(read_records(tables, ["text"]))
    for at, row in enumerate(rows):
        assert list(read_records(tables, ["text"], start=(row.file_index, row.index))) == rows[at:]


def test_files_before_the_start_are_not_read(mixed: list[Path]) -> None:
    gone = [Path("gone.txt"), mixed[0]]
    assert {one.file_index for one in read_chunks(gone, start=(1, 0))} == {1}
    with pytest.raises(InputError, match=r"'gone.txt' cannot be read \(No such file"):
        list(read_chunks(gone))
    assert {one.file_index for one in read_records([Path("gone.jsonl"), mixed[4]], ["text"], start=(1, 0))} == {1}
    for name in ("gone.parquet", "gone.zst", "gone.csv"):
        with pytest.raises(InputError, match=f"'{name}' cannot be read"):
            list(read_chunks([Path(name)]))


@pytest.mark.parametrize("start", [(0, 0), (0, 2), (2, 3)])
def test_bytes_and_hashes_are_those_of_the_files_on_disk(mixed: list[Path], start: tuple[int, int]) -> None:
    read: list[int] = []
    hashes: list[tuple[int, int, str]] = []
    with reading(7):
        list(read_chunks(mixed, start=start, on_bytes=read.append, on_hash=lambda *about: hashes.append(about)))
    files = [(n, path.read_bytes()) for n, path in enumerate(mixed) if n >= start[0]]
    assert hashes == [(n, len(data), hashlib.sha256(data).hexdigest()) for n, data in files]
    assert sum(read) == sum(len(data) for _, data in files)


def test_a_file_that_is_not_read_to_its_end_has_no_hash(mixed: list[Path]) -> None:
    hashes: list[int] = []
    found = read_chunks(mixed, chunk_bytes=8, on_hash=lambda source, *_: hashes.append(source))
    assert next(found).file_index == 0
    found.close()
    assert hashes == []


# What can be wrong.

DEEP = b'{"text": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("x.json", b"[]", r"'.*x.json' .*contains no text"),
        (
            "x.json",
            b'[{"text": "a"}, {"text": "b"',
            r"object 2 of '.*x.json' is not valid JSON \(Expecting .*\); fix",
        ),
        ("x.json", b'[{"text": "a"},', r"'.*x.json' ends before its array does; download it again\."),
        ("x.json", b'[{"text": "a"} {"text": "b"}]', r"object 1 of '.*' is followed by '\{', but must be by a comma"),
        ("x.json", b'[{"text": "a"}] 1', r"object 1 of '.*' is followed by '1', but must be by nothing"),
        ("x.json", b'[{"text": "a"},]', r"object 2 of '.*' is not valid JSON"),
        ("x.json", b'[["a"]]', r"object 1 of '.*' is not a JSON object in {}"),
        ("x.json", b"[" + DEEP + b"]", r"object 1 of '.*' is nested too deeply"),
        ("x.json.gz", zipped(b'{"data": []}'), r"object 1 of '.*x.json.gz' has no column 'text'; it has data\."),
        ("x.parquet.zst", b"", r"'.*' is Parquet, which has its own compression; decompress it."),
        ("x.arrow.gz", b"", r"'.*' is Arrow, which has its own compression; decompress it."),
        ("x.arrow", b"", r"'.*' is not a valid Arrow file"),
        ("x.txt.gz", zipped(b"text" * 100)[:-9], r"'.*x.txt.gz' is truncated; download it again."),
        ("x.txt.gz", zipped(b"text")[:-8] + b"\0" * 8, r"is corrupt \(.*incorrect data check\)"),
        ("x.txt.gz", b"not gzip at all", r"is corrupt"),
        ("x.gz", zipped(b"text") + b"more", r"is corrupt"),
        ("x.zst", packed(b"text" * 100, ".zst")[:-3], r"is truncated; download it again."),
        ("x.zst", b"not zstd at all", r"'.*x.zst' is corrupt \(.*\); download it again."),
        ("x.jsonl", b'{"text": ""}\n\n{"text": "a}', r"line 3 of '.*' is not valid JSON \(Unterminated .*column 10"),
        ("x.jsonl", b'{"text": "a"}\n["text"]', r"line 2 of '.*' is not a JSON object in {}; fix it."),
        (
            "x.jsonl",
            b'{"texts": 1, "id": 2}',
            r"line 1 of '.*' has no column 'text' \(it has texts, id\); did you mean texts\?",
        ),
        ("x.jsonl", b'{"a": 1, "id": 2}', r"line 1 of '.*' has no column 'text'; it has a, id."),
        ("x.jsonl", b"{}", r"line 1 of '.*' has no column 'text'; it has none."),
        (
            "x.jsonl",
            b'{"text": 5}',
            r"line 1 of '.*' has a value of type int in 'text', but it must be a string; fix",
        ),
        ("x.jsonl", b'{"text": null}', r"of type null"),
        ("x.jsonl", DEEP, r"line 1 of '.*' is nested too deeply to be parsed; remove it."),
        ("x.jsonl", b'{"text": ' + b"1" * 5000 + b"}", r"line 1 of '.*' is not valid JSON \(.*digits"),
        ("x.jsonl", b'{"text": "\xff"}', r"is not UTF-8 at byte 10; fix it"),
        ("x.csv", b"texts,n\na,1\n", r"'.*x.csv' has no column 'text' \(it has texts, n\); did you mean texts\?"),
        (
            "x.csv",
            b"\ntext,n,text\na,1,b\n",
            r"line 2 of '.*x\.csv' names the column 'text' 2 times; rename the others",
        ),
        (
            "x.csv",
            b"a,b\n",
            r"'.*x.csv' has no column 'text'; it has a, b; without a header, columns are numbers: 1,2.",
        ),
        ("x.csv", b'text,n\n"a\nb",1\nc\n', r"line 4 of '.*' has 1 cells, but the header has 2; fix it."),
        ("x.tsv", b"text\tn\na\tb\tc", r"line 2 of '.*' has 3 cells"),
        ("x.csv", b"text\na\0b", r"line 2 of '.*' has a NUL byte; save the file as UTF-8."),
        ("x.csv", b'text\na\n"b\nc\n', r"line 3 of '.*' is not valid csv \(unexpected end of data\); fix it."),
        ("x.csv", b'text\n"b"c\n', r"line 2 of '.*' is not valid csv"),
        ("x.csv", b"text\ra\rb\r", r"line 1 of '.*' is not valid csv \(new-line character seen in unquoted field\)"),
        ("x.csv", b"text\n\xff", r"'.*x.csv' is not UTF-8 at byte 5; fix it"),
        ("x.parquet", b"not parquet", r"'.*x.parquet' is not a valid Parquet file \(.*\); download it again."),
        ("x.parquet", b"", r"is not a valid Parquet file"),
        (
            "x.parquet",
            parquet(pyarrow.table({"txt": ["a"]})),
            r"^'[^']*' has no column 'text' \(it has txt\); did you mean txt\?",
        ),
        ("x.txt", b"", r"'.*x.txt' \(1 in all\) contains no text; give files that are not empty."),
        ("x.txt.gz", zipped(b""), r"contains no text"),
        ("x.jsonl", b"\n \n", r"contains no text"),
        ("x.jsonl", b'{"text": ""}', r"contains no text"),
        ("x.csv", b"text\n", r"contains no text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_sentence(name: str, data: bytes, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        list(read_chunks([written(name, data)]))
    assert "\n" not in str(error.value)


def test_what_can_be_refused_is_refused_before_anything_is_read(mixed: list[Path]) -> None:
    with pytest.raises(InputError, match="decompress it"):
        next(read_chunks([mixed[0], Path("last.parquet.gz")]))
    with pytest.raises(InputError, match=r"'.*a.txt' is plain text; records need jsonl, csv, tsv, parquet or arrow."):
        next(read_records([mixed[2], mixed[0]], ["text"]))


def test_all_files_are_empty() -> None:
    paths = [written("a.txt", ""), written("b.csv", ""), written("c.txt", "<>" * 3)]
    with pytest.raises(InputError, match=r"'.*a.txt' to '.*c.txt' \(3 in all\) contains no text"):
        list(read_chunks(paths, separator="<>"))
    with pytest.raises(InputError, match=r"an empty list \(0 in all\) contains no text"):
        list(read_chunks([]))
    with pytest.raises(InputError, match=r"'.*b.csv' \(1 in all\) contains no records"):
        list(read_records(paths[1:2], ["text"]))


def test_settings_that_make_no_sense(mixed: list[Path]) -> None:
    for wrong in ({"chunk_bytes": 0}, {"chunk_bytes": 2**31}, {"separator": ""}, {"errors": "ignore"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
            list(read_chunks(mixed, **wrong))


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("x.parquet", "pyarrow", "parquet"), ("x.arrow", "pyarrow", "parquet"), ("x.txt.zst", "zstandard", "zstd")],
)
def test_an_extra_that_is_not_installed(name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        InputError, match=rf"files need {module}; install it with pip install 'glasshouse\[{extra}\]'."
    ):
        list(read_chunks([Path(name)]))


SOUND = {
    "x.txt.gz": packed(b"some text " * 50, ".gz"),
    "x.jsonl.zst": packed(b'{"text": "a b"}\n' * 50, ".zst"),
    "x.jsonl": '{"text": "é\\ud83d\\ude00", "n": [1, {"a": null}]}\n'.encode() * 3,
    "x.csv": 'text,n\n"a ""é"", b",1\nc,2\n'.encode(),
    "x.tsv": b'text\tn\n"a\nb"\t1\n',
    "x.parquet": parquet(pyarrow.table({"text": ["a", "é", "some longer text"] * 5, "n": [*range(15)]})),
    "x.txt": "é漢🙂 text\n".encode(),
}


@settings(max_examples=up_to(200), deadline=None)
@given(st.sampled_from([*SOUND]), st.data())
def test_no_file_makes_more_than_a_sentence(name: str, data: st.DataObject) -> None:
    """Noise, and sound files with some bytes changed, cut off or put in; pyarrow is not given what has its marks."""
    noise, sound = st.binary(max_size=60), SOUND[name]
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(sound))] * 2)))
    torn = (
        noise.map(lambda put: sound[:a] + put)
        if name == "x.parquet"
        else noise.map(lambda put: sound[:a] + put + sound[b:])
    )
    path = written(name, data.draw(noise | torn))
    for errors, read in itertools.product(
        ("strict", "replace"), (read_chunks, lambda p, **k: read_records(p, ["n", "text"], **k))
    ):
        try:
            for one in read([path], errors=errors):
                if isinstance(one, Chunk):
                    one.text.decode()
        except GlasshouseError:
            pass
