"""The design: the same trials in every process, however many are drawn and from wherever."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.study import Budget, CurveSpec, Goal, Grid, Log, ReverseLog, Space, StudySpec
from shoal.study.design import confirmations, draws, search_seed, unit_points
from shoal.study.records import CONFIRM, SearchKey
from shoal.study.space import Linear

LR = Log(min=1e-3, max=1.0)
KEY = SearchKey(curve="nesterov", global_batch=8, repeat=0)
GOLDEN = (2369135478490606096, "d2a56c313aa7e7ad")


def _spec(**changes: object) -> StudySpec:
    settings: dict[str, object] = {
        "name": "s",
        "workload": "digits_tiny",
        "curves": {
            "nesterov": CurveSpec(
                optimizer="nesterov",
                space=Space({"lr": LR, "momentum": ReverseLog(min=0, max=0.99)}),
            ),
            "sgd": CurveSpec(optimizer="sgd", space=Space({"lr": LR})),
        },
        "global_batches": (8, 16),
        "goals": (Goal(metric="val/classification_error", value=0.1),),
        "budget": Budget(feasible=4, draws=16, steps=100),
        # Neither data nor source is needed to draw.
        "recorded_fingerprint": "0" * 64,
    }
    return StudySpec(**(settings | changes))  # pyright: ignore


@pytest.mark.parametrize("sampler", ["halton", "sobol"])
def test_eight_of_64_are_the_eight_of_8(sampler: str) -> None:
    spec = _spec(sampler=sampler)
    assert draws(spec, KEY, 0, 64)[:8] == draws(spec, KEY, 0, 8)


@pytest.mark.parametrize("sampler", ["halton", "sobol"])
@given(bounds=st.lists(st.integers(0, 70), min_size=2, max_size=2))
@settings(max_examples=20)
def test_a_trial_does_not_depend_on_how_many_are_drawn(sampler: str, bounds: list[int]) -> None:
    start, stop = sorted(bounds)
    spec = _spec(sampler=sampler)
    some = draws(spec, KEY, start, stop)
    assert [trial.id for trial in some] == list(range(start, stop))
    assert some == draws(spec, KEY, 0, 70)[start:stop]


def test_searches_are_drawn_independently() -> None:
    spec = _spec()
    keys = spec.searches()
    points = {draws(spec, key, 0, 1)[0].unit[0] for key in keys}
    seeds = {trial.seed for key in keys for trial in draws(spec, key, 0, 20)}
    assert len(points) == len(keys) == 20
    assert len(seeds) == 20 * len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_draws_of_two_batch_sizes_do_not_go_together() -> None:
    # In base 2 a scramble is a shift of the bits: two of them go with or against each other by
    # chance, half and half, and are independent over scrambles.
    spec = _spec()

    def first(batch: int, repeat: int) -> list[float]:
        key = SearchKey(curve="nesterov", global_batch=batch, repeat=repeat)
        return [trial.unit[0] for trial in draws(spec, key, 0, 64)]

    together = [np.corrcoef(first(8, r), first(16, r))[0, 1] for r in range(60)]
    assert abs(np.mean(together)) < 4 * np.std(together) / len(together) ** 0.5
    assert min(together) < -0.5 and max(together) > 0.5


def test_the_seed_of_a_search_is_study_curve_optimizer_repeat_and_batch() -> None:
    spec = _spec()
    others = [
        search_seed(_spec(seed=1), KEY),
        search_seed(spec, dataclasses.replace(KEY, repeat=1)),
        search_seed(spec, dataclasses.replace(KEY, global_batch=16)),
        search_seed(spec, dataclasses.replace(KEY, curve="sgd")),
    ]
    assert search_seed(spec, KEY) not in others and len(set(others)) == 4
    # Nothing else moves it: a study may change its goal, budget or grid and draw the same points.
    same = _spec(
        name="other", repeats=9, grid=Grid(ratio=1.1), budget=Budget(feasible=9, draws=9, steps=9)
    )
    assert search_seed(same, KEY) == search_seed(spec, KEY)


@pytest.mark.parametrize("sampler", ["halton", "sobol"])
def test_points_fill_the_cube_evenly(sampler: str) -> None:
    points = unit_points(sampler, 2, 7, 0, 64)
    assert points.shape == (64, 2) and points.min() >= 0 and points.max() < 1
    for axis in range(2):
        counts, _ = np.histogram(points[:, axis], bins=8, range=(0, 1))
        # 64 random points would put 8 +- 2.6 into each.
        assert counts.min() >= 5 and counts.max() <= 11


def test_parameters_hold_all_that_the_optimizer_needs() -> None:
    adamw = CurveSpec(
        optimizer="adamw", space=Space({"lr": LR}), fixed={"weight_decay": 0.0, "beta1": 0.95}
    )
    spec = _spec(curves={"adamw": adamw})
    trial = draws(spec, SearchKey(curve="adamw", global_batch=8, repeat=0), 0, 1)[0]
    assert trial.parameters == {
        "lr": LR.value(trial.unit[0]),
        "beta1": 0.95,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
    }


def test_a_space_of_one_batch_size_moves_only_its_own_trials() -> None:
    narrow = Space({"lr": Log(min=0.1, max=1.0)})
    base = _spec(curves={"sgd": CurveSpec(optimizer="sgd", space=Space({"lr": LR}))})
    moved = _spec(
        curves={"sgd": CurveSpec(optimizer="sgd", space=Space({"lr": LR}), spaces={16: narrow})}
    )
    for batch in (8, 16):
        key = SearchKey(curve="sgd", global_batch=batch, repeat=0)
        a, b = draws(base, key, 0, 8), draws(moved, key, 0, 8)
        assert (a == b) == (batch == 8)
        assert [t.unit for t in a] == [t.unit for t in b]


def test_an_address_is_moved_by_everything_that_decides_the_curve_and_by_nothing_else() -> None:
    spec = _spec()
    base = draws(spec, KEY, 3, 4)[0].address
    space = spec.curves["nesterov"].space
    other = {
        "workload": _spec(recorded_fingerprint="1" * 64),
        "workload_parameters": _spec(workload_parameters={"widths": [8]}),
        "seed": _spec(seed=1),
        "grid": _spec(grid=Grid(ratio=1.06)),
        "stride": _spec(grid=Grid(stride=2)),
        "optimizer": _spec(curves={"nesterov": CurveSpec(optimizer="heavy_ball", space=space)}),
        "weight_decay": _spec(
            curves={
                "nesterov": CurveSpec(
                    optimizer="nesterov", space=space, fixed={"weight_decay": 1e-4}
                )
            }
        ),
        "schedule": _spec(
            curves={
                "nesterov": CurveSpec(
                    optimizer="nesterov",
                    space=space,
                    schedule="linear_decay",
                    fixed={"decay_steps": 50, "end_factor": 0.1},
                )
            }
        ),
    }
    addresses = {name: draws(s, KEY, 3, 4)[0].address for name, s in other.items()}
    addresses["batch"] = draws(spec, dataclasses.replace(KEY, global_batch=16), 3, 4)[0].address
    addresses["id"] = draws(spec, KEY, 4, 5)[0].address
    assert base not in addresses.values()
    assert len(set(addresses.values())) == len(addresses)
    indifferent = _spec(
        name="t", repeats=1, budget=Budget(feasible=2, draws=3, steps=5, kappa=1, full=True)
    )
    assert draws(indifferent, KEY, 3, 4)[0].address == base


def test_trials_are_the_same_in_another_process_and_version() -> None:
    trial = draws(_spec(), KEY, 3, 4)[0]
    here = {"unit": trial.unit, "seed": trial.seed, "address": trial.address}
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_design import KEY, _spec, draws\n"
        "t = draws(_spec(), KEY, 3, 4)[0]\n"
        "print(json.dumps({'unit': t.unit, 'seed': t.seed, 'address': t.address}))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(there.stdout) == json.loads(json.dumps(here))
    # Recorded once; a change here means that old studies cannot be continued: raise spec.FORMAT.
    assert (trial.seed, trial.address[:16]) == GOLDEN


def test_confirmations_keep_the_setting_and_take_fresh_seeds() -> None:
    spec = _spec()
    winner = draws(spec, KEY, 5, 6)[0]
    again = confirmations(spec, winner, 0, 10)
    assert {t.search for t in again} == {dataclasses.replace(KEY, repeat=CONFIRM)}
    assert all(t.parameters == winner.parameters and t.unit == winner.unit for t in again)
    assert len({t.seed for t in again} | {winner.seed}) == 11
    assert confirmations(spec, winner, 4, 6) == again[4:6]


def test_refused() -> None:
    with pytest.raises(UsageError, match="curve = 'adam'"):
        draws(_spec(), dataclasses.replace(KEY, curve="adam"), 0, 1)
    with pytest.raises(ValueError, match="start"):
        draws(_spec(), KEY, 3, 2)
    assert draws(_spec(), KEY, 3, 3) == []


def test_a_linear_space_is_drawn_too() -> None:
    spec = _spec(
        curves={"sgd": CurveSpec(optimizer="sgd", space=Space({"lr": Linear(min=0.1, max=0.3)}))}
    )
    drawn = draws(spec, SearchKey(curve="sgd", global_batch=8, repeat=0), 0, 64)
    assert np.mean([t.parameters["lr"] for t in drawn]) == pytest.approx(0.2, abs=0.01)
