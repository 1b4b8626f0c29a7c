"""The settings of a run, resolved: device, precision, objective, base model, tokenizer and kind of data.

All of it is decided here, once, before the folder is locked and the data are prepared; later stages only read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glasshouse import device as machine
from glasshouse import hub, spec
from glasshouse.config import JsonDict
from glasshouse.data.corpus import Kind
from glasshouse.errors import ConfigError, InputError
from glasshouse.models import Model, check_tokenizer
from glasshouse.objectives import Objective
from glasshouse.objectives.registry import required_kind
from glasshouse.text import Tokenizer
from glasshouse.training.distributed.processes import Processes
from glasshouse.training.logging.progress import ProgressReporter
from glasshouse.training.run import Data, Pretrained, Run, Train, recipes
from glasshouse.training.setup.custom import Base, Custom
from glasshouse.training.setup.datasets import given_tokenizer, with_kind

FROM_DATA = ("head", "start_id", "end_ids", "pad_id")  # fields of a spec that only the data complete


@dataclass(frozen=True)
class Resolved:
    """What a run trains with, as far as its settings, the caller and the machine decide it."""

    run: Run
    custom: Custom
    processes: Processes
    device: torch.device
    precision: torch.dtype  # of matrix products
    objective: Objective[Any] | None  # the chosen one; None: model and data decide
    base: Base | None  # the model to start from: a pretrained one, or the caller's
    tokenizer: Tokenizer | None  # the one that is known without the data: of the base model or the objective
    data: Data  # the data settings, with the kind of data that model and objective need


def resolve(
    run: Run, custom: Custom, processes: Processes, device: torch.device, progress: ProgressReporter
) -> Resolved:
    """Resolve the settings of a run, or raise what is wrong with them; nothing is written."""
    precision = resolve_precision(run.train.precision, device)
    if processes.is_parallel:
        _check_parallel_precision(run.train.precision, precision)
    objective = custom.choose_objective(run.train.objective)
    if objective is not None:
        check_objective(objective, run.train, processes)
    if custom.dataset is not None and run.train.objective is not None:
        raise InputError(
            f"train.objective is {run.train.objective.kind!r} and dataset is given, but that objective takes its own "
            "data; leave one of them out."
        )
    base = custom.base(run.data)
    if isinstance(run.model, Pretrained):
        progress.stage("loading the model to start from", 0, 0)
        base = load_base(run.model.source, run.data, needs_tokenizer=custom.dataset is None)
    elif base is None:
        check_new_model(run)
    tokenizer = base[1] if base else objective.tokenizer() if objective else None
    data = with_kind(run.data, data_kind(run.model.to_dict(), base[0] if base else None, objective))
    return Resolved(run, custom, processes, device, precision, objective, base, tokenizer, data)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of mixed precision: what matrix products are computed in.

    >>> resolve_precision("bfloat16", torch.device("cpu"))
    torch.bfloat16
    """
    if name == "fp8":
        machine.check_float8(device)
        return torch.bfloat16
    return machine.compute_dtype(device) if name == "auto" else getattr(torch, name)


def _check_parallel_precision(name: str, precision: torch.dtype) -> None:
    """Refuse float16, whose loss scale each process would adapt by itself, and fp8, whose scales are of a shard."""
    if name == "fp8" or precision == torch.float16:
        raise ConfigError(
            f"train.precision is {'fp8' if name == 'fp8' else 'float16'}, which one process can train with; several "
            "need bfloat16 or float32."
        )


def check_objective(objective: Objective[Any], choice: Train, processes: Processes) -> None:
    """Refuse several processes, or gradient accumulation, for an objective that cannot be shared or split."""
    name = getattr(objective, "kind", type(objective).__name__)
    if processes.is_parallel and not objective.parallel:
        raise InputError(
            f"{processes.world_size} processes were started, but one alone can train with the objective {name}; "
            "start it without torchrun."
        )
    if objective.whole_batch and choice.grad_accum > 1:
        raise ConfigError(
            f"train.grad_accum is {choice.grad_accum}, but the objective {name} compares all samples of a step with "
            "each other; leave it out, and lower train.batch_tokens if memory runs out."
        )


def load_base(source: str, data: Data, *, needs_tokenizer: bool = True) -> Base:
    """Load the pretrained model of `model.from`.

    A model saved without a tokenizer uses the one of the data settings, and never a new one: its embeddings were not
    trained on those ids. A dataset that has ids needs none.
    """
    match Path(source).parts:
        case ["runs", name, "model"] if name in recipes() and not Path(source).exists():  # the output of a recipe
            command = "glasshouse train" if name == "stdlib" else f"glasshouse train {name}"
            raise InputError(
                f"there is no model in {source!r} to start from; run `{command}` first, which trains it, or "
                "give another by model.from."
            )
    model, tok = hub.load(source, dtype=torch.float32)
    if tok is None and needs_tokenizer:
        tok = given_tokenizer(data)
        if tok is None:
            raise InputError(
                f"there is no tokenizer in {source!r}, and its embeddings do not fit a new one; give the tokenizer "
                "that the model was trained with by data.tokenizer=FOLDER."
            )
        check_tokenizer(model, tok)
    return model, tok


def data_kind(table: JsonDict, base: Model | None, chosen: Objective[Any] | None = None) -> Kind | None:
    """Return the kind of data that the model is trained on, by a `chosen` objective; None if several kinds fit.

    >>> data_kind({"preset": "vaswani-base"}, None)
    'pairs'
    >>> data_kind({"preset": "tiny-encoder", "head": "token_classification"}, None)
    'tagged'
    """
    kinds = model_kinds(table) if base is None else (base.spec.kind, base.spec.head.kind)
    return required_kind(*kinds, chosen)


def model_kinds(table: JsonDict) -> tuple[object, object]:
    """Return the kinds of a new model and of its head, as far as the settings give them."""
    known = spec.preset(table["preset"]) if "preset" in table else None
    head = table.get("head", known and known.head.kind)
    return table.get("kind") or (known and known.kind), head.get("kind") if isinstance(head, dict) else head


def check_new_model(run: Run) -> None:
    """Raise the errors of a new model's settings that no data can fix, before hours of preparing them.

    >>> check_new_model(Run.load("stdlib", "model.d_model=64"))
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: d_model is 64, but it must be a multiple of n_heads = 3 unless d_head is given.
    """
    if run.train.lora is not None:
        raise ConfigError("train.lora needs a pretrained model; give one by model.from.")
    spec_before_data(run, run.data.vocab_size)


def spec_before_data(run: Run, vocab_size: int, *, head: bool = False) -> spec.Spec:
    """Return the spec as far as it is known; `head`: with the head that is set, if the data need not complete it."""
    table = run.model.to_dict()
    known = {"vocab_size": vocab_size, "max_len": run.data.seq_len}
    without = {name: value for name, value in table.items() if name not in FROM_DATA}
    if head and "head" in table:
        try:
            return parse_spec({**without, "head": table["head"]}, known)
        except ConfigError:  # a classifier without labels, or an error that the rest has too
            pass
    return parse_spec(without, known)


def parse_spec(table: JsonDict, known: JsonDict) -> spec.Spec:
    """Return the spec of a table of settings, with what is known for fields that it leaves out."""
    given = {name: value for name, value in table.items() if name != "preset"}
    if "preset" in table:
        return spec.preset(table["preset"], **{**known, **given})
    return spec.parse({**known, **given})
