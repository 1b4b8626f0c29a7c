from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import pytest

import glasshouse as gh

ENGLISH = "\n".join(map(str, pydoc_data.topics.topics.values()))


@pytest.fixture(scope="session")
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=[ENGLISH[:300_000]], vocab_size=600)


@pytest.fixture
def texts(tmp_path: Path, tok: gh.Tokenizer) -> Callable[..., gh.data.Corpus]:
    """Make a corpus of texts, one file each."""

    def make(*texts: str, name: str = "corpus", tokenizer: gh.Tokenizer = tok) -> gh.data.Corpus:
        folder = tmp_path / f"{name}-texts"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number:05}.txt").write_text(text, encoding="utf-8")
        return gh.data.prepare(folder, tokenizer, tmp_path / name)

    return make
