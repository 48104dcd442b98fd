"""Reading ``run.json``: the configuration that the workers described, and what was asked of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.errors import UsageError

Config = Mapping[str, object]


def configuration(document: Config, events: Iterable[Config] = ()) -> Config:
    """The described configuration as one flat object.

    Args:
        document: ``run.json``: the description itself, or ``{"config": description}`` beside what
            the supervisor was asked for (whose ``workers``, a range, is kept as
            ``workers_asked``).
        events: rows of ``events.jsonl``; the last ``describe`` among them stands in where
            ``document`` holds no description (a run without a supervisor).

    Example:
        >>> configuration({"config": {"workers": 3}, "workers": "1:4", "command": ["x"]})
        {'workers': 3, 'workers_asked': '1:4', 'command': ['x']}
    """
    described = document.get("config")
    if not isinstance(described, Mapping) and "model" not in document:
        rows = [row["config"] for row in events if row.get("kind") == "describe"]
        described = rows[-1] if rows else None
    if not isinstance(described, Mapping):
        return document
    asked = {
        f"{key}_asked" if key in described else key: value
        for key, value in document.items()
        if key != "config"
    }
    return {**described, **asked}


def part(config: Config, key: str) -> Config:
    """An object inside the configuration; empty where it is missing."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def whole(config: Config, key: str, *, least: int = 1) -> int:
    """A whole number of the configuration.

    Raises:
        UsageError: it is missing, no whole number, or below ``least``.
    """
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"run.json, {key} = {value!r}; it is a whole number of at least {least}; was this run "
            "made by another version of shoal?"
        )
    return value
