"""Builds the trainer of a run from its resolved settings and its datasets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from glasshouse import config, spec
from glasshouse import device as machine
from glasshouse.data import Batches, Corpus, Dataset
from glasshouse.errors import InputError
from glasshouse.hub.run_checkpoints import CHECKPOINTS
from glasshouse.layers.linear.frozen_quantized import count_weights
from glasshouse.models import Model, count_parameters
from glasshouse.objectives import Objective, find_objective
from glasshouse.objectives.registry import model_objective
from glasshouse.training.budget import Budget
from glasshouse.training.checkpoint.folder import METRICS
from glasshouse.training.checkpoint.state import Checkpointer, TrainerState, fingerprint
from glasshouse.training.checkpoint.store import Checkpoints
from glasshouse.training.distributed.fsdp import choose_run_layout, describe_layout, fits_one_device
from glasshouse.training.distributed.layout import SINGLE, Layout
from glasshouse.training.distributed.processes import Processes
from glasshouse.training.logging.checkpoint_log import CheckpointLog, Probes, first_texts, make_prompts
from glasshouse.training.logging.journal import Journal
from glasshouse.training.logging.progress import ProgressReporter, Throughput
from glasshouse.training.plan.training import USABLE, choose_grad_accum, run_memory
from glasshouse.training.run import Pretrained, Run, Train
from glasshouse.training.setup.custom import AnyDatasets, CustomDatasets, describe_tokens
from glasshouse.training.setup.execution import describe_execution, make_train_step
from glasshouse.training.setup.interval import choose_interval, default_interval
from glasshouse.training.setup.model import make_initial_model
from glasshouse.training.setup.resolve import Resolved, check_objective
from glasshouse.training.signals import Signals
from glasshouse.training.step import EMA
from glasshouse.training.trainer import Callback, Trainer

USABLE_UNMEASURED = 0.5  # of memory in float32 and float16, whose plans no GPU has shown; a CPU's is shared


def build_trainer(
    resolved: Resolved,
    datasets: AnyDatasets,
    folder: Path,
    reporter: ProgressReporter,
    signals: Signals,
    callbacks: Sequence[Callback] = (),
    budget: Budget | None = None,
) -> Trainer:
    """Build the trainer of a run: the model and its objective, batches, optimizer, checkpoints and logs."""
    run, custom, processes, device = resolved.run, resolved.custom, resolved.processes, resolved.device
    choice, tok, length, precision = run.train, datasets.tok, run.data.seq_len, resolved.precision
    torch.manual_seed(choice.seed)
    model = make_initial_model(resolved, datasets)
    objective = make_objective(resolved, datasets, model, reporter)
    batches, val_samples = make_batches(run, model.spec, objective, datasets, processes)
    samples = 0 if choice.epochs is None else len(batches.samples)  # which a stream may not have
    steps, schedule = choice.planned(samples, batches.batch_size)
    if choice.schedule is not None and schedule.warmup < choice.schedule.warmup:
        reporter.log(
            f"the warm-up is shortened from {choice.schedule.warmup} steps to {schedule.warmup}, as train.epochs of "
            f"{choice.epochs:g} are {_count(steps, 'step')}"
        )
    train_step = make_train_step(resolved, model, objective, steps, reporter, signals)
    ema = EMA(model, choice.ema) if choice.ema else None
    brought = custom.names
    if isinstance(datasets, CustomDatasets):
        brought["dataset"] += f" ({datasets.fingerprint})"
    held = {name: fingerprint(one)[:12] for name, one in objective.frozen_models().items()}
    interval = choose_interval(resolved, model, steps)
    if interval > default_interval(steps) and not (choice.eval_every and choice.save_every):
        reporter.log(
            f"validated and saved every {interval} steps: ten checkpoints would take over a fifth of the time "
            "(train.eval_every and train.save_every set it)"
        )
    state = TrainerState(
        grad_accum=choose_run_accum(resolved, model, objective, batches),
        initial_steps=steps,
        interval=interval,
        custom=brought | held,
    )
    checkpoints = Checkpoints(folder / CHECKPOINTS, choice.keep_checkpoints, choice.keep_snapshots, processes)
    probes = Probes(
        model,
        first_texts(val_samples),
        names=choice.probes,
        length=length,
        autocast_dtype=precision,
    )
    gathers = not processes.is_parallel or fits_one_device(model, processes, device)
    if not gathers:
        reporter.log(
            "no probes and samples: no device can hold the whole model beside its part of the training state"
        )
    prompts = None if tok is None else make_prompts(val_samples, tok, length, choice.sample_prompts)
    return Trainer(
        run=run,
        folder=folder,
        device=device,
        reporter=reporter,
        signals=signals,
        processes=processes,
        callbacks=callbacks,
        datasets=datasets,
        batches=batches,
        val_samples=val_samples,
        steps=steps,
        schedule=schedule,
        model=model,
        objective=objective,
        gathers=gathers,
        resized=resolved.base is not None and model is not resolved.base[0],
        train_step=train_step,
        ema=ema,
        throughput=Throughput(device, precision, processes.world_size),
        state=state,
        checkpointer=Checkpointer(model, train_step, ema, state, tok, checkpoints),
        metrics=Journal(folder / METRICS, writes=processes.is_main),
        budget=budget,
        checkpoint_log=CheckpointLog(folder, probes, prompts, reporter.log, writes=processes.is_main),
    )


def make_objective(
    resolved: Resolved, datasets: AnyDatasets, model: Model, reporter: ProgressReporter
) -> Objective[Any]:
    """Return the objective that was chosen, or the one of model and data, prepared and with the caller's loss."""
    custom, choice = resolved.custom, resolved.run.train
    if isinstance(datasets, CustomDatasets):
        objective = resolved.objective or model_objective(model.spec)
        check_objective(objective, choice, resolved.processes)
        return custom.with_loss(objective)
    objective = find_objective(model.spec, datasets.train, resolved.objective)
    check_objective(objective, choice, resolved.processes)
    reporter.stage("preparing the objective", 0, 0)
    return custom.with_loss(objective.prepare(model, datasets.train, resolved.run.data.seq_len))


