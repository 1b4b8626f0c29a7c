"""Models in the dtypes they run in, and models that are copied, pickled and moved."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import glasshouse as gh

POSITIONS = ["none", "sinusoidal", "learned", "rotary", "relative", "alibi"]


@pytest.mark.few(12)
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast"])
def test_half_precision_follows_float32(how: str, position: str, softcap: float | None) -> None:
    """With padding, a bias on the scores and a cache: everything with its own dtype."""
    torch.manual_seed(0)
    settings = {"position": position, "attention_softcap": softcap, "init": "normal", "windows": [4, 0]}
    model = gh.build(gh.preset("tiny-decoder", **settings)).eval()
    ids, mask = torch.randint(0, 256, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    with torch.no_grad():
        expected = model(ids, mask=mask)
        half = model if how == "autocast" else copy.deepcopy(model).to(getattr(torch, how))
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out, cache = half(ids, mask=mask), half.make_cache(2, 9)
            cached = torch.cat([half(ids[:, :5], mask=mask[:, :5], cache=cache), half(ids[:, 5:], cache=cache)], 1)
    # Rounding to 8 bits at each of a few dozen operations, some of which cancel.
    for result in (out, cached):
        assert (result.float() - expected)[mask].norm() < 0.05 * expected[mask].norm()


@pytest.mark.few(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", gh.presets())
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    """Spawned processes receive a model by pickle; the package itself never loads one."""
    torch.manual_seed(0)
    model = gh.build(gh.preset(name, vocab_size=50, d_model=48, n_layers=1, n_heads=6)).eval()
    ids = torch.randint(0, 50, (2, 7))
    args = (ids, ids) if hasattr(model, "encoder") else (ids,)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(*args), model(*args))


def test_on_the_meta_device_a_model_has_shapes_and_no_memory() -> None:
    model = gh.build(gh.preset("llama-1b"), device="meta")
    assert model(torch.zeros(1, 4, dtype=torch.long, device="meta")).shape == (1, 4, 128_256)


def test_without_a_device_a_model_is_built_and_loaded_on_torchs_default(tmp_path: Path) -> None:
    gh.save(gh.build(gh.preset("tiny-decoder")), None, tmp_path / "model")
    with torch.device("meta"):
        models = [gh.build(gh.preset("tiny-decoder")), gh.load(tmp_path / "model")[0]]
        held = [gh.build(gh.preset("tiny-decoder"), device="cpu"), gh.load(tmp_path / "model", device="cpu")[0]]
    assert {weight.device.type for model in models for weight in model.parameters()} == {"meta"}
    assert {weight.device.type for model in held for weight in model.parameters()} == {"cpu"}
    assert next(gh.load(tmp_path / "model")[0].parameters()).device.type == "cpu"
