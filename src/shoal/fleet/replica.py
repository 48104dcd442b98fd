"""One worker's replica: everything that a joining worker receives and a checkpoint holds."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.fleet.state import FORMAT, Evaluation, Progress
from shoal.fleet.step import Stepper
from shoal.fleet.weights import bare
from shoal.scaling.contract import optimizer_kind
from shoal.world.contract import Position, Tree


class Stateful(Protocol):
    """What :meth:`Fleet.register` takes."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, None, and lists and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """The inverse."""
        ...


class CheckpointSource(Protocol):
    """Where a fleet that has nobody left to heal from finds its last state."""

    def newest_step(self) -> int:
        """Step of the newest complete checkpoint, -1 if there is none."""
        ...

    def load_newest(self) -> dict[str, Tree]:
        """That checkpoint's state; an older one if the newest is damaged."""
        ...


class Replica:
    """Implements :class:`shoal.world.contract.StateHolder` over a model and its optimizer."""

    def __init__(
        self,
        stepper: Stepper,
        *,
        progress: Progress,
        evaluation: Evaluation,
        checkpoints: CheckpointSource | None,
    ) -> None:
        self.stepper = stepper
        self.progress = progress
        self.evaluation = evaluation
        self.resumed_from = -1
        self._checkpoints = checkpoints
        self.settings: dict[str, Any] = {}
        self._batching: dict[str, Any] | None = None
        self._peers_batching: dict[str, Any] | None = None
        self._registered: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}
        self._seed = progress.seed
        self._coming = ""
        self._learned: tuple[str, str] = ("", "")

    @contextmanager
    def announcing(self, kind: str) -> Iterator[None]:
        """Snapshots taken meanwhile say that the coming exchange is for ``kind``."""
        self._coming = kind
        try:
            yield
        finally:
            self._coming = ""

    @property
    def expected(self) -> str:
        """What the coming exchange is for, if this worker was healed for it; else ``""``."""
        kind, lineage = self._learned
        return kind if lineage == self.progress.lineage else ""

    def register(self, name: str, obj: Stateful) -> None:
        """Carry ``obj``'s state to joiners and into checkpoints under ``name``.

        Raises:
            UsageError: the name is taken, or ``obj`` has no state_dict/load_state_dict.
        """
        if name in self._registered:
            raise UsageError(f"register({name!r}): the name is taken; choose another one")
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise UsageError(
                f"register({name!r}, {type(obj).__name__}): no state_dict and load_state_dict; give the "
                "object both, or register one that holds its values"
            )
        _copy(obj.state_dict(), f"register({name!r})")
        self._registered[name] = obj
        if name in self._unclaimed:
            obj.load_state_dict(self._unclaimed.pop(name))

    def position(self) -> Position:
        """Where this worker's state stands."""
        offer = -1
        if self.progress.commits < 0 and self._checkpoints is not None:
            offer = self._checkpoints.newest_step()
        return Position(self.progress.commits, self.progress.lineage, offer)

    def mark(self) -> tuple[int, int]:
        """(committed steps, committed samples)."""
        return self.progress.step, self.progress.cursor

    def bootstrap(self) -> None:
        """Start the run here: from the newest checkpoint, or from this worker's own weights."""
        if self._checkpoints is not None and self._checkpoints.newest_step() >= 0:
            self._take_over(self._checkpoints.load_newest(), from_peer=False)
            self.resumed_from = self.progress.step
            self._learned = ("", "")
            return
        self.stepper.norm.mark()
        self.stepper.buffers.mark()
        self.progress.commits = 0
        self.progress.lineage = uuid.uuid4().hex[:16]

    def snapshot(self) -> dict[str, Tree]:
        """A copy of the whole state at the last commit point."""
        rule, state = self.stepper.rule, self.stepper.rule_state
        extra = {name: obj.state_dict() for name, obj in self._registered.items()}
        tree = {
            "format": FORMAT,
            "coming": self._coming,
            "progress": self.progress.state_dict(),
            "evaluation": self.evaluation.state_dict(),
            "model": dict(bare(self.stepper.model).state_dict()),
            "optimizer_kind": _kind(self.stepper.optimizer),
            "optimizer": self.stepper.optimizer.state_dict(),
            "base_lrs": list(self.stepper.base_lrs),
            "rule": {
                "name": rule.name,
                "settings": _settings(rule),
                "state": None if state is None else rule.to_dict(state),
            },
            "settings": self.settings,
            "batching": self._batching,
            "norm_order": self._norm_order(),
            "extra": {**self._unclaimed, **extra},
        }
        return _copy(tree)

    def restore(self, tree: dict[str, Tree]) -> None:
        """Take over a peer's snapshot, whole.

        Raises:
            UsageError: it belongs to another model, optimizer, seed or scaling rule.
        """
        self._take_over(tree, from_peer=True)

    def check_batching(self, own: dict[str, Any]) -> None:
        """Make sure that this worker cuts the present epoch as the fleet that it joined does.

        Raises:
            UsageError: it does not; nothing has been exchanged yet.
        """
        if self._peers_batching is not None:
            _compare(own, self._peers_batching)
        self._batching, self._peers_batching = own, None

    def _take_over(self, tree: dict[str, Tree], *, from_peer: bool) -> None:
        """Take over a snapshot; a peer's must come from a fleet with the same settings."""
        values: Any = tree
        progress = Progress()
        progress.load_state_dict(values["progress"])
        if progress.seed != self._seed:
            raise UsageError(
                f"seed = {self._seed}, but the state was made with seed {progress.seed}; the order of the "
                "data would change in mid-run; pass that seed, or start a new run directory"
            )
        rule = self.stepper.rule
        if values["rule"]["name"] != rule.name:
            raise UsageError(
                f"scaling = {rule.name}, but the state was made with {values['rule']['name']}; pass the "
                "same rule, or start a new run directory"
            )
        if values["rule"]["settings"] != _settings(rule):
            raise UsageError(
                f"scaling = {rule.name} with {_settings(rule)}, but the state was made with "
                f"{values['rule']['settings']}; pass the same settings, or start a new run directory"
            )
        self._check_model(values["model"])
        if from_peer:
            _compare(self.settings, values["settings"])
        if values["optimizer_kind"] != _kind(self.stepper.optimizer):
            raise UsageError(
                f"optimizer = {_kind(self.stepper.optimizer)}, but the state was made with "
                f"{values['optimizer_kind']} (kind, parameters of each group); its buffers would not fit; pass "
                "the same optimizer, or start a new run directory"
            )
        bare(self.stepper.model).load_state_dict(values["model"])
        try:
            self.stepper.optimizer.load_state_dict(values["optimizer"])
        except (ValueError, KeyError) as error:
            raise UsageError(f"optimizer = does not fit the state: {error}") from error
        self.stepper.norm.mark()
        self.stepper.buffers.mark()
        self._adopt_rates([float(lr) for lr in values["base_lrs"]])
        held = values["rule"]["state"]
        self.stepper.rule_state = None if held is None else rule.from_dict(held)
        self.stepper.guard.forget()
        self.progress.load_state_dict(values["progress"])
        # Between epochs a loop may cut anew; within one all workers cut alike.
        inside = progress.samples is not None and progress.cursor % progress.samples != 0
        self._batching = values["batching"] if from_peer else None
        self._peers_batching = self._batching if inside else None
        self._learned = (str(values.get("coming", "")), self.progress.lineage)
        self.evaluation.load_state_dict(values["evaluation"])
        if self.stepper.norm_sync is not None:
            self.stepper.norm_sync.load_state(values["norm_order"])
        self._unclaimed = dict(values["extra"])
        for name, obj in self._registered.items():
            if name in self._unclaimed:
                obj.load_state_dict(self._unclaimed.pop(name))

    def _adopt_rates(self, base_lrs: list[float]) -> None:
        own = self.stepper.base_lrs
        if own != base_lrs:
            print(
                f"shoal: lr = {own} of the optimizer is not used; the run's base learning rate stays "
                f"{base_lrs}",
                file=sys.stderr,
                flush=True,
            )
        self.stepper.base_lrs = base_lrs

    def _norm_order(self) -> list[int]:
        sync = self.stepper.norm_sync
        return sync.state() if sync is not None else []

    def _check_model(self, given: Mapping[str, Tensor]) -> None:
        own = {name: tuple(t.shape) for name, t in bare(self.stepper.model).state_dict().items()}
        other = {name: tuple(t.shape) for name, t in given.items()}
        if own == other:
            return
        different = sorted(set(own.items()) ^ set(other.items()))[0][0]
        raise UsageError(
            f"model = another one than the state's: {different} is {own.get(different, 'missing')} here "
            f"and {other.get(different, 'missing')} there; use the model of that run, or start a new "
            "run directory"
        )


def _compare(own: Mapping[str, Any], fleets: Mapping[str, Any]) -> None:
    """Raise UsageError, naming the first difference between a newcomer and its fleet."""
    for name, value in own.items():
        if fleets.get(name) != value:
            raise UsageError(
                f"{name} = {value}, but the fleet trains with {fleets.get(name)}; all workers exchange "
                "and cut batches alike; start this worker with the run's own script and arguments"
            )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer is and how its parameters are grouped, e.g. ``heavy_ball [2, 2]``."""
    return f"{optimizer_kind(optimizer)} {[len(g['params']) for g in optimizer.param_groups]}"


def _settings(rule: Any) -> dict[str, Any]:
    """A rule's hyper-parameters, if it is a dataclass as the shipped ones are."""
    if not dataclasses.is_dataclass(rule):
        return {}
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}


def _copy(value: Any, name: str = "") -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: _copy(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"state {name.lstrip('.')} = {type(value).__name__}; a state holds tensors, numbers, strings, None, "
        "and lists and dicts of them; convert it in state_dict()"
    )
