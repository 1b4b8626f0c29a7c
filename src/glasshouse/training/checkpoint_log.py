"""What is written down of a model at each checkpoint: figures of its inside, and what it writes."""

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
    """Takes probes and samples; where one cannot be worked out, it says why, once for each reason, and goes on.

    Both are of the weights that learn, also where it is their average that is tried out and kept: what is wanted here
    is how they learn.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        model: Model,
        held: Dataset,
        tok: Tokenizer,
        compute: torch.dtype,
        say: Callable[[str], None],
    ) -> None:
        length, choice = run.data.seq_len, run.train
        probes = Probes(model, first_texts(held), names=choice.probes, length=length, compute=compute)
        prompts = make_prompts(held, tok, length, choice.sample_prompts)
        self._say, self._said = say, set[str]()
        self._journals = {"probes": Journal(folder / PROBES), "samples": Journal(folder / SAMPLES)}
        self._takes: dict[str, Callable[[Model], JsonDict]] = {}
        if probes.names:
            self._takes["probes"] = probes.take
        if prompts is not None:
            self._takes["samples"] = lambda model: {"samples": prompts.take(model)}

    def write(self, step: int, model: Model) -> None:
        """Write down what there is to say of a model after a step."""
        for name, take in self._takes.items():
            try:
                found = take(model)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if reason not in self._said:
                    self._say(f"no {name} at step {step} ({reason}); training goes on")
                self._said.add(reason)
            else:
                self._journals[name].write(step, **found)

    def truncate(self, step: int) -> None:
        """Forget what was written down of a step and all after it."""
        for journal in self._journals.values():
            journal.truncate(step)
