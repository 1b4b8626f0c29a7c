"""`glasshouse plan`: what a training run, or serving a model, will take in memory, time and money."""

from __future__ import annotations

import json
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.errors import InputError

if TYPE_CHECKING:
    from glasshouse.training.plan import ServingPlan, TrainingPlan

app = typer.Typer()

GIB = 2**30
Row = tuple[str, str]


@app.command(epilog="Example: glasshouse plan run.toml --gpus 64 --gpu h200 --price 2.50")
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run to train: a TOML file, a run folder or a recipe; with --minutes, settings alone will do. "
            "With --requests, a model to serve: a preset, a model or run folder, or a hub id.",
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the run to override.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs to train on.")] = 1,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, b200, mi300x, l40s or rtx4090.")] = "h200",
    memory: Annotated[float | None, typer.Option(help="GiB of a GPU.", show_default="the GPU's")] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="TFLOP/s of a large bfloat16 matmul.", show_default="80% of the data sheet's"),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="TB/s of a copy in memory.", show_default="88% of the data sheet's")
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(help="GB/s between GPUs of a node, per direction.", show_default="80% of the data sheet's"),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(help="GB/s of each GPU to other nodes.", show_default="80% of one adapter for each GPU"),
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    mfu: Annotated[
        float | None,
        typer.Option(help="Fraction of --tflops that training reaches.", show_default="estimated"),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of a GPU per hour.", show_default="no cost")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time a few steps here, and list what train.minutes would choose from.",
            show_default="plan by arithmetic",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Sequences to serve at once.", show_default="plan training")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, to serve.")] = 1024,
    new: Annotated[int, typer.Option(min=1, help="Tokens to generate, to serve.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Also draw the plan of a run, and open the picture in a browser.")
    ] = False,
) -> None:
    """Say what a training run or serving will take, by arithmetic alone: nothing is trained, and no GPU is needed.

    With --minutes it prepares the data and times a few steps on this machine, and lists the models that could be
    trained in that time, with the loss that each should reach.
    """
    if minutes is not None:
        _show_candidates(target, [*(settings or []), f"train.minutes={minutes}"], as_json)
        return
    if open_page and requests is not None:
        raise InputError("--open draws the plan of a run, but --requests plans serving; leave one of them out.")
    with screen.waiting("loading torch"):
        planner = gh.training.plan
        chosen = planner.find_gpu(gpu, memory=memory, tflops=tflops, bandwidth=bandwidth, link=link, network=network)
        if requests is not None:
            model = planner.load_meta_decoder(target)
            serving = planner.plan_serving(model, chosen, requests=requests, prompt=prompt, new=new)
        else:
            run = gh.Run.load(target, *(settings or []))
            training = planner.plan_training(run, chosen, gpus, per_node=per_node, mfu=mfu, price=price)
    found = training if requests is None else serving
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    elif requests is None:
        screen.table(list(_training(training)))
    else:
        _show_serving(serving)
    if open_page:
        _open(target, training)


def _show_candidates(target: str, settings: list[str], as_json: bool) -> None:
    """Print what train.minutes would choose from, the choice marked."""
    if "=" in target and not Path(target).exists():  # settings alone
        target, settings = "stdlib", [target, *settings]
    with screen.waiting("loading torch"):
        run = gh.Run.load(target, *settings)
    with gh.training.Display(gh.training.units_of(run.data)).open() as display:
        candidates = gh.training.plan_minutes(run, display)
    chosen = min(candidates, key=lambda one: one.loss)
    if as_json:
        table = [{**asdict(one), "chosen": one is chosen} for one in candidates]
        print(json.dumps({"minutes": run.train.minutes, "candidates": table}, indent=2))
        return
    screen.table(
        [
            (
                f"{one.depth}",
                f"{one.n_parameters:,}",
                f"{one.batch_tokens:,}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.steps:,}",
                f"{one.epochs:.2f}",
                f"{one.loss:.3f}",
                ", ".join(filter(None, ("chosen" * (one is chosen), "" if one.timed else "not timed"))),
            )
            for one in candidates
        ],
        header=("depth", "parameters", "batch", "tokens/s", "steps", "epochs", "predicted loss", ""),
        right=tuple(range(7)),
    )


