"""Recovery: resuming from a checkpoint, running out of memory, and batches with a NaN or infinite loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.device import is_out_of_memory
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.hub.run_checkpoints import MODEL
from glasshouse.objectives.loss.cross_entropy import LossFn, autocast, compute_loss
from glasshouse.training.checkpoint.folder import NONFINITE
from glasshouse.training.checkpoint.store import CheckpointData
from glasshouse.training.distributed.fsdp import local
from glasshouse.training.setup.components import Setup
from glasshouse.training.step import NonFiniteError, StepFuture

T = TypeVar("T")
GRADIENT, NOWHERE, NOT_LOCATED = "the gradient of", "nowhere", "not located"
MOST_SKIPPED = 10  # batches with a NaN or infinite loss before the run stops


class Recovery:
    """Resumes a run from its checkpoints, and runs its steps in spite of too little memory and NaN losses."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.state, self.log = setup, setup.state, setup.reporter.log

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one, and drop what was logged after it."""
        setup, checkpoints = self.setup, self.setup.checkpointer.checkpoints
        if found := checkpoints.newest():
            step, data, errors = found
            for error in errors:
                self.log(f"skipped a damaged checkpoint: {error}")
            self._restore(step, data)
            self.log(f"resuming from step {step} of {setup.steps}, from {checkpoints.folder(step)}")
            if (setup.folder / MODEL).exists() and step < setup.steps:
                self.log(f"{setup.folder / MODEL} is not replaced until the last step")
        # At step 0, lines are left by a run that was killed before its first checkpoint.
        self._truncate_logs(self.state.unwritten if self.state.step else 0)

    def launch(self, batch: Batch) -> StepFuture:
        """Start one training step, with more gradient accumulation if out of memory."""
        rng = device_rng_state(self.setup.device)
        return self.retry(lambda: self._attempt(batch, rng))

    def _attempt(self, batch: Batch, rng: tuple[Tensor, Tensor | None]) -> StepFuture:
        try:
            return self.setup.train_step.launch(batch, self.state.grad_accum)
        except Exception:
            load_device_rng_state(rng, self.setup.device)  # no update, so no random numbers used
            raise

    def retry(self, work: Callable[[], T]) -> T:
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
        setup, state, batch_size = self.setup, self.state, len(self.setup.batches.share)
        if setup.processes.is_parallel:  # the others have gone on
            raise InputError(
                f"process {setup.processes.rank} is out of memory with {setup.micro_batch_size} sequences of "
                f"{setup.run.data.seq_len} tokens per micro-batch; try train.grad_accum={2 * state.grad_accum}, "
                "train.activation_checkpointing=true or more processes."
            )
        if setup.objective.whole_batch:
            raise InputError(
                f"out of memory with {batch_size} samples of up to {setup.run.data.seq_len} tokens, which the "
                "objective compares in one step; lower train.batch_tokens, or try "
                "train.activation_checkpointing=true."
            )
        if state.grad_accum >= batch_size:
            raise InputError(
                f"out of memory with one sequence of {setup.run.data.seq_len} tokens; choose a smaller model or a "
                "smaller data.seq_len, or try train.activation_checkpointing=true."
            )
        setup.train_step.optimizer.zero_grad(set_to_none=True)
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
        state.grad_accum = min(batch_size, state.grad_accum * 2)
        self.log(
            f"out of memory: gradient accumulation raised to {state.grad_accum} micro-batches of "
            f"{setup.micro_batch_size} sequences"
        )

    def handle_nonfinite(self, error: NonFiniteError, step: int, number: int, batch: Batch) -> None:
        """Write nonfinite.json; then stop, or roll back to the last checkpoint and skip the batch."""
        setup, choice, path = self.setup, self.setup.run.train, self.setup.folder / NONFINITE
        with setup.train_step.eager():
            located = _locate_in_micro_batches(
                setup.model,
                batch.to(setup.device),
                self.state.grad_accum,
                choice.label_smoothing,
                setup.train_step.precision,
                setup.objective.loss,
            )
        origins = [setup.batches.samples.origin(sample) for sample in setup.batches.sample_indices(number)]
        where, origins = first_located(setup.processes.gather((located, origins)))
        found = {"step": step, "batch": number, "error": str(error), "location": where, "sources": origins}
        if setup.processes.is_main:
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sentence = f"at step {step}, batch {number}, {error} First NaN or infinity: {where}."
        skipped = (*self.state.skipped, number)
        if choice.on_nonfinite == "stop" or len(skipped) > MOST_SKIPPED:
            advice = "" if choice.on_nonfinite == "skip" else ", or train.on_nonfinite=skip to skip such batches"
            raise GlasshouseError(
                f"{sentence} No weight was updated. See {str(path)!r}; try a lower train.lr{advice}."
            )
        self.log(f"{sentence} The batch is skipped.")
        self._roll_back()
        self.state.skipped = skipped

    def _roll_back(self) -> None:
        """Restore the newest checkpoint, if there is one."""
        checkpointer = self.setup.checkpointer
        self.setup.train_step.optimizer.zero_grad(set_to_none=True)
        checkpointer.wait()
        self.setup.processes.wait()
        if newest := checkpointer.checkpoints.newest():
            self._restore(newest[0], newest[1])
            self._truncate_logs(self.state.unwritten)
            self.log(f"rolled back to step {newest[0]}")

    def _restore(self, step: int, data: CheckpointData) -> None:
        self.setup.checkpointer.restore(step, data)
        self.state.grad_accum = self.setup.run.train.grad_accum or self.state.grad_accum
        self.state.initial_steps = self.state.initial_steps or self.setup.steps

    def _truncate_logs(self, step: int) -> None:
        """Drop the lines and snapshots from a step on."""
        setup = self.setup
        with setup.checkpointer.report_write_errors():
            setup.metrics.truncate(step)
            setup.checkpoint_log.truncate(step)
            if setup.processes.is_main:
                setup.checkpointer.checkpoints.snapshots.truncate(step)


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


def locate_nonfinite(model: nn.Module, batch: Batch, smoothing: float = 0.0, loss_fn: LossFn = compute_loss) -> str:
    """Locate the first NaN or infinity in the forward and backward pass of a batch, in a few words.

    Weights are checked first, then the output of each module in the order of execution, then gradients from the last
    weight to the first. The model is unchanged, except for its gradients.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> batch = Batch(ids, targets=ids, loss_mask=ids > 0)
    >>> locate_nonfinite(model, batch)
    'nowhere: all weights, activations and gradients are finite'
    >>> with torch.no_grad():
    ...     _ = model.stack.blocks[1].feedforward.layer.up.weight.fill_(torch.inf)
    >>> locate_nonfinite(model, batch)
    'the weight stack.blocks.1.feedforward.layer.up.weight'
    """
    # All of it runs whatever is found: sharded over processes, the others take part in both passes.
    found = [f"the weight {name}" for name, weight in model.named_parameters() if not _is_finite(weight)]

    def check(name: str, output: object) -> None:
        if not found and not all(_is_finite(one) for one in _tensors(output)):
            found.append(f"the output of module {name}")

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: check(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        loss = loss_fn(model, batch, smoothing)
    finally:
        for handle in handles:
            handle.remove()
    if not found and not _is_finite(loss):
        found.append("the loss, with finite logits")
    model.zero_grad(set_to_none=True)
    loss.backward()
    for name, weight in reversed(list(model.named_parameters())):
        if not found and weight.grad is not None and not _is_finite(weight.grad):
            found.append(f"{GRADIENT} {name}")
    return found[0] if found else f"{NOWHERE}: all weights, activations and gradients are finite"


def first_located(by_rank: list[tuple[str, list[str]]]) -> tuple[str, list[str]]:
    """Return where the first of several processes found a NaN or infinity, and the sources of its batch.

    A gradient is summed over processes before it is looked at, so that none of them can be named.

    >>> first_located([("the gradient of head.weight", ["a"]), ("the output of module head", ["b"])])
    ('the output of module head, in process 1', ['b'])
    """
    if len(by_rank) == 1:
        return by_rank[0]
    for rank, (where, sources) in enumerate(by_rank):
        if not where.startswith((GRADIENT, NOWHERE, NOT_LOCATED)):
            return f"{where}, in process {rank}", sources
    where = min((where for where, _ in by_rank), key=lambda where: where.startswith((NOWHERE, NOT_LOCATED)))
    return where, [source for _, sources in by_rank for source in sources]


def _locate_in_micro_batches(
    model: nn.Module,
    batch: Batch,
    grad_accum: int,
    smoothing: float,
    autocast_dtype: torch.dtype,
    loss_fn: LossFn,
) -> str:
    """Locate as `locate_nonfinite` does, with the micro-batches and the precision of a training step."""
    found = []
    for micro_batch in batch.microbatches(grad_accum):
        try:
            with autocast(batch.ids.device, autocast_dtype):
                found.append(locate_nonfinite(model, micro_batch, smoothing, loss_fn))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"{NOT_LOCATED}, out of memory"
    return next((where for where in found if not where.startswith(NOWHERE)), found[0])


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(local(tensor)).all())


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)
