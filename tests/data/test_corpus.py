"""Text to ids on disk: what is written is what was read, stopping loses nothing, and damage is found."""

from __future__ import annotations

import csv
import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import processes
import pytest
from examples import up_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import glasshouse as gh
from glasshouse import GlasshouseError, InputError, StoreError
from glasshouse.data import dataset_reader, preparation, shards
from glasshouse.text.sources import Record

from .conftest import ENGLISH

Texts = Callable[..., gh.data.Corpus]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=up_to(40), deadline=None)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=6), st.integers(1, 30))
def test_what_is_written_is_what_was_read(
    tmp_path_factory: pytest.TempPathFactory, tok: gh.Tokenizer, documents: list[str], shard: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    documents = [text.replace("\ufeff", "x") for text in documents]  # which a file may begin with, and loses
    for number, text in enumerate(documents):
        (folder / f"{number}.txt").write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BATCH_BYTES", 16)
        corpus = gh.data.prepare(folder, tok, folder / "corpus", shard_tokens=shard)
    end = tok.special_id("eos")
    assert len(corpus) == len(documents)
    assert corpus.n_tokens == sum(len(tok.encode(text)) + 1 for text in documents)
    for number, text in enumerate(documents):
        (ids,) = corpus.item(number)
        assert ids.tolist() == [*tok.encode(text), end]
        assert Path(corpus.source_name(number)).name == f"{number}.txt"
    everything = np.concatenate([corpus.item(number)[0] for number in range(len(corpus))])
    assert corpus.read(0, corpus.n_tokens).tolist() == everything.tolist()
    for place in range(corpus.n_tokens):
        (ids,) = corpus.item(corpus.item_at(place))
        assert everything[place] in ids


def test_the_manifest_has_hashes_of_all_files(texts: Texts, tok: gh.Tokenizer, tmp_path: Path) -> None:
    corpus = texts("to be", "or not")
    manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
    assert manifest["tokenizer"] == tok.fingerprint == corpus.tokenizer.fingerprint
    assert manifest["items"] == 2
    sources = [(tmp_path / "corpus-texts" / f"0000{n}.txt").read_bytes() for n in (0, 1)]
    assert [source["sha256"] for source in manifest["sources"]] == [hashlib.sha256(b).hexdigest() for b in sources]
    assert [source["bytes"] for source in manifest["sources"]] == [len(data) for data in sources]
    (shard,) = manifest["shards"]
    for entry in shard.values():
        data = (tmp_path / "corpus" / entry["file"]).read_bytes()
        assert entry["bytes"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    assert np.load(tmp_path / "corpus" / shard["ids"]["file"]).dtype == np.uint16  # anyone's numpy reads it


@pytest.mark.long
def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<end>": 1} | {f"w{n}": n for n in range(2, 70_000)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    document = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    tok = gh.Tokenizer.from_json(json.dumps(document), {"eos_token": "<end>"})
    (tmp_path / "a.txt").write_text("w69999 w2")
    corpus = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "corpus")
    assert corpus.item(0)[0].tolist() == [69_999, 2, 1]
    assert np.load(tmp_path / "corpus" / "00000.ids.npy").dtype == np.uint32


def test_start_and_end_tokens_that_differ(texts: Texts) -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=258, special_tokens={"bos": "<start>", "eos": "<end>"})
    corpus = texts("a", "b", tokenizer=tok)
    assert corpus.read(0, corpus.n_tokens).tolist() == [0, *tok.encode("a"), 1, 0, *tok.encode("b"), 1]


def test_a_long_text_is_cut_into_pieces_and_stays_one(
    texts: Texts, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_reader, "CHUNK_BYTES", 100)
    monkeypatch.setattr(preparation, "BATCH_BYTES", 1000)
    text = ENGLISH[:20_000]
    corpus = texts(text)
    assert len(corpus) == 1
    assert corpus.item(0)[0].tolist() == [*tok.encode(text), 0]


def test_a_tokenizer_that_does_not_split_at_newlines_gets_texts_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that puts a mark before every text would put one at each cut."""
    monkeypatch.setattr(dataset_reader, "CHUNK_BYTES", 8)
    vocab = {token: number for number, token in enumerate(["<unk>", "</s>", "▁", *"abcdefgh\n"])}
    document = {
        "version": "1.0",
        "normalizer": {"type": "Prepend", "prepend": "▁"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"},
    }
    tok = gh.Tokenizer.from_json(json.dumps(document), {"eos_token": "</s>"})
    (tmp_path / "a.txt").write_text("abc\ndef\nabc\ndef\nabc\ndef\n")
    corpus = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "corpus")
    assert corpus.item(0)[0].tolist() == [*tok.encode((tmp_path / "a.txt").read_text()), 1]


def test_a_text_too_long_to_be_encoded_at_once_is_split_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_reader, "CHUNK_BYTES", 8)
    monkeypatch.setattr(preparation, "MAX_CHUNK_BYTES", 16)
    vocab = {token: number for number, token in enumerate(["<unk>", "</s>", "▁", *"abcdefgh\n"])}
    document = {
        "version": "1.0",
        "normalizer": {"type": "Prepend", "prepend": "▁"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"},
    }
    tok = gh.Tokenizer.from_json(json.dumps(document), {"eos_token": "</s>"})
    (tmp_path / "a.txt").write_text("abc\n" * 10)
    with pytest.warns(UserWarning, match=r"a.txt' is longer than the limit of 16 bytes per chunk: .* separator"):
        corpus = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "corpus")
    assert len(corpus) == 1
    assert corpus.item(0)[0].tolist() == [*tok.encode("abc\n" * 4) * 2, *tok.encode("abc\n" * 2), 1]


def test_batches_of_records_are_counted_by_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 1000)
    chat = [{"role": "user", "content": "x" * 400}]
    for values in (("x" * 300, "y" * 100), (["x" * 100] * 4,), (chat,)):
        found = preparation._batches(iter([Record(values, 0, number) for number in range(7)]))
        assert [len(batch) for batch in found] == [3, 3, 1]


SMALL_MACHINE = """
import resource, sys
import glasshouse as gh
from glasshouse.data import preparation
from glasshouse.text.sources import chunking

