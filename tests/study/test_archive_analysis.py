"""Imported archives: planted steps by the released rule, slices, borders, and equal numbers of trials."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.ledger.archive import import_archive
from shoal.study.archive_analysis import analyse_archive
from shoal.study.edges import Place
from shoal.study.records import Goal
from shoal.workloads.synthetic_archive import SyntheticArchive
from shoal.workloads.synthetic_trials import PlantedWorkload

BATCHES = [1, 4, 16, 64, 256, 1024, 4096]


def workload(path: str, s_min: float, b_crit: float, **options) -> PlantedWorkload:
    counts = dict.fromkeys(BATCHES, (30, 4, 8))
    given = {"counts": counts, "rows": 60, **options}
    return PlantedWorkload(path=path, steps_min=s_min, samples_min=s_min * b_crit, **given)


ARCHIVE = SyntheticArchive(
    seed=3,
    workloads=[
        workload("mnist/cnn/momentum", 400, 64),
        workload("mnist/cnn/sgd", 900, 16, never_reaches=1),
        workload(
            "imagenet/resnet_50/nesterov_momentum",
            300,
            64,
            metric="average_precision",
            goal=0.31,
            samples=50_000,
        ),
    ],
)
CNN = Goal(metric="val/classification_error", value=0.1)
PRECISION = Goal(metric="val/average_precision", value=0.31, larger_is_better=True)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory):
    source = tmp_path_factory.mktemp("archive") / "released"
    ARCHIVE.write(source)
    out = tmp_path_factory.mktemp("imported")
    assert import_archive(source, out).problems == []
    return out


@pytest.fixture(scope="module")
def cnn(imported):
    return analyse_archive(imported, "mnist/cnn", goals=[CNN], trials=20, resamples=0)


def test_planted_steps_and_winners(cnn):
    planted = {s.path: s.result(20) for s in ARCHIVE.searches()}
    assert len(cnn.main.rows) == 14
    for row in cnn.main.rows:
        expected = planted[f"mnist/cnn/{row.curve}/{row.global_batch}"]
        found = None if row.steps is None else (row.steps, row.winner)
        assert found == expected
        assert row.feasible == 20
    missed = [r for r in cnn.main.rows if r.reach == "not reached"]
    assert [(r.curve, r.global_batch) for r in missed] == [("sgd", 1)]
    assert all(r.censored_at for r in missed)


def test_the_trade_off_is_the_planted_one(cnn):
    fit = cnn.main.fits["momentum"]
    assert fit is not None and fit.is_usable
    # Grids are as coarse as the released ones and the best of 20 is lucky.
    assert fit.b_crit.value == pytest.approx(64, rel=0.35)
    assert set(cnn.main.comparisons) == {("momentum", "sgd")}
    assert cnn.best_errors, "released trials were all trained to the budget"
    assert cnn.name == "mnist/cnn"


def test_larger_may_be_better(imported):
    found = analyse_archive(imported, "imagenet/resnet_50", goals=[PRECISION], resamples=0)
    assert found.settings.budget.feasible == 30
    planted = {s.global_batch: s.result(30) for s in ARCHIVE.searches() if "resnet" in s.path}
    for row in found.main.rows:
        assert (row.steps, row.winner) == planted[row.global_batch]
    by_budget: dict[tuple, list[float]] = {}
    for entry in found.best_errors:
        by_budget.setdefault((entry.key, entry.unit), []).append(entry.value)
    assert by_budget
    for values in by_budget.values():
        known = [v for v in values if v is not None]
        assert known == sorted(known)


def test_slices_are_curves_of_their_own(imported):
    split = analyse_archive(
        imported,
        "imagenet/resnet_50",
        goals=[PRECISION],
        split_by="label_smoothing",
        resamples=0,
    )
    curves = [f"nesterov_momentum_label_smoothing={v}" for v in ("0", "0.01", "0.1")]
    assert split.main.curves == curves
    count = split.settings.budget.feasible
    for search in ARCHIVE.searches():
        if "resnet" not in search.path:
            continue
        for value in (0.0, 0.01, 0.1):
            chosen = [
                i
                for i in np.flatnonzero(search.status == "COMPLETE")
                if search.parameters["label_smoothing"][i] == value
            ][:count]
            crossed = [
                (int(search.crossing[i]), int(search.ids[i]))
                for i in chosen
                if search.crossing[i] >= 0
            ]
            row = next(
                r
                for r in split.main.rows
                if (r.curve, r.global_batch)
                == (f"nesterov_momentum_label_smoothing={value:g}", search.global_batch)
            )
            assert (row.steps, row.winner) == min(crossed, default=(None, None))
    with pytest.raises(UsageError, match="split_by = 'dropout'"):
        analyse_archive(imported, "mnist/cnn", goals=[CNN], split_by="dropout")


def test_units_come_from_the_archived_space(cnn):
    places = {e.place for edges in cnn.main.edges.values() for e in edges}
    assert Place.INSIDE in places
    assert set(cnn.parameters["momentum"]) >= {"lr", "momentum"}


def test_equal_numbers_only(imported):
    with pytest.raises(UsageError, match="has 30 complete ones"):
        analyse_archive(imported, "mnist/cnn", goals=[CNN], trials=31)
    with pytest.raises(UsageError, match="name one of them"):
        analyse_archive(imported, goals=[CNN])
