"""Whether and when a dead worker is replaced: bounded, with back-off. Pure, without a clock."""

from __future__ import annotations

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
# Exceptions before anything was ever committed are the script's: so many and no more are tried.
EARLY_EXCEPTIONS = 3


class Replacements:
    """Counts deaths that nothing excuses and says when the next worker may start.

    A death is excused, and the worker replaced at once, when the worker had taken part and the fleet
    has come further since the death before: a machine that loses workers now and then may go on for
    ever. All others count: the n-th within the window waits 0.5 s x 2^(n-2), at most 30 s.

    Args:
        max_restarts: deaths within the window that are still replaced.
        window_seconds: length of the window.
    """

    def __init__(self, max_restarts: int, window_seconds: float) -> None:
        self._max_restarts, self._window_seconds = max_restarts, window_seconds
        self._counted: list[float] = []
        self._best_at_death = -1.0
        self._exceptions = 0

    def died(self, now: float, *, took_part: bool, fleet_commits: float) -> float | None:
        """Record a death; the time from which on its replacement may start, None for never.

        Args:
            now: monotonic seconds.
            took_part: whether the worker had committed anything.
            fleet_commits: the most commits any worker has reported so far.
        """
        advanced = fleet_commits > self._best_at_death
        self._best_at_death = max(self._best_at_death, fleet_commits)
        if took_part and advanced:
            return now if self._max_restarts > 0 else None
        self._counted = [t for t in self._counted if now - t < self._window_seconds] + [now]
        count = len(self._counted)
        if count > self._max_restarts:
            return None
        if count == 1:
            return now
        return now + min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (count - 2))

    def is_hopeless(self, *, by_exception: bool, ever_committed: bool) -> bool:
        """Record how a worker died; whether the script itself must be broken."""
        if ever_committed:
            return False
        self._exceptions += by_exception
        return self._exceptions >= EARLY_EXCEPTIONS
