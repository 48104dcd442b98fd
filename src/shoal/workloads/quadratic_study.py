"""Steps to a goal against batch size on a noisy quadratic, known in closed form up to B = 2**20.

The task is ``sum_i h_i x_i^2 / 2`` with ``h_i = 1 / i``, ``i = 1 .. 10^4``, a gradient of ``B`` samples
being ``h_i x_i + n_i`` with ``Var(n_i) = h_i / B``, and ``E x_i(0)^2 = 1``. For any linear optimizer the
expected loss (*risk*) after t steps splits into what is left of the start and what the noise added,

    risk(t) = start(t) + noise(t) / B,

with both terms free of B. So one setting is solved once and serves every batch size, and a study whose
truth is known, optimum included, costs seconds. It shows that batch sizes scale perfectly, then less,
then not at all, and that momentum only moves the end of perfect scaling. It says nothing about
generalisation or moving curvature, and nothing in it is random: evaluation noise is what
:mod:`shoal.workloads.synthetic_curves` adds.

SGD, per coordinate: ``s_t = s* + (1 - lr h)^(2t) (1 - s*)``, ``s* = lr / (B (2 - lr h))``.
Heavy ball (``v' = m v + g``, ``x' = x - lr v'``) with ``l1, l2`` the roots of
``l^2 - (1 + m - lr h) l + m`` and the impulse response ``p_j = (l1^(j+1) - l2^(j+1)) / (l1 - l2)``:

    E x_t = x_0 (p_t - m p_(t-1))        Var x_t = lr^2 h / B sum_(j < t) p_j^2.

Source: Zhang et al. 2019 (arXiv 1907.04164), the noisy quadratic model with the settings of its released
code; the closed form of heavy ball is elementary and checked against the moment recursion in the tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST_STEPS = 2**32


@dataclass(frozen=True, kw_only=True)
class QuadraticTask:
    """The task of the study.

    Args:
        coordinates: number of curvatures ``1 / i``.
        goal: the risk to come below, strictly; > 0.

    Raises:
        ValueError: a number outside its range.
    """

    coordinates: int = 10_000
    goal: float = 0.01
    curvatures: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.coordinates < 1 or not self.goal > 0:
            raise ValueError(
                f"coordinates = {self.coordinates}, goal = {self.goal}; there is at least 1 "
                "coordinate and the goal is positive"
            )
        object.__setattr__(self, "curvatures", 1.0 / np.arange(1, self.coordinates + 1))


class Setting(Protocol):
    """One optimizer with its learning rate and momentum on a task."""

    @property
    def lr(self) -> float: ...

    @property
    def momentum(self) -> float: ...

    @property
    def noise_limit(self) -> float:
        """``noise(t)`` as t grows; infinite where the setting is unstable."""
        ...

    def risk(self, step: int) -> tuple[float, float]:
        """``(start(t), noise(t))``."""
        ...


class Sgd:
    """Plain SGD at one learning rate.

    Its risk falls strictly where it comes near a goal at all: ``1 - s*`` is positive there.

    Args:
        task: the quadratic.
        lr: learning rate, > 0.
    """

    momentum = 0.0

    def __init__(self, task: QuadraticTask, lr: float) -> None:
        h = task.curvatures
        self.lr = lr
        self._h = h
        kept = (1 - lr * h) ** 2
        self._stable = bool(lr * h[0] < 2)
        # log(0) is right: a coordinate solved in one step.
        with np.errstate(divide="ignore"):
            self._log = np.log(kept)
        self._steady = lr / (2 - lr * h) if self._stable else np.full_like(h, math.inf)

    @property
    def noise_limit(self) -> float:
        """``noise(t)`` as t grows."""
        return float(self._h @ self._steady / 2)

    def risk(self, step: int) -> tuple[float, float]:
        """``(start(t), noise(t))``."""
        if step == 0:
            return float(self._h.sum() / 2), 0.0
        left = np.exp(step * self._log)
        return float(self._h @ left / 2), float(self._h @ (self._steady * (1 - left)) / 2)


class HeavyBall:
    """SGD with momentum in buffer form at one setting.

    Args:
        task: the quadratic.
        lr: learning rate, > 0; the effective one is ``lr / (1 - momentum)``.
        momentum: m, in (0, 1).
    """

    # Where the roots meet, the closed form divides by their distance; that far apart it is exact to
    # 1e-4 of the one coordinate concerned.
    _apart = 1e-6

    def __init__(self, task: QuadraticTask, lr: float, momentum: float) -> None:
        h = task.curvatures
        self.lr, self.momentum, self._h = lr, momentum, h
        self._stable = bool(lr * h[0] < 2 * (1 + momentum))
        middle = (1 + momentum - lr * h) / 2
        spread = np.sqrt((middle**2 - momentum).astype(np.complex128))
        spread = np.where(np.abs(spread) < self._apart, self._apart, spread)
        # The larger root by modulus first; the other is momentum / first.
        self._first = np.where(middle >= 0, middle + spread, middle - spread)
        self._second = momentum / self._first
        self._log = np.log(self._first)
        self._log_momentum = math.log(momentum)
        gap = self._first - self._second
        self._over_gap = 1 / gap
        self._over_gap2 = self._over_gap**2
        self._scale = lr**2 * h
        # With sums of l1^2, l1 l2 and l2^2 over the steps.
        self._first_sum = self._first**2 / (1 - self._first**2)
        self._cross_sum = momentum / (1 - momentum)
        self._second_sum = self._second**2 / (1 - self._second**2)

    @property
    def noise_limit(self) -> float:
        """``noise(t)`` as t grows."""
        if not self._stable:
            return math.inf
        total = self._over_gap2 * (self._first_sum - 2 * self._cross_sum + self._second_sum)
        return float(self._h @ (self._scale * total.real) / 2)

    def risk(self, step: int) -> tuple[float, float]:
        """``(start(t), noise(t))``."""
        if step == 0:
            return float(self._h.sum() / 2), 0.0
        first = np.exp(step * self._log)
        both = math.exp(step * self._log_momentum)
        # The second power is no larger than the first: below that it adds nothing.
        second = np.divide(both, first, out=np.zeros_like(first), where=np.abs(first) > 1e-150)
        impulse = (first * self._first - second * self._second) * self._over_gap
        before = (first - second) * self._over_gap
        mean = (impulse - self.momentum * before).real
        total = self._over_gap2 * (
            self._first_sum * (1 - first**2)
            - 2 * self._cross_sum * (1 - both)
            + self._second_sum * (1 - second**2)
        )
        start = self._h @ mean**2 / 2
        return float(start), float(self._h @ (self._scale * total.real) / 2)


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best setting at one global batch.

    Args:
        global_batch: B.
        steps: S, the fewest steps to the goal over all settings tried.
        lr: of the best setting.
        momentum: of the best setting.
    """

    global_batch: int
    steps: int
    lr: float
    momentum: float

    @property
    def effective_lr(self) -> float:
        """``lr / (1 - momentum)``."""
        return self.lr / (1 - self.momentum)


