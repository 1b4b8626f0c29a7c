"""Several models and LoRA adapters by name, and the lengths that they take."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import torch

import glasshouse as gh
from glasshouse.layers.lora import LoRA, attach, lora_layers
from glasshouse.serve import ServedModel, Server, load_models
from glasshouse.serve.answers.logprobs import TokenOffsets
from glasshouse.serve.schema.errors import ApiError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tok: gh.Tokenizer) -> Path:
    """A model that PEFT's names fit, and an adapter that changes what it says."""
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    shape = {"d_model": 32, "n_heads": 2, "n_kv_heads": 1, "d_head": 16, "d_ff": 64, "n_layers": 2}
    spec = gh.preset("llama-1b", vocab_size=len(tok), max_len=128, end_ids=(), **shape)
    model = gh.build(spec).eval()
    gh.save(model, tok, place / "base")
    attach(model, LoRA(rank=4))
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_b)
    gh.hub.save_adapter(model, LoRA(rank=4), place / "adapter", base="base")
    return place


def test_a_model_and_its_adapter_by_name(folder: Path) -> None:
    arguments = [f"plain={folder / 'base'}", f"tuned={folder / 'base'}+{folder / 'adapter'}"]
    loaded = load_models(arguments, device="cpu")
    tuned, tok = gh.load(folder / "base")
    gh.hub.load_adapter(tuned, folder / "adapter")
    expected = [gh.generate(model, tok, "to be", max_new_tokens=12)[0].text for model in (loaded[0][1], tuned)]
    assert expected[0] != expected[1]
    server = Server([ServedModel(*one, slots=2) for one in loaded])
    server.start()
    try:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        assert [one.id for one in client.models.list()] == ["plain", "tuned"]
        for name, text in zip(("plain", "tuned"), expected, strict=True):
            answer = client.completions.create(model=name, prompt="to be", max_tokens=12, temperature=0)
            assert answer.choices[0].text == text
    finally:
        server.close()


def test_adapters_share_the_weights_of_their_base(folder: Path) -> None:
    base, adapter = folder / "base", folder / "adapter"
    arguments = [f"plain={base}", f"one={base}+{adapter}", f"two={base}+{adapter}"]
    models = [model for _, model, _ in load_models(arguments, device="cpu")]
    alone, _ = gh.load(base)
    for (name, weight), expected in zip(models[0].named_parameters(), alone.parameters(), strict=True):
        assert weight.equal(expected), name  # no adapter was merged into the base
        places = {model.get_parameter(name).data_ptr() for model in models}
        assert len(places) == (3 if name.endswith(("query.weight", "value.weight")) else 1), name
    assert len({id(module) for model in models for module in model.modules()}) == 3 * len(list(alone.modules()))


def test_names(folder: Path) -> None:
    arguments = [str(folder / "base"), f"{folder / 'base'}+{folder / 'adapter'}"]
    assert [name for name, _, _ in load_models(arguments, device="cpu")] == ["base", "adapter"]
    with pytest.raises(gh.InputError, match="no name"):
        load_models([f"={folder / 'base'}"], device="cpu")


def test_lengths(decoder: gh.models.Decoder, pair: gh.models.Seq2Seq, tok: gh.Tokenizer) -> None:
    one = ServedModel("one", decoder, tok, slots=1, max_len=10)
    assert one.fit([1] * 9, None) == 1
    assert one.fit([1] * 10, 0) == 0
    assert one.fit([1] * 2, None, default=16) == 8
    assert one.fit([1] * 2, 8) == 8
    for ids, asked in (([1] * 10, None), ([1] * 11, 0), ([1] * 2, 9)):
        with pytest.raises(ApiError, match=r"context length of .* is 10 tokens") as caught:
            one.fit(ids, asked)
        assert str(len(ids)) in caught.value.message
        assert caught.value.code == "context_length_exceeded"
    two = ServedModel("two", pair, tok, slots=1, max_len=10)  # source and target have a limit each
    assert two.fit([1] * 10, None) == 9
    assert two.fit([1] * 10, 9) == 9
    for ids, asked in (([1] * 11, None), ([1], 10)):
        with pytest.raises(ApiError, match=r"context length of .* is 10 tokens"):
            two.fit(ids, asked)


def test_offsets_of_tokens_are_where_they_begin_in_the_text(tok: gh.Tokenizer) -> None:
    ids = tok.encode("to be, or not to be")
    offsets = TokenOffsets(tok)
    assert [offsets.add(one) for one in ids] == [len(tok.decode(ids[:count])) for count in range(len(ids))]
    nothing = TokenOffsets(None)
    assert [nothing.add(one) for one in ids] == [0] * len(ids)
