"""Search spaces: how a point of the unit cube becomes a learning rate, a momentum, a decay length.

With u in [0, 1), every scale's value rises with u, so that "the upper side" of a range means the same
in units and in values:

    Linear       v = min + u (max - min)
    Log          v = min (max / min)^u
    ReverseLog   v = 1 - (1 - min) ((1 - max) / (1 - min))^u          1 - v is log-uniform
    Integer      v = floor(min + u (max + 1 - min)), at most max      uniform; or log-uniform
    Discrete     v = values[floor(u n)]

Source: the released search spaces of Shallue et al. 2019 (types DOUBLE, INTEGER, DISCRETE with scales
LINEAR_SCALE, LOG_SCALE, REVERSE_LOG_SCALE) as restated in section 1.7 of the notes.
Deviates: Integer can draw ``max`` itself, where truncating a uniform draw below ``max`` never does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from shoal.errors import UsageError

_BELOW_ONE = 1 - 2.0**-53


def _check_ends(scale: str, low: float, high: float, *, whole: bool = False) -> None:
    for name, value in (("min", low), ("max", high)):
        if not math.isfinite(value):
            raise UsageError(f"{name} = {value}; a {scale} range has finite ends; give a number")
    for name, value in (("min", low), ("max", high)):
        if whole and value != int(value):
            raise UsageError(
                f"{name} = {value}; an {scale} range has whole ends; round it or use the linear scale"
            )
    if low >= high:
        raise UsageError(
            f"min = {low:g}, max = {high:g}; a {scale} range needs min < max; swap them, or move a value "
            "that is not searched to the curve's `fixed`"
        )


def _inside(u: float) -> float:
    if not 0 <= u <= 1:
        raise ValueError(f"u = {u}; a unit coordinate lies in [0, 1]")
    return min(u, _BELOW_ONE)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Uniform between ``min`` and ``max``.

    Raises:
        UsageError: ends that are not finite or not min < max.
    """

    kind: ClassVar[str] = "linear"
    min: float
    max: float

    def __post_init__(self) -> None:
        _check_ends(self.kind, self.min, self.max)

    def value(self, u: float) -> float:
        """The value at ``u`` in [0, 1]."""
        return min(self.min + _inside(u) * (self.max - self.min), self.max)

    def unit(self, value: float) -> float:
        """The coordinate of ``value``; outside [0, 1] for a value outside the range."""
        return (value - self.min) / (self.max - self.min)

    def window(self, low: float, high: float) -> Linear:
        """The scale from coordinate ``low`` to ``high`` of this one, which may lie outside [0, 1]."""
        width = self.max - self.min
        return replace(self, min=self.min + low * width, max=self.min + high * width)


@dataclass(frozen=True, kw_only=True)
class Log:
    """Uniform in the logarithm; for learning rates.

    Raises:
        UsageError: ends that are not finite, not positive or not min < max.
    """

    kind: ClassVar[str] = "log"
    min: float
    max: float

    def __post_init__(self) -> None:
        _check_ends(self.kind, self.min, self.max)
        if self.min <= 0:
            raise UsageError(
                f"min = {self.min:g}; a log range is positive; raise it or use the linear scale"
            )

    def value(self, u: float) -> float:
        """The value at ``u`` in [0, 1]."""
        return min(max(self.min * (self.max / self.min) ** _inside(u), self.min), self.max)

    def unit(self, value: float) -> float:
        """The coordinate of ``value`` > 0; outside [0, 1] for a value outside the range."""
        return math.log(value / self.min) / math.log(self.max / self.min)

    def window(self, low: float, high: float) -> Log:
        """The scale from coordinate ``low`` to ``high`` of this one, which may lie outside [0, 1]."""
        ratio = self.max / self.min
        return replace(self, min=self.min * ratio**low, max=self.min * ratio**high)

    @property
    def decade(self) -> float:
        """A factor of ten, in units."""
        return 1 / math.log10(self.max / self.min)


