"""What a layout is made of is checked."""

from __future__ import annotations

import pytest
import torch

from glasshouse import InputError
from glasshouse.layers.attend.layout import make_layout


@pytest.mark.parametrize(("lengths", "wrong"), [([0, 3], 3), ([-1, 2], -1), ([-1, 3], -1)])
def test_the_error_names_the_length_that_is_wrong(lengths: list[int], wrong: int) -> None:
    with pytest.raises(InputError, match=rf"lengths contains {wrong}, but a row has 2 tokens; use 0 to 2\."):
        make_layout(torch.zeros(2, 2), lengths=torch.tensor(lengths))


def test_lengths_may_be_0_and_all() -> None:
    real = make_layout(torch.zeros(2, 2), lengths=torch.tensor([0, 2])).real
    assert real is not None
    assert real.tolist() == [[False, False], [True, True]]
