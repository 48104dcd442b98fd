"""What every sync rule is: a pure function of a flat vector of parameters, its own small state, and what
the other workers send.

Tensors are ``[rows, d]``: one row per worker *that lives in this process*. A real process holds one row, its
own; exact problems and the virtual cluster hold one row per worker. A rule never asks which: whatever comes
from elsewhere comes through an :class:`Exchange`. A tensor that all workers share is ``[1, d]``.

Around every optimizer step a driver calls, in this order,

    x, state = rule.before_step(state, x)                        # where the gradient is taken
    g, state = rule.reduce_gradients(state, g, exchange, signals)
    x = optimizer(x, g)                                          # any torch optimizer, completely
    outcome = rule.after_step(state, x, exchange, signals)       # one call per optimizer step

``after_step`` counts the step (``observe``), and then either exchanges (``exchange_round``) or not (``rest``).
A driver that decides by itself when a round falls due, as the total-count trigger does, calls these three.

States are frozen dataclasses of tensors and numbers. A rule never writes into a tensor that it was given.
``state_dict``/``load_state_dict`` carry states through checkpoints and to joining workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, Protocol, TypeVar, cast

from torch import Size, Tensor

from shoal.sync.states import Counters, StateValue, counted, from_values, to_values

StateT = TypeVar("StateT", bound=Counters)

MomentumPolicy = Literal["keep", "reset", "interpolate"]
StatisticsPolicy = Literal["own", "leader", "mean", "recompute"]


class Exchange(Protocol):
    """The workers of one round, and what they send each other. Every worker makes the same calls."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of the worker behind each local row."""
        ...

    @property
    def workers(self) -> int:
        """How many workers take part, p >= 1."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """The number of each rank's worker in the run: its name, never given to another worker."""
        ...

    @property
    def group_of(self) -> tuple[int, ...]:
        """The group of each rank."""
        ...

    def mean(self, x: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """The mean over all workers' rows.

        Args:
            x: ``[rows, d]``.
            weights: ``[rows]``, >= 0, on the same device. A row of weight 0 does not enter, even
                where it is not finite.

        Returns:
            ``[1, d]``, the same on every worker.
        """
        ...

    def largest(self, x: Tensor) -> Tensor:
        """The largest value of each number over all workers' rows: ``[rows, d]`` to ``[1, d]``."""
        ...

    def scores(self, own: Sequence[float]) -> list[float]:
        """Every worker's number, by rank, from each local row's own."""
        ...

    def from_workers(self, x: Tensor, sources: Sequence[int]) -> Tensor:
        """A broadcast of each named worker's row to those that name it.

        Args:
            x: ``[rows, d]``.
            sources: for every rank (not only the local ones) the rank whose row it receives.

        Returns:
            ``[rows, d]``. A row that names itself is returned as it is.
        """
        ...

    def send(self, x: Tensor, targets: Sequence[int]) -> Tensor:
        """Every worker sends its row to one other and receives one.

        Args:
            x: ``[rows, m]``.
            targets: for every rank the rank it sends to; a permutation.

        Returns:
            ``[rows, m]``, what each row received; zeros where a message was lost.
        """
        ...

    def place(self, value: Tensor) -> None:
        """Give the server variable its first value ``[1, d]``; it keeps the one it has."""
        ...

    def fetch(self, row: int) -> Tensor:
        """The server variable ``[1, d]``, as the worker of that local row receives it."""
        ...

    def push(self, row: int, change: Tensor) -> None:
        """The worker of that local row sends ``[1, d]``, which the server adds to its variable."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Signals:
    """What a worker knows about the step that it has just made.

    Args:
        lr: learning rate of the step.
        losses: ``[rows]``, each row's training loss in this step.
        counts: ``[rows]``, samples behind each loss and gradient; None: all the same, and some.
        scores: ``[rows]``, loss on a common probe or held-out set; only for a rule that asks for it,
            and only needed in steps with an exchange.
        judge: the loss of each local row's worker, on data of its own choice, of the weights ``[rows, d]``
            that it is given; for ``verify``.
    """

    lr: float = 0.0
    losses: Tensor | None = None
    counts: Tensor | None = None
    scores: Tensor | None = None
    judge: Callable[[Tensor], Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something worth a line in the log.

    Args:
        kind: e.g. ``"round"``, ``"replaced"``, ``"lock_in"``.
        step: optimizer steps made before it.
        values: numbers, names and lists of them.
    """

    kind: str
    step: int
    values: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, kw_only=True)
