"""A claim of a paper, the criterion it is judged by, and the verdict.

The criterion is part of the repository before anything runs: a :class:`Statement` holds its words,
and a run can only add a value and a verdict to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

Value = float | int | str | Mapping[str, float] | None


class Verdict(StrEnum):
    """What a run says about a claim; ``not run`` is a result too, and is never read as success."""

    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One judged claim, a row of ``result.json``.

    Args:
        id: short name, unique within a result, e.g. ``"D2"``.
        claim: what is claimed, in one sentence.
        criterion: when it counts as shown, with its numbers.
        value: what was measured; None when nothing was.
        verdict: shown, not shown or not run.
        seeds: the seeds it rests on; empty for exact calculations.
    """

    id: str
    claim: str
    criterion: str
    value: Value
    verdict: Verdict
    seeds: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        """The row as plain JSON values; a number that is not finite becomes None."""
        return {
            "id": self.id,
            "claim": self.claim,
            "criterion": self.criterion,
            "value": plain(self.value),
            "verdict": str(self.verdict),
            "seeds": list(self.seeds),
        }


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim with its criterion, before any run.

    Args:
        id: short name, unique within a result.
        claim: what is claimed, in one sentence.
        criterion: when it counts as shown, with its numbers.
    """

    id: str
    claim: str
    criterion: str

    def judge(self, *, holds: bool, value: Value, seeds: Sequence[int] = ()) -> Claim:
        """The claim with what was measured.

        Args:
            holds: whether the criterion is met. What a number that is not finite means is the
                caller's to decide; NaN compares as not met.
            value: the measured value or values.
            seeds: the seeds it rests on.

        Returns:
            A claim that is shown or not shown.
        """
        verdict = Verdict.SHOWN if holds else Verdict.NOT_SHOWN
        return self._with(value, verdict, seeds)

    def not_run(self) -> Claim:
        """The claim where the run did not contain what its criterion needs."""
        return self._with(None, Verdict.NOT_RUN, ())

    def _with(self, value: Value, verdict: Verdict, seeds: Sequence[int]) -> Claim:
        return Claim(
            id=self.id,
            claim=self.claim,
            criterion=self.criterion,
            value=value,
            verdict=verdict,
            seeds=tuple(seeds),
        )


def plain(value: object) -> object:
    """``value`` as strict JSON can hold it: containers copied, non-finite numbers None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
