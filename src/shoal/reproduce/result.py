"""What a reproduction leaves behind: ``result.json`` and what its page is made of."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.reproduce.claims import Claim, Verdict, plain

Cell = str | float | int | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page and of the terminal.

    Args:
        title: one line.
        columns: the heads.
        rows: the cells; as many in each row as there are heads.
        note: how to read it, or what is ours in it; may be empty.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.title, row)

    def to_dict(self) -> dict[str, object]:
        """The table as plain JSON values."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": plain(self.rows),
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """One reproduction.

    Args:
        name: the name on the command line, e.g. ``"dynamic"``.
        title: the page's head.
        claims: the judged claims.
        environment: where and with what it ran.
        tables: measured and published numbers side by side.
        caveats: what a reader must know before quoting anything.
        choices: what is ours and not the paper's.
        not_run: why a claim was not run, by its id.
        figures: picture files relative to the result's directory, with a caption each.
        raw: every number behind the tables, by name, e.g. accuracies per method and seed.
    """

    name: str
    title: str
    claims: tuple[Claim, ...]
    environment: Mapping[str, object]
    tables: tuple[Table, ...] = ()
    caveats: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[tuple[str, str], ...] = ()
    raw: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [claim.id for claim in self.claims]
        assert len(set(ids)) == len(ids), ids

    @property
    def all_asked_shown(self) -> bool:
        """Whether no claim that was run came out as not shown."""
        return all(claim.verdict is not Verdict.NOT_SHOWN for claim in self.claims)

    def to_dict(self) -> dict[str, object]:
        """The document of ``result.json`` and of ``--json``."""
        return {
            "name": self.name,
            "claims": [claim.to_dict() for claim in self.claims],
            "environment": plain(self.environment),
            "not_run": dict(self.not_run),
            "caveats": list(self.caveats),
            "choices": list(self.choices),
            "tables": [table.to_dict() for table in self.tables],
            "figures": [path for path, _ in self.figures],
            "raw": plain(self.raw),
        }


def environment(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, object]:
    """Versions, processor and threads of this process, as plain JSON values.

    Args:
        packages: distributions whose versions matter to the numbers.
    """
    import torch

    import shoal

    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": versions,
    }


def write_json(path: Path, document: object) -> None:
    """Write ``document`` so that a reader sees the old file or the whole new one, never a part."""
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Replace the file at ``path`` in one step, making its directory if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