source, folder, room, longest = sys.argv[1:]
chunking.MAX_CHUNK_BYTES = preparation.MAX_CHUNK_BYTES = preparation.BATCH_BYTES = int(longest)
tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
tok.corpus_encoder()
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + int(room)
resource.setrlimit(resource.RLIMIT_AS, (taken, taken))
print(gh.data.prepare(source, tok, folder).n_tokens)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory is taken")
@pytest.mark.parametrize(
    ("size", "room", "longest"),
    [(2**25, 2**29, 2**20), pytest.param(300_000_000, 3 * 2**29, 2**24, marks=pytest.mark.long)],
)
def test_one_word_of_many_megabytes_takes_bounded_memory(tmp_path: Path, size: int, room: int, longest: int) -> None:
    """Memory that runs out in Rust ends the process."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * size, 1))
    given = [str(one) for one in (tmp_path / "a.txt.gz", tmp_path / "corpus", room, longest)]
    command = [sys.executable, "-W", "ignore", "-c", SMALL_MACHINE, *given]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout == f"{size + 1}\n", done.stderr


def write_tables(folder: Path, rows: list[dict[str, str]]) -> list[Path]:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return [folder / name for name in ("rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.tsv")]


def test_pairs_from_every_kind_of_table(tmp_path: Path, tok: gh.Tokenizer) -> None:
    rows = [{"source": "good day", "target": "guten Tag"}, {"source": "yes,\nno", "target": 'ja, "nein"'}]
    for number, path in enumerate(write_tables(tmp_path, rows)):
        corpus = gh.data.prepare(path, tok, tmp_path / f"corpus{number}", kind="pairs")
        assert [tuple(tok.decode(part) for part in corpus.item(n)) for n in (0, 1)] == [
            tuple(row.values()) for row in rows
        ]


def test_pairs_from_two_files_line_by_line(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "train.en").write_text("yes\nno\n")
    (tmp_path / "train.de").write_text("ja\nnein\n")
    corpus = gh.data.prepare([tmp_path / "train.en", tmp_path / "train.de"], tok, tmp_path / "out", kind="pairs")
    assert [tuple(tok.decode(part) for part in corpus.item(n)) for n in (0, 1)] == [("yes", "ja"), ("no", "nein")]


def test_labels_are_numbered_by_name(tmp_path: Path, tok: gh.Tokenizer) -> None:
    rows = [{"text": "well done", "label": "good"}, {"text": "oh no", "label": "bad"}]
    for number, path in enumerate(write_tables(tmp_path, rows)):
        corpus = gh.data.prepare(path, tok, tmp_path / f"corpus{number}", kind="labelled")
        assert corpus.labels == ("bad", "good")
        assert corpus.n_tokens == sum(len(tok.encode(row["text"])) for row in rows)  # labels are not tokens
        assert [(tok.decode(text), label.tolist()) for text, label in map(corpus.item, (0, 1))] == [
            ("well done", [1]),
            ("oh no", [0]),
        ]


@pytest.mark.parametrize("label", ["NaN", "Infinity", "-Infinity", "[1]", "{}", "null", '""', '" "'])
def test_what_is_no_label_is_refused_by_file_and_line(tmp_path: Path, tok: gh.Tokenizer, label: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "x", "label": "good"}}\n\n{{"text": "y", "label": {label}}}\n')
    with pytest.raises(InputError, match=r"line 3 of '.*a\.jsonl' has the label .*; fix it, or remove"):
        gh.data.prepare(path, tok, tmp_path / "corpus", kind="labelled")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(("one", "other"), [("1", '"1"'), ("1", "1.0"), ("true", "1"), ('"True"', "true")])
def test_labels_that_differ_in_type_alone_are_refused(
    tmp_path: Path, tok: gh.Tokenizer, one: str, other: str
) -> None:
    for name, label in (("a.jsonl", one), ("b.jsonl", other)):
        (tmp_path / name).write_text(f'{{"text": "x", "label": "else"}}\n{{"text": "x", "label": {label}}}\n')
    sentence = (
        r"line 2 of '.*b\.jsonl' has the label .*, and line 2 of '.*a\.jsonl' has .*; use one type for all labels\."
    )
    with pytest.raises(InputError, match=sentence):
        gh.data.prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tok, tmp_path / "corpus", kind="labelled")


def test_labels_may_be_numbers(tmp_path: Path, tok: gh.Tokenizer) -> None:
    rows = [{"text": "x", "label": label} for label in (1, 2, 2.5, "nan", 1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "corpus", kind="labelled")
    assert corpus.labels == ("1", "2", "2.5", "nan")
    assert [int(corpus.item(number)[1][0]) for number in range(5)] == [0, 1, 2, 3, 0]


def write_tagged(path: Path, *records: tuple[list[str], list[str]]) -> Path:
    path.write_text("".join(json.dumps({"words": words, "tags": tags}) + "\n" for words, tags in records))
    return path


def test_tags_stand_at_the_first_id_of_each_word(tmp_path: Path) -> None:
    """Each id is a byte: 1 + the tag's number where a word begins, which is the space before it, and 0 elsewhere."""
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    path = write_tagged(tmp_path / "a.jsonl", (["I", "am", "it"], ["who", "do", "who"]), (["né"], ["be"]))
    corpus = gh.data.prepare(path, tok, tmp_path / "corpus", kind="tagged")
    assert corpus.labels == ("be", "do", "who")
    assert [[tok.decode(ids), tags.tolist()] for ids, tags in map(corpus.item, (0, 1))] == [
        ["I am it", [3, 2, 0, 0, 3, 0, 0]],
        ["né", [1, 0, 0]],  # of three bytes
    ]
    assert repr(corpus) == "Corpus(tagged, 2 items, 10 tokens)"
    (tmp_path / "b.jsonl").write_text('{"form": ["ab"], "pos": ["x"]}')
    other = gh.data.prepare(tmp_path / "b.jsonl", tok, tmp_path / "b", kind="tagged", columns=["form", "pos"])
    assert [part.tolist() for part in other.item(0)] == [tok.encode("ab"), [1, 0]]


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
TAGGED = st.lists(st.tuples(WORDS, st.sampled_from(["a", "b", "é"])), min_size=1, max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=up_to(40), deadline=None)
@given(st.lists(TAGGED, min_size=1, max_size=5), st.integers(1, 30))
def test_tagged_words_are_encoded_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, tok: gh.Tokenizer, items: list[list[tuple[str, str]]], shard: int
) -> None:
    folder = tmp_path_factory.mktemp("tagged")
    path = write_tagged(folder / "a.jsonl", *(([w for w, _ in item], [t for _, t in item]) for item in items))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BATCH_BYTES", 4)
        patch.setattr(preparation, "BATCH_RECORDS", 2)
        corpus = gh.data.prepare(path, tok, folder / "corpus", kind="tagged", shard_tokens=shard)
    labels = sorted({tag for item in items for _, tag in item})
    assert (corpus.labels, len(corpus)) == (tuple(labels), len(items))
    for number, item in enumerate(items):
        ids, tags = [], []
        for at, (word, tag) in enumerate(item):
            own = tok.encode(f" {word}" if at else word, add_special_tokens=False)
            ids += own
            tags += [1 + labels.index(tag)] + [0] * (len(own) - 1)
        assert [part.tolist() for part in corpus.item(number)] == [ids, tags]


