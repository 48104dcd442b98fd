"""What is simulated: a fleet, its hardware, its misfortunes, and what it trains with which rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shoal.errors import UsageError
from shoal.scaling.schedules import Schedule
from shoal.sync.contract import SyncRule
from shoal.sync.groups import even_groups
from shoal.sync.stacked import Wire
from shoal.workloads.study_workload import Workload
from shoal.world.virtual.clock import Pace, Stall
from shoal.world.virtual.faults import Fault
from shoal.world.virtual.leases import LossPolicy, ShardName
from shoal.world.virtual.links import Network
from shoal.world.virtual.pricing import BroadcastName
from shoal.world.virtual.stack import Optimizer
from shoal.world.virtual.triggers import TRIGGERS, TriggerName

ModeName = Literal["vectorised", "loop"]
ModelName = Literal["leader", "mean", "near_best", "best", "center"]
HappeningName = Literal["join", "leave", "kill"]


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Workers that come or go.

    Args:
        kind: ``join`` and ``leave`` take effect at the first round at or past the mark. ``kill`` takes
            effect at the mark itself if that is a time, wherever the worker then is; at the first round
            past it if it is a number of samples.
        at_seconds: virtual time, >= 0; or
        at_samples: samples used by the fleet, >= 0. Exactly one of the two.
        worker: who leaves or is killed; the one that came last when None.
        workers: how many join, >= 1; one leaves or is killed at a time.
        slowdown: of those that join.
        faults: of those that join.

    Raises:
        UsageError: a value outside its range.
    """

    kind: HappeningName
    at_seconds: float | None = None
    at_samples: int | None = None
    worker: int | None = None
    workers: int = 1
    slowdown: float = 1.0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(HappeningName):
            raise UsageError(
                f"event kind = {self.kind!r}; known are {', '.join(get_args(HappeningName))}; choose one"
            )
        marks = [mark for mark in (self.at_seconds, self.at_samples) if mark is not None]
        if len(marks) != 1 or not 0 <= marks[0] < math.inf:
            raise UsageError(
                f"event at_seconds = {self.at_seconds}, at_samples = {self.at_samples}; exactly one of "
                "them, 0 or more, says when it happens"
            )
        if self.workers < 1 or (self.kind != "join" and self.workers != 1):
            raise UsageError(
                f"event workers = {self.workers}; at least 1 joins, and exactly 1 leaves or is killed by an "
                "event; list one event for each"
            )
        if self.kind == "join" and self.worker is not None:
            raise UsageError(
                f"event worker = {self.worker}; a worker that joins gets the next number; leave it out"
            )
        object.__setattr__(self, "faults", tuple(self.faults))

    def due(self, seconds: float, samples: int) -> bool:
        """Whether the mark is reached."""
        if self.at_seconds is not None:
            return seconds >= self.at_seconds
        return samples >= (self.at_samples or 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """One simulated run.

    Args:
        workload: model, loss, metrics and data.
        rule: how replicas exchange.
        samples: the run ends with the first round by which the fleet has used so many, >= 1.
        workers: at the start, >= 1.
        local_batch: samples per worker and step, >= 1.
        optimizer: of every worker.
        schedule: factor of the learning rate by samples used; 1 throughout when None.
        trigger: ``fixed``, ``total-count`` or ``background``.
        pace: how long an ordinary worker's step takes.
        network: the links. With groups and no places given, a group is a node.
        slowdowns: factors of some workers' step times, by worker.
        stalls: by worker.
        faults: by worker.
        events: joins, leaves and kills.
        groups: of neighbouring workers; must divide ``workers``; the rule's own number when None.
        seed: of the weights, the order of the data and all else but the pace.
        mode: ``vectorised``, or ``loop``: worker after worker, the reference.
        together: rows that are trained as one; None: as many as suit the model.
        shards: ``shared``: leased from one order; ``fixed``: each worker its own part.
        lost: what becomes of samples that a dead worker drew since its last round.
        lease_steps: steps' worth of samples leased at a time, >= 1.
        probe_samples: of the training set, common to all, where a rule chooses by a probe.
        broadcast: how weights go from one worker to others: ``chain`` or ``tree``.
        wire: ``full`` or ``bf16``.
        detection_seconds: until a death is noticed by those who wait for the dead, >= 0.
        evaluate_every_samples: how often models are measured; ten times in the run when None.
        models: which.
        split: on which they are measured: ``val`` or ``test``.
        target: (metric, value): the run tells when each model first came as low.
        margin: a worker whose loss on the probe is within it of the lowest counts for ``near_best``.
        different_starts: workers start from weights of their own, not from the same.

    Raises:
        UsageError: a value outside its range, or values that do not go together.
    """

    workload: Workload
    rule: SyncRule[Any]
    samples: int
    workers: int = 4
    local_batch: int = 8
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule | None = None
    trigger: TriggerName = "fixed"
    pace: Pace = field(default_factory=Pace)
    network: Network | None = None
    slowdowns: Mapping[int, float] = field(default_factory=dict[int, float])
    stalls: Mapping[int, tuple[Stall, ...]] = field(default_factory=dict[int, tuple[Stall, ...]])
    faults: Mapping[int, tuple[Fault, ...]] = field(default_factory=dict[int, tuple[Fault, ...]])
    events: tuple[Happening, ...] = ()
    groups: int | None = None
    seed: int = 0
    mode: ModeName = "vectorised"
    together: int | None = None
    shards: ShardName = "shared"
    lost: LossPolicy = "discard"
    lease_steps: int = 8
    probe_samples: int = 256
    broadcast: BroadcastName = "chain"
    wire: Wire = "full"
    detection_seconds: float = 1.0
    evaluate_every_samples: int | None = None
    models: tuple[ModelName, ...] = ("leader", "mean", "best")
    split: Literal["val", "test"] = "val"
    target: tuple[str, float] | None = None
    margin: float = 0.1
    different_starts: bool = False

    def __post_init__(self) -> None:
        for name in ("events", "models"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("workers", "samples", "local_batch", "lease_steps", "probe_samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}; at least 1 is needed")
        choices = {
            "trigger": TRIGGERS,
            "mode": get_args(ModeName),
            "shards": get_args(ShardName),
            "broadcast": get_args(BroadcastName),
            "split": ("val", "test"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} = {getattr(self, name)!r}; known are {', '.join(known)}; choose one"
                )
        for model in self.models:
            if model not in get_args(ModelName):
                raise UsageError(
                    f"models = {model!r}; known are {', '.join(get_args(ModelName))}; choose among them"
                )
        self._check_numbers()
        even_groups(self.workers, self.group_count)
        if self.target is not None and self.target[0] not in self.workload.metrics:
            raise UsageError(
                f"target metric = {self.target[0]!r}; {self.workload.name} measures "
                f"{', '.join(sorted(self.workload.metrics))}; use one of these"
            )
        if self.split == "test" and self.workload.test is None:
            raise UsageError(f"split = 'test'; {self.workload.name} has none; use 'val'")

    def _check_numbers(self) -> None:
        if not (0 <= self.detection_seconds < math.inf and 0 <= self.margin < math.inf):
            raise UsageError(
                f"detection_seconds = {self.detection_seconds:g}, margin = {self.margin:g}; both are 0 or more"
            )
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed = {self.seed}; use 0 to 2**32 - 1")
        if self.evaluate_every_samples is not None and self.evaluate_every_samples < 1:
            raise UsageError(
                f"evaluate_every_samples = {self.evaluate_every_samples}; at least 1; leave it out for ten "
                "evaluations in the run"
            )
        joining = sum(event.workers for event in self.events if event.kind == "join")
        for name in ("slowdowns", "stalls", "faults"):
            for worker in getattr(self, name):
                if not 0 <= worker < self.workers + joining:
                    raise UsageError(
                        f"{name} of worker {worker}; workers are 0 to {self.workers + joining - 1}, in the "
                        "order in which they come"
                    )

    @property
    def group_count(self) -> int:
        """Groups the workers form."""
        return getattr(self.rule, "groups", 1) if self.groups is None else self.groups

    @property
    def capacity(self) -> int:
        """Workers that are ever there, all together."""
        return self.workers + sum(e.workers for e in self.events if e.kind == "join")

    @property
    def resolved_network(self) -> Network:
        """The links; a group is a node where nothing else is said."""
        if self.network is not None:
            return self.network
        each = self.workers // self.group_count if self.group_count > 1 else None
        return Network(workers_per_node=each)

    @property
    def evaluation_samples(self) -> int:
        """Samples from one evaluation to the next."""
        return self.evaluate_every_samples or max(1, self.samples // 10)
