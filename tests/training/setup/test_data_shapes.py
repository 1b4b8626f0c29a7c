"""Data as people have it, from a file to the first batch, by the words of `glasshouse train`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest

import glasshouse as gh
from glasshouse.data import preparation, shards
from glasshouse.errors import InputError
from glasshouse.text.bpe.training import no_progress
from glasshouse.text.chat.tokens import with_chat_template
from glasshouse.training.setup.datasets import prepare_datasets

SIZE = 40
PAIRS = [(f"Satz {n}", f"sentence {n}") for n in range(SIZE)]
CHATS = [(f"Say {n}", f"{n}!") for n in range(SIZE)]
TINY = ("model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.vocab_size=280")
STEP = ("train.steps=1", "train.batch_tokens=100", "train.device=cpu", "train.sample_prompts=0", "train.probes=[]")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write what `datasets.Dataset.save_to_disk` does: Arrow streams, a list of them, and a cache beside them."""
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (table[: SIZE // 2], table[SIZE // 2 :]), strict=True):
        with (folder / name).open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part, max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "cache-0123456789abcdef.arrow").write_bytes((folder / names[0]).read_bytes())


def aligned(at: Path) -> None:
    for side, name in enumerate(("train.de", "train.en")):
        (at / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))


def alpaca(given: bool) -> list[dict[str, Any]]:
    if not given:
        return [{"instruction": prompt, "output": answer} for prompt, answer in CHATS]
    rows = [{"instruction": "Say", "input": prompt[4:], "output": answer} for prompt, answer in CHATS]
    return [
        {**row, "instruction": f"Say {row['input']}", "input": ""} if n % 2 else row for n, row in enumerate(rows)
    ]


TRANSLATIONS = [{"id": n, "translation": {"de": de, "en": en}} for n, (de, en) in enumerate(PAIRS)]
SHAREGPT = [{"conversations": [{"from": "human", "value": one}, {"from": "gpt", "value": two}]} for one, two in CHATS]
NESTED = "data.columns=translation.de,translation.en"


@dataclass(frozen=True)
class Shape:
    """How a file or folder is written, and the words that train on it."""

    write: Callable[[Path], object]
    words: tuple[str, ...]
    columns: tuple[str, ...]


SHAPES = {
    "two aligned files": Shape(aligned, ("data.path=train.de,train.en",), ()),
    "tsv without a header": Shape(
        lambda at: (at / "mt.tsv").write_text("".join(f"{n}\t{en}\t{de}\n" for n, (de, en) in enumerate(PAIRS))),
        ("data.path=mt.tsv", "data.columns=3,2"),
        ("3", "2"),
    ),
    "nested columns": Shape(
        lambda at: write_lines(at / "mt.jsonl", TRANSLATIONS),
        ("data.path=mt.jsonl", NESTED),
        ("translation.de", "translation.en"),
    ),
    "a saved dataset": Shape(
        lambda at: write_saved(at / "wmt", TRANSLATIONS),
        ("data.path=wmt", NESTED),
        ("translation.de", "translation.en"),
    ),
    "arrow files": Shape(
        lambda at: write_saved(at / "wmt", TRANSLATIONS),
        ("data.path=wmt/data-*.arrow", NESTED),
        ("translation.de", "translation.en"),
    ),
    "ShareGPT": Shape(
        lambda at: write_lines(at / "chat.jsonl", SHAREGPT), ("data.path=chat.jsonl",), ("conversations",)
    ),
    "ShareGPT in a saved dataset": Shape(
        lambda at: write_saved(at / "chats", SHAREGPT), ("data.path=chats",), ("conversations",)
    ),
    "Alpaca": Shape(
        lambda at: write_lines(at / "alpaca.jsonl", alpaca(given=True)),
        ("data.path=alpaca.jsonl",),
        ("instruction", "input", "output"),
    ),
    "Alpaca in one array": Shape(
        lambda at: (at / "alpaca.json").write_text(json.dumps(alpaca(given=True), indent=2)),
        ("data.path=alpaca.json",),
        ("instruction", "input", "output"),
    ),
    "Alpaca without input": Shape(
        lambda at: write_lines(at / "alpaca.jsonl", alpaca(given=False)),
        ("data.path=alpaca.jsonl",),
        ("instruction", "output"),
    ),
}
CHAT = {"ShareGPT", "ShareGPT in a saved dataset", "Alpaca", "Alpaca in one array", "Alpaca without input"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tok = gh.Tokenizer.train(texts=["Satz sentence Say"], vocab_size=270)
    folder = tmp_path_factory.mktemp("base")
    gh.save(
        gh.build(gh.preset("tiny-decoder", n_layers=1, d_model=16, vocab_size=len(tok), max_len=256)), tok, folder
    )
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_from_a_file_to_the_first_step(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    monkeypatch.chdir(tmp_path)
    shape.write(tmp_path)
    recipe = ("finetune-chat", f"model.from={base}") if name in CHAT else ("translate", *TINY)
    result = gh.train(gh.Run.load(*recipe, *shape.words, *STEP, "train.schedule.warmup=0", "train.out=run"))
    assert result.steps == 1
    corpus = gh.data.Corpus.open("run/data/train")
    tok = corpus.tokenizer
    assert tuple(corpus.manifest["columns"]) == shape.columns
    if name not in CHAT:
        assert [tuple(map(tok.decode, corpus.item(n))) for n in range(len(corpus))] == PAIRS
        return
    for n, (prompt, answer) in enumerate(CHATS):
        text = prompt
        if name in ("Alpaca", "Alpaca in one array") and n % 2 == 0:
            text = "\n\n".join(prompt.split())
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        assert corpus.item(n)[0].tolist() == tok.encode_chat(turns).ids


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "Alpaca without input"])
def test_a_preparation_that_is_stopped_resumes_to_the_same_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preparation, "BATCH_BYTES", 100)
    monkeypatch.setattr(preparation, "BATCH_RECORDS", 10)
    shape.write(tmp_path)
    tok = with_chat_template(gh.Tokenizer.train(texts=["Satz sentence Say"], vocab_size=270))
    choice = gh.Run.load("translate", *shape.words).data
    source = list(choice.path)
    settings: dict[str, Any] = {"kind": "chat" if name in CHAT else "pairs", "shard_tokens": 150}

    def prepare(folder: str) -> dict[str, bytes]:
        gh.data.prepare(source, tok, folder, columns=choice.columns, **settings)
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.*")}

    whole, flush = prepare("whole"), shards.ShardWriter._flush
    n_shards = sum(name.endswith(".ids.npy") for name in whole)
    assert n_shards >= 3
    for stop in range(1, n_shards):
        left = iter(range(stop))

        def stopping(writer: shards.ShardWriter, state: dict[str, Any], left: Any = left) -> None:  # noqa: ANN401
            if next(left, None) is None:
                raise StoppedError
            flush(writer, state)

        with monkeypatch.context() as patch:
            patch.setattr(shards.ShardWriter, "_flush", stopping)
            with pytest.raises(StoppedError):
                prepare(f"stopped{stop}")
        assert prepare(f"stopped{stop}") == whole


