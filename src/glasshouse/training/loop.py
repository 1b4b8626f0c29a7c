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
from glasshouse.config import Table
from glasshouse.data import Batch, Batches, Corpus, RunningText, Samples
from glasshouse.data.samples import make_samples, rows_of
from glasshouse.errors import ConfigError, GlasshouseError, InputError
from glasshouse.evaluation.evaluate import Report, evaluate
from glasshouse.evaluation.tally import byte_sizes, read_through
from glasshouse.generation.admission import check_length
from glasshouse.hub.runs import CHECKPOINTS, MODEL
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.text import Tokenizer
from glasshouse.training import beginning, header, plots, trouble
from glasshouse.training.average import Average
from glasshouse.training.checkpoint import Checkpoints
from glasshouse.training.compiling import Compiled
from glasshouse.training.display import Display
from glasshouse.training.folder import ADAPTER, METRICS, TROUBLE, claim
from glasshouse.training.insight import Insight
from glasshouse.training.journal import Journal
from glasshouse.training.keeping import Keeper, Place
from glasshouse.training.material import Material, gather, units_of, with_kind
from glasshouse.training.memory import exhausted, first_parts
from glasshouse.training.optimizer import make_optimizer, set_rate
from glasshouse.training.run import Run
from glasshouse.training.signals import Signals, StoppedError
from glasshouse.training.speed import Speed, Work
from glasshouse.training.state import State, draw_again, draws
from glasshouse.training.trackers import Trackers
from glasshouse.training.update import NotFiniteError, Outcome, Update
from glasshouse.training.watch import Silent, Watch

MOST_SKIPPED = 10  # batches; more than that is not bad luck
ANSWERS = 200  # that the closing report has the model write, of pairs and conversations; to write takes long


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    model: Model  # in eval mode, as it was saved in `folder / "model"`
    material: Material
    steps: int
    report: Report  # on all that was held out
    kept: int  # the step whose model was saved: the last, or with patience the best
    tried: tuple[int, int]  # how many held-out samples each evaluation while training read, and how many there are


def train(run: Run | str | Path, watch: Watch | bool = True) -> Result:
    """Train a model as a run says, or go on with it where it was stopped, and write it to the run's folder.

    The run may be the name of a recipe or the path of a TOML file. Its progress is shown on stderr, or told to a
    `watch` of one's own; `watch=False` shows nothing. Ctrl-C, SIGTERM and SIGHUP save and raise `StoppedError`.

    >>> import tempfile, glasshouse as gh
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/a.txt").write_text("to be or not to be, that is the question. " * 50)
    >>> table = {
    ...     "model": {"preset": "tiny-decoder"},
    ...     "data": {"path": f"{place}/a.txt", "length": 16, "vocab_size": 270},
    ...     "train": {"steps": 3, "batch_tokens": 64, "out": f"{place}/run"},
    ... }
    >>> result = train(Run.parse(table), watch=False)
    >>> {"checkpoints", "metrics.jsonl", "model", "samples.jsonl"} <= {path.name for path in result.folder.iterdir()}
    True
    """
    if isinstance(run, str | Path):
        run = Run.load(run)
    if not isinstance(run, Run):
        raise InputError(
            f"run is {run!r}, but it must be a Run, the name of a recipe or the path of a TOML file; see gh.Run.load."
        )
    if isinstance(watch, bool):
        with Display(units_of(run.data)).open() if watch else nullcontext(Silent()) as shown:
            return train(run, shown)
    beginning.find_device(run.train.device)  # what is not there is said before hours are spent on reading
    with claim(run) as folder:
        for note in run.notes:
            watch.say(note)
        return _train(run, folder, watch)


def _train(run: Run, folder: Path, watch: Watch) -> Result:
    for line in header.opening(folder, run.data):
        watch.say(line)
    if "from" in run.model:
        watch.stage("loading the model to start from", 0, 0)
    base = beginning.load_base(run.model, run.data)
    choice = with_kind(run.data, beginning.wanted_kind(run.model, base[0] if base else None))
    material = gather(choice, folder, base[1] if base else None, watch.stage)
    with Signals() as signals:
        watch.stage("building the model", 0, 0)
        trainer = Trainer(run, folder, material, base, watch, signals)
        try:
            for line in header.describe(trainer):
                watch.say(line)
            trainer.go_on()
            trainer.learn()
            return trainer.finish()
        except StoppedError as stopped:
            raise StoppedError(stopped.number, trainer.place.step) from None
        finally:
            trainer.close()


