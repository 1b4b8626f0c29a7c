"""Commands for data; what `show` prints of small corpora was worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import glasshouse as gh
from cli.runner import Call, Done, at_terminal
from glasshouse.escaping import show_whitespace

TARGETS = "[x] token in the loss"
TEXTS = f"{TARGETS}; ¶ next document, which does not attend to the one before"
MASKS = f"{TARGETS}; [x←y] input x, target y; ¶ next document, which does not attend to the one before"
LABELS = "[x] label in the loss"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prepare(call: Call, tok: Path):  # noqa: ANN201
    def prepare(*words: str, out: str = "corpus") -> Done:
        return call("data", "prepare", *words, "--tokenizer", tok, "--out", out)

    return prepare


def write(name: str, *rows: object) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def shown(call: Call, *words: str) -> str:
    done = call("data", "show", "corpus", *words)
    assert done.code == 0, done.err
    return done.out


def test_prepare_reports_what_it_wrote_or_found(prepare, tok: Path) -> None:  # noqa: ANN001
    Path("a.txt").write_text("ab")
    Path("b.txt").write_text("c")
    first = prepare("a.txt", "b.txt")
    assert first.code == 0, first.err
    lines = [line.split(maxsplit=1) for line in first.out.splitlines()]
    size = sum(path.stat().st_size for path in Path("corpus").rglob("*") if path.is_file())
    reason = gh.Tokenizer.load(tok).corpus_encoder().reason
    assert lines[:4] == [
        ["folder", "corpus"],
        ["corpus", "Corpus(text, 2 items, 5 tokens)"],
        ["tokens", "5"],
        ["items", "2"],
    ]
    assert lines[4][1].split() == ["per", "item", "2.5"]
    assert lines[5][1].split() == ["disk", f"{size / 1000:.1f}", "kB"]
    assert lines[6] == ["backend", f"tokenizers, as {reason}" if reason else "gigatoken"]
    assert lines[7][0] == "throughput"
    again = prepare("a.txt", "b.txt")
    assert again.out.splitlines()[0].split(maxsplit=1) == ["folder", "corpus, already complete"]
    assert "throughput" not in again.out
    assert "backend" in again.out
    other = prepare("a.txt")
    assert other.code == 1
    assert "was started with different" in other.err


def test_fields_are_typed_with_commas_or_one_by_one(prepare) -> None:  # noqa: ANN001
    name = write("a.jsonl", {"id": 1, "en": "yes", "de": "ja"})
    assert prepare(name, "--kind", "pairs", "--column", "en,de", out="one").code == 0
    assert prepare(name, "--kind", "pairs", "--column", "en", "--column", "de", out="two").code == 0
    one, two = (gh.data.Corpus.open(place) for place in ("one", "two"))
    assert [part.tolist() for part in one.item(0)] == [part.tolist() for part in two.item(0)]
    told = prepare(write("chat.jsonl", {"prompt": "?", "completion": "!"}), out="chat")
    assert "Corpus(chat, 1 item" in told.out


def test_prepare_passes_its_options_to_the_library(prepare) -> None:  # noqa: ANN001
    Path("a.txt").write_bytes(b"one--two\xff")
    assert "set errors (of a run, data.errors) to 'replace'" in prepare("a.txt", out="strict").err
    assert prepare("a.txt", "--separator", "--", "--errors", "replace").code == 0
    corpus = gh.data.Corpus.open("corpus")
    texts = [corpus.tokenizer.decode(corpus.item(number)[0]) for number in range(len(corpus))]
    assert texts == ["one<|endoftext|>", "two�<|endoftext|>"]
    Path("left").write_text("a\nb\n")
    Path("right").write_text("A\nB\n")
    assert prepare("left", "right", "--kind", "pairs", out="pairs").code == 0
    assert len(gh.data.Corpus.open("pairs")) == 2
    write("rows.jsonl", {"en": "a", "de": "b"})
    assert prepare("rows.jsonl", "--kind", "pairs", "--column", "de", "--column", "en", out="rows").code == 0
    corpus = gh.data.Corpus.open("rows")
    assert [corpus.tokenizer.decode(part) for part in corpus.item(0)] == ["b", "a"]
    sizes = prepare("dates", "--split", "test", out="dates").out
    assert "items            2,000\n" in sizes
    assert " items/s\n" in sizes
    assert prepare("dates", "--split", "tset", out="never").code == 2


def test_parts_are_prepared_and_joined(prepare, call: Call) -> None:  # noqa: ANN001
    for name in "abc":
        Path(f"{name}.txt").write_text(f"to be {name}")
    assert prepare("a.txt", "b.txt", "c.txt", out="whole").code == 0
    first = prepare("a.txt", "b.txt", "c.txt", "--part", "1/2", out="parts")
    assert first.out.splitlines()[0].split() == ["folder", "parts/00001-of-00002"]
    missing = call("data", "join", "parts", "--out", "joined")
    assert missing.code == 1
    assert missing.err == "error: part 2/2 is missing; prepare it with `glasshouse data prepare` and that part.\n"
    assert prepare("a.txt", "b.txt", "c.txt", "--part", "2/2", out="parts").code == 0
    joined = call("data", "join", "parts", "--out", "joined")
    assert joined.code == 0, joined.err
    assert joined.out.splitlines()[1].split(maxsplit=1)[1].startswith("Corpus(text, 3 items")
    for path in Path("whole").rglob("*.*"):
        assert (Path("joined") / path.relative_to("whole")).read_bytes() == path.read_bytes()
    again = call("data", "join", "parts", "--out", "joined")
    assert again.out.splitlines()[0].endswith("joined, already complete")


def test_a_part_needs_a_number_and_a_tokenizer_that_exists(prepare, call: Call) -> None:  # noqa: ANN001
    Path("a.txt").write_text("to be")
    for part in ("3-64", "3", "x/y"):
        assert f"--part is {part!r}, but it must be" in prepare("a.txt", "--part", part).err
    assert "part 3/2 does not exist" in prepare("a.txt", "--part", "3/2").err
    done = call("data", "prepare", "a.txt", "--tokenizer", "none", "--out", "parts", "--part", "1/2")
    assert "train it first, on one machine, with `glasshouse tokenizer train FILES --out none`" in done.err


def test_prepare_reports_the_backend_fallback(prepare, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    if gh.text.corpus_encoder.gigatoken is None:
        pytest.skip("gigatoken is not installed")
    monkeypatch.setattr(
        gh.text.corpus_encoder.CorpusEncoder, "_run_fast", lambda self, texts: (np.array([1]), np.array([1]))
    )
    Path("a.txt").write_text("ab")
    done = prepare("a.txt")
    assert done.err == "warning: gigatoken gives different ids for this text, so tokenizers is used.\n"
    assert "backend          tokenizers, as gigatoken gives different ids for this text\n" in done.out


def test_show_text(prepare, call: Call) -> None:  # noqa: ANN001
    Path("a.txt").write_text("ab")
    Path("b.txt").write_text("c")
    prepare("a.txt", "b.txt")
    assert shown(call, "--seq-len", "4", "--batch-size", "1") == (
        "Corpus(text, 2 items, 5 tokens), step 0: samples 0 to 0\n"
        f"{TEXTS}\n"
        "sample 0, epoch 0, texts 0 to 1, ids 0 to 3\n"
        "  tokens: a [b] ¶ [<|endoftext|>] [c] [<|endoftext|>]\n"
        "4 tokens, 100.0% in the loss, 0.0% padding\n"
    )


def test_show_takes_any_step_rank_and_seed(prepare, call: Call) -> None:  # noqa: ANN001
    Path("a.txt").write_text("".join(map(chr, range(0x21, 0x7F))))
    prepare("a.txt")
    corpus = gh.data.Corpus.open("corpus")
    words = ("--seq-len", "4", "--batch-size", "4", "--step", "7", "--seed", "5", "--rank", "1", "--world-size", "2")
    out = shown(call, *words)
    lines = out.splitlines()
    assert lines[0] == "Corpus(text, 1 item, 95 tokens), step 7, rank 1 of 2: samples 30 to 31"
    batch = gh.data.CausalLMDataset(corpus, 4, seed=5).batch([30, 31])
    for row, number in enumerate((30, 31)):
        origin = gh.data.CausalLMDataset(corpus, 4, seed=5).origin(number)
        assert lines[2 + 2 * row] == f"sample {number}, epoch 1, {origin}"
        text = [corpus.tokenizer.decode([one]) for one in [*batch.ids[row, :1], *batch.targets[row]]]
        words_ = lines[3 + 2 * row].split()[1:]
        borders = [at for at, word in enumerate(words_) if word == "¶"]
        assert all(words_[at + 1] == "[<|endoftext|>]" for at in borders)
        first, *rest = [word for word in words_ if word != "¶"]
        assert [first, *(word[1:-1] for word in rest)] == [one.replace("\\", r"\\") for one in text]
    few = shown(call, *words, "--limit", "1").splitlines()
    assert few == [*lines[:4], lines[-1]]


@pytest.mark.slow
def test_show_masked_text(prepare, call: Call) -> None:  # noqa: ANN001
    Path("a.txt").write_text("abc[")
    Path("b.txt").write_text("def")
    prepare("a.txt", "b.txt")
    corpus = gh.data.Corpus.open("corpus")
    outcomes = set[str]()
    for seed in range(80):
        before = set(outcomes)
        batch = gh.data.MaskedLMDataset(corpus, 8, seed=seed).batch([0])
        words = []
        for number, target, in_loss in zip(
            *(one[0].tolist() for one in (batch.ids, batch.targets, batch.loss_mask)), strict=True
        ):
            shown_token, original = (
                show_whitespace(corpus.tokenizer.decode_bytes([number])),
                corpus.tokenizer.decode([target]),
            )
            if in_loss:
                outcomes.add(
                    "masked" if shown_token == "<|mask|>" else "random" if shown_token != original else "kept"
                )
                words.append(f"[{shown_token}←{original}]" if shown_token != original else f"[{shown_token}]")
            else:
                words.append("\\[" if shown_token == "[" else shown_token)
        words.insert(4, "¶")
        if outcomes == before:  # nothing new to show
            continue
        assert shown(call, "--seq-len", "8", "--batch-size", "1", "--masked", "--seed", str(seed)) == (
            "Corpus(text, 2 items, 9 tokens), step 0: samples 0 to 0\n"
            f"{MASKS}\n"
            "sample 0, epoch 0, texts 0 to 1, ids 0 to 7\n"
            f"  tokens: {' '.join(words)}\n"
            f"8 tokens, {batch.loss_mask.sum() / 8:.1%} in the loss, 0.0% padding\n"
        )
    assert outcomes == {"masked", "random", "kept"}


def test_show_pairs(prepare, call: Call) -> None:  # noqa: ANN001
    write("pairs.jsonl", {"source": "abc", "target": "x"}, {"source": "d", "target": "yz"})
    prepare("pairs.jsonl", "--kind", "pairs")
    # 6 ids of sources and 5 of targets are real, in 2 x 4 and 2 x 3 positions.
    assert shown(call, "--batch-size", "2") == (
        "Corpus(pairs, 2 items, 7 tokens), step 0: samples 0 to 1\n"
        f"{TARGETS}\n"
        "sample 0, epoch 0, item 1 of pairs.jsonl\n"
        "  source (2 padding): d <|endoftext|>\n"
        "  target: <|endoftext|> [y] [z] [<|endoftext|>]\n"
        "sample 1, epoch 0, item 0 of pairs.jsonl\n"
        "  source: a b c <|endoftext|>\n"
        "  target (1 padding): <|endoftext|> [x] [<|endoftext|>]\n"
        "11 tokens, 45.5% in the loss, 21.4% padding\n"
    )
    short = shown(call, "--batch-size", "1", "--seq-len", "3").splitlines()
    assert short[-1] == "1 of 2 items are longer than 3 tokens and skipped"
    assert "item 1 of" in short[2]


def test_show_labelled(prepare, call: Call) -> None:  # noqa: ANN001
    write("reviews.jsonl", {"text": "ab", "label": "good \x1b[1m"}, {"text": "[", "label": "bad"})
    prepare("reviews.jsonl", "--kind", "labelled")
    corpus = repr(gh.data.Corpus.open("corpus"))
    assert shown(call, "--batch-size", "2") == (
        f"{corpus}, step 0: samples 0 to 1\n"
        f"{LABELS}\n"
        "sample 0, epoch 0, item 1 of reviews.jsonl\n"
        "  text (1 padding): <|endoftext|> \\[ <|endoftext|>\n"
        "  label: [bad]\n"
        "sample 1, epoch 0, item 0 of reviews.jsonl\n"
        "  text: <|endoftext|> a b <|endoftext|>\n"
        "  label: [good \\x1b[1m]\n"
        "7 tokens, 2 labels in the loss, 12.5% padding\n"
    )


def test_show_tagged(prepare, call: Call) -> None:  # noqa: ANN001
    write("a.jsonl", {"words": ["ab", "["], "tags": ["x", "y\x1b[1m"]}, {"words": ["c"], "tags": ["x"]})
    assert prepare("a.jsonl", "--kind", "tagged").code == 0
    # Texts of 4 ids and 1, each between two more: 9 in 2 x 6 positions, 3 of them in the loss.
    assert shown(call, "--batch-size", "2") == (
        "Corpus(tagged, 2 items, 5 tokens), step 0: samples 0 to 1\n"
        "[x/y] token and its tag in the loss\n"
        "sample 0, epoch 0, item 1 of a.jsonl\n"
        "  words (3 padding): <|endoftext|> [c/x] <|endoftext|>\n"
        "sample 1, epoch 0, item 0 of a.jsonl\n"
        "  words: <|endoftext|> [a/x] b [␣/y\\x1b[1m] \\[ <|endoftext|>\n"
        "9 tokens, 33.3% in the loss, 25.0% padding\n"
    )


def test_show_conversations(prepare, call: Call) -> None:  # noqa: ANN001
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    long = [{"role": "user", "content": "a \n"}, {"role": "assistant", "content": "bc"}, *short]
    write("chat.jsonl", {"messages": long}, {"messages": short})
    done = prepare("chat.jsonl", "--kind", "chat")
    assert "tokens           21\n" in done.out  # 15 and 6
    corpus = repr(gh.data.Corpus.open("corpus"))
    assert shown(call, "--batch-size", "2") == (
        f"{corpus}, step 0: samples 0 to 1\n"
        f"{TARGETS}\n"
        "sample 0, epoch 0, item 1 of chat.jsonl\n"
        "  tokens (9 padding): <|user|> a <|end|> <|assistant|> [b] [<|end|>]\n"
        "sample 1, epoch 0, item 0 of chat.jsonl\n"
        "  tokens: <|user|> a ␣ ⏎ <|end|> <|assistant|> [b] [c] [<|end|>] "
        "<|user|> a <|end|> <|assistant|> [b] [<|end|>]\n"
        "19 tokens, 36.8% in the loss, 32.1% padding\n"
    )


@pytest.mark.long
@pytest.mark.slow
def test_show_on_a_terminal_uses_colours_and_escapes_the_text(prepare) -> None:  # noqa: ANN001
    Path("a.txt").write_text("a[b]\x1b[2J")
    prepare("a.txt")
    drawn = at_terminal("data", "show", "corpus", "--seq-len", "4", "--batch-size", "2", "--masked", COLUMNS="100")
    assert "\x1b[30;43mmasked\x1b[0m" in drawn
    assert "\x1b[2J" not in drawn
    row = at_terminal("data", "show", "corpus", "--seq-len", "8", "--batch-size", "1", "--limit", "1")
    assert "\x1b[2ma\x1b[0m\x1b[92m[\x1b[0m\x1b[32mb\x1b[0m\x1b[92m]\x1b[0m\x1b[32m\\x1b\x1b[0m" in row
    plain = at_terminal("data", "show", "corpus", "--seq-len", "8", "--batch-size", "1", NO_COLOR="1")
    assert "  tokens: a [[] [b] []] [\\x1b] [[] [2] [J] [<|endoftext|>]\n" in plain
    assert "\x1b" not in plain


def test_list_builtin_datasets(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {line.split()[0]: line.split()[1:5] for line in call("data", "list").out.splitlines()}
    assert list(rows) == ["name", *gh.data.builtin_datasets()]
    for name in gh.data.builtin_datasets():
        found = gh.data.builtin_dataset(name)
        assert rows[name] == [found.kind, *(f"{size:,}" for size in found.sizes().values())]

    def missing(self: object) -> None:
        raise gh.InputError("dates need Babel; install it.")

    monkeypatch.setattr(type(gh.data.builtin_dataset("dates")), "sizes", missing)
    out = call("data", "list").out.splitlines()
    assert out[2].split()[:5] == ["dates", "pairs", "-", "-", "-"]
    assert out[len(rows) :] == ["- dates need Babel; install it."]


def test_verify_reports_ok_or_corruption(prepare, call: Call) -> None:  # noqa: ANN001
    Path("a.txt").write_text("ab")
    prepare("a.txt")
    assert call("data", "verify", "corpus") == Done(
        0, "ok: Corpus(text, 1 item, 3 tokens), 1 shard, encoded with Tokenizer(BPE, 263 tokens)\n", ""
    )
    (ids,) = Path("corpus").glob("*.ids.npy")
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-1] + b"\x01")
    for command in ("verify", "show"):
        done = call("data", command, "corpus")
        assert (done.code, done.out) == (1, "")
        assert done.err == "error: 'corpus/" + ids.name + (
            "' does not match its hash, so it is corrupt; prepare the text again.\n"
        )
    ids.write_bytes(whole)
    gh.Tokenizer.train(texts=["other words"], vocab_size=265).save("corpus/tokenizer")
    for command in ("verify", "show"):
        done = call("data", command, "corpus", *(["--seq-len", "2"] if command == "show" else []))
        assert (done.code, done.out) == (1, "")
        assert "is not the one that encoded the corpus" in done.err
    Path("corpus/manifest.json").write_text("{")
    assert "is corrupt" in call("data", "verify", "corpus").err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--masked",), "is of kind pairs, not text"),
        (("--batch-size", "9"), "batch_size is 9, but 1 items"),
        (("--rank", "2", "--world-size", "2"), "rank is 2"),
    ],
)
def test_show_errors_are_one_line(args: tuple[str, ...], message: str, prepare, call: Call) -> None:  # noqa: ANN001
    write("pairs.jsonl", {"source": "abc", "target": "x"})
    prepare("pairs.jsonl", "--kind", "pairs")
    done = call("data", "show", "corpus", *(args if "--batch-size" in args else ("--batch-size", "1", *args)))
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert message in done.err
