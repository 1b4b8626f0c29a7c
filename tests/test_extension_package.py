"""A package installed beside this one adds an attention, an objective, a callback, a family, a recipe and a view.

The wheel of `tests/extension_package` is installed into a folder of its own. Commands that have the
folder on their path know all of it; commands that have not refuse its folders in one sentence.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import chromium
import pytest
import torch
from hatchling.builders.wheel import WheelBuilder
from playwright.sync_api import expect, sync_playwright
from processes import FORKS, SECONDS
from saved_page import scripts, unpack

import glasshouse as gh
from glasshouse import device
from glasshouse.cli import main
from glasshouse.training.logging import plots

PACKAGE = Path(__file__).parent / "extension_package"
TEXT = "to be or not to be, that is the question: whether tis nobler in the mind to suffer. " * 30


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed in."""
    folder = tmp_path_factory.mktemp("site")
    builder = WheelBuilder(str(PACKAGE))
    (wheel,) = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with ZipFile(wheel) as file:
        file.extractall(folder)
    assert (folder / "glasshouse_gated-0.1.dist-info/entry_points.txt").is_file()
    return folder


@dataclass(frozen=True)
class Done:
    code: int | None
    out: str


def _in_fork(site: Path | None, place: Path, output: Path, target: Callable[..., object], words: list[str]) -> None:
    if site is not None:
        sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    os.chdir(place)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    device.measure_peak_flops = lambda *_, **__: 1e12  # type: ignore[assignment] # which takes its time,
    plots.draw = lambda *_: []  # type: ignore[assignment] # as does this
    target(*words)


def _command(*words: str) -> None:
    sys.argv = ["glasshouse", *words]
    main()


def fork(site: Path | None, place: Path, *words: str | Path, target: Callable[..., object] = _command) -> Done:
    """Run a command, or a function, in a process that has the package on its path, or not."""
    output = place / "output.txt"
    process = FORKS.Process(target=_in_fork, args=(site, place, output, target, list(map(str, words))))
    process.start()
    process.join(SECONDS)
    process.kill()
    return Done(process.exitcode, output.read_text())


