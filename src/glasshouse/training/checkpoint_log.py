"""Writes probes.jsonl and samples.jsonl at each checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from glasshouse.config import JsonDict
from glasshouse.data import Dataset
from glasshouse.models import Model
from glasshouse.text import Tokenizer
from glasshouse.training.folder import PROBES, SAMPLES
from glasshouse.training.journal import Journal
from glasshouse.training.probes import Probes, first_texts
from glasshouse.training.run import Run
from glasshouse.training.samples import make_prompts


class CheckpointLog:
    """Computes probes and samples; an error is logged once per reason, and training continues.

    Both use the trained weights, even if their EMA is validated and saved: they show how training proceeds.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        model: Model,
        val_samples: Dataset,
        tok: Tokenizer,
        autocast_dtype: torch.dtype,
        log: Callable[[str], None],
    ) -> None:
        length, choice = run.data.seq_len, run.train
        probes = Probes(
            model, first_texts(val_samples), names=choice.probes, length=length, autocast_dtype=autocast_dtype
        )
        prompts = make_prompts(val_samples, tok, length, choice.sample_prompts)
        self._log, self._logged = log, set[str]()
        self._journals = {"probes": Journal(folder / PROBES), "samples": Journal(folder / SAMPLES)}
        self._takes: dict[str, Callable[[Model], JsonDict]] = {}
        if probes.names:
            self._takes["probes"] = probes.take
        if prompts is not None:
            self._takes["samples"] = lambda model: {"samples": prompts.take(model)}

    def write(self, step: int, model: Model) -> None:
        """Write the probes and samples of a model after a step."""
        for name, take in self._takes.items():
            try:
                found = take(model)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if reason not in self._logged:
                    self._log(f"no {name} at step {step} ({reason}); training continues")
                self._logged.add(reason)
            else:
                self._journals[name].write(step, **found)

    def truncate(self, step: int) -> None:
        """Drop the lines from a step on."""
        for journal in self._journals.values():
            journal.truncate(step)
