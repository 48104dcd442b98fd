"""What every page is made with: the packages it needs, and the environment of its template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    import jinja2

FOLDER = Path(__file__).parent
"""Where the templates lie."""


def require_packages() -> None:
    """Refuse to begin a page that cannot be finished.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed; a report needs matplotlib and jinja2; "
            "pip install 'shoal[report]'"
        ) from error


def environment() -> jinja2.Environment:
    """Templates beside this file; text is escaped, and a name that a template misses is an error.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
    """
    require_packages()
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
