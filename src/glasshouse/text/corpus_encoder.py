"""Ids of many texts at once, for whole corpora: by gigatoken where it is there, able, and proves right."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.text.gigatoken_backend import gigatoken, in_forked_child
from glasshouse.text.pretokenizer import CHECK_BYTES, batches, take_bytes
from glasshouse.text.tokenizer_json import decoder_kinds

SLOW_BATCH = 2**20  # bytes; the tokenizers library keeps a few hundred for each token until a batch is done

Ids = NDArray[np.uint32]
Ends = NDArray[np.int64]


class CorpusEncoder:
    """Encodes the texts of one corpus; the first quarter megabyte is encoded twice, and the two have to agree."""

    def __init__(self, fast: Any, slow: Callable[[list[bytes]], list[list[int]]], reason: str) -> None:  # noqa: ANN401
        self._fast, self._slow = fast, slow
        self.reason = reason  # why the fast engine is not used; empty where it is
        self._unproved = CHECK_BYTES  # bytes

    @property
    def backend(self) -> str:
        """Which library gives the ids, and why it is the slower one."""
        return f"tokenizers, as {self.reason}" if self.reason else "gigatoken"

    def encode(self, texts: list[bytes]) -> tuple[Ids, Ends]:
        """Return the ids of texts in UTF-8, one after another, and where those of each text end."""
        if self._fast is not None and self._unproved > 0 and (sample := take_bytes(texts, self._unproved)):
            self._unproved -= sum(map(len, sample))
            (fast, fast_ends), (slow, slow_ends) = self._run_fast(sample), self._run_slow(sample)
            if not (np.array_equal(fast, slow) and np.array_equal(fast_ends, slow_ends)):
                self._fast, self.reason = None, "gigatoken gives other ids for this text"
                warnings.warn(f"{self.reason}, so tokenizers is used.", stacklevel=3)
        return self._run_slow(texts) if self._fast is None else self._run_fast(texts)

    def _run_fast(self, texts: list[bytes]) -> tuple[Ids, Ends]:
        layout = self._fast.encode_batch(texts, parallel=not in_forked_child.is_set()).layout
        offsets = layout.offsets.data
        return layout.content.data[offsets[0] : offsets[-1]], offsets[1:] - offsets[0]

    def _run_slow(self, texts: list[bytes]) -> tuple[Ids, Ends]:
        rows = [np.array(row, np.uint32) for batch in batches(texts, SLOW_BATCH) for row in self._slow(batch)]
        return np.concatenate(rows) if rows else np.empty(0, np.uint32), np.cumsum([len(row) for row in rows])


def load_gigatoken(text: str) -> tuple[Any, str]:
    """Return gigatoken's twin of a tokenizer.json, without its special tokens; or None, and why there is none."""
    if gigatoken is None:
        return None, "gigatoken is not installed (pip install 'glasshouse[fast]')"
    document = json.loads(text)
    if document["model"].get("type") != "BPE" or decoder_kinds(document.get("decoder")) != ["ByteLevel"]:
        return None, "gigatoken is used for byte-level BPE alone"
    if document.get("normalizer") or not all(token["special"] for token in document.get("added_tokens") or ()):
        return None, "gigatoken is not used where a text is changed or searched for tokens before it is split"
    try:
        return gigatoken.load_hf_json(json.dumps({**document, "added_tokens": [], "post_processor": None})), ""
    except Exception as error:  # a young library, with errors of its own
        return None, f"gigatoken cannot use this tokenizer ({error})"
