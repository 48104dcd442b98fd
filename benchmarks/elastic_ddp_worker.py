"""The peer of ``endless_worker.py``: the same model and data under DistributedDataParallel and torchrun.

It keeps nothing over a restart, which is to its advantage: a real run would load a checkpoint. Signals lie
in the directory ``SHOAL_BENCH_PLACE``: ``pause`` as there; ``pid-RANK`` is this process, ``first-RANK`` the
time of its first optimizer step since it was started.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from step_worker import BUCKET_BYTES, LAYERS, LOCAL_BATCH, data, mlp


def tell(path: Path, value: object) -> None:
    """Write a small file at once: a reader sees all of it or nothing."""
    draft = path.with_suffix(".draft")
    draft.write_text(repr(value))
    draft.rename(path)


def main() -> None:
    torch.set_num_threads(1)
    place = Path(os.environ["SHOAL_BENCH_PLACE"])
    pause = str(place / "pause")
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    sizes = LAYERS[os.environ["SHOAL_BENCH_SIZE"]]
    model = DistributedDataParallel(
        mlp(sizes), bucket_cap_mb=BUCKET_BYTES / 2**20, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = data(sizes[0], 1 << 14)
    tell(place / f"pid-{rank}", os.getpid())
    steps = 0
    while True:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(steps))
        for batch in range(len(x) // (workers * LOCAL_BATCH)):
            while os.path.exists(pause):
                time.sleep(0.02)
            first = (batch * workers + rank) * LOCAL_BATCH
            mine = order[first : first + LOCAL_BATCH]
            optimizer.zero_grad()
            functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
            steps += 1
            if steps == 1:
                tell(place / f"first-{rank}", time.time())


if __name__ == "__main__":
    main()