SPACED = {
    "byte level": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "Ġb": 3}, "merges": ["Ġ b"]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    },
    "a mark before each word": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "▁": 2, "▁b": 3}, "merges": ["▁ b"]},
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    },
    "no spaces at all": {
        "model": {
            "type": "WordPiece",
            "vocab": {"a": 0, "b": 1, "##a": 2, "##b": 3, "?": 4},
            "unk_token": "?",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 9,
        },
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
}


SPACED["a mark before each word, and a start token"] = SPACED["a mark before each word"] | {
    "added_tokens": [
        {"id": 4, "content": "<s>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ],
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
    },
}


@pytest.mark.parametrize("name", SPACED)
def test_words_are_spaced_as_the_tokenizer_spaces_a_text(tmp_path: Path, name: str) -> None:
    tok = gh.Tokenizer.from_json(json.dumps({"version": "1.0", "added_tokens": [], **SPACED[name]}))
    words = ["b", "ba", "b", "ab"]
    path = write_tagged(tmp_path / "a.jsonl", (words, ["x"] * 4))
    ids, tags = gh.data.prepare(path, tok, tmp_path / "corpus", kind="tagged").item(0)
    assert ids.tolist() == tok.encode("b ba b ab", add_special_tokens=False)
    assert tags.sum() == 4
    found = [tok.decode(word).strip() for word in np.split(ids, np.flatnonzero(tags))[1:]]
    assert found == words


def test_a_word_that_a_tokenizer_drops_is_not_asked_about(tmp_path: Path) -> None:
    tok = gh.Tokenizer.from_json(json.dumps({"version": "1.0", "added_tokens": [], **SPACED["no spaces at all"]}))
    path = write_tagged(
        tmp_path / "a.jsonl", ([" ", "a", " ", "bb", " "], list("vwxyz")), (["b"], ["w"]), ([" "], ["v"])
    )
    corpus = gh.data.prepare(path, tok, tmp_path / "corpus", kind="tagged")
    assert [[part.tolist() for part in corpus.item(number)] for number in range(3)] == [
        [[0, 1, 3], [2, 4, 0]],
        [[1], [2]],
        [[], []],
    ]


def test_conversations_mark_the_assistant_tokens(tmp_path: Path, tok: gh.Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    corpus = gh.data.prepare(tmp_path / "chat.jsonl", tok, tmp_path / "corpus", kind="chat")
    ids, runs = corpus.item(0)
    assert corpus.n_tokens == len(ids)  # not with the numbers that say where answers lie
    spans = np.split(ids, np.cumsum(runs)[:-1])
    assert [tok.decode(span) for span in spans] == [
        "<|user|>2 + 2?<|end|><|assistant|>",
        "4<|end|>",
        "<|user|>sure?<|end|><|assistant|>",
        "Yes.<|end|>",
    ]


def test_prompts_and_completions(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"ask": "2 + 2?", "say": "4"}) + "\n")
    corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "chat", kind="chat", columns=("ask", "say"))
    assert tok.decode(corpus.item(0)[0]) == "<|user|>2 + 2?<|end|><|assistant|>4<|end|>"
    plain = gh.Tokenizer.train(texts=["to be"], vocab_size=257, special_tokens={"eos": "<|end|>"})
    corpus = gh.data.prepare(tmp_path / "a.jsonl", plain, tmp_path / "plain", kind="chat", columns=("ask", "say"))
    ids, runs = corpus.item(0)
    assert plain.decode(ids) == "2 + 2?4<|end|>"
    assert runs.tolist() == [6, 2]


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", gh.data.builtin_datasets())
def test_built_in_sets_need_no_file(tmp_path: Path, tok: gh.Tokenizer, name: str) -> None:
    corpus = gh.data.prepare(name, tok, tmp_path / name, split="validation")
    found = gh.data.builtin_dataset(name)
    assert corpus.kind == found.kind
    assert len(corpus) == found.sizes()["validation"]
    item = next(found.items("validation", 7))
    parts = corpus.item(7)
    match corpus.kind:
        case "text":
            assert tok.decode(parts[0]) == item[1] + "<|endoftext|>"
        case "pairs":
            assert tuple(map(tok.decode, parts)) == item
        case "labelled":
            assert (tok.decode(parts[0]), corpus.labels[parts[1][0]]) == item
        case "chat":
            assert parts[0].tolist() == tok.encode_chat(item).ids


