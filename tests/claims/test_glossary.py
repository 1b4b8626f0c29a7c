"""The glossary: in order, short, each name once; and the sections that statements name are those of the paper."""

from __future__ import annotations

import re

import pytest

from glasshouse import notes
from glasshouse.page.views.notes.view import _card

PAPER = {
    "1 Introduction",
    "2 Background",
    "3 Model Architecture",
    "3.1 Encoder and Decoder Stacks",
    "3.2 Attention",
    "3.2.1 Scaled Dot-Product Attention",
    "3.2.2 Multi-Head Attention",
    "3.2.3 Applications of Attention in our Model",
    "3.3 Position-wise Feed-Forward Networks",
    "3.4 Embeddings and Softmax",
    "3.5 Positional Encoding",
    "4 Why Self-Attention",
    "5 Training",
    "5.1 Training Data and Batching",
    "5.2 Hardware and Schedule",
    "5.3 Optimizer",
    "5.4 Regularization",
    "6 Results",
    "6.1 Machine Translation",
    "6.2 Model Variations",
    "6.3 English Constituency Parsing",
    "7 Conclusion",
}

CHAPTERS = {  # of the textbook, with the sections of one that are named
    "Words and Tokens": (),
    "Embeddings": (),
    "Large Language Models": (),
    "Transformers": (
        "Attention",
        "Transformer Blocks",
        "Parallelizing computation using a single matrix X",
        "The input: embeddings for token and position",
        "The Language Modeling Head",
        "Interpreting the Transformer",
    ),
    "Masked Language Models": ("Bidirectional Transformer Encoders",),
    "Machine Translation": (),
    "RNNs and LSTMs": (),
}


def test_terms_are_in_alphabetical_order_and_named_once() -> None:
    terms = [entry.term for entry in notes.glossary()]
    assert terms == sorted(terms, key=str.casefold)
    assert 50 <= len(terms) <= 80
    names = [name.casefold() for entry in notes.glossary() for name in (entry.term, *entry.also)]
    assert len(names) == len({*names})
    assert len({entry.anchor for entry in notes.glossary()}) == len(terms)


@pytest.mark.parametrize("entry", notes.glossary(), ids=lambda entry: entry.anchor)
def test_an_entry_is_one_to_three_sentences(entry: notes.Entry) -> None:
    plain = re.sub(r"`[^`]*`", "code", entry.text)
    assert re.fullmatch(r"[A-Z][^.?!]+\.( [A-Z][^.?!]+\.){0,2}", re.sub(r"\d\.\d", "0", plain))
    assert "  " not in entry.text


def test_what_to_read_names_sections_that_there_are_and_reaches_the_page() -> None:
    sections = {f"Vaswani et al. 2017, {section}" for section in PAPER}
    sections |= {f"Jurafsky & Martin, {chapter}" for chapter in CHAPTERS}
    sections |= {f"Jurafsky & Martin, {chapter}: {one}" for chapter, inner in CHAPTERS.items() for one in inner}
    for part in notes.parts():
        for one in part.statements:
            assert _card(part, one)["read"] == list(one.read)
            assert {*one.read} <= sections
    assert notes.statement("A3").read[0] == "Vaswani et al. 2017, 3.2.1 Scaled Dot-Product Attention"
