"""Summary of a run, logged before training: folder and data, then model, tokens, device and steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import filesize

from glasshouse.data.builtin import is_builtin
from glasshouse.data.corpus import MANIFEST
from glasshouse.text import sources
from glasshouse.training.run import Data

if TYPE_CHECKING:
    from glasshouse.training.loop import Trainer

SHOWN = 5  # file suffixes that are listed


def opening(folder: Path, choice: Data) -> list[str]:
    """Return the lines known before the data are prepared."""
    return [
        f"folder   {folder}",
        f"data     {_files(choice)}",
        "stop     Ctrl-C saves a checkpoint and stops; run the same command again to resume",
    ]


def _files(choice: Data) -> str:
    if is_builtin(choice.path):
        return f"{choice.path[0]}, a built-in dataset"
    if Path(choice.path[0], MANIFEST).is_file():
        return f"{choice.path[0]}, already prepared"
    files, left = sources.find_files(choice.path), sources.skipped_files(choice.path)
    text = f"{_count(len(files), 'file')}, {filesize.decimal(sum(map(sources.file_size, files)))}"
    if left:
        kinds = Counter(path.suffix or "no suffix" for path in left).most_common(SHOWN)
        more = ", ..." if len({path.suffix for path in left}) > SHOWN else ""
        text += f"; {len(left):,} skipped: unknown file type ({', '.join(kind for kind, _ in kinds)}{more})"
    return text


def describe(trainer: Trainer) -> list[str]:
    """Return the lines known once the data are prepared and the model is built."""
    s, run, datasets = trainer.model.spec, trainer.run, trainer.datasets
    weights = list(trainer.model.parameters())
    total = sum(weight.numel() for weight in weights)
    trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
    of_which = "" if trainable == total else f", {trainable:,} of them trainable"
    source = f", from {run.model['from']}" if "from" in run.model else ""
    columns = ", ".join(datasets.train.manifest.get("columns", ()))
    kind = datasets.train.kind + (f" (columns {columns})" if columns else "")
    too_long = getattr(trainer.samples, "n_too_long", 0)
    longer = f"; {too_long:,} items longer than data.seq_len dropped" if too_long else ""
    device = str(trainer.device)
    device += f" ({torch.cuda.get_device_name(trainer.device)})" if trainer.device.type == "cuda" else ""
    device += f" ({_count(torch.get_num_threads(), 'thread')})" if trainer.device.type == "cpu" else ""
    epochs = trainer.steps * trainer.batches.batch_size / max(1, len(trainer.samples))
    return [
        f"model    {s.kind}, {_count(s.n_layers, 'layer')}, d_model {s.d_model}, {_count(s.n_heads, 'head')}"
        f"{source}: {total:,} parameters{of_which}",
        f"tokens   {kind}: {datasets.train.n_tokens:,} in {_count(len(datasets.train), 'item')} for training, "
        f"{datasets.validation.n_tokens:,} for validation{longer}",
        f"device   {device}, {str(trainer.autocast_dtype).removeprefix('torch.')}"
        f"{', compiled' if trainer.compiled.on else ''}",
        f"steps    {trainer.steps:,} of about {run.train.batch_tokens:,} tokens in "
        f"{_count(trainer.batches.batch_size, 'sequence')}: {epochs:,.2f} epochs",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
