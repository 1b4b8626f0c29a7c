"""Steering vectors: by a plain loop, on disk, and for one model only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import glasshouse as gh
from glasshouse.errors import InputError, StoreError
from glasshouse.inspection import SteeringVector, steering_vector
from glasshouse.inspection.steering import model_fingerprint

POSITIVE, NEGATIVE = [[1, 2, 3], [4, 5], [6]], [[7, 8, 9, 10], [3]]


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(0)
    return gh.build(gh.preset("tiny-decoder", n_layers=3, init="normal")).eval()


def slow_mean(model: gh.models.Decoder, texts: list[list[int]], layer: int) -> torch.Tensor:
    """Average over texts what the stream has after a layer, over the tokens after the first."""
    means = []
    for ids in texts:
        with gh.record(model, f"resid_post.{layer}") as seen, torch.no_grad():
            model(torch.tensor([ids]))
        stream = seen[f"resid_post.{layer}"][0]
        rows = [stream[at] for at in range(len(ids)) if at > 0 or len(ids) == 1]
        means.append(sum(rows) / len(rows))
    return sum(means) / len(means)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_it_is_the_difference_of_means(model: gh.models.Decoder, layer: int) -> None:
    made = steering_vector(model, None, POSITIVE, NEGATIVE, site=f"resid_post.{layer}")
    expected = slow_mean(model, POSITIVE, layer) - slow_mean(model, NEGATIVE, layer)
    torch.testing.assert_close(made.vector, expected, rtol=1e-5, atol=1e-5)
    assert made.layer == layer
    opposite = steering_vector(model, None, NEGATIVE, POSITIVE, site=f"resid_post.{layer}")
    assert torch.equal(opposite.vector, -made.vector)


def test_texts_and_the_middle_layer(model: gh.models.Decoder) -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=256 + 7)
    wide = gh.build(gh.preset("tiny-decoder", n_layers=4, vocab_size=len(tok)))
    made = steering_vector(wide, tok, ["to be"], ["or not"])
    assert made.site == "resid_post.2"
    same = steering_vector(wide, None, [tok.encode("to be")], [tok.encode("or not")])
    assert torch.equal(made.vector, same.vector)
    assert wide.training  # as before


def test_saved_and_loaded(model: gh.models.Decoder, tmp_path: Path) -> None:
    made = steering_vector(model, None, POSITIVE, NEGATIVE)
    made.save(tmp_path / "one.safetensors")
    back = SteeringVector.load(tmp_path / "one.safetensors")
    assert torch.equal(back.vector, made.vector)
    assert (back.site, back.fingerprint) == (made.site, made.fingerprint)
    back.check(model)


def test_another_model_is_refused(model: gh.models.Decoder) -> None:
    made = steering_vector(model, None, POSITIVE, NEGATIVE)
    other = gh.build(gh.preset("tiny-decoder", n_layers=3, max_len=99))
    other.load_state_dict(model.state_dict())
    made.check(other)  # its weights are the same
    with torch.no_grad():
        other.stack.blocks[1].feedforward.layer.down.weight[0, 0] += 0.5
    with pytest.raises(InputError, match=r"^the steering vector was made for another model, .*; make one for this"):
        made.check(other)


def test_a_dtype_is_no_other_model(model: gh.models.Decoder) -> None:
    before = model_fingerprint(model)
    copy = gh.build(model.spec)
    copy.load_state_dict(model.state_dict())
    assert model_fingerprint(copy.to(torch.bfloat16)) == before


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no"):
        SteeringVector.load(tmp_path / "nothing")
    path = tmp_path / "other.safetensors"
    good = {"kind": "steering vector", "site": "resid_post.0", "fingerprint": "f"}
    for tensors, metadata in [
        ({"vector": torch.ones(3)}, {}),
        ({"weight": torch.ones(3)}, good),
        ({"vector": torch.ones(3, 3)}, good),
        ({"vector": torch.ones(3)}, {**good, "site": "z.0"}),
        ({"vector": torch.ones(3, dtype=torch.int64)}, good),
    ]:
        save_file(tensors, path, metadata)
        with pytest.raises(StoreError, match="is no steering vector"):
            SteeringVector.load(path)
    save_file({"vector": torch.tensor([1.0, float("nan")])}, path, good)
    with pytest.raises(StoreError, match="not finite"):
        SteeringVector.load(path)
    path.write_bytes(b"\0" * 4)
    with pytest.raises(StoreError):
        SteeringVector.load(path)


def test_it_prints_as_one_line() -> None:
    assert repr(SteeringVector(torch.tensor([3.0, 4.0]), "resid_post.1", "0" * 64)) == (
        "SteeringVector('resid_post.1', 2 dimensions, norm 5)"
    )


def test_what_cannot_be_made(model: gh.models.Decoder) -> None:
    for site in ("resid_post.3", "z.0", "resid_post.*"):
        with pytest.raises(InputError, match=r"one of resid_post\.0 to resid_post\.2"):
            steering_vector(model, None, POSITIVE, NEGATIVE, site=site)
    with pytest.raises(InputError, match="negative has no texts"):
        steering_vector(model, None, POSITIVE, [])
    with pytest.raises(InputError, match="steering is for decoders"):
        steering_vector(gh.build(gh.preset("tiny-encoder")), None, POSITIVE, NEGATIVE)
