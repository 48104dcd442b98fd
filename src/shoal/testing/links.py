"""A link without a supervisor: workers that share one small file.

    board = Board.create(tmp_path / "board", workers=4, coordinator="http://127.0.0.1:29510")
    link = BoardLink(tmp_path / "board", slot=0, name="w0")     # in any process or thread

The test holds the board: it opens the start barrier, asks workers to leave, tells the link that a
worker has died, and moves the coordinator. Every number has one writer, so no lock is needed.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep

from shoal.errors import ResumableStop

_ADDRESS_BYTES = 256
_OPEN_AT = _ADDRESS_BYTES
_SLOTS_AT = _OPEN_AT + 8
# Each slot: knocks, commits, dead, leave, arrived (int64 each).
_KNOCKS, _COMMITS, _DEAD, _LEAVE, _ARRIVED, _FIELDS = 0, 1, 2, 3, 4, 5


class Board:
    """The shared file: the coordinator's address, the barrier, and some numbers per worker.

    Args:
        path: the file, as made by :meth:`create`.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.workers = (len(self._map) - _SLOTS_AT) // (8 * _FIELDS)

    @classmethod
    def create(
        cls, path: Path | str, *, workers: int, coordinator: str, ready: bool = True
    ) -> Board:
        """Make the file for up to ``workers`` slots; ``ready`` opens the start barrier."""
        Path(path).write_bytes(bytes(_SLOTS_AT + 8 * _FIELDS * workers))
        board = cls(path)
        board.coordinator = coordinator
        board.ready = ready
        return board

    @property
    def coordinator(self) -> str:
        """The lighthouse's address."""
        return self._map[:_ADDRESS_BYTES].rstrip(b"\0").decode()

    @coordinator.setter
    def coordinator(self, address: str) -> None:
        self._map[:_ADDRESS_BYTES] = address.encode().ljust(_ADDRESS_BYTES, b"\0")

    @property
    def ready(self) -> bool:
        """Whether the start barrier is open."""
        return struct.unpack_from("<q", self._map, _OPEN_AT)[0] != 0

    @ready.setter
    def ready(self, value: bool) -> None:
        struct.pack_into("<q", self._map, _OPEN_AT, int(value))

    @property
    def arrived(self) -> int:
        """How many workers wait, or waited, at the start barrier."""
        return sum(self.get(slot, _ARRIVED) for slot in range(self.workers))

    def get(self, slot: int, field: int) -> int:
        """One number of a slot."""
        return struct.unpack_from("<q", self._map, self._at(slot, field))[0]

    def put(self, slot: int, field: int, value: int) -> None:
        """Set one number of a slot."""
        struct.pack_into("<q", self._map, self._at(slot, field), value)

    def ask_to_leave(self, slot: int) -> None:
        """What a supervisor does when it drains a worker."""
        self.put(slot, _LEAVE, 1)

    def leave_asked(self, slot: int) -> bool:
        """Whether the worker was asked to leave."""
        return self.get(slot, _LEAVE) != 0

    def mark_dead(self, slot: int) -> None:
        """What a supervisor does when a worker's process has ended."""
        self.put(slot, _DEAD, 1)

    def commits(self, slot: int) -> int:
        """The commits a worker reported last, 0 if none."""
        return self.get(slot, _COMMITS)

    def _at(self, slot: int, field: int) -> int:
        if not 0 <= slot < self.workers:
            raise IndexError(f"slot = {slot}; the board has {self.workers}")
        return _SLOTS_AT + 8 * (_FIELDS * slot + field)


class BoardLink:
    """A worker's view of a board; implements the elastic world's ``Link``.

    Args:
        path: the board's file.
        slot: this worker's slot; no other worker's, not even an earlier one's.
        name: this worker's name.
        token: the run's secret.
        advertise: address under which this worker is reached.
        patience_seconds: how long ``ready`` waits.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        slot: int,
        name: str = "",
        token: str = "a secret for tests",
        advertise: str = "127.0.0.1",
        patience_seconds: float = 60.0,
    ):
        self._board = Board(path)
        self._slot = slot
        self._patience = patience_seconds
        self._events = Path(f"{path}.events.{slot}.jsonl")
        self.name = name or f"w{slot}"
        self.token = token
        self.advertise = advertise

    @property
    def coordinator(self) -> str:
        """Address of the lighthouse."""
        return self._board.coordinator

    def ready(self) -> None:
        """Wait until the test opens the board."""
        deadline = monotonic() + self._patience
        self._board.put(self._slot, _ARRIVED, 1)
        while not self._board.ready:
            if monotonic() > deadline:
                raise ResumableStop(f"the board was not opened for {self._patience:g} s")
            sleep(0.002)

    def announce(self) -> None:
        """Knock."""
        board = self._board
        board.put(self._slot, _KNOCKS, board.get(self._slot, _KNOCKS) + 1)

    def joins(self) -> int:
        """Knocks of all other workers."""
        others = (slot for slot in range(self._board.workers) if slot != self._slot)
        return sum(self._board.get(slot, _KNOCKS) for slot in others)

    def trained(self) -> bool:
        """Whether another worker has reported commits and is not marked dead."""
        return any(
            self._board.get(slot, _COMMITS) > 0 and not self._board.get(slot, _DEAD)
            for slot in range(self._board.workers)
            if slot != self._slot
        )

    def leave_requested(self) -> bool:
        """Whether the test asked this worker to leave."""
        return self._board.leave_asked(self._slot)

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """Keep the commits."""
        self._board.put(self._slot, _COMMITS, int(progress.get("commits", 0)))

    def event(self, row: Mapping[str, object]) -> None:
        """Append the event to this worker's own file beside the board."""
        with self._events.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """A worker that ended in order is not alive."""
        self._board.mark_dead(self._slot)
