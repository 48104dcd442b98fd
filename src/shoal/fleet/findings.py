"""A finding of the doctor: what was looked at, how bad it is, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "trap"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "trap")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding.

    Args:
        name: what was looked at.
        level: ``ok``, ``warn`` (works, but know it) or ``trap`` (will fail or mislead).
        value: what was found.
        rule: what has to hold; empty for ``ok``.
        fix: what to do about it; empty for ``ok``.
    """

    name: str
    level: Level
    value: str
    rule: str = ""
    fix: str = ""

    def line(self) -> str:
        """The finding in one line: value; rule; fix."""
        return "; ".join(text for text in (self.value, self.rule, self.fix) if text)


def ok(name: str, value: str) -> Check:
    """A finding with nothing against it."""
    return Check(name=name, level="ok", value=value)


def warn(name: str, value: str, rule: str, fix: str) -> Check:
    """A finding that works but has to be known."""
    return Check(name=name, level="warn", value=value, rule=rule, fix=fix)


def trap(name: str, value: str, rule: str, fix: str) -> Check:
    """A finding that will fail or mislead."""
    return Check(name=name, level="trap", value=value, rule=rule, fix=fix)


def worst(checks: Iterable[Check]) -> Level:
    """The gravest level among checks; ``ok`` for none."""
    return LEVELS[max((LEVELS.index(check.level) for check in checks), default=0)]
