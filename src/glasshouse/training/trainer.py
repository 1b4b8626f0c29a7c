"""The training loop: batches, steps and metrics, with validation and checkpoints when due.

It resumes from a checkpoint, raises gradient accumulation when out of memory, and skips batches with a NaN loss.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.data import Batch, Batches, Dataset
from glasshouse.data.batches import Share
from glasshouse.data.stream_dataset import StreamDataset
from glasshouse.device import is_out_of_memory
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.evaluation.eval_loop import evaluate_samples
from glasshouse.hub.run_checkpoints import MODEL
from glasshouse.models import Model
from glasshouse.models.flops import FlopEstimator
from glasshouse.objectives import Objective
from glasshouse.objectives.metrics import MetricSums
from glasshouse.training.budget import Budget, Length, decay_from
from glasshouse.training.checkpoint.folder import NONFINITE, write_run
from glasshouse.training.checkpoint.state import Checkpointer, TrainerState
from glasshouse.training.checkpoint.store import CheckpointData
from glasshouse.training.distributed.failures import Stragglers
from glasshouse.training.distributed.fsdp import gathered, reshard
from glasshouse.training.distributed.processes import Processes
from glasshouse.training.logging.checkpoint_log import CheckpointLog
from glasshouse.training.logging.journal import Journal
from glasshouse.training.logging.progress import ProgressReporter, Throughput
from glasshouse.training.logging.source_report import SourceReport
from glasshouse.training.logging.trackers import TrackedRun, Trackers
from glasshouse.training.nonfinite import first_located, locate_in_micro_batches
from glasshouse.training.optimizer import set_lr, set_momentum
from glasshouse.training.run import Run
from glasshouse.training.schedule import WSD, Schedule
from glasshouse.training.setup.custom import AnyDatasets
from glasshouse.training.setup.interval import default_interval
from glasshouse.training.signals import Signals, StoppedError
from glasshouse.training.step import EMA, NonFiniteError, StepFuture, StepMetrics, TrainStep

T = TypeVar("T")
MOST_SKIPPED = 10  # batches with a NaN or infinite loss before the run stops


class Callback:
    """Called by the training loop; override what you need.

    `trainer.model` is the model, `trainer.stop()` ends the run after the current step. Steps run ahead on a
    GPU: in `on_step_end` the weights may be those of the next step. In several processes each calls its own.

    >>> class StopBelow(Callback):
    ...     def on_step_end(self, trainer, step, metrics):
    ...         if metrics["loss"] < 0.5:
    ...             trainer.stop()
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step, also after a resume."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        """After a step; numbers that are added to `metrics` are written to metrics.jsonl with the others."""

    def on_validation_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """After a validation."""

    def on_checkpoint(self, trainer: Trainer, step: int) -> None:
        """After a checkpoint was handed to the thread that writes it."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, before the model is saved."""


@dataclass(frozen=True)
class Launched:
    """A step that was started, and whose metrics are not read yet."""

    future: StepFuture
    batch: Batch
    step: int
    number: int  # of the batch
    lr: float


