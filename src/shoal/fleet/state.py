"""What a fleet has done so far: the counters every worker holds equal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.errors import UsageError

FORMAT = 2
# Format 1 did not count bodies: those of all epochs that had been trained were taken for completed.
READ = (1, 2)


def child(parent: str, *parts: object) -> str:
    """The id of a history that continues ``parent``; equal on all members that saw the same."""
    text = "|".join((parent, *map(str, parts)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Evaluation:
    """An evaluation under way: finished calls, the cursor of the present one, its partial results.

    ``parts`` are the chunks' payloads in the order of the samples; ``finished`` those of the last
    finished call, kept until the next training step, so that a worker which missed the last round
    still gets the answer.
    """

    calls: int = 0
    cursor: int = 0
    parts: list[bytes] = field(default_factory=list)
    finished: list[bytes] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Numbers and uint8 tensors."""
        return {
            "calls": self.calls,
            "cursor": self.cursor,
            "parts": [_as_tensor(part) for part in self.parts],
            "finished": [_as_tensor(part) for part in self.finished],
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.calls = int(values["calls"])
        self.cursor = int(values["cursor"])
        self.parts = [bytes(part.numpy()) for part in values["parts"]]
        self.finished = [bytes(part.numpy()) for part in values["finished"]]


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@dataclass
class Progress:
    """How far the run has come. Every field is equal on all workers at a commit point.

    Args:
        commits: committed exchanges (steps and rounds of evaluation); -1 while this worker is blank.
        lineage: id of the history of commits.
        step: committed optimizer steps.
        cursor: samples committed, counted over all epochs; the only position the data has.
        samples: length of the training set, None until the first ``batches``.
        seed: key of the data order.
        bodies: bodies of ``fleet.epochs`` that have come to their end; between an epoch's last step and
            the end of its body one less than ``epoch``.
        row: id of the last committed training step, for merging metrics along the lineage.
        mark: of the training set's values, see :mod:`shoal.fleet.data_mark`; empty if there is none.
    """

    commits: int = -1
    lineage: str = ""
    step: int = 0
    cursor: int = 0
    samples: int | None = None
    seed: int = 0
    bodies: int = 0
    row: str = ""
    mark: list[float] = field(default_factory=list[float])

    @property
    def epoch(self) -> int:
        """Epochs trained to their end, so also the number of the one to train now."""
        return self.cursor // self.samples if self.samples else 0

    def commit(self, *, token: str, cursor: int | None = None) -> None:
        """Count one committed exchange, and with ``cursor`` one optimizer step."""
        self.commits += 1
        self.lineage = child(self.lineage, token, self.commits)
        if cursor is not None:
            self.step += 1
            self.cursor = cursor
            self.row = child(self.row, token, self.step, cursor)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "format": FORMAT,
            "commits": self.commits,
            "lineage": self.lineage,
            "step": self.step,
            "cursor": self.cursor,
            "samples": self.samples,
            "seed": self.seed,
            "bodies": self.bodies,
            "row": self.row,
            "mark": list(self.mark),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`. Raises UsageError for another format version."""
        if values.get("format") not in READ:
            raise UsageError(
                f"state format = {values.get('format')}; this shoal reads formats up to {FORMAT}; "
                "use the version of shoal that wrote it"
            )
        self.commits = int(values["commits"])
        self.lineage = str(values["lineage"])
        self.step = int(values["step"])
        self.cursor = int(values["cursor"])
        self.samples = None if values["samples"] is None else int(values["samples"])
        self.seed = int(values["seed"])
        self.bodies = self.epoch if values["format"] == 1 else int(values["bodies"])
        self.row = str(values["row"])
        self.mark = [float(value) for value in values["mark"]]
