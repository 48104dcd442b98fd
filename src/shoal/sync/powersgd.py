"""PowerSGD: all-reduce of gradients through their low-rank factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Size, Tensor

from shoal.errors import UsageError
from shoal.scaling.checks import flag, number_in, whole_number
from shoal.sync.contract import Exchange, Signals, SyncRule
from shoal.sync.states import PER_ROW_FROM_ZERO, Counters


@dataclass(frozen=True, kw_only=True, eq=False)
class PowerSGDState(Counters):
    """What PowerSGD remembers.

    Args:
        layout: ``[n, 3]`` int64: begin, rows a and columns b of every matrix that is compressed.
        factors: ``[1, m]``, the factors Q of all of them, b x rank each.
        errors: ``[rows, d]``, what compression has left out so far; None without error feedback.
    """

    layout: Tensor
    factors: Tensor
    errors: Tensor | None = field(default=None, metadata=PER_ROW_FROM_ZERO)


@dataclass(frozen=True, kw_only=True)
class PowerSGD(SyncRule[PowerSGDState]):
    """Average gradients as products of two thin factors, and add what was lost to the next gradient.

    Use it when gradients must be averaged every step over a slow link. The mean is approximate; replicas stay
    equal all the same.

    Per matrix, with M = gradient + error (a x b), r -> ``rank``, Q of the step before::

        P = mean(M Q);   P <- orthonormal columns of P;   Q = mean(M^T P);   M^ = P Q^T;   error = M - M^

    Vectors, and matrices that this would not make smaller, are averaged as they are.

    Args:
        rank: r, >= 1.
        min_compression: a matrix is compressed if r (a + b) times this is below a b, >= 1.
        error_feedback: keep what was lost and add it to the next gradient.
        warm_start: begin the iteration at the last step's Q instead of a fresh one.
        warmup_steps: steps of plain all-reduce first, >= 0; about a tenth of the run is advised.
        seed: of the first Q, the same on all workers.

    Raises:
        UsageError: an argument outside its range.

    Source: Vogels et al. 2019, as in section 5 of the notes on Teng et al. 2019, with the defaults of torch's
        hook: rank 1, compression 2, error feedback and warm start on, 10 steps of all-reduce first.
    Deviates: all factors P of a model travel in one message; all Q and what is not compressed in another.
    """

    rank: int = 1
    min_compression: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    warmup_steps: int = 10
    seed: int = 0

    name = "powersgd"
    alone = "plain SGD: with one worker nothing is sent, so nothing is compressed"
    state_type = PowerSGDState

    def __post_init__(self) -> None:
        whole_number("PowerSGD", "rank", self.rank, at_least=1)
        number_in("PowerSGD", "min_compression", self.min_compression, low=1, high=float("inf"))
        flag("PowerSGD", "error_feedback", self.error_feedback)
        flag("PowerSGD", "warm_start", self.warm_start)
        whole_number("PowerSGD", "warmup_steps", self.warmup_steps, at_least=0)
        whole_number("PowerSGD", "seed", self.seed, at_least=0)

    def init(
        self, x: Tensor, exchange: Exchange, layout: Sequence[Size] | None = None
    ) -> PowerSGDState:
        """Random factors, no errors.

        Raises:
            UsageError: ``layout`` does not hold as many numbers as ``x`` has.
        """
        matrices = self._matrices(layout or [Size([x.shape[1]])], x.shape[1])
        width = sum(b * self.rank for _, _, b in matrices)
        return PowerSGDState(
            layout=torch.tensor(matrices, dtype=torch.int64).reshape(-1, 3),
            factors=self._fresh(width, 0, x),
            errors=torch.zeros_like(x) if self.error_feedback else None,
        )

    def reduce_gradients(
        self, state: PowerSGDState, gradients: Tensor, exchange: Exchange, signals: Signals
    ) -> tuple[Tensor, PowerSGDState]:
        """The approximate mean, weighted by samples where their counts are given."""
        if exchange.workers == 1:
            return gradients, state
        if state.steps < self.warmup_steps:
            mean = exchange.mean(gradients, weights=signals.counts)
            return mean.expand_as(gradients), state
        full = gradients if state.errors is None else gradients + state.errors
        matrices: list[list[int]] = state.layout.tolist()
        factors = state.factors
        if not self.warm_start:
            factors = self._fresh(factors.shape[1], state.steps, gradients)
        mean, factors = self._mean(full, matrices, factors, exchange, signals)
        errors = None if state.errors is None else self._left_out(full, mean, matrices)
        return mean.expand_as(gradients), replace(state, factors=factors, errors=errors)

    def _mean(
        self,
        full: Tensor,
        matrices: list[list[int]],
        factors: Tensor,
        exchange: Exchange,
        signals: Signals,
    ) -> tuple[Tensor, Tensor]:
        """(approximate mean ``[1, d]``, new factors)."""
        rows, rank, weights = full.shape[0], self.rank, signals.counts
        views = [full[:, at : at + a * b].reshape(rows, a, b) for at, a, b in matrices]
        qs = _cut(factors, [(b, rank) for _, _, b in matrices])
        left = [(view @ q).reshape(rows, -1) for view, q in zip(views, qs, strict=True)]
        plain = _uncompressed(matrices, full.shape[1])
        vectors = [full[:, piece] for piece in plain]
        ps: list[Tensor] = []
        if left:
            sent = exchange.mean(torch.cat(left, dim=1), weights=weights)
            ps = [orthonormal(p) for p in _cut(sent, [(a, rank) for _, a, _ in matrices])]
        right = [(v.mT @ p).reshape(rows, -1) for v, p in zip(views, ps, strict=True)]
        received = exchange.mean(torch.cat([*right, *vectors], dim=1), weights=weights)
        width = factors.shape[1]
        factors, rest = received[:, :width].clone(), received[:, width:]
        mean = torch.empty_like(full[:1])
        for (at, a, b), p, q in zip(
            matrices, ps, _cut(factors, [(b, rank) for _, _, b in matrices]), strict=True
        ):
            mean[:, at : at + a * b] = (p @ q.mT).reshape(1, -1)
        for piece in plain:
            size = piece.stop - piece.start
            mean[:, piece], rest = rest[:, :size], rest[:, size:]
        return mean, factors

    @staticmethod
    def _left_out(full: Tensor, mean: Tensor, matrices: list[list[int]]) -> Tensor:
        """Gradient less what was sent of it; nothing where it was sent whole."""
        errors = torch.zeros_like(full)
        for at, a, b in matrices:
            piece = slice(at, at + a * b)
            errors[:, piece] = full[:, piece] - mean[:, piece]
        return errors

    def _matrices(self, layout: Sequence[Size], numbers: int) -> list[list[int]]:
        """Begin, rows and columns of each parameter that is compressed."""
        if sum(prod(shape) for shape in layout) != numbers:
            raise UsageError(
                f"layout = {[tuple(shape) for shape in layout]}; the model has {numbers} parameters; give "
                "the shape of each, in their order"
            )
        found: list[list[int]] = []
        at = 0
        for shape in layout:
            size = prod(shape)
            if len(shape) > 1 and size:
                a, b = shape[0], size // shape[0]
                if self.rank * (a + b) * self.min_compression < size:
                    found.append([at, a, b])
            at += size
        return found

    def _fresh(self, width: int, step: int, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed << 32) + step)
        return torch.randn((1, width), generator=generator).to(like)


def orthonormal(columns: Tensor) -> Tensor:
    """Columns made orthonormal one after the other; a column that adds nothing becomes 0.

    Args:
        columns: ``[1, a, r]``.
    """
    made: list[Tensor] = []
    for index in range(columns.shape[2]):
        column = columns[0, :, index]
        length = torch.linalg.vector_norm(column)
        for other in made:
            column = column - other * (other @ column)
        rest = torch.linalg.vector_norm(column)
        # What is left of a dependent column is rounding; scaled up it would be a random direction.
        tiny = rest <= length * columns.shape[1] * torch.finfo(columns.dtype).eps
        made.append(torch.zeros_like(column) if bool(tiny) else column / rest)
    return torch.stack(made, dim=1).unsqueeze(0)


def _cut(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Consecutive pieces of ``[1, m]``, each as ``[1, *shape]``."""
    pieces = flat.split([prod(shape) for shape in shapes], dim=1) if shapes else ()
    return [piece.reshape(1, *shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _uncompressed(matrices: list[list[int]], numbers: int) -> list[slice]:
    """The stretches between the matrices."""
    stretches: list[slice] = []
    at = 0
    for begin, a, b in matrices:
        if begin > at:
            stretches.append(slice(at, begin))
        at = begin + a * b
    if numbers > at:
        stretches.append(slice(at, numbers))
    return stretches
