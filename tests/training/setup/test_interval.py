"""How often a run is validated and saved by default."""

from __future__ import annotations

import pytest

from glasshouse.training.setup.interval import default_interval


@pytest.mark.parametrize(
    ("steps", "step_seconds", "checkpoint_bytes", "interval"),
    [
        # GPT-2: 12 bytes of 124M parameters take 3 s to write, and a fifth of 200 steps is 7.1 s, of 20,000 711 s.
        (200, 0.178, 1.49e9, 66),  # two, and at least three are made
        (20_000, 0.178, 1.49e9, 2000),
        (400, 0.178, 1.49e9, 100),  # 14.2 s are four checkpoints
        (91, 0.03, 1.3e9, 30),  # BERT on 1,000 labels: a fifth of a second, and at least three checkpoints
        (1000, 0.015, 1.3e8, 100),  # 0.26 s each, and a fifth is 3 s
        (2, 0.03, 1.3e9, 1),
    ],
)
def test_checkpoints_take_at_most_a_fifth_of_a_run(
    steps: int, step_seconds: float, checkpoint_bytes: float, interval: int
) -> None:
    assert default_interval(steps, step_seconds, checkpoint_bytes) == interval


def test_runs_without_an_estimate_are_validated_ten_times() -> None:
    assert [default_interval(steps) for steps in (1, 9, 10, 25, 1000)] == [1, 1, 1, 2, 100]
