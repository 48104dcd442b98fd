"""torchrun's elastic agent as the peer of a kill: it restarts all workers when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.elastic_launches import environment, set_pause

HERE = Path(__file__).parent


class Torchrun:
    """``workers`` processes of DistributedDataParallel under ``torchrun --standalone --max-restarts``.

    Args:
        place: a directory for its signals and its log; must not exist.
        workers: how many.
        size: of the model, see ``step_worker.LAYERS``.
    """

    def __init__(self, place: Path, workers: int, size: str) -> None:
        place.mkdir()
        self._place = place
        self._workers = workers
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(workers), "--max-restarts", "1000"]
        command.append(str(HERE / "elastic_ddp_worker.py"))
        variables = {"SHOAL_BENCH_SIZE": size, "SHOAL_BENCH_PLACE": str(place)}
        # By default in torch 2.13 restarted workers find addresses of dead ones in the shared store, and
        # one restart in two hung until its time limit here.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (place / "log").open("w") as log:
            self._agent = subprocess.Popen(
                command, env=environment(variables), stdout=log, stderr=log
            )
        self._first_steps(0.0)

    def pause(self, paused: bool) -> None:
        """Let the workers stand still, or go on."""
        set_pause(self._place, paused)

    def kill(self, rank: int) -> float:
        """SIGKILL one worker; seconds until all restarted ones have made an optimizer step."""
        pid = int((self._place / f"pid-{rank}").read_text())
        since = time.time()
        os.kill(pid, signal.SIGKILL)
        return self._first_steps(since) - since

    def stop(self) -> None:
        """End the agent, which ends its workers."""
        self.pause(False)
        self._agent.terminate()
        try:
            self._agent.wait(60)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()

    def _first_steps(self, since: float, seconds: float = 120.0) -> float:
        """When the last of all workers made its first step after ``since``."""
        limit = time.time() + seconds
        while time.time() < limit:
            marks = [self._place / f"first-{rank}" for rank in range(self._workers)]
            times = [float(mark.read_text()) for mark in marks if mark.exists()]
            if len(times) == self._workers and min(times) > since:
                return max(times)
            if self._agent.poll() is not None:
                raise RuntimeError(f"torchrun ended; see {self._place}/log")
            time.sleep(0.01)
        raise RuntimeError(f"no step under torchrun within {seconds:.0f} s; see {self._place}/log")