@pytest.fixture(scope="session")
def trained(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run of the package's recipe, and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "a.txt").write_text(TEXT)
    done = fork(site, folder, "train", "gated", "data.path=a.txt", "train.out=run", "train.steps=6", "--no-baselines")
    assert done.code == 0, done.out
    return folder, done.out


def metric(name: str, printed: str) -> str:
    return re.findall(rf"^{name} +([\d.]+)", printed, re.MULTILINE)[-1]


def test_its_recipe_objective_and_attention_are_trained(site: Path, trained: tuple[Path, str]) -> None:
    folder, printed = trained
    table = gh.config.read(folder / "run/run.toml")
    assert table["train"]["objective"] == {"kind": "z_loss", "weight": 1e-3}
    assert table["model"]["attention"] == {"kind": "gated", "bias": False}
    # The family of the package has our spec beside its own keys and tensor names.
    saved = json.loads((folder / "run/model/config.json").read_text())
    assert (saved["model_type"], saved["gate_bias"]) == ("gated-llama", False)
    assert saved["glasshouse"]["spec"]["attention"] == {"kind": "gated", "bias": False}
    names = gh.store.read_tensors(folder / "run/model/model.safetensors")
    assert names["model.layers.1.self_attn.g_proj.weight"].shape == (32, 32)
    evaluated = fork(site, folder, "eval", "run", "--generate", "0")
    assert evaluated.code == 0
    assert metric("loss", evaluated.out) == metric("loss", printed)


@pytest.mark.long
def test_it_generates_and_is_verified(site: Path, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    done = fork(site, folder, "generate", "run", "to be or", "--max-new-tokens", "6", "--temperature", "0")
    by_hand = fork(site, folder, "run", "to be or", "6", target=_greedy)
    assert (done.code, by_hand.code) == (0, 0)
    assert by_hand.out.strip() in done.out
    verified = fork(site, folder, "verify", "run/model")  # cached, batched and padded as alone, and a round trip
    assert verified.code == 0
    assert verified.out.count(" ok\n") == 4


def _greedy(folder: str, prompt: str, count: str) -> None:
    model, tok = gh.load(folder)
    assert tok is not None
    ids = list(tok.encode(prompt))
    for _ in range(int(count)):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    print(tok.decode(ids).removeprefix(prompt))


@pytest.mark.long
def test_its_view_is_in_a_saved_page_with_its_numbers(site: Path, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    done = fork(site, folder, "look", "run", "--text", "to be", "--view", "gates", "--save", "page.html")
    assert done.code == 0
    page = (folder / "page.html").read_text()
    assert '{"name":"gates","title":"Gates"}' in page
    assert "views/gates/view.js" in scripts(page)
    assert ".gates td" in page
    answers = unpack(page)["responses"]
    (layers,) = (answer["layers"] for name, answer in answers.items() if name.startswith("gates "))
    assert [len(heads) for heads in layers] == [4, 4]
    assert all(0 < one < 1 for heads in layers for one in heads)


def _with_callback(folder: str) -> None:
    kinds = importlib.import_module("glasshouse_gated.kinds")
    run = gh.Run.load("gated", "data.path=a.txt", f"train.out={folder}", "train.steps=2")
    gh.train(run, progress=False, callbacks=[kinds.GateNorm()])


def _save_native(folder: str) -> None:
    gh.save(gh.build(gh.preset("tiny-decoder", attention="gated", position="learned")), None, folder)


@pytest.mark.long
def test_its_callback_is_called(site: Path, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    assert fork(site, folder, "called", target=_with_callback).code == 0
    lines = [json.loads(line) for line in (folder / "called/metrics.jsonl").read_text().splitlines()]
    assert [line["gate_norm"] > 0 for line in lines] == [True, True]


@pytest.mark.long
def test_without_it_its_folders_are_refused_in_one_sentence(site: Path, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    assert fork(site, folder, "native", target=_save_native).code == 0
    with pytest.raises(gh.StoreError) as error:
        gh.load(folder / "native")
    assert str(error.value) == (
        f"{str(folder / 'native/config.json')!r} is not a valid model: attention.kind is 'gated', but it must be one "
        "of 'softmax', or be registered by a package that is installed or imported."
    )
    with pytest.raises(
        gh.StoreError, match=r"model_type = 'gated-llama', which is not supported; gpt2, .*installed\.$"
    ):
        gh.load(folder / "run/model")
    with pytest.raises(
        gh.ConfigError, match=r"^train.objective.kind is 'z_loss', but .*, or be registered by a pack"
    ):
        gh.Run.load(folder / "run")
    with pytest.raises(gh.ConfigError, match=r"^there is no recipe or file 'gated'"):
        gh.Run.load("gated")
    done = fork(None, folder, "generate", "run", "to be")
    assert done.code == 1
    assert done.out.count("\n") == 1
    assert done.out.startswith("error: ")
    assert "gated-llama" in done.out


# The commands themselves, as processes with the folder on PYTHONPATH -------------------------------------------


def run(site: Path | None, place: Path, *words: str | Path) -> Done:
    command = [sys.executable, "-m", "glasshouse", *map(str, words)]
    made = subprocess.run(command, cwd=place, env=with_path(site), capture_output=True, text=True, check=False)
    return Done(made.returncode, made.stdout + made.stderr)


def with_path(site: Path | None) -> dict[str, str]:
    ours = str(Path(gh.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([ours, *([] if site is None else [str(site)])])}


@contextmanager
def serving(site: Path, place: Path, *words: str) -> Iterator[str]:
    """Start a command that serves until it is stopped; yield the address that it prints last."""
    command = [sys.executable, "-m", "glasshouse", *words, "--port", "0"]
    with subprocess.Popen(command, cwd=place, env=with_path(site), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.terminate()


@pytest.mark.long
def test_every_command_works_and_without_the_package_none_does(site: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("to be\n")
    (tmp_path / "c.txt").write_text("a question\n")
    installed = tmp_path / "site"
    shutil.copytree(site, installed)
    train = ("train", "gated", "data.path=a.txt", "train.out=run", "train.steps=10")
    tune = ("train", "stdlib", "--from", "run", "data.path=a.txt", "data.seq_len=16", "train.out=tuned")
    commands: list[tuple[str, ...]] = [
        train,
        train,  # which resumes
        ("generate", "run", "to be"),
        ("eval", "run"),
        ("eval", "run/model", "a.txt"),
        ("look", "run", "--save", "page.html"),
        ("export", "run", "exported"),
        ("verify", "exported"),
        ("plan", "run"),
        ("steer", "make", "run", "--positive", "b.txt", "--negative", "c.txt", "--out", "vector.safetensors"),
        (*tune, "train.steps=2"),
    ]
    for words in commands:
        done = run(installed, tmp_path, *words)
        assert done.code == 0, f"{words}: {done.out}"
    shutil.rmtree(installed)  # uninstalled
    for words in commands:
        done = run(None, tmp_path, *words)
        *_, last = done.out.strip().splitlines()
        assert done.code == 1, f"{words}: {done.out}"
        assert re.match(r"error: .*(gated|z_loss)", last), f"{words}: {done.out}"
        assert "Traceback" not in done.out


@pytest.mark.long
def test_its_view_is_drawn_by_look_and_its_model_is_served(site: Path, trained: tuple[Path, str]) -> None:
    folder, _ = trained
    if (found := chromium.find()) is None:
        (pytest.fail if chromium.is_required() else pytest.skip)(chromium.MISSING)
    with (
        sync_playwright() as playwright,
        serving(site, folder, "look", "run", "--no-browser", "--text", "to be") as at,
    ):
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
        page.goto(at)
        page.get_by_role("tab", name="Gates").click()
        expect(page.locator("table.gates tr")).to_have_count(2)
        expect(page.locator("table.gates td").first).to_have_text(re.compile(r"^\d+(\.\d+)?%$"))
        expect(page.locator("table.gates td").first).to_have_css("text-align", "right")
        screens = Path(__file__).parents[1] / "build" / "screens"
        screens.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=screens / "extension_view.png")
        assert problems == []
        browser.close()
    with serving(site, folder, "serve", "run") as address:
        body = json.dumps({"model": "run", "prompt": "to be", "max_tokens": 3}).encode()
        asked = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
