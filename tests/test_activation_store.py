"""Activations of a corpus: each is that of its sequence alone, whatever shares its pass; a stopped call goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st

import glasshouse as gh
from glasshouse import activation_store
from glasshouse.activation_store import Activations

SITES = ["resid_post.0", "z.1", "hidden.1", "ffn_out.*"]


def make(preset: str = "tiny-decoder", **more: object) -> Any:  # noqa: ANN401
    torch.manual_seed(0)
    return gh.build(gh.preset(preset, init={"kind": "normal", "std": 0.2}, **more), dtype=torch.float64).eval()


def draw(lengths: list[int]) -> list[list[int]]:
    source = np.random.default_rng(3)
    return [source.integers(0, 250, length).tolist() for length in lengths]


def assert_equal_alone(model: Any, rows: list[list[int]], found: Activations, seq_len: int) -> None:  # noqa: ANN401
    """Compare with `gh.record` of each sequence by itself."""
    tokens = {name: torch.cat([getattr(batch, name) for batch in found.batches(7)]) for name in ("ids", "documents")}
    assert tokens["ids"].tolist() == [one for row in rows for one in row]
    assert tokens["documents"].tolist() == [number for number, row in enumerate(rows) for _ in row]
    positions = torch.cat([batch.positions for batch in found.batches(5)])
    assert positions.tolist() == [position for row in rows for position in range(len(row))]
    pieces = [row[at : at + seq_len] for row in rows for at in range(0, len(row), seq_len)]
    for site in found.sites:
        expected = []
        for piece in pieces:
            with torch.no_grad(), gh.record(model, site) as seen:
                model(torch.tensor([piece]))
            expected.append(seen[site].movedim(seen.axes(site).index("position"), 1)[0])
        values = torch.cat([batch[site] for batch in found.batches(7)])
        # Sums in float64, in another order; stored in float32.
        assert torch.allclose(values.double(), torch.cat(expected), rtol=2**-23, atol=1e-9), site


@pytest.mark.parametrize("preset", ["tiny-decoder", "tiny-encoder"])
@settings(max_examples=up_to(15), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any),
    seq_len=st.integers(1, 16),
    batch_tokens=st.integers(1, 60),
    shard_tokens=st.integers(1, 50),
)
def test_every_value_is_that_of_its_sequence_alone(
    tmp_path_factory: pytest.TempPathFactory,
    preset: str,
    lengths: list[int],
    seq_len: int,
    batch_tokens: int,
    shard_tokens: int,
) -> None:
    model, rows, out = make(preset), draw(lengths), tmp_path_factory.mktemp("out") / "activations"
    sizes = {"seq_len": seq_len, "batch_tokens": batch_tokens, "shard_tokens": shard_tokens}
    found = gh.activations(model, rows, SITES, out, dtype="float32", **sizes)
    assert found.sites == ("resid_post.0", "z.1", "hidden.1", "ffn_out.0", "ffn_out.1")
    assert len(found) == sum(lengths)
    assert_equal_alone(model, rows, found, seq_len)


def test_a_prepared_corpus_and_its_splits(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    for name, text in (
        ("a", "to be or not to be, that is the question"),
        ("b", "whether"),
        ("c", "'tis nobler " * 9),
    ):
        (tmp_path / f"{name}.txt").write_text(text)
    corpus = gh.data.prepare(str(tmp_path), tok, tmp_path / "ids")
    model = make(vocab_size=len(tok))
    for number, part in enumerate((corpus, *corpus.split(0.3))):
        rows = [part.item(item)[0].tolist() for item in range(len(part))]
        found = gh.activations(
            model, part, "resid_post.1", tmp_path / str(number), dtype="float32", seq_len=10, shard_tokens=30
        )
        assert_equal_alone(model, rows, found, 10)
    with pytest.raises(gh.InputError, match="the tokenizer of the corpus has 263 tokens, but vocab_size is 256"):
        gh.activations(make(), corpus, "resid_post.1", tmp_path / "other")
    with pytest.raises(gh.StoreError, match="of another call, whose corpus and shards and tokens differ"):
        gh.activations(model, corpus, "resid_post.1", tmp_path / "1", dtype="float32", seq_len=10, shard_tokens=30)


def test_a_stopped_call_goes_on_with_its_last_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, out = make(), draw([30] * 8), tmp_path / "out"
    sizes = {"seq_len": 30, "shard_tokens": 60}
    whole = gh.activations(model, rows, "resid_post.0", tmp_path / "whole", **sizes)
    computed, write = [], activation_store._write

    def killed(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        computed.append(path.name)
        if len(computed) == 3:
            path.with_suffix(".part").write_bytes(b"half of a sha")
            raise KeyboardInterrupt
        write(path, tensors)

    monkeypatch.setattr(activation_store, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        gh.activations(model, rows, "resid_post.0", out, **sizes)
    with pytest.raises(gh.StoreError, match=r"lacks 2 of 4 shards; complete it"):
        Activations.open(out)
    done: list[tuple[int, int]] = []
    resumed = gh.activations(
        model, rows, "resid_post.0", out, **sizes, on_progress=lambda *tokens: done.append(tokens)
    )
    assert computed[3:] == ["00002.safetensors", "00003.safetensors"]
    assert done == [(60, 240), (120, 240), (180, 240), (240, 240)]
    for a, b in zip(whole.batches(50), resumed.batches(50), strict=True):
        assert a["resid_post.0"].equal(b["resid_post.0"])
        assert a["resid_post.0"].dtype == torch.bfloat16


def test_shuffled_batches_have_every_token_once(tmp_path: Path) -> None:
    rows = [[number] * 3 for number in range(100)]
    found = gh.activations(make(), rows, "resid_post.0", tmp_path / "out", shard_tokens=20)
    orders = []
    for seed in (0, 0, 1):
        batches = list(found.batches(32, seed=seed))
        assert [len(batch) for batch in batches] == [32] * 9 + [12]
        orders.append(
            [
                (int(document), int(position))
                for batch in batches
                for document, position in zip(batch.documents, batch.positions, strict=True)
            ]
        )
        assert sorted(orders[-1]) == [(d, p) for d in range(100) for p in range(3)]
        for batch in batches:
            assert batch.ids.tolist() == batch.documents.tolist()
    assert orders[0] == orders[1] != orders[2]


def test_what_is_refused(tmp_path: Path) -> None:
    model, rows, out = make(), [[1, 2, 3]], tmp_path / "out"
    for sites, words in (
        ("pattern.0", "has no value for each token"),
        ("resid_post.0[position=0]", "some positions alone|has no value for each token"),
        ([], "no site was given"),
        ("nowhere", "the model has no site 'nowhere'"),
    ):
        with pytest.raises(gh.InputError, match=words):
            gh.activations(model, rows, sites, out)
    for corpus, words in (
        (["a text"], "neither prepared nor lists of ids"),
        ("a text", "neither prepared nor lists of ids"),
        (None, "neither prepared nor lists of ids"),
        ([1, 2], "must be a text or a list of ids"),
        ([[1, 256]], "contains 256, but ids are whole numbers from 0 to vocab_size - 1 = 255"),
        ([[1.5]], "contains 1.5"),
    ):
        with pytest.raises(gh.InputError, match=words):
            gh.activations(model, corpus, "resid_post.0", out)  # type: ignore[arg-type]
    with pytest.raises(gh.InputError, match="dtype is 'int8'"):
        gh.activations(model, rows, "resid_post.0", out, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(gh.InputError, match="the corpus has no tokens"):
        gh.activations(model, [[]], "resid_post.0", out)
    with pytest.raises(gh.InputError, match="Seq2Seq, but activations are of encoders and decoders"):
        gh.activations(make("tiny-seq2seq"), rows, "encoder.resid_post.0", out)
    learned = make(position="learned", max_len=16)
    with pytest.raises(gh.InputError, match="seq_len is 17, but the model has 16 positions"):
        gh.activations(learned, rows, "resid_post.0", out, seq_len=17)
    assert not out.exists()
    big = make()
    big.token_embedding.table.weight.data *= 1e6
    with pytest.raises(gh.InputError, match=r"beyond torch.float16; choose dtype='bfloat16'"):
        gh.activations(big, rows, "resid_pre.0", out, dtype="float16")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    with pytest.raises(gh.StoreError, match="has other files; choose a new folder"):
        gh.activations(model, rows, "resid_post.0", tmp_path / "mine")


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 99}', "null"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, damage: str) -> None:
    gh.activations(make(), [[1, 2]], "resid_post.0", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["tokens"] == 2
    (tmp_path / "out" / "manifest.json").write_text(damage)
    with pytest.raises(gh.StoreError, match=r"manifest.json' is (corrupt|not of activations)"):
        Activations.open(tmp_path / "out")
    with pytest.raises(gh.StoreError, match=r"there is no .*manifest.json"):
        Activations.open(tmp_path)
