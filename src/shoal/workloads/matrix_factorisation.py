"""Low-rank matrices: factorisation of one that is seen whole, completion of one that is seen in part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STARTING_LOSS_PER_RANK = 5e5
"""Of 1000 x 1000 instances: X X^T and U U^T are then independent, each of squared norm about 1000^2 r."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Factorisation:
    """F(X) = |X X^T - U U^T|^2 / 4 (Frobenius) for a factor X of ``size`` rows and ``rank`` columns.

    Args:
        factor: U, ``[size, rank]``.

    Source: Teng et al. 2019, the poster's figure 3, as reconstructed in section 3.5 of the notes: size 1000, U
        and all starts drawn from N(0, 1), lr 5e-4, penalty weight 0.2, 8 workers, 50 iterations.

    Example:
        >>> task = Factorisation(factor=torch.eye(3, 2, dtype=torch.float64))
        >>> exact = -task.factor.reshape(1, -1)        # the sign does not matter
        >>> task.losses(exact).item(), task.gradients(exact).abs().max().item()
        (0.0, 0.0)
    """

    factor: Tensor

    @classmethod
    def random(cls, *, size: int = 1000, rank: int, seed: int = 0) -> Factorisation:
        """An instance with U drawn from N(0, 1)."""
        return cls(factor=_normal((size, rank), seed))

    def starts(self, workers: int, *, seed: int = 0) -> Tensor:
        """Starting points drawn from N(0, 1), ``[workers, size * rank]``.

        Args:
            workers: how many.
            seed: of the draw; the instance's own seed does not give the same numbers.
        """
        return _normal((workers, self.factor.numel()), seed + 1_000_003)

    def losses(self, x: Tensor) -> Tensor:
        """F of each row of ``[rows, size * rank]``, without the cancellation of the two products.

        With [X U] = Q [R S], Q orthonormal, the norm is that of the small R R^T - S S^T.
        """
        own = x.reshape(-1, *self.factor.shape)
        both = torch.cat([own, self.factor.expand_as(own)], dim=2)
        triangle = torch.linalg.qr(both, mode="r").R
        rank = self.factor.shape[1]
        left, right = triangle[:, :, :rank], triangle[:, :, rank:]
        core = left @ left.mT - right @ right.mT
        return core.square().sum(dim=(1, 2)) / 4

    def gradients(self, x: Tensor) -> Tensor:
        """X (X^T X) - U (U^T X) of each row."""
        own = x.reshape(-1, *self.factor.shape)
        slope = own @ (own.mT @ own) - self.factor @ (self.factor.mT @ own)
        return slope.reshape(x.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """Half the mean squared error of L R^T on the entries of a matrix that are seen.

    A point is L and R after one another, (rows + columns) * rank numbers.

    Args:
        matrix: ``[rows, columns]``; entries that are not seen serve only :meth:`unseen_losses`.
        seen: ``[rows, columns]`` bool.
        rank: columns of L and of R, >= 1.

    Source: matrix completion with entries missing; the paper's own figure sees all entries (notes, 3.5).
    """

    matrix: Tensor
    seen: Tensor
    rank: int

    @classmethod
    def of(cls, matrix: Tensor, *, seen_share: float = 0.3, rank: int, seed: int = 0) -> Completion:
        """A given matrix, for example of pixels, of which a random share is seen.

        Args:
            matrix: ``[rows, columns]``.
            seen_share: of the entries, in (0, 1); each is seen independently of others.
            rank: of the factors.
            seed: of the choice.
        """
        generator = torch.Generator().manual_seed(seed)
        seen = torch.rand(matrix.shape, generator=generator) < seen_share
        return cls(matrix=matrix, seen=seen, rank=rank)

    @classmethod
    def of_pixels(
        cls, images: Tensor, *, seen_share: float = 0.3, rank: int = 10, seed: int = 0
    ) -> Completion:
        """Pictures, one a row, of whose pixels a random share is seen.

        Args:
            images: ``[n, height, width]``, 0 to 255, for example the first thousand of Fashion-MNIST.
            seen_share: of the pixels, in (0, 1).
            rank: of the factors.
            seed: of the choice.

        Returns:
            The task, in float64, of brightness from 0 to 1 less the mean of what is seen.
        """
        matrix = images.reshape(len(images), -1).double() / 255
        task = cls.of(matrix, seen_share=seen_share, rank=rank, seed=seed)
        return cls(matrix=matrix - matrix[task.seen].mean(), seen=task.seen, rank=rank)

    @classmethod
    def random(
        cls,
        *,
        rows: int,
        columns: int,
        rank: int,
        seen_share: float = 0.3,
        seed: int = 0,
    ) -> Completion:
        """A matrix of exactly that rank, with entries of variance 1."""
        left, right = _normal((rows, rank), seed), _normal((columns, rank), seed + 1)
        matrix = left @ right.mT / rank**0.5
        return cls.of(matrix, seen_share=seen_share, rank=rank, seed=seed + 2)

    def starts(self, workers: int, *, seed: int = 0, scale: float = 0.1) -> Tensor:
        """Small random starting points, ``[workers, (rows + columns) * rank]``."""
        numbers = sum(self.matrix.shape) * self.rank
        return scale * _normal((workers, numbers), seed + 1_000_003).to(self.matrix.dtype)

    def losses(self, x: Tensor) -> Tensor:
        """Half the mean squared error of each row of ``x`` on the entries that are seen."""
        return self._errors(x, self.seen).square().sum(dim=(1, 2)) / (2 * self.seen.sum())

    def unseen_losses(self, x: Tensor) -> Tensor:
        """The same on the entries that are not seen: what completion is for."""
        hidden = ~self.seen
        return self._errors(x, hidden).square().sum(dim=(1, 2)) / (2 * hidden.sum())

    def gradients(self, x: Tensor) -> Tensor:
        """Of :meth:`losses`, for each row."""
        left, right = self._factors(x)
        errors = self._errors(x, self.seen) / self.seen.sum()
        slopes = [errors @ right, errors.mT @ left]
        return torch.cat([slope.reshape(len(x), -1) for slope in slopes], dim=1)

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = self.matrix.shape
        left, right = x.split([rows * self.rank, columns * self.rank], dim=1)
        return left.reshape(-1, rows, self.rank), right.reshape(-1, columns, self.rank)

    def _errors(self, x: Tensor, entries: Tensor) -> Tensor:
        left, right = self._factors(x)
        return (left @ right.mT - self.matrix) * entries


def elastic_floor(rank: int, penalty: float = 0.2) -> float:
    """What elastic averaging cannot get below while its center hardly moves: r lambda^2 (1/4 + 1/16).

    Each worker comes to rest where the spring to the center, near the mean of the starts, holds it.

    Args:
        rank: r.
        penalty: lambda of f + (lambda / 2) |x - center|^2.

    Example:
        >>> f"{elastic_floor(10):.3f}"
        '0.125'
    """
    return rank * penalty**2 * 5 / 16


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
