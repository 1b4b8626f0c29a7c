"""`glasshouse train` as people and scripts meet it: on a tiny run, stopped, mistaken, and at a terminal."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
from contextlib import closing
from pathlib import Path

import pytest
from examples import first_of

import glasshouse as gh
from cli.runner import Call, Done, Forked, at_terminal
from glasshouse.errors import InputError

SAYING = "to be or not to be, that is the question whether it is nobler. "
RUN = """
[model]
preset = "tiny-decoder"
n_layers = 1

[data]
path = "a.txt"
seq_len = 16
vocab_size = 270
val_fraction = 0.1

[train]
steps = 4
batch_tokens = 96
schedule = { kind = "cosine", warmup = 2 }
"""


def write(place: Path) -> None:
    (place / "tiny.toml").write_text(RUN)
    (place / "a.txt").write_text(SAYING * 40)
    (place / "small.txt").write_text("to be")
    (place / "empty.txt").write_text("")
    (place / "one.csv").write_text("text,label\n" + "".join(f"{number} is one,x\n" for number in range(40)))
    (place / "body.jsonl").write_text(f"{json.dumps({'body': SAYING * 3})}\n" * 10)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run files and data, to stand in."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done."""
    place = tmp_path_factory.mktemp("trained")
    write(place)
    gh.train(gh.Run.load(place / "tiny.toml", f"data.path={place / 'a.txt'}", f"train.out={place / 'run'}"))
    return place / "run"


def mistaken(done: Done) -> str:
    """Return the one sentence of a mistake, with which all ends."""
    assert (done.code, done.out) == (1, ""), done
    *_, last = done.err.splitlines(True)
    assert last.startswith("error: ")
    assert (done.err.count("error: "), done.err.count("\n" + last)) in ((1, 0), (1, 1))
    return last


# Off a terminal


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.slow
def test_train_reports_the_result_and_commands_to_try_that_work(place: Path, call: Call) -> None:
    words = ("train", "tiny.toml", "train.out=my runs/first")
    done = call(*words)
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err
    for line in (
        r"folder   my runs/first",
        r"data     1 file, 2\.5 kB",
        r"stop     Ctrl-C saves a checkpoint and stops; run the same command again to resume",
        r"model    decoder, 1 layer, d_model 64, 4 heads: [\d,]+ parameters",
        r"tokens   text: [\d,]+ in 1 item for training, [\d,]+ for validation",
        r"device   cpu \(\d+ threads?\), float32",
        r"steps    4 of about 96 tokens in 6 sequences: [\d.]+ epochs",
        r"step 1 of 4 · loss \d\.\d{4} · [\d,]+ tokens/s · [\d.]+ [MG]B · MFU \d+%",
        r"step 4: validation loss \S+, perplexity \S+, accuracy \S+, bits per byte \S+",
    ):
        assert re.search(rf"^{line}$", done.err, re.MULTILINE), line
    phases = ("reading", "merging", "tokenizing", "building the model", "probing and sampling", "first step")
    phases += ("validating", "saving the model", "drawing plots", "evaluating", "generating", "comparing with gzip")
    places = [re.search(rf"^{phase}\b", done.err, re.MULTILINE) for phase in phases]
    assert all(places)
    assert [place.start() for place in places] == sorted(place.start() for place in places)  # type: ignore[union-attr]
    assert "on the validation set, after 4 steps:\n\nloss " in done.out
    assert (place / "my runs" / "first" / "plots.png").is_file()
    for name in (
        "perplexity",
        "accuracy",
        "bits per byte",
        "gzip",
        "xz",
        "byte 5-gram",
        "evaluated on",
        "prediction",
    ):
        assert re.search(rf"^{name} +\S", done.out, re.MULTILINE), name
    tries = [shlex.split(line) for line in done.out.partition("try:\n")[2].splitlines()]
    assert [one[1] for one in tries] == ["generate", "eval", "look"]
    seen = call(*tries.pop()[1:], "--save", "page.html")  # without a file it would stay open
    assert (seen.code, seen.err) == (0, "")
    for program, *rest in tries:
        assert program == "glasshouse"
        tried = call(*rest)
        assert (tried.code, tried.err, bool(tried.out)) == (0, "", True)
    measured = done.out.partition("\n\n")[2].partition("\n")[0]
    assert tried.out.startswith(measured)  # what eval says of the loss is what training said

    again = call(*words, "--no-baselines")
    assert again.code == 0
    assert "\nresuming from step 4 of 4, from my runs/first/checkpoints/step-00000004\n" in again.err
    assert measured in again.out
    assert "gzip" not in again.out


