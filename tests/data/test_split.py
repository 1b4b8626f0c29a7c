"""A corpus in two: nothing is lost, nothing is in both, and each part is a corpus like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import glasshouse as gh
from glasshouse import InputError
from glasshouse.data import corpus as corpus_module
from glasshouse.data import preparation
from glasshouse.objectives import CausalLM, Seq2SeqLM

from .conftest import ENGLISH

Texts = Callable[..., gh.data.Corpus]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_the_end_of_running_text_is_held_out(texts: Texts, tok: gh.Tokenizer, share: float) -> None:
    corpus = texts(*(ENGLISH[at : at + 300] for at in range(0, 3000, 300)))
    everything = corpus.read(0, corpus.n_tokens)
    first, second = corpus.split(share)
    size = len(tok.decode_bytes(everything)) - 10 * len(tok.id_to_token(corpus.manifest["end_id"]))
    held = sum(len(tok.decode_bytes([one])) for one in second.read(0, second.n_tokens) if one not in tok.special_ids)
    assert 0 <= round(share * size) - held < max(len(tok.decode_bytes([one])) for one in tok.ids)
    both = np.concatenate([first.read(0, first.n_tokens), second.read(0, second.n_tokens)])
    assert both.tolist() == everything.tolist()
    for part, offset in ((first, 0), (second, first.n_tokens)):
        items = [part.item(number)[0] for number in range(len(part))]
        assert np.concatenate(items).tolist() == part.read(0, part.n_tokens).tolist()
        assert part.lengths.sum() == part.n_tokens
        for place in range(0, part.n_tokens, 7):  # a place has the source it has in the whole
            here = part.source_name(part.item_at(place))
            assert here == corpus.source_name(corpus.item_at(place + offset))
        with pytest.raises(InputError, match="were requested"):
            part.read(0, part.n_tokens + 1)


def test_the_split_of_text_is_the_same_whatever_the_tokenizer(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the token that lies across: by bytes, found in stretches, it comes after so many of them."""
    monkeypatch.setattr(corpus_module, "BLOCK_IDS", 64)
    sources = [ENGLISH[at : at + 300] for at in range(0, 3000, 300)]
    everything = "".join(sources).encode()
    wanted = len(everything) - round(0.3 * len(everything))
    for size in (263, 400, 600):
        tok = gh.Tokenizer.train(texts=[ENGLISH[:50_000]], vocab_size=size)
        parts = texts(*sources, name=f"by-{size}", tokenizer=tok).split(0.3)
        first, second = (tok.decode(part.read(0, part.n_tokens), skip_special_tokens=True).encode() for part in parts)
        assert first + second == everything
        last = tok.decode_bytes(parts[0].read(parts[0].n_tokens - 1, parts[0].n_tokens))
        assert len(first) - len(last) < wanted <= len(first)


def test_other_tokens_than_bytes_are_shared_out_by_number(tmp_path: Path, texts: Texts) -> None:
    words = {"type": "WordLevel", "vocab": {"[SEP]": 0, "a": 1, "longer": 2}, "unk_token": "[SEP]"}
    file = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    tok = gh.Tokenizer.from_json(json.dumps(file), {"sep_token": "[SEP]"})
    first, second = texts("a " * 50 + "longer " * 49, tokenizer=tok).split(0.25)
    assert (first.n_tokens, second.n_tokens) == (75, 25)


def test_a_part_can_be_split_again(texts: Texts) -> None:
    corpus = texts(ENGLISH[:1000], ENGLISH[1000:2000])
    everything = corpus.read(0, corpus.n_tokens).tolist()
    first, second = corpus.split(0.5)
    parts = [*first.split(0.5), *second.split(0.5)]
    assert [number for part in parts for number in part.read(0, part.n_tokens).tolist()] == everything


@pytest.fixture
def pairs(tmp_path: Path, tok: gh.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> gh.data.Corpus:
    monkeypatch.setattr(preparation, "BATCH_RECORDS", 8)  # records at a time, and so shards
    lines = [f"{number}\t{'x' * (number % 7)}{number}" for number in range(50)]
    (tmp_path / "a.tsv").write_text("source\ttarget\n" + "\n".join(lines) + "\n")
    return gh.data.prepare(tmp_path / "a.tsv", tok, tmp_path / "ids", kind="pairs", shard_tokens=40)


def test_items_here_and_there_are_held_out(pairs: gh.data.Corpus) -> None:
    first, second = pairs.split(0.1)
    assert (len(first), len(second)) == (45, 5)

    def texts(corpus: gh.data.Corpus) -> list[list[list[int]]]:
        return [[part.tolist() for part in corpus.item(number)] for number in range(len(corpus))]

    assert sorted(texts(first) + texts(second)) == sorted(texts(pairs))
    places = [texts(pairs).index(one) for one in texts(second)]
    assert len({number % 2 for number in places}) == len({number // 25 for number in places}) == 2  # no pattern
    assert first.n_tokens + second.n_tokens == pairs.n_tokens
    inner = [texts(part) for part in first.split(0.5)]
    assert sorted(inner[0] + inner[1]) == sorted(texts(first))
    with pytest.raises(InputError, match="item 5"):
        second.item(5)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_is_between_0_and_1(pairs: gh.data.Corpus, share: float) -> None:
    with pytest.raises(InputError, match="val_fraction"):
        pairs.split(share)


@pytest.mark.parametrize("most", [None, 3])
def test_items_gathered_are_items_one_by_one(pairs: gh.data.Corpus, most: int | None) -> None:
    assert len(pairs.manifest["shards"]) > 2
    for corpus in (pairs, *pairs.split(0.3)):
        numbers = [7, 0, 7, len(corpus) - 1]
        for part in (0, 1):
            expected = [corpus.item(number)[part][:most].tolist() for number in numbers]
            ids, lengths = corpus.gather(numbers, part, most)
            assert ids.tolist() == [one for ids in expected for one in ids]
            assert lengths.tolist() == [len(one) for one in expected]


def test_rows_make_about_the_tokens_that_are_asked_for(pairs: gh.data.Corpus, texts: Texts) -> None:
    mean = pairs.lengths.sum(1).mean()
    assert Seq2SeqLM().samples_for_tokens(pairs, 100, seq_len=64) == round(100 / mean)
    assert Seq2SeqLM().samples_for_tokens(pairs, 10**6, seq_len=64) == 50  # there are no more
    short = pairs.lengths[(pairs.lengths < 5).all(1)]
    assert Seq2SeqLM().samples_for_tokens(pairs, 100, seq_len=5) == min(len(short), round(100 / short.sum(1).mean()))
    assert CausalLM().samples_for_tokens(texts(ENGLISH[:500]), 100, seq_len=32) == 3
    assert Seq2SeqLM().samples_for_tokens(pairs, 1, seq_len=64) == 1


def test_rows_of_one_document_come_without_a_mask(texts: Texts) -> None:
    corpus = texts(ENGLISH[:4000], ENGLISH[4000:8000])
    samples = gh.data.CausalLMDataset(corpus, 16)
    end = corpus.manifest["end_id"]
    for number in range(len(samples)):
        batch = samples.batch([number])
        assert (batch.documents is None) == (end not in batch.ids[0, 1:].tolist())
