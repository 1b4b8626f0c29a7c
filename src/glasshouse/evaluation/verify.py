"""The checks that travel with a model: every way of running it must give the same, and transformers too."""

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
from glasshouse.hub.model_folder import CONFIG, VERIFIED, ModelFolder, write_json
from glasshouse.hub.remote import resolve_folder
from glasshouse.hub.verified import fingerprints
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.spec import Pooled
from glasshouse.text import Tokenizer

# Rounding of float32 over some hundred sums, relative to the largest entry; a wrong mask or weight shows far above.
LIMIT = 1e-5
ROWS = 4


@dataclass(frozen=True)
class Check:
    """What two ways of running a model differ by, relative to the largest entry, or why they were not compared."""

    name: str
    difference: float | None
    limit: float = LIMIT
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference stays within the limit; what was not compared does not fail."""
        return self.difference is None or self.difference <= self.limit


@torch.inference_mode()
def verify(place: str | Path, *, revision: str | None = None, ignore: Collection[str] = ()) -> list[Check]:
    """Run a saved model in every way there is, in float32, compare, and write what was found beside its weights.

    Cached against uncached, a batch against its rows, padded rows against rows alone, saved and loaded against
    itself, and, where transformers is installed and knows the family, its logits against ours.
    """
    folder = resolve_folder(place, revision)
    model, tok = hub.load(folder.path, dtype=torch.float32, ignore=ignore)
    rows = _draw(model, [_longest(model)] * ROWS)
    ragged = _draw(model, [max(1, _longest(model) - 5 * i) for i in range(ROWS)])
    alone = [_run(model, [row])[0] for row in rows]
    checks = [
        Check("cached", None, reason="an encoder has no cache")
        if isinstance(model, Encoder)
        else Check("cached", _difference([_run_cached(model, row) for row in rows], alone)),
        Check("batched", _difference(_run(model, rows), alone)),
        Check("padded", _difference(_run(model, ragged), [_run(model, [row])[0] for row in ragged])),
        Check("round trip", _round_trip(model, tok), limit=0.0),
        _against_transformers(folder, model, rows, alone),
    ]
    try:
        _write(folder.path, checks)
    except OSError as error:  # such as a folder that only others may write to; what was found still counts
        checks.append(Check(VERIFIED, None, reason=f"not written: {error.strerror}"))
    return checks


Row = tuple[Tensor, ...]  # the ids of one text, or of a source and its target


def _longest(model: Model) -> int:
    return min(model.spec.max_len, 48)


def _draw(model: Model, lengths: Sequence[int]) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    sides = 2 if isinstance(model, Seq2Seq) else 1
    size, pad = model.spec.vocab_size, model.spec.pad_id

    def ids(length: int) -> Tensor:
        drawn = torch.randint(0, size, (length,), generator=generator)
        # Some models of transformers skip the padding id wherever it stands.
        return drawn if pad is None else torch.where(drawn == pad, (pad + 1) % size, drawn)

    return [tuple(ids(length) for _ in range(sides)) for length in lengths]


def _run(model: Model, rows: Sequence[Row]) -> list[Tensor]:
    """Run rows as one batch, padded to the longest; return what belongs to each."""
    names = ("lengths", "target_lengths")
    ids, told = [], {}
    for name, side in zip(names, zip(*rows, strict=True), strict=False):
        ids.append(torch.nn.utils.rnn.pad_sequence(list(side), batch_first=True))
        told[name] = torch.tensor([len(row) for row in side])
    out = model(*ids, **told)
    return [out[i, : len(row[-1])] if out.dim() == 3 else out[i] for i, row in enumerate(rows)]


def _run_cached(model: Decoder | Seq2Seq, row: Row) -> Tensor:
    """Run one row token by token."""
    *source, target = row
    longest = max(len(ids) for ids in row)
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
    return float(apart / largest) if largest != 0 else float(apart)  # not a number, where any of them is not


def _round_trip(model: Model, tok: Tokenizer | None) -> float:
    """Return the largest difference of any weight after saving and loading."""
    with tempfile.TemporaryDirectory() as place:
        hub.save(model, tok, Path(place) / "model")
        back, _ = hub.load(Path(place) / "model")
        pairs = zip(model.parameters(), back.parameters(), strict=True)
        return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


def _against_transformers(folder: ModelFolder, model: Model, rows: Sequence[Row], alone: Sequence[Tensor]) -> Check:
    """Compare with what transformers makes of the same folder, never running code from it."""
    name = "transformers"
    if importlib.util.find_spec("transformers") is None:
        return Check(name, None, reason="transformers is not installed")
    table = folder.json(CONFIG) or {}
    if table["model_type"] not in hub.FAMILIES:
        return Check(name, None, reason="no published family can express the model")
    transformers = importlib.import_module("transformers")
    family = hub.FAMILIES[table["model_type"]]
    named = table.get("architectures") or list(family.heads)
    architecture = named if isinstance(named, str) else named[0]
    safely = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    loudness = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        theirs = getattr(transformers, architecture).from_pretrained(folder.path, dtype=torch.float32, **safely)
    finally:
        transformers.logging.set_verbosity(loudness)
        transformers.logging.enable_progress_bar()
    found = []
    for row in rows:
        told = dict(zip(("input_ids", "decoder_input_ids"), (ids[None] for ids in row), strict=False))
        out = theirs.eval()(**told)
        names = ("logits", "prediction_logits", "last_hidden_state")
        found.append(next(getattr(out, name)[0] for name in names if hasattr(out, name)))
    if isinstance(model.spec.head, Pooled):  # which transformers leaves to others
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
