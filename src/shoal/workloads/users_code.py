"""A mistake in the user's own workload told in one line: what raised, what it said, and where."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ShoalError, UsageError

_OURS = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def users_code(what: str, *, but: type[Exception] = ShoalError) -> Iterator[None]:
    """Turn whatever the user's code raises within it into one line.

    Args:
        what: of the user's is called, as the line begins.
        but: what goes through as it is, beside shoal's own errors.

    Raises:
        UsageError: it raised; the error itself is the cause.
    """
    try:
        yield
    except (ShoalError, but):
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        kind = type(error).__name__
        raise UsageError(
            f"{what} = raised {kind}{f' ({said})' if said else ''}{_place(error)}; correct it there"
        ) from error


def _place(error: Exception) -> str:
    """The last line of the user's that led to it, not one of a library's; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        library = "site-packages" in path.parts or frame.filename.startswith("<")
        if not library and _OURS not in path.resolve().parents:
            return f" at {path.name}, line {frame.lineno}"
    return ""
