"""A noisy quadratic whose expected loss under momentum SGD is known exactly, without sampling.

The loss is ``sum_i h_i w_i^2 / 2`` over independent coordinates; a gradient averaged over a global
batch of ``B`` samples is ``h_i w_i + n_i``, ``Var(n_i) = h_i / B``. Momentum SGD in buffer form,

    u' = mu u + h w + n            w' = w - lr u',

is linear in ``(w, u)``, so its second moments follow a linear recursion and need no random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class NoisyQuadratic:
    """The task: curvatures, and gradient noise proportional to them.

    Use it to judge learning-rate rules without seeds. It has no minimum that moves and no
    non-convexity, so it says nothing about generalisation.

    Args:
        curvatures: eigenvalues h_i of the Hessian, each > 0. The default is 30 of them, log-spaced
            from 0.01 to 1, the setting of the reference table.

    Raises:
        ValueError: a curvature that is not positive.

    Source: the noise model of section 6.2 of the notes on Dynamic Mini-batch SGD (variance h/B).
    """

    curvatures: tuple[float, ...] = tuple(float(h) for h in np.logspace(-2, 0, 30))

    def __post_init__(self) -> None:
        if not self.curvatures or min(self.curvatures) <= 0:
            raise ValueError(
                f"curvatures = {self.curvatures}: at least one is needed and each must be "
                "positive; pass the Hessian's positive eigenvalues"
            )

    def moments(self, start: float = 0.0) -> Moments:
        """Second moments at ``w = start`` in every coordinate, with an empty momentum buffer.

        Args:
            start: the common starting point; 0 is the minimum.

        Returns:
            Moments with the covariance of shape (curvatures, 2, 2).
        """
        covariance = np.zeros((len(self.curvatures), 2, 2))
        covariance[:, 0, 0] = start**2
        return Moments(task=self, covariance=covariance)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Exact second moments of ``(w, u)`` per curvature at one step.

    Args:
        task: the quadratic.
        covariance: E[(w, u)(w, u)^T], shape (curvatures, 2, 2).
    """

    task: NoisyQuadratic
    covariance: Array

    @property
    def loss(self) -> float:
        """Expected loss, ``sum h E[w^2] / 2``."""
        return float(np.asarray(self.task.curvatures) @ self.covariance[:, 0, 0] / 2)

    @property
    def buffer_variance(self) -> float:
        """``sum E[u^2]`` over the coordinates: the buffer's expected squared norm."""
        return float(self.covariance[:, 1, 1].sum())

    def step(
        self, *, lr: float, momentum: float, global_batch: int, momentum_factor: float = 1.0
    ) -> Moments:
        """Moments after one step of momentum SGD.

        With ``P`` the covariance, ``P' = A P A^T + (h / B) b b^T``,
        ``A = [[1 - lr h, -lr c], [h, c]]``, ``b = (-lr, 1)``, ``c = momentum * momentum_factor``.

        Args:
            lr: learning rate of this step, > 0.
            momentum: momentum coefficient mu, in [0, 1).
            global_batch: B, samples in this step's gradient, >= 1.
            momentum_factor: what the buffer is multiplied by before the step.

        Returns:
            New moments; ``self`` is unchanged.
        """
        h = np.asarray(self.task.curvatures)
        carried = momentum * momentum_factor
        transition = np.empty((len(h), 2, 2))
        transition[:, 0, 0] = 1 - lr * h
        transition[:, 0, 1] = -lr * carried
        transition[:, 1, 0] = h
        transition[:, 1, 1] = carried
        kick = np.array([-lr, 1.0])
        noise = (h / global_batch)[:, None, None] * np.outer(kick, kick)
        covariance = transition @ self.covariance @ transition.transpose(0, 2, 1) + noise
        return Moments(task=self.task, covariance=covariance)
