"""Every shipped rule against the shipped conformance suite, and the suite against broken rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from shoal.scaling import RULES, At, Dynamic, GradientNoise, Linear, Rule, by_name
from shoal.scaling.dynamic import DynamicState
from shoal.scaling.linear import LinearState
from shoal.testing import scaling as suite

CASES: list[tuple[str, dict[str, Any]]] = [
    ("unscaled", {}),
    ("linear", {"reference_batch": 16}),
    ("linear", {"reference_batch": 16, "momentum_correction": False}),
    ("square_root", {"reference_batch": 16}),
    ("dynamic", {"reference_batch": 16}),
    ("dynamic", {"reference_batch": 7, "down": "ramp"}),
    ("dynamic", {"reference_batch": 16, "ramp_steps": 30, "down": "ramp"}),
    ("dynamic", {"reference_batch": 16, "ramp_steps": "auto"}),
    ("dynamic", {"reference_batch": 16, "ramp_steps": 0}),
    ("noise_matched", {"reference_batch": 16}),
    ("noise_matched", {"reference_batch": 3, "tolerance": 1e-9}),
    ("adascale", {"reference_batch": 16}),
    ("legw", {"reference_batch": 16, "warmup_epochs": 1.5}),
    ("legw", {"reference_batch": 16, "warmup_epochs": 0}),
]


def label(case: tuple[str, dict[str, Any]]) -> str:
    name, settings = case
    return "-".join([name, *(f"{key}={value}" for key, value in settings.items())])


@pytest.fixture(params=CASES, ids=label)
def rule(request: pytest.FixtureRequest) -> Rule[Any]:
    name, settings = request.param
    return by_name(name, **settings)


def test_every_shipped_rule_has_a_row() -> None:
    assert {name for name, _ in CASES} == set(RULES)


def test_whole_suite(rule: Rule[Any]) -> None:
    suite.check_rule(rule, seeds=8)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_starting_with_any_number_of_workers_needs_no_ramp(rule: Rule[Any], workers: int) -> None:
    batch = 16 * workers
    rows, _ = suite.walk(rule, suite.begin(rule, batch), [suite.Tick(global_batch=batch)] * 400)
    assert rows[-1].multiplier == rows[-1].target
    if rule.name != "legw":
        assert [row.ramp_end for row in rows] == [None] * 400
        assert all(row.multiplier == row.target for row in rows)


def test_degenerate_settings_equal_the_simple_rule_bit_for_bit() -> None:
    for simple, degenerate in [
        (
            by_name("linear", reference_batch=16),
            by_name("dynamic", reference_batch=16, ramp_steps=0),
        ),
        (
            by_name("square_root", reference_batch=16),
            by_name("legw", reference_batch=16, warmup_epochs=0),
        ),
    ]:
        script = suite.random_script(simple, seed=3)
        first, _ = suite.walk(simple, suite.begin(simple, 16), script)
        second, _ = suite.walk(degenerate, suite.begin(degenerate, 16), script)
        assert [row.numbers() for row in first] == [row.numbers() for row in second]


# Rules with one fault each. The suite is worth something only if it finds every one of them.


@dataclass(frozen=True, kw_only=True)
class CountsCalls(Dynamic):
    """Ramps by the number of calls, so a failed step moves it."""

    def advance(self, state: DynamicState, at: At) -> DynamicState:
        advanced = super().advance(state, at)
        return replace(advanced, start_step=advanced.start_step - 1)


@dataclass(frozen=True, kw_only=True)
class RemembersFailedSteps(Dynamic):
    """Keeps what a failed step told it in a place outside the state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seen", [])

    def advance(self, state: DynamicState, at: At) -> DynamicState:
        seen: list[int] = self.__dict__["seen"]
        seen.append(at.global_batch)
        return super().advance(state, at)

    def multiplier(self, state: DynamicState, at: At) -> float:
        return super().multiplier(state, at) * (1.0 + len(self.__dict__["seen"]) * 1e-9)