@pytest.mark.parametrize(("task", "columns"), [("classify", "text,label"), ("translate", "source,target")])
def test_a_recipe_by_task_trains_and_its_first_command_to_try_works(
    place: Path, call: Call, task: str, columns: str
) -> None:
    rows = (
        f"{saying} {number},{label}\n" for number in range(40) for saying, label in (("fine", "a"), ("dull", "b"))
    )
    (place / "my.csv").write_text(f"{columns}\n" + "".join(rows))
    small = ("d_model=16", "n_layers=1", "n_heads=2", "d_ff=32")
    settings = (*(f"model.{one}" for one in small), "data.vocab_size=263", "data.seq_len=16", "train.steps=1")
    done = call("train", task, "data.path=my.csv", *settings, "train.batch_tokens=64")
    assert done.code == 0, done.err
    first = shlex.split(done.out.partition("try:\n")[2].splitlines()[0])
    assert first[1:3] == [task, "runs/my"]
    tried = call(*first[1:])
    assert (tried.code, len(tried.out.splitlines())) == (0, 1)


def test_one_step_is_a_run(place: Path, call: Call) -> None:
    done = call("train", "tiny.toml", "train.steps=1", "train.batch_tokens=8", "--no-baselines")
    assert done.code == 0
    assert "the warm-up is shortened from 2 steps to 0, as train.steps is 1 instead of 4\n" in done.err
    assert re.match(
        r"on the whole validation set of \d+ samples \(validation during training used 4\), after 1 step:\n\nloss ",
        done.out,
    )
    assert done.out.endswith("glasshouse look runs/tiny\n")


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_ended_early_stays_as_it_is(place: Path, call: Call) -> None:
    words = ("train", "tiny.toml", "train.steps=40", "train.patience=1", "train.eval_every=1", "train.lr=3.0")
    first = call(*words)
    assert "early stopping" in first.err
    assert re.match(r"on the validation set, after \d+ steps, the best model, of step \d+:\n", first.out)
    journal = (place / "runs" / "tiny" / "metrics.jsonl").read_text()
    assert call(*words).out == first.out
    assert (place / "runs" / "tiny" / "metrics.jsonl").read_text() == journal