# Stopping.


class StoppedError(Exception):
    pass


def failing_after(calls: int, original: Callable[..., None]) -> Callable[..., None]:
    left = iter(range(calls))

    def fail(*args: object) -> None:
        if next(left, None) is None:
            raise StoppedError
        original(*args)

    return fail


LATER = ("labelled", "tagged", "chat", "preferences")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "pairs", *(pytest.param(kind, marks=pytest.mark.long) for kind in LATER)])
def test_stopped_anywhere_it_resumes_to_the_same_files(
    tmp_path: Path, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(dataset_reader, "CHUNK_BYTES", 300)
    monkeypatch.setattr(preparation, "BATCH_BYTES", 1000)
    monkeypatch.setattr(preparation, "BATCH_RECORDS", 10)
    if kind == "text":
        source: list[str | Path] = [tmp_path / "texts"]
        (tmp_path / "texts").mkdir()
        for number in range(5):
            (tmp_path / "texts" / f"{number}.txt").write_text(ENGLISH[number * 2000 : number * 1950 + 2000])
    elif kind == "tagged":
        lines = (line.split() for line in ENGLISH.splitlines() if line.split())
        rows = [(words, ["long" if len(word) > 3 else "short" for word in words]) for words in islice(lines, 60)]
        source = [write_tagged(tmp_path / "tagged.jsonl", *rows)]
    else:
        monkeypatch.setattr(
            dataset_reader, "builtin_dataset", lambda name: gh.data.builtin_dataset(name, validation=60)
        )
        source = [{"pairs": "dates", "labelled": "langid"}.get(kind, kind)]
    settings = {"shard_tokens": 250, "split": "validation", "kind": kind}
    gh.data.prepare(source, tok, tmp_path / "whole", **settings)
    expected = contents(tmp_path / "whole")
    n_shards = sum(name.endswith(".ids.npy") for name in expected)
    assert n_shards >= 4
    write, add = shards.ShardWriter._put, shards.ShardWriter._append
    for stop in range(n_shards):
        for victim in ("_put", "_append"):  # just before a shard is vouched for; in the middle of one
            with monkeypatch.context() as patch:
                patch.setattr(shards.ShardWriter, victim, failing_after(stop, write if victim == "_put" else add))
                with pytest.raises(StoppedError):
                    gh.data.prepare(source, tok, tmp_path / f"{victim}{stop}", **settings)
            assert not (tmp_path / f"{victim}{stop}" / "manifest.json").exists()
            gh.data.prepare(source, tok, tmp_path / f"{victim}{stop}", **settings)
            assert contents(tmp_path / f"{victim}{stop}") == expected


def prepare_up_to(place: Path, folder: str, limit: int) -> None:
    def kill_beyond(stage: str, done: int, total: int) -> None:
        if done > limit:
            os.kill(os.getpid(), signal.SIGKILL)

    os.chdir(place)
    preparation.BATCH_BYTES = 20_000
    gh.data.dataset_reader.CHUNK_BYTES = 5_000
    gh.data.prepare("*.txt", gh.Tokenizer.load("tok"), folder, shard_tokens=20_000, progress=kill_beyond)


@pytest.mark.slow
def test_killed_it_resumes_to_the_same_files(tmp_path: Path, tok: gh.Tokenizer) -> None:
    tok.save(tmp_path / "tok")
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(ENGLISH[number * 100_000 :][:90_000])
    size = sum((tmp_path / f"{number}.txt").stat().st_size for number in range(4))
    assert processes.run(prepare_up_to, tmp_path, "whole", size) == 0
    assert processes.run(prepare_up_to, tmp_path, "killed", size * 2 // 3) == -signal.SIGKILL
    assert (tmp_path / "killed" / "progress.json").exists()
    assert processes.run(prepare_up_to, tmp_path, "killed", size) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_resumed_preparation_reports_its_progress(
    tmp_path: Path, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 100)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("to be or not to be\n" * 10)
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "add", failing_after(2, shards.ShardWriter.add))
        with pytest.raises(StoppedError):
            gh.data.prepare(f"{tmp_path}/*.txt", tok, tmp_path / "corpus", shard_tokens=10)
    seen: list[tuple[int, int]] = []
    gh.data.prepare(
        f"{tmp_path}/*.txt",
        tok,
        tmp_path / "corpus",
        shard_tokens=10,
        progress=lambda _, done, of: seen.append((done, of)),
    )
    assert seen[0] == (190, 760)  # the second text was not yet all in shards: the file before it is where it resumes
    assert seen[-1] == (760, 760)


def test_prepared_twice_is_prepared_once(texts: Texts, tok: gh.Tokenizer, tmp_path: Path) -> None:
    texts("to be")
    before = contents(tmp_path / "corpus")
    (tmp_path / "corpus" / "00000.ids.npy").stat()
    gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "corpus")
    assert contents(tmp_path / "corpus") == before