@dataclass(frozen=True, kw_only=True)
class ReverseLog:
    """Uniform in the logarithm of 1 - v; for momentum.

    Raises:
        UsageError: ends that are not finite, not below 1 or not min < max.
    """

    kind: ClassVar[str] = "reverse_log"
    min: float
    max: float

    def __post_init__(self) -> None:
        _check_ends(self.kind, self.min, self.max)
        if self.max >= 1:
            raise UsageError(
                f"max = {self.max:g}; a reverse_log range ends below 1, where 1 - v has no logarithm; "
                "for example 0.9999"
            )

    def value(self, u: float) -> float:
        """The value at ``u`` in [0, 1]."""
        rest = (1 - self.min) * ((1 - self.max) / (1 - self.min)) ** _inside(u)
        return min(max(1 - rest, self.min), self.max)

    def unit(self, value: float) -> float:
        """The coordinate of ``value`` < 1; outside [0, 1] for a value outside the range."""
        return math.log((1 - value) / (1 - self.min)) / math.log((1 - self.max) / (1 - self.min))

    def window(self, low: float, high: float) -> ReverseLog:
        """The scale from coordinate ``low`` to ``high`` of this one, which may lie outside [0, 1].

        The lower end stays at 0 or above when this one's does: a momentum is not negative.
        """
        ratio = (1 - self.max) / (1 - self.min)
        lowest = 1 - (1 - self.min) * ratio**low
        if self.min >= 0:
            lowest = max(lowest, 0.0)
        return replace(self, min=lowest, max=1 - (1 - self.min) * ratio**high)

    @property
    def decade(self) -> float:
        """A factor of ten in 1 - v, in units."""
        return 1 / math.log10((1 - self.min) / (1 - self.max))


@dataclass(frozen=True, kw_only=True)
class Integer:
    """Whole numbers from ``min`` to ``max``, both included.

    Args:
        min: smallest.
        max: largest.
        log: uniform in the logarithm instead; then ``min`` >= 1.

    Raises:
        UsageError: ends that are not whole, not min < max, or below 1 with ``log``.
    """

    kind: ClassVar[str] = "integer"
    min: int
    max: int
    log: bool = False

    def __post_init__(self) -> None:
        _check_ends(self.kind, self.min, self.max, whole=True)
        object.__setattr__(self, "min", int(self.min))
        object.__setattr__(self, "max", int(self.max))
        if self.log and self.min < 1:
            raise UsageError(f"min = {self.min}; a log range is positive; use at least 1")

    def value(self, u: float) -> int:
        """The value at ``u`` in [0, 1]."""
        u = _inside(u)
        if self.log:
            drawn = self.min * ((self.max + 1) / self.min) ** u
        else:
            drawn = self.min + u * (self.max + 1 - self.min)
        return min(max(math.floor(drawn), self.min), self.max)

    def unit(self, value: float) -> float:
        """The middle of the coordinates that give ``value``; outside [0, 1] outside the range."""
        if self.log:
            middle = math.sqrt(value * (value + 1))
            return math.log(middle / self.min) / math.log((self.max + 1) / self.min)
        return (value + 0.5 - self.min) / (self.max + 1 - self.min)

    def window(self, low: float, high: float) -> Integer:
        """The scale from coordinate ``low`` to ``high`` of this one, which may lie outside [0, 1]."""
        if self.log:
            ratio = (self.max + 1) / self.min
            ends = self.min * ratio**low, self.min * ratio**high - 1
            return replace(self, min=max(1, round(ends[0])), max=round(ends[1]))
        width = self.max + 1 - self.min
        return replace(
            self, min=round(self.min + low * width), max=round(self.min + high * width) - 1
        )


