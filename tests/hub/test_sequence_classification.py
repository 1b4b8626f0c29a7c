"""Texts that decoders classify: the labels of transformers' pipeline, and the ids it reads in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from hub.hf_models import make

import glasshouse as gh
from glasshouse.objectives.registry import make_dataset

TEXTS = ("to be", "or not to be", "be")
WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "to": 3, "be": 4, "or": 5, "not": 6}
BEGINS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}


def write_tokenizer(folder: Path, template: dict[str, object] | None) -> None:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    table = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": word, **special} for word, number in list(WORDS.items())[:3]],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": template,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<pad>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(table))
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))


@pytest.fixture(params=[None, BEGINS], ids=["no template", "a start token"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A published classifier, as its authors' transformers saved it."""
    make("llama-labels").save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", request.param)
    return tmp_path / "model"


def test_labels_are_those_of_transformers_pipeline(folder: Path) -> None:
    model, tok = gh.load(folder)
    theirs = hf.pipeline("text-classification", str(folder), top_k=None)(list(TEXTS), batch_size=3)
    for ours, expected in zip(gh.classify(model, tok, TEXTS), theirs, strict=True):
        assert ours.label == expected[0]["label"]
        assert ours.probabilities == pytest.approx({one["label"]: one["score"] for one in expected}, abs=1e-6)
    # As long as the model reads, and one longer: the tokens around a text count.
    room = 64 - len(tok.encode("")) if tok else 0
    gh.classify(model, tok, ["be " * room])
    with pytest.raises(gh.InputError, match=rf"text 0 is {room + 1} tokens long, but max_len is 64"):
        gh.classify(model, tok, ["be " * (room + 1)])


def test_a_decoder_trains_on_what_it_classifies(folder: Path, tmp_path: Path) -> None:
    model, tok = gh.load(folder)
    assert tok is not None
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"{text},good\n{text} be,bad\n" for text in TEXTS))
    corpus = gh.data.prepare(tmp_path / "a.csv", tok, tmp_path / "ids", kind="labelled")
    dataset = make_dataset(model.spec, corpus, batch_size=6, seq_len=8)
    batch = dataset.batch(range(6))
    assert batch.lengths is not None
    read = [ids[:length].tolist() for ids, length in zip(batch.ids, batch.lengths, strict=True)]
    assert sorted(read) == sorted(tok.encode(f"{text}{end}") for text in TEXTS for end in ("", " be"))
    # No token at all has no last one.
    if not tok.encode(""):
        with pytest.raises(gh.InputError, match="text 0 is '', which has no tokens; leave it out"):
            gh.classify(model, tok, [""])
        (tmp_path / "b.csv").write_text('text,label\nto be,good\n"",bad\n')
        empty = gh.data.prepare(tmp_path / "b.csv", tok, tmp_path / "more", kind="labelled")
        with pytest.raises(
            gh.InputError, match=r"item 1 of .*b\.csv.* is an empty text, which has no tokens; remove"
        ):
            make_dataset(model.spec, empty, batch_size=1, seq_len=8)


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        ("gpt2", "GPT2ForSequenceClassification"),
        ("gpt_neox", "GPTNeoXForSequenceClassification"),
        ("olmo2", "Olmo2ForSequenceClassification"),
        ("bert-masked", "BertForSequenceClassification"),
        ("roberta-bare", "RobertaForSequenceClassification"),
        ("distilbert-masked", "DistilBertForSequenceClassification"),
        ("modernbert-masked", "ModernBertForSequenceClassification"),
    ],
)
def test_a_new_classifier_is_that_of_transformers(name: str, exported: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path / "base")
    base, _ = gh.load(tmp_path / "base")
    gh.hub.export(gh.models.with_classifier(base, 3), None, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [exported]


def test_a_decoder_trained_here_is_one_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, tok = gh.load("python-3m")
    model = gh.models.with_classifier(base, 3).eval()
    assert gh.hub.export(model, tok, tmp_path / "out") == "qwen3"
    theirs = hf.pipeline("text-classification", str(tmp_path / "out"), top_k=None)(list(TEXTS))
    for ours, expected in zip(gh.classify(model, tok, TEXTS), theirs, strict=True):
        scores = {one["label"].replace("LABEL_", "label "): one["score"] for one in expected}
        assert ours.probabilities == pytest.approx(scores, abs=1e-6)
