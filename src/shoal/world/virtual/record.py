"""What a simulated run is told by: its workers, rounds, evaluations, events and bytes. All simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from shoal.sync.traffic import Traffic
from shoal.world.virtual.links import LINKS

SIMULATED = "simulated: virtual workers in one process, on a clock that no hardware drives"
"""Put on every output."""


@dataclass(kw_only=True)
class WorkerRecord:
    """One worker's life, in virtual seconds.

    Args:
        worker: its number.
        joined, left: when; ``left`` is None while it is there.
        how: ``there``, ``left`` or ``killed``.
        group: at last.
        slowdown: of its steps.
        faults: kinds, in words.
        steps: optimizer steps it ended.
        computing, waiting, exchanging: seconds of each: of steps, of standing still for others or for
            links, of standing still for bytes under way.
    """

    worker: int
    joined: float = 0.0
    left: float | None = None
    how: str = "there"
    group: int = 0
    slowdown: float = 1.0
    faults: tuple[str, ...] = ()
    steps: int = 0
    computing: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0

    @property
    def idle_share(self) -> float:
        """Share of its time in which it computed nothing; NaN before it did anything."""
        total = self.computing + self.waiting + self.exchanging
        return (self.waiting + self.exchanging) / total if total else math.nan


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Models measured at one moment.

    Args:
        samples: used by the fleet, or drawn where rounds are not common.
        virtual_seconds: when.
        bytes: on all links so far.
        steps: optimizer steps of all workers together.
        scores: by model, by metric.
    """

    samples: int
    virtual_seconds: float
    bytes: int
    steps: int
    scores: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a model first came to the target; all None where it did not."""

    samples: int | None = None
    virtual_seconds: float | None = None
    bytes: int | None = None


@dataclass(kw_only=True)
class SimulatedRun:
    """Everything a simulated run has to tell.

    Args:
        settings: what was run, in plain values.
        engine: ``loop``, ``layers`` or ``vmap``.
        workers: everyone who was ever there.
        evaluations: in order.
        events: membership, rounds' leaders and alarms; plain values, each with ``kind`` and
            ``virtual_seconds``.
        rounds: exchanges that were completed.
        lost_rounds: exchanges that a kill undid.
        payload_bytes: by class of link, as the rule's own record has them.
        counted_bytes: by class of link, message by message on the links.
        formula_bytes: by the formulas of section 5, all links together.
        messages: by class of link.
        drawn, used, discarded, pending: samples.
        virtual_seconds: when the last worker ended.
        target: (metric, value), or None.
        reached: by model.
        ended: ``finished``, ``diverged`` or ``nobody left``.
        snapshot_ages: of pulls in the background: virtual seconds between publication and use.
        snapshot_lags: of the same pulls, how many steps the leader had gone on.
        late_pulls: rounds at which the last pull had not arrived.
        notes: sentences about what makes the result weaker.
    """

    settings: Mapping[str, object]
    engine: str
    workers: list[WorkerRecord] = field(default_factory=list[WorkerRecord])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    events: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    rounds: int = 0
    lost_rounds: int = 0
    payload_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    counted_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    formula_bytes: int = 0
    messages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    drawn: int = 0
    used: int = 0
    discarded: int = 0
    pending: int = 0
    virtual_seconds: float = 0.0
    target: tuple[str, float] | None = None
    reached: dict[str, Reached] = field(default_factory=dict[str, Reached])
    ended: str = "finished"
    snapshot_ages: list[float] = field(default_factory=list[float])
    snapshot_lags: list[int] = field(default_factory=list[int])
    late_pulls: int = 0
    notes: list[str] = field(default_factory=list[str])

    def take_payload(self, traffic: Traffic) -> None:
        """Move an exchange's bytes into the record, once."""
        for name, size in traffic.payload_bytes.items():
            self.payload_bytes[name] += size
            traffic.payload_bytes[name] = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of all workers together."""
        return sum(worker.steps for worker in self.workers)

    @property
    def waiting_share(self) -> float:
        """Share of all worker time spent standing still for others or for links."""
        return self._share("waiting")

    @property
    def exchange_share(self) -> float:
        """Share of all worker time spent standing still for bytes under way."""
        return self._share("exchanging")

    @property
    def idle_share(self) -> float:
        """Share of all worker time in which nothing was computed."""
        return self.waiting_share + self.exchange_share

    def evaluated(self, evaluation: Evaluation) -> None:
        """Note an evaluation, and whether the target was reached by it."""
        self.evaluations.append(evaluation)
        if self.target is None:
            return
        metric, value = self.target
        for model, scores in evaluation.scores.items():
            known = self.reached.setdefault(model, Reached())
            if known.samples is None and scores[metric] <= value:
                self.reached[model] = Reached(
                    samples=evaluation.samples,
                    virtual_seconds=evaluation.virtual_seconds,
                    bytes=evaluation.bytes,
                )

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; numbers that are not finite become None."""
        found = asdict(self) | {
            "simulated": SIMULATED,
            "steps": self.steps,
            "idle_share": self.idle_share,
            "waiting_share": self.waiting_share,
            "exchange_share": self.exchange_share,
        }
        for row, worker in zip(found["workers"], self.workers, strict=True):
            row["idle_share"] = worker.idle_share
        cleaned = _cleaned(found)
        assert isinstance(cleaned, dict)
        return cleaned

    def _share(self, what: str) -> float:
        total = sum(w.computing + w.waiting + w.exchanging for w in self.workers)
        return sum(getattr(w, what) for w in self.workers) / total if total else math.nan


def _cleaned(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _cleaned(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(part) for part in value]
    return value
