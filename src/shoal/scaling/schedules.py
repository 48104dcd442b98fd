"""Schedules: factors in [0, 1] of the learning rate, as functions of progress in samples.

Progress is counted in samples, not in steps, because the number of steps in an epoch changes with
the number of workers. Every schedule may begin with a linear warm-up from 0. A decay's length is
that of the run unless ``total_samples`` is given; :meth:`Schedule.resolve` fills it in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from math import cos, pi
from typing import Protocol

from shoal.errors import UsageError
from shoal.scaling.checks import number_in, whole_number


class Schedule(Protocol):
    """A factor of the learning rate as a function of progress; any object with these two works."""

    def resolve(self, total_samples: int) -> Schedule:
        """The same schedule for a run of ``total_samples``; a length given by the user stays."""
        ...

    def __call__(self, samples: float) -> float:
        """The factor, in [0, 1], after ``samples`` samples."""
        ...


def _warmup(samples: float, warmup_samples: int) -> float:
    """min(1, samples / warmup_samples), and 1 without a warm-up."""
    return 1.0 if samples >= warmup_samples else samples / warmup_samples


def _check_length(owner: str, warmup_samples: int, total_samples: int | None) -> None:
    whole_number(owner, "warmup_samples", warmup_samples, at_least=0)
    if total_samples is None:
        return
    whole_number(owner, "total_samples", total_samples, at_least=1)
    if warmup_samples >= total_samples:
        raise UsageError(
            f"warmup_samples = {warmup_samples}; a warm-up must end before the decay does, at "
            f"{total_samples} samples; lower warmup_samples of {owner}, train longer, or set "
            f"total_samples above {warmup_samples}"
        )


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Factor 1 after a linear warm-up; made by :func:`constant` and :func:`linear_warmup`."""

    warmup_samples: int = 0

    def __post_init__(self) -> None:
        whole_number("schedules.constant", "warmup_samples", self.warmup_samples, at_least=0)

    def resolve(self, total_samples: int) -> Constant:
        """The same schedule: it has no end."""
        return self

    def __call__(self, samples: float) -> float:
        """The factor after ``samples`` samples."""
        return _warmup(samples, self.warmup_samples)


@dataclass(frozen=True, kw_only=True)
class Decay:
    """A decay from 1 at the end of the warm-up to ``floor`` at ``total_samples`` and beyond.

    With p = (samples - warmup_samples) / (total_samples - warmup_samples) and ``shape`` falling
    from 1 at p = 0 to 0 at p = 1, the factor is ``floor + (1 - floor) * shape(p)``. Made by
    :func:`linear_decay`, :func:`cosine` and :func:`polynomial`, or with a shape of your own.
    """

    owner: str
    shape: Callable[[float], float]
    warmup_samples: int = 0
    total_samples: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_length(self.owner, self.warmup_samples, self.total_samples)
        number_in(self.owner, "floor", self.floor, low=0.0, high=1.0)

    def resolve(self, total_samples: int) -> Decay:
        """The same schedule for a run of ``total_samples``; a length given by the user stays.

        Raises:
            UsageError: the warm-up does not end before the run does.
        """
        if self.total_samples is not None:
            return self
        return replace(self, total_samples=total_samples)

    def __call__(self, samples: float) -> float:
        """The factor after ``samples`` samples.

        Raises:
            UsageError: the length is not known yet.
        """
        if self.total_samples is None:
            raise UsageError(
                f"total_samples = None; {self.owner} needs its length before it is asked; "
                f"call resolve(total_samples) first, or give total_samples"
            )
        if samples < self.warmup_samples:
            return _warmup(samples, self.warmup_samples)
        if samples >= self.total_samples:
            return float(self.floor)
        fraction = (samples - self.warmup_samples) / (self.total_samples - self.warmup_samples)
        return self.floor + (1.0 - self.floor) * self.shape(fraction)


def _linear_shape(fraction: float) -> float:
    return 1.0 - fraction


def _cosine_shape(fraction: float) -> float:
    return 0.5 * (1.0 + cos(pi * fraction))


@dataclass(frozen=True, kw_only=True)
class _PowerShape:
    power: float

    def __call__(self, fraction: float) -> float:
        return (1.0 - fraction) ** self.power


@dataclass(frozen=True, kw_only=True)
class Step:
    """``factor`` to the power of milestones passed, after a linear warm-up; see :func:`step`."""

    milestones_samples: tuple[int, ...]
    factor: float = 0.1
    warmup_samples: int = 0

    def __post_init__(self) -> None:
        owner = "schedules.step"
        whole_number(owner, "warmup_samples", self.warmup_samples, at_least=0)
        number_in(owner, "factor", self.factor, low=0.0, high=1.0)
        if not self.milestones_samples:
            raise UsageError(
                "milestones_samples = (); schedules.step needs at least one milestone; "
                "write schedules.constant() for none"
            )
        for milestone in self.milestones_samples:
            whole_number(owner, "milestones_samples", milestone, at_least=1)
        rises = all(left < right for left, right in pairwise(self.milestones_samples))
        if not rises or self.milestones_samples[0] < self.warmup_samples:
            raise UsageError(
                f"milestones_samples = {self.milestones_samples}; they must rise and not lie in "
                f"the warm-up of {self.warmup_samples} samples; reorder milestones_samples or "
                f"lower warmup_samples"
            )

    def resolve(self, total_samples: int) -> Step:
        """The same schedule: its milestones are absolute."""
        return self

    def __call__(self, samples: float) -> float:
        """The factor after ``samples`` samples; a milestone counts from its very sample on."""
        passed = sum(samples >= milestone for milestone in self.milestones_samples)
        return _warmup(samples, self.warmup_samples) * self.factor**passed


