"""Commands for tokenizers, against what the library gives and what was worked out by hand."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

import glasshouse as gh
from cli.runner import GLASSHOUSE, Call, at_terminal
from glasshouse.cli.tokenizer import command as commands

HUGS = "hug hug hugs pug"  # three merges: u + g (4 times), h + ug (3), ␣ + hug (2)


def train(call: Call, folder: Path, text: str, size: int, *more: str) -> Path:
    (folder / "text.txt").write_text(text)
    done = call("tokenizer", "train", folder / "text.txt", "--out", folder / "out", "--vocab-size", str(size), *more)
    assert done.code == 0, done.err
    return folder / "out"


def test_train_reports_the_tokenizer(call: Call, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab ab ab ab")
    done = call("tokenizer", "train", tmp_path / "text.txt", "--out", tmp_path / "out", "--vocab-size", "265")
    # Two merges, a + b and ␣ + ab, make four tokens of eleven characters.
    assert done.out == (
        f"folder                {tmp_path / 'out'}\n"
        "vocabulary            265 tokens\n"
        "characters per token  2.750 (on the first 11 bytes)\n"
    )
    assert gh.Tokenizer.load(tmp_path / "out").fingerprint == (
        gh.Tokenizer.train(tmp_path / "text.txt", vocab_size=265).fingerprint
    )


def test_train_options(call: Call, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"body": "one 1234 \xff two"}\n' * 3)
    words = (
        "--vocab-size",
        "280",
        "--pattern",
        "gpt4",
        "--column",
        "body",
        "--errors",
        "replace",
        "--max-words",
        "300",
    )
    assert call("tokenizer", "train", tmp_path / "rows.jsonl", "--out", tmp_path / "out", *words).code == 0
    same = gh.Tokenizer.train(
        tmp_path / "rows.jsonl", vocab_size=280, pattern="gpt4", column="body", errors="replace", max_words=300
    )
    assert gh.Tokenizer.load(tmp_path / "out").fingerprint == same.fingerprint
    strict = call("tokenizer", "train", tmp_path / "rows.jsonl", "--out", tmp_path / "never", "--column", "body")
    assert strict.code == 1
    assert "set errors (of a run, data.errors) to 'replace'" in strict.err
    few = call("tokenizer", "train", tmp_path / "rows.jsonl", "--out", tmp_path / "never", *words[:-1], "255")
    assert "limit on distinct words is 255" in few.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("stdlib", lambda item: [item[1]]),
        ("dates", lambda item: item),
        ("langid", lambda item: item[:1]),
        ("chat", lambda item: [message["content"] for message in item]),
    ],
)
def test_builtin_dataset_is_a_source(name: str, texts, call: Call, tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.chdir(tmp_path)
    found = gh.data.builtin_dataset(name)
    few = type(found)(found.name, found.kind, found.description, lambda split: 20, found.item, found.labels)
    monkeypatch.setattr(gh.data, "builtin_dataset", lambda name: few)
    assert call("tokenizer", "train", name, "--out", "out", "--vocab-size", "280").code == 0
    by_hand = gh.Tokenizer.train(texts=[text for item in few.items() for text in texts(item)], vocab_size=280)
    assert gh.Tokenizer.load("out").fingerprint == by_hand.fingerprint
    Path(name).write_text("a file of that name comes first " * 9)
    assert call("tokenizer", "train", name, "--out", "file", "--vocab-size", "280").code == 0
    assert gh.Tokenizer.load("file").fingerprint == gh.Tokenizer.train(name, vocab_size=280).fingerprint


def test_encode_prints_the_ids_of_the_library(call: Call, tmp_path: Path) -> None:
    folder = train(call, tmp_path, HUGS, 266)
    tok = gh.Tokenizer.load(folder)
    text = "hugs & <|endoftext|>\n"
    ids = " ".join(map(str, tok.encode(text))) + "\n"
    (tmp_path / "in.txt").write_text(text)
    assert call("tokenizer", "encode", folder, text).out == ids
    assert call("tokenizer", "encode", folder, "--file", tmp_path / "in.txt").out == ids
    assert call("tokenizer", "encode", folder, stdin=text.encode()).out == ids
    parsed = call("tokenizer", "encode", folder, text, "--allow-special").out
    assert parsed == " ".join(map(str, tok.encode(text, parse_special_tokens=True))) + "\n" != ids
    assert call("tokenizer", "encode", folder, "").out == "\n"
    assert call("tokenizer", "decode", folder, *ids.split()).out == text
    assert call("tokenizer", "decode", folder, stdin=b"").out == ""


@pytest.mark.long
@pytest.mark.slow
def test_decode_undoes_encode_on_any_bytes_through_real_pipes(call: Call, tmp_path: Path) -> None:
    folder = train(call, tmp_path, HUGS, 266)
    data = random.Random(0).randbytes(5000) + b"\r\n<|endoftext|> hug\x00\n\xf0\x9f"
    encode, decode = ([GLASSHOUSE, "tokenizer", verb, str(folder)] for verb in ("encode", "decode"))
    with (
        subprocess.Popen(encode, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first,
        subprocess.Popen(decode, stdin=first.stdout, stdout=subprocess.PIPE) as second,
    ):
        assert first.stdin is not None
        first.stdin.write(data)
        first.stdin.close()
        assert second.communicate()[0] == data
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.long
@pytest.mark.slow
def test_encode_shows_tokens_on_a_terminal(call: Call, tmp_path: Path) -> None:
    folder = train(call, tmp_path, HUGS, 266)
    text = "hugs [red]\x1b[2J\nhug"
    ids = " ".join(map(str, gh.Tokenizer.load(folder).encode(text)))
    drawn = at_terminal("tokenizer", "encode", folder, text, COLUMNS="80")
    assert drawn.startswith("\x1b[36mhug\x1b[0m\x1b[33ms\x1b[0m\x1b[36m␣\x1b[0m\x1b[33m[\x1b[0m\x1b[36mr")
    assert r"\x1b" in drawn
    assert "\x1b[2J" not in drawn
    assert "⏎\x1b[0m\n" in drawn
    counts = "14 tokens, 18 characters, 18 bytes, 1.29 characters per token\n"
    assert drawn.endswith(counts)
    plain = at_terminal("tokenizer", "encode", folder, text, NO_COLOR="1", COLUMNS="200")
    assert plain == f"hug s ␣ [ r e d ] \\x1b [ 2 J ⏎ hug\nids: {ids}\n{counts}"
    assert at_terminal("tokenizer", "encode", folder, "hug", "--ids") == ids.split()[0] + "\n"


SHOWN = """\
{folder}: Tokenizer(BPE, 266 tokens)
fingerprint     {fingerprint}
corpus backend  {backend}
special         0 <|endoftext|> bos eos
special         1 <|pad|> pad
special         2 <|mask|> mask
special         3 <|system|>
special         4 <|user|>
special         5 <|assistant|>
special         6 <|end|>
"""


def shown(folder: Path) -> str:
    tok = gh.Tokenizer.load(folder)
    reason = tok.corpus_encoder().reason
    backend = f"tokenizers, as {reason}" if reason else "gigatoken"
    return SHOWN.format(folder=folder, fingerprint=tok.fingerprint[:12], backend=backend)


def test_show_merges_a_word_step_by_step(call: Call, tmp_path: Path) -> None:
    folder = train(call, tmp_path, HUGS, 266)
    done = call("tokenizer", "show", folder, "--word", "a hugÿ\x1b")
    assert done.out == shown(folder) + (
        "\nword a\n"
        "rank  merge  tokens\n"
        "             a\n"
        "a\n"
        "\nword ␣hugÿ\n"
        "rank  merge    tokens\n"
        r"               ␣ h u g \xc3 \xbf" + "\n"
        r"   0  u + g    ␣ h ug \xc3 \xbf" + "\n"
        r"   1  h + ug   ␣ hug \xc3 \xbf" + "\n"
        r"   2  ␣ + hug  ␣hug \xc3 \xbf" + "\n"
        "␣hug\n"
        "├─ ␣\n"
        "└─ hug\n"
        "   ├─ h\n"
        "   └─ ug\n"
        "      ├─ u\n"
        "      └─ g\n"
        r"\xc3" + "\n"
        r"\xbf" + "\n"
        "\nword \\x1b\n"
        "rank  merge  tokens\n"
        "             \\x1b\n"
        "\\x1b\n"
    )


def test_show_measures_on_a_text(call: Call, tmp_path: Path) -> None:
    folder = train(call, tmp_path, HUGS, 266)
    (tmp_path / "é.txt").write_text("hug hug é")
    done = call("tokenizer", "show", folder, "--text", tmp_path / "é.txt")
    # hug, ␣hug, ␣, and the two bytes of é; in the vocabulary are 256 bytes and three merges.
    figures, listed = done.out.removeprefix(shown(folder)).split("\ntokens of ")
    assert figures == (
        "\n"
        "vocabulary            266\n"
        "bytes                 10\n"
        "characters            9\n"
        "words                 3\n"
        "tokens                5\n"
        "characters per token  1.800\n"
        "bytes per token       2.000\n"
        "tokens per word       1.667\n"
        "never used            98.07% of 259\n"
    )
    never, most, longest = listed.splitlines()[1:]
    assert never.split() == ["never", "used", *map(chr, range(0x21, 0x21 + 20))]
    assert most.split()[:2] == ["most", "used"]
    assert sorted(most.split()[2:]) == sorted(["1x␣", r"1x\xa9", r"1x\xc3", "1xhug", "1x␣hug"])
    assert longest.split()[:4] == ["longest", "␣hug", "hug", "ug"]


def test_show_uses_the_start_of_a_text_without_all(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(call, tmp_path, HUGS, 266)
    monkeypatch.setattr(commands, "MEASURED", 7)
    assert "\nbytes                 7\n" in call("tokenizer", "show", folder, "--text", tmp_path / "text.txt").out
    everything = call("tokenizer", "show", folder, "--text", tmp_path / "text.txt", "--all").out
    assert f"\nbytes                 {len(HUGS)}\n" in everything


def test_show_compares_two(call: Call, tmp_path: Path, tok: Path) -> None:
    folder = train(call, tmp_path, HUGS, 266)
    done = call("tokenizer", "show", folder, "--compare", tok, "--text", tmp_path / "text.txt")
    rows = [line.split() for line in done.out.splitlines()]
    # hug ␣hug ␣hug s ␣ p ug, against one token for each of sixteen bytes
    assert ["tokens", "7", "16"] in rows
    assert ["characters", "per", "token", "2.286", "1.000"] in rows
    assert ["tokens", "per", "word", "1.750", "4.000"] in rows
    assert done.out.endswith(f"\n{folder}: hug ␣hug ␣hug s ␣ p ug\n{tok}: h u g ␣ h u g ␣ h u g s ␣ p u g\n")


def test_show_other_kinds(call: Call, tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 9}, "unk_token": "[UNK]"}
    table = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    gh.Tokenizer.from_json(json.dumps(table)).save(tmp_path / "words")
    (tmp_path / "a.txt").write_text("hello new world")
    done = call("tokenizer", "show", tmp_path / "words", "--text", tmp_path / "a.txt")
    assert "Tokenizer(WordLevel, 10 tokens)" in done.out
    assert "tokenizers, as gigatoken" in done.out
    assert "most used   1x[UNK] 1xhello 1xworld" in done.out
    refused = call("tokenizer", "show", tmp_path / "words", "--word", "hello")
    assert (refused.code, refused.out) == (1, "")
    assert "byte-level BPE" in refused.err


def test_watch_shows_each_merge(call: Call, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab ab ac")
    words = ("tokenizer", "watch", tmp_path / "text.txt", "--runners-up", "2")
    # Of pairs that are equally frequent the one with smaller ids is merged, and ␣ is late in the initial alphabet.
    assert call(*words, "--merges", "2").out == (
        "8 bytes, 3 words, 3 of them distinct\n"
        "\nmerge 1: a + b = ab, 2 times\n"
        "  next    ␣ + a 2, a + c 1\n"
        "  before  a b ␣ a b ␣ a c\n"
        "  after   [ab] ␣ [ab] ␣ a c\n"
        "\nmerge 2: a + c = ac, 1 time\n"
        "  next    ␣ + a 1, ␣ + ab 1\n"
        "  before  ab ␣ ab ␣ a c\n"
        "  after   ab ␣ ab ␣ [ac]\n"
    )
    other = call(*words, "--merges", "99", "--sample", "cab").out
    assert "  before  c a b\n  after   c [ab]\n" in other
    assert "merge 2: a + c = ac, 1 time\n" in other
    assert "  sample  does not contain it\n" in other
    assert other.endswith("\nno pairs are left to merge after 4\n")


def test_watch_uses_only_the_most_frequent_words(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.merges, "MOST", 1)
    (tmp_path / "text.txt").write_text("xy ab ab ab")
    out = call("tokenizer", "watch", tmp_path / "text.txt", "--merges", "9").out
    assert "only the 1 most frequent words are used, 75.0% of all" in out
    assert out.endswith("no pairs are left to merge after 2\n")


def test_watch_reads_the_start(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "WATCHED", 4)
    (tmp_path / "text.txt").write_text("ab ab ac")
    out = call("tokenizer", "watch", tmp_path / "text.txt", "--merges", "1").out
    assert out.startswith("4 bytes, 2 words, 2 of them distinct\n")
    assert "  before  a b ␣ a\n" in out


def test_show_takes_the_merge_that_was_learned_first(call: Call, tmp_path: Path) -> None:
    folder = train(call, tmp_path, "ab ab ab cd cd", 265)
    out = call("tokenizer", "show", folder, "--word", "cdab").out
    assert "   0  a + b  c d ab\n   1  c + d  cd ab\n" in out


def test_train_measures_on_the_start_of_all_texts(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "START", 5)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 4)
    done = call("tokenizer", "train", tmp_path, "--out", tmp_path / "out", "--vocab-size", "263")
    assert done.out.endswith("characters per token  1.000 (on the first 5 bytes)\n")
