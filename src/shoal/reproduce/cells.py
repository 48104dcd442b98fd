"""Finished pieces of a long experiment, one file each: a stopped run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError
from shoal.reproduce.claims import plain
from shoal.reproduce.result import write_json


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A directory of finished cells that all belong to the same settings.

    Args:
        directory: where the files lie; made when the first cell is kept.
        settings: everything that decides a cell's numbers besides its own name, as JSON values.
    """

    directory: Path
    settings: Mapping[str, object]

    @property
    def fingerprint(self) -> str:
        """A short sum over the settings; cells of other settings do not mix with these."""
        text = json.dumps(plain(self.settings), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def path(self, name: str) -> Path:
        """The file of the cell ``name``."""
        return self.directory / f"{name}.json"

    def read(self, name: str) -> dict[str, object] | None:
        """The numbers of a finished cell, or None where it has not finished.

        Args:
            name: the cell's name, fit for a file name.

        Raises:
            UsageError: the file is not one of ours, or was made with other settings.
        """
        path = self.path(name)
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            fingerprint, values = document["fingerprint"], document["values"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} = unreadable ({error}); a finished cell is a JSON document written by "
                "this command; remove the file to run its cell again"
            ) from error
        if fingerprint != self.fingerprint:
            raise UsageError(
                f"{path} was made with other settings (fingerprint {fingerprint}, now "
                f"{self.fingerprint}); cells of different settings cannot be joined; "
                "choose another --out or remove that directory"
            )
        return values

    def keep(self, name: str, values: Mapping[str, object]) -> None:
        """Write a finished cell, whole or not at all.

        Args:
            name: the cell's name, fit for a file name.
            values: its numbers; those that are not finite are stored as null.
        """
        document = {
            "cell": name,
            "fingerprint": self.fingerprint,
            "settings": plain(self.settings),
            "values": plain(values),
        }
        write_json(self.path(name), document)
