"""Everything that one run trains with, built from its settings and datasets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glasshouse import device as machine
from glasshouse import spec
from glasshouse.data import Batches, Corpus, Dataset
from glasshouse.errors import InputError
from glasshouse.hub.run_checkpoints import CHECKPOINTS
from glasshouse.models import Model
from glasshouse.objectives import Objective, find_objective, make_dataset
from glasshouse.text import Tokenizer
from glasshouse.training import model_setup
from glasshouse.training.checkpoint import Checkpointer, TrainerState
from glasshouse.training.checkpoint_log import CheckpointLog, Probes, first_texts, make_prompts
from glasshouse.training.checkpoints import Checkpoints
from glasshouse.training.datasets import Datasets
from glasshouse.training.folder import METRICS
from glasshouse.training.journal import Journal
from glasshouse.training.optimizer import make_optimizer
from glasshouse.training.plan.memory import MemoryModel
from glasshouse.training.plan.training import USABLE, choose_grad_accum
from glasshouse.training.progress import ProgressReporter, Throughput
from glasshouse.training.run import Pretrained, Run, Train
from glasshouse.training.schedule import Schedule
from glasshouse.training.signals import Signals
from glasshouse.training.step import EMA, TrainStep

USABLE_UNMEASURED = 0.5  # of memory in float32 and float16, whose plans no GPU has shown; a CPU's is shared


@dataclass(frozen=True)
class Setup:
    """What a run trains with; from step to step only `state`, and what the parts keep themselves, change."""

    run: Run
    folder: Path
    device: torch.device
    reporter: ProgressReporter
    signals: Signals
    datasets: Datasets
    batches: Batches  # of the training set
    val_samples: Dataset
    steps: int
    schedule: Schedule
    model: Model  # in eager mode
    objective: Objective[Any]
    resized: bool  # whether the head or the vocabulary of a pretrained model was replaced
    train_step: TrainStep  # owns the optimizer, the gradient scaler and the compiled model
    ema: EMA | None
    throughput: Throughput
    state: TrainerState  # changed by the loop and by recovery
    checkpointer: Checkpointer  # owns the checkpoints and snapshots
    metrics: Journal
    checkpoint_log: CheckpointLog  # probes and samples

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass."""
        return -(-self.batches.batch_size // self.state.grad_accum)

    @property
    def eval_samples(self) -> int:
        """Validation samples per evaluation during training."""
        limit = self.run.train.eval_samples or self.batches.batch_size * max(4, self.state.initial_steps // 100)
        return min(limit, len(self.val_samples))


def make_setup(
    run: Run,
    folder: Path,
    device: torch.device,
    datasets: Datasets,
    base: tuple[Model, Tokenizer] | None,
    reporter: ProgressReporter,
    signals: Signals,
) -> Setup:
    """Build everything for a run; `base` is the pretrained model to start from, if any."""
    choice, tok, length = run.train, datasets.tok, run.data.seq_len
    torch.manual_seed(choice.seed)
    model = model_setup.make_initial_model(run, datasets, base, device)
    objective = find_objective(model.spec, datasets.train)
    batches, val_samples = _make_data(run, model.spec, objective, datasets)
    steps, schedule = choice.planned(len(batches.samples), batches.batch_size)
    if choice.schedule is not None and schedule.warmup < choice.schedule.warmup:
        reporter.log(
            f"the warm-up is shortened from {choice.schedule.warmup} steps to {schedule.warmup}, as train.epochs of "
            f"{choice.epochs:g} are {_count(steps, 'step')}"
        )
    train_step = TrainStep(
        model,
        make_optimizer(model, choice.chosen_optimizer()),
        grad_clip=choice.grad_clip or None,
        loss_fn=objective.loss,
        label_smoothing=choice.label_smoothing,
        defer_logits=type(objective).loss is Objective.loss,
        precision=resolve_precision(choice.precision, device),
        on_micro_batch=signals.check,
        on_fallback=lambda reason: reporter.log(f"not compiled: {reason}"),
    )
    if choice.compile == "yes" or (choice.compile == "auto" and machine.compiles_by_default(device)):
        if (obstacle := machine.compile_obstacle(device)) is None:
            train_step.compile()
        else:
            train_step.on_fallback(obstacle)
    ema = EMA(model, choice.ema) if choice.ema else None
    grad_accum = choice.grad_accum or estimate_grad_accum(
        model, choice, batches.batch_size, length, train_step.precision, machine.memory_bytes(device)
    )
    state = TrainerState(grad_accum=grad_accum, initial_steps=steps)
    checkpoints = Checkpoints(folder / CHECKPOINTS, choice.keep_checkpoints, choice.keep_snapshots)
    probes = Probes(
        model,
        first_texts(val_samples),
        names=choice.probes,
        length=length,
        autocast_dtype=train_step.precision,
    )
    prompts = make_prompts(val_samples, tok, length, choice.sample_prompts)
    return Setup(
        run=run,
        folder=folder,
        device=device,
        reporter=reporter,
        signals=signals,
        datasets=datasets,
        batches=batches,
        val_samples=val_samples,
        steps=steps,
        schedule=schedule,
        model=model,
        objective=objective,
        resized=base is not None and model is not base[0],
        train_step=train_step,
        ema=ema,
        throughput=Throughput(device, train_step.precision),
        state=state,
        checkpointer=Checkpointer(model, train_step, ema, state, tok, checkpoints),
        metrics=Journal(folder / METRICS),
        checkpoint_log=CheckpointLog(folder, probes, prompts, reporter.log),
    )


def _make_data(run: Run, s: spec.Spec, objective: Objective[Any], datasets: Datasets) -> tuple[Batches, Dataset]:
    """Return the training batches and the validation samples."""

    def make(corpus: Corpus, batch_size: int) -> Dataset:
        return make_dataset(s, corpus, batch_size=batch_size, seq_len=run.data.seq_len, seed=run.train.seed)

    batch_size = objective.samples_for_tokens(datasets.train, run.train.batch_tokens, run.data.seq_len)
    batches = Batches(make(datasets.train, batch_size), batch_size)
    try:
        return batches, make(datasets.validation, 1)
    except InputError as error:
        if datasets.validation.folder != datasets.train.folder:
            raise
        raise InputError(f"the validation set is too small, so raise data.val_fraction: {error}") from None


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of mixed precision: what matrix products are computed in.

    >>> resolve_precision("bfloat16", torch.device("cpu"))
    torch.bfloat16
    """
    return machine.compute_dtype(device) if name == "auto" else getattr(torch, name)


def estimate_grad_accum(
    model: Model, choice: Train, batch_size: int, length: int, precision: torch.dtype, memory: int
) -> int:
    """Estimate, as `glasshouse plan` does, the gradient accumulation with which a batch fits into `memory` bytes.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("gpt2"), device="meta")
    >>> [estimate_grad_accum(model, Train(), 64, 1024, torch.bfloat16, 2**30 * size) for size in (139, 24, 12)]
    [1, 2, 4]
    """
    step = MemoryModel(
        model,
        choice.chosen_optimizer(),
        precision=precision,
        checkpointing=choice.activation_checkpointing,
        ema=bool(choice.ema),
    )
    usable = USABLE if precision == torch.bfloat16 else USABLE_UNMEASURED
    return choose_grad_accum(step, batch_size, length, usable * memory)


def describe(setup: Setup) -> list[str]:
    """Return a summary of the run: model, tokens, device and steps."""
    s, run, datasets, device = setup.model.spec, setup.run, setup.datasets, setup.device
    weights = list(setup.model.parameters())
    total = sum(weight.numel() for weight in weights)
    trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
    of_which = "" if trainable == total else f", {trainable:,} of them trainable"
    source = f", from {run.model.source}" if isinstance(run.model, Pretrained) else ""
    columns = ", ".join(datasets.train.manifest.get("columns", ()))
    kind = datasets.train.kind + (f" (columns {columns})" if columns else "")
    samples, batch_size = setup.batches.samples, setup.batches.batch_size
    too_long = getattr(samples, "n_too_long", 0)
    longer = f"; {too_long:,} items longer than data.seq_len dropped" if too_long else ""
    named = str(device)
    named += f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    named += f" ({_count(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else ""
    return [
        f"model    {s.kind}, {_count(s.n_layers, 'layer')}, d_model {s.d_model}, {_count(s.n_heads, 'head')}"
        f"{source}: {total:,} parameters{of_which}",
        f"tokens   {kind}: {datasets.train.n_tokens:,} in {_count(len(datasets.train), 'item')} for training, "
        f"{datasets.validation.n_tokens:,} for validation{longer}",
        f"device   {named}, {str(setup.train_step.precision).removeprefix('torch.')}"
        f"{', compiled' if setup.train_step.compiled else ''}",
        f"steps    {setup.steps:,} of about {run.train.batch_tokens:,} tokens in "
        f"{_count(batch_size, 'sequence')}: {setup.steps * batch_size / max(1, len(samples)):,.2f} epochs",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
