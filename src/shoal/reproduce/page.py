"""The one self-contained HTML page of a reproduction."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from shoal.reproduce.claims import Verdict
from shoal.reproduce.result import Result


def words(value: object) -> str:
    """A value as people read it: numbers to four figures, mappings as ``name value`` pairs."""
    if value is None:
        return ""
    if isinstance(value, int | str):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        pairs = (f"{str(key).replace('_', ' ')} {words(item)}" for key, item in value.items())
        return ", ".join(pairs)
    if isinstance(value, list | tuple):
        return ", ".join(words(item) for item in value)
    return str(value)


def render(result: Result, directory: Path) -> str:
    """The page as text, its pictures inside it.

    Args:
        result: what to show.
        directory: where the result's figures lie.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["value"] = words
    source = resources.files("shoal.reproduce").joinpath("page.html.j2").read_text("utf-8")
    verdicts = [claim.verdict for claim in result.claims]
    return environment.from_string(source).render(
        result=result,
        pictures=[(_embedded(directory / path), caption) for path, caption in result.figures],
        counts={
            "shown": verdicts.count(Verdict.SHOWN),
            "not_shown": verdicts.count(Verdict.NOT_SHOWN),
            "not_run": verdicts.count(Verdict.NOT_RUN),
        },
    )


def _embedded(path: Path) -> str:
    picture = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"data:image/svg+xml;base64,{picture}"
