"""The next version of a study whose optima lay at a boundary."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.study import (
    Budget,
    CurveSpec,
    Goal,
    Grid,
    Integer,
    Log,
    ReverseLog,
    Space,
    StudySpec,
    load_spec,
)
from shoal.study.edges import Proposal
from shoal.study.recentred import as_toml, recentred

SPACE = Space({"lr": Log(min=0.01, max=1.0), "momentum": ReverseLog(min=0.0, max=0.99)})
WIDER = Space({"lr": Log(min=0.1, max=10.0), "momentum": ReverseLog(min=0.0, max=0.99)})


def spec() -> StudySpec:
    decay = Space(
        {**SPACE, "decay_steps": Integer(min=10, max=500), "end_factor": Log(min=1e-3, max=0.1)}
    )
    return StudySpec(
        name="first",
        workload="fashion_fc_64x3",
        workload_parameters={"val_samples": 1000},
        curves={
            "heavy_ball": CurveSpec(optimizer="heavy_ball", space=SPACE),
            "decayed": CurveSpec(
                optimizer="nesterov",
                space=decay,
                schedule="linear_decay",
                fixed={"weight_decay": 1e-4},
            ),
        },
        global_batches=(8, 16),
        goals=(Goal(metric="val/classification_error", value=0.2),),
        budget=Budget(feasible=4, draws=9, steps=100),
        grid=Grid(ratio=1.1),
        recorded_fingerprint="f" * 64,
    )


def test_only_the_flagged_batch_gets_another_space() -> None:
    moved = Proposal(curve="heavy_ball", global_batch=16, space=WIDER, changes=("lr: moved",))
    limit = Proposal(curve="decayed", global_batch=8, space=SPACE, changes=(), kept=("lr: stable",))
    fresh = recentred(spec(), [moved, limit], name="second")
    assert fresh.curves["heavy_ball"].space_at(16) == WIDER
    assert fresh.curves["heavy_ball"].space_at(8) == SPACE
    assert fresh.curves["decayed"] == spec().curves["decayed"]
    assert fresh.name == "second"
    with pytest.raises(UsageError, match="nothing to change"):
        recentred(spec(), [limit], name="second")
    with pytest.raises(UsageError, match="another one"):
        recentred(spec(), [moved], name="first")


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    moved = Proposal(curve="heavy_ball", global_batch=16, space=WIDER, changes=("lr: moved",))
    fresh = recentred(spec(), [moved], name='second "try"')
    file = tmp_path / "second.toml"
    file.write_text(as_toml(fresh))
    back = load_spec(file)
    assert back.curves == fresh.curves and back.goals == fresh.goals
    assert back.budget == fresh.budget and back.grid == fresh.grid
    assert (back.name, back.workload, back.repeats, back.seed, back.sampler) == (
        fresh.name, fresh.workload, fresh.repeats, fresh.seed, fresh.sampler
    )  # fmt: skip
    assert back.workload_parameters == fresh.workload_parameters