def constant(warmup_samples: int = 0) -> Constant:
    """Factor 1 throughout, after an optional linear warm-up.

    Args:
        warmup_samples: samples over which the factor grows from 0 to 1; 0 for none.

    Returns:
        The schedule.

    Raises:
        UsageError: ``warmup_samples`` is no whole number >= 0.
    """
    return Constant(warmup_samples=warmup_samples)


def linear_warmup(warmup_samples: int) -> Constant:
    """A straight line from 0 to 1 over ``warmup_samples`` samples, then 1.

    Args:
        warmup_samples: length of the warm-up, >= 1.

    Returns:
        The schedule.

    Raises:
        UsageError: ``warmup_samples`` is no whole number >= 1.

    Example:
        >>> linear_warmup(100)(25)
        0.25
    """
    whole_number("schedules.linear_warmup", "warmup_samples", warmup_samples, at_least=1)
    return Constant(warmup_samples=warmup_samples)


def linear_decay(
    warmup_samples: int = 0, total_samples: int | None = None, floor: float = 0.0
) -> Decay:
    """A straight line from 1 down to ``floor``.

    Args:
        warmup_samples: samples of linear warm-up from 0 before the decay begins; 0 for none.
        total_samples: where the floor is reached; None for the end of the run.
        floor: the factor at and after the end, in [0, 1].

    Returns:
        The schedule.

    Raises:
        UsageError: an argument outside its range, or a warm-up longer than the whole.
    """
    return Decay(
        owner="schedules.linear_decay",
        shape=_linear_shape,
        warmup_samples=warmup_samples,
        total_samples=total_samples,
        floor=floor,
    )


def cosine(warmup_samples: int = 0, total_samples: int | None = None, floor: float = 0.0) -> Decay:
    """Half a cosine from 1 down to ``floor``: (1 + cos(pi p)) / 2 with p the fraction of samples.

    Args:
        warmup_samples: samples of linear warm-up from 0 before the decay begins; 0 for none.
        total_samples: where the floor is reached; None for the end of the run.
        floor: the factor at and after the end, in [0, 1].

    Returns:
        The schedule.

    Raises:
        UsageError: an argument outside its range, or a warm-up longer than the whole.

    Example:
        >>> schedule = cosine().resolve(6_400)
        >>> schedule(0), round(schedule(3_200), 12), schedule(6_400)
        (1.0, 0.5, 0.0)
    """
    return Decay(
        owner="schedules.cosine",
        shape=_cosine_shape,
        warmup_samples=warmup_samples,
        total_samples=total_samples,
        floor=floor,
    )


def polynomial(
    power: float = 2.0,
    warmup_samples: int = 0,
    total_samples: int | None = None,
    floor: float = 0.0,
) -> Decay:
    """(1 - p)^power from 1 down to ``floor``, with p the fraction of samples.

    Args:
        power: the exponent, > 0; 1 equals :func:`linear_decay`.
        warmup_samples: samples of linear warm-up from 0 before the decay begins; 0 for none.
        total_samples: where the floor is reached; None for the end of the run.
        floor: the factor at and after the end, in [0, 1].

    Returns:
        The schedule.

    Raises:
        UsageError: an argument outside its range, or a warm-up longer than the whole.
    """
    number_in("schedules.polynomial", "power", power, low=0.0, high=100.0, open_low=True)
    return Decay(
        owner="schedules.polynomial",
        shape=_PowerShape(power=power),
        warmup_samples=warmup_samples,
        total_samples=total_samples,
        floor=floor,
    )


def step(milestones_samples: Sequence[int], factor: float = 0.1, warmup_samples: int = 0) -> Step:
    """Multiply by ``factor`` at each milestone.

    Args:
        milestones_samples: rising numbers of samples, each >= 1 and not inside the warm-up.
        factor: in [0, 1].
        warmup_samples: samples of linear warm-up from 0; 0 for none.

    Returns:
        The schedule.

    Raises:
        UsageError: an argument outside its range, or milestones that do not rise.

    Example:
        >>> schedule = step([100, 200], factor=0.5)
        >>> [schedule(samples) for samples in (99, 100, 250)]
        [1.0, 0.5, 0.25]
    """
    return Step(
        milestones_samples=tuple(milestones_samples), factor=factor, warmup_samples=warmup_samples
    )


MAKERS: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "linear_warmup": linear_warmup,
    "linear_decay": linear_decay,
    "cosine": cosine,
    "polynomial": polynomial,
    "step": step,
}
"""The functions of this module that make a schedule, by name."""


def by_name(name: str, **settings: int | float | Sequence[int] | None) -> Schedule:
    """The schedule called ``name`` with the given settings, as a recipe or command line writes it.

    Args:
        name: a key of ``MAKERS``, e.g. ``"cosine"``.
        **settings: the arguments of that function, e.g. ``warmup_samples=50_000``.

    Returns:
        The schedule, not yet resolved.

    Raises:
        UsageError: no such schedule, no such setting, a setting missing, or a value refused.

    Example:
        >>> by_name("cosine", floor=0.1) == cosine(floor=0.1)
        True
    """
    if name not in MAKERS:
        raise UsageError(
            f"schedule = {name!r}; there is no such schedule; choose one of {', '.join(MAKERS)}"
        )
    make = MAKERS[name]
    known = ", ".join(signature(make).parameters)
    try:
        signature(make).bind(**settings)
    except TypeError as error:
        raise UsageError(f"schedule = {name!r}; {error}; it takes {known}") from error
    return make(**settings)
