"""The first sentence: what the study says about batches, to act on; and what it does not say.

"nesterov: perfect scaling to 32, worth having to 300, nothing beyond 1,500; measured with 5 searches per
point." Numbers come from the fit, with their intervals in a second sentence; where the borders are not
resolved the sentence says that, and what is known instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.study.fit import TradeoffFit
from shoal.study.intervals import RepeatedSteps
from shoal.study.regimes import Border, Regimes

WIDE = 4.0
"""An interval wider than this factor up or down is called rough."""


def finding(
    found: Regimes, fit: TradeoffFit | None, cells: Sequence[RepeatedSteps]
) -> tuple[str, str]:
    """Two sentences about one curve.

    Args:
        found: its regimes.
        fit: its fit, if there is one.
        cells: S at each of its batches.

    Returns:
        What to do, and how sure it is. Both end with a full stop.
    """
    if not any(cell.steps for cell in cells):
        return _nothing_reached(cells)
    if found.perfect_to is None or found.worth_to is None or found.nothing_beyond is None:
        return _unresolved(found, fit, cells)
    beyond = (
        f"nothing beyond {number(found.nothing_beyond.value)}"
        if math.isfinite(found.nothing_beyond.value)
        else f"still falling at the largest batch, {number(found.largest)}"
    )
    worth = found.worth_to.value
    till = f"worth having to {number(worth)}" + (
        "" if worth <= found.largest else f" by the fit (measured to {number(found.largest)})"
    )
    lead = (
        f"Perfect scaling to {number(found.perfect_to.value)}, {till}, {beyond}; measured with "
        f"{_searches(cells)}."
    )
    return lead, _sureness(found, fit, cells)


def _nothing_reached(cells: Sequence[RepeatedSteps]) -> tuple[str, str]:
    ends = [end for cell in cells for end in cell.censored_at]
    far = f" within {number(max(ends))} steps" if ends else ""
    return (
        f"No search reached the goal{far}.",
        "Nothing can be said about batches; give an easier goal, more steps, or another space.",
    )


def _unresolved(
    found: Regimes, fit: TradeoffFit | None, cells: Sequence[RepeatedSteps]
) -> tuple[str, str]:
    known = [cell for cell in cells if cell.centre is not None]
    if fit is None:
        many = len({cell.global_batch for cell in known})
        lead = f"Not resolved: the goal was reached at {many} batches, too few for a fit"
    elif fit.batches[-1] <= fit.b_crit.value:
        low = fit.b_crit.profile.low
        least = f"; more still helps to {number(low)} at least" if low > fit.batches[0] else ""
        lead = f"Steps still fall at the largest measured batch, {number(fit.batches[-1])}{least}"
    else:
        high = fit.b_crit.profile.high
        most = f"; B_crit is below {number(high)}" if math.isfinite(high) else ""
        lead = (
            f"Scaling is past its perfect part at the smallest measured batch, "
            f"{number(fit.batches[0])}, already{most}"
        )
    observed = []
    if found.observed_perfect_to is not None:
        observed.append(
            f"observed, not fitted: perfect scaling to {number(found.observed_perfect_to)}"
        )
    if found.observed_least_from is not None:
        observed.append(f"steps near their least from {number(found.observed_least_from)}")
    why = fit.refusal if fit is not None else "three batches that reached the goal are needed"
    rest = "; ".join([why[0].upper() + why[1:], *observed])
    return f"{lead}; measured with {_searches(cells)}.", f"{rest}."


def _sureness(found: Regimes, fit: TradeoffFit | None, cells: Sequence[RepeatedSteps]) -> str:
    assert found.perfect_to is not None and found.worth_to is not None
    parts = [
        f"95 % intervals: {_interval(found.perfect_to, found.largest)} for perfect scaling, "
        f"{_interval(found.worth_to, None)} for worth having"
    ]
    if found.nothing_beyond is not None and math.isfinite(found.nothing_beyond.value):
        parts[0] += f", {_interval(found.nothing_beyond, found.largest)} for nothing beyond"
    if fit is not None:
        low, high = fit.b_crit.profile
        if high / max(low, 1e-9) > WIDE**2:
            parts.append("take them as orders of magnitude only")
        if fit.lack_of_fit is not None and fit.lack_of_fit.is_evident:
            parts.append(
                f"the curve's form does not explain the means (p = {fit.lack_of_fit.p_value:.1g})"
            )
        if fit.left_out:
            some = len(fit.left_out)
            parts.append(f"{some} {'search' if some == 1 else 'searches'} left out")
    if not all(
        b.is_resolved_by_batches
        for b in (found.perfect_to,)
        if found.smallest < b.value < found.largest
    ):
        parts.append("measured batches are more than a factor 2 apart there")
    if max(len(c.steps) + len(c.censored_at) for c in cells) < 2:
        parts.append("a single search per point shows nothing of its own scatter")
    return "; ".join(parts) + "."


def _interval(border: Border, largest: int | None) -> str:
    low, high = border.interval
    if math.isinf(low):
        return f"beyond {number(largest or low)}"
    if math.isinf(high):
        end = f"beyond {number(largest)}" if largest is not None else "without end"
        return f"{number(low)} to {end}"
    return f"{number(low)} to {number(high)}"


def _searches(cells: Sequence[RepeatedSteps]) -> str:
    counts = sorted({len(c.steps) + len(c.censored_at) for c in cells if c.steps or c.censored_at})
    if not counts:
        return "no search"
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{many} {'search' if counts[-1] == 1 else 'searches'} per point"


def number(value: float) -> str:
    """A fitted batch to two digits; a measured one, which is an integer, as it is.

    Example:
        >>> number(31.2), number(1487.0), number(4.2), number(1024)
        ('31', '1,500', '4.2', '1,024')
    """
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "infinity"
    if value < 10:
        return f"{value:.2g}"
    digits = math.floor(math.log10(value)) - 1
    rounded = round(value / 10**digits) * 10**digits
    return f"{rounded:,.0f}"
