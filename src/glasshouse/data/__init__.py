"""Datasets: files to ids on disk to batches, which a global sample counter identifies.

Names are imported lazily: preparing a corpus does not need torch, only batches do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasshouse.data.batch import Batch as Batch
    from glasshouse.data.batch import PairBatch as PairBatch
    from glasshouse.data.batch import PreferenceBatch as PreferenceBatch
    from glasshouse.data.batches import Batches as Batches
    from glasshouse.data.batches import Dataset as Dataset
    from glasshouse.data.builtin import builtin_dataset as builtin_dataset
    from glasshouse.data.builtin import builtin_datasets as builtin_datasets
    from glasshouse.data.builtin import is_builtin as is_builtin
    from glasshouse.data.corpus import Corpus as Corpus
    from glasshouse.data.item_datasets import ChatDataset as ChatDataset
    from glasshouse.data.item_datasets import ClassificationDataset as ClassificationDataset
    from glasshouse.data.item_datasets import ContrastiveDataset as ContrastiveDataset
    from glasshouse.data.item_datasets import PreferenceDataset as PreferenceDataset
    from glasshouse.data.item_datasets import Seq2SeqDataset as Seq2SeqDataset
    from glasshouse.data.item_datasets import TokenClassificationDataset as TokenClassificationDataset
    from glasshouse.data.map_dataset import MapDataset as MapDataset
    from glasshouse.data.parts import join as join
    from glasshouse.data.parts import part_folder as part_folder
    from glasshouse.data.preparation import prepare as prepare
    from glasshouse.data.text_datasets import CausalLMDataset as CausalLMDataset
    from glasshouse.data.text_datasets import MaskedLMDataset as MaskedLMDataset

_EXPORTS = {
    "Batch": "batch",
    "Batches": "batches",
    "CausalLMDataset": "text_datasets",
    "ChatDataset": "item_datasets",
    "ClassificationDataset": "item_datasets",
    "ContrastiveDataset": "item_datasets",
    "Corpus": "corpus",
    "Dataset": "batches",
    "MapDataset": "map_dataset",
    "MaskedLMDataset": "text_datasets",
    "PairBatch": "batch",
    "PreferenceBatch": "batch",
    "PreferenceDataset": "item_datasets",
    "Seq2SeqDataset": "item_datasets",
    "TokenClassificationDataset": "item_datasets",
    "builtin_dataset": "builtin",
    "builtin_datasets": "builtin",
    "is_builtin": "builtin",
    "join": "parts",
    "part_folder": "parts",
    "prepare": "preparation",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'glasshouse.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"glasshouse.data.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
