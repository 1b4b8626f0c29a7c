"""`glasshouse demo`: the page on a bundled model, then a new model trained while a second page follows."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Self

import typer

import glasshouse as gh
from glasshouse import pretrained
from glasshouse.cli import screen, training

app = typer.Typer()

SECONDS = 150  # of training steps; with preparing, probing and evaluating it is well within five minutes
FEWEST, MOST = 60, 2000  # steps


@app.command(epilog="Example: glasshouse demo --no-browser")
def demo(
    out: Annotated[Path, typer.Option(help="The folder of the new run; if it is taken, a number is added.")] = Path(
        "runs/demo"
    ),
    browser: Annotated[bool, typer.Option(help="Open the two pages in a browser.")] = True,
) -> None:
    """Open the page on a trained model, then train a small one while a second page follows: five minutes, offline."""
    folder = _unused(out)
    with screen.waiting("loading torch and timing a training step"):
        steps, seconds = _steps_for(SECONDS)
    print(
        f"1. A page opens on {pretrained.DEFAULT}, a decoder of Python code that comes with glasshouse: now.\n"
        f"2. A smaller decoder is trained on modules of Python's library: {steps:,} steps of {seconds:.2f} s, about "
        f"{(steps * seconds + 75) / 60:.0f} minutes here in all.\n"
        "   A second page follows it: its curves, what it writes, and its attention heads as they form.\n"
        "Ctrl-C stops everything.\n",
        flush=True,
    )
    modules = Path(sysconfig.get_path("stdlib"), "*.py")  # without packages: prepared and evaluated in seconds
    run = gh.Run.load("demo", f"data.path={modules}", f"train.steps={steps}", f"train.out={folder}")
    with ExitStack() as pages:
        trained = pages.enter_context(_Page(pretrained.DEFAULT, "attention", browser, _print_address))
        trained.opened.wait()  # it starts faster while nothing is trained
        with gh.training.Display(gh.training.units_of(run.data)).open() as display:
            live = _Page(folder, "run", browser, lambda address: display.log(f"page of the run: {address}"))
            pages.enter_context(live)
            try:
                result = gh.train(run, display)
            except (gh.training.StoppedError, KeyboardInterrupt):
                raise typer.Exit(130) from None
        training.print_summary(result, {})
        if sys.stdin.isatty() and sys.stdout.isatty():
            print("\nThe pages stay open until Ctrl-C.", flush=True)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()


def _print_address(address: str) -> None:
    print(f"page of {pretrained.DEFAULT}: {address}\n", flush=True)


def _unused(folder: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... that does not exist."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in range(2, 10_000))
    return folder if not folder.exists() else next(name for name in names if not name.exists())


def _steps_for(seconds: float) -> tuple[int, float]:
    """Return how many steps of the demo's run fit in a time on this machine, and the seconds of one."""
    import torch

    run = gh.Run.load("demo")
    table = run.model.to_dict()
    spec = gh.preset(table.pop("preset"), **table, vocab_size=run.data.vocab_size, max_len=run.data.seq_len)
    device = gh.device.resolve(run.train.device)
    model = gh.build(spec, device=device)
    optimizer = gh.training.optimizer.make_optimizer(model, run.train.optimizer)
    ids = torch.randint(run.data.vocab_size, (run.train.batch_tokens // run.data.seq_len, run.data.seq_len + 1))
    times = []
    for _ in range(4):
        began = time.perf_counter()
        logits = model(ids[:, :-1].to(device))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten().to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.token_embedding.table.weight[0, 0].item()  # waits for a GPU
        times.append(time.perf_counter() - began)
    one = min(times)
    return min(MOST, max(FEWEST, round(seconds / one))), one


class _Page:
    """`glasshouse look` in a process of its own, so that pages and training steps do not wait for each other.

    The page of a run starts with the first checkpoint.
    """

    def __init__(self, model: str | Path, view: str, browser: bool, show: Callable[[str], None]) -> None:
        self._model, self._show = model, show
        self._command = [*f"glasshouse look --view {view}".split(), str(model)]
        self._command += [] if browser else ["--no-browser"]
        self._process: subprocess.Popen[str] | None = None
        self._closed = threading.Event()
        self.opened = threading.Event()  # the page can be opened, or has failed with a message on stderr

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def _run(self) -> None:
        while isinstance(self._model, Path) and not gh.training.list_checkpoints(self._model):
            if self._closed.wait(timeout=0.5):
                return
        command = [sys.executable, "-m", *self._command]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("http"):
                self._show(line.strip())
                self.opened.set()
        self.opened.set()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