def steps_to_goal(task: QuadraticTask, setting: Setting, global_batch: int) -> int | None:
    """The steps after which the risk is below the goal, for one setting.

    By doubling and bisection; exact where the risk falls (always for SGD). Heavy ball may oscillate: then
    an earlier dip of the risk below the goal, shorter than the points looked at, goes unseen.

    Args:
        task: the quadratic.
        setting: optimizer, learning rate and momentum.
        global_batch: B, >= 1.

    Returns:
        Steps, or None where the noise keeps the risk above the goal for ever.
    """
    if setting.noise_limit / global_batch >= task.goal:
        return None
    high = 1
    while not _is_met(task, setting, global_batch, high):
        high *= 2
        if high > MOST_STEPS:
            return None
    low = high // 2
    if low == 0 and _is_met(task, setting, global_batch, 0):
        return 0
    return _bisect(task, setting, global_batch, low, high)


def _bisect(task: QuadraticTask, setting: Setting, global_batch: int, low: int, high: int) -> int:
    """The step after ``low``, where the goal is not met, at which it is met as at ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        if _is_met(task, setting, global_batch, middle):
            high = middle
        else:
            low = middle
    return high


def _is_met(task: QuadraticTask, setting: Setting, global_batch: int, step: int) -> bool:
    start, noise = setting.risk(step)
    return start + noise / global_batch < task.goal


def sgd_optima(
    task: QuadraticTask,
    batches: Sequence[int],
    *,
    learning_rates: int = 2_000,
    largest_lr: float = 1.999,
) -> list[Optimum]:
    """The fewest steps plain SGD takes at each batch size, over a fine grid of learning rates.

    Args:
        task: the quadratic.
        batches: global batches, each >= 1.
        learning_rates: how many, log-spaced in ``lr / (2 - lr)`` from 1e-3 on, so that both ends are
            resolved.
        largest_lr: the largest, below 2, the stability limit. The largest batches have their optimum
            there: a grid that leaves it out makes the plateau look flatter than it is.

    Returns:
        One optimum per batch, in order. About 2 s for ten batches and 2,000 learning rates.
    """
    odds = np.geomspace(1e-3 / 1.999, largest_lr / (2 - largest_lr), learning_rates)
    rates = 2 * odds / (1 + odds)
    # From the middle outwards, so that good settings come early and rule the others out.
    order = sorted(range(learning_rates), key=lambda k: (k % 32 != 16, k))
    best = _Best(task, batches)
    best.try_all(Sgd(task, float(rates[k])) for k in order)
    return best.optima()


def heavy_ball_optima(
    task: QuadraticTask,
    batches: Sequence[int],
    *,
    least_pull: float = 1e-5,
    rates: int = 24,
    momenta: int = 17,
    zooms: int = 4,
) -> list[Optimum]:
    """The fewest steps heavy ball takes at each batch size: a grid, then zooms on its best point.

    Args:
        task: the quadratic.
        batches: global batches, each >= 1.
        rates: effective learning rates, log-spaced from 3e-3 to 300.
        least_pull: the smallest ``1 - m``, in (0, 0.9).
        momenta: values of ``1 - m``, log-spaced from there to 0.9; m = 0 is SGD's and tried too.
        zooms: rounds of 25 settings around the best, each of half the spacing of the one before.

    Returns:
        One optimum per batch, in order. About 10 s for ten batches.
    """
    effective = np.geomspace(3e-3, 300.0, rates)
    pull = np.geomspace(least_pull, 0.9, momenta)
    best = _Best(task, batches)
    for optimum in sgd_optima(task, batches, learning_rates=10 * rates):
        best.try_all([Sgd(task, optimum.lr)], [optimum.global_batch])
    best.try_all(_grid(task, effective, pull))
    ratios = (effective[1] / effective[0], pull[1] / pull[0])
    for zoom in range(zooms):
        for optimum in best.optima():
            if optimum.momentum == 0:
                continue
            centres = (optimum.effective_lr, 1 - optimum.momentum)
            power = np.array([-1.0, -0.5, 0.0, 0.5, 1.0]) / 2**zoom
            around = [c * ratio**power for c, ratio in zip(centres, ratios, strict=True)]
            inside = around[1][around[1] >= least_pull]
            best.try_all(_grid(task, around[0], inside), [optimum.global_batch])
    return [_without_earlier_dip(task, optimum) for optimum in best.optima()]


def _grid(task: QuadraticTask, effective: Array, pull: Array) -> Iterable[HeavyBall]:
    for one_less in pull:
        for rate in effective:
            lr, momentum = float(rate * one_less), float(1 - one_less)
            if 0 < momentum < 1 and lr < 2 * (1 + momentum):
                yield HeavyBall(task, lr, momentum)


class _Best:
    """The best setting per batch; a setting that is no better costs one look per batch."""

    def __init__(self, task: QuadraticTask, batches: Sequence[int]) -> None:
        self._task = task
        self._best: dict[int, Optimum | None] = dict.fromkeys(batches)

    def try_all(self, settings: Iterable[Setting], batches: Sequence[int] | None = None) -> None:
        """Try each setting at each of ``batches``, all of them by default."""
        for setting in settings:
            limit = setting.noise_limit
            for batch in self._best if batches is None else batches:
                if limit / batch < self._task.goal:
                    self._try(setting, batch)

    def _try(self, setting: Setting, batch: int) -> None:
        best = self._best[batch]
        if best is not None and (
            best.steps == 0 or not _is_met(self._task, setting, batch, best.steps - 1)
        ):
            return
        steps = steps_to_goal(self._task, setting, batch)
        if steps is not None and (best is None or steps < best.steps):
            self._best[batch] = Optimum(
                global_batch=batch, steps=steps, lr=setting.lr, momentum=setting.momentum
            )

    def optima(self) -> list[Optimum]:
        missing = [batch for batch, best in self._best.items() if best is None]
        if missing:
            raise ValueError(
                f"global batches = {missing}; no setting of the grid comes below the goal "
                f"{self._task.goal} there; choose larger batches or an easier goal"
            )
        return [best for best in self._best.values() if best is not None]


def _without_earlier_dip(task: QuadraticTask, optimum: Optimum) -> Optimum:
    """The optimum with the earliest crossing found at 200 points down to a quarter of its steps."""
    if optimum.momentum == 0:
        return optimum
    setting = HeavyBall(task, optimum.lr, optimum.momentum)
    points = np.unique(np.geomspace(max(optimum.steps / 4, 1), optimum.steps, 200).astype(int))
    batch = optimum.global_batch
    for low, high in itertools.pairwise(int(point) for point in points):
        if _is_met(task, setting, batch, high):
            return replace(optimum, steps=_bisect(task, setting, batch, low, high))
    return optimum