def write_splits(at: Path) -> None:
    for split in ("train", "validation"):
        write_saved(at / "wmt" / split, TRANSLATIONS)
    (at / "wmt" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))


def with_turn(**turn: str) -> list[dict[str, Any]]:
    return [*SHAREGPT[:2], {"conversations": [SHAREGPT[2]["conversations"][0], turn]}]


WRONG: dict[str, tuple[Callable[[Path], object], tuple[str, ...], str]] = {
    "one line too few": (
        lambda at: (aligned(at), (at / "train.en").write_text("a\nb\n")),
        ("translate", "data.path=train.de,train.en"),
        "'train.de' has 40 lines, but 'train.en' has 2, from line 3 on alone; line n of one must belong to",
    ),
    "a saved dataset with splits": (
        write_splits,
        ("translate", "data.path=wmt"),
        r"'wmt' has the splits train, validation; give one, .* data.path=wmt/train data.validation=wmt/validation\)",
    ),
    "a field that is not there": (
        lambda at: write_saved(at / "wmt", TRANSLATIONS),
        ("translate", "data.path=wmt", "data.columns=translation.de,translation.fr"),
        r"has no column 'translation.fr' \(it has id, translation.de, translation.en\)",
    ),
    "a shard that is gone": (
        lambda at: (write_saved(at / "wmt", TRANSLATIONS), (at / "wmt/data-00001-of-00002.arrow").unlink()),
        ("translate", "data.path=wmt", NESTED),
        "'wmt/data-00001-of-00002.arrow' does not exist",
    ),
    "a sentence for a header": (
        lambda at: (at / "mt.tsv").write_text("Wie geht es dir heute?\thow are you\n" * 9),
        ("translate", "data.path=mt.tsv"),
        "has 'Wie geht es dir heute\\?' where the names of its columns would be; .*data.columns=1,2",
    ),
    "unknown columns of a chat": (
        lambda at: write_lines(at / "qa.jsonl", [{"question": "a", "answer": "b"}]),
        ("finetune-chat", "data.path=qa.jsonl"),
        "'qa.jsonl' has the columns question, answer, but chat needs messages, conversations, prompt and completion",
    ),
    "an unknown speaker": (
        lambda at: write_lines(at / "chat.jsonl", with_turn(**{"from": "gtp", "value": "b"})),
        ("finetune-chat", "data.path=chat.jsonl"),
        "line 3 of 'chat.jsonl' has a turn from 'gtp', which is not known; did you mean gpt",
    ),
    "a turn of another shape": (
        lambda at: write_lines(at / "chat.jsonl", with_turn(role="user", content="a")),
        ("finetune-chat", "data.path=chat.jsonl"),
        "line 3 of 'chat.jsonl' has a turn 2 of role, content, but a turn has from and value",
    ),
    "an instruction that is a number": (
        lambda at: write_lines(at / "alpaca.jsonl", [{"instruction": 1, "input": "", "output": "b"}]),
        ("finetune-chat", "data.path=alpaca.jsonl"),
        "line 1 of 'alpaca.jsonl' has the instruction 1 and the input '', but they must be strings",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_is_one_sentence_with_what_was_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, words, sentence = WRONG[name]
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    choice = gh.Run.load(*words).data
    with pytest.raises(InputError, match=sentence) as error:
        prepare_datasets(choice, tmp_path / "run", None, no_progress)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/data/train/manifest.json").exists()
