"""The loop: batches by their number, one update each, evaluations, checkpoints; it goes on where it was stopped."""

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
from glasshouse.data import Batch, Batches, CausalLMDataset, Corpus, Dataset
from glasshouse.data.dataset import make_dataset, samples_for_tokens
from glasshouse.errors import ConfigError, GlasshouseError, InputError
from glasshouse.evaluation.eval_loop import evaluate_samples, token_bytes
from glasshouse.evaluation.evaluate import Report, evaluate
from glasshouse.generation.validation import check_length
from glasshouse.hub.run_folder import CHECKPOINTS, MODEL
from glasshouse.layers import lora
from glasshouse.models import Model
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
from glasshouse.training.throughput import FlopEstimator, Throughput
from glasshouse.training.trackers import Trackers

MOST_SKIPPED = 10  # batches; more than that is not bad luck
ANSWERS = 200  # that the closing report has the model write, of pairs and conversations; to write takes long


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    model: Model  # in eval mode, as it was saved in `folder / "model"`
    datasets: Datasets
    steps: int
    report: Report  # on all that was held out
    saved_step: int  # the step whose model was saved: the last, or with patience the best
    val_coverage: tuple[
        int, int
    ]  # how many held-out samples each evaluation while training read, and how many there are


def train(run: Run | str | Path, progress: ProgressReporter | bool = True) -> Result:
    """Train a model as a run says, or go on with it where it was stopped, and write it to the run's folder.

    The run may be the name of a recipe or the path of a TOML file. Its progress is shown on stderr, or told to a
    `watch` of one's own; `watch=False` shows nothing. Ctrl-C, SIGTERM and SIGHUP save and raise `StoppedError`.

    >>> import tempfile, glasshouse as gh
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/a.txt").write_text("to be or not to be, that is the question. " * 50)
    >>> table = {
    ...     "model": {"preset": "tiny-decoder"},
    ...     "data": {"path": f"{place}/a.txt", "seq_len": 16, "vocab_size": 270},
    ...     "train": {"steps": 3, "batch_tokens": 64, "out": f"{place}/run"},
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
    model_setup.find_device(run.train.device)  # what is not there is said before hours are spent on reading
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
    choice = with_kind(run.data, model_setup.wanted_kind(run.model, base[0] if base else None))
    material = prepare_datasets(choice, folder, base[1] if base else None, reporter.stage)
    with Signals() as signals:
        reporter.stage("building the model", 0, 0)
        trainer = Trainer(run, folder, material, base, reporter, signals)
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
    """A run while it lasts."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        material: Datasets,
        base: tuple[Model, Tokenizer] | None,
        reporter: ProgressReporter,
        signals: Signals,
    ) -> None:
        choice = run.train
        self.run, self.folder, self.datasets, self.reporter, self.signals = run, folder, material, reporter, signals
        self.device = model_setup.find_device(choice.device)
        self.autocast_dtype = model_setup.resolve_precision(choice.precision, self.device)
        torch.manual_seed(choice.seed)
        length = run.data.seq_len
        if base is None and choice.lora is not None:
            raise ConfigError("train.lora adapts a model that was trained before; name one by model.from.")
        self.resized = False  # whether it got another head or vocabulary
        if base is None:
            s = model_setup.make_spec(run.model, material.tok, material.train, length)
            self.model = model_setup.make_model(s, material.tok, self.device)
        else:
            self.model = model_setup.resize_for_data(*base, material.tok, material.train).to(self.device)
            self.resized = self.model is not base[0]
        check_length(self.model.spec, length, "data.seq_len")
        model_setup.prepare_for_training(self.model, choice)

        rows = samples_for_tokens(material.train, choice.batch_tokens, length)
        self.samples = self._make_dataset(material.train, rows)
        try:
            self.val_samples = self._make_dataset(material.validation, 1)
        except InputError as error:
            if material.validation.folder != material.train.folder:
                raise
            raise InputError(f"too little is held out, so raise data.val_fraction: {error}") from None
        spelled = isinstance(self.samples, CausalLMDataset) and material.tok.byte_level
        self.token_bytes = token_bytes(material.tok) if spelled else None
        self.batches = Batches(self.samples, rows)
        self.steps, self.schedule = choice.planned(len(self.samples), rows)
        optimizer = make_optimizer(self.model, choice.chosen_optimizer())
        self.step_fn = TrainStep(
            self.model,
            optimizer,
            grad_clip=choice.grad_clip or None,
            label_smoothing=choice.label_smoothing,
            autocast_dtype=self.autocast_dtype,
            on_micro_batch=signals.check,
        )
        self.compiled = Compiled(self.model, choice.compile, self.device, reporter.log)
        self.step_fn.model = self.compiled.model
        self.ema = EMA(self.model, choice.ema) if choice.ema else None
        checkpoints = Checkpoints(folder / CHECKPOINTS, choice.keep_checkpoints, choice.keep_snapshots)
        self.checkpointer = Checkpointer(self.model, self.step_fn, self.ema, material.tok, checkpoints)
        parts = choice.grad_accum or estimate_grad_accum(self.model.spec, rows, length, self.device)
        self.state = TrainerState(grad_accum=parts, initial_steps=self.steps)
        self.journal = Journal(folder / METRICS)
        self.checkpoint_log = CheckpointLog(
            run, folder, self.model, self.val_samples, material.tok, self.autocast_dtype, reporter.log
        )
        self.throughput, self.flops = Throughput(self.device, self.autocast_dtype), FlopEstimator(self.model)
        self.trackers: Trackers | None = None

    @property
    def micro_batch_size(self) -> int:
        """How many rows are computed at once."""
        return -(-self.batches.batch_size // self.state.grad_accum)

    @property
    def out_of_patience(self) -> bool:
        """Whether the model has not got better for as long as patience goes."""
        return 0 < self.run.train.patience <= self.state.evals_since_best

    @property
    def eval_samples(self) -> int:
        """How many samples of what is held out an evaluation reads while training."""
        most = self.run.train.eval_samples or self.batches.batch_size * max(4, self.state.initial_steps // 100)
        return min(most, len(self.val_samples))

    def _make_dataset(self, corpus: Corpus, rows: int) -> Dataset:
        return make_dataset(
            self.model.spec, corpus, batch_size=rows, seq_len=self.run.data.seq_len, seed=self.run.train.seed
        )

    def resume(self) -> None:
        """Take up the newest intact checkpoint, if there is one."""
        if found := self.checkpointer.checkpoints.newest():
            step, state, wrong = found
            for sentence in wrong:
                self.reporter.log(f"passed over: {sentence}")
            self._restore(step, state)
            folder = self.checkpointer.checkpoints.folder(step)
            self.reporter.log(f"goes on after step {step} of {self.steps}, from {folder}")
            if (self.folder / MODEL).exists() and step < self.steps:
                self.reporter.log(f"{self.folder / MODEL} stays as it is until the last step is taken")
        self._truncate(self.state.unwritten)

    def _truncate(self, step: int) -> None:
        self.journal.truncate(step)
        self.checkpoint_log.truncate(step)
        self.checkpointer.checkpoints.history.truncate(step)

    def _restore(self, step: int, state: CheckpointData) -> None:
        self.state = self.checkpointer.restore(step, state)
        grad_accum, initial_steps = (
            self.run.train.grad_accum or self.state.grad_accum,
            self.state.initial_steps or self.steps,
        )
        self.state = replace(self.state, grad_accum=grad_accum, initial_steps=initial_steps)

    # Learning

    def fit(self) -> None:
        """Take the steps that are left."""
        choice = self.run.train
        self.model.train()
        self.trackers = Trackers(self.folder, choice.wandb, self.folder.name, start=self.state.unwritten)
        if self.state.step == 0:
            self.checkpointer.report_write_errors(
                lambda: self._truncate(0)
            )  # if killed before its first checkpoint, it has a line
            self._log_checkpoint()
            self.checkpointer.begin()
        self.reporter.stage("compiling for the first step" if self.compiled.on else "first step", 0, 0)
        batches = self._stream()
        try:
            while self.state.pending_metrics is not None or (
                self.state.step < self.steps and not self.out_of_patience
            ):
                if self.state.pending_metrics is None:  # else the evaluation of the last step was cut off
                    self.checkpointer.report_write_errors(self.checkpointer.checkpoints.check)
                    self.signals.check()
                    outcome = self._train_step(next(batches))
                    if outcome is None:  # the batch was passed over
                        batches.close()
                        batches = self._stream()
                        continue
                    self.state = replace(self.state, pending_metrics=self._line(outcome))
                self._end_step()
            if self.out_of_patience:
                self.reporter.log(f"stops early: no better loss in {self.state.evals_since_best} evaluations")
        except StoppedError:  # no look inside: when it goes on, its lines are those of a run never stopped
            if self.state.pending_metrics is not None:
                self._write_metrics(self.state.pending_metrics)
            self.checkpointer.save(self.state)
            raise
        finally:
            batches.close()
            self.checkpointer.report_write_errors(self.checkpointer.checkpoints.wait)

    def _stream(self) -> Generator[Batch]:
        """Yield the batches from the next one on, but for those that are passed over."""
        ahead = self._ahead()
        try:
            for number, batch in enumerate(ahead, self.state.next_batch):
                if number not in self.state.skipped:
                    self.state = replace(self.state, next_batch=number)
                    yield batch
        finally:
            ahead.close()

    def _ahead(self) -> Generator[Batch]:
        if self.run.train.workers:
            return self.batches.iterate(self.state.next_batch, workers=self.run.train.workers)
        return (self.batches.at(number) for number in itertools.count(self.state.next_batch))

    def _train_step(self, batch: Batch) -> StepMetrics | None:
        """Take one step, in as many parts as the memory asks for; return None if the batch is to be passed over."""
        set_lr(self.step_fn.optimizer, self.schedule.factor(self.state.step, self.steps))
        chance = device_rng_state(self.device)
        while True:
            try:
                outcome = self.compiled.run_or_fall_back(
                    lambda: self.step_fn(batch, self.state.grad_accum), self.step_fn
                )
                break
            except StoppedError:
                load_device_rng_state(chance, self.device)  # nothing was learned, so nothing was drawn
                raise
            except NonFiniteError as error:
                load_device_rng_state(chance, self.device)
                self._handle_nonfinite(error, batch)
                return None
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            load_device_rng_state(chance, self.device)
            self._raise_grad_accum(len(batch))
        if self.ema is not None:
            self.ema.update()
        self.state = replace(self.state, step=self.state.step + 1, next_batch=self.state.next_batch + 1)
        self.throughput.add(batch.n_tokens, self.flops(batch))
        self.reporter.on_step_end(self.state.step, self.steps, outcome, self.throughput)
        return outcome

    def _raise_grad_accum(self, rows: int) -> None:
        if self.state.grad_accum >= rows:
            raise InputError(
                f"the memory is too small for one row of {self.run.data.seq_len} tokens; choose a smaller model or a "
                "smaller data.seq_len, or try train.activation_checkpointing=true."
            )
        self.step_fn.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.state = replace(self.state, grad_accum=min(rows, self.state.grad_accum * 2))
        self.reporter.log(
            f"out of memory: a step is now computed in {self.state.grad_accum} parts of {self.micro_batch_size} rows"
        )

    def _handle_nonfinite(self, error: NonFiniteError, batch: Batch) -> None:
        """Write down where a number stopped being one; then stop, or go back and pass the batch over."""
        step, number = self.state.step, self.state.next_batch
        batch, smoothing = batch.to(self.device), self.run.train.label_smoothing
        where = nonfinite.locate_in_micro_batches(
            self.model, batch, self.state.grad_accum, smoothing, self.autocast_dtype
        )
        origins = [self.samples.origin(sample) for sample in self.batches.sample_indices(number)]
        found = {"step": step + 1, "batch": number, "error": str(error), "location": where, "sources": origins}
        (self.folder / NONFINITE).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sentence = f"at step {step + 1}, batch {number}, {error} It began in {where}."
        skipped = (*self.state.skipped, number)
        if self.run.train.on_nonfinite == "stop" or len(skipped) > MOST_SKIPPED:
            advice = (
                ""
                if self.run.train.on_nonfinite == "skip"
                else ", or train.on_nonfinite=skip to pass such batches over"
            )
            raise GlasshouseError(
                f"{sentence} No weight has changed. See {str(self.folder / NONFINITE)!r}; try a lower train.lr{advice}."
            )
        self.reporter.log(f"{sentence} The batch is passed over.")
        self.step_fn.optimizer.zero_grad(set_to_none=True)
        self.checkpointer.report_write_errors(self.checkpointer.checkpoints.wait)
        if newest := self.checkpointer.checkpoints.newest():
            self._restore(newest[0], newest[1])
            self._truncate(self.state.unwritten)
            self.reporter.log(f"back to step {newest[0]}")
        self.state = replace(self.state, skipped=skipped)

    def _line(self, outcome: StepMetrics) -> JsonDict:
        lr = self.step_fn.optimizer.param_groups[0]["lr"]
        epoch = self.state.next_batch * self.batches.batch_size / len(self.samples)
        values = {"epoch": epoch, "loss": outcome.loss, "lr": lr, "grad_norm": outcome.grad_norm}
        values |= {"n_targets": outcome.n_targets, "tokens_per_second": round(self.throughput.tokens_per_second, 1)}
        return _as_json(values)

    def _end_step(self) -> None:
        """Evaluate the step that was taken, note it and save it, where that is due."""
        choice, step, line = self.run.train, self.state.step, self.state.pending_metrics or {}
        last = step == self.steps
        if step % choice.interval(choice.eval_every, self.state.initial_steps) == 0 or last:
            figures = self._validate()
            line = line | _as_json({f"validation_{name}": value for name, value in figures.items()})
        self.state = replace(self.state, pending_metrics=None)
        self._write_metrics(line)
        is_best = self.state.best is not None and self.state.best[0] == step
        if (
            step % choice.interval(choice.save_every, self.state.initial_steps) == 0
            or last
            or is_best
            or self.out_of_patience
        ):
            self._log_checkpoint()  # before it is saved: one that goes on from there need not do it again
            self.checkpointer.save(self.state)
            self.throughput.exclude_elapsed()

    def _write_metrics(self, values: JsonDict) -> None:
        self.checkpointer.report_write_errors(lambda: self.journal.write(self.state.step, **values))
        if self.trackers is not None:
            self.trackers.write(self.state.step, values)

    # Trying out

    def _validate(self) -> dict[str, float]:
        """Ask the model about what is held out, or the beginning of it, and remember whether it was never better."""
        done = 0

        def before() -> None:
            nonlocal done
            self.signals.check()
            self.reporter.stage("evaluating", done, self.eval_samples)
            done += self.micro_batch_size

        try:
            with self._with_ema():
                figures = evaluate_samples(
                    self.model,
                    self.val_samples,
                    self.micro_batch_size,
                    limit=self.eval_samples,
                    token_bytes=self.token_bytes,
                    autocast_dtype=self.autocast_dtype,
                    on_batch=before,
                ).metrics()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._raise_grad_accum(self.batches.batch_size)
            return self._validate()
        self.reporter.on_validation_end(self.state.step, figures)
        self.throughput.exclude_elapsed()
        loss = figures["loss"]
        if math.isfinite(loss) and (self.state.best is None or loss < self.state.best[1]):
            self.state = replace(self.state, best=(self.state.step, loss), evals_since_best=0)
        else:
            self.state = replace(self.state, evals_since_best=self.state.evals_since_best + 1)
        return figures

    def _log_checkpoint(self) -> None:
        self.reporter.stage("probing and sampling", 0, 0)
        self.checkpointer.report_write_errors(lambda: self.checkpoint_log.write(self.state.step, self.model))
        self.throughput.exclude_elapsed()

    def _with_ema(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ema is None else self.ema.applied()

    def finish(self) -> Result:
        """Write the model: the best where patience asks for it, else the last; averaged where that is asked for."""
        self.reporter.stage("saving the model", 0, 0)
        best, keeper, kept = self.state.best, self.checkpointer, self.state.step
        is_last = not self.run.train.patience or best is None or best[0] not in keeper.checkpoints.steps()
        if best is not None and not is_last:
            kept = best[0]
            keeper.load_weights(kept)
        with self._with_ema() if is_last else nullcontext():
            model = keeper.save_model(self.folder / MODEL)
            if self.run.train.lora is not None:
                self._save_adapter(self.run.train.lora)
        self.reporter.stage("drawing plots", 0, 0)
        keeper.report_write_errors(lambda: plots.draw(self.journal, self.folder))
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
        tried = self.eval_samples, len(self.val_samples)
        return Result(self.folder, model, self.datasets, self.state.step, report, kept, tried)

    def _save_adapter(self, choice: lora.LoRA) -> None:
        """Write what was learned apart from the model it belongs to, as PEFT does."""
        base = str(self.run.model.get("from", ""))
        if self.resized:
            self.reporter.log(
                "no adapter files: the model has another head or vocabulary than the one it started from"
            )
            return
        try:
            self.checkpointer.report_write_errors(
                lambda: hub.save_adapter(self.model, choice, self.folder / ADAPTER, base)
            )
        except ConfigError as error:
            self.reporter.log(f"no adapter files: {error}")

    def close(self) -> None:
        """Let go of what is open."""
        if self.trackers is not None:
            self.trackers.close()


def _as_json(values: Mapping[str, float]) -> JsonDict:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
