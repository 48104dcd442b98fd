"""Reductions of CUDA tensors: NCCL beside Gloo.

NCCL moves the tensors; Gloo's connections, which every group has, tell who is alive: NCCL itself does
not notice a peer that died. A reduction has ended when its stream has passed it; until then the host
looks from time to time, so that it can give up. Aborting the communicator ends its kernels with
arbitrary contents, hence a reduction of an aborted communicator always counts as failed.

Limits: not run on a GPU by this project's own tests, which check the waiting with stand-ins for
stream and communicator. Two workers need two GPUs; NCCL refuses to share one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor
from torch._C import _distributed_c10d as dist

_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3


class Event(Protocol):
    """What is used of a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...


def is_wanted(device: torch.device) -> bool:
    """Whether tensors on ``device`` are reduced by NCCL; without it Gloo copies them to the host."""
    return device.type == "cuda" and torch.distributed.is_nccl_available()


class NcclEngine:
    """A communicator of all members.

    Args:
        store: where they meet; the same prefix on all of them, never used before.
        rank: this worker's rank.
        size: number of members.
        device: this worker's GPU.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device):
        # The watchdog of torch would end the process; a lost peer is our business.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        # A non-blocking communicator is one that can be aborted while it waits for a peer.
        options.config.blocking = 0
        self._engine = dist.ProcessGroupNCCL(store, rank, size, options)
        self._engine.eager_connect_single_device(device)
        self.aborted = False

    def all_reduce(self, tensor: Tensor, limit_seconds: float) -> NcclPending:
        """Start to sum ``tensor``, in place, on the current stream's tail."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # pyright: ignore - stubs lack it
        work = self._engine.allreduce([tensor], options)  # pyright: ignore - stubs lack it
        # Lets the current stream wait for the communicator's; the host does not wait.
        work.wait()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        return NcclPending(event, lambda: self.aborted, monotonic() + limit_seconds)

    def abort(self) -> None:
        """End all reductions under way; they count as failed."""
        self.aborted = True
        self._engine.abort()


class NcclPending:
    """One reduction on a stream.

    Args:
        event: recorded after the reduction.
        aborted: whether its communicator was aborted.
        deadline: when it has failed (``time.monotonic``).
    """

    __slots__ = ("_aborted", "_deadline", "_event")

    def __init__(self, event: Event, aborted: Callable[[], bool], deadline: float):
        self._event = event
        self._aborted = aborted
        self._deadline = deadline

    def wait(self, timeout: timedelta) -> None:
        """Wait until the stream has passed the reduction.

        Raises:
            RuntimeError: it was aborted, or its time limit or ``timeout`` has passed.
        """
        until = min(monotonic() + timeout.total_seconds(), self._deadline)
        pause = _PAUSE_SECONDS
        while not self._event.query():
            if self._aborted():
                break
            if monotonic() >= until:
                raise RuntimeError("a reduction on the GPU did not end in time")
            sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
        if self._aborted():
            raise RuntimeError("the communicator was aborted")

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._aborted() or self._event.query() or monotonic() >= self._deadline
