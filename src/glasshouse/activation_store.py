"""Activations of a whole corpus on disk, to train on: at the speed of the forward pass, and resumed where stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasshouse import store
from glasshouse.data import Corpus
from glasshouse.errors import InputError, StoreError, check_count
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import Selection, select, unwrap_model
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.models import Decoder, Encoder, check_tokenizer
from glasshouse.models.prompt import check_ids

FORMAT = 1
MANIFEST = "manifest.json"
SHARD_TOKENS = 2**16  # tokens of a shard; as many are computed again after a kill, at most
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
TOKENS = ("ids", "documents", "positions")  # tensors of a shard besides the sites

Ints = NDArray[np.int64]
Dtype = Literal["float16", "bfloat16", "float32"]


def activations(
    model: Encoder | Decoder,
    corpus: Corpus | Sequence[Sequence[int]],
    sites: str | Sequence[str],
    out: str | Path,
    *,
    dtype: Dtype = "bfloat16",
    seq_len: int | None = None,
    batch_tokens: int = 16_384,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: Callable[[int, int], None] | None = None,
) -> Activations:
    """Write the activations of a corpus at some sites to a folder, and return them, memory-mapped.

    `corpus` is one that `gh.data.prepare` wrote of texts, or lists of ids. A document is cut into sequences of
    `seq_len` tokens (default: the model's max_len), each with a context of its own; sequences of similar length share
    a forward pass of at most `batch_tokens`, which ends at the last of the sites. `sites` are names as for
    `gh.record`, with a position: not attention patterns. A folder of the same call that is not complete is completed,
    from its last whole shard. `on_progress` is called with the tokens that are done and all of them.

    >>> import tempfile, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder")).eval()
    >>> found = gh.activations(model, [[1, 2, 3], [4, 5]], ["resid_post.0", "z.1"], tempfile.mkdtemp() + "/out")
    >>> found
    Activations(resid_post.0, z.1; 5 tokens, bfloat16)
    >>> batch = next(found.batches(4))
    >>> batch.ids.tolist(), batch.positions.tolist(), batch["resid_post.0"].shape, batch["z.1"].shape
    ([1, 2, 3, 4], [0, 1, 2, 0], torch.Size([4, 64]), torch.Size([4, 4, 16]))
    """
    whole = unwrap_model(model)
    if not isinstance(whole, Encoder | Decoder):
        raise InputError(f"the model is a {type(whole).__name__}, but activations are of encoders and decoders.")
    names = [one.name for one in _selections(whole, sites)]
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}, but it must be one of {', '.join(DTYPES)}.")
    longest = check_count("seq_len", whole.spec.max_len if seq_len is None else seq_len)
    if whole.spec.position_limit is not None and longest > whole.spec.position_limit:
        raise InputError(f"seq_len is {longest}, but the model has {whole.spec.position_limit} positions.")
    plan = _Plan(_Documents(corpus, whole), longest, check_count("shard_tokens", shard_tokens))
    manifest = {
        "format": FORMAT,
        "model": model_fingerprint(whole),
        "corpus": plan.documents.fingerprint,
        "sites": names,
        "dtype": dtype,
        "seq_len": longest,
        "shard_tokens": shard_tokens,
        "tokens": plan.documents.n_tokens,
        "shards": plan.n_shards,
    }
    folder = _begin(Path(out), manifest)
    run = _Pass(whole, names, DTYPES[dtype], check_count("batch_tokens", batch_tokens))
    writing: Future[None] | None = None
    with eval_mode(whole), torch.inference_mode(), ThreadPoolExecutor(1, "activations") as writer:
        for number in range(plan.n_shards):
            if not _path(folder, number).exists():
                computed = run(plan.shard(number))
                if writing is not None:
                    writing.result()  # so that no more than two shards are in memory
                writing = writer.submit(_write, _path(folder, number), computed)
            if on_progress is not None:
                on_progress(plan.bounds(number)[1], plan.documents.n_tokens)
        if writing is not None:
            writing.result()
    return Activations.open(folder)


@dataclass(frozen=True)
class ActivationBatch:
    """Activations of some tokens: `batch[site]` is [tokens, ...]."""

    ids: Tensor  # [tokens]
    documents: Tensor  # [tokens], the number of the document in the corpus
    positions: Tensor  # [tokens], in the document
    values: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, site: str) -> Tensor:
        if site not in self.values:
            raise InputError(f"the site is {site!r}, but these are activations of {', '.join(self.values)}.")
        return self.values[site]


class Activations:
    """Activations of a corpus, by shards on disk; `gh.activations` writes them.

    >>> import tempfile, glasshouse as gh
    >>> model, folder = gh.build(gh.preset("tiny-decoder")).eval(), tempfile.mkdtemp() + "/out"
    >>> _ = gh.activations(model, [[1, 2, 3], [4, 5]], "resid_post.0", folder)
    >>> [len(batch) for batch in Activations.open(folder).batches(2, seed=0)]
    [2, 2, 1]
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.sites: tuple[str, ...] = tuple(manifest["sites"])

    @classmethod
    def open(cls, folder: str | Path) -> Activations:
        """Open a folder that is complete."""
        found = cls(Path(folder), _read_manifest(Path(folder)))
        n_shards = found.manifest["shards"]
        missing = sum(not _path(found.folder, number).exists() for number in range(n_shards))
        if missing:
            raise StoreError(
                f"{str(folder)!r} lacks {missing} of {n_shards} shards; complete it by the call of "
                "gh.activations that began it."
            )
        return found

    def __len__(self) -> int:
        return int(self.manifest["tokens"])

    def __repr__(self) -> str:
        return f"Activations({', '.join(self.sites)}; {len(self):,} tokens, {self.manifest['dtype']})"

    def batches(self, size: int, *, seed: int | None = None) -> Iterator[ActivationBatch]:
        """Yield all tokens, `size` at a time: in order, or with a seed shuffled, within eight shards at a time."""
        check_count("size", size)
        order, at_once = np.arange(self.manifest["shards"]), 1 if seed is None else 8
        draw = None if seed is None else np.random.default_rng(seed)
        if draw is not None:
            draw.shuffle(order)
        left: dict[str, Tensor] = {}
        for start in range(0, len(order), at_once):
            group = [store.read_tensors(_path(self.folder, one)) for one in order[start : start + at_once]]
            parts = [*([left] if left else []), *group]
            joined = {name: torch.cat([one[name] for one in parts]) for name in (*TOKENS, *self.sites)}
            if draw is not None:
                mixed = torch.from_numpy(draw.permutation(len(joined["ids"])))
                joined = {name: one[mixed] for name, one in joined.items()}
            full = len(joined["ids"]) // size * size
            for at in range(0, full, size):
                yield self._batch({name: one[at : at + size] for name, one in joined.items()})
            left = {name: one[full:] for name, one in joined.items()} if full < len(joined["ids"]) else {}
        if left:
            yield self._batch(left)

    def _batch(self, tensors: dict[str, Tensor]) -> ActivationBatch:
        ids, documents, positions = (tensors[name] for name in TOKENS)
        return ActivationBatch(ids, documents, positions, {name: tensors[name] for name in self.sites})


class _Documents:
    """The documents of a corpus as one row of ids."""

    def __init__(self, corpus: Corpus | Sequence[Sequence[int]], model: Encoder | Decoder) -> None:
        digest = hashlib.sha256()
        if isinstance(corpus, Corpus):
            if corpus.kind != "text":
                raise InputError(
                    f"the corpus is of kind {corpus.kind}, but activations are of texts; prepare it as text."
                )
            check_tokenizer(model, corpus.tokenizer, "the tokenizer of the corpus")
            self.lengths: Ints = corpus.lengths[:, 0]
            self.read: Callable[[int, int], Ints] = corpus.read
            # A split has the shards of the whole.
            digest.update(json.dumps([corpus.manifest["shards"], int(self.lengths.sum()), len(corpus)]).encode())
            digest.update(self.read(0, min(SHARD_TOKENS, int(self.lengths.sum()))).tobytes())
        else:
            if not isinstance(corpus, Iterable) or any(isinstance(row, str | bytes) for row in corpus):
                raise InputError(
                    "the corpus is neither prepared nor lists of ids; prepare texts by gh.data.prepare, or encode "
                    "them by tok.encode_batch."
                )
            rows = [np.array(check_ids(row, model.spec.vocab_size), np.int64) for row in corpus]
            self.lengths = np.array([len(row) for row in rows], np.int64)
            ids = np.concatenate(rows) if rows else np.empty(0, np.int64)
            self.read = lambda start, stop: ids[start:stop]
            digest.update(self.lengths.tobytes() + ids.tobytes())
        self.fingerprint = digest.hexdigest()
        self.n_tokens = int(self.lengths.sum())
        if self.n_tokens == 0:
            raise InputError("the corpus has no tokens; give one with texts.")


@dataclass(frozen=True)
class _Shard:
    """Sequences, one after the other."""

    ids: Ints  # [tokens]
    documents: Ints  # [tokens]
    positions: Ints  # [tokens]
    lengths: Ints  # [sequences]


class _Plan:
    """Cuts documents into sequences, and puts these into shards."""

    def __init__(self, documents: _Documents, seq_len: int, shard_tokens: int) -> None:
        self.documents = documents
        counts = -(-documents.lengths // seq_len)
        of = np.repeat(np.arange(len(counts)), counts)  # the document of each sequence
        within = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
        self._lengths = np.minimum(seq_len, documents.lengths[of] - within)
        self._of, self._within = of, within
        starts = np.cumsum(self._lengths) - self._lengths
        # A sequence is in one shard: that in whose share of the tokens it starts.
        firsts = np.searchsorted(starts, np.arange(0, documents.n_tokens, shard_tokens))
        self._firsts = np.append(np.unique(firsts[firsts < len(of)]), len(of))  # the first sequence of each shard
        self._starts = np.append(starts, documents.n_tokens)
        self.n_shards = len(self._firsts) - 1

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first token of a shard, and the one after its last."""
        return int(self._starts[self._firsts[number]]), int(self._starts[self._firsts[number + 1]])

    def shard(self, number: int) -> _Shard:
        """Return a shard."""
        (start, stop), (first, last) = self.bounds(number), self._firsts[number : number + 2].tolist()
        lengths = self._lengths[first:last]
        inside = np.arange(stop - start) - np.repeat(self._starts[first:last] - start, lengths)
        return _Shard(
            self.documents.read(start, stop),
            np.repeat(self._of[first:last], lengths),
            inside + np.repeat(self._within[first:last], lengths),
            lengths,
        )


class _Pass:
    """Runs the model over a shard, sequences of similar length together."""

    def __init__(self, model: Encoder | Decoder, names: Sequence[str], dtype: torch.dtype, batch_tokens: int) -> None:
        self.model, self.names, self.dtype, self.batch_tokens = model, names, dtype, batch_tokens
        self.device = model.token_embedding.table.weight.device

    def __call__(self, shard: _Shard) -> _ComputedShard:
        ends = np.cumsum(shard.lengths)
        order = np.argsort(-shard.lengths, kind="stable")
        result = _ComputedShard(shard, self.dtype)
        at = 0
        while at < len(order):
            width = int(shard.lengths[order[at]])
            rows = order[at : at + max(1, self.batch_tokens // width)]
            at += len(rows)
            lengths = shard.lengths[rows]
            real = np.arange(width) < lengths[:, None]
            tokens = ((ends[rows] - lengths)[:, None] + np.arange(width))[real]  # where in the shard each belongs
            ids = np.zeros((len(rows), width), np.int64)
            ids[real] = shard.ids[tokens]
            padded = None if real.all() else self._on_device(lengths)
            with record(self.model, *self.names, stop=True) as seen:
                self.model(self._on_device(ids), lengths=padded)
            kept = slice(None) if padded is None else self._on_device(np.flatnonzero(real))
            values = {name: seen[name].movedim(seen.axes(name).index("position"), 1) for name in self.names}
            result.add(tokens, {name: one.flatten(0, 1)[kept] for name, one in values.items()})
        return result

    def _on_device(self, values: Ints) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class _ComputedShard:
    """The activations of a shard in the order of its batches, which a GPU may still compute and copy."""

    def __init__(self, shard: _Shard, dtype: torch.dtype) -> None:
        self._shard, self._dtype = shard, dtype
        self._values: dict[str, Tensor] = {}  # [tokens, ...]
        self._finite: dict[str, list[Tensor]] = {}
        self._tokens: list[Ints] = []  # of each batch, where in the shard its tokens belong
        self._copied: torch.cuda.Event | None = None

    def add(self, tokens: Ints, found: Mapping[str, Tensor]) -> None:
        """Copy the activations of a batch [tokens, ...], without waiting for a GPU."""
        first = sum(map(len, self._tokens))
        for name, values in found.items():
            if name not in self._values:
                shape = (len(self._shard.ids), *values.shape[1:])
                self._values[name] = torch.empty(shape, dtype=self._dtype, pin_memory=values.is_cuda)
            kept = values.to(self._dtype)
            self._finite.setdefault(name, []).append(kept.isfinite().all())
            self._values[name][first : first + len(kept)].copy_(kept, non_blocking=kept.is_cuda)
            if kept.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record()
        self._tokens.append(tokens)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the shard in the order of its tokens, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        for name, finite in self._finite.items():
            if not all(map(bool, finite)):
                raise InputError(
                    f"the activations at {name} have NaN, or numbers beyond {self._dtype}; choose "
                    "dtype='bfloat16', or check the model's weights."
                )
        shard, places = self._shard, np.concatenate(self._tokens)
        rows = shard.ids, shard.documents, shard.positions
        found = {name: torch.from_numpy(row) for name, row in zip(TOKENS, rows, strict=True)}
        if (np.diff(places) == 1).all():
            return found | self._values
        order = torch.from_numpy(np.argsort(places))
        return found | {name: values[order] for name, values in self._values.items()}


def _selections(model: Encoder | Decoder, names: str | Sequence[str]) -> list[Selection]:
    """Return the sites of names, each once; raise for one without positions."""
    found: dict[str, Selection] = {}
    for name in [names] if isinstance(names, str) else names:
        for one in select(model, name):
            if "position" not in one.axes or one.axes[0] != "batch":
                raise InputError(
                    f"{one.name} has no value for each token; name a site with positions, such as resid_post.0."
                )
            if one.index[one.site.axes.index("position")] != slice(None):
                raise InputError(f"{one.name} is of some positions alone; name it without a position.")
            found[one.name] = one
    if not found:
        raise InputError("no site was given; name at least one, such as resid_post.0.")
    return list(found.values())


def _begin(folder: Path, manifest: dict[str, Any]) -> Path:
    """Write the manifest of a new folder; raise for one of another call, or with other files."""
    if (folder / MANIFEST).exists():
        before = _read_manifest(folder)
        if different := sorted(name for name in manifest if before.get(name) != manifest[name]):
            raise StoreError(
                f"{str(folder)!r} has activations of another call, whose {' and '.join(different)} differ; choose "
                "another folder."
            )
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise StoreError(f"{str(folder)!r} has other files; choose a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / MANIFEST)
    return folder


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"there is no {str(folder / MANIFEST)!r}; write the folder by gh.activations.") from None
    except ValueError:
        raise StoreError(f"{str(folder / MANIFEST)!r} is corrupt; write the folder again.") from None
    match found:
        case {
            "format": int(version),
            "sites": list(sites),
            "dtype": str(),
            "tokens": int(),
            "shards": int(shards),
        } if version == FORMAT and shards >= 0 and all(isinstance(one, str) for one in sites):
            return found
    raise StoreError(f"{str(folder / MANIFEST)!r} is not of activations that this version reads; write them again.")


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def _write(path: Path, computed: _ComputedShard) -> None:
    """Write a shard, so that it is there whole or not at all."""
    temporary = path.with_suffix(".part")
    store.write_tensors(temporary, computed.tensors())
    temporary.replace(path)
