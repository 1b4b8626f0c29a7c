"""Pooling config of sentence-transformers folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from glasshouse.errors import StoreError
from glasshouse.hub.model_folder import POOLING, ModelFolder, write_json
from glasshouse.spec import EncoderSpec, NoHead, Pooled, Pooling, Spec

MODES: dict[str, Pooling] = {"mean_tokens": "mean", "cls_token": "first", "lasttoken": "last"}


def read_pooling(folder: ModelFolder, s: Spec) -> Spec:
    """Add the pooling of a folder to the spec of an encoder without a head."""
    if not isinstance(s, EncoderSpec) or s.head != NoHead():
        return s
    table = folder.json(POOLING)
    if table is None:
        return s
    modes = [
        name.removeprefix("pooling_mode_") for name, on in table.items() if on is True and "pooling_mode_" in name
    ]
    if len(modes) != 1 or modes[0] not in MODES:
        given = ", ".join(modes[:9]) or "none"
        raise StoreError(
            f"{str(folder.path / POOLING)!r} has the pooling mode {given}, but only one of {', '.join(MODES)} is "
            "supported."
        )
    return replace(s, head=Pooled(MODES[modes[0]], normalize="Normalize" in _module_kinds(folder)))


def _module_kinds(folder: ModelFolder) -> list[str]:
    """Return the kinds of the modules that follow each other; raise StoreError for one that is not supported."""
    modules = folder.values("modules.json") or []
    known = {"Transformer", "Pooling", "Normalize"}
    listed = modules if isinstance(modules, list) else [modules]
    kinds = [str(one.get("type")).rpartition(".")[2] if isinstance(one, dict) else str(one) for one in listed]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise StoreError(
            f"{str(folder.path / 'modules.json')!r} has the module {unknown[0]}, which is not supported."
        )
    return kinds


def without_pooling(s: Spec) -> Spec:
    """Return the spec without a pooling head, if that head has no weights."""
    if isinstance(s, EncoderSpec) and isinstance(s.head, Pooled) and not s.head.dense:
        return replace(s, head=NoHead())
    return s


def write_pooling(folder: Path, s: Spec) -> None:
    """Write the pooling config and the list of modules for sentence-transformers."""
    if without_pooling(s) == s:
        return
    assert isinstance(s.head, Pooled)
    modes = {f"pooling_mode_{name}": meant == s.head.pooling for name, meant in MODES.items()}
    write_json(folder / POOLING, {"word_embedding_dimension": s.d_model, **modes})
    paths = [("Transformer", ""), ("Pooling", "1_Pooling"), *[("Normalize", "2_Normalize")] * s.head.normalize]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(paths)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": s.max_len, "do_lower_case": False})
