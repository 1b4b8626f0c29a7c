"""Statements that need training: the experiments of `make claims` with fewer steps, which it runs too."""

from __future__ import annotations

import pytest

from claims.experiments import assert_as_stated
from glasshouse import notes


@pytest.mark.long
def test_p6_positions_have_most_of_the_tokens_norm_as_initialised_and_trained() -> None:
    from trained_claims.positions import position_norms

    result = position_norms(seeds=1, steps=30)
    assert_as_stated("P6", result.figures)
    assert 0.5 < result.figures["|position| / |token| trained"] < 0.9


@pytest.mark.long
def test_b6_post_norm_stalls_without_warm_up_and_pre_norm_does_not() -> None:
    from trained_claims.norm_placement import stability

    assert_as_stated("B6", stability(seeds=1, steps=120, rates=(3e-3,), warm_ups=(False,)).figures)


@pytest.mark.long
def test_m7_one_attention_layer_recalls_from_any_distance() -> None:
    from trained_claims.recall import attention_recall

    assert_as_stated("M7", attention_recall(seeds=1, steps=400, context=24).figures)


@pytest.mark.long
def test_a13_quality_is_nearly_the_same_with_fewer_key_value_heads() -> None:
    from trained_claims.key_value_heads import WIDTHS, compare_heads

    figures = compare_heads(seeds=1, steps=60, cached=64).figures
    for width in WIDTHS:
        most, fewest = (figures[f"width {width}: loss with {count} of 8"] for count in (8, 1))
        assert most < 3.2  # log 256 is 5.5
        assert abs(fewest - most) < 0.1 * most


@pytest.mark.long
def test_l1_pretraining_is_ahead_with_few_labels() -> None:
    from trained_claims.pretraining import fine_tuning

    sizes = {"pretrainings": 1, "seeds": 2, "steps": 600, "unlabelled": 1500, "fine_tune_steps": 40, "tests": 200}
    result = fine_tuning(**sizes, labels=(30,), languages=6, rates=((3e-3,), (1e-2,)))
    assert result.figures["gain with 30 labels - the larger standard deviation"] > 0.05


@pytest.mark.parametrize("number", notes.measurements())
def test_saved_figures_are_as_stated(number: str) -> None:
    """What `make claims` measured last, which the docs and the page show."""
    assert_as_stated(number, notes.measurements()[number].figures)
