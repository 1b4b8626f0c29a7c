"""The training loop: batches by index, one update each, validation, checkpoints and resuming."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from glasshouse import hub
from glasshouse.config import JsonDict
from glasshouse.data import Batch, Batches, Corpus, Dataset
from glasshouse.errors import ConfigError, GlasshouseError, InputError
from glasshouse.evaluation import Report, evaluate
from glasshouse.evaluation.eval_loop import evaluate_samples
from glasshouse.hub.run_checkpoints import CHECKPOINTS, MODEL
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.models.flops import FlopEstimator
from glasshouse.models.length import check_length
from glasshouse.objectives import find_objective, make_dataset
from glasshouse.text import Tokenizer
from glasshouse.training import model_setup, nonfinite, plots, run_summary
from glasshouse.training.checkpoint import Checkpoints
from glasshouse.training.checkpoint_log import CheckpointLog
from glasshouse.training.checkpointer import Checkpointer, TrainerState
from glasshouse.training.compiling import Compiled
from glasshouse.training.datasets import Datasets, prepare_datasets, units_of, with_kind
from glasshouse.training.display import Display
from glasshouse.training.ema import EMA
from glasshouse.training.folder import ADAPTER, METRICS, NONFINITE, lock_run
from glasshouse.training.journal import Journal
from glasshouse.training.memory import estimate_grad_accum, is_out_of_memory
from glasshouse.training.optimizer import make_optimizer, set_lr
from glasshouse.training.progress import ProgressReporter, SilentReporter
from glasshouse.training.run import Run
from glasshouse.training.signals import Signals, StoppedError
from glasshouse.training.state import CheckpointData, device_rng_state, load_device_rng_state
from glasshouse.training.step import NonFiniteError, StepMetrics, TrainStep
from glasshouse.training.throughput import Throughput
from glasshouse.training.trackers import Trackers

MOST_SKIPPED = 10  # batches with a NaN or infinite loss before the run stops
ANSWERS = 200  # generated for the final report on pairs and conversations; generation is slow


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    folder: Path
    model: Model  # in eval mode, as saved in `folder / "model"`
    datasets: Datasets
    steps: int
    report: Report  # on the whole validation set
    saved_step: int  # step of the saved model: the last, or with patience the best
    val_coverage: tuple[int, int]  # samples of an evaluation during training, and of the whole validation set


def train(run: Run | str | Path, progress: ProgressReporter | bool = True) -> Result:
    """Train a model, or resume its training, and save it to the run folder.

    The run may be the name of a recipe or the path of a TOML file. Progress is shown on stderr, or passed to your own
    `ProgressReporter`; `progress=False` shows nothing. Ctrl-C, SIGTERM and SIGHUP save and raise `StoppedError`.

    >>> import tempfile, glasshouse as gh
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/a.txt").write_text("to be or not to be, that is the question. " * 50)
    >>> table = {
    ...     "model": {"preset": "tiny-decoder"},
    ...     "data": {"path": f"{folder}/a.txt", "seq_len": 16, "vocab_size": 270},
    ...     "train": {"steps": 3, "batch_tokens": 64, "out": f"{folder}/run"},
    ... }
    >>> result = train(Run.from_dict(table), progress=False)
    >>> {"checkpoints", "metrics.jsonl", "model", "samples.jsonl"} <= {path.name for path in result.folder.iterdir()}
    True
    """
    if isinstance(run, str | Path):
        run = Run.load(run)
    if not isinstance(run, Run):
        raise InputError(
            f"run is {run!r}, but it must be a Run, the name of a recipe or the path of a TOML file; see gh.Run.load."
        )
    if isinstance(progress, bool):
        with Display(units_of(run.data)).open() if progress else nullcontext(SilentReporter()) as shown:
            return train(run, shown)
    model_setup.find_device(run.train.device)  # fail before the data are prepared
    with lock_run(run) as folder:
        for note in run.notes:
            progress.log(note)
        return _train(run, folder, progress)


def _train(run: Run, folder: Path, reporter: ProgressReporter) -> Result:
    for line in run_summary.opening(folder, run.data):
        reporter.log(line)
    if "from" in run.model:
        reporter.stage("loading the model to start from", 0, 0)
    base = model_setup.load_base(run.model, run.data)
    choice = with_kind(run.data, model_setup.data_kind(run.model, base[0] if base else None))
    datasets = prepare_datasets(choice, folder, base[1] if base else None, reporter.stage)
    with Signals() as signals:
        reporter.stage("building the model", 0, 0)
        trainer = Trainer(run, folder, datasets, base, reporter, signals)
        try:
            for line in run_summary.describe(trainer):
                reporter.log(line)
            trainer.resume()
            trainer.fit()
            return trainer.finish()
        except StoppedError as stopped:
            raise StoppedError(stopped.number, trainer.state.step) from None
        finally:
            trainer.close()


class Trainer:
    """The state and the loop of one run."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        datasets: Datasets,
        base: tuple[Model, Tokenizer] | None,
        reporter: ProgressReporter,
        signals: Signals,
    ) -> None:
        choice = run.train
        self.run, self.folder, self.datasets, self.reporter, self.signals = run, folder, datasets, reporter, signals
        self.device = model_setup.find_device(choice.device)
        self.autocast_dtype = model_setup.resolve_precision(choice.precision, self.device)
        torch.manual_seed(choice.seed)
        length = run.data.seq_len
        if base is None and choice.lora is not None:
            raise ConfigError("train.lora needs a pretrained model; give one by model.from.")
        self.resized = False  # whether the head or the vocabulary was replaced
        if base is None:
            s = model_setup.make_spec(run.model, datasets.tok, datasets.train, length)
            self.model = model_setup.make_model(s, datasets.tok, self.device)
        else:
            self.model = model_setup.resize_for_data(*base, datasets.tok, datasets.train).to(self.device)
            self.resized = self.model is not base[0]
        check_length(self.model.spec, length, "data.seq_len")
        model_setup.prepare_for_training(self.model, choice)

        self.objective = find_objective(self.model.spec, datasets.train)
        batch_size = self.objective.samples_for_tokens(datasets.train, choice.batch_tokens, length)
        self.samples = self._make_dataset(datasets.train, batch_size)
        try:
            self.val_samples = self._make_dataset(datasets.validation, 1)
        except InputError as error:
            if datasets.validation.folder != datasets.train.folder:
                raise
            raise InputError(f"the validation set is too small, so raise data.val_fraction: {error}") from None
        self.token_bytes = self.objective.token_bytes(datasets.tok)
        self.batches = Batches(self.samples, batch_size)
        self.steps, self.schedule = choice.planned(len(self.samples), batch_size)
        optimizer = make_optimizer(self.model, choice.chosen_optimizer())
        self.step_fn = TrainStep(
            self.model,
            optimizer,
            grad_clip=choice.grad_clip or None,
            loss_fn=self.objective.loss,
            label_smoothing=choice.label_smoothing,
            autocast_dtype=self.autocast_dtype,
            on_micro_batch=signals.check,
        )
        self.compiled = Compiled(self.model, choice.compile, self.device, reporter.log)
        self.step_fn.model = self.compiled.model
        self.ema = EMA(self.model, choice.ema) if choice.ema else None
        checkpoints = Checkpoints(folder / CHECKPOINTS, choice.keep_checkpoints, choice.keep_snapshots)
        self.checkpointer = Checkpointer(self.model, self.step_fn, self.ema, datasets.tok, checkpoints)
        grad_accum = choice.grad_accum or estimate_grad_accum(self.model.spec, batch_size, length, self.device)
        self.state = TrainerState(grad_accum=grad_accum, initial_steps=self.steps)
        self.journal = Journal(folder / METRICS)
        self.checkpoint_log = CheckpointLog(
            run, folder, self.model, self.val_samples, datasets.tok, self.autocast_dtype, reporter.log
        )
        self.throughput, self.flops = Throughput(self.device, self.autocast_dtype), FlopEstimator(self.model)
        self.trackers: Trackers | None = None

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass."""
        return -(-self.batches.batch_size // self.state.grad_accum)

    @property
    def out_of_patience(self) -> bool:
        """Whether validation loss has not improved for `patience` evaluations."""
        return 0 < self.run.train.patience <= self.state.evals_since_best

    @property
    def eval_samples(self) -> int:
        """Validation samples per evaluation during training."""
        limit = self.run.train.eval_samples or self.batches.batch_size * max(4, self.state.initial_steps // 100)
        return min(limit, len(self.val_samples))

    def _make_dataset(self, corpus: Corpus, batch_size: int) -> Dataset:
        return make_dataset(
            self.model.spec, corpus, batch_size=batch_size, seq_len=self.run.data.seq_len, seed=self.run.train.seed
        )

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one."""
        if found := self.checkpointer.checkpoints.newest():
            step, state, errors = found
            for error in errors:
                self.reporter.log(f"skipped a damaged checkpoint: {error}")
            self._restore(step, state)
            folder = self.checkpointer.checkpoints.folder(step)
            self.reporter.log(f"resuming from step {step} of {self.steps}, from {folder}")
            if (self.folder / MODEL).exists() and step < self.steps:
                self.reporter.log(f"{self.folder / MODEL} is not replaced until the last step")
        self._truncate(self.state.unwritten)

    def _truncate(self, step: int) -> None:
        self.journal.truncate(step)
        self.checkpoint_log.truncate(step)
        self.checkpointer.checkpoints.snapshots.truncate(step)

    def _restore(self, step: int, state: CheckpointData) -> None:
        self.state = self.checkpointer.restore(step, state)
        grad_accum = self.run.train.grad_accum or self.state.grad_accum
        self.state = replace(self.state, grad_accum=grad_accum, initial_steps=self.state.initial_steps or self.steps)

    # Training

    def fit(self) -> None:
        """Run the remaining steps."""
        choice = self.run.train
        self.model.train()
        self.trackers = Trackers(self.folder, choice.wandb, self.folder.name, start=self.state.unwritten)
        if self.state.step == 0:
            # A run that was killed before its first checkpoint has left lines.
            self.checkpointer.report_write_errors(lambda: self._truncate(0))
            self._log_checkpoint()
            self.checkpointer.save_initial()
        self.reporter.stage("compiling for the first step" if self.compiled.on else "first step", 0, 0)
        batches = self._stream()
        try:
            while self.state.pending_metrics is not None or (
                self.state.step < self.steps and not self.out_of_patience
            ):
                if self.state.pending_metrics is None:  # else validation of the last step was interrupted
                    self.checkpointer.report_write_errors(self.checkpointer.checkpoints.check)
                    self.signals.check()
                    outcome = self._train_step(next(batches))
                    if outcome is None:  # the batch was skipped
                        batches.close()
                        batches = self._stream()
                        continue
                    self.state = replace(self.state, pending_metrics=self._step_metrics(outcome))
                self._end_step()
            if self.out_of_patience:
                self.reporter.log(
                    f"early stopping: no better validation loss in {self.state.evals_since_best} evaluations"
                )
        except StoppedError:  # no probes or samples: the resumed run writes the lines of an uninterrupted one
            if self.state.pending_metrics is not None:
                self._write_metrics(self.state.pending_metrics)
            self.checkpointer.save(self.state)
            raise
        finally:
            batches.close()
            self.checkpointer.report_write_errors(self.checkpointer.checkpoints.wait)

    def _stream(self) -> Generator[Batch]:
        """Yield the batches from the next one on, except those to skip."""
        batches = self._prefetched()
        try:
            for number, batch in enumerate(batches, self.state.next_batch):
                if number not in self.state.skipped:
                    self.state = replace(self.state, next_batch=number)
                    yield batch
        finally:
            batches.close()

    def _prefetched(self) -> Generator[Batch]:
        if self.run.train.workers:
            return self.batches.iterate(self.state.next_batch, workers=self.run.train.workers)
        return (self.batches.at(number) for number in itertools.count(self.state.next_batch))

    def _train_step(self, batch: Batch) -> StepMetrics | None:
        """Run one step, with more gradient accumulation when out of memory; return None if the batch is skipped."""
        set_lr(self.step_fn.optimizer, self.schedule.factor(self.state.step, self.steps))
        rng = device_rng_state(self.device)
        while True:
            try:
                outcome = self.compiled.run_or_fall_back(
                    lambda: self.step_fn(batch, self.state.grad_accum), self.step_fn
                )
                break
            except StoppedError:
                load_device_rng_state(rng, self.device)  # no update, so no random numbers used
                raise
            except NonFiniteError as error:
                load_device_rng_state(rng, self.device)
                self._handle_nonfinite(error, batch)
                return None
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            load_device_rng_state(rng, self.device)
            self._raise_grad_accum(len(batch))
        if self.ema is not None:
            self.ema.update()
        self.state = replace(self.state, step=self.state.step + 1, next_batch=self.state.next_batch + 1)
        self.throughput.add(batch.n_tokens, self.flops(batch.ids, batch.source))
        self.reporter.on_step_end(self.state.step, self.steps, outcome, self.throughput)
        return outcome

    def _raise_grad_accum(self, batch_size: int) -> None:
        if self.state.grad_accum >= batch_size:
            raise InputError(
                f"out of memory with one sequence of {self.run.data.seq_len} tokens; choose a smaller model or a "
                "smaller data.seq_len, or try train.activation_checkpointing=true."
            )
        self.step_fn.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.state = replace(self.state, grad_accum=min(batch_size, self.state.grad_accum * 2))
        self.reporter.log(
            f"out of memory: gradient accumulation raised to {self.state.grad_accum} micro-batches of "
            f"{self.micro_batch_size} sequences"
        )

    def _handle_nonfinite(self, error: NonFiniteError, batch: Batch) -> None:
        """Write nonfinite.json; then stop, or roll back to the last checkpoint and skip the batch."""
        step, number = self.state.step, self.state.next_batch
        batch, smoothing = batch.to(self.device), self.run.train.label_smoothing
        where = nonfinite.locate_in_micro_batches(
            self.model, batch, self.state.grad_accum, smoothing, self.autocast_dtype, self.objective.loss
        )
        origins = [self.samples.origin(sample) for sample in self.batches.sample_indices(number)]
        found = {"step": step + 1, "batch": number, "error": str(error), "location": where, "sources": origins}
        (self.folder / NONFINITE).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sentence = f"at step {step + 1}, batch {number}, {error} First NaN or infinity: {where}."
        skipped = (*self.state.skipped, number)
        if self.run.train.on_nonfinite == "stop" or len(skipped) > MOST_SKIPPED:
            advice = (
                "" if self.run.train.on_nonfinite == "skip" else ", or train.on_nonfinite=skip to skip such batches"
            )
            raise GlasshouseError(
                f"{sentence} No weight was updated. See {str(self.folder / NONFINITE)!r}; try a lower "
                f"train.lr{advice}."
            )
        self.reporter.log(f"{sentence} The batch is skipped.")
        self.step_fn.optimizer.zero_grad(set_to_none=True)
        self.checkpointer.report_write_errors(self.checkpointer.checkpoints.wait)
        if newest := self.checkpointer.checkpoints.newest():
            self._restore(newest[0], newest[1])
            self._truncate(self.state.unwritten)
            self.reporter.log(f"rolled back to step {newest[0]}")
        self.state = replace(self.state, skipped=skipped)

    def _step_metrics(self, outcome: StepMetrics) -> JsonDict:
        lr = self.step_fn.optimizer.param_groups[0]["lr"]
        epoch = self.state.next_batch * self.batches.batch_size / len(self.samples)
        values = {"epoch": epoch, "loss": outcome.loss, "lr": lr, "grad_norm": outcome.grad_norm}
        values |= {"n_targets": outcome.n_targets, "tokens_per_second": round(self.throughput.tokens_per_second, 1)}
        return _as_json(values)

    def _end_step(self) -> None:
        """Validate, log and save a checkpoint, where due."""
        choice, step, metrics = self.run.train, self.state.step, self.state.pending_metrics or {}
        last = step == self.steps
        if step % choice.interval(choice.eval_every, self.state.initial_steps) == 0 or last:
            found = self._validate()
            metrics = metrics | _as_json({f"validation_{name}": value for name, value in found.items()})
        self.state = replace(self.state, pending_metrics=None)
        self._write_metrics(metrics)
        is_best = self.state.best is not None and self.state.best[0] == step
        if (
            step % choice.interval(choice.save_every, self.state.initial_steps) == 0
            or last
            or is_best
            or self.out_of_patience
        ):
            self._log_checkpoint()  # before saving: a run resumed from there does not repeat it
            self.checkpointer.save(self.state)
            self.throughput.exclude_elapsed()

    def _write_metrics(self, values: JsonDict) -> None:
        self.checkpointer.report_write_errors(lambda: self.journal.write(self.state.step, **values))
        if self.trackers is not None:
            self.trackers.write(self.state.step, values)

    # Validation

    def _validate(self) -> dict[str, float]:
        """Evaluate on the validation set, or the start of it, and update the best step."""
        done = 0

        def on_batch() -> None:
            nonlocal done
            self.signals.check()
            self.reporter.stage("validating", done, self.eval_samples)
            done += self.micro_batch_size

        try:
            with self._with_ema():
                metrics = evaluate_samples(
                    self.model,
                    self.val_samples,
                    self.micro_batch_size,
                    limit=self.eval_samples,
                    token_bytes=self.token_bytes,
                    autocast_dtype=self.autocast_dtype,
                    evaluate_batch=self.objective.evaluate_batch,
                    on_batch=on_batch,
                ).metrics()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._raise_grad_accum(self.batches.batch_size)
            return self._validate()
        self.reporter.on_validation_end(self.state.step, metrics)
        self.throughput.exclude_elapsed()
        loss = metrics["loss"]
        if math.isfinite(loss) and (self.state.best is None or loss < self.state.best[1]):
            self.state = replace(self.state, best=(self.state.step, loss), evals_since_best=0)
        else:
            self.state = replace(self.state, evals_since_best=self.state.evals_since_best + 1)
        return metrics

    def _log_checkpoint(self) -> None:
        self.reporter.stage("probing and sampling", 0, 0)
        self.checkpointer.report_write_errors(lambda: self.checkpoint_log.write(self.state.step, self.model))
        self.throughput.exclude_elapsed()

    def _with_ema(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ema is None else self.ema.applied()

    def finish(self) -> Result:
        """Save the final model (the best if patience is set, else the last; its EMA if set) and evaluate it."""
        self.reporter.stage("saving the model", 0, 0)
        best, checkpointer, saved_step = self.state.best, self.checkpointer, self.state.step
        is_last = not self.run.train.patience or best is None or best[0] not in checkpointer.checkpoints.steps()
        if best is not None and not is_last:
            saved_step = best[0]
            checkpointer.load_weights(saved_step)
        with self._with_ema() if is_last else nullcontext():
            model = checkpointer.save_model(self.folder / MODEL)
            if self.run.train.lora is not None:
                self._save_adapter(self.run.train.lora)
        self.reporter.stage("drawing plots", 0, 0)
        checkpointer.report_write_errors(lambda: plots.draw(self.journal, self.folder))
        model = model.to(self.device).eval()

        def progress(stage: str, done: int, total: int) -> None:
            self.signals.check()
            self.reporter.stage(stage, done, total)

        corpus, length = self.datasets.validation, self.run.data.seq_len
        report = evaluate(
            model,
            self.datasets.tok,
            corpus,
            seq_len=length,
            batch_size=self.micro_batch_size,
            generate=ANSWERS,
            progress=progress,
        )
        coverage = self.eval_samples, len(self.val_samples)
        return Result(self.folder, model, self.datasets, self.state.step, report, saved_step, coverage)

    def _save_adapter(self, choice: lora.LoRA) -> None:
        """Save the LoRA weights alone, in PEFT's format."""
        base = str(self.run.model.get("from", ""))
        if self.resized:
            self.reporter.log("no adapter files: the head or the vocabulary differs from the base model's")
            return
        try:
            self.checkpointer.report_write_errors(
                lambda: hub.save_adapter(self.model, choice, self.folder / ADAPTER, base)
            )
        except ConfigError as error:
            self.reporter.log(f"no adapter files: {error}")

    def close(self) -> None:
        """Close the trackers."""
        if self.trackers is not None:
            self.trackers.close()


def _as_json(values: Mapping[str, float]) -> JsonDict:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
