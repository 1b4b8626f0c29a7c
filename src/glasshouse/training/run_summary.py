"""What a run says before it begins: where it writes, what it reads, and once that is prepared, what it will do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import filesize

from glasshouse.data.corpus import MANIFEST
from glasshouse.data.dataset_reader import is_builtin
from glasshouse.text import sources
from glasshouse.training.run import Data

if TYPE_CHECKING:
    from glasshouse.training.loop import Trainer

SHOWN = 5  # kinds of files that are named


def opening(folder: Path, choice: Data) -> list[str]:
    """Return what is known before anything is read."""
    return [
        f"folder   {folder}",
        f"data     {_files(choice)}",
        "stop     Ctrl-C saves a checkpoint and stops; run it again to resume",
    ]


def _files(choice: Data) -> str:
    if is_builtin(choice.path):
        return f"{choice.path[0]}, a built-in set"
    if Path(choice.path[0], MANIFEST).is_file():
        return f"{choice.path[0]}, prepared before"
    files, left = sources.find_files(choice.path), sources.skipped_files(choice.path)
    text = f"{_count(len(files), 'file')}, {filesize.decimal(sum(map(sources.file_size, files)))}"
    if left:
        kinds = Counter(path.suffix or "no suffix" for path in left).most_common(SHOWN)
        more = ", ..." if len({path.suffix for path in left}) > SHOWN else ""
        text += f"; {len(left):,} skipped, as of no known kind of text ({', '.join(kind for kind, _ in kinds)}{more})"
    return text


def describe(trainer: Trainer) -> list[str]:
    """Return what is known once the data are prepared and the model is there."""
    s, run, material = trainer.model.spec, trainer.run, trainer.datasets
    weights = list(trainer.model.parameters())
    total = sum(weight.numel() for weight in weights)
    learning = sum(weight.numel() for weight in weights if weight.requires_grad)
    parts = "" if learning == total else f", of which {learning:,} are trained"
    source = f", from {run.model['from']}" if "from" in run.model else ""
    fields = ", ".join(material.train.manifest.get("columns", ()))
    kind = material.train.kind + (f" (columns {fields})" if fields else "")
    left_out = getattr(trainer.samples, "n_too_long", 0)
    longer = f"; {left_out:,} longer than data.seq_len are left out" if left_out else ""
    device = str(trainer.device)
    device += f" ({torch.cuda.get_device_name(trainer.device)})" if trainer.device.type == "cuda" else ""
    device += f" ({_count(torch.get_num_threads(), 'thread')})" if trainer.device.type == "cpu" else ""
    epochs = trainer.steps * trainer.batches.batch_size / max(1, len(trainer.samples))
    return [
        f"model    {s.kind}, {_count(s.n_layers, 'layer')}, d_model {s.d_model}, {_count(s.n_heads, 'head')}"
        f"{source}: {total:,} parameters{parts}",
        f"tokens   {kind}: {material.train.n_tokens:,} in {_count(len(material.train), 'item')} to learn from, "
        f"{material.validation.n_tokens:,} held out{longer}",
        f"device   {device}, {str(trainer.autocast_dtype).removeprefix('torch.')}"
        f"{', compiled' if trainer.compiled.on else ''}",
        f"steps    {trainer.steps:,} of about {run.train.batch_tokens:,} tokens in "
        f"{_count(trainer.batches.batch_size, 'row')}: {epochs:,.2f} epochs",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