@pytest.mark.long
@pytest.mark.slow
def test_from_a_model(trained: Path, place: Path, call: Call) -> None:
    done = call("train", "tiny.toml", "train.out=tuned", "train.steps=2", "--from", trained / "model")
    assert done.code == 0
    assert gh.Run.load(place / "tuned" / "run.toml").to_dict()["model"] == {"from": str(trained / "model")}
    losses = [json.loads(line)["loss"] for line in (place / "tuned" / "metrics.jsonl").read_text().splitlines()]
    learned = [json.loads(line)["loss"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] < learned[0] - 0.1  # it begins where the other ended
    lost = call("train", "tiny.toml", "train.out=other", "model.n_layers=2", "--from", trained / "model")
    assert "model.from is given, so model.n_layers cannot be set" in mistaken(lost)
    assert not (place / "other").exists()


# Mistakes


def test_settings_alone_are_those_of_the_first_recipe(
    place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(run: gh.Run, _: object) -> None:
        asked.append(run)
        raise gh.InputError("not now.")

    monkeypatch.setattr(gh, "train", refuse, raising=False)
    assert mistaken(call("train", "train.steps=7", "train.seed=3")) == "error: not now.\n"
    assert asked == [gh.Run.load("stdlib", "train.steps=7", "train.seed=3")]
    call("train")
    assert asked[1] == gh.Run.load("stdlib")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stdlb",), "there is no recipe or file 'stdlb'; did you mean stdlib?"),
        (("absent.toml",), "there is no file 'absent.toml'"),
        (("a.txt",), "'a.txt' is not a TOML file with the settings of a run; to train on it, give data.path=a.txt."),
        ((".",), "'.' is not a TOML file"),
        (("train.stepz=3",), "train.stepz is not a setting of 'Train'; did you mean steps?"),
        (("train.steps=many",), "train.steps is 'many', but it must be a whole number."),
        (("train.steps=0",), "train.steps is 0, but it must be at least 1."),
        (("tiny.toml", "train.steps"), "'train.steps' is not a setting; write it as key=value"),
        (("tiny.toml", "train.device=tpu"), "train.device is 'tpu', but this machine has cpu"),
        (("tiny.toml", "train.device=cuda:99"), "train.device is 'cuda:99', but this machine has cpu"),
        (("tiny.toml", "model.from=3", "model.preset=a"), "model.from is given, so model.preset cannot be set"),
        (("tiny.toml", "data.path=absent"), "there is no 'absent'"),
        (("tiny.toml", "data.path=empty.txt"), "'empty.txt' (1 in all) contains no text"),
        (("tiny.toml", "data.tokenizer=absent"), "there is no 'absent/tokenizer.json'"),
        (("tiny.toml", "model.n_layers=0"), "n_layers is 0, but it must be at least 1."),
        (("tiny.toml", "data.path=body.jsonl"), "line 1 of 'body.jsonl' has no column 'text'; it has body."),
        (
            ("tiny.toml", "data.path=one.csv", "data.kind=labelled", "model.preset=tiny-encoder"),
            "all labels are 'x', so there is nothing to classify",
        ),
        (
            ("tiny.toml", "data.seq_len=200", "data.val_fraction=0.05"),
            "the validation set is too small, so raise data.val_fraction: the corpus has",
        ),
        (("tiny.toml", "train.out=a.txt"), "the run cannot be written to 'a.txt' (File exists); choose another"),
        (("tiny.toml", "train.out=a.txt/run"), "the run cannot be written to 'a.txt/run' (Not a directory)"),
        (("finetune-chat",), "no model in 'runs/stdlib/model' to start from; run `glasshouse train` first"),
        (
            ("finetune-classifier",),
            "no model in 'runs/masked-lm/model' to start from; run `glasshouse train masked-lm` first",
        ),
        (("finetune-chat", "--from", "absent/models/x"), "there is no folder 'absent/models/x'; give a model folder"),
        (("finetune-chat", "model.from=3"), "model.from is 3, but it must be the folder or the hub id of a model."),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], said: str, place: Path, call: Call) -> None:
    assert said in mistaken(call("train", *words))


def test_a_text_that_is_shorter_than_a_row(place: Path, call: Call) -> None:
    done = call("train", "tiny.toml", "data.path=small.txt")
    assert done.code == 1
    assert "need 17; add text, or lower seq_len." in done.err.splitlines()[-1]


@pytest.mark.long
def test_a_fixed_mistake_is_not_another_run(place: Path, call: Call) -> None:
    mistaken(call("train", "tiny.toml", "data.path=body.jsonl"))
    mistaken(call("train", "tiny.toml", "data.path=body.jsonl", "data.columns=body", "train.freeze=*"))
    tokenizer = place / "runs" / "tiny" / "tokenizer" / "tokenizer.json"
    made = tokenizer.stat().st_mtime_ns
    done = call("train", "tiny.toml", "data.path=a.txt", "--no-baselines", "train.steps=1", "data.vocab_size=266")
    assert done.code == 0
    assert tokenizer.stat().st_mtime_ns != made  # that of the other text
    assert len(gh.Tokenizer.load(tokenizer.parent)) == 266
    # From here on something is learned, and kept.
    refused = call("train", "tiny.toml", "data.path=a.txt", "train.steps=2", "data.vocab_size=266")
    assert "train.steps was 1 and is 2" in mistaken(refused)