def _open(target: str, plan: TrainingPlan) -> None:
    """Write the picture of a plan to a file that is kept, as a browser may still read it, and open it."""
    with tempfile.NamedTemporaryFile("w", prefix="plan-", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(gh.page.plan_page(target, plan))
    address = Path(file.name).as_uri()
    if gh.device.find_browser() is not None:
        webbrowser.open(address)
    print(f"picture: {address}", file=sys.stderr)


def _training(plan: TrainingPlan) -> Iterator[Row]:
    flops, memory, layout, traffic = plan.flops_per_token, plan.memory, plan.layout, plan.traffic
    trained = "" if plan.n_trained == plan.n_parameters else f", {plan.n_trained:,} of them trained"
    yield "model", f"{plan.n_parameters:,} parameters{trained}"
    yield "FLOPs per token", f"{flops.total:.3g}, of which attention {flops.attention / flops.total:.0%}"
    yield (
        "GPU",
        (
            f"{layout.gpus} x {plan.gpu.name}: {plan.gpu.memory / GIB:.1f} GiB, {plan.gpu.flops / 1e12:.0f} TFLOP/s, "
            f"{plan.gpu.bandwidth / 1e12:.2f} TB/s"
        ),
    )
    sizes = {"replicas": layout.replicas, "shards": layout.shards, "tensor": layout.tensor}
    shape = ", ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    yield "layout", f"{layout.kind}{f' ({shape})' if shape else ''}: {layout.why}"
    yield (
        "batch",
        f"{plan.batch_tokens:,} tokens a step: micro-batches of {plan.rows} sequences a GPU, gradient accumulation "
        f"{plan.grad_accum}",
    )
    yield (
        "largest micro-batch",
        f"{plan.largest_rows:,} sequences" if plan.fits else "none: one sequence does not fit",
    )
    for part, size in memory.parts.items():
        yield f"  {part}", f"{size / GIB:8.2f} GiB"
    yield (
        "memory",
        (f"{memory.peak / GIB:8.2f} GiB of {plan.usable_memory / GIB:.1f} usable at the peak, in {memory.moment}"),
    )
    if layout.gpus > 1:
        for name in ("all_gather", "reduce_scatter", "all_reduce", "tensor"):
            if size := getattr(traffic, name):
                yield f"  {name}", f"{size / GIB:8.2f} GiB a step"
        share = plan.traffic_seconds / plan.compute_seconds
        yield "communication", f"{plan.traffic_seconds:8.3f} s a step, {share:.0%} of the time of computing"
    yield "step", f"{plan.step_seconds:8.3f} s, of which computing {plan.compute_seconds:.3f}; MFU {plan.mfu:.0%}"
    yield "tokens/s", f"{plan.tokens_per_second:,.0f}, {plan.tokens_per_second / layout.gpus:,.0f} a GPU"
    if plan.days is not None and plan.steps is not None:
        tokens = plan.steps * plan.batch_tokens
        yield "run", f"{plan.steps:,} steps, {tokens:,} tokens: {plan.days:,.2f} days"
    if plan.cost is not None:
        yield "cost", f"{plan.cost:,.2f}"
    for kind, size in plan.kv_bytes.items():
        yield f"KV cache, {kind}", f"{size:,} bytes a token"


def _show_serving(plan: ServingPlan) -> None:
    per_request = plan.kv_bytes_per_request / GIB
    screen.table(
        [
            ("model", f"{plan.n_parameters:,} parameters, bfloat16"),
            ("GPU", f"{plan.gpu.name}: {plan.gpu.memory / GIB:.1f} GiB, {plan.gpu.bandwidth / 1e12:.2f} TB/s"),
            ("requests", f"{plan.requests}, of {plan.prompt} + {plan.new} tokens"),
            (
                "KV cache",
                f"{plan.kv_bytes_per_token:,} bytes a token, {per_request:.3f} GiB a request",
            ),
        ]
    )
    print()
    screen.table(
        [
            (
                one.weights,
                f"{one.weight_bytes / GIB:.2f}",
                f"{one.largest_batch:,}",
                f"{one.batch:,}",
                f"{one.step_seconds * 1e3:.2f}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.first_token_seconds * 1e3:.0f}",
                f"{one.last_first_token_seconds * 1e3:.0f}",
            )
            for one in plan.choices
        ],
        header=(
            *("weights", "GiB", "largest batch", "batch", "ms a step", "tokens/s"),
            *("first token, ms", "of the last request"),
        ),
        right=range(1, 8),
    )
