"""GGUF files in llama.cpp itself: `make llama-cpp` builds it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hub.hf_models import make
from hub.test_gguf import CASES, gemma2
from torch import Tensor

import glasshouse as gh
from glasshouse.hub.families.family import find_mapping
from glasshouse.hub.gguf.architectures import NAMES
from glasshouse.hub.gguf.vocabulary import QWEN2

pytestmark = pytest.mark.long


def opened(path: Path, length: int) -> Any:  # noqa: ANN401
    """Return llama.cpp's model with a cache in float32."""
    import llama_cpp

    exact = {"type_k": 0, "type_v": 0, "flash_attn": False, "n_threads": 1, "n_threads_batch": 1}
    return llama_cpp.Llama(str(path), n_ctx=length, n_batch=length, logits_all=True, verbose=False, **exact)


def their_logprobs(theirs: Any, ids: Sequence[int]) -> Tensor:  # noqa: ANN401
    theirs.reset()
    theirs.eval(list(ids))
    return torch.tensor(np.array(theirs.scores[: len(ids)])).log_softmax(-1)


def our_logprobs(model: Any, ids: Sequence[int]) -> Tensor:  # noqa: ANN401
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].log_softmax(-1)


@pytest.mark.parametrize("name", CASES)
def test_every_family_has_the_same_log_probabilities(name: str, tmp_path: Path) -> None:
    theirs = gemma2() if name == "gemma2" else make(name)
    theirs.save_pretrained(tmp_path / "theirs")
    model, _ = gh.load(tmp_path / "theirs")
    gh.hub.export_gguf(model, None, tmp_path / "model.gguf", dtype="f32")
    ids = random.Random(name).choices(range(3, 60), k=40)
    found = their_logprobs(opened(tmp_path / "model.gguf", 64), ids)
    # Its GELU is a table in float16 of the tanh approximation, which differs from GELU by up to 5e-4.
    limit = 1e-2 if "gpt" in name or "gemma" in name else 1e-4
    torch.testing.assert_close(found, our_logprobs(model, ids), rtol=0, atol=limit)


def test_the_caps_of_gemma_2_are_those_of_the_model(tmp_path: Path) -> None:
    theirs = gemma2(attn_logit_softcapping=2.0, final_logit_softcapping=1.0)
    theirs.save_pretrained(tmp_path / "theirs")
    model, _ = gh.load(tmp_path / "theirs")
    gh.hub.export_gguf(model, None, tmp_path / "model.gguf", dtype="f32")
    ids = random.Random(1).choices(range(3, 60), k=40)
    found = their_logprobs(opened(tmp_path / "model.gguf", 64), ids)
    torch.testing.assert_close(found, our_logprobs(model, ids), rtol=0, atol=1e-2)


# Besides the weights llama.cpp rounds activations, to eight bits in products with quantized matrices of both types.
@pytest.mark.parametrize(
    ("dtype", "limit"), [("f32", 1e-3), ("f16", 1e-2), ("bf16", 5e-2), ("q8_0", 0.2), ("q4_0", 0.2)]
)
@pytest.mark.parametrize("name", ["python-3m", "english-4m"])
def test_bundled_models_continue_a_text_alike(name: str, dtype: str, limit: float, tmp_path: Path) -> None:
    model, tok = gh.load(name)
    gh.hub.export_gguf(model, tok, tmp_path / "model.gguf", dtype=dtype)
    load_rounded(model, tmp_path / "model.gguf")
    theirs = opened(tmp_path / "model.gguf", 128)
    texts = {
        "python-3m": ["def add(a, b):\n", "import os\n\nfor", "class Node:\n    def"],
        "english-4m": ["The old man", "It was", '"'],
    }
    same = total = 0
    for text in texts[name]:
        prompt = tok.encode(text)
        assert theirs.tokenize(text.encode(), add_bos=False) == prompt
        ours = gh.generate(model, None, [prompt], max_new_tokens=64, temperature=0.0)[0].ids
        ids = prompt + ours
        found, expected = their_logprobs(theirs, ids), our_logprobs(model, ids)
        likely = expected > -8  # of the others the rounding is a larger part
        assert (found - expected)[likely].abs().max() < limit
        best, second = expected.topk(2).values.unbind(-1)
        clear = best - second > 2 * limit
        assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
        same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        total += len(ids)
    print(f"{name} {dtype}: {same} of {total} most probable tokens are the same")
    assert same >= 0.9 * total


def load_rounded(model: Any, path: Path) -> None:  # noqa: ANN401
    """Give our model the weights of a file, so that what is left is the rounding of the arithmetic."""
    stored = {one.name: one for one in gguf.GGUFReader(path).tensors}
    for ours, weight in model.state_dict().items():
        mapping = find_mapping(NAMES, ours)
        if mapping is not None and mapping.name in stored:
            one = stored[mapping.name]
            weight.copy_(torch.tensor(np.asarray(gguf.quants.dequantize(one.data, one.tensor_type))))


def odd_strings(count: int) -> list[str]:
    rng = random.Random(0)
    pieces = [
        *"aZ 09_'\"\n\t\r .,;:!?(){}[]<>|\\/@#$%^&*-+=~`",
        *(
            "'s",
            "'LL",
            "don't",
            "  ",
            "\n\n",
            "   \n",
            "\r\n",
            "123456",
            "def ",
            "    ",
            "\u00a0",
            "\u3000",
            "\u2003",
        ),
        *("é", "e\u0301", "ß", "İ", "ǅ", "你好", "日本", "한국", "עברית", "العربية", "हिन्दी", "ไทย", "Ελ", "жё"),
        *("👍🏽", "👩‍👩‍👧", "🇩🇪", "①", "½", "²", "٣", "\u200b", "\ufeff", "\x00", "\x1f", "\x7f", "\U0001d54f", "﷽"),
    ]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 24))) for _ in range(count)]


@pytest.mark.parametrize("name", ["python-3m", "english-4m", "gpt2", "gpt4", "qwen2"])
def test_ids_of_1000_odd_strings_are_the_same(name: str, tmp_path: Path) -> None:
    if name in ("python-3m", "english-4m"):
        model, tok = gh.load(name)
    else:
        pattern = "gpt2" if name == "gpt2" else "gpt4"
        tok = gh.Tokenizer.train(texts=odd_strings(3000), vocab_size=1500, pattern=pattern)
        if name == "qwen2":
            tok = gh.Tokenizer.from_json(tok.to_json().replace("N}{1,3}", "N}"))
            assert json_regex(tok) == QWEN2
        model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), end_ids=(0,)))
    gh.hub.export_gguf(model, tok, tmp_path / "model.gguf")
    import llama_cpp

    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    wrong = [text for text in odd_strings(1000) if theirs.tokenize(text.encode(), add_bos=False) != tok.encode(text)]
    assert wrong == []


def json_regex(tok: gh.Tokenizer) -> str:
    return json.loads(tok.to_json())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
