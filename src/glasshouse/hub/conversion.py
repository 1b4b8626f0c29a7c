"""Conversion of a saved model to a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from glasshouse.hub.remote import resolve_folder
from glasshouse.hub.serialization import export, load
from glasshouse.text import Tokenizer


def convert(
    path_or_repo_id: str | Path, folder: str | Path, *, revision: str | None = None, ignore: Collection[str] = ()
) -> tuple[str, Tokenizer | None]:
    """Export a saved model to a folder that transformers loads; return its model_type and tokenizer.

    The weights of a sharded checkpoint are put together one by one, so that memory is needed for one file of the new
    folder, at most 5 GB, and not for the model.

    >>> import tempfile, glasshouse as gh
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gh.save(gh.build(gh.preset("tiny-decoder")), None, f"{folder}/model")
    ...     convert(f"{folder}/model", f"{folder}/published")
    ('qwen3', None)
    """
    source = resolve_folder(path_or_repo_id, revision)
    sharded = source.sharded_weights()
    model, tok = load(source.path, device="cpu" if sharded is None else "meta", dtype="stored", ignore=ignore)
    return export(model, tok, folder, read=None if sharded is None else sharded.__getitem__), tok
