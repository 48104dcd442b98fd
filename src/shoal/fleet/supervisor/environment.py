"""What a worker's process finds in its environment."""

from __future__ import annotations

import os
from collections.abc import Iterable

from shoal.fleet.supervisor.script import counts
from shoal.fleet.supervisor.settings import Settings


def threads_per_worker(settings: Settings) -> int:
    """An even share of this machine's cores for the most workers that are foreseen here.

    One number for the whole run: results depend on it (sums are split by threads).
    """
    most = max(counts(settings.events, settings.start))
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable is not None else os.cpu_count() or 1
    return max(1, cores // most)


def lowest_free(taken: Iterable[int]) -> int:
    """The smallest number >= 0 that is not taken.

    Example:
        >>> lowest_free([0, 1, 3])
        2
    """
    known = set(taken)
    return next(number for number in range(len(known) + 1) if number not in known)


def worker_environment(
    settings: Settings, name: str, slot: int, control: str, token: str
) -> dict[str, str]:
    """The environment of worker ``name``.

    Args:
        settings: of the run.
        name: the worker's name.
        slot: its place on this machine, 0 to the number of workers here - 1; a replacement takes over
            that of the one it replaces. As LOCAL_RANK it chooses the worker's GPU.
        control: ``HOST:PORT`` of the control endpoint.
        token: the run's secret.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads_per_worker(settings)),
        "RUST_LOG": "warn",
        "PYTHONFAULTHANDLER": "1",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "SHOAL_CONTROL": control,
        "SHOAL_TOKEN": token,
        "SHOAL_WORKER": name,
        "LOCAL_RANK": str(slot),
        "SHOAL_ADVERTISE": settings.reachable,
        "SHOAL_RUN_DIR": str(settings.run_dir.resolve()),
        "SHOAL_MIN_WORKERS": str(settings.minimum),
        "SHOAL_PATIENCE_SECONDS": str(settings.patience_seconds),
        "SHOAL_CHECKPOINT_SECONDS": str(settings.checkpoint_seconds),
    }
    environment.pop("SHOAL_RESUME", None)
    if settings.resume:
        environment["SHOAL_RESUME"] = "1"
    return environment