def test_files_with_other_times_and_the_same_content_are_the_same(
    texts: Texts, tok: gh.Tokenizer, tmp_path: Path
) -> None:
    texts("to be", "or not")
    before, folder = contents(tmp_path / "corpus"), tmp_path / "corpus-texts"
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    gh.data.prepare(folder, tok, tmp_path / "corpus")
    assert contents(tmp_path / "corpus") == before
    (folder / "00001.txt").write_text("or nut")  # of the same size
    with pytest.raises(StoreError) as error:
        gh.data.prepare(folder, tok, tmp_path / "corpus")
    assert f"sources changed since; delete {str(tmp_path / 'corpus')!r} to prepare it again" in str(error.value)


def test_two_aligned_files_and_a_part_with_other_times_are_the_same(tok: gh.Tokenizer, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("en.txt", "de.txt")]
    for path, text in zip(files, ("yes\nno\n", "ja\nnein\n"), strict=True):
        path.write_text(text)

    def prepare() -> list[list[list[int]]]:
        pairs = gh.data.prepare(files, tok, tmp_path / "pairs", kind="pairs")
        part = gh.data.prepare(files, tok, tmp_path / "parts", part=(2, 2))  # one of the two files
        return [[ids.tolist() for ids in pairs.item(1)], [ids.tolist() for ids in part.item(0)]]

    before = prepare()
    os.utime(files[0], (0, 0))
    os.utime(files[1], (0, 0))
    assert prepare() == before
    files[1].write_text("ja\nNEIN\n")
    with pytest.raises(StoreError, match="delete"):
        prepare()


def test_an_interrupted_preparation_resumes_where_read_files_have_other_times(
    tok: gh.Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "one.txt"
    source.write_text("to be or not to be " * 20)
    whole = gh.data.prepare(source, tok, tmp_path / "whole", shard_tokens=50)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("glasshouse.data.shards.ShardWriter.finish", stop)
        with pytest.raises(KeyboardInterrupt):
            gh.data.prepare(source, tok, tmp_path / "ids", shard_tokens=50)
    os.utime(source, (0, 0))
    resumed = gh.data.prepare(source, tok, tmp_path / "ids", shard_tokens=50)
    assert np.array_equal(resumed.read(0, resumed.n_tokens), whole.read(0, whole.n_tokens))


def test_another_job_does_not_resume(texts: Texts, tok: gh.Tokenizer, tmp_path: Path) -> None:
    texts("to be")
    other = gh.Tokenizer.train(texts=["to be"], vocab_size=264)
    with pytest.raises(StoreError, match="was started with different tokenizer"):
        gh.data.prepare(tmp_path / "corpus-texts", other, tmp_path / "corpus")
    (tmp_path / "corpus-texts" / "more.txt").write_text("more")
    with pytest.raises(StoreError, match="was started with different sources"):
        gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "corpus")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="contains other files"):
        gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


# Damage.


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