@dataclass(frozen=True, kw_only=True)
class Discrete:
    """One of a list of numbers, each equally often.

    Raises:
        UsageError: no values, a value twice, or one that is not finite.
    """

    kind: ClassVar[str] = "discrete"
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise UsageError("values = none; a discrete parameter needs at least one; list them")
        for value in self.values:
            if not math.isfinite(value):
                raise UsageError(f"values = {value}; each is a finite number; remove it")
        if len(set(self.values)) < len(self.values):
            raise UsageError(f"values = {list(self.values)}; one is there twice; list each once")

    @property
    def min(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def max(self) -> float:
        """The largest value."""
        return max(self.values)

    def value(self, u: float) -> float:
        """The value at ``u`` in [0, 1]."""
        return self.values[min(int(_inside(u) * len(self.values)), len(self.values) - 1)]

    def unit(self, value: float) -> float:
        """The middle of the coordinates that give ``value``, which is one of the values.

        Raises:
            ValueError: it is not.
        """
        return (self.values.index(value) + 0.5) / len(self.values)

    def window(self, low: float, high: float) -> Discrete:
        """Itself: a list has no beyond."""
        return self


Scale: TypeAlias = Linear | Log | ReverseLog | Integer | Discrete

SCALES: Mapping[str, Callable[..., Scale]] = {
    scale.kind: scale for scale in (Linear, Log, ReverseLog, Integer, Discrete)
}


class Limits:
    """Where a parameter makes sense: ``least`` <= v (or < v with ``open_below``), v < ``below``."""

    def __init__(self, least: float, below: float = math.inf, *, open_below: bool = False) -> None:
        self.least, self.below, self.open_below = least, below, open_below

    def check(self, name: str, low: float, high: float) -> None:
        """Refuse a range [low, high] of the parameter ``name``.

        Raises:
            UsageError: it reaches outside, or is not finite.
        """
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UsageError(f"{name} = {high}; {name} is a finite number; correct it")
        if high >= self.below:
            raise UsageError(
                f"{name} = {high:g}; {name} must stay below {self.below:g}, where it never forgets; "
                f"for example {0.9999 if self.below == 1 else self.below / 2:g}"
            )
        if low < self.least or (self.open_below and low == self.least):
            rule = "above" if self.open_below else "at least"
            raise UsageError(f"{name} = {low:g}; {name} is {rule} {self.least:g}; raise it")


LIMITS: Mapping[str, Limits] = {
    "lr": Limits(0.0, open_below=True),
    "momentum": Limits(0.0, 1.0),
    "beta1": Limits(0.0, 1.0),
    "beta2": Limits(0.0, 1.0),
    "eps": Limits(0.0, open_below=True),
    "weight_decay": Limits(0.0),
    "decay_steps": Limits(1.0),
    "end_factor": Limits(0.0),
}
"""Every parameter that an optimizer or schedule here can have."""


class Space(Mapping[str, Scale]):
    """What is searched: an ordered mapping from parameter names to scales.

    The order is part of it: coordinate k of a unit point belongs to the k-th parameter.

    Args:
        scales: by name.

    Raises:
        UsageError: nothing to search, or a range outside a parameter's :data:`LIMITS`.
    """

    def __init__(self, scales: Mapping[str, Scale]) -> None:
        self._scales = dict(scales)
        if not self._scales:
            raise UsageError(
                "space = empty; a search tunes something; give lr a range, for example "
                "lr = {scale = 'log', min = 1e-3, max = 1.0}"
            )
        for name, scale in self._scales.items():
            if name in LIMITS:
                LIMITS[name].check(name, scale.min, scale.max)

    def __getitem__(self, name: str) -> Scale:
        return self._scales[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scales)

    def __len__(self) -> int:
        return len(self._scales)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self._scales.items()))

    def __repr__(self) -> str:
        return f"Space({self._scales!r})"

    def values(self) -> Sequence[Scale]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The scales, in order."""
        return list(self._scales.values())

    def parameters(self, unit: Sequence[float]) -> dict[str, float]:
        """What the point ``unit`` means, by name.

        Raises:
            ValueError: another number of coordinates, or one outside [0, 1].
        """
        pairs = zip(self._scales.items(), unit, strict=True)
        return {name: scale.value(u) for (name, scale), u in pairs}

    def unit(self, parameters: Mapping[str, float]) -> tuple[float, ...]:
        """The point of ``parameters``, which may hold more than is searched."""
        return tuple(scale.unit(parameters[name]) for name, scale in self._scales.items())

    def canonical(self) -> dict[str, dict[str, object]]:
        """Plain values that make the same space again, in order."""
        return {name: scale_facts(scale) for name, scale in self._scales.items()}


def scale_facts(scale: Scale) -> dict[str, object]:
    """A scale as plain values: its kind under ``scale``, then its fields."""
    if isinstance(scale, Discrete):
        return {"scale": scale.kind, "values": list(scale.values)}
    facts: dict[str, object] = {"scale": scale.kind, "min": scale.min, "max": scale.max}
    if isinstance(scale, Integer) and scale.log:
        facts["log"] = True
    return facts
