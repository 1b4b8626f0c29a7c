"""Fast encoding of whole corpora: gigatoken if it is installed, supports the tokenizer and gives the same ids."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.text.bpe.pretokenizer import CHECK_BYTES, batches, take_bytes
from glasshouse.text.gigatoken_backend import gigatoken, in_forked_child
from glasshouse.text.tokenizer_json import decoder_kinds

SLOW_BATCH = 2**20  # bytes; the tokenizers library allocates a few hundred per token until a batch is done

Ids = NDArray[np.uint32]
Ends = NDArray[np.int64]


class CorpusEncoder:
    """Encodes the texts of one corpus; the first 256 KiB are encoded by both backends, which must agree."""

    def __init__(self, fast: Any, slow: Callable[[list[bytes]], list[list[int]]], reason: str) -> None:  # noqa: ANN401
        self._fast, self._slow = fast, slow
        self.reason = reason  # why the fast backend is not used; empty if it is
        self._unchecked = CHECK_BYTES  # bytes still to be encoded by both backends

    @property
    def backend(self) -> str:
        """The library in use, and the reason if it is the slower one."""
        return f"tokenizers, as {self.reason}" if self.reason else "gigatoken"

    def encode(self, texts: list[bytes]) -> tuple[Ids, Ends]:
        """Return the concatenated ids of UTF-8 texts, and the end offset of each text."""
        if self._fast is not None and self._unchecked > 0 and (sample := take_bytes(texts, self._unchecked)):
            self._unchecked -= sum(map(len, sample))
            (fast, fast_ends), (slow, slow_ends) = self._run_fast(sample), self._run_slow(sample)
            if not (np.array_equal(fast, slow) and np.array_equal(fast_ends, slow_ends)):
                self._fast, self.reason = None, "gigatoken gives different ids for this text"
                warnings.warn(f"{self.reason}, so tokenizers is used.", stacklevel=3)
        return self._run_slow(texts) if self._fast is None else self._run_fast(texts)

    def _run_fast(self, texts: list[bytes]) -> tuple[Ids, Ends]:
        layout = self._fast.encode_batch(texts, parallel=not in_forked_child.is_set()).layout
        offsets = layout.offsets.data
        return layout.content.data[offsets[0] : offsets[-1]], offsets[1:] - offsets[0]

    def _run_slow(self, texts: list[bytes]) -> tuple[Ids, Ends]:
        ids = [np.array(one, np.uint32) for batch in batches(texts, SLOW_BATCH) for one in self._slow(batch)]
        return np.concatenate(ids) if ids else np.empty(0, np.uint32), np.cumsum([len(one) for one in ids])


def load_gigatoken(text: str) -> tuple[Any, str]:
    """Load a tokenizer.json into gigatoken, without its special tokens; else return None and the reason."""
    if gigatoken is None:
        return None, "gigatoken is not installed (pip install 'glasshouse[fast]')"
    tokenizer_json = json.loads(text)
    if tokenizer_json["model"].get("type") != "BPE" or decoder_kinds(tokenizer_json.get("decoder")) != ["ByteLevel"]:
        return None, "gigatoken is used for byte-level BPE only"
    if tokenizer_json.get("normalizer") or not all(
        token["special"] for token in tokenizer_json.get("added_tokens") or ()
    ):
        return None, "gigatoken is not used with a normalizer or with added tokens that are not special"
    try:
        return gigatoken.load_hf_json(json.dumps({**tokenizer_json, "added_tokens": [], "post_processor": None})), ""
    except Exception as error:  # the library raises several types
        return None, f"gigatoken cannot load this tokenizer ({error})"
