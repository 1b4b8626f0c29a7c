"""ONNX graphs in ONNX Runtime: the outputs of PyTorch at other sizes than the traced one, padding included."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh

SMALL = {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 50, "max_len": 64}
CLASSES = {"kind": "sequence_classification", "n_labels": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary": ("tiny-decoder", {"n_kv_heads": 2}),
    "gpt2": ("gpt2", {}),
    "alibi": ("tiny-decoder", {"position": "alibi"}),
    "relative": ("tiny-decoder", {"position": "relative"}),
    "windows": ("tiny-decoder", {"windows": [3, 0]}),
    "caps": ("tiny-decoder", {"attention_softcap": 30.0, "logit_softcap": 20.0}),
    "parallel blocks": ("tiny-decoder", {"norm_placement": "parallel", "position": "sinusoidal"}),
    "modern": ("modern-small", {"n_kv_heads": 2}),
    "bert": ("bert-base", {}),
    "labels": ("tiny-encoder", {"head": CLASSES}),
    "labels of the last token": ("tiny-encoder", {"head": {**CLASSES, "pooling": "last"}}),
    "labels of tokens": ("tiny-encoder", {"head": {"kind": "token_classification", "n_labels": 3}}),
    "embeddings": ("tiny-encoder", {"head": {"kind": "pooled"}}),
    "no head": ("tiny-encoder", {"head": {"kind": "none"}}),
}
SIZES = [(1, 1), (1, 7), (2, 2), (4, 5), (3, 33), (2, 64)]


def masks(batch: int, length: int) -> list[torch.Tensor]:
    """No padding, and where there is room a token more of it in each row, on the right and on the left."""
    whole = torch.ones(batch, length, dtype=torch.long)
    ends = torch.arange(batch)[:, None].clamp(max=length - 1)
    right = (torch.arange(length) < length - ends).long()
    return [whole, right, right.flip(1)]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_computes_what_pytorch_does(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    preset, settings = MODELS[name]
    torch.manual_seed(0)
    model = gh.build(gh.preset(preset, **{**SMALL, **settings, "init": "normal"})).eval()
    kind = gh.hub.export_onnx(model, None, tmp_path / "model.onnx")
    assert kind == model.spec.kind
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert str(Path(gh.__file__).parent).encode() not in (tmp_path / "model.onnx").read_bytes()
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    inputs = [one.name for one in session.get_inputs()]
    for batch, length in SIZES:
        for mask in masks(batch, length):
            ids = torch.randint(50, (batch, length))
            segments = torch.randint(2, (batch, length))
            given = dict(zip(("input_ids", "attention_mask", "token_type_ids"), (ids, mask, segments), strict=True))
            more = {"segments": segments} if "token_type_ids" in inputs else {}
            with torch.no_grad():
                expected = model(ids, mask=mask.bool(), **more)
            (found,) = session.run(None, {one: given[one].numpy() for one in inputs})
            real = mask.bool() if expected.dim() == 3 else slice(None)
            difference = (torch.from_numpy(found) - expected)[real].abs().max()
            assert float(difference) < 1e-4 * max(1.0, float(expected.abs().max())), (batch, length)
    assert [one.name for one in session.get_outputs()] == [
        {"embeddings": "sentence_embedding", "no head": "last_hidden_state"}.get(name, "logits")
    ]
    assert ("token_type_ids" in inputs) == (model.spec.kind == "encoder")


@pytest.mark.long
def test_a_text_by_the_files_alone(tmp_path: Path) -> None:
    runtime, tokenizers = pytest.importorskip("onnxruntime"), pytest.importorskip("tokenizers")
    pytest.importorskip("onnxscript")
    gh.hub.convert("python-3m", tmp_path / "out" / "python.onnx", onnx=True)
    gh.hub.convert("python-3m", tmp_path / "out" / "python.onnx", onnx=True)  # the same tokenizer may be there
    tok = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    session = runtime.InferenceSession(tmp_path / "out" / "python.onnx")
    ids = prompt = tok.encode("for i in range(").ids
    for _ in range(12):
        row = torch.tensor([ids])
        (logits,) = session.run(None, {"input_ids": row.numpy(), "attention_mask": torch.ones_like(row).numpy()})
        ids = [*ids, int(logits[0, -1].argmax())]
    (expected,) = gh.generate(*gh.load("python-3m"), "for i in range(", max_new_tokens=12)
    assert ids[len(prompt) :][: len(expected.ids)] == expected.ids


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = gh.build(gh.preset("tiny-decoder", vocab_size=263))
    with pytest.raises(gh.InputError, match="encoder-decoder, but only encoders and decoders go to ONNX"):
        gh.hub.export_onnx(gh.build(gh.preset("tiny-seq2seq")), None, tmp_path / "a.onnx")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(gh.InputError, match=r"ONNX files need onnxscript; .*glasshouse\[onnx\]"):
            gh.hub.export_onnx(decoder, None, tmp_path / "a.onnx")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    gh.Tokenizer.train(texts=["or not"], vocab_size=264).save(tmp_path)
    with pytest.raises(gh.InputError, match=r"has the tokenizer\.json of another model"):
        gh.hub.export_onnx(decoder, gh.Tokenizer.train(texts=["to be"], vocab_size=263), tmp_path / "a.onnx")
    with pytest.raises(gh.InputError, match="is a folder"), tempfile.TemporaryDirectory() as folder:
        gh.hub.export_onnx(decoder, None, folder)
    assert not list(tmp_path.glob("*.onnx"))
