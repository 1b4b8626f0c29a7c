"""`model.depth`: the sizes, rates and length that follow from one number."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import glasshouse as gh
from glasshouse import config
from glasshouse.errors import ConfigError
from glasshouse.hub.families import llama
from glasshouse.spec.parameter_count import count_by_arithmetic
from glasshouse.training import Run
from glasshouse.training.depth import block_parameters, expand
from glasshouse.training.optimizer import Muon
from glasshouse.training.run import NewModel
from glasshouse.training.schedule import WSD


def sizes(run: Run) -> dict[str, object]:
    assert isinstance(run.model, NewModel)
    return run.model.fields


def test_depth_twelve_by_hand() -> None:
    run = Run.load("stdlib", "model.depth=12", "data.vocab_size=32768")
    # 12 layers of 768: 4 * 768^2 for attention and 3 * 768 * 2048 for SwiGLU, 84,934,656 in all; 20 tokens for each
    # are 1.7 billion, 3 times the square root of which is 123,644: nearest to 2^17.
    shape = {"n_layers": 12, "d_model": 768, "n_heads": 12, "n_kv_heads": 12, "d_ff": 2048}
    assert run.model == NewModel("qwen3-small", {"init": "fan_in", **shape})
    assert (run.train.batch_tokens, run.train.steps) == (2**17, 12_960)
    assert run.train.schedule == WSD(warmup=100, decay_fraction=0.4, final_factor=0.0)
    optimizer = run.train.chosen_optimizer()
    assert isinstance(optimizer, Muon)
    assert optimizer.embedding is not None
    assert optimizer.head is not None
    assert (optimizer.lr, optimizer.embedding.lr, optimizer.head.lr) == (0.02, 0.3, 0.004)
    assert optimizer.momentum_warmup == 300


def test_wide_models_have_wider_heads() -> None:
    assert (sizes(Run.load("stdlib", "model.depth=15"))["n_heads"]) == 15  # of 64, in a width of 960
    wide = sizes(Run.load("stdlib", "model.depth=17"))  # 1,088 is no multiple of 128
    assert (wide["d_model"], wide["n_heads"]) == (1152, 9)


def test_what_is_set_overrides_the_rule_and_the_rest_follows_it() -> None:
    run = Run.load("stdlib", "model.depth=4", "model.d_model=128", "train.batch_tokens=2048", "train.steps=100")
    assert sizes(run) == {"init": "fan_in", "n_layers": 4, "d_model": 128, "n_heads": 2, "n_kv_heads": 2, "d_ff": 384}
    assert (run.train.batch_tokens, run.train.steps) == (2048, 100)
    assert run.train.schedule == WSD(warmup=5, decay_fraction=0.4, final_factor=0.0)
    rate = Run.load("stdlib", "model.depth=6", "train.optimizer.lr=0.01", "train.optimizer.adamw.lr=0.1")
    assert isinstance(rate.train.optimizer, Muon)
    assert (rate.train.optimizer.lr, rate.train.optimizer.adamw.lr) == (0.01, 0.1)
    assert rate.train.optimizer.cautious
    other = Run.load("stdlib", "model.depth=6", "train.optimizer=adamw", "train.epochs=2")
    assert (other.train.optimizer.kind, other.train.epochs, other.train.steps) == ("adamw", 2.0, None)


def test_a_run_holds_what_its_depth_stands_for(tmp_path: Path) -> None:
    run = Run.load("stdlib", "model.depth=3", "train.out=x")
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(run.to_dict()))
    assert "depth" not in config.read(path)["model"]
    assert Run.load(path) == run
    path.write_text('[model]\ndepth = 3\n[train]\nout = "x"\n')
    assert Run.load(path) == run


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("stdlib", "model.depth=0"), "model.depth is 0, but it must be at least 1"),
        (("stdlib", "model.depth=deep"), "model.depth is 'deep', but it must be a whole number"),
        (("dates", "model.depth=3"), "model.depth is 3, .* but model.preset is 'vaswani-base'; remove one of them"),
        (("stdlib", "model.depth=3", "model.from=gpt2"), "model.depth is 3, .* but model.from is 'gpt2'"),
        (("stdlib", "model.depth=3", "train.batch_tokens=0"), "train.batch_tokens is 0, but it must be at least 1"),
    ],
)
def test_what_does_not_go_with_a_depth_is_refused(settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Run.load(*settings)


@given(st.integers(1, 64))
def test_any_depth_is_a_decoder_that_exports_as_qwen3(depth: int) -> None:
    table = expand({"model": {"depth": depth}})
    model = table["model"]
    s = gh.preset(model["preset"], vocab_size=1, **{name: size for name, size in model.items() if name != "preset"})
    assert s.d_head in (64, 128)
    assert s.d_model == s.n_heads * s.d_head
    assert s.d_model >= 64 * depth
    norms = s.d_model * (2 * depth + 1) + 2 * depth * s.d_head
    assert count_by_arithmetic(s) == block_parameters(model) + 2 * s.d_model + norms
    batch = table["train"]["batch_tokens"]
    assert batch & (batch - 1) == 0
    tokens = 20 * block_parameters(model)
    assert tokens <= batch * table["train"]["steps"] < tokens + batch
    assert llama.QWEN3.unsupported_fields(s, [f"tensor {number}" for number in range(depth)]) == []
