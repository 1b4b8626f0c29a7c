"""The models that come with the package: what they are, what they can do, and that they need no network."""

from __future__ import annotations

import lzma
import re
import socket
from pathlib import Path

import pytest
import torch

import glasshouse as gh
from glasshouse import pretrained
from glasshouse.data.builtin import dates, stdlib

RECIPES = {"python-3m": "python-3m", "dates-1m": "dates", "english-4m": "english-4m"}
# How a reader might go on; a model that knows no English finds none of them.
SENTENCES = {
    "The cat sat on the": "ground floor table chair bed grass sofa wall roof mat rug hearth bench stool",
    "Once upon a time there was a": "little man king poor young boy girl great woman old queen certain prince fox",
    "She opened the door and": "saw went looked came ran walked let found said stood entered stepped",
    "The king was very": "fond happy angry glad old sorry sad pleased much rich good proud kind ill",
    "The little boy ran to his": "father mother house room home bed brother sister grandfather grandmother",
    "He took her hand and": "kissed held pressed said led looked drew went walked began smiled",
    "In the morning they went to the": "house forest town village king church river palace wood castle door garden",
    '"Come here," said the': "old little man king woman wolf boy queen young fox mother father bear prince",
    "The old man looked at the": "man boy girl sea king door window old young little other fire ground woman",
    "It was a dark night, and the": "wind moon sky stars rain light sun snow storm night trees lamp",
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a bundled model must not open a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", pretrained.names())
def test_a_model_has_the_settings_of_its_recipe(name: str) -> None:
    folder = pretrained.find(name)
    assert folder is not None
    run, recipe = gh.Run.load(folder), gh.Run.load(RECIPES[name])
    assert run == recipe
    model, tok = gh.load(name)
    table = recipe.model.to_dict()
    spec, expected = gh.config.dump(model.spec), gh.config.dump(gh.preset(table.pop("preset"), **table))
    from_data = {"vocab_size", "max_len", "start_id", "end_ids", "pad_id"}
    assert {key for key in spec | expected if spec.get(key) != expected.get(key)} <= from_data
    assert len(tok) == recipe.data.vocab_size == model.spec.vocab_size
    assert model.spec.max_len == recipe.data.seq_len
    assert model.tokenizer_fingerprint == tok.fingerprint


def test_weights_are_stored_in_half_precision_and_computed_with_in_float32() -> None:
    for name in pretrained.names():
        model, _ = gh.load(name, device="cpu")
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        stored, _ = gh.load(name, device="cpu", dtype="stored")
        assert {weight.dtype for weight in stored.parameters()} == {torch.float16}


def test_a_folder_of_that_name_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gh.save(gh.build(gh.preset("tiny-decoder")), None, "python-3m")
    assert gh.load("python-3m")[0].spec == gh.preset("tiny-decoder")
    assert pretrained.find("python-3m") is None


@pytest.mark.long
def test_python_3m_predicts_held_out_code_better_than_xz_compresses_it() -> None:
    """Each file by itself: xz of one file starts from nothing, so all are compressed as one stream."""
    model, tok = gh.load("python-3m")
    texts = [stdlib.item("test", index)[1][:4000] for index in range(0, stdlib.count("test"), 4)]
    nats = n_bytes = 0.0
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([[model.spec.start_id or 0, *tok.encode(text)]])[:, :512]
            logprobs = model(ids[:, :-1]).log_softmax(-1)
            nats -= logprobs.gather(-1, ids[:, 1:, None]).sum().item()
            n_bytes += len(tok.decode_bytes(ids[0, 1:].tolist()))
    bits = nats / n_bytes / torch.log(torch.tensor(2.0)).item()
    everything = "".join(texts).encode()
    xz = 8 * len(lzma.compress(everything, preset=9 | lzma.PRESET_EXTREME)) / len(everything)
    assert bits < xz, (bits, xz)


def test_python_3m_has_induction_heads() -> None:
    """Of random tokens said twice, the second half can be predicted only by copying from the first."""
    model, _ = gh.load("python-3m")
    half = torch.randint(300, model.spec.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    ids = half.repeat(1, 2)
    with torch.no_grad():
        losses = -model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    first, second = losses[:, :63].mean(), losses[:, 64:].mean()
    assert second < first - 1  # nats: more than e times as probable
    scores = gh.head_scores(model, ids)
    assert scores.induction.max() > 10 * scores.uniform_baseline["induction"].max()


def test_english_4m_goes_on_in_english() -> None:
    model, tok = gh.load("english-4m")
    wrong: dict[str, str] = {}
    for prompt, words in SENTENCES.items():
        text = gh.generate(model, tok, prompt, max_new_tokens=6, temperature=0)[0].text
        first = re.findall(r"[a-z]+", text)[0]
        if first not in words.split():
            wrong[prompt] = text
    assert len(wrong) <= 1, wrong


def test_dates_1m_reads_dates_that_it_was_not_trained_on() -> None:
    """Of 100 dates of the test split, which are in no other split, at least 97 are exact."""
    model, tok = gh.load("dates-1m")
    pairs = [dates.item("test", index) for index in range(100)]
    answers = gh.generate(model, tok, [source for source, _ in pairs], max_new_tokens=16)
    assert sum(answer.text == target for answer, (_, target) in zip(answers, pairs, strict=True)) >= 97


def test_no_model_takes_more_than_eight_megabytes() -> None:
    for name in pretrained.names():
        folder = pretrained.find(name)
        assert folder is not None
        assert sum(path.stat().st_size for path in folder.rglob("*")) < 8e6, name
