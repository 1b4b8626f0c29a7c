"""Parts of a corpus: joined, they are byte for byte what one machine writes, and nothing else is joined."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from examples import up_to
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import glasshouse as gh
from data.test_corpus import DAMAGES, StoppedError, contents, failing_after
from glasshouse import InputError, StoreError
from glasshouse.data import corpus, dataset_reader, preparation, shards
from glasshouse.data.parts import part_range

Prepared = Callable[..., gh.data.Corpus]


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 12))
def test_every_file_is_in_one_part_in_order_and_parts_are_balanced(sizes: list[int], count: int) -> None:
    ranges = [part_range(sizes, (number, count)) for number in range(1, count + 1)]
    assert [at for first, stop in ranges for at in range(first, stop)] == list(range(len(sizes)))
    for first, stop in ranges:  # no part has more than its share and one file
        assert count * sum(sizes[first:stop]) <= sum(sizes) + count * max(sizes, default=0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=up_to(60), deadline=None)
@given(
    documents=st.lists(st.text("ab \n", max_size=40), min_size=1, max_size=9).filter(any),
    count=st.integers(1, 7),
    shard=st.integers(1, 30),
    block=st.integers(1, 30),
    kind=st.sampled_from(["text", "pairs", "labelled"]),
)
@example(documents=["", "a" * 40, "b"], count=7, shard=20, block=5, kind="text")
def test_joined_parts_are_what_one_machine_writes(
    tmp_path_factory: pytest.TempPathFactory,
    tok: gh.Tokenizer,
    documents: list[str],
    count: int,
    shard: int,
    block: int,
    kind: gh.data.corpus.Kind,
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for number, text in enumerate(documents):
        row = {"text": text, "label": str(len(text) % 2), "source": text, "target": text[::2]}  # targets may be empty
        lines = json.dumps(row) + "\n"
        (folder / f"{number}.{'txt' if kind == 'text' else 'jsonl'}").write_text(text if kind == "text" else lines)
    options = {"kind": kind, "shard_tokens": shard}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BATCH_BYTES", 16)
        patch.setattr(dataset_reader, "CHUNK_BYTES", 8)
        patch.setattr(corpus, "BLOCK_IDS", block)
        whole = gh.data.prepare(folder, tok, folder / "whole", **options)
        for number in range(count, 0, -1):
            part = gh.data.prepare(folder, tok, folder / "parts", **options, part=(number, count))
            assert part.folder == folder / "parts" / f"{number:05}-of-{count:05}"
        joined = gh.data.join(folder / "parts", folder / "joined")
    assert contents(folder / "joined") == contents(folder / "whole")
    assert repr(joined) == repr(whole)
    assert gh.data.prepare(folder, tok, folder / "joined", **options).folder == folder / "joined"  # it is complete


@pytest.fixture
def prepared(tmp_path: Path, tok: gh.Tokenizer) -> Prepared:
    """Prepare a part of four files of 19 tokens each."""
    (tmp_path / "texts").mkdir()
    for name in "abcd":
        (tmp_path / "texts" / f"{name}.txt").write_text("to be or not to be, " + name)

    def prepare(number: int, count: int = 4, tokenizer: gh.Tokenizer = tok, **options: object) -> gh.data.Corpus:
        settings = {"shard_tokens": 5, **options}
        return gh.data.prepare(tmp_path / "texts", tokenizer, tmp_path / "parts", part=(number, count), **settings)

    return prepare


@pytest.mark.parametrize("victim", ["_put", "_append"])
def test_a_join_stopped_anywhere_resumes_to_the_same_files(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setattr(corpus, "BLOCK_IDS", 7)
    for number in (1, 2, 3, 4):
        prepared(number)
    whole = gh.data.join(tmp_path / "parts", tmp_path / "whole")
    for stop in range(len(whole.manifest["shards"])):
        with monkeypatch.context() as patch:
            patch.setattr(shards.ShardWriter, victim, failing_after(stop, getattr(shards.ShardWriter, victim)))
            with pytest.raises(StoppedError):
                gh.data.join(tmp_path / "parts", tmp_path / f"{stop}")
        assert not (tmp_path / f"{stop}" / "manifest.json").exists()
        gh.data.join(tmp_path / "parts", tmp_path / f"{stop}")
        assert contents(tmp_path / f"{stop}") == contents(tmp_path / "whole")


def test_aligned_files_and_built_in_datasets_are_in_one_part(
    tmp_path: Path, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_reader, "builtin_dataset", lambda name: gh.data.builtin_dataset(name, validation=20))
    (tmp_path / "de").write_text("ja\nnein\n")
    (tmp_path / "en").write_text("yes\nno\n")
    aligned, builtin = [tmp_path / "de", tmp_path / "en"], ["dates"]
    for name, source in {"aligned": aligned, "builtin": builtin}.items():
        options = {"kind": "pairs", "split": "validation"}
        gh.data.prepare(source, tok, tmp_path / name, **options)
        for number in (1, 2, 3):
            gh.data.prepare(source, tok, tmp_path / f"{name}-parts", **options, part=(number, 3))
        gh.data.join(tmp_path / f"{name}-parts", tmp_path / f"{name}-joined")
        assert contents(tmp_path / f"{name}-joined") == contents(tmp_path / name)


def test_missing_and_foreign_parts_are_refused(prepared: Prepared, tmp_path: Path, tok: gh.Tokenizer) -> None:
    parts, out = tmp_path / "parts", tmp_path / "joined"
    with pytest.raises(InputError, match="there are no parts in"):
        gh.data.join(parts, out)
    for number in (1, 2, 4):
        prepared(number)
    with pytest.raises(StoreError, match="part 3/4 is missing; prepare it"):
        gh.data.join(parts, out)
    shutil.copytree(parts / "00002-of-00004", parts / "00003-of-00004")
    with pytest.raises(StoreError, match="00003-of-00004' is not part 3/4; delete it"):
        gh.data.join(parts, out)
    shutil.rmtree(parts / "00003-of-00004")
    prepared(3, tokenizer=gh.Tokenizer.train(texts=["to be"], vocab_size=263))
    with pytest.raises(StoreError, match="parts 1/4 and 3/4 were prepared with different tokenizer"):
        gh.data.join(parts, out)
    shutil.rmtree(parts / "00003-of-00004")
    prepared(3, shard_tokens=6)
    with pytest.raises(StoreError, match="parts 1/4 and 3/4 were prepared with different shard_tokens"):
        gh.data.join(parts, out)
    shutil.rmtree(parts / "00003-of-00004")
    prepared(3)
    prepared(1, 2)
    with pytest.raises(StoreError, match="has parts of 2 and parts of 4; delete those of one"):
        gh.data.join(parts, out)
    assert not out.exists()
    shutil.rmtree(parts / "00001-of-00002")
    assert len(gh.data.join(parts, out)) == 4


def test_a_file_that_changed_between_two_parts_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        prepared(number)
    os.utime(tmp_path / "texts" / "a.txt", ns=(1, 1))
    prepared(4)
    with pytest.raises(StoreError, match="parts 1/4 and 4/4 were prepared with different sources, or"):
        gh.data.join(tmp_path / "parts", tmp_path / "joined")


def test_a_corrupt_or_unfinished_part_is_refused(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", failing_after(0, shards.ShardWriter.finish))
        with pytest.raises(StoppedError):
            prepared(2, 2)
    with pytest.raises(StoreError, match="part 2/2 is not complete"):
        gh.data.join(tmp_path / "parts", tmp_path / "joined")
    prepared(2, 2)  # resumes
    DAMAGES["a bit flipped in ids"][0](tmp_path / "parts" / "00001-of-00002")
    with pytest.raises(StoreError, match="does not match its hash"):
        gh.data.join(tmp_path / "parts", tmp_path / "joined")


def test_parts_without_text_are_refused_when_joined(tmp_path: Path, tok: gh.Tokenizer) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": ""}\n')
    for number in (1, 2):
        gh.data.prepare(f"{tmp_path}/*.jsonl", tok, tmp_path / "parts", part=(number, 2))
    with pytest.raises(InputError, match="contain no text"):
        gh.data.join(tmp_path / "parts", tmp_path / "joined")


@pytest.mark.parametrize("part", [(0, 4), (5, 4), (1, 0), (1, 100_000)])
def test_a_part_that_does_not_exist(prepared: Prepared, part: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"part {part[0]}/{part[1]} does not exist"):
        prepared(*part)
