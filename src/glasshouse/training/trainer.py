"""The training loop: a batch, a step, its metrics, and where due validation and a checkpoint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.data import Batch
from glasshouse.data.batches import Share
from glasshouse.data.stream_dataset import StreamDataset
from glasshouse.evaluation.eval_loop import evaluate_samples
from glasshouse.models.flops import FlopEstimator
from glasshouse.objectives.metrics import MetricSums
from glasshouse.training.distributed.failures import Stragglers
from glasshouse.training.distributed.fsdp import reshard
from glasshouse.training.logging.trackers import Trackers
from glasshouse.training.optimizer import set_lr
from glasshouse.training.recovery import Recovery
from glasshouse.training.setup.components import Setup
from glasshouse.training.setup.custom import Callback
from glasshouse.training.signals import StoppedError
from glasshouse.training.step import NonFiniteError, StepFuture, StepMetrics


@dataclass(frozen=True)
class Launched:
    """A step that was started, and whose metrics are not read yet."""

    future: StepFuture
    batch: Batch
    step: int
    number: int  # of the batch
    lr: float


class Trainer:
    """The training loop of a run."""

    def __init__(
        self, setup: Setup, recovery: Recovery, trackers: Trackers, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.setup, self.recovery, self.trackers, self.callbacks = setup, recovery, trackers, callbacks
        self._stopped = False
        self.state, self.reporter = setup.state, setup.reporter
        self.batches, self.flops = self._stream(), FlopEstimator(setup.model)
        self.token_bytes = setup.token_bytes
        self.stragglers = Stragglers(setup.processes, setup.reporter.log)
        self._launched: Launched | None = None  # the last step, if its metrics are not read yet

    def fit(self) -> None:
        """Run the remaining steps."""
        state, checkpointer = self.state, self.setup.checkpointer
        self.setup.model.train()
        if state.step == 0:
            self._log_checkpoint()
            checkpointer.save_initial()
        for callback in self.callbacks:
            callback.on_train_begin(self)
        self.reporter.stage("compiling for the first step" if self.setup.train_step.compiled else "first step", 0, 0)
        try:
            while state.pending_metrics is not None or not self.finished:
                if state.pending_metrics is None:  # else validation of the last step was interrupted
                    checkpointer.check()
                    batch = next(self.batches)
                    self._stop_together()
                    self.launch_step(batch)
                    if self._launched is not None and self._may_run_ahead():
                        continue
                    if not self.finish_step():
                        continue
                if self._is_due(self.setup.run.train.eval_every):
                    self.validate()
                self.write_metrics()
                is_last = self.out_of_patience or self._stopped
                if self._is_due(self.setup.run.train.save_every) or self.is_best or is_last:
                    self.save_checkpoint()
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
            self.batches.close()
            checkpointer.wait()

    def _stop_together(self) -> None:
        """Raise `StoppedError` in every process if one of several received a signal."""
        if self.setup.processes.is_parallel:
            with self.stragglers.waiting():
                number = self.setup.processes.max(self.setup.signals.received or 0)
            if number:
                raise StoppedError(number)

    def stop(self) -> None:
        """End the run after the current step, as after its last; for callbacks."""
        self._stopped = True

    @property
    def finished(self) -> bool:
        """Whether no step remains."""
        return self.state.step >= self.setup.steps or self.out_of_patience or self._stopped

    @property
    def out_of_patience(self) -> bool:
        """Whether validation loss has not improved for `patience` evaluations."""
        return 0 < self.setup.run.train.patience <= self.state.evals_since_best

    @property
    def is_best(self) -> bool:
        """Whether the last step has the best validation loss."""
        return self.state.best is not None and self.state.best[0] == self.state.step

    def _is_due(self, every: int) -> bool:
        step, interval = self.state.step, self.setup.run.train.interval(every, self.state.initial_steps)
        return step % interval == 0 or step == self.setup.steps

    def _stream(self) -> Generator[Batch]:
        """Yield the batches from the next one on, except those to skip; again from there after a rollback."""
        state = self.state
        while True:  # once, and again after each rollback
            prefetched = self._prefetched(state.next_batch)
            try:
                for number, batch in enumerate(prefetched, state.next_batch):
                    if number in state.skipped:
                        continue
                    state.next_batch = number
                    yield batch
                    if state.next_batch != number + 1:
                        break
            finally:
                prefetched.close()

    def _prefetched(self, start: int) -> Generator[Batch]:
        if isinstance(stream := self.setup.batches.samples, StreamDataset):
            stream.seek(start * self.setup.batches.batch_size, self.state.stream)
        if workers := self.setup.run.train.workers:
            return self.setup.batches.iterate(start, workers=workers)
        return (self.setup.batches.at(number) for number in itertools.count(start))

    def launch_step(self, batch: Batch) -> None:
        """Start the update by one batch, then read the metrics of the step before.

        A GPU so has work while the host reads, writes and prepares the next batch.
        """
        setup, state = self.setup, self.state
        set_lr(setup.train_step.optimizer, setup.schedule.factor(state.step, setup.steps))
        setup.processes.seed_step(setup.run.train.seed, state.step)
        try:
            future = self.recovery.launch(batch)
        except NonFiniteError as error:
            self._skip(error, state.step + 1, state.next_batch, batch)
            return
        if setup.ema is not None:
            setup.ema.update()
        launched = Launched(
            future, batch, state.step + 1, state.next_batch, setup.train_step.optimizer.param_groups[0]["lr"]
        )
        state.step, state.next_batch = state.step + 1, state.next_batch + 1
        if self._launched is None or self._finish(self._launched):
            self._launched = launched

    def finish_step(self) -> bool:
        """Wait for the last step; return False if it was skipped, for its loss is NaN or infinite."""
        launched, self._launched = self._launched, None
        return launched is not None and self._finish(launched)

    def _may_run_ahead(self) -> bool:
        choice = self.setup.run.train
        due = self._is_due(choice.eval_every) or self._is_due(choice.save_every)
        return self.setup.train_step.runs_ahead and not due and not self._stopped

    def _finish(self, launched: Launched) -> bool:
        """Report a step and write its metrics, unless it is the last one, which may be validated first."""
        setup = self.setup
        try:
            outcome = launched.future.result()
        except NonFiniteError as error:
            self._skip(error, launched.step, launched.number, launched.batch)
            return False
        shares = setup.processes.data_size  # taken to be like this one
        setup.throughput.add(
            shares * launched.batch.n_tokens, shares * self.flops(launched.batch.ids, launched.batch.source)
        )
        self.reporter.on_step_end(launched.step, setup.steps, outcome, setup.throughput)
        metrics = self._metrics(launched, outcome)
        for callback in self.callbacks:
            callback.on_step_end(self, launched.step, metrics)
        if launched.step == self.state.step:
            self.state.pending_metrics = metrics
        else:
            self._write(launched.step, metrics)
        return True

    def _skip(self, error: NonFiniteError, step: int, number: int, batch: Batch) -> None:
        """Stop, or roll back and skip a batch whose loss is NaN or infinite; a step launched after it is void."""
        self._launched = None
        self.state.step, self.state.next_batch = step - 1, number
        self.recovery.handle_nonfinite(error, step, number, batch)

    def _metrics(self, launched: Launched, outcome: StepMetrics) -> JsonDict:
        batches = self.setup.batches
        straggler, throughput = self.stragglers.rank, self.setup.throughput
        on_gpu = self.setup.device.type == "cuda"  # elsewhere it is that of the whole process
        return _as_json(
            {
                "epoch": batches.epochs(launched.number + 1),
                "loss": outcome.loss,
                "lr": launched.lr,
                "grad_norm": outcome.grad_norm,
                "n_targets": outcome.n_targets,
                "tokens_per_second": round(throughput.tokens_per_second, 1),
                **({"peak_memory": throughput.peak_memory} if on_gpu else {}),
                **({} if straggler is None else {"straggler": straggler}),
            }
        )

    def validate(self) -> None:
        """Evaluate on the validation set, or the start of it, and update the best step."""
        setup, state = self.setup, self.state
        found = self.recovery.retry(lambda: validate(setup, self.token_bytes))
        self.reporter.on_validation_end(state.step, found)
        for callback in self.callbacks:
            callback.on_validation_end(self, state.step, found)
        setup.throughput.exclude_elapsed()
        loss = found["loss"]
        if math.isfinite(loss) and (state.best is None or loss < state.best[1]):
            state.best, state.evals_since_best = (state.step, loss), 0
        else:
            state.evals_since_best += 1
        validated = _as_json({f"validation_{name}": value for name, value in found.items()})
        state.pending_metrics = {**(state.pending_metrics or {}), **validated}

    def write_metrics(self) -> None:
        """Write the metrics of the last step to metrics.jsonl and the trackers."""
        values, self.state.pending_metrics = self.state.pending_metrics or {}, None
        self._write(self.state.step, values)

    def _write(self, step: int, values: JsonDict) -> None:
        with self.setup.checkpointer.report_write_errors():
            self.setup.metrics.write(step, **values)
        self.trackers.write(step, values)

    def save_checkpoint(self) -> None:
        """Write probes and samples, then save; a run resumed from there does not repeat them."""
        self._log_checkpoint()
        self._save()
        for callback in self.callbacks:
            callback.on_checkpoint(self, self.state.step)
        self.setup.throughput.exclude_elapsed()
        self.stragglers.exclude_next()

    def _log_checkpoint(self) -> None:
        self.reporter.stage("probing and sampling", 0, 0)
        if (model := self.setup.plain_model()) is not None:
            with self.setup.checkpointer.report_write_errors():
                self.setup.checkpoint_log.write(self.state.step, model)
        self.setup.throughput.exclude_elapsed()

    def _save_unfinished_step(self) -> None:
        """Save after a signal, without probes and samples: a resumed run has the lines of an uninterrupted one."""
        if self._launched is not None and not self.finish_step():
            return  # rolled back to a checkpoint
        if (pending := self.state.pending_metrics) is not None:
            self.write_metrics()
            self.state.pending_metrics = pending  # its validation was interrupted, and is repeated
        self._save()

    def _save(self) -> None:
        if isinstance(stream := self.setup.batches.samples, StreamDataset):
            self.state.stream = stream.state_at(self.state.next_batch * self.setup.batches.batch_size)
        self.setup.checkpointer.save()


def _as_json(values: Mapping[str, float]) -> JsonDict:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def validate(setup: Setup, token_bytes: Tensor | None) -> dict[str, float]:
    """Return the metrics over the samples of one validation."""
    with nullcontext() if setup.ema is None else setup.ema.applied():
        return shared_sums(setup, setup.eval_samples, token_bytes).metrics()


def shared_sums(setup: Setup, count: int, token_bytes: Tensor | None) -> MetricSums:
    """Return the sums over the first `count` validation samples; each process evaluates its share of them."""
    processes, done = setup.processes, 0

    def on_batch() -> None:
        nonlocal done
        if not processes.is_parallel:  # several stop together, between steps
            setup.signals.check()
        setup.reporter.stage("validating", done, count)
        done += processes.data_size * setup.micro_batch_size

    sums = evaluate_samples(
        setup.model,
        Share(setup.val_samples, count, rank=processes.data_rank, world_size=processes.data_size),
        setup.micro_batch_size,
        token_bytes=token_bytes,
        autocast_dtype=setup.train_step.precision,
        evaluate_batch=setup.objective.evaluate_batch,
        on_batch=on_batch,
    )
    reshard(setup.model)
    return sums.reduced(processes.sum)
