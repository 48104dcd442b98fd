"""All workers in one process: an exchange whose rows are the workers themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Literal

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.sync.groups import even_groups
from shoal.sync.traffic import SCORE_BYTES, SERVER, Traffic, Transfer, TransferKind

Wire = Literal["full", "bf16"]


class Stacked:
    """An :class:`~shoal.sync.contract.Exchange` for ``[p, d]`` tensors.

    Means are summed in double precision, so that the mean of equal rows is that row, bit for bit.

    Args:
        workers: p, >= 1.
        groups: how many groups of neighbouring ranks; must divide ``workers``.
        group_of: other groups, by rank, however uneven; instead of ``groups``.
        nodes: the node of each rank, for counting bytes; by default a group is a node.
        members: the number of each rank's worker in the run; by default its rank.
        wire: ``"bf16"``: what travels is rounded to bfloat16 and counts half; a worker's own weights
            never are.

    Raises:
        UsageError: ``workers`` below 1, groups that do not divide, or lists that are not one per rank.

    Example:
        >>> exchange = Stacked(3)
        >>> exchange.mean(torch.tensor([[1.0], [2.0], [6.0]])).item()
        3.0
        >>> exchange.traffic.total_bytes()   # 2 (p - 1) N
        16
    """

    def __init__(
        self,
        workers: int,
        *,
        groups: int = 1,
        group_of: Sequence[int] | None = None,
        nodes: Sequence[int] | None = None,
        members: Sequence[int] | None = None,
        wire: Wire = "full",
    ) -> None:
        if workers < 1:
            raise UsageError(f"workers = {workers}; an exchange needs at least 1; pass 1 or more")
        if wire not in ("full", "bf16"):
            raise UsageError(
                f'wire = {wire!r}; weights travel as "full" or "bf16"; pass one of them'
            )
        self.workers = workers
        self.ranks: tuple[int, ...] = tuple(range(workers))
        self.group_of: tuple[int, ...] = (
            even_groups(workers, groups) if group_of is None else tuple(group_of)
        )
        self.members: tuple[int, ...] = self.ranks if members is None else tuple(members)
        places = self.group_of if nodes is None else tuple(nodes)
        for label, value in (
            ("group_of", self.group_of),
            ("members", self.members),
            ("nodes", places),
        ):
            if len(value) != workers:
                raise UsageError(
                    f"{label} = {value}; there are {workers} workers; give one entry per rank"
                )
        self.wire = wire
        self.traffic = Traffic(nodes=dict(zip(self.members, places, strict=True)))
        self.lost: Collection[tuple[int, int]] = ()
        """Links (from rank, to rank) on which what is sent is lost."""
        self._server: list[Tensor] = []

    @property
    def has_server(self) -> bool:
        """Whether a rule has placed a server variable."""
        return bool(self._server)

    def adopt(self, before: Stacked) -> None:
        """Take over the server's variable, if there is one, from the workers before a change."""
        if before.has_server:
            self.server = before.server

    def only(self, rank: int) -> Stacked:
        """The same workers, server and traffic, seen from the process of one worker.

        Args:
            rank: its rank. Its row is the only local one; of the collectives only ``fetch`` and ``push``
                work there, as others need everybody's rows.
        """
        view = copy(self)
        view.ranks = (rank,)
        return view

    def mean(self, x: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """The mean over all rows ``[1, d]``; weights travel in the same message as one more number.

        The mean of nothing, all weights 0, is 0.
        """
        self._need_all_rows(x, "mean")
        if self.workers == 1 and (weights is None or bool(weights[0] != 0)):
            return x
        self._collective("mean", self._size(x) + (0 if weights is None else self._item(x)))
        sent = self._wired(x).double()
        if weights is None:
            mean = sent.sum(dim=0, keepdim=True) / self.workers
        else:
            share = weights.to(torch.float64).unsqueeze(1)
            weighted = torch.where(share > 0, sent * share, torch.zeros_like(sent))
            total = share.sum()
            mean = weighted.sum(dim=0, keepdim=True) / torch.where(total > 0, total, 1.0)
        return self._wired(mean.to(x.dtype))

    def largest(self, x: Tensor) -> Tensor:
        """The largest value of each number over all rows ``[1, d]``, counted as a ring."""
        self._need_all_rows(x, "largest")
        self._collective("largest", x[0].numel() * x.element_size())
        return x.amax(dim=0, keepdim=True)

    def scores(self, own: Sequence[float]) -> list[float]:
        """The numbers themselves, counted as an all-gather."""
        if len(own) != self.workers:
            raise UsageError(f"scores = {len(own)} of them; there are {self.workers} workers")
        self._collective("scores", SCORE_BYTES)
        return [float(score) for score in own]

    def from_workers(self, x: Tensor, sources: Sequence[int]) -> Tensor:
        """Each row's source row, counted as one chain per source."""
        self._need_all_rows(x, "from_workers")
        listeners: dict[int, set[int]] = {}
        for rank, source in enumerate(sources):
            listeners.setdefault(source, {source}).add(rank)
        for source, ranks in sorted(listeners.items()):
            if len(ranks) > 1:
                names = tuple(self.members[rank] for rank in sorted(ranks))
                self.traffic.add(
                    Transfer(
                        kind="broadcast",
                        workers=names,
                        size=self._size(x),
                        source=self.members[source],
                    )
                )
        index = torch.tensor(list(sources), dtype=torch.int64, device=x.device)
        received = self._wired(x).index_select(0, index)
        if self.wire == "full":
            return received
        is_own = index == torch.arange(self.workers, device=x.device)
        return torch.where(is_own.unsqueeze(1), x, received)

    def send(self, x: Tensor, targets: Sequence[int]) -> Tensor:
        """What each row receives when row r sends to ``targets[r]``."""
        self._need_all_rows(x, "send")
        if sorted(targets) != list(self.ranks):
            raise UsageError(
                f"targets = {list(targets)}; every rank must receive exactly one message"
            )
        sources = [0] * self.workers
        for rank, target in enumerate(targets):
            sources[target] = rank
            names = (self.members[rank], self.members[target])
            self.traffic.add(Transfer(kind="send", workers=names, size=self._size(x)))
        received = self._wired(x)[sources]
        for source, target in self.lost:
            if targets[source] == target:
                received[target] = 0
        return received

    def place(self, value: Tensor) -> None:
        """Give the server variable its first value; it keeps the one it has."""
        if not self._server:
            self._server.append(value.detach().clone())

    def fetch(self, row: int) -> Tensor:
        """The server variable ``[1, d]``."""
        value = self.server
        self._message("fetch", (SERVER, self.members[self.ranks[row]]), value)
        return self._wired(value)

    def push(self, row: int, change: Tensor) -> None:
        """Add ``change`` to the server variable."""
        value = self.server
        self._message("push", (self.members[self.ranks[row]], SERVER), change)
        self._server[0] = value + self._wired(change)

    @property
    def server(self) -> Tensor:
        """The server variable ``[1, d]``; it is part of the world, so a checkpoint saves it there.

        Raises:
            UsageError: no rule has placed one.
        """
        if not self._server:
            raise UsageError("the server has no variable yet; call the rule's init first")
        return self._server[0]

    @server.setter
    def server(self, value: Tensor) -> None:
        self._server[:] = [value.detach().clone()]

    def _need_all_rows(self, x: Tensor, what: str) -> None:
        if len(self.ranks) != self.workers or x.shape[0] != self.workers:
            raise UsageError(
                f"{what} of {x.shape[0]} rows; {self.workers} workers take part, all in this process; "
                "give one row each"
            )

    def _wired(self, x: Tensor) -> Tensor:
        if self.wire == "full" or self.workers == 1:
            return x
        return x.to(torch.bfloat16).to(x.dtype)

    def _item(self, x: Tensor) -> int:
        return x.element_size() if self.wire == "full" else 2

    def _size(self, x: Tensor) -> int:
        return x[0].numel() * self._item(x)

    def _collective(self, kind: TransferKind, size: int) -> None:
        if self.workers > 1:
            self.traffic.add(Transfer(kind=kind, workers=self.members, size=size))

    def _message(self, kind: TransferKind, ends: tuple[int, int], x: Tensor) -> None:
        self.traffic.add(Transfer(kind=kind, workers=ends, size=self._size(x)))
