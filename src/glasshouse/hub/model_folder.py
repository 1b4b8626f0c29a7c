"""Read a model folder from an untrusted source: regular files inside it, of bounded size, and no code."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.tensor_shards import SavedTensors, read_shards, shard_names
from glasshouse.models.generation_config import FILE as GENERATION_CONFIG
from glasshouse.text import Tokenizer
from glasshouse.text.conversion.byte_level import MERGES
from glasshouse.text.conversion.folder import ADDED_TOKENS, UnsupportedTokenizerError
from glasshouse.text.conversion.tokenizer_class import OF_FILE

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *(*OF_FILE, MERGES, "target.spm", ADDED_TOKENS),  # where there is no tokenizer.json
)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL_STEM = "model"  # of the names of shards that processes wrote
POOLING = "1_Pooling/config.json"
VERIFIED = "verified.json"
CHECKSUMS = "checksums.json"  # of the weights files
EXTRA_FILES = (GENERATION_CONFIG, "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")

JSON_LIMIT = 32 * 2**20
SHARD_BYTES = 5 * 10**9
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
RUNS_CODE = ("auto_map", "custom_pipelines", "trust_remote_code")


class ModelFolder:
    """The folder of a model from an untrusted source."""

    def __init__(self, path: Path) -> None:
        self.path = path
        real = path.resolve()
        # A snapshot in the cache of huggingface_hub consists of symlinks to blobs.
        cached = real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
        self.roots = (real, real.parents[1] / "blobs") if cached else (real,)

    def file(self, name: str) -> Path | None:
        """Return the path of a file, None if there is none; raise StoreError if it is outside the folder."""
        path = self.path / name
        if not os.path.lexists(path):
            return None
        try:
            real = path.resolve()
        except (OSError, RuntimeError):
            raise StoreError(f"{str(path)!r} is a broken symlink; replace it with the file itself.") from None
        if not any(real.is_relative_to(root) for root in self.roots):
            raise StoreError(
                f"{str(path)!r} resolves to {str(real)!r}, outside its folder; replace it with the file itself."
            )
        if not real.is_file():
            raise StoreError(f"{str(path)!r} is not a file; restore it or download the folder again.")
        return path

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file, None if there is no file."""
        if self.file(name) is None:
            return None
        table, path = self.values(name), str(self.path / name)
        if not isinstance(table, dict):
            raise StoreError(f"{path!r} does not contain a JSON object; download it again.")
        for key in RUNS_CODE:
            if table.get(key):
                raise StoreError(f"{path!r} requires custom code ({key}); glasshouse runs no code from a model.")
        return table

    def values(self, name: str) -> object:
        """Return the contents of a JSON file, None if there is no file."""
        path = self.file(name)
        if path is None:
            return None
        if (size := path.stat().st_size) > JSON_LIMIT:
            raise StoreError(f"{str(path)!r} has {size} bytes, more than any such file needs; do not use it.")
        try:
            return json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_int)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{str(path)!r} is not valid JSON ({str(error)[:80]}); download it again.") from None

    def tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer, None if there is none; warn if there is one of a class that is not supported."""
        present = [name for name in TOKENIZER_FILES if self.file(name)]
        if not {TOKENIZER, *OF_FILE}.intersection(present):
            return None
        try:
            return Tokenizer.load(self.path)
        except UnsupportedTokenizerError as error:
            warnings.warn(f"{error} The model loads without a tokenizer.", stacklevel=3)
            return None

    def sharded_weights(self) -> SavedTensors | None:
        """Memory-map the weights of a sharded checkpoint, None if they are not sharded by process."""
        names = shard_names(self.path, MODEL_STEM)
        return read_shards(self.file(name) or self.path / name for name in names) if names else None

    def tensors(self, *, meta: bool = False) -> dict[str, torch.Tensor]:
        """Memory-map all weights: one file, the shards of an index, or put together from the shards of processes.

        With `meta`, what would have to be put together is on the device meta, without data.
        """
        if whole := self.file(WEIGHTS):
            return store.read_tensors(whole)
        if (saved := self.sharded_weights()) is not None:
            return saved.on_meta() if meta else dict(saved)
        index = self.json(INDEX)
        if index is None:
            raise self._no_weights()
        index_path = str(self.path / INDEX)
        weight_map = index.get("weight_map")
        if (
            not weight_map
            or not isinstance(weight_map, dict)
            or not all(isinstance(name, str) for name in weight_map.values())
        ):
            raise StoreError(f"{index_path!r} has no weight_map from tensors to files; download it again.")
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted(set(weight_map.values())):
            if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise StoreError(
                    f"{index_path!r} lists the file {name!r}, which is not a safetensors file of the same folder."
                )
            shard = self.file(name)
            if shard is None:
                raise StoreError(f"{index_path!r} lists {name}, which is missing; download it again.")
            shard_tensors = store.read_tensors(shard)
            for tensor in shard_tensors:
                if weight_map.get(tensor) != name:
                    raise StoreError(
                        f"{str(shard)!r} contains {tensor}, which {INDEX} does not list there; download both again."
                    )
            tensors |= shard_tensors
        if missing := sorted(set(weight_map) - set(tensors)):
            raise StoreError(f"{index_path!r} lists {missing[0]}, which no file contains; download the folder again.")
        return tensors

    @property
    def weights(self) -> str:
        """The path for error messages about the weights as a whole."""
        names = [WEIGHTS, *shard_names(self.path, MODEL_STEM)]
        return str(self.path / next((name for name in names if (self.path / name).exists()), INDEX))

    def _no_weights(self) -> StoreError:
        for path in sorted(self.path.iterdir()):
            if path.suffix in PICKLES:
                return StoreError(
                    f"{str(path)!r} may run code when it is loaded, so only safetensors files are supported; convert "
                    "it with transformers, which loads it as plain data: use the class that config.json names, "
                    "from_pretrained(...) and save_pretrained(...)."
                )
        return StoreError(
            f"{str(self.path)!r} has neither {WEIGHTS} nor {INDEX}; give a folder with both config and weights."
        )


def _parse_int(text: str) -> int:
    """Parse an integer; one above 64 bits, which no setting needs, would overflow later."""
    if len(text) > 19:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def write_weights(folder: Path, sizes: Mapping[str, int], read: Callable[[str], torch.Tensor]) -> None:
    """Write weights, given their sizes in bytes, as one file, or above 5 GB as shards with an index.

    Of what `read` returns, only one file is in memory at a time.
    """
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
        total += size
    if len(shards) == 1:
        store.write_tensors(folder / WEIGHTS, {name: read(name) for name in sizes})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        store.write_tensors(folder / name, {tensor: read(tensor) for tensor in shard})
        weight_map |= dict.fromkeys(shard, name)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: object) -> None:
    """Write plain values as indented JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
