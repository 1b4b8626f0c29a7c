"""`glasshouse classify` against a softmax of the model's logits on ids made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import glasshouse as gh
from cli.runner import Call

LABELS = ("good", "bad", "so so")
TEXTS = ("a fine book", "a dull, dull book", "")
MAX_LEN = 24


@pytest.fixture(scope="module")
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=["a fine book"], vocab_size=263)


@pytest.fixture(scope="module")
def model(tok: gh.Tokenizer) -> gh.models.Encoder:
    torch.manual_seed(0)
    head = {"kind": "sequence_classification", "n_labels": 3, "labels": LABELS}
    model = gh.build(gh.preset("tiny-encoder", vocab_size=len(tok), max_len=MAX_LEN, head=head)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # as built, all texts have about the same label
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def folder(model: gh.models.Encoder, tok: gh.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reviews"
    gh.save(model, tok, folder)
    return folder


def expected(model: gh.models.Encoder, tok: gh.Tokenizer, text: str) -> list[tuple[str, float]]:
    """Return the labels of a text alone with their probabilities, the most probable first."""
    end = tok.token_to_id("<|endoftext|>")  # which also starts a text, as there is no other
    ids = [end, *tok.encode(text)[: MAX_LEN - 2], end]
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0].double()
    powers = [float(one.exp()) for one in logits]
    return sorted(zip(LABELS, (one / sum(powers) for one in powers), strict=True), key=lambda one: -one[1])


def near(pairs: Sequence[tuple[str, float]]) -> list[tuple[str, object]]:
    """Compare at the four decimals that are printed; float32 sums of another batch differ by a few 1e-7."""
    return [(label, pytest.approx(value, abs=0.6e-4)) for label, value in pairs]


def rows(printed: str) -> list[tuple[str, float]]:
    return [(label, float(value)) for label, _, value in (line.partition("\t") for line in printed.splitlines())]


def test_the_label_of_each_text_and_its_probability(
    call: Call, folder: Path, model: gh.models.Encoder, tok: gh.Tokenizer
) -> None:
    done = call("classify", folder, *TEXTS, "--batch-size", "2")
    assert (done.code, done.err) == (0, "")
    assert rows(done.out) == near([expected(model, tok, text)[0] for text in TEXTS])
    assert len({label for label, _ in rows(done.out)}) > 1  # so that their order is told apart


@pytest.mark.parametrize("words", [(), ("-",)])
def test_each_line_of_stdin_is_a_text(
    call: Call, folder: Path, model: gh.models.Encoder, tok: gh.Tokenizer, words: tuple[str, ...]
) -> None:
    done = call("classify", folder, *words, "--batch-size", "2", stdin="\r\n".join(TEXTS).encode() + b"\n\xff\n")
    lines = [*TEXTS, "\N{REPLACEMENT CHARACTER}"]
    assert rows(done.out) == near([expected(model, tok, text)[0] for text in lines])


def test_all_labels_are_sorted(call: Call, folder: Path, model: gh.models.Encoder, tok: gh.Tokenizer) -> None:
    first, second = call("classify", folder, *TEXTS[:2], "--all").out.split("\n\n")
    for block, text in zip((first, second), TEXTS, strict=False):
        assert rows(block) == near(expected(model, tok, text))


def test_json_has_the_text_and_its_label(
    call: Call, folder: Path, model: gh.models.Encoder, tok: gh.Tokenizer
) -> None:
    for flags in ((), ("--all",)):
        done = call("classify", folder, *TEXTS, "--json", *flags)
        for line, text in zip(done.out.splitlines(), TEXTS, strict=True):
            wanted = expected(model, tok, text)
            found = json.loads(line)
            assert found.pop("text") == text
            assert list(found.pop("probabilities", {}).items()) == (near(wanted) if flags else [])
            assert [(found["label"], found["probability"])] == near(wanted[:1])


def test_long_texts_are_truncated_with_one_warning(
    call: Call, folder: Path, model: gh.models.Encoder, tok: gh.Tokenizer
) -> None:
    texts = ["a fine book" * 9, "a fine book", "a dull book" * 9]
    done = call("classify", folder, *texts, "--batch-size", "1")
    assert rows(done.out) == near([expected(model, tok, text)[0] for text in texts])
    assert done.err == (
        "warning: 2 of 3 texts are longer than the model's max_len of 24 tokens and were truncated to it.\n"
    )


@pytest.mark.parametrize(
    ("preset", "head", "said"),
    [
        (
            "tiny-decoder",
            None,
            "is a decoder with the head 'next_token', which gives texts no label; fine-tune",
        ),
        ("tiny-seq2seq", None, "is an encoder-decoder, which generates texts"),
        (
            "tiny-encoder",
            None,
            "is an encoder with the head 'masked_token', which gives texts no label; fine-tune",
        ),
        (
            "tiny-encoder",
            {"kind": "token_classification", "n_labels": 2},
            "gives each word a tag, and no text a la",
        ),
    ],
)
def test_a_model_without_labels_is_one_sentence(
    call: Call, tok: gh.Tokenizer, tmp_path: Path, preset: str, head: dict[str, object] | None, said: str
) -> None:
    spec = gh.preset(preset, vocab_size=len(tok), **({} if head is None else {"head": head}))
    gh.save(gh.build(spec), tok, tmp_path / "other")
    done = call("classify", tmp_path / "other")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: the model {said}")
    assert done.err.count("\n") == 1


def test_in_python_a_long_text_is_an_error_unless_truncated(model: gh.models.Encoder, tok: gh.Tokenizer) -> None:
    with pytest.raises(gh.InputError, match="text 1 is 99 tokens long, but max_len is 24"):
        gh.classify(model, tok, ["a fine book", "a fine book" * 9])
    one, two = gh.classify(model, tok, ["a fine book", "a fine book" * 9], truncate=True)
    assert (one.truncated, two.truncated) == (False, True)


def test_labels_without_names_and_weights_that_are_not_finite(tok: gh.Tokenizer) -> None:
    head = {"kind": "sequence_classification", "n_labels": 2}
    model = gh.build(gh.preset("tiny-encoder", vocab_size=len(tok), head=head)).eval()
    (found,) = gh.classify(model, tok, "a")
    assert {*found.probabilities} == {"label 0", "label 1"}
    model.token_embedding.table.weight.data[tok.encode("b")] = torch.nan
    with pytest.raises(gh.InputError, match="the logits of text 1 have NaN"):
        gh.classify(model, tok, ["a", "b"])