@dataclass(frozen=True, kw_only=True)
class LosesBits(Dynamic):
    """Rounds what it writes."""

    def to_dict(self, state: DynamicState) -> dict[str, float | int | None]:
        values = super().to_dict(state)
        return {**values, "start": round(float(values["start"] or 0), 3)}


@dataclass(frozen=True, kw_only=True)
class EndsNearTheTarget(Dynamic):
    """Interpolates for ever, so that it ends a rounding error away."""

    def multiplier(self, state: DynamicState, at: At) -> float:
        exact = super().multiplier(state, at)
        return exact * (1.0 + 1e-15 * (state.start != state.target)) + 1e-16


@dataclass(frozen=True, kw_only=True)
class KeepsHistory(Dynamic):
    """Starts its next ramp from a target that depends on the path."""

    def advance(self, state: DynamicState, at: At) -> DynamicState:
        advanced = super().advance(state, at)
        if advanced is state:
            return state
        return replace(advanced, target=advanced.target * (1 + 1e-3 * (state.target > 1)))

    def target(self, state: DynamicState, at: At) -> float:
        return state.target


@dataclass(frozen=True, kw_only=True)
class AnnouncesLate(Dynamic):
    """Says the ramp ends one step later than it does."""

    def ramp_end(self, state: DynamicState, at: At) -> int | None:
        end = super().ramp_end(state, at)
        return None if end is None else end + 1


@dataclass(frozen=True, kw_only=True)
class RampsAtStart(Dynamic):
    """Begins a run with a false ramp."""

    def init(self, at: At) -> DynamicState:
        return replace(super().init(at), start=1.0, length=8)

    def ramp_end(self, state: DynamicState, at: At) -> int | None:
        return None


@dataclass(frozen=True, kw_only=True)
class ScalesTheBufferAlways(Linear):
    """Multiplies momentum buffers in every step."""

    def momentum_factor(self, state: LinearState, at: At) -> float:
        return 0.5


@dataclass(frozen=True, kw_only=True)
class GoesBack(Linear):
    """Its schedule goes backwards when the batch grows."""

    def progress(self, state: LinearState, at: At) -> float:
        return at.samples / at.global_batch


@dataclass(frozen=True, kw_only=True)
class AcceptsAnything(Linear):
    """Reads another rule's state."""

    def from_dict(self, values: dict[str, float | int | None]) -> LinearState:
        return LinearState(applied=float(values.get("applied") or 1.0))


@dataclass(frozen=True, kw_only=True)
class VanishingRate(Linear):
    """Reaches a multiplier of zero."""

    def multiplier(self, state: LinearState, at: At) -> float:
        return float(at.global_batch // self.reference_batch)

    def target(self, state: LinearState, at: At) -> float:
        return self.multiplier(state, at)


@dataclass(frozen=True, kw_only=True)
class UnknownOptimizer(Linear):
    """Declares a kind that no optimizer has."""

    optimizers = frozenset({"momentum"})


@dataclass(frozen=True, kw_only=True)
class ForgetsCommits(Linear):
    """Never remembers what it applied, so the buffer is scaled again and again."""

    def commit(self, state: LinearState, at: At, noise: GradientNoise | None) -> LinearState:
        return state


@pytest.mark.parametrize(
    "broken",
    [
        CountsCalls(reference_batch=16),
        RemembersFailedSteps(reference_batch=16),
        LosesBits(reference_batch=16),
        EndsNearTheTarget(reference_batch=16),
        KeepsHistory(reference_batch=16),
        AnnouncesLate(reference_batch=16),
        RampsAtStart(reference_batch=16),
        ScalesTheBufferAlways(reference_batch=16),
        GoesBack(reference_batch=16),
        AcceptsAnything(reference_batch=16),
        VanishingRate(reference_batch=16),
        UnknownOptimizer(reference_batch=16),
        ForgetsCommits(reference_batch=16, momentum_correction=False),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_the_suite_finds_the_fault(broken: Rule[Any]) -> None:
    with pytest.raises(AssertionError, match=f"rule '{broken.name}': "):
        suite.check_rule(broken)
