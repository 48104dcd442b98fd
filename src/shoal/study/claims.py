"""Who works on what: claims by atomic creation, so that no file is ever written by two processes.

A claim on a piece of work NAME is a file ``NAME.N``. It is made by exclusive creation, belongs to the
process that made it, and is alive as long as that process is, or, seen from another machine, as long as
its time of change is younger than the lease. Who finds the newest claim dead makes ``NAME.N+1``; of
several who try, one succeeds. N is also the number of the segment under which the owner writes rows, so
that what a stopped and replaced owner writes late never wins over its successor's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError

LEASE_SECONDS = 60.0
_RELEASED = ".released"


class ClaimLost(ShoalError):
    """Another process took the work over, because this one had not been heard of for a whole lease."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds the newest claim on a piece of work.

    Args:
        number: N of the claim, from 0; -1 if nobody ever claimed it.
        alive: whether its owner still holds it.
        owner: what the owner wrote about itself; empty if it was killed before it could.
    """

    number: int
    alive: bool
    owner: dict[str, object]


class Claim:
    """A piece of work that this process holds; a thread keeps the lease fresh until it is given back."""

    def __init__(self, claims: Claims, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self._claims = claims
        self._path = claims.path(name, number)
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._keep_fresh, name=f"claim {name}", daemon=True)
        self._beat.start()

    def check(self) -> None:
        """Make sure that the work is still this process's.

        Raises:
            ClaimLost: somebody else has it now; write nothing more.
        """
        if self._claims.path(self.name, self.number + 1).exists():
            self._ended.set()
            raise ClaimLost(
                f"{self.name}: taken over by another process, since this one had stood still for more "
                f"than {self._claims.lease_seconds:.0f} s; it stops and leaves the work to that one"
            )

    def release(self) -> None:
        """Give the work back, done or not. May be called twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._path.with_name(self._path.name + _RELEASED))

    def _keep_fresh(self) -> None:
        while not self._ended.wait(self._claims.lease_seconds / 4):
            with contextlib.suppress(OSError):
                os.utime(self._path)


class Claims:
    """The claims of one study.

    Args:
        directory: where they lie; made when missing.
        runner: this process's name, for those who look on.
        lease_seconds: how long an owner on another machine may be silent; > 0.
    """

    def __init__(
        self, directory: Path, *, runner: str, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self.directory = directory
        self.runner = runner
        self.lease_seconds = lease_seconds
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, name: str, number: int) -> Path:
        """The file of a claim that is held or was given up by dying."""
        return self.directory / f"{name}.{number}"

    def take(self, name: str) -> Claim | None:
        """Claim ``name``, if nobody alive holds it.

        Returns:
            The claim, or None when somebody holds it or was faster.
        """
        holder = self.holder(name)
        if holder.alive:
            return None
        number = holder.number + 1
        if self.path(name, number).with_name(f"{name}.{number}{_RELEASED}").exists():
            return None
        try:
            descriptor = os.open(
                self.path(name, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644
            )
        except FileExistsError:
            return None
        with os.fdopen(descriptor, "w") as file:
            json.dump({"runner": self.runner, **_me()}, file)
        return Claim(self, name, number)

    def holder(self, name: str) -> Holder:
        """Who holds ``name`` now."""
        number, released = -1, False
        with os.scandir(self.directory) as entries:
            for entry in entries:
                stem, _, end = entry.name.removesuffix(_RELEASED).rpartition(".")
                if stem == name and end.isdecimal() and int(end) > number:
                    number, released = int(end), entry.name.endswith(_RELEASED)
        if number < 0 or released:
            return Holder(number=number, alive=False, owner={})
        path = self.path(name, number)
        owner: dict[str, object] = {}
        try:
            changed = path.stat().st_mtime
            with contextlib.suppress(ValueError):
                owner = json.loads(path.read_text())
        except FileNotFoundError:
            # Released in this instant.
            return Holder(number=number, alive=False, owner={})
        return Holder(number=number, alive=self._is_alive(owner, changed), owner=owner)

    def _is_alive(self, owner: dict[str, object], changed: float) -> bool:
        me = _me()
        if owner and owner.get("host") == me["host"] and owner.get("boot") == me["boot"]:
            return _born(int(str(owner["pid"]))) == owner["born"]
        # Of another machine, or killed between making its file and writing into it.
        return time.time() - changed < self.lease_seconds


def _me() -> dict[str, object]:
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": boot, "pid": pid, "born": _born(pid)}


def _born(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is none, or it has only not been reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _born_elsewhere(pid)
    return None if fields[0] in ("Z", "X") else fields[19]


def _born_elsewhere(pid: int) -> str | None:
    """The same where there is no /proc: only whether it lives."""
    if Path("/proc/self").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"