class Trainer:
    """A run while it lasts."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        material: Material,
        base: tuple[Model, Tokenizer] | None,
        watch: Watch,
        signals: Signals,
    ) -> None:
        choice = run.train
        self.run, self.folder, self.material, self.watch, self.signals = run, folder, material, watch, signals
        self.device = beginning.find_device(choice.device)
        self.compute = beginning.find_compute(choice.compute, self.device)
        torch.manual_seed(choice.seed)
        length = run.data.length
        if base is None and choice.lora is not None:
            raise ConfigError("train.lora adapts a model that was trained before; name one by model.from.")
        self.grafted = False  # whether it got another head or vocabulary
        if base is None:
            s = beginning.make_spec(run.model, material.tok, material.train, length)
            self.model = beginning.make_model(s, material.tok, self.device)
        else:
            self.model = beginning.adapt(*base, material.tok, material.train).to(self.device)
            self.grafted = self.model is not base[0]
        check_length(self.model.spec, length, "data.length")
        beginning.equip(self.model, choice)

        rows = rows_of(material.train, choice.batch_tokens, length)
        self.samples = self._samples(material.train, rows)
        try:
            self.held = self._samples(material.validation, 1)
        except InputError as error:
            if material.validation.folder != material.train.folder:
                raise
            raise InputError(f"too little is held out, so raise data.hold_out: {error}") from None
        spelled = isinstance(self.samples, RunningText) and material.tok.byte_level
        self.sizes = byte_sizes(material.tok) if spelled else None
        self.batches = Batches(self.samples, rows)
        self.steps, self.schedule = choice.planned(len(self.samples), rows)
        optimizer = make_optimizer(self.model, choice.chosen_optimizer())
        self.update = Update(
            self.model,
            optimizer,
            clip=choice.clip or None,
            smoothing=choice.smoothing,
            compute=self.compute,
            before=signals.check,
        )
        self.compiled = Compiled(self.model, choice.compile, self.device, watch.say)
        self.update.model = self.compiled.model
        self.average = Average(self.model, choice.average) if choice.average else None
        checkpoints = Checkpoints(folder / CHECKPOINTS, choice.keep, choice.history)
        self.keeper = Keeper(self.model, self.update, self.average, material.tok, checkpoints)
        parts = choice.parts or first_parts(self.model.spec, rows, length, self.device)
        self.place = Place(parts=parts, planned=self.steps)
        self.journal = Journal(folder / METRICS)
        self.insight = Insight(run, folder, self.model, self.held, material.tok, self.compute, watch.say)
        self.speed, self.work = Speed(self.device, self.compute), Work(self.model)
        self.trackers: Trackers | None = None

    @property
    def rows(self) -> int:
        """How many rows are computed at once."""
        return -(-self.batches.batch_size // self.place.parts)

    @property
    def is_tired(self) -> bool:
        """Whether the model has not got better for as long as patience goes."""
        return 0 < self.run.train.patience <= self.place.worse

    @property
    def eval_samples(self) -> int:
        """How many samples of what is held out an evaluation reads while training."""
        most = self.run.train.eval_samples or self.batches.batch_size * max(4, self.place.planned // 100)
        return min(most, len(self.held))

    def _samples(self, corpus: Corpus, rows: int) -> Samples:
        return make_samples(
            self.model.spec, corpus, batch_size=rows, length=self.run.data.length, seed=self.run.train.seed
        )

    def go_on(self) -> None:
        """Take up the newest intact checkpoint, if there is one."""
        if found := self.keeper.checkpoints.newest():
            step, state, wrong = found
            for sentence in wrong:
                self.watch.say(f"passed over: {sentence}")
            self._restore(step, state)
            folder = self.keeper.checkpoints.folder(step)
            self.watch.say(f"goes on after step {step} of {self.steps}, from {folder}")
            if (self.folder / MODEL).exists() and step < self.steps:
                self.watch.say(f"{self.folder / MODEL} stays as it is until the last step is taken")
        self._cut(self.place.unwritten)

    def _cut(self, step: int) -> None:
        self.journal.cut(step)
        self.insight.cut(step)
        self.keeper.checkpoints.history.cut(step)

    def _restore(self, step: int, state: State) -> None:
        self.place = self.keeper.restore(step, state)
        parts, planned = self.run.train.parts or self.place.parts, self.place.planned or self.steps
        self.place = replace(self.place, parts=parts, planned=planned)

    # Learning

    def learn(self) -> None:
        """Take the steps that are left."""
        choice = self.run.train
        self.model.train()
        self.trackers = Trackers(self.folder, choice.wandb, self.folder.name, start=self.place.unwritten)
        if self.place.step == 0:
            self.keeper.guard(lambda: self._cut(0))  # if killed before its first checkpoint, it has a line
            self._look_inside()
            self.keeper.begin()
        self.watch.stage("compiling for the first step" if self.compiled.on else "first step", 0, 0)
        batches = self._stream()
        try:
            while self.place.line is not None or (self.place.step < self.steps and not self.is_tired):
                if self.place.line is None:  # else the evaluation of the last step was cut off
                    self.keeper.guard(self.keeper.checkpoints.check)
                    self.signals.check()
                    outcome = self._teach(next(batches))
                    if outcome is None:  # the batch was passed over
                        batches.close()
                        batches = self._stream()
                        continue
                    self.place = replace(self.place, line=self._line(outcome))
                self._conclude()
            if self.is_tired:
                self.watch.say(f"stops early: no better loss in {self.place.worse} evaluations")
        except StoppedError:  # no look inside: when it goes on, its lines are those of a run never stopped
            if self.place.line is not None:
                self._note(self.place.line)
            self.keeper.save(self.place)
            raise
        finally:
            batches.close()
            self.keeper.guard(self.keeper.checkpoints.wait)

    def _stream(self) -> Generator[Batch]:
        """Yield the batches from the next one on, but for those that are passed over."""
        ahead = self._ahead()
        try:
            for number, batch in enumerate(ahead, self.place.number):
                if number not in self.place.skipped:
                    self.place = replace(self.place, number=number)
                    yield batch
        finally:
            ahead.close()

    def _ahead(self) -> Generator[Batch]:
        if self.run.train.workers:
            return self.batches.start(self.place.number, workers=self.run.train.workers)
        return (self.batches.at(number) for number in itertools.count(self.place.number))

    def _teach(self, batch: Batch) -> Outcome | None:
        """Take one step, in as many parts as the memory asks for; return None if the batch is to be passed over."""
        set_rate(self.update.optimizer, self.schedule.factor(self.place.step, self.steps))
        chance = draws(self.device)
        while True:
            try:
                outcome = self.compiled.guard(lambda: self.update(batch, self.place.parts), self.update)
                break
            except StoppedError:
                draw_again(chance, self.device)  # nothing was learned, so nothing was drawn
                raise
            except NotFiniteError as error:
                draw_again(chance, self.device)
                self._report(error, batch)
                return None
            except (RuntimeError, MemoryError) as error:
                if not exhausted(error):
                    raise
            draw_again(chance, self.device)
            self._halve(len(batch))
        if self.average is not None:
            self.average.update()
        self.place = replace(self.place, step=self.place.step + 1, number=self.place.number + 1)
        self.speed.add(batch.tokens, self.work(batch))
        self.watch.step(self.place.step, self.steps, outcome, self.speed)
        return outcome

    def _halve(self, rows: int) -> None:
        if self.place.parts >= rows:
            raise InputError(
                f"the memory is too small for one row of {self.run.data.length} tokens; choose a smaller model or a "
                "smaller data.length, or try train.recompute=true."
            )
        self.update.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.place = replace(self.place, parts=min(rows, self.place.parts * 2))
        self.watch.say(f"out of memory: a step is now computed in {self.place.parts} parts of {self.rows} rows")

    def _report(self, error: NotFiniteError, batch: Batch) -> None:
        """Write down where a number stopped being one; then stop, or go back and pass the batch over."""
        step, number = self.place.step, self.place.number
        batch, smoothing = batch.to(self.device), self.run.train.smoothing
        where = trouble.search(self.model, batch, self.place.parts, smoothing, self.compute)
        origins = [self.samples.origin(sample) for sample in self.batches.numbers(number)]
        found = {"step": step + 1, "batch": number, "what": str(error), "where": where, "origins": origins}
        (self.folder / TROUBLE).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sentence = f"at step {step + 1}, batch {number}, {error} It began in {where}."
        skipped = (*self.place.skipped, number)
        if self.run.train.trouble == "stop" or len(skipped) > MOST_SKIPPED:
            advice = "" if self.run.train.trouble == "skip" else ", or train.trouble=skip to pass such batches over"
            raise GlasshouseError(
                f"{sentence} No weight has changed. See {str(self.folder / TROUBLE)!r}; try a lower train.lr{advice}."
            )
        self.watch.say(f"{sentence} The batch is passed over.")
        self.update.optimizer.zero_grad(set_to_none=True)
        self.keeper.guard(self.keeper.checkpoints.wait)
        if newest := self.keeper.checkpoints.newest():
            self._restore(newest[0], newest[1])
            self._cut(self.place.unwritten)
            self.watch.say(f"back to step {newest[0]}")
        self.place = replace(self.place, skipped=skipped)

    def _line(self, outcome: Outcome) -> Table:
        rate = self.update.optimizer.param_groups[0]["lr"]
        epoch = self.place.number * self.batches.batch_size / len(self.samples)
        values = {"epoch": epoch, "loss": outcome.loss, "rate": rate, "norm": outcome.norm}
        values |= {"targets": outcome.targets, "tokens_per_second": round(self.speed.tokens_per_second, 1)}
        return _as_json(values)

    def _conclude(self) -> None:
        """Evaluate the step that was taken, note it and save it, where that is due."""
        choice, step, line = self.run.train, self.place.step, self.place.line or {}
        last = step == self.steps
        if step % choice.often(choice.eval_every, self.place.planned) == 0 or last:
            figures = self._try_out()
            line = line | _as_json({f"validation_{name}": value for name, value in figures.items()})
        self.place = replace(self.place, line=None)
        self._note(line)
        is_best = self.place.best is not None and self.place.best[0] == step
        if step % choice.often(choice.save_every, self.place.planned) == 0 or last or is_best or self.is_tired:
            self._look_inside()  # before it is saved: one that goes on from there need not do it again
            self.keeper.save(self.place)
            self.speed.pause()

    def _note(self, values: Table) -> None:
        self.keeper.guard(lambda: self.journal.write(self.place.step, **values))
        if self.trackers is not None:
            self.trackers.write(self.place.step, values)

    # Trying out

    def _try_out(self) -> dict[str, float]:
        """Ask the model about what is held out, or the beginning of it, and remember whether it was never better."""
        done = 0

        def before() -> None:
            nonlocal done
            self.signals.check()
            self.watch.stage("evaluating", done, self.eval_samples)
            done += self.rows

        try:
            with self._averaged():
                figures = read_through(
                    self.model,
                    self.held,
                    self.rows,
                    most=self.eval_samples,
                    sizes=self.sizes,
                    compute=self.compute,
                    before=before,
                ).figures()
        except (RuntimeError, MemoryError) as error:
            if not exhausted(error):
                raise
            self._halve(self.batches.batch_size)
            return self._try_out()
        self.watch.evaluated(self.place.step, figures)
        self.speed.pause()
        loss = figures["loss"]
        if math.isfinite(loss) and (self.place.best is None or loss < self.place.best[1]):
            self.place = replace(self.place, best=(self.place.step, loss), worse=0)
        else:
            self.place = replace(self.place, worse=self.place.worse + 1)
        return figures

    def _look_inside(self) -> None:
        self.watch.stage("probing and sampling", 0, 0)
        self.keeper.guard(lambda: self.insight.note(self.place.step, self.model))
        self.speed.pause()

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.applied()

    def finish(self) -> Result:
        """Write the model: the best where patience asks for it, else the last; averaged where that is asked for."""
        self.watch.stage("saving the model", 0, 0)
        best, keeper, kept = self.place.best, self.keeper, self.place.step
        is_last = not self.run.train.patience or best is None or best[0] not in keeper.checkpoints.steps()
        if best is not None and not is_last:
            kept = best[0]
            keeper.put(kept)
        with self._averaged() if is_last else nullcontext():
            model = keeper.write(self.folder / MODEL)
            if self.run.train.lora is not None:
                self._save_adapter(self.run.train.lora)
        self.watch.stage("drawing plots", 0, 0)
        keeper.guard(lambda: plots.draw(self.journal, self.folder))
        model = model.to(self.device).eval()

        def progress(stage: str, done: int, total: int) -> None:
            self.signals.check()
            self.watch.stage(stage, done, total)

        corpus, length = self.material.validation, self.run.data.length
        report = evaluate(
            model,
            self.material.tok,
            corpus,
            length=length,
            rows=self.rows,
            written=ANSWERS,
            progress=progress,
        )
        tried = self.eval_samples, len(self.held)
        return Result(self.folder, model, self.material, self.place.step, report, kept, tried)

    def _save_adapter(self, choice: lora.LoRA) -> None:
        """Write what was learned apart from the model it belongs to, as PEFT does."""
        base = str(self.run.model.get("from", ""))
        if self.grafted:
            self.watch.say("no adapter files: the model has another head or vocabulary than the one it started from")
            return
        try:
            self.keeper.guard(lambda: hub.save_adapter(self.model, choice, self.folder / ADAPTER, base))
        except ConfigError as error:
            self.watch.say(f"no adapter files: {error}")

    def close(self) -> None:
        """Let go of what is open."""
        if self.trackers is not None:
            self.trackers.close()


def _as_json(values: Mapping[str, float]) -> Table:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
