"""What kind of data a table holds, and in which columns, told by their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glasshouse as gh
from glasshouse.data.dataset_reader import open_reader
from glasshouse.errors import InputError
from glasshouse.text import sources

KINDS = [
    (("text",), None, "text", ("text",)),
    (("id", "text", "label"), None, "text", ("text",)),
    (("text", "source", "target"), None, "text", ("text",)),
    (("target", "source"), None, "pairs", ("source", "target")),
    (("en", "de"), "pairs", "pairs", ("en", "de")),
    (("target", "english"), "pairs", "pairs", ("english", "target")),
    (("english", "source"), "pairs", "pairs", ("source", "english")),
    (("label", "review"), "labelled", "labelled", ("review", "label")),
    (("a", "text", "label"), "labelled", "labelled", ("text", "label")),
    (("prompt", "completion", "id"), None, "chat", ("prompt", "completion")),
    (("prompt", "completion"), "chat", "chat", ("prompt", "completion")),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet", ".arrow"])
@pytest.mark.parametrize(("columns", "given", "kind", "fields"), KINDS)
def test_the_columns_tell_the_kind_and_the_fields(
    columns: tuple[str, ...], given: str | None, kind: str, fields: tuple[str, ...], suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    rows = [{name: f"{name} {number}" for name in columns} for number in range(3)]
    match suffix:
        case ".jsonl":
            path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
        case ".csv" | ".tsv":
            between = "," if suffix == ".csv" else "\t"
            path.write_text("".join(between.join(row) + "\n" for row in (columns, *(row.values() for row in rows))))
        case ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".arrow":
            import pyarrow

            table = pyarrow.Table.from_pylist(rows)
            with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    feed = open_reader(path, kind=given)  # type: ignore[arg-type]
    assert (feed.kind, feed.columns) == (kind, fields)
    assert sources.columns(path) == columns


@pytest.mark.parametrize(
    ("fields", "kind"), [(("source", "target"), "pairs"), (("prompt", "completion"), "chat"), (("body",), "text")]
)
def test_fields_that_are_named_tell_the_kind(fields: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(dict.fromkeys(("source", "target", "prompt", "completion", "body"), "x")) + "\n")
    assert open_reader(path, columns=fields).kind == kind


def test_messages_are_a_chat_and_words_with_tags_are_tagged(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "tags.jsonl").write_text(json.dumps({"words": ["a", "b"], "tags": ["X", "Y"]}) + "\n")
    assert open_reader(tmp_path / "chat.jsonl").kind == "chat"
    assert open_reader(tmp_path / "tags.jsonl").kind == "tagged"
    assert open_reader(tmp_path / "tags.jsonl").labels == ("X", "Y")


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        (
            "a.txt",
            b"text",
            "pairs",
            "is plain text, which is of kind text, not pairs: .*or two plain",
        ),
        ("a.txt", b"text", "chat", "is plain text, which is of kind text, not chat: .*arrow file\\.$"),
        ("a.tsv", b"a\tb\tc\n1\t2\t3\n", "pairs", "has the columns a, b, c, but pairs needs two"),
        ("a.tsv", b"Wie geht es dir?\thow\n", "pairs", "has 'Wie geht es dir\\?' where the names.*data.columns=1,2"),
        ("a.jsonl", b"[" * 100_000, "text", "nested too deeply"),
        ("a.jsonl", b"\xff\xfe", "pairs", "not UTF-8"),
        ("a.parquet", b"PAR1", "pairs", "not a valid Parquet file"),
        ("a.csv", b'"a\n', "pairs", "not valid csv"),
        ("a.jsonl", b"", "pairs", "contains no records"),
    ],
)
def test_what_cannot_be_told_or_read_is_one_sentence(
    name: str, content: bytes, kind: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    tok = gh.Tokenizer.train(texts=["a"], vocab_size=263)
    with pytest.raises(InputError, match=said):
        gh.data.prepare(tmp_path / name, tok, tmp_path / "ids", kind=kind)  # type: ignore[arg-type]


def test_skipped_files_of_a_folder_are_reported(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "b.png", "c", ".git/d.png", ".e.png"):
        (tmp_path / name).write_text("x")
    assert [path.name for path in sources.skipped_files([tmp_path, tmp_path / "a.txt"])] == ["b.png", "c"]
