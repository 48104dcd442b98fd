"""All-gather of bytes, built on the one collective every world has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.world.contract import Membership, World


def gather(
    world: World, membership: Membership, mine: Sequence[bytes], device: torch.device
) -> tuple[list[bytes], torch.Tensor]:
    """Give every worker the bytes of all ranks.

    Args:
        world: the world whose exchange this is; its flags travel along.
        membership: who takes part.
        mine: one payload for each rank this process plays, in the order of ``membership.ranks``.
        device: where the collectives run.

    Returns:
        The payloads in rank order, and the world's summed flags for ``world.settle``.

    Raises:
        ExchangeFailed: a peer was lost.
    """
    workers, slots = membership.workers, world.flag_slots
    flags = torch.zeros(slots)
    if slots:
        world.write_flags(flags)
    lengths = torch.zeros(workers + slots, dtype=torch.float64)
    for rank, payload in zip(membership.ranks, mine, strict=True):
        lengths[rank] = len(payload)
    lengths[workers:] = flags
    lengths = lengths.to(device)
    world.all_reduce(lengths).wait()
    sizes = [int(size) for size in lengths[:workers].tolist()]
    words = max(1, (max(sizes) + 7) // 8)
    table = torch.zeros(workers, words, dtype=torch.int64)
    raw = table.view(torch.uint8).view(workers, words * 8)
    for rank, payload in zip(membership.ranks, mine, strict=True):
        if payload:
            raw[rank, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    table = table.to(device)
    world.all_reduce(table).wait()
    raw = table.cpu().view(torch.uint8).view(workers, words * 8)
    payloads = [bytes(raw[rank, :size].numpy()) for rank, size in enumerate(sizes)]
    return payloads, lengths[workers:].float().cpu()
