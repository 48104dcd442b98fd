"""Where perfect scaling ends, where more is still worth having, and where nothing more is gained.

From a fit, with B0 the smallest measured batch:

    B_ps   = 1.2 B0 + 0.2 B_crit    samples to the goal are 20 % above those at B0
    B_pay  = 2 B_crit               the last doubling of the batch that saves a quarter of the steps
    B_max  = 10 B_crit              steps are within 10 % of the least

The paper reads its borders off plots. The raw rules, applied to the measured S, stand beside the fitted
ones as *observed*: with realistic noise they scatter over several octaves.

Source: sections 2.1, 5.2 and 9.9 of the project's notes on Shallue et al. 2019; the 20 % is that of Zhang
et al. 2024. B_pay is ours: from B_crit to 2 B_crit the steps fall from 2 to 1.5 times S_min.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.study.fit import TradeoffFit
from shoal.study.intervals import Interval, RepeatedSteps

OVERHEAD = 1.2
NEAR_LEAST = 1.1
STILL_FALLING = -0.2


@dataclass(frozen=True, kw_only=True)
class Border:
    """A border between regimes.

    Args:
        value: the batch; infinite where it lies beyond the largest measured one.
        interval: with the fit's profile interval of B_crit; ends beyond the largest measured batch are
            infinite where the border must lie inside what was measured.
        is_resolved_by_batches: whether measured batches around it are at most a factor 2 apart.
    """

    value: float
    interval: Interval
    is_resolved_by_batches: bool


@dataclass(frozen=True, kw_only=True)
class Regimes:
    """One curve's regimes.

    Args:
        curve: its name.
        smallest: the smallest measured batch, B0.
        largest: the largest measured batch.
        perfect_to: B_ps.
        worth_to: B_pay.
        nothing_beyond: B_max; infinite where 10 B_crit is not inside what was measured.
        observed_perfect_to: the raw rule's B_ps; None without a measured S.
        observed_least_from: the raw rule's B_max; None where S still falls at the end.
        overlooked: batches the raw rules left out because a search there did not reach the goal.
    """

    curve: str
    smallest: int
    largest: int
    perfect_to: Border | None
    worth_to: Border | None
    nothing_beyond: Border | None
    observed_perfect_to: int | None
    observed_least_from: int | None
    overlooked: tuple[int, ...]


def regimes(fit: TradeoffFit | None, cells: Sequence[RepeatedSteps]) -> Regimes:
    """Borders of one curve.

    Args:
        fit: of the curve; None or a refused one leaves the fitted borders out.
        cells: S per batch, of the same curve.

    Raises:
        UsageError: no cell, or cells of several curves.
    """
    if len({cell.curve for cell in cells}) != 1:
        raise UsageError("cells = of no or several curves; regimes are of one; give one curve's")
    ordered = sorted(cells, key=lambda cell: cell.global_batch)
    known = {
        cell.global_batch: cell.centre
        for cell in ordered
        if cell.centre is not None and not cell.censored_at
    }
    batches = list(known)
    borders: tuple[Border | None, Border | None, Border | None] = (None, None, None)
    if fit is not None and fit.is_usable:
        borders = _fitted(fit)
    return Regimes(
        curve=ordered[0].curve,
        smallest=batches[0] if batches else ordered[0].global_batch,
        largest=batches[-1] if batches else ordered[-1].global_batch,
        perfect_to=borders[0],
        worth_to=borders[1],
        nothing_beyond=borders[2],
        observed_perfect_to=observed_perfect_to(known),
        observed_least_from=observed_least_from(known),
        overlooked=tuple(c.global_batch for c in ordered if c.global_batch not in known),
    )


def _fitted(fit: TradeoffFit) -> tuple[Border, Border, Border]:
    smallest, largest = fit.batches[0], fit.batches[-1]
    b_crit, interval = fit.b_crit.value, fit.b_crit.profile

    def border(offset: float, factor: float, *, must_be_measured: bool) -> Border:
        def at(crit: float) -> float:
            place = offset + factor * crit
            return math.inf if must_be_measured and place > largest else place

        value = at(b_crit)
        return Border(
            value=value,
            interval=Interval(at(interval.low), at(interval.high)),
            is_resolved_by_batches=_is_dense(fit.batches, value),
        )

    return (
        border(OVERHEAD * smallest, OVERHEAD - 1, must_be_measured=False),
        border(0.0, 2.0, must_be_measured=False),
        border(0.0, 10.0, must_be_measured=True),
    )


def _is_dense(batches: Sequence[int], place: float) -> bool:
    """Whether the measured batches next to a place are at most a factor 2 apart."""
    below = [b for b in batches if b <= place]
    above = [b for b in batches if b > place]
    if not below or not above:
        return False
    return above[0] <= 2 * below[-1] * (1 + 1e-9)


def observed_perfect_to(steps: Mapping[int, float]) -> int | None:
    """The raw rule: the largest B up to which B' S(B') stays within 1.2 of its least so far.

    Args:
        steps: S by batch.

    Example:
        >>> observed_perfect_to({1: 64, 2: 32, 4: 16, 8: 12, 16: 11})
        4
    """
    least, found = math.inf, None
    for batch in sorted(steps):
        samples = batch * steps[batch]
        least = min(least, samples)
        if samples > OVERHEAD * least:
            return found
        found = batch
    return found


def observed_least_from(steps: Mapping[int, float]) -> int | None:
    """The raw rule: the smallest B with S within 1.1 of the least; None where S still falls at the end.

    Args:
        steps: S by batch. "Still falls" is a slope of log S over log B below -0.2 between the last two.

    Example:
        >>> observed_least_from({1: 64, 2: 32, 4: 16, 8: 15.5})
        4
        >>> observed_least_from({1: 64, 2: 32, 4: 16}) is None
        True
    """
    batches = sorted(steps)
    if not batches:
        return None
    if len(batches) > 1:
        before, last = batches[-2:]
        if math.log(steps[last] / steps[before]) / math.log(last / before) < STILL_FALLING:
            return None
    least = min(steps.values())
    return next(batch for batch in batches if steps[batch] <= NEAR_LEAST * least)
