"""Matrices as the product of two thin ones that is not multiplied out, such as the QK and OV circuits of a head."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from glasshouse.errors import InputError


class LowRank:
    """The matrix left @ right, where left is [..., M, rank] and right [..., rank, N], with any batch axes in front.

    `@` with another one, or with a matrix on either side, is low-rank again; with a vector it is a tensor. An index
    selects on the batch axes. Singular values, eigenvalues and norms come from matrices [rank, rank], in float32 at
    least.

    >>> one = LowRank(torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[3.0, 0.0, 4.0]]))
    >>> one.shape, one.norm(), one.eigenvalues()
    (torch.Size([3, 3]), tensor(5.), tensor([3.+0.j]))
    >>> one @ torch.tensor([1.0, 1.0, 1.0]), (one @ one.T).matrix()[0]
    (tensor([7., 0., 0.]), tensor([25.,  0.,  0.]))
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[-2]:
            raise InputError(
                f"the factors have shapes {list(left.shape)} and {list(right.shape)}, but they must be [..., M, "
                "rank] and [..., rank, N]; select rows and columns on a factor."
            )
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        self.left = left.expand(*batch, *left.shape[-2:])
        self.right = right.expand(*batch, *right.shape[-2:])

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix, [..., M, N]."""
        return torch.Size([*self.left.shape[:-1], self.right.shape[-1]])

    @property
    def T(self) -> LowRank:  # noqa: N802 - torch's
        """The transposed matrix, [..., N, M]."""
        return LowRank(self.right.mT, self.left.mT)

    def matrix(self) -> Tensor:
        """Multiply the factors out, [..., M, N]."""
        return self.left @ self.right

    def __getitem__(self, index: Any) -> LowRank:  # noqa: ANN401 - what a tensor takes
        return LowRank(self.left[index], self.right[index])

    @overload
    def __matmul__(self, other: LowRank) -> LowRank: ...
    @overload
    def __matmul__(self, other: Tensor) -> Any: ...  # noqa: ANN401 - a tensor for a vector, LowRank for a matrix
    def __matmul__(self, other: LowRank | Tensor) -> LowRank | Tensor:
        if isinstance(other, LowRank):
            between = self.right @ other.left
            if between.shape[-2] <= between.shape[-1]:  # the smaller rank stays
                return LowRank(self.left, between @ other.right)
            return LowRank(self.left @ between, other.right)
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.ndim == 1:
            return (self.left @ (self.right @ other)[..., None])[..., 0]
        return LowRank(self.left, self.right @ other)

    def __rmatmul__(self, other: Tensor) -> Any:  # noqa: ANN401 - as above
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.ndim == 1:
            return ((other @ self.left)[..., None, :] @ self.right)[..., 0, :]
        return LowRank(other @ self.left, self.right)

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return U [..., M, rank], S [..., rank] and Vh [..., rank, N], as torch.linalg.svd with full_matrices=False.

        >>> u, s, vh = LowRank(torch.randn(9, 2), torch.randn(2, 7)).svd()
        >>> u.shape, s.shape, vh.shape
        (torch.Size([9, 2]), torch.Size([2]), torch.Size([2, 7]))
        """
        (q_left, r_left), (q_right, r_right) = self._qr()
        u, s, vh = torch.linalg.svd(r_left @ r_right.mT)
        return q_left @ u, s, vh @ q_right.mT

    def singular_values(self) -> Tensor:
        """Return the singular values that may not be 0, largest first: [..., rank]."""
        (_, r_left), (_, r_right) = self._qr()
        values: Tensor = torch.linalg.svdvals(r_left @ r_right.mT)
        return values

    def norm(self) -> Tensor:
        """Return the Frobenius norm, [...]."""
        return torch.linalg.matrix_norm(self.condensed())

    def condensed(self) -> Tensor:
        """Return a matrix [..., rank, N] that can replace this one wherever only the norm of a product counts.

        It is this one times an orthogonal matrix from the left, so that ||A X|| is the same for all X.

        >>> one, x = LowRank(torch.randn(9, 2), torch.randn(2, 7)), torch.randn(7, 3)
        >>> torch.allclose((one.condensed() @ x).norm(), (one.matrix() @ x).norm())
        True
        """
        return torch.linalg.qr(exact(self.left)).R @ exact(self.right)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues that may not be 0, complex, in no particular order: [..., rank]."""
        if self.shape[-1] != self.shape[-2]:
            raise InputError(
                f"the matrix is {list(self.shape[-2:])}, but only a square one has eigenvalues; "
                "use singular_values()."
            )
        values: Tensor = torch.linalg.eigvals(exact(self.right) @ exact(self.left))  # AB and BA share those not 0
        return values

    def _qr(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the QR decompositions of left and of right transposed."""
        return torch.linalg.qr(exact(self.left)), torch.linalg.qr(exact(self.right.mT))

    def __repr__(self) -> str:
        return f"LowRank({list(self.left.shape)} @ {list(self.right.shape)})"


def exact(x: Tensor) -> Tensor:
    """Return a tensor in float32 at least, which decompositions need.

    >>> exact(torch.zeros(1, dtype=torch.bfloat16)).dtype, exact(torch.zeros(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
