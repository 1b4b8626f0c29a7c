"""Schedules against the formulas, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse import config
from glasshouse.errors import ConfigError
from glasshouse.training import Run, recipes
from glasshouse.training.run import Train
from glasshouse.training.schedule import WSD, Constant, Cosine, InverseSqrt, Linear, Schedule

ENDING = [Cosine, Linear, WSD]


@given(st.sampled_from([Constant, *ENDING, InverseSqrt]), st.integers(0, 50), st.integers(1, 200), st.floats(0, 1))
def test_factors_are_in_0_to_1_and_decrease_after_warmup(
    kind: type[Schedule], warmup: int, steps: int, end: float
) -> None:
    schedule = kind(warmup=warmup, final_factor=end) if kind in ENDING else kind(warmup=warmup)
    factors = [schedule.factor(step, steps) for step in range(max(steps, warmup + 2))]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    after = factors[warmup:]
    assert after == sorted(after, reverse=True)
    if kind in ENDING and steps > warmup + 1:
        assert after[0] == pytest.approx(1)
        assert factors[steps - 1] == pytest.approx(end)
        assert schedule.factor(10 * steps, steps) == pytest.approx(end)  # later steps stay there


def test_halfway() -> None:
    assert Cosine(final_factor=0.2).factor(50, 101) == pytest.approx(0.6)
    assert Cosine(final_factor=0.0, warmup=20).factor(40, 101) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert Linear(final_factor=0.2).factor(50, 101) == pytest.approx(0.6)
    wsd = WSD(final_factor=0.2, decay_fraction=0.4)
    assert [wsd.factor(step, 101) for step in (0, 60, 80, 100)] == pytest.approx([1, 1, 0.6, 0.2])


@pytest.mark.parametrize("step", [0, 1, 3998, 3999, 4000, 99_999])
def test_the_learning_rate_of_the_original_transformer(step: int) -> None:
    d_model, warmup, number = 512, 4000, step + 1
    published = d_model**-0.5 * min(number**-0.5, number * warmup**-1.5)
    peak = d_model**-0.5 * warmup**-0.5
    assert peak * InverseSqrt(warmup=warmup).factor(step, 100_000) == pytest.approx(published, rel=1e-12)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cosine\.warmup is -1, but it must be 0 or more\."):
        Cosine(warmup=-1)
    with pytest.raises(ConfigError, match=r"linear\.final_factor is 1\.5, but it must be from 0 to 1\."):
        Linear(final_factor=1.5)
    with pytest.raises(ConfigError, match=r"wsd\.decay_fraction is 0\.0, but it must be above 0 and at most 1\."):
        WSD(decay_fraction=0.0)


def test_a_warmup_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    sentence = r"train\.schedule\.warmup is 80, but it must be at most train\.steps = 50\."
    given: dict[str, Any] = {"steps": 50, "schedule": {"kind": "linear", "warmup": 80}}
    with pytest.raises(ConfigError, match=sentence):
        Train(steps=50, schedule=Linear(warmup=80))
    with pytest.raises(ConfigError, match=sentence):
        Run.from_dict({"model": {"preset": "tiny-decoder"}, "train": given})
    (tmp_path / "a.toml").write_text(config.to_toml({"model": {"preset": "tiny-decoder"}, "train": given}))
    with pytest.raises(ConfigError, match=sentence):
        Run.load(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match=sentence):
        Run.load("stdlib", "train.steps=50", "train.schedule.warmup=80")
    assert Run.load("stdlib", "train.steps=50", "train.schedule.warmup=50").train.schedule.warmup == 50


def test_the_default_warmup_follows_the_steps() -> None:
    for steps, warmup in ((1, 0), (50, 5), (999, 99), (1000, 100), (100_000, 100)):
        assert Train(steps=steps).schedule == Cosine(warmup=warmup)


@pytest.mark.parametrize("name", recipes())
def test_recipes_run_with_few_steps(name: str) -> None:
    whole = Run.load(name).train
    warmup = whole.schedule.warmup
    for steps in (1, 3, max(1, warmup - 1), max(1, warmup), whole.steps):
        run = Run.load(name, f"train.steps={steps}")
        fits = steps >= warmup
        expected = warmup if fits else warmup * steps // whole.steps
        assert run.train.schedule == replace(whole.schedule, warmup=expected)
        assert (run.notes == ()) == fits
        assert Run.from_dict(run.to_dict()) == run  # so that it can resume
    note = f"the warm-up is shortened from {warmup} steps to 0, as train.steps is 1 instead of {whole.steps}"
    assert Run.load(name, "train.steps=1").notes == ((note,) if warmup else ())
