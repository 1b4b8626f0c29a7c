"""Every command that README.md and docs/ show is run, in page order, on small inputs and with models shrunk."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from examples import first_of

import glasshouse as gh
from glasshouse.cli import main
from glasshouse.data import builtin
from glasshouse.data.builtin import stdlib
from glasshouse.training.run import NewModel, Run
from glasshouse.web import listen

ROOT = Path(__file__).parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "console")  # the tags of a fence with commands
PROGRAM = re.compile(r"(\$ )?(\.venv/bin/)?(glasshouse|python -m glasshouse) ?")
NOT_RUN = {  # a command that cannot run in a test, and the reason
    "glasshouse sweep run.toml train.lr=1e-3,1e-2 train.seed=0,1 --out runs/rates": "its runs are not shrunk",
}
GIVEN = (
    *("my", "mt.tsv", "en.txt", "de.txt", "reviews.csv", "names.jsonl", "chat.jsonl", "MODEL", "keys"),
    "preferred.jsonl",
    *("numbers.txt", "names.txt", "quoted.txt", "unquoted.txt"),
    *("runs/stdlib", "build/demo/code"),  # trained on another page
)
SAYING = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "
PUBLISHED = {"gpt2": "MODEL", "openai-community/gpt2": "MODEL"}  # hub ids, and what answers for them
SMALL = {"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "d_ff": 32}
LIBRARY = {"train": ("textwrap.py", "string.py"), "validation": ("this.py", "bisect.py"), "test": ("keyword.py",)}


def lines(page: str) -> Iterator[str]:
    """Yield the lines of the shell that a page shows, without the remarks after them."""
    for tag, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        for line in block.splitlines() if tag in SHELL else ():
            yield re.split(r" {3,}", line.strip())[0]


COMMANDS = {page: [line for line in lines(page) if PROGRAM.match(line)] for page in PAGES}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages say is the reader's own, under the names that they use."""
    place = tmp_path_factory.mktemp("inputs")
    (place / "my" / "books").mkdir(parents=True)
    for number in range(6):
        (place / "my" / "books" / f"{number}.txt").write_text(SAYING * 20)
    pairs = [(f"good morning {number}", f"guten Morgen {number}") for number in range(40)]
    (place / "mt.tsv").write_text("en\tde\n" + "".join(f"{one}\t{two}\n" for one, two in pairs))
    (place / "en.txt").write_text("".join(f"{one}\n" for one, _ in pairs))
    (place / "de.txt").write_text("".join(f"{two}\n" for _, two in pairs))
    reviews = [f"a fine book {number},good\na dull book {number},bad\n" for number in range(30)]
    (place / "reviews.csv").write_text("text,label\n" + "".join(reviews))
    words = json.dumps({"words": ["Ada", "wrote", "it"], "tags": ["NAME", "O", "O"]})
    (place / "names.jsonl").write_text(f"{words}\n" * 60)
    messages = [{"role": "user", "content": "To be?"}, {"role": "assistant", "content": "Or not to be."}]
    (place / "chat.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 60)
    preferred = {"prompt": "To be?", "chosen": "Or not to be.", "rejected": "Yes."}
    (place / "preferred.jsonl").write_text(f"{json.dumps(preferred)}\n" * 60)
    (place / "numbers.txt").write_text("1, 2, 3\n")
    (place / "names.txt").write_text("a, b, c\n")
    (place / "quoted.txt").write_text("".join(f'name = "a{number}\n' for number in range(20)))
    (place / "unquoted.txt").write_text("".join(f"name = a{number}\n" for number in range(20)))
    (place / "keys").write_text("a-key-of-enough-characters\n")
    tok = gh.Tokenizer.train(texts=[SAYING], vocab_size=270)
    spec = gh.preset("gpt2", vocab_size=len(tok), n_layers=1, d_model=16, n_heads=2, max_len=128)
    gh.save(gh.build(spec), tok, place / "MODEL")
    shutil.copytree(place / "MODEL", place / "runs" / "stdlib")
    shutil.copytree(place / "MODEL", place / "build" / "demo" / "code")
    return place


@pytest.fixture
def small(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty folder, where runs take a step, datasets are small, and the hub and the browser are near."""
    load = Run.load

    def load_small(source: str | Path, *settings: str) -> Run:
        run = load(source, *settings)
        model = run.model
        if isinstance(model, NewModel):
            model = NewModel(model.preset, {**model.fields, **SMALL, "max_len": 128})
        data = dataclasses.replace(run.data, vocab_size=min(run.data.vocab_size, 300), seq_len=64, val_fraction=0.3)
        train = dataclasses.replace(
            run.train,
            **{"steps": 1, "epochs": None, "minutes": None, "batch_tokens": 128, "eval_samples": 2},
            **{"sample_prompts": 1, "schedule": "constant"},
        )
        return dataclasses.replace(run, model=model, data=data, train=train, unchosen=None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "load", load_small)
    candidate = gh.training.Candidate(1, 10**6, 1024, 1e4, True, 100, 0.5, 3.0)
    monkeypatch.setattr(gh.training, "plan_minutes", lambda *_: [candidate])
    monkeypatch.setattr(gh.page.Server, "run", lambda self, started: started() or self.socket.close())
    monkeypatch.setattr(gh.page.Server, "show", lambda *_: None)
    monkeypatch.setattr(gh.serve.Server, "run", lambda self, started: started() or self.close())
    monkeypatch.setattr(gh.serve.server, "listen", lambda host, port: listen(host, 0))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(inputs / PUBLISHED[name]))
    monkeypatch.setattr(stdlib, "_files", lambda: LIBRARY)
    for name in ("dates", "langid", "chat", "paraphrases", "preferences"):
        few = dataclasses.replace(builtin._BUILTINS[name], count=lambda _: 20)
        monkeypatch.setitem(builtin._BUILTINS, name, few)


def run(line: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a command in this process, with the inputs that it names and no earlier one made; return its status."""
    words = shlex.split(PROGRAM.sub("", line, count=1), comments=True)
    for given in GIVEN:
        if any(re.search(rf"(^|=){re.escape(given)}(/|$)", word) for word in words):
            put(given, inputs)
    monkeypatch.setattr(sys, "argv", ["glasshouse", *words])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    try:
        main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def put(name: str, inputs: Path) -> None:
    if not Path(name).exists():
        source = inputs / name
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, name)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("page", first_of([page for page, commands in COMMANDS.items() if commands], 2))
@pytest.mark.usefixtures("small")
def test_the_commands_of_a_page_run_in_its_order(
    page: str, inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for tag, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if tag == "toml":  # the run file of the page
            Path("run.toml").write_text(block)
            put("my", inputs)
    for line in COMMANDS[page]:
        if PROGRAM.sub("glasshouse ", line, count=1) not in NOT_RUN:
            assert run(line, inputs, monkeypatch) == 0, f"{line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_extras_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = [line.split()[1] for line in lines(page) if line.startswith("make ")]
    assert {*shown, *re.findall(r"`(?:\w+=\w+ )?make ([a-z-]+)`", text)} <= {*targets}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"pip install '(?:glasshouse|\.)\[([\w,]+)\]'", text)
    assert {extra for extras in named for extra in extras.split(",")} <= {*project["optional-dependencies"]}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.removeprefix("docs/") for page in PAGES if page != "README.md")