class Pull:
    """A movement that a round made, for the policies on momentum and statistics.

    Args:
        toward: other ``"workers"``, the ``"mean"`` of all, or the row's own ``"past"``.
        fraction: how far, in [0, 1].
        rows: the local rows that moved.
        sources: for every rank the rank it was moved toward, of a pull toward workers.
        replaced: of them, those that took the source whole, since they were not finite.
        is_repairing: whether some worker, here or elsewhere, was not finite; all workers agree on it.
    """

    toward: Literal["workers", "mean", "past"]
    fraction: float
    rows: tuple[int, ...]
    sources: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    is_repairing: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome(Generic[StateT]):
    """What ``after_step`` gives.

    Args:
        x: ``[rows, d]``; the very tensor that was given where nothing has changed.
        state: the rule's next state.
        events: in order.
        pulls: in order.
        is_round: whether the step ended in a round that could move weights.
    """

    x: Tensor
    state: StateT
    events: tuple[Event, ...] = ()
    pulls: tuple[Pull, ...] = ()
    is_round: bool = False


class SyncRule(ABC, Generic[StateT]):
    """A sync rule; see the module text for the order of calls.

    A rule is a frozen dataclass of hyper-parameters. It must give ``init`` and, if it exchanges
    weights, ``period`` and ``exchange_round``; everything else has a default that does nothing.
    """

    name: ClassVar[str]
    """In events, tables, recipes and errors, e.g. ``"leader"``."""
    alone: ClassVar[str]
    """What the rule comes to with one worker."""
    is_plain_alone: ClassVar[bool] = True
    """Whether that is plain SGD, bit for bit."""
    state_type: ClassVar[type[Counters]]
    momentum_policy: MomentumPolicy = "keep"
    statistics_policy: StatisticsPolicy = "own"

    @property
    def period(self) -> int | None:
        """Optimizer steps from one round to the next; None: there are none."""
        return None

    def degenerates(self, workers: int, step: int) -> Event | None:
        """What to log when the fleet begins, or comes to, this number of workers: with one, ``alone``."""
        if workers > 1:
            return None
        values: dict[str, object] = {"rule": self.name, "comes_to": self.alone}
        return Event(kind="alone", step=step, values=values)

    @abstractmethod
    def init(self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None) -> StateT:
        """State at the start of a run.

        Args:
            x: ``[rows, d]``, the starting weights.
            exchange: the workers at the start.
            layout: shapes of the parameters in order, ``d`` numbers together; None: one vector.

        Returns:
            The state; it shares no memory with ``x``.
        """

    def welcome(
        self, state: StateT, x: Tensor, rows: Sequence[int], exchange: Exchange
    ) -> tuple[Tensor, StateT]:
        """Where newcomers start, once :func:`~shoal.sync.states.reseat` has given them their donors' rows.

        Args:
            state: with the newcomers' rows.
            x: ``[rows, d]``, the newcomers' rows being their donors' weights.
            rows: which local rows are newcomers.
            exchange: the workers now.
        """
        return x, state

    def before_step(self, state: StateT, x: Tensor) -> tuple[Tensor, StateT]:
        """Where the gradient of the coming step is taken, and the state then."""
        return x, state

    def reduce_gradients(
        self, state: StateT, gradients: Tensor, exchange: Exchange, signals: Signals
    ) -> tuple[Tensor, StateT]:
        """The gradients ``[rows, d]`` that the optimizer is given, and the state then."""
        return gradients, state

    def observe(self, state: StateT, signals: Signals) -> StateT:
        """Count one optimizer step."""
        return counted(state)

    def is_due(self, state: StateT) -> bool:
        """Whether a round falls due after the steps counted so far."""
        return self.period is not None and state.since >= self.period

    def rest(self, state: StateT, x: Tensor, exchange: Exchange) -> Outcome[StateT]:
        """What happens after a step without a round; no weights travel."""
        return Outcome(x=x, state=state)

    def exchange_round(
        self, state: StateT, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[StateT]:
        """One round, after the complete optimizer step."""
        return Outcome(x=x, state=state)

    def after_step(
        self, state: StateT, x: Tensor, exchange: Exchange, signals: Signals
    ) -> Outcome[StateT]:
        """Count the optimizer step that gave ``x``, and exchange if a round falls due.

        Args:
            state: the state before.
            x: ``[rows, d]``, weights after the complete optimizer step.
            exchange: the workers now.
            signals: what they know about the step.
        """
        state = self.observe(state, signals)
        if self.is_due(state):
            return self.exchange_round(state, x, exchange, signals)
        return self.rest(state, x, exchange)

    def center(self, state: StateT) -> Tensor | None:
        """The rule's own average ``[1, d]`` or ``[rows, d]``, where it keeps one in its state."""
        return None

    def state_dict(self, state: StateT) -> dict[str, StateValue]:
        """The state as tensors and plain numbers, with the format's version and the rule's name."""
        return to_values(state, rule=self.name)

    def load_state_dict(self, values: Mapping[str, StateValue]) -> StateT:
        """The inverse of :meth:`state_dict`, bit for bit.

        Raises:
            UsageError: another rule, or another version of shoal, wrote the values.
        """
        return cast(StateT, from_values(self.state_type, values, rule=self.name))
