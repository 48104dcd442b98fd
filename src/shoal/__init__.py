"""shoal: train PyTorch models on a number of workers that changes while they train.

The names below are imported when they are first used, so that the command line and the supervisor, which
need no torch, do not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal import data, scaling, sync
    from shoal.errors import (
        DivergedError,
        ExchangeFailed,
        ResumableStop,
        ShoalError,
        UsageError,
    )
    from shoal.fleet.batch_policy import Capped, Constant, Proportional
    from shoal.fleet.fleet import Fleet
    from shoal.fleet.init import init
    from shoal.scaling import schedules
    from shoal.world.virtual import VirtualEvent, VirtualWorld

_HOMES = {
    "Capped": "shoal.fleet.batch_policy",
    "Constant": "shoal.fleet.batch_policy",
    "DivergedError": "shoal.errors",
    "ExchangeFailed": "shoal.errors",
    "Fleet": "shoal.fleet.fleet",
    "Proportional": "shoal.fleet.batch_policy",
    "ResumableStop": "shoal.errors",
    "ShoalError": "shoal.errors",
    "UsageError": "shoal.errors",
    "VirtualEvent": "shoal.world.virtual",
    "VirtualWorld": "shoal.world.virtual",
    "init": "shoal.fleet.init",
}
_MODULES = {
    "data": "shoal.data",
    "scaling": "shoal.scaling",
    "schedules": "shoal.scaling.schedules",
    "sync": "shoal.sync",
}

__all__ = [
    "Capped",
    "Constant",
    "DivergedError",
    "ExchangeFailed",
    "Fleet",
    "Proportional",
    "ResumableStop",
    "ShoalError",
    "UsageError",
    "VirtualEvent",
    "VirtualWorld",
    "data",
    "init",
    "scaling",
    "schedules",
    "sync",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value: object = import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