DAMAGES = {
    "a shard cut short": (damage("00000.ids.npy", lambda data: data[:-3]), r"has \d+ bytes instead of \d+"),
    "a bit flipped in ids": (
        damage("00000.ids.npy", lambda d: d[:-1] + bytes([d[-1] ^ 1])),
        "does not match its hash",
    ),
    "a bit flipped in ends": (
        damage("00000.ends.npy", lambda d: d[:-4] + bytes([d[-4] ^ 1]) + d[-3:]),
        "does not match its hash",
    ),
    "a shard that is gone": (lambda folder: (folder / "00000.ids.npy").unlink(), "is missing"),
    "a manifest cut short": (damage("manifest.json", lambda data: data[:40]), "is corrupt"),
    "a manifest of nothing": (damage("manifest.json", lambda _: b"[]"), "not a manifest that this version supports"),
    "a manifest of the future": (
        damage("manifest.json", lambda d: d.replace(b'"format": 2', b'"format": 9')),
        "not a manifest that this version supports",
    ),
    "a manifest without shards": (
        damage("manifest.json", lambda d: d.replace(b'"shards"', b'"shreds"')),
        "not a manifest that this version supports",
    ),
    "a manifest that leads elsewhere": (
        damage("manifest.json", lambda d: d.replace(b"00000.ids.npy", b"../../../ids.npy")),
        "not a manifest that this version supports",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "there is no .*manifest.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_sentence(texts: Texts, tmp_path: Path, name: str) -> None:
    texts("to be or not to be")
    break_it, sentence = DAMAGES[name]
    break_it(tmp_path / "corpus")
    with pytest.raises(StoreError, match=sentence):
        gh.data.Corpus.open(tmp_path / "corpus")


def test_a_corpus_of_another_tokenizer_is_refused(texts: Texts, tmp_path: Path) -> None:
    texts("to be")
    other = gh.Tokenizer.train(texts=["not to be"], vocab_size=264)
    with pytest.raises(StoreError, match="was encoded with another tokenizer"):
        gh.data.Corpus.open(tmp_path / "corpus", tokenizer=other)
    other.save(tmp_path / "corpus" / "tokenizer")
    with pytest.raises(StoreError, match="is not the one that encoded the corpus"):
        _ = gh.data.Corpus.open(tmp_path / "corpus").tokenizer


def test_a_tokenizer_without_an_end_is_refused(texts: Texts) -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=257, special_tokens={"pad": "<pad>"})
    with pytest.raises(InputError, match="no end token"):
        texts("to be", tokenizer=tok)


BAD = {
    "not UTF-8": ("a.txt", b"caf\xe9", {}, r"not UTF-8.*byte 3.*errors"),
    "empty": ("a.txt", b"", {}, "contains no text"),
    "no column": ("a.csv", b"body,title\nx,y\n", {}, "text.*body"),
    "no key": ("a.jsonl", b'{"body": "x"}\n', {}, "text.*body"),
    "a number for a text": (
        "a.jsonl",
        b'{"source": 1, "target": "x"}\n',
        {"kind": "pairs"},
        "record 1 of .* has 1, but",
    ),
    "no answer": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "x"}]}\n',
        {"kind": "chat"},
        "record 1 of .*no assistant message",
    ),
    "no role": ("a.jsonl", b'{"messages": [{"content": "x"}]}\n', {"kind": "chat"}, "record 1 of .*role"),
    "fewer tags than words": (
        "a.jsonl",
        b'{"words": ["x"], "tags": ["y"]}\n{"words": ["x", "y"], "tags": ["z"]}\n',
        {"kind": "tagged"},
        r"^record 2 of '.*a\.jsonl' has 2 words, but 1 tags; give each word one tag\.$",
    ),
    "a text for words": (
        "a.jsonl",
        b'{"words": "x y", "tags": ["y", "z"]}\n',
        {"kind": "tagged"},
        r"^record 1 of '.*a\.jsonl' has 'x y' in 'words', but it must be a list of non-empty strings",
    ),
    "a number for a tag": (
        "a.jsonl",
        b'{"words": ["x"], "tags": ["y"]}\n{"words": ["x"], "tags": [1]}\n',
        {"kind": "tagged"},
        r"^record 2 of '.*a\.jsonl' has \[1\] in 'tags', but it must be a list of non-empty strings",
    ),
    "an empty word": (
        "a.jsonl",
        b'{"words": [""], "tags": ["y"]}',
        {"kind": "tagged"},
        r"record 1 of .*\[''\] in 'words'",
    ),
    "no words": (
        "a.jsonl",
        b'{"words": [], "tags": []}',
        {"kind": "tagged"},
        r"record 1 of .* has \[\] in 'words'",
    ),
    "tags in a table of cells": (
        "a.tsv",
        b"words\ttags\nx y\ta b\n",
        {"kind": "tagged"},
        "record 1 of .*'x y' in 'words'",
    ),
    "one column for tagged": ("a.jsonl", b"{}", {"kind": "tagged", "columns": ["x"]}, "tagged has two"),
    "no kind": ("a.txt", b"x", {"kind": "texts"}, "kind is 'texts'.*text"),
    "plain text for pairs": ("a.txt", b"x", {"kind": "pairs"}, "jsonl, csv, tsv, parquet or arrow"),
    "no split": ("a.txt", b"x", {"source": "dates", "split": "tset"}, "no split 'tset' of dates.*test"),
    "one column for pairs": ("a.jsonl", b"{}", {"kind": "pairs", "columns": ["x"]}, "pairs has two"),
    "two columns for text": ("a.jsonl", b"{}", {"columns": ["x", "y"]}, "text has one"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing_half_done(tmp_path: Path, tok: gh.Tokenizer, name: str) -> None:
    file, data, settings, sentence = BAD[name]
    (tmp_path / file).write_bytes(data)
    settings = {"source": tmp_path / file, **settings}
    with pytest.raises(GlasshouseError, match=sentence):
        gh.data.prepare(tokenizer=tok, folder=tmp_path / "corpus", **settings)
    assert not (tmp_path / "corpus" / "manifest.json").exists()


def test_bad_text_can_be_replaced(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    corpus = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "corpus", errors="replace")
    assert tok.decode(corpus.item(0)[0]) == "caf\ufffd<|endoftext|>"


@pytest.mark.parametrize("file", ["00001.ids.npy", "00001.ends.npy", "progress.json", "tokenizer.json"])
def test_a_disk_that_is_full_is_a_sentence_and_loses_nothing(
    tmp_path: Path, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr(dataset_reader, "CHUNK_BYTES", 300)
    monkeypatch.setattr(preparation, "BATCH_BYTES", 1000)
    (tmp_path / "a.txt").write_text(ENGLISH[:5000])
    whole = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "whole", shard_tokens=500)
    sync = os.fsync

    def full(number: int) -> None:
        if file in Path(f"/proc/self/fd/{number}").readlink().name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    if not Path("/proc/self/fd").exists():
        pytest.skip("only Linux says which file is written")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            StoreError, match=r"'.*corpus' cannot be written to \(No space left on device\); free disk space"
        ):
            gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "corpus", shard_tokens=500)
    again = gh.data.prepare(tmp_path / "a.txt", tok, tmp_path / "corpus", shard_tokens=500)
    assert again.read(0, again.n_tokens).tolist() == whole.read(0, whole.n_tokens).tolist()


