"""Scripts of joins, leaves and failures, for demonstrations and tests: pure data, no processes.

A script is a TOML file of ``[[event]]`` tables. Each has one mark, ``at_step`` or ``at_samples``
(committed by the fleet), and one action:

    [[event]]
    at_samples = 55000
    join = 2                  # two more workers

    [[event]]
    at_step = 40
    kill = 1                  # SIGKILL for the newest worker; with name = "w0" for that one

``leave`` asks for an orderly leave, ``hang`` stops a process with SIGSTOP, and
``kill_coordinator = true`` kills the lighthouse.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from shoal.errors import UsageError

ACTIONS = ("join", "leave", "kill", "hang", "kill_coordinator")
_MARKS = ("at_step", "at_samples")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One scripted event.

    Args:
        action: one of ``join leave kill hang kill_coordinator``.
        count: how many workers it concerns, >= 1.
        at_step: it fires once the fleet has committed so many steps, >= 0; or None.
        at_samples: it fires once the fleet has committed so many samples, >= 0.
        name: the worker concerned; None for the newest.

    Raises:
        ValueError: not exactly one mark, an unknown action, or a name where it means nothing.
    """

    action: str
    count: int = 1
    at_step: int | None = None
    at_samples: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action = {self.action!r}; it is one of {', '.join(ACTIONS)}")
        if (self.at_step is None) == (self.at_samples is None):
            raise ValueError("exactly one of at_step and at_samples says when; give one")
        mark = self.at_step if self.at_samples is None else self.at_samples
        if mark is not None and mark < 0:
            raise ValueError(f"mark = {mark}; a step or a number of samples is at least 0")
        if self.count < 1:
            raise ValueError(f"{self.action} = {self.count}; it is a number of workers, at least 1")
        if self.name is not None and (
            self.action not in ("leave", "kill", "hang") or self.count != 1
        ):
            raise ValueError(
                f"name = {self.name!r}; it goes with leave, kill or hang of 1 worker only"
            )

    def is_due(self, step: float, samples: float) -> bool:
        """Whether the fleet has reached the mark."""
        if self.at_step is not None:
            return step >= self.at_step
        assert self.at_samples is not None
        return samples >= self.at_samples

    @property
    def workers_change(self) -> int:
        """By how much the number of workers changes for good; a hang changes nothing."""
        return {"join": self.count, "leave": -self.count, "kill": -self.count}.get(self.action, 0)


def parse(text: str, source: str = "script") -> tuple[Event, ...]:
    """The events of a script, in the order of the file.

    Args:
        text: TOML as described above.
        source: what errors call it, e.g. the file's name.

    Raises:
        UsageError: not TOML (with the line), or an event that is wrong (with its number and field).
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not TOML: {error}") from None
    extra = sorted(set(document) - {"event"})
    tables = document.get("event", [])
    if extra or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        found = f"key {extra[0]!r}" if extra else "key 'event' is no array of tables"
        raise UsageError(f"{source}: {found}; a script consists of [[event]] tables only")
    return tuple(_event(table, f"{source}: event {i}") for i, table in enumerate(tables, start=1))


def load(path: str | Path) -> tuple[Event, ...]:
    """:func:`parse` of a file.

    Raises:
        UsageError: it cannot be read, or is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--script {path}: cannot be read: {error}") from None
    return parse(text, str(path))


def counts(events: Iterable[Event], start: int) -> list[int]:
    """Numbers of workers, ``start`` and that after each event.

    Events are taken in the order of the file, which is the order of their marks in any sane script.

    Example:
        >>> join = "[[event]]\\nat_step = 40\\njoin = 2"
        >>> counts(parse(join + "\\n[[event]]\\nat_step = 80\\nkill = 1"), 1)
        [1, 3, 2]
    """
    return list(accumulate((event.workers_change for event in events), initial=start))


def check(
    events: Sequence[Event], start: int, minimum: int, maximum: int, source: str = "script"
) -> None:
    """Refuse a script that would leave the range of workers.

    Raises:
        UsageError: after some event there would be too few or too many workers.
    """
    for number, workers in enumerate(counts(events, start)[1:], start=1):
        event = events[number - 1]
        if not minimum <= workers <= maximum:
            raise UsageError(
                f"{source}: event {number} ({event.action} = {event.count}) makes {workers} "
                f"workers; --workers allows {minimum} to {maximum}; change the event or --workers"
            )


def _event(table: dict[str, object], where: str) -> Event:
    unknown = sorted(set(table) - {*ACTIONS, *_MARKS, "name"})
    if unknown:
        raise UsageError(
            f"{where}: field {unknown[0]!r}; known are {', '.join((*_MARKS, *ACTIONS, 'name'))}"
        )
    actions = [key for key in ACTIONS if key in table]
    if len(actions) != 1:
        raise UsageError(
            f"{where}: actions {actions or 'none'}; give exactly one of {', '.join(ACTIONS)}"
        )
    action = actions[0]
    if action == "kill_coordinator":
        if table[action] is not True:
            raise UsageError(f"{where}: kill_coordinator = {table[action]!r}; it can only be true")
        count = 1
    else:
        count = _whole(table, action, where)
    name = table.get("name")
    if name is not None and not isinstance(name, str):
        raise UsageError(f'{where}: name = {name!r}; it is a worker\'s name in quotes, e.g. "w0"')
    marks = {key: _whole(table, key, where) for key in _MARKS if key in table}
    try:
        return Event(action=action, count=count, name=name, **marks)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _whole(table: dict[str, object], key: str, where: str) -> int:
    value = table[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {key} = {value!r}; it is a whole number")
    return value