def test_a_full_disk_keeps_the_settings_of_the_run(
    trained: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    before = (trained / "run.toml").read_text()
    real = Path.write_text

    def write_text(self: Path, text: str, **rest: str) -> int:
        if self.parent != trained:
            return real(self, text, **rest)
        real(self, text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", write_text)
    assert "No space left on device" in mistaken(call("train", trained / "run.toml"))
    assert (trained / "run.toml").read_text() == before
    assert not list(trained.glob(".run*"))


# Stopped


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", first_of([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_saves_and_the_same_command_resumes(number: signal.Signals, place: Path, call: Call) -> None:
    words = ["train", "tiny.toml", "train.steps=150", "--no-baselines"]
    with closing(Forked(*words)) as process:
        assert process.stderr is not None
        assert any(line.startswith(b"step 1 of 150") for line in process.stderr)
        process.send_signal(number)
        out, rest = process.communicate()
        assert (process.wait(), out) == (128 + number, b"")
    err = rest.decode()
    said = re.fullmatch(
        r"saved after step ([\d,]+); the same command resumes from there\.\n", err.splitlines(True)[-1]
    )
    assert said
    assert "Traceback" not in err
    step = int(said[1].replace(",", ""))
    assert 1 <= step < 150
    done = call(*words)
    assert done.code == 0
    assert f"\nresuming from step {step} of 150, from " in done.err
    assert "after 150 steps:" in done.out
    steps = [
        json.loads(line)["step"] for line in (place / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 151))


@pytest.mark.parametrize(
    ("words", "length"),
    [
        (("data.path=a.txt",), (None, None, 10)),
        (("data.path=a.txt", "model.n_layers=2", "data.vocab_size=270"), (None, None, 10)),
        (("data.path=a.txt", "train.minutes=3"), (None, None, 3)),
        (("data.path=a.txt", "train.epochs=2"), (None, 2, None)),
        (("data.path=a.txt", "train.steps=5"), (5, None, None)),
        (("data.path=a.txt", "model.depth=1"), (260, None, None)),
        (("data.path=a.txt", "--from", "run"), (440, None, None)),
        (("stdlib", "data.path=a.txt"), (440, None, None)),
        (("train.batch_tokens=64",), (440, None, None)),
    ],
)
def test_text_without_a_recipe_or_a_length_gets_ten_minutes(
    words: tuple[str, ...], length: tuple[float | None, ...], place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: gh.Run, *_: object) -> None:
        assert (run.train.steps, run.train.epochs, run.train.minutes) == length
        raise InputError("it would train.")

    monkeypatch.setattr(gh, "train", train)
    assert call("train", *words).err.endswith("error: it would train.\n")


# At a terminal


@pytest.mark.long
@pytest.mark.slow
def test_a_run_at_a_terminal_leaves_it_clean(place: Path) -> None:
    drawn = at_terminal("train", "tiny.toml", "train.eval_every=4", COLUMNS="120", NO_COLOR="1")
    lines = re.findall(r"\x1b\[2K([^\r\n\x1b]+)", drawn)
    assert "folder   runs/tiny" in lines
    assert any(line.startswith("step 4: validation ") for line in lines)
    assert any(re.match(r"\S loading torch|\S ━+ starting", line) for line in [drawn.lstrip("\x1b[?25l"), *lines])
    assert "per token" in drawn
    during = drawn.partition("folder   runs/tiny")[2]
    assert "\x1b[?25l" not in during  # one that is killed leaves a cursor behind
    assert not re.findall(r"\x1b\[[\d;]*[1-9][\d;]*m", drawn)  # no colour
    assert drawn.endswith("  glasshouse look runs/tiny\n")


def test_help_shows_defaults_and_an_example(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    helped = call("train", "--help").out
    for shown in (
        "[default: stdlib]",
        "[default: baselines]",
        "--from",
        "Example: glasshouse train stdlib train.steps=",
    ):
        assert shown in helped, shown
    for name in gh.training.recipes():
        assert name in helped
