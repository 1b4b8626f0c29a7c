"""How the steps of a run are executed: eagerly, with compiled blocks, by CUDA graphs, or in several processes."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from glasshouse import device as machine
from glasshouse.layers.module_swap import is_own_code
from glasshouse.models import Model, count_parameters
from glasshouse.models.stack import Stack
from glasshouse.objectives import CausalLM, Objective, Seq2SeqLM
from glasshouse.training.graphed_step import GraphedTrainStep
from glasshouse.training.logging.progress import ProgressReporter
from glasshouse.training.optimizer import make_optimizer
from glasshouse.training.setup.resolve import Resolved
from glasshouse.training.signals import Signals
from glasshouse.training.step import ShardedTrainStep, TrainStep

Execution = Literal["eager", "compiled", "graphs"]

# Of `train.compile = "auto"`, measured on an H200 (docs/lab/training-gpu.md).
UTILIZATION = 0.4  # of the FLOPS, in an eager step that does not wait for launches
LAUNCH_SECONDS = 0.0025  # of a block, with its backward pass and update
REPAID_SECONDS = 60.0  # of steps: compiling takes 2 to 6 s, and saves 6% (GPT-2) to 28% (a Llama) of them
CAPTURED = (CausalLM, Seq2SeqLM)  # objectives whose steps were compared with eager ones on a GPU
ALL_THE_SAME = "(train.compile=yes to compile all the same)"


def make_train_step(
    resolved: Resolved,
    model: Model,
    objective: Objective[Any],
    steps: int,
    reporter: ProgressReporter,
    signals: Signals,
) -> TrainStep:
    """Build the training step of a run, which updates the model by batches."""
    choice, processes = resolved.run.train, resolved.processes
    execution, reason = choose_execution(resolved, model, objective, steps)
    if reason is not None:
        reporter.log(f"not compiled: {reason}")
    make = ShardedTrainStep if processes.is_parallel else GraphedTrainStep if execution == "graphs" else TrainStep
    step = make(
        model,
        resolved.custom.make_optimizer(model, lambda: make_optimizer(model, choice.chosen_optimizer())),
        grad_clip=choice.grad_clip or None,
        loss_fn=objective.loss,
        label_smoothing=choice.label_smoothing,
        defer_logits=getattr(objective.loss, "__func__", None) is Objective.loss,
        aligns=has_own_loss(objective),
        precision=resolved.precision,
        float8=choice.precision == "fp8",
        reduce=processes.sum,
        # Several processes must stop at the same point: the loop asks them all before a step.
        on_micro_batch=(lambda: None) if processes.is_parallel else signals.check,
        on_fallback=reporter.log,
    )
    if execution == "compiled":
        step.compile()
    if execution == "graphs" and not step.runs_ahead:
        reporter.log(
            "not compiled: launches take most of a step, and CUDA graphs need another precision than float16 and an "
            f"optimizer that itself leaves out updates that are not finite {ALL_THE_SAME}"
        )
    return step


def choose_execution(
    resolved: Resolved, model: Model, objective: Objective[Any], steps: int
) -> tuple[Execution, str | None]:
    """Return how to execute the steps of a run, and why they are not compiled where that may be expected."""
    choice, device = resolved.run.train, resolved.device
    if choice.compile == "no" or (choice.compile == "auto" and not machine.compiles_by_default(device)):
        return "eager", None
    # Several processes share the time; and what they would need uncompiled is not planned for.
    if choice.compile == "auto" and not resolved.processes.is_parallel:
        size, flops = count_parameters(model.spec), machine.nominal_flops(device)
        execution = fastest_execution(size, count_blocks(model), choice.batch_tokens, steps, flops)
        if execution == "graphs":
            if can_capture(model, objective) and not choice.activation_checkpointing:
                return "graphs", None
            return "eager", (
                "launches take most of a step, which compiling does not change, and CUDA graphs are not made of "
                f"steps with this model, this objective or activation checkpointing {ALL_THE_SAME}"
            )
        if execution == "eager":
            return "eager", f"in {steps:,} steps it would take longer than it saves {ALL_THE_SAME}"
    obstacle = machine.compile_obstacle(device)
    return ("compiled", None) if obstacle is None else ("eager", obstacle)


def fastest_execution(n_parameters: int, n_blocks: int, batch_tokens: int, steps: int, flops: float) -> Execution:
    """Return the execution that ends a run first, on a device of so many FLOPS.

    By arithmetic and not by a measurement, so that a resumed run does what an uninterrupted one does.

    >>> gpt2 = {"n_parameters": 124_000_000, "n_blocks": 12, "batch_tokens": 65_536, "flops": 7e14}
    >>> fastest_execution(**gpt2, steps=200), fastest_execution(**gpt2, steps=20_000)
    ('eager', 'compiled')
    >>> fastest_execution(**{**gpt2, "batch_tokens": 4096}, steps=200)
    'graphs'
    """
    seconds = step_seconds(n_parameters, n_blocks, batch_tokens, flops)
    if seconds <= LAUNCH_SECONDS * n_blocks:
        return "graphs"
    return "compiled" if steps * seconds > REPAID_SECONDS else "eager"


def step_seconds(n_parameters: int, n_blocks: int, batch_tokens: int, flops: float) -> float:
    """Return about what an eager step takes: its arithmetic, or its launches where they take longer."""
    return max(6 * n_parameters * batch_tokens / (UTILIZATION * flops), LAUNCH_SECONDS * n_blocks)


def count_blocks(model: Model) -> int:
    """Return the number of blocks in all stacks."""
    return sum(len(stack.blocks) for stack in model.modules() if isinstance(stack, Stack))


def can_capture(model: nn.Module, objective: Objective[Any]) -> bool:
    """Return whether steps can be CUDA graphs: of code that is this package's or torch's, as compared on a GPU.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> can_capture(model, CausalLM())
    True
    >>> _ = model.stack.register_forward_hook(print)
    >>> can_capture(model, CausalLM())
    False
    """
    # Windows attend by FlexAttention.
    plain = all(stack.windows == [0] for stack in model.modules() if isinstance(stack, Stack))
    return is_own_code(model) and plain and type(objective) in CAPTURED and has_own_loss(objective)


def has_own_loss(objective: Objective[Any]) -> bool:
    """Return whether the loss is that of a class of this package, and not a function or a class of the caller's.

    >>> from glasshouse.training.setup.custom import Custom
    >>> has_own_loss(CausalLM()), has_own_loss(Custom(lambda model, batch, smoothing: 0).with_loss(CausalLM()))
    (True, False)
    """
    loss = type(objective).loss
    return getattr(objective.loss, "__func__", None) is loss and loss.__module__.partition(".")[0] == "glasshouse"


def describe_execution(step: TrainStep, objective: Objective[Any]) -> str:
    """Return how the steps are executed, for the header of a run: empty for eager mode."""
    if isinstance(step, GraphedTrainStep) and step.runs_ahead:
        return ", CUDA graphs but for packed documents" if isinstance(objective, CausalLM) else ", CUDA graphs"
    return ", compiled" if step.compiled else ""