def test_an_unwritable_folder_is_named(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("text")
    for place in (tmp_path / "a.txt" / "corpus", f"{tmp_path}/zero\0byte", tmp_path / ("x" * 5000)):
        with pytest.raises(StoreError, match="cannot be written to"):
            gh.data.prepare(tmp_path / "a.txt", tok, place)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2_000_000, pytest.param(8_400_000, marks=pytest.mark.long)])
def test_a_line_of_many_megabytes(tmp_path: Path, tok: gh.Tokenizer, count: int) -> None:
    line = "words " * count
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": line}) + "\n")
    corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "corpus")
    assert len(corpus) == 1
    assert tok.decode_bytes(corpus.read(corpus.n_tokens - 60, corpus.n_tokens)).endswith(b"words words <|endoftext|>")


# What a hostile reviewer tried.


@pytest.mark.long
@pytest.mark.slow
def test_more_labels_than_two_bytes_can_number(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "x", "label": "{n:06}"}}\n' for n in range(66_000)))
    corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "corpus", kind="labelled")
    assert corpus.labels[corpus.item(65_999)[1][0]] == "065999"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("n", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_as_many_tags_as_two_bytes_can_number_and_one_more(
    tmp_path: Path, tok: gh.Tokenizer, n: int, dtype: type
) -> None:
    path = write_tagged(tmp_path / "a.jsonl", (["x"] * n, [f"{number:06}" for number in range(n)]))
    corpus = gh.data.prepare(path, tok, tmp_path / "corpus", kind="tagged")
    tags = corpus.item(0)[1]
    assert tags[tags > 0].tolist() == list(range(1, n + 1))
    assert np.load(tmp_path / "corpus" / "00000.ids.npy").dtype == dtype


@pytest.mark.parametrize("finished", [True, False])
def test_an_input_that_changed_is_not_gone_on_with(
    tmp_path: Path, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 100)
    source = tmp_path / "a.txt"
    source.write_text("old line\n" * 500)
    with monkeypatch.context() as patch:
        if not finished:
            patch.setattr(shards.ShardWriter, "finish", failing_after(0, shards.ShardWriter.finish))
        patch.setattr(dataset_reader, "CHUNK_BYTES", 50)
        try:
            gh.data.prepare(source, tok, tmp_path / "corpus", shard_tokens=50)
        except StoppedError:
            assert not finished
    source.write_text("new line\n" * 500)  # of the same size
    os.utime(source, ns=(1, 1))
    with pytest.raises(StoreError, match="different sources, or sources changed since"):
        gh.data.prepare(source, tok, tmp_path / "corpus", shard_tokens=50)


def test_another_template_or_end_is_another_job(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"ask": "2 + 2?", "say": "4"}) + "\n")
    other = gh.Tokenizer.train(texts=[ENGLISH[:300_000]], vocab_size=600)
    assert other.fingerprint == tok.fingerprint
    settings = {"kind": "chat", "columns": ("ask", "say")}
    gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / "corpus", **settings)
    other.chat_template = str(tok.chat_template) + " "
    with pytest.raises(StoreError, match="different chat_template"):
        gh.data.prepare(tmp_path / "a.jsonl", other, tmp_path / "corpus", **settings)


def test_damage_is_found_when_prepared_again(texts: Texts, tok: gh.Tokenizer, tmp_path: Path) -> None:
    texts("to be or not to be")
    DAMAGES["a bit flipped in ids"][0](tmp_path / "corpus")
    with pytest.raises(StoreError, match="does not match its hash"):
        gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "corpus")


def test_damage_is_found_on_resume(tmp_path: Path, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 100)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("to be or not to be\n" * 10)
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", failing_after(0, shards.ShardWriter.finish))
        with pytest.raises(StoppedError):
            gh.data.prepare(f"{tmp_path}/*.txt", tok, tmp_path / "corpus", shard_tokens=10)
    DAMAGES["a bit flipped in ids"][0](tmp_path / "corpus")
    with pytest.raises(StoreError, match="does not match its hash"):
        gh.data.prepare(f"{tmp_path}/*.txt", tok, tmp_path / "corpus", shard_tokens=10)


def test_two_at_once_do_not_write_into_one_folder(tmp_path: Path) -> None:
    other = shards.ShardWriter(tmp_path / "corpus", {}, np.uint16)
    with (
        shards.ShardWriter(tmp_path / "corpus", {}, np.uint16),
        pytest.raises(StoreError, match="another process is writing into"),
    ):
        other.__enter__()
    with shards.ShardWriter(tmp_path / "corpus", {}, np.uint16) as again:
        assert not again.complete


