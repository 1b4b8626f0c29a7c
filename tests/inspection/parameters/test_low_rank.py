"""Low-rank matrices against the same multiplied out.

In float64, factors drawn at random have condition numbers of about ten; 1e-10 of the largest entry is a
million times the rounding.
"""

from __future__ import annotations

import pytest
import torch
from inspected_models import assert_close
from torch import Tensor

import glasshouse as gh
from glasshouse.inspection import LowRank


def random_pair(*batch: int) -> tuple[LowRank, Tensor]:
    torch.manual_seed(1)
    one = LowRank(torch.randn(*batch, 9, 3).double(), torch.randn(*batch, 3, 9).double())
    return one, one.left @ one.right


@pytest.mark.parametrize("batch", [(), (2,), (2, 4)])
def test_low_rank_against_the_matrix(batch: tuple[int, ...]) -> None:
    one, matrix = random_pair(*batch)
    assert one.shape == matrix.shape
    assert_close(one.matrix(), matrix)
    assert_close(one.T.matrix(), matrix.mT)
    assert_close(one.norm(), matrix.square().sum((-2, -1)).sqrt())
    assert_close(one.singular_values(), torch.linalg.svdvals(matrix)[..., :3])
    u, s, vh = one.svd()
    assert_close(u @ torch.diag_embed(s) @ vh, matrix)
    assert_close(u.mT @ u, torch.eye(3).double().expand(*batch, 3, 3))
    assert_close(vh @ vh.mT, torch.eye(3).double().expand(*batch, 3, 3))
    # Power sums determine the eigenvalues; those of the matrix are traces of its powers.
    power = matrix
    for exponent in range(1, 4):
        assert_close((one.eigenvalues() ** exponent).sum(-1).real, power.diagonal(dim1=-2, dim2=-1).sum(-1))
        power = power @ matrix


@pytest.mark.parametrize("batch", [(), (2,), (2, 4)])
def test_low_rank_products(batch: tuple[int, ...]) -> None:
    one, matrix = random_pair(*batch)
    vector, wide = torch.randn(9).double(), torch.randn(9, 5).double()
    assert_close(one @ vector, matrix @ vector)
    assert_close(vector @ one, vector @ matrix)
    assert_close((one @ wide).matrix(), matrix @ wide)
    assert_close((wide.T @ one).matrix(), wide.T @ matrix)
    other = LowRank(torch.randn(9, 2).double(), torch.randn(2, 7).double())
    for product, expected in (
        (one @ other, matrix @ other.matrix()),
        (other.T @ one, other.matrix().T @ matrix),
        (one @ one, matrix @ matrix),
    ):
        assert_close(product.matrix(), expected)
        assert product.left.shape[-1] <= 3
    assert (one @ other).left.shape[-1] == (other.T @ one).left.shape[-1] == 2  # the smaller rank
    if batch:
        assert_close(one[1].matrix(), matrix[1])


def test_low_rank_in_low_precision_and_with_a_rank_above_the_width() -> None:
    one = LowRank(torch.randn(9, 3).bfloat16(), torch.randn(3, 9).bfloat16())
    for value in (one.norm(), one.singular_values(), one.svd()[0]):
        assert value.dtype == torch.float32
    assert one.eigenvalues().dtype == torch.complex64
    wide = LowRank(torch.randn(3, 8).double(), torch.randn(8, 3).double())
    assert_close(wide.singular_values(), torch.linalg.svdvals(wide.matrix()))
    assert_close(wide.norm(), wide.matrix().norm())


def test_low_rank_refuses_what_does_not_fit() -> None:
    with pytest.raises(gh.InputError, match=r"shapes \[9, 3\] and \[2, 9\]"):
        LowRank(torch.zeros(9, 3), torch.zeros(2, 9))
    with pytest.raises(gh.InputError, match=r"shapes \[3\] and \[9\]"):
        LowRank(torch.zeros(9, 3), torch.zeros(3, 9))[0]
    with pytest.raises(gh.InputError, match=r"the matrix is \[9, 7\], but only a square one"):
        LowRank(torch.zeros(9, 3), torch.zeros(3, 7)).eigenvalues()
    with pytest.raises(TypeError):
        LowRank(torch.zeros(9, 3), torch.zeros(3, 7)) @ 2  # type: ignore[operator]
