"""Progress of a run: its throughput, the interface that receives it, and a display on stderr.

The display is a live line at a terminal, elsewhere a line for each phase and one every minute.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.text import Text

from glasshouse import device as machine
from glasshouse.escaping import escape_control
from glasshouse.training.step import StepMetrics

UNITS = {"merging": "tokens", "validating": "samples", "evaluating": "samples", "generating": "tokens at most"}
STEPS = "training"  # the phase of training steps
QUICK = 0.1  # seconds between updates at a terminal
OFTEN = 10.0  # seconds between step lines elsewhere
SILENCE = 60.0  # maximum seconds without a line elsewhere
WINDOW = 20  # steps over which throughput is averaged


class Throughput:
    """Measures tokens and FLOPs per second over the last steps, of all processes."""

    def __init__(self, device: torch.device, autocast_dtype: torch.dtype, n_devices: int = 1) -> None:
        self.device = device
        self.peak_flops = n_devices * machine.measure_peak_flops(device, autocast_dtype, repeats=3)
        self._marks = deque([(time.perf_counter(), 0, 0)], maxlen=WINDOW + 1)

    def add(self, tokens: int, flops: int) -> None:
        """Add a step."""
        _, tokens_before, flops_before = self._marks[-1]
        self._marks.append((time.perf_counter(), tokens_before + tokens, flops_before + flops))

    def exclude_elapsed(self) -> None:
        """Exclude the time since the last step, spent on something else."""
        elapsed = time.perf_counter() - self._marks[-1][0]
        self._marks = deque([(at + elapsed, tokens, flops) for at, tokens, flops in self._marks], maxlen=WINDOW + 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the last steps."""
        return self._per_second(1)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs per second over the measured matmul peak."""
        return self._per_second(2) / self.peak_flops

    def _per_second(self, what: int) -> float:
        first, last = self._marks[0], self._marks[-1]
        return (last[what] - first[what]) / max(last[0] - first[0], 1e-9)

    @property
    def peak_memory(self) -> int:
        """Peak memory in bytes: of the device, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "win32":
            return 0
        import resource  # which Windows lacks

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class ProgressReporter(Protocol):
    """Receives the progress of a run."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Report the progress of a phase; a total of 0 means unknown."""
        return

    def log(self, text: str) -> None:
        """Report a message."""
        return

    def on_step_end(self, step: int, steps: int, metrics: StepMetrics, throughput: Throughput) -> None:
        """Report the metrics of a step."""
        return

    def on_validation_end(self, step: int, metrics: dict[str, float]) -> None:
        """Report the validation metrics."""
        return


class SilentReporter(ProgressReporter):
    """Reports nothing."""


class Display(ProgressReporter):
    """Shows the phases, the steps and the messages of a run.

    >>> with Display().open() as display:  # writes to stderr
    ...     display.stage("tokenizing", 512, 1024)
    >>> display.line()
    'tokenizing · 50% · 512 bytes of 1.0 kB'
    """

    def __init__(
        self, units: Mapping[str, str] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._units = {**UNITS, **(units or {})}  # of phases that do not count bytes
        self._clock = clock
        self.live = sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
        self._console = _Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._phase, self._done, self._total = "starting", 0, 0
        self._steps = ""  # summary of the last step
        self._seen: set[str] = set()  # phases already printed
        self._began = self._printed = clock()
        self._first: tuple[int, float] | None = None  # the first step, and its end time

    def stage(self, name: str, done: int, total: int) -> None:
        """Show the progress of a phase; a total of 0 means unknown."""
        if name != self._phase:
            self._phase, self._began = name, self._clock()
        self._done, self._total = done, total
        self._update()
        if name not in self._seen:
            self._seen.add(name)
            self._print_line()

    def log(self, text: str) -> None:
        """Print a permanent line."""
        self._print(escape_control(text))

    def on_step_end(self, step: int, steps: int, metrics: StepMetrics, throughput: Throughput) -> None:
        """Show the metrics of a step."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        elif step < steps and self._phase == STEPS and now - self._printed < (QUICK if self.live else OFTEN):
            return
        first, began = self._first
        left = (now - began) / max(1, step - first) * (steps - step)
        parts = [
            f"step {step:,} of {steps:,}",
            f"loss {metrics.loss:.4f}",
            f"{_time(left)} left" if step > first else "",  # before what a narrow terminal may cut
            f"{throughput.tokens_per_second:,.0f} tokens/s",
            filesize.decimal(throughput.peak_memory),
            f"MFU {throughput.mfu:.0%}",
        ]
        self._phase, self._done, self._total = STEPS, step, steps
        self._steps = " · ".join(filter(None, parts))
        self._update()
        if self.live:
            self._printed = now
        elif now - self._printed >= OFTEN or step in (first, steps):
            self._print_line()

    def on_validation_end(self, step: int, metrics: dict[str, float]) -> None:
        """Print the validation metrics."""
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
        self.log(f"step {step:,}: validation {shown}")

    def line(self) -> str:
        """Return the current line."""
        if self._phase == STEPS:
            return self._steps
        parts = [self._phase]
        if self._total:
            parts.append(f"{100 * self._done // self._total}%")
            if unit := self._units.get(self._phase):
                parts.append(f"{self._done:,} of {self._total:,} {unit}")
            else:
                parts.append(f"{filesize.decimal(self._done)} of {filesize.decimal(self._total)}")
        elapsed = self._clock() - self._began
        return " · ".join([*parts, f"{_time(elapsed)} elapsed"] if elapsed >= 1 else parts)

    def tick(self) -> None:
        """Print a line if there was none for `SILENCE` seconds."""
        if not self.live and self._clock() - self._printed >= SILENCE:
            self._print_line()

    @contextmanager
    def open(self) -> Iterator[Display]:
        """Update the line in the background, and restore the terminal at the end."""
        with ExitStack() as stack:
            if self.live:
                columns = (SpinnerColumn(), BarColumn(bar_width=12), _Line(self.line))
                self._progress = Progress(
                    *columns, console=self._console, transient=True, redirect_stdout=sys.stdout.isatty()
                )
                self._progress.add_task("", total=None)
                stack.enter_context(self._progress)
            else:
                closed = threading.Event()
                ticker = threading.Thread(target=self._tick_until, args=(closed,), name="display", daemon=True)
                ticker.start()
                stack.callback(ticker.join)
                stack.callback(closed.set)
            try:
                yield self
            finally:
                self._progress = None

    def _tick_until(self, closed: threading.Event) -> None:
        while not closed.wait(1.0):
            self.tick()

    def _update(self) -> None:
        if self._progress is not None:
            (task,) = self._progress.tasks  # set directly: `update` cannot reset a total to unknown
            task.completed, task.total = self._done, self._total or None

    def _print_line(self) -> None:
        if not self.live:
            self._print(self.line())

    def _print(self, text: str) -> None:
        self._printed = self._clock()
        if self._progress is not None:
            self._progress.console.print(text, markup=False, emoji=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


class _Console(Console):
    """A console that never hides the cursor: a killed process could not restore it."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _Line(ProgressColumn):
    """Text rendered on each refresh, and truncated to the width of the terminal."""

    max_refresh = None

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self.text = text

    def render(self, task: Task) -> Text:
        return Text(escape_control(self.text()), no_wrap=True, overflow="ellipsis")


def _time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