def test_fields_as_one_name_and_as_an_iterator(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "x", "other": "y"}) + "\n")
    for number, fields in enumerate(("body", iter(["body"]))):
        corpus = gh.data.prepare(tmp_path / "a.jsonl", tok, tmp_path / str(number), columns=fields)
        assert tok.decode(corpus.item(0)[0]) == "x<|endoftext|>"
        assert corpus.manifest["job"]["columns"] == ["body"]


def test_a_name_that_is_not_utf8(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "texts").mkdir()
    try:
        Path(os.fsdecode(os.fsencode(tmp_path / "texts") + b"/caf\xe9.txt")).write_text("coffee")
    except OSError:
        pytest.skip("this file system takes no such name")
    corpus = gh.data.prepare(tmp_path / "texts", tok, tmp_path / "corpus")
    assert corpus.source_name(0).endswith(r"caf\xe9.txt")
    assert len(gh.data.Corpus.open(tmp_path / "corpus")) == 1


def test_a_link_that_leads_nowhere(tmp_path: Path, tok: gh.Tokenizer) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match="is a broken link"):
        gh.data.prepare(tmp_path / "texts", tok, tmp_path / "corpus")
    with pytest.raises(InputError, match="no paths were given"):
        gh.data.prepare("", tok, tmp_path / "corpus")


def test_items_and_ids_that_are_not_there(texts: Texts) -> None:
    corpus = texts("to be")
    for ask in (
        lambda: corpus.item(-1),
        lambda: corpus.item(1),
        lambda: corpus.source_name(1),
        lambda: corpus.read(-5, 3),
    ):
        with pytest.raises(InputError, match="requested, but there are"):
            ask()


MANIFESTS = {
    "labels": [None, 5, [1]],
    "start_id": [10**30, "x", [], -1, True],
    "sources": [[], [1], [{"name": "a", "items": -1}], [{"name": "a", "items": 7}]],
    "shards": [[], [1], {}],
    "kind": ["letters", None],
    "vocab_size": ["x", None, 3],
    "format": [1, None, "1"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in MANIFESTS for value in MANIFESTS[key]], ids=str)
def test_a_hostile_manifest_is_one_sentence(texts: Texts, tmp_path: Path, key: str, value: object) -> None:
    texts("to be")
    path = tmp_path / "corpus" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(StoreError):
        gh.data.Corpus.open(tmp_path / "corpus")


@pytest.mark.parametrize(
    "state",
    [None, 5, {}, {"cursor": [0, 1]}, {"cursor": [0, 1], "mid_document": False, "sources": [5]}]
    + [
        {"cursor": place, "mid_document": False, "sources": [{"items": 1}]}
        for place in ([7, 0], [-1, 0], [0, -1], [0])
    ],
)
def test_a_state_that_does_not_fit_its_shards_is_one_sentence(
    texts: Texts, tok: gh.Tokenizer, tmp_path: Path, state: object
) -> None:
    """To start from the beginning would write the same ids after those that are there."""
    texts("to be")
    manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
    (tmp_path / "corpus" / "manifest.json").unlink()
    progress = {"job": manifest["job"], "shards": manifest["shards"], "state": state}
    (tmp_path / "corpus" / "progress.json").write_text(json.dumps(progress))
    with pytest.raises(StoreError, match=r"progress\.json' is corrupt; delete the folder"):
        gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "corpus")


def test_killed_before_its_first_progress_it_begins_again(texts: Texts, tok: gh.Tokenizer, tmp_path: Path) -> None:
    texts("to be")
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / ".progress.json.new").write_text('{"jo')
    gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "again")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(StoreError, match="contains other files"):
        gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "other")


def test_a_manifest_of_brackets_is_one_sentence(texts: Texts, tmp_path: Path) -> None:
    texts("to be")
    (tmp_path / "corpus" / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(StoreError, match="is corrupt"):
        gh.data.Corpus.open(tmp_path / "corpus")


ARRAYS = {
    "objects": np.array([{}]),
    "a table": np.zeros((2, 2), np.uint16),
    "a number": np.uint16(3),
    "strings": np.array(["a"]),
    "floats": np.zeros(6),
    "negative": np.array([-1] * 6),
    "too high": np.full(6, 60_000, np.uint16),
    "too many": np.zeros(600, np.uint16),
    "none": np.zeros(0, np.uint16),
}


@pytest.mark.parametrize("part", ["ids", "ends"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_hostile_array_is_one_sentence(texts: Texts, tmp_path: Path, name: str, part: str) -> None:
    """With a size and a hash that fit, as who writes the one writes the other."""
    texts("to be")
    folder = tmp_path / "corpus"
    np.save(folder / f"00000.{part}.npy", ARRAYS[name], allow_pickle=True)
    data = (folder / f"00000.{part}.npy").read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0][part] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError):
        gh.data.Corpus.open(folder)


@pytest.mark.parametrize("text", ['{"job": 1, "shards": [1]}', '{"job": null, "shards": []}', "[" * 200_000, "{}"])
def test_a_hostile_progress_is_one_sentence(texts: Texts, tok: gh.Tokenizer, tmp_path: Path, text: str) -> None:
    texts("to be")
    (tmp_path / "corpus" / "manifest.json").unlink()
    (tmp_path / "corpus" / "progress.json").write_text(text)
    with pytest.raises(StoreError, match="is corrupt"):
        gh.data.prepare(tmp_path / "corpus-texts", tok, tmp_path / "corpus")
