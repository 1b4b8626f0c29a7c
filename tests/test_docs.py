"""What the documents promise about themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["benchmarks.md", "performance.md"])
def test_every_section_of_figures_says_which_command_and_which_day(name: str) -> None:
    _, *sections = re.split(r"^## ", (DOCS / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections
    for section in sections:
        title = section.partition("\n")[0]
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", section), f"{name}, {title!r}: no date"
        assert re.search(r"`[^`]*(make|python|glasshouse|benchmarks/)[^`]*`|script outside", section), (
            f"{title!r}: no command"
        )


@pytest.mark.parametrize(
    ("term", "page"),
    [
        ("gradient accumulation", "README.md"),
        ("exponential moving average", "README.md"),
        ("activation checkpointing", "README.md"),
        ("mixed precision", "README.md"),
        ("MFU", "README.md"),
        ("label smoothing", "README.md"),
        ("LoRA", "README.md"),
        ("sequence packing", "README.md"),
        ("KV cache", "README.md"),
        ("continuous batching", "README.md"),
        ("speculative decoding", "README.md"),
        ("beam search", "README.md"),
        ("logit lens", "docs/inspection.md"),
        ("activation patching", "docs/inspection.md"),
        ("ablation", "docs/inspection.md"),
        ("logit attribution", "docs/inspection.md"),
        ("induction", "docs/inspection.md"),
        ("residual stream", "docs/look.md"),
        ("prefix caching", "docs/decisions.md"),
        ("chunked prefill", "docs/performance.md"),
        ("quantiz", "docs/performance.md"),
        ("Muon", "docs/decisions.md"),
        ("grouped-query", "docs/claims.md"),
        ("attention sink", "docs/claims.md"),
    ],
)
def test_a_search_for_a_term_finds_the_page_where_it_belongs(term: str, page: str) -> None:
    text = " ".join((DOCS.parent / page).read_text(encoding="utf-8").split())
    assert term.lower() in text.lower()
