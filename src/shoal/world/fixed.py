"""A world whose workers neither come nor go, over ``torch.distributed``.

For platforms without a torchft wheel, and for workers started by torchrun, Slurm or anything else that
sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A worker that is lost ends the run for all of them;
it goes on from the last checkpoint when it is started again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ShoalError, UsageError
from shoal.world.contract import Change, Membership, Position, StateHolder, Tree, Work
from shoal.world.elastic.election import elect
from shoal.world.elastic.transport import Payload, decode, encode

_CHUNK_BYTES = 16 * 2**20
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class FixedWorld:
    """All ranks of a process group; implements :class:`shoal.world.contract.World`.

    Args:
        group: the process group; the default one if None, which must be initialised.
        device: where tensors to be reduced live, and what is broadcast passes through.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu"
    ):
        self._group = group
        self._device = torch.device(device)
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._owns_group = False
        self._holder: StateHolder | None = None
        self._membership: Membership | None = None
        self._leave = False
        self._left = False
        self._closed = False

    @classmethod
    def from_environment(
        cls, device: torch.device | str = "cpu", *, timeout_seconds: float = 300.0
    ) -> FixedWorld:
        """The world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

        Args:
            device: CUDA devices use NCCL, all others Gloo.
            timeout_seconds: a collective that lasts longer has failed. A worker that dies is noticed at
                once on one machine; this limit is for one that hangs.

        Raises:
            UsageError: a variable is missing, or the workers did not meet.
        """
        if dist.is_initialized():
            return cls(device=device)
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise UsageError(
                f"{', '.join(missing)} not set; a fleet of fixed size needs all of "
                f"{', '.join(_VARIABLES)}; start it with torchrun, or unset RANK to train alone"
            )
        on = torch.device(device)
        try:
            dist.init_process_group(
                "nccl" if on.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_seconds)
            )
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"RANK = {os.environ['RANK']}, WORLD_SIZE = {os.environ['WORLD_SIZE']}: the workers did "
                f"not meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({error}); start "
                "all of them, with the same address and a free port"
            ) from error
        world = cls(device=on)
        world._owns_group = True
        return world

    @property
    def flag_slots(self) -> int:
        """One: how many workers want to stop."""
        return 1

    def attach(self, holder: StateHolder) -> None:
        """Introduce the fleet; called once, before the first ``start_step``."""
        self._holder = holder

    def start_step(self, *, shrink_only: bool = False) -> Membership:
        """The membership, always the same; the first call gives all workers one state.

        Raises:
            ShoalError: a worker was lost.
        """
        if self._left or self._closed:
            raise ShoalError("this worker has left the fleet; no step can start")
        if self._membership is None:
            token = self._agree()
            names = tuple(f"rank{rank}" for rank in range(self._size))
            self._membership = Membership(names=names, ranks=(self._rank,), token=token)
        return self._membership

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum ``tensor`` over the workers, in place, in the background."""
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:
            raise _lost(error) from error
        assert work is not None
        return _FixedWork(work)

    def write_flags(self, slots: Tensor) -> None:
        """Write whether this worker wants to stop."""
        slots[0] = float(self._leave)

    def settle(self, flags: Tensor | None) -> None:
        """End the exchange. Nobody can leave alone: if one wants to, all stop together.

        Raises:
            ShoalError: ``flags`` is None: the exchange failed, and this world cannot go on.
        """
        if flags is None:
            raise _lost(None)
        if float(flags[0]) > 0:
            self._left = True

    def request_leave(self) -> None:
        """Ask all workers to stop after the next exchange."""
        self._leave = True

    @property
    def left(self) -> bool:
        """Whether an exchange in which a worker asked to stop has been settled."""
        return self._left

    @property
    def survivors(self) -> int:
        """Nobody goes on when one leaves."""
        return 0

    def take_changes(self) -> list[Change]:
        """Never any."""
        return []

    def report(self, progress: Mapping[str, float | int | str]) -> None:
        """There is no supervisor."""

    def event(self, row: Mapping[str, object]) -> None:
        """There is no supervisor."""

    def close(self) -> None:
        """End the process group, if this world began it. Harmless when called twice."""
        if not self._closed:
            self._closed = True
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()

    def _agree(self) -> str:
        """Give every worker the state that counts, and a word that all share."""
        holder = self._holder
        assert holder is not None, "attach() comes before start_step()"
        try:
            at = holder.position()
            mine: Tree = [at.commits, at.lineage, at.offer, secrets.token_hex(8)]
            told = [decode_bytes(data) for data in self._gather(b"".join(encode(mine).chunks()))]
            positions: dict[str, Position] = {}
            for rank, said in enumerate(told):
                assert isinstance(said, list)
                commits, lineage, offer, _ = said
                positions[f"{rank:09d}"] = Position(
                    commits=int(str(commits)), lineage=str(lineage), offer=int(str(offer))
                )
            verdict = elect(positions)
            source = int(verdict.owner)
            if verdict.starter is not None and source == self._rank:
                holder.bootstrap()
            if verdict.sources:
                self._spread(holder, source, lagging=f"{self._rank:09d}" in verdict.sources)
        except RuntimeError as error:
            raise _lost(error) from error
        first = told[0]
        assert isinstance(first, list)
        return str(first[3])

    def _gather(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, in rank order."""
        length = torch.tensor([len(mine)], device=self._device)
        lengths = [torch.zeros_like(length) for _ in range(self._size)]
        dist.all_gather(lengths, length, group=self._group)
        sizes = [int(item.item()) for item in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        padded = padded.to(self._device)
        pieces = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(pieces, padded, group=self._group)
        return [
            bytes(piece.cpu()[:size].tolist()) for piece, size in zip(pieces, sizes, strict=True)
        ]

    def _spread(self, holder: StateHolder, source: int, *, lagging: bool) -> None:
        """Broadcast the state of ``source``, piece by piece; those that have it look away."""
        root = dist.get_global_rank(self._group, source) if self._group is not None else source
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        payload: Payload | None = None
        if source == self._rank:
            payload = encode(holder.snapshot())
            length[0] = payload.length_bytes
        dist.broadcast(length, root, group=self._group)
        total = int(length.item())
        stream = _Stream(self._pieces(payload, total, root))
        if lagging:
            tree = decode(stream.read_into, total)
            if not isinstance(tree, dict):
                raise ShoalError(f"the state of rank {source} is no dict")
            holder.restore(tree)  # pyright: ignore[reportArgumentType] - keys were checked
        else:
            stream.drain()

    def _pieces(self, payload: Payload | None, total: int, root: int) -> Iterator[memoryview]:
        """Broadcasts of at most ``_CHUNK_BYTES`` each; every rank consumes all of them."""
        outgoing = _Stream(iter(())) if payload is None else _Stream(payload.chunks())
        buffer = torch.empty(min(total, _CHUNK_BYTES), dtype=torch.uint8)
        view = memoryview(buffer.numpy())  # pyright: ignore - an array is a buffer
        sent = 0
        while sent < total:
            size = min(total - sent, _CHUNK_BYTES)
            if payload is not None:
                outgoing.fill(view[:size])
            piece = buffer[:size].to(self._device)
            dist.broadcast(piece, root, group=self._group)
            if payload is None:
                buffer[:size].copy_(piece)
            yield view[:size]
            sent += size


class _FixedWork:
    __slots__ = ("_work",)

    def __init__(self, work: dist.Work):
        self._work = work

    def wait(self) -> None:
        """Block until the tensor holds the sum; a lost worker is a ShoalError."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(error) from error


class _Stream:
    """Bytes that come in pieces of one size and are wanted in pieces of another."""

    def __init__(self, pieces: Iterator[bytes | memoryview]):
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read_into(self, view: memoryview) -> int:
        """Fill a beginning of ``view``; 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(view), len(self._rest))
        view[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def fill(self, view: memoryview) -> None:
        """Fill ``view`` to its end."""
        done = 0
        while done < len(view):
            got = self.read_into(view[done:])
            assert got, "a payload is as long as it says"
            done += got

    def drain(self) -> None:
        """Take part in the remaining pieces."""
        for _ in self._pieces:
            pass


def decode_bytes(data: bytes) -> Tree:
    """The tree of a whole payload."""
    stream = _Stream(iter((data,)))
    return decode(stream.read_into, len(data))


def _lost(error: BaseException | None) -> ShoalError:
    return ShoalError(
        f"a worker was lost{f' ({error})' if error else ''}; a fleet of fixed size cannot go on without "
        "it; start all workers again with --resume (or resume=True) to continue from the last checkpoint"
    )
