"""What workers on a joined machine write about their steps, sent on to the run's first supervisor.

There it is stored as if they had written it in the run's own directory, so that the summary and the
report know every step. A machine that is killed takes its last seconds of rows along; the steps in
them are known all the same if a worker elsewhere took part in them.
"""

from __future__ import annotations

from pathlib import Path

from shoal.ledger.journal import decode
from shoal.world.elastic.endpoint import ControlClient

ROWS_PER_POST = 500  # some 300 KB
LARGEST_READ_BYTES = 1 << 20


class MetricsForwarder:
    """Sends new rows of ``metrics/NAME.jsonl``, each once and in order.

    Args:
        client: speaks to the first supervisor.
        run_dir: this machine's run directory.
    """

    def __init__(self, client: ControlClient, run_dir: Path) -> None:
        self._client, self._metrics = client, run_dir / "metrics"
        self._sent: dict[str, tuple[int, int]] = {}

    def forward(self, name: str) -> None:
        """Send what is new of one worker.

        Raises:
            OSError: the supervisor cannot be reached; the next call sends it again.
            Refused: it does not take them.
        """
        while True:
            offset, count = self._sent.get(name, (0, 0))
            whole = self._whole_lines(name, offset)
            if not whole:
                return
            lines = whole.splitlines(keepends=True)[:ROWS_PER_POST]
            rows = [decode(line.decode()) for line in lines]
            self._client.call("metrics", {"name": name, "first": count, "rows": rows})
            self._sent[name] = offset + sum(map(len, lines)), count + len(lines)

    def _whole_lines(self, name: str, offset: int) -> bytes:
        try:
            with (self._metrics / f"{name}.jsonl").open("rb") as file:
                file.seek(offset)
                new = file.read(LARGEST_READ_BYTES)
        except FileNotFoundError:
            return b""
        return new[: new.rfind(b"\n") + 1]
