"""What `train.minutes` chooses from: decoders of several depths, each timed by a few steps on this machine."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from glasshouse import device as machine
from glasshouse.errors import InputError
from glasshouse.models import count_parameters
from glasshouse.training.budget import MOST_EPOCHS, Budget, clock
from glasshouse.training.depth import batch_tokens, block_parameters
from glasshouse.training.distributed.processes import Processes
from glasshouse.training.logging.progress import ProgressReporter, SilentReporter
from glasshouse.training.plan.scaling_law import predicted_loss
from glasshouse.training.run import NewModel, Run
from glasshouse.training.setup.build import choose_run_accum, make_batches, make_objective
from glasshouse.training.setup.custom import AnyDatasets, Custom, CustomDatasets
from glasshouse.training.setup.datasets import Datasets, prepare_datasets
from glasshouse.training.setup.execution import make_train_step
from glasshouse.training.setup.model import make_initial_model
from glasshouse.training.setup.resolve import Resolved, resolve, spec_before_data
from glasshouse.training.signals import Signals

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)
TIMING = 0.05  # of the minutes: timing the candidates, at most
OVERHEAD = 0.15  # of what is left: validation, samples, checkpoints and the last report, as planned
TIMED_STEPS = 2  # after one that warms up
FIRST_BATCH = 2048  # tokens, before a speed is known
ATTEMPTS = 3  # at a batch that fits the speed that is measured with it
WORSE = 2  # candidates after the best one, before deeper ones are left out


@dataclass(frozen=True)
class Candidate:
    """A decoder that could be trained in the time, and the loss that it should reach."""

    depth: int
    n_parameters: int  # embeddings included
    batch_tokens: int  # of a step
    tokens_per_second: float
    timed: bool  # or estimated from the candidate before, by the FLOPs of a token
    steps: int
    epochs: float  # at most `MOST_EPOCHS`
    loss: float  # predicted, in nats per token

    def apply(self, run: Run) -> Run:
        """Return the run with this choice."""
        return run.choose(self.depth, self.batch_tokens, self.steps)


def best(candidates: list[Candidate]) -> Candidate:
    """Return the candidate of the lowest predicted loss."""
    return min(candidates, key=lambda one: one.loss)


def find_candidates(
    resolved: Resolved, datasets: AnyDatasets, budget: Budget, signals: Signals, reporter: ProgressReporter
) -> list[Candidate]:
    """Return what could be trained in the time that is left, from shallow to deep, past the best one."""
    minutes, main = resolved.run.train.minutes, resolved.processes.gather
    if isinstance(datasets, CustomDatasets):
        raise InputError(
            f"train.minutes is {minutes:g}, which chooses by the amount of text, but dataset is given; give "
            "train.steps."
        )
    began = clock()
    seconds = main((1 - OVERHEAD) * (budget.left - TIMING * budget.seconds))[0]  # by the clock of the main process
    if seconds <= 0:
        raise InputError(
            f"train.minutes is {minutes:g}, which preparing the data has used up; run the same command again, which "
            "finds them prepared, or give more minutes."
        )
    found: list[Candidate] = []
    speed = 0.0  # FLOPs per second, of the last candidate that was timed; 0: unknown
    for depth in _depths(resolved.run):
        reporter.stage(f"timing steps of depth {depth}", 0, 0)
        one = _Sized(resolved, datasets, depth)
        batch = one.batch(batch_tokens(one.tokens(seconds, speed)) if speed else FIRST_BATCH)
        timed = False
        for _ in range(ATTEMPTS):
            allowed = main(TIMING * budget.seconds - (clock() - began))[0]
            if speed and (1 + TIMED_STEPS) * batch * one.flops / speed > allowed:
                break
            speed, timed = one.flops * one.time(batch, signals), True
            wanted = one.batch(batch_tokens(one.tokens(seconds, speed)))
            if wanted == batch:
                break
            batch = wanted
        found.append(one.candidate(batch, speed, seconds, timed=timed))
        if len(found) - 1 - found.index(best(found)) >= WORSE:
            break
    return found


def plan_minutes(run: Run, progress: ProgressReporter) -> list[Candidate]:
    """Return what train.minutes would choose from; the data are prepared in a folder that is not kept."""
    if run.train.minutes is None or run.unchosen is None:
        raise InputError("the run has its model and its steps, so train.minutes has nothing to choose; leave it out.")
    budget, device = Budget(run.train.minutes, clock()), machine.resolve(run.train.device, "train.device")
    resolved = resolve(run, Custom(), Processes(), device, progress)
    with tempfile.TemporaryDirectory() as folder:
        datasets = prepare_datasets(resolved.data, Path(folder), resolved.tokenizer, progress.stage)
        return find_candidates(resolved, datasets, budget, Signals(), progress)


def _depths(run: Run) -> tuple[int, ...]:
    assert run.unchosen is not None
    given = run.unchosen["model"].get("depth")
    return DEPTHS if given is None else (given,)


class _Sized:
    """A run at one depth."""

    def __init__(self, resolved: Resolved, datasets: Datasets, depth: int) -> None:
        self.resolved, self.datasets, self.depth = resolved, datasets, depth
        run = resolved.run.choose(depth, FIRST_BATCH, 1)
        assert isinstance(run.model, NewModel)
        self.spec = spec_before_data(run, len(datasets.tok))
        self.unique = datasets.train.n_tokens
        self.blocks = block_parameters(run.model.fields)
        self.flops = 6 * (self.blocks + self.spec.vocab_size * self.spec.d_model)  # per token

    def batch(self, tokens: int) -> int:
        """Return the tokens of a step: `tokens`, unless the user has set them, and at least a sequence."""
        return max(self.resolved.run.choose(self.depth, tokens, 1).train.batch_tokens, self.resolved.run.data.seq_len)

    def time(self, batch: int, signals: Signals) -> float:
        """Return the tokens per second of real steps."""
        run = self.resolved.run.choose(self.depth, batch, 1)
        seconds = time_step(replace(self.resolved, run=run), self.datasets, signals)
        return batch / max(self.resolved.processes.gather(seconds)[0], 1e-9)

    def tokens(self, seconds: float, speed: float) -> float:
        """Return the tokens of all steps, at a speed in FLOPs per second."""
        return min(seconds * speed / self.flops, MOST_EPOCHS * self.unique)

    def candidate(self, batch: int, speed: float, seconds: float, *, timed: bool) -> Candidate:
        """Return what this depth would reach in `seconds` of steps."""
        steps = max(1, int(self.tokens(seconds, speed) / batch))
        return Candidate(
            depth=self.depth,
            n_parameters=count_parameters(self.spec),
            batch_tokens=batch,
            tokens_per_second=speed / self.flops,
            timed=timed,
            steps=steps,
            epochs=steps * batch / self.unique,
            loss=predicted_loss(self.blocks, steps * batch, self.unique),
        )


def time_step(resolved: Resolved, datasets: Datasets, signals: Signals) -> float:
    """Return the seconds of a training step of a run, in the mean of a few."""
    torch.manual_seed(resolved.run.train.seed)
    model = make_initial_model(resolved, datasets).train()
    objective = make_objective(resolved, datasets, model, SilentReporter())
    batches, _ = make_batches(resolved.run, model.spec, objective, datasets, resolved.processes)
    step = make_train_step(resolved, model, objective, 1, SilentReporter(), signals)  # one step is never compiled
    grad_accum = choose_run_accum(resolved, model, objective, batches)
    for number in range(1 + TIMED_STEPS):
        if number == 1:
            began = clock()
        step(batches.at(number), grad_accum)
    return (clock() - began) / TIMED_STEPS
