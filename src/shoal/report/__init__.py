"""What happened in a run, as figures and as one self-contained page."""

from __future__ import annotations

from pathlib import Path


def write_run_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory, finished or not, and return its path.

    The page holds all it shows: it opens without a network, without scripts and without shoal.

    Args:
        run_dir: a run directory, as `shoal run` writes it. A page that is there already is
            replaced, as a whole.

    Raises:
        UsageError: ``run_dir`` is not a run directory, or matplotlib or jinja2 is not installed.

    Example:
        >>> from pathlib import Path
        >>> from shoal.report import write_run_report
        >>> write_run_report(Path("nowhere"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        shoal.errors.UsageError: RUN = 'nowhere': no such directory; a run directory is what ...
    """
    from shoal.report.page import write

    return write(Path(run_dir))


__all__ = ["write_run_report"]