@dataclass(eq=False, kw_only=True)
class Trainer:
    """All that a run trains with, and its training loop; `state` is what changes from step to step."""

    run: Run
    folder: Path
    device: torch.device
    reporter: ProgressReporter
    signals: Signals
    processes: Processes
    callbacks: Sequence[Callback]
    datasets: AnyDatasets
    batches: Batches  # of the training set
    val_samples: Dataset
    steps: int
    schedule: Schedule
    model: Model  # in eager mode
    objective: Objective[Any]
    gathers: bool  # whether a device can hold the whole model beside its part of the training state
    resized: bool  # whether the head or the vocabulary of a pretrained model was replaced
    train_step: TrainStep  # owns the optimizer, the gradient scaler and the compiled model
    ema: EMA | None
    throughput: Throughput
    state: TrainerState
    checkpointer: Checkpointer  # owns the checkpoints and snapshots
    metrics: Journal
    checkpoint_log: CheckpointLog  # probes and samples
    budget: Budget | None  # of train.minutes
    trackers: Trackers | None = field(default=None, init=False)  # open while the loop runs

    def __post_init__(self) -> None:
        self._stopped = False
        self._flops = FlopEstimator(self.model)
        self._source_report = SourceReport(self.batches, getattr(self.datasets, "sources", ()))
        self._stragglers = Stragglers(self.processes, self.reporter.log)
        self._stream = self._batches_from(0)  # `fit` begins where the run is
        self._ahead: Launched | None = None  # the last step, if its metrics are not read yet

    # The loop

    def fit(self) -> None:
        """Run the remaining steps."""
        state, checkpointer = self.state, self.checkpointer
        self.model.train()
        if self.budget is not None:
            self.budget.begin_loop()
        tracked = TrackedRun(self.folder, self.folder.name, state.unwritten, self.run.to_dict())
        self.trackers = Trackers(self.run.train.trackers, tracked, writes=self.processes.is_main)
        try:
            if state.step == 0:
                self._log_checkpoint()
                checkpointer.save_initial()
            for callback in self.callbacks:
                callback.on_train_begin(self)
            self.reporter.stage("compiling for the first step" if self.train_step.compiled else "first step", 0, 0)
            self._stream = self._batches_from(state.next_batch)
            if state.pending_metrics is not None:  # the validation of the last step was interrupted
                self._complete_step()
            while not self.finished:
                checkpointer.check()
                self.take_step()
            if self.out_of_patience:
                self.reporter.log(
                    f"early stopping: no better validation loss in {state.evals_since_best} evaluations"
                )
            for callback in self.callbacks:
                callback.on_train_end(self)
        except StoppedError:
            self._save_unfinished_step()
            raise
        finally:
            self._stream.close()
            checkpointer.wait()
            self.trackers.close()

    def take_step(self) -> None:
        """Start the update by the next batch; then finish the step before, or this one where that cannot wait.

        A GPU so has work while the host reads, writes and prepares the next batch. A step counts once it is finished.
        """
        number, batch = next(self._stream)
        n_targets = self._agree(batch)
        step = self.state.step + (1 if self._ahead is None else 2)
        if self.budget is not None and self.run.train.minutes is not None:
            self._decide_steps(self.budget, done=step - 1)
        set_lr(self.train_step.optimizer, self.schedule.factor(step - 1, self.steps))
        set_momentum(self.train_step.optimizer, step - 1)
        self.processes.seed_step(self.run.train.seed, step - 1)
        try:
            future = self._launch(batch, n_targets)
        except NonFiniteError as error:
            self._skip(error, step, number, batch)
            return
        if self.ema is not None:
            self.ema.update()
        launched = Launched(future, batch, step, number, self.train_step.optimizer.param_groups[0]["lr"])
        before, self._ahead = self._ahead, launched
        if before is not None:
            self._finish(before)
        if self._ahead is launched and not self._may_run_ahead(step):
            self._ahead = None
            self._finish(launched)

    def _decide_steps(self, budget: Budget, done: int) -> None:
        """Decide the number of steps, once, where the decay of the learning rate begins, to end on time."""
        assert isinstance(self.schedule, WSD)
        decided = budget.decide(
            done,
            self.steps,
            self.schedule,
            batch_size=self.batches.batch_size,
            samples=len(self.batches.samples),
            val_samples=len(self.val_samples),
        )
        # By the clock of the main process: the others give 0.
        mine = decided if decided is not None and self.processes.is_main else Length(0, 0)
        if not (steps := self.processes.max(mine.steps)):
            return
        self.reporter.log(f"steps    {steps:,}, now that the learning rate decays (planned: {self.steps:,})")
        self.steps, self.schedule = steps, decay_from(self.schedule, done, steps)
        self.state.report_samples = self.processes.max(mine.report_samples)
        self.run = replace(self.run, train=replace(self.run.train, steps=steps, schedule=self.schedule, minutes=None))
        if self.processes.is_main:
            write_run(self.run, self.folder)

    def _agree(self, batch: Batch) -> int:
        """Return the targets of all processes; raise `StoppedError` in every one if one received a signal."""
        n_targets = int(batch.loss_mask.sum())
        if self.processes.is_parallel:
            with self._stragglers.waiting():
                n_targets, number = self.processes.agree(n_targets, self.signals.received or 0)
            if number:
                raise StoppedError(number)
        return n_targets

    def _may_run_ahead(self, step: int) -> bool:
        choice = self.run.train
        due = self._is_due(choice.eval_every, step) or self._is_due(choice.save_every, step)
        return self.train_step.runs_ahead and not due and not self._stopped

    def _finish(self, launched: Launched) -> bool:
        """Read the metrics of a step, report and write them; return False if it was skipped."""
        try:
            outcome = launched.future.result()
        except NonFiniteError as error:
            self._skip(error, launched.step, launched.number, launched.batch)
            return False
        before, self.state.next_batch = self.state.next_batch, launched.number + 1
        self.state.step = launched.step
        shares = self.processes.data_size  # taken to be like this one
        self.throughput.add(
            shares * launched.batch.n_tokens, shares * self._flops(launched.batch.ids, launched.batch.source)
        )
        self.reporter.on_step_end(launched.step, self.steps, outcome, self.throughput)
        metrics = self.state.pending_metrics = self._metrics(launched, outcome)
        for callback in self.callbacks:
            callback.on_step_end(self, launched.step, metrics)
        if self.processes.is_main:
            is_last = self.state.step == self.steps
            for line in self._source_report.lines(before, launched.number + 1, is_last, self.state.skipped):
                self.reporter.log(line)
        if self._ahead is None:
            self._complete_step()
        else:  # nothing is due before the next step
            self._write_metrics()
        return True

    def _complete_step(self) -> None:
        """Validate, write the metrics and save a checkpoint, each where it is due."""
        if self._is_due(self.run.train.eval_every, self.state.step):
            self.validate()
        self._write_metrics()
        is_last = self.out_of_patience or self._stopped
        if self._is_due(self.run.train.save_every, self.state.step) or self.is_best or is_last:
            self.save_checkpoint()

    def _is_due(self, every: int, step: int) -> bool:
        return step % (every or self.state.interval) == 0 or step == self.steps

    def stop(self) -> None:
        """End the run after the current step, as after its last; for callbacks."""
        self._stopped = True

    @property
    def finished(self) -> bool:
        """Whether no step remains."""
        return self.state.step >= self.steps or self.out_of_patience or self._stopped

    @property
    def out_of_patience(self) -> bool:
        """Whether validation loss has not improved for `patience` evaluations."""
        return 0 < self.run.train.patience <= self.state.evals_since_best

    @property
    def is_best(self) -> bool:
        """Whether the last step has the best validation loss."""
        return self.state.best is not None and self.state.best[0] == self.state.step

    # Batches

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass."""
        return -(-len(self.batches.share) // self.state.grad_accum)

    def _batches_from(self, start: int) -> Generator[tuple[int, Batch]]:
        """Yield the batches from a number on, except those to skip."""
        prefetched = self._prefetched(start)
        try:
            for number, batch in enumerate(prefetched, start):
                if number not in self.state.skipped:
                    yield number, batch
        finally:
            prefetched.close()

    def _prefetched(self, start: int) -> Generator[Batch]:
        if isinstance(stream := self.batches.samples, StreamDataset):
            stream.seek(start * self.batches.batch_size, self.state.stream)
        if workers := self.run.train.workers:
            return self.batches.iterate(start, workers=workers)
        return (self.batches.at(number) for number in itertools.count(start))

    # Metrics

    def _metrics(self, launched: Launched, outcome: StepMetrics) -> JsonDict:
        straggler, throughput = self._stragglers.rank, self.throughput
        on_gpu = self.device.type == "cuda"  # elsewhere it is that of the whole process
        return _as_json(
            {
                "epoch": self.batches.epochs(launched.number + 1),
                "loss": outcome.loss,
                "lr": launched.lr,
                "grad_norm": outcome.grad_norm,
                "n_targets": outcome.n_targets,
                "tokens_per_second": round(throughput.tokens_per_second, 1),
                **({"peak_memory": throughput.peak_memory} if on_gpu else {}),
                **({} if straggler is None else {"straggler": straggler}),
            }
        )

    def _write_metrics(self) -> None:
        """Write the metrics of the last step to metrics.jsonl and the trackers."""
        values, self.state.pending_metrics = self.state.pending_metrics or {}, None
        with self.checkpointer.report_write_errors():
            self.metrics.write(self.state.step, **values)
        assert self.trackers is not None
        self.trackers.log(self.state.step, values)

    # Validation

    @cached_property
    def token_bytes(self) -> Tensor | None:
        """Number of bytes of each token id, if bits per byte are a metric."""
        return None if self.datasets.tok is None else self.objective.token_bytes(self.datasets.tok)

    @property
    def eval_samples(self) -> int:
        """Validation samples per evaluation during training."""
        limit = self.run.train.eval_samples or self.batches.batch_size * max(4, self.state.initial_steps // 100)
        return min(limit, len(self.val_samples))

    def validate(self) -> None:
        """Evaluate on the validation set, or the start of it, and update the best step."""
        state = self.state

        def evaluate() -> dict[str, float]:
            with nullcontext() if self.ema is None else self.ema.applied():
                return self.validation_sums(self.eval_samples).metrics()

        found = self._retry(evaluate)
        self.reporter.on_validation_end(state.step, found)
        for callback in self.callbacks:
            callback.on_validation_end(self, state.step, found)
        self.throughput.exclude_elapsed()
        loss = found["loss"]
        if math.isfinite(loss) and (state.best is None or loss < state.best[1]):
            state.best, state.evals_since_best = (state.step, loss), 0
        else:
            state.evals_since_best += 1
        validated = _as_json({f"validation_{name}": value for name, value in found.items()})
        state.pending_metrics = {**(state.pending_metrics or {}), **validated}

    def validation_sums(self, count: int) -> MetricSums:
        """Return the sums over the first `count` validation samples; each process evaluates its share of them."""
        processes, done = self.processes, 0

        def on_batch() -> None:
            nonlocal done
            if not processes.is_parallel:  # several stop together, between steps
                self.signals.check()
            self.reporter.stage("validating", done, count)
            done += processes.data_size * self.micro_batch_size

        sums = evaluate_samples(
            self.model,
            Share(self.val_samples, count, rank=processes.data_rank, world_size=processes.data_size),
            self.micro_batch_size,
            token_bytes=self.token_bytes,
            autocast_dtype=self.train_step.precision,
            evaluate_batch=self.objective.evaluate_batch,
            on_batch=on_batch,
        )
        reshard(self.model)
        return sums.reduced(processes.sum)

    # Checkpoints

    def save_checkpoint(self) -> None:
        """Write probes and samples, then save; a run resumed from there does not repeat them."""
        self._log_checkpoint()
        self._save()
        for callback in self.callbacks:
            callback.on_checkpoint(self, self.state.step)
        self.throughput.exclude_elapsed()
        self._stragglers.exclude_next()

    def plain_model(self) -> Model | None:
        """Return the model with plain weights: itself, or gathered from several processes, for the main one alone."""
        if not self.processes.is_parallel:
            return self.model
        if not self.gathers:
            return None
        return gathered(self.model, self.device, keep=self.processes.is_main)

    def _log_checkpoint(self) -> None:
        self.reporter.stage("probing and sampling", 0, 0)
        if (model := self.plain_model()) is not None:
            with self.checkpointer.report_write_errors():
                self.checkpoint_log.write(self.state.step, model)
        self.throughput.exclude_elapsed()

    def _save_unfinished_step(self) -> None:
        """Save after a signal, without probes and samples: a resumed run has the lines of an uninterrupted one."""
        last, self._ahead = self._ahead, None
        if last is not None and not self._finish(last):
            return  # rolled back to a checkpoint
        if (pending := self.state.pending_metrics) is not None:
            self._write_metrics()
            self.state.pending_metrics = pending  # its validation was interrupted, and is repeated
        self._save()

    def _save(self) -> None:
        if isinstance(stream := self.batches.samples, StreamDataset):
            self.state.stream = stream.state_at(self.state.next_batch * self.batches.batch_size)
        if self.budget is not None:
            self.state.seconds, self.state.seconds_in_loop = self.budget.used, self.budget.used_in_loop
        self.checkpointer.save()

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one, and drop what was logged after it."""
        checkpoints, log = self.checkpointer.checkpoints, self.reporter.log
        if found := checkpoints.newest():
            step, data, errors = found
            for error in errors:
                log(f"skipped a damaged checkpoint: {error}")
            self._restore(step, data)
            if self.budget is not None:
                self.budget.resume(self.state.seconds, self.state.seconds_in_loop)
            log(f"resuming from step {step} of {self.steps}, from {checkpoints.folder(step)}")
            if (self.folder / MODEL).exists() and step < self.steps:
                log(f"{self.folder / MODEL} is not replaced until the last step")
        # At step 0, lines are left by a run that was killed before its first checkpoint.
        self._truncate_logs(self.state.unwritten if self.state.step else 0)

    def _restore(self, step: int, data: CheckpointData) -> None:
        self.checkpointer.restore(step, data)
        self.state.grad_accum = self.run.train.grad_accum or self.state.grad_accum
        self.state.initial_steps = self.state.initial_steps or self.steps
        self.state.interval = self.state.interval or default_interval(self.state.initial_steps)  # of older versions

    def _truncate_logs(self, step: int) -> None:
        """Drop the lines and snapshots from a step on."""
        with self.checkpointer.report_write_errors():
            self.metrics.truncate(step)
            self.checkpoint_log.truncate(step)
            if self.processes.is_main:
                self.checkpointer.checkpoints.snapshots.truncate(step)

    # Out of memory

    def _launch(self, batch: Batch, n_targets: int) -> StepFuture:
        """Start one training step, with more gradient accumulation if out of memory."""
        rng = device_rng_state(self.device)

        def attempt() -> StepFuture:
            try:
                return self.train_step.launch(batch, self.state.grad_accum, n_targets)
            except Exception:
                load_device_rng_state(rng, self.device)  # no update, so no random numbers used
                raise

        return self._retry(attempt)

    def _retry(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, called again with more gradient accumulation while it is out of memory."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Here and not in `except`: there, the traceback would keep the tensors of the failed attempt alive.
            self._raise_grad_accum()

    def _raise_grad_accum(self) -> None:
        state, batch_size, seq_len = self.state, len(self.batches.share), self.run.data.seq_len
        if self.processes.is_parallel:  # the others have gone on
            raise InputError(
                f"process {self.processes.rank} is out of memory with {self.micro_batch_size} sequences of "
                f"{seq_len} tokens per micro-batch; try train.grad_accum={2 * state.grad_accum}, "
                "train.activation_checkpointing=true or more processes."
            )
        if self.objective.whole_batch:
            raise InputError(
                f"out of memory with {batch_size} samples of up to {seq_len} tokens, which the "
                "objective compares in one step; lower train.batch_tokens, or try "
                "train.activation_checkpointing=true."
            )
        if state.grad_accum >= batch_size:
            raise InputError(
                f"out of memory with one sequence of {seq_len} tokens; choose a smaller model or a "
                "smaller data.seq_len, or try train.activation_checkpointing=true."
            )
        self.train_step.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        state.grad_accum = min(batch_size, state.grad_accum * 2)
        self.reporter.log(
            f"out of memory: gradient accumulation raised to {state.grad_accum} micro-batches of "
            f"{self.micro_batch_size} sequences"
        )

    # NaN and infinite losses

    def _skip(self, error: NonFiniteError, step: int, number: int, batch: Batch) -> None:
        """Write nonfinite.json; then stop, or roll back to the last checkpoint and skip the batch."""
        self._ahead = None  # a step launched after it has updated nothing
        choice, path = self.run.train, self.folder / NONFINITE
        located = locate_in_micro_batches(
            self.model,
            batch.to(self.device),
            self.state.grad_accum,
            choice.label_smoothing,
            self.train_step.precision,
            self.objective.loss,
        )
        origins = [self.batches.samples.origin(sample) for sample in self.batches.sample_indices(number)]
        where, origins = first_located(self.processes.gather((located, origins)))
        found = {"step": step, "batch": number, "error": str(error), "location": where, "sources": origins}
        if self.processes.is_main:
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sentence = f"at step {step}, batch {number}, {error} First NaN or infinity: {where}."
        skipped = (*self.state.skipped, number)
        if choice.on_nonfinite == "stop" or len(skipped) > MOST_SKIPPED:
            advice = "" if choice.on_nonfinite == "skip" else ", or train.on_nonfinite=skip to skip such batches"
            raise GlasshouseError(
                f"{sentence} No weight was updated. See {str(path)!r}; try a lower train.lr{advice}."
            )
        self.reporter.log(f"{sentence} The batch is skipped.")
        self._roll_back()
        self.state.skipped = skipped
        self._stream.close()
        self._stream = self._batches_from(self.state.next_batch)

    def _roll_back(self) -> None:
        """Restore the newest checkpoint, if there is one."""
        self.train_step.optimizer.zero_grad(set_to_none=True)
        self.checkpointer.wait()
        self.processes.wait()
        if newest := self.checkpointer.checkpoints.newest():
            self._restore(newest[0], newest[1])
            self._truncate_logs(self.state.unwritten)
            self.reporter.log(f"rolled back to step {newest[0]}")


def _as_json(values: Mapping[str, float]) -> JsonDict:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def device_rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of torch's generators on the CPU and the device, to retry a step."""
    match device.type:
        case "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(device)
        case "mps":
            return torch.get_rng_state(), torch.mps.get_rng_state()
    return torch.get_rng_state(), None


def load_device_rng_state(rng: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Restore what `device_rng_state` returned."""
    torch.set_rng_state(rng[0])
    if rng[1] is not None and device.type == "mps":
        torch.mps.set_rng_state(rng[1])
    elif rng[1] is not None:
        torch.cuda.set_rng_state(rng[1], device)
