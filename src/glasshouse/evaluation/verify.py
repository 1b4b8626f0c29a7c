"""Consistency checks of a saved model: cached, batched, padded, reloaded and in transformers, all must agree."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glasshouse import hub
from glasshouse.hub.model_files import fingerprints
from glasshouse.hub.model_folder import CONFIG, VERIFIED, ModelFolder, write_json
from glasshouse.hub.remote import resolve_folder
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.spec import Pooled
from glasshouse.text import Tokenizer

# Rounding of float32 sums, relative to the largest entry; a wrong mask or weight gives a far larger difference.
LIMIT = 1e-5
BATCH_SIZE = 4


@dataclass(frozen=True)
class Check:
    """Difference of two ways to run a model, relative to the largest entry, or why they were not compared."""

    name: str
    difference: float | None
    limit: float = LIMIT
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limit; a check that was not run passes."""
        return self.difference is None or self.difference <= self.limit


@torch.inference_mode()
def verify(path: str | Path, *, revision: str | None = None, ignore: Collection[str] = ()) -> list[Check]:
    """Run a saved model in float32 in several ways, compare, and write the result into its folder.

    With the KV cache against without, batched against single sequences, padded against unpadded, saved and loaded
    against the original, and, if transformers is installed and has the family, its logits against ours.
    """
    folder = resolve_folder(path, revision)
    model, tok = hub.load(folder.path, dtype=torch.float32, ignore=ignore)
    samples = _random_samples(model, [_seq_len(model)] * BATCH_SIZE)
    ragged = _random_samples(model, [max(1, _seq_len(model) - 5 * i) for i in range(BATCH_SIZE)])
    alone = [_run(model, [sample])[0] for sample in samples]
    checks = [
        Check("cached", None, reason="an encoder has no KV cache")
        if isinstance(model, Encoder)
        else Check("cached", _difference([_run_cached(model, sample) for sample in samples], alone)),
        Check("batched", _difference(_run(model, samples), alone)),
        Check("padded", _difference(_run(model, ragged), [_run(model, [sample])[0] for sample in ragged])),
        Check("round trip", _round_trip(model, tok), limit=0.0),
        _against_transformers(folder, model, samples, alone),
    ]
    try:
        _write(folder.path, checks)
    except OSError as error:  # such as a read-only folder; the checks still count
        checks.append(Check(VERIFIED, None, reason=f"not written: {error.strerror}"))
    return checks


Sample = tuple[Tensor, ...]  # the ids of one text, or of a source and its target


def _seq_len(model: Model) -> int:
    return min(model.spec.max_len, 48)


def _random_samples(model: Model, lengths: Sequence[int]) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    sides = 2 if isinstance(model, Seq2Seq) else 1
    size, pad = model.spec.vocab_size, model.spec.pad_id

    def ids(length: int) -> Tensor:
        drawn = torch.randint(0, size, (length,), generator=generator)
        # Some models of transformers mask the padding id at every position.
        return drawn if pad is None else torch.where(drawn == pad, (pad + 1) % size, drawn)

    return [tuple(ids(length) for _ in range(sides)) for length in lengths]


def _run(model: Model, samples: Sequence[Sample]) -> list[Tensor]:
    """Run samples as one padded batch; return the output of each without padding."""
    names = ("lengths", "target_lengths")
    ids, lengths = [], {}
    for name, side in zip(names, zip(*samples, strict=True), strict=False):
        ids.append(torch.nn.utils.rnn.pad_sequence(list(side), batch_first=True))
        lengths[name] = torch.tensor([len(one) for one in side])
    out = model(*ids, **lengths)
    return [out[i, : len(sample[-1])] if out.dim() == 3 else out[i] for i, sample in enumerate(samples)]


def _run_cached(model: Decoder | Seq2Seq, sample: Sample) -> Tensor:
    """Run one sample token by token with a KV cache."""
    *source, target = sample
    longest = max(len(ids) for ids in sample)
    cache = model.make_cache(1, longest)
    steps = []
    for t in range(len(target)):
        before = [ids[None] if t == 0 else None for ids in source]
        steps.append(model(*before, target[None, t : t + 1], cache=cache))
    whole = torch.cat(steps, 1) if steps[0].dim() == 3 else steps[-1]
    return whole[0]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    largest = torch.stack([e.abs().max() for e in expected]).max()
    apart = torch.stack([(f - e).abs().max() for f, e in zip(found, expected, strict=True)]).max()
    return float(apart / largest) if largest != 0 else float(apart)  # NaN, if any of them is


def _round_trip(model: Model, tok: Tokenizer | None) -> float:
    """Return the largest difference of a weight after saving and loading."""
    with tempfile.TemporaryDirectory() as folder:
        hub.save(model, tok, Path(folder) / "model")
        back, _ = hub.load(Path(folder) / "model")
        pairs = zip(model.parameters(), back.parameters(), strict=True)
        return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


def _against_transformers(
    folder: ModelFolder, model: Model, samples: Sequence[Sample], alone: Sequence[Tensor]
) -> Check:
    """Compare with transformers on the same folder, never running code from it."""
    name = "transformers"
    if importlib.util.find_spec("transformers") is None:
        return Check(name, None, reason="transformers is not installed")
    table = folder.json(CONFIG) or {}
    if table["model_type"] not in hub.FAMILIES:
        return Check(name, None, reason="no transformers family has this architecture")
    transformers = importlib.import_module("transformers")
    family = hub.FAMILIES[table["model_type"]]
    named = table.get("architectures") or list(family.heads)
    architecture = named if isinstance(named, str) else named[0]
    safely = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        theirs = getattr(transformers, architecture).from_pretrained(folder.path, dtype=torch.float32, **safely)
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    found = []
    for sample in samples:
        inputs = dict(zip(("input_ids", "decoder_input_ids"), (ids[None] for ids in sample), strict=False))
        out = theirs.eval()(**inputs)
        names = ("logits", "prediction_logits", "last_hidden_state")
        found.append(next(getattr(out, name)[0] for name in names if hasattr(out, name)))
    if isinstance(model.spec.head, Pooled):  # transformers does not pool
        pick = {"first": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0)}
        found = [pick[model.spec.head.pooling](vectors) for vectors in found]
    return Check(name, _difference(alone, found))


def _write(folder: Path, checks: Sequence[Check]) -> None:
    packages = ("glasshouse", "torch", "transformers")
    table = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "differences": {check.name: check.difference for check in checks},
        "limits": {check.name: check.limit for check in checks},
        "not_compared": {check.name: check.reason for check in checks if check.reason},
        "versions": {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)},
        "files": fingerprints(folder),
    }
    write_json(folder / VERIFIED, table)
