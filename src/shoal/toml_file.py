"""A user's TOML file, read with one clear line where that fails."""

from __future__ import annotations

import tomllib
from pathlib import Path

from shoal.errors import UsageError


def read_toml(path: Path, what: str) -> dict[str, object]:
    """The file's tables.

    Args:
        path: the file.
        what: it should be, e.g. ``"the study's TOML file"``; for the text of the error.

    Raises:
        UsageError: it cannot be read, or is not TOML; the line begins with the file.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(f"{path}: cannot be read ({reason}); give {what}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not TOML ({error}); correct it there") from error
