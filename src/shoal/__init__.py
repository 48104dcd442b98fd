"""shoal: train PyTorch models on a number of workers that changes while they train."""

__version__ = "0.1.0"

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