def make_batches(
    run: Run, s: spec.Spec, objective: Objective[Any], datasets: AnyDatasets, processes: Processes
) -> tuple[Batches, Dataset]:
    """Return the training batches and the validation samples."""

    def make(corpus: Corpus, batch_size: int) -> Dataset:
        choices = {"batch_size": batch_size, "seq_len": run.data.seq_len, "seed": run.train.seed}
        return objective.dataset_for(s, corpus, **choices)

    share = {"rank": processes.data_rank, "world_size": processes.data_size}
    if isinstance(datasets, CustomDatasets):
        datasets.limit(s)
        return datasets.batches(run.train.batch_tokens, **share), datasets.validation
    batch_size = objective.samples_for_tokens(datasets.train, run.train.batch_tokens, run.data.seq_len)
    batches = Batches(make(datasets.train, batch_size), batch_size, **share)
    try:
        return batches, make(datasets.validation, 1)
    except InputError as error:
        if datasets.validation.folder != datasets.train.folder:
            raise
        raise InputError(f"the validation set is too small, so raise data.val_fraction: {error}") from None


def choose_run_accum(resolved: Resolved, model: Model, objective: Objective[Any], batches: Batches) -> int:
    """Return the gradient accumulation that a run begins with: what is set, or what memory requires."""
    choice, processes, device = resolved.run.train, resolved.processes, resolved.device
    layout = SINGLE
    if processes.is_parallel:
        layout = choose_run_layout(choice.parallel, processes, count_parameters(model.spec), device)
    grad_accum = 1 if objective.whole_batch else choice.grad_accum
    grad_accum = grad_accum or estimate_grad_accum(
        model,
        choice,
        len(batches.share) * objective.sequences_per_sample,
        resolved.run.data.seq_len,
        resolved.precision,
        machine.memory_bytes(device),
        layout,
        resolved.objective,
    )
    return processes.max(grad_accum)


def estimate_grad_accum(
    model: Model,
    choice: Train,
    batch_size: int,
    length: int,
    precision: torch.dtype,
    memory: int,
    layout: Layout = SINGLE,
    chosen: Objective[Any] | None = None,
) -> int:
    """Estimate, as `glasshouse plan` does, the gradient accumulation with which a batch fits into `memory` bytes.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("gpt2"), device="meta")
    >>> [estimate_grad_accum(model, Train(), 64, 1024, torch.bfloat16, 2**30 * size) for size in (139, 24, 12)]
    [1, 2, 4]
    """
    step = run_memory(model, choice, precision, layout, chosen)
    usable = USABLE if precision == torch.bfloat16 else USABLE_UNMEASURED
    return choose_grad_accum(step, batch_size, length, usable * memory)


def describe(trainer: Trainer) -> list[str]:
    """Return a summary of the run: model, tokens, device and steps."""
    s, run, datasets, device = trainer.model.spec, trainer.run, trainer.datasets, trainer.device
    total = count_weights(trainer.model)
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    of_which = "" if trainable == total else f", {trainable:,} of them trainable"
    if run.train.lora is not None and run.train.lora.weights != "own":
        of_which += f", the frozen linear layers in {run.train.lora.weights}"
    source = f", from {run.model.source}" if isinstance(run.model, Pretrained) else ""
    samples, batch_size = trainer.batches.samples, trainer.batches.batch_size
    epochs = "" if math.isnan(number := trainer.batches.epochs(trainer.steps)) else f": {number:,.2f} epochs"
    noun = "sequence" if trainer.objective.sequences_per_sample == 1 else "pair"
    too_long = getattr(samples, "n_too_long", 0)
    longer = f"; {too_long:,} items longer than data.seq_len dropped" if too_long else ""
    named = str(device)
    named += f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    named += f" ({_count(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else ""
    if trainer.processes.is_parallel:
        named = f"{trainer.processes.world_size} x {named}, {describe_layout(trainer.model)}"
    return [
        f"model    {s.kind}, {_count(s.n_layers, 'layer')}, d_model {s.d_model}, {_count(s.n_heads, 'head')}"
        f"{source}: {total:,} parameters{of_which}",
        f"tokens   {describe_tokens(datasets)}{longer}",
        *(
            f"source   {one.path}: {_count(one.n_items, 'item')}, {_count(one.weight, 'time')} an epoch, "
            f"{number * one.weight:,.2f} times in the run"
            for one in getattr(datasets, "sources", ())
        ),
        f"device   {named}, {str(trainer.train_step.precision).removeprefix('torch.')}"
        f"{' and fp8' if run.train.precision == 'fp8' else ''}"
        f"{describe_execution(trainer.train_step, trainer.objective)}",
        *([f"loss     {_describe_objective(trainer)}"] if run.train.objective else []),
        f"steps    {trainer.steps:,} of about {run.train.batch_tokens:,} tokens in "
        f"{_count(batch_size, noun)}{epochs}",
    ]


def _describe_objective(trainer: Trainer) -> str:
    """Return the settings of the objective, and the size of the models that it keeps beside the trained one."""
    table = config.dump(trainer.run.train.objective)
    sizes = {
        name: sum(weight.numel() for weight in model.parameters())
        for name, model in trainer.objective.frozen_models().items()
    }
    beside = "".join(f"; {name}: {size:,} parameters, frozen" for name, size in sizes.items())
    return table.pop("kind") + "".join(f", {name} {value}" for name, value in table.items()) + beside


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
