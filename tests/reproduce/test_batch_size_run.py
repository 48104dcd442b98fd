"""The whole command on small studies, and the second derivation against damage."""

import dataclasses
import io
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.reproduce.batch_size import check, criteria, full, long, quadratic, rederive, studies
from shoal.reproduce.batch_size.run import Options, run, run_batch_size
from shoal.reproduce.claims import Verdict
from shoal.study import Budget, Log, ReverseLog, Space, StudySpec
from shoal.study.directory import StudyDirectory
from shoal.study.run import begin
from shoal.study.runner import Runner
from shoal.study.tables import MetricColumn, read_study
from shoal.workloads.quadratic_study import Optimum
from shoal.workloads.synthetic_curves import SyntheticCurves, SyntheticWorkshop

CURVES = SyntheticCurves(
    smallest_steps=30, fewest_samples=240, goal=0.06, luck=0.2, noise=0.05, stable_lr=2.0
)


def planted_spec(is_full: bool) -> StudySpec:
    spec = studies.full_spec(repeats=2) if is_full else studies.digits_spec(repeats=2)
    return dataclasses.replace(
        spec,
        workload=CURVES.workload(),
        workload_parameters={},
        curves={name: spec.curves[name] for name in spec.curves if name != "nesterov"},
        global_batches=(1, 4, 16, 64),
        budget=Budget(feasible=8, draws=20, steps=500, full=is_full, kappa=3.0),
    )


def planted(directory: Path, is_full: bool = False) -> studies.Measured:
    spec = planted_spec(is_full)
    begin(StudyDirectory(directory), spec, confirm_seeds=0)
    workshop = SyntheticWorkshop(CURVES)
    Runner(StudyDirectory(directory), spec, name="one", workshop=workshop).work()
    return studies.measured(spec, directory, read_study(directory))


def compared(study: studies.Measured) -> check.Differences:
    differences = check.Differences()
    check.check(study, differences, {})
    return differences


@pytest.mark.parametrize("is_full", [False, True])
def test_the_second_way_agrees_with_the_analysis(tmp_path: Path, is_full: bool) -> None:
    study = planted(tmp_path, is_full)
    differences = compared(study)
    assert differences.found == []
    assert differences.searches == len(study.spec.searches())
    assert differences.numbers > 15 * differences.searches
    claim = check.judge_rederived(differences, (1,))
    assert claim.verdict is Verdict.SHOWN
    assert any(fit is not None for fit in study.analysis.main.fits.values())


def test_a_sample_budget_that_no_trial_spent_is_left_out(tmp_path: Path) -> None:
    study = planted(tmp_path, is_full=True)
    # 500 steps: 4,000 samples are spent from B = 8 on, 8,000 from B = 16 on.
    table = full.budget_table(study)
    assert list(table["samples", 4_000].means) == list(table["samples", 8_000].means) == [16, 64]
    assert list(table["steps", 100].means) == [1, 4, 16, 64]
    values = list(table["steps", 300].means.values())
    assert all(value is not None and 0 < value < 2.5 for value in values)


def test_the_second_way_sees_a_changed_row(tmp_path: Path) -> None:
    """Rows changed after the analysis read them: every kind of difference is named."""
    study = planted(tmp_path)
    summary = next(s for s in study.analysis.main.summaries if s.steps is not None)
    path = next((tmp_path / "rows").glob("*.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for row in lines:
        same = row["kind"] == "eval" and row["search"] == str(summary.key)
        if same and row["trial"] == summary.result.winner and row["step"] == summary.steps:
            row["metrics"][summary.goal.metric] = 0.9
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    differences = compared(study)
    assert any(str(summary.key) in what for what in differences.found)
    claim = check.judge_rederived(differences, ())
    assert claim.verdict is Verdict.NOT_SHOWN and "differ" in str(claim.value)


def test_nothing_compared_is_nothing_shown() -> None:
    assert check.judge_rederived(check.Differences(), ()).verdict is Verdict.NOT_SHOWN


def test_the_second_likelihood_by_hand() -> None:
    """One search of sigma 1 around ln 10: between -1 and 1 sd, and beyond 1 sd."""
    e = math.e
    found = rederive.log_likelihood([(1, 10 / e, 10 * e)], 5.0, 1.0, 1.0, None)
    assert found == pytest.approx(math.log(0.6826894921), rel=1e-8)
    censored = rederive.log_likelihood([(1, 10 * e, math.inf)], 5.0, 1.0, 1.0, None)
    assert censored == pytest.approx(math.log(0.1586552539), rel=1e-8)
    # At the whole data only S_min is left.
    whole = rederive.log_likelihood([(64, 5 / e, 5 * e)], 5.0, 99.0, 1.0, 64)
    assert whole == pytest.approx(math.log(0.6826894921), rel=1e-8)


def test_recentred_searches_take_the_place_of_the_old(tmp_path: Path) -> None:
    first, again = planted(tmp_path / "first"), planted(tmp_path / "again")
    # The second directory stands for a study with another range at B = 16.
    moved = [("sgd", 16)]
    merged = studies.merged(first, again, moved)
    taken = [key for key in merged.tables.searches if (key.curve, key.global_batch) in moved]
    assert all(merged.tables[key] is again.tables[key] for key in taken) and len(taken) == 2
    differences = check.Differences()
    check.check(merged, differences, {("sgd", 16): again})
    assert differences.found == []


def reference_quadratic() -> quadratic.QuadraticStudy:
    def optima(steps: tuple[int, ...], momentum: float) -> list[Optimum]:
        return [
            Optimum(global_batch=b, steps=s, lr=0.1, momentum=momentum)
            for b, s in zip(quadratic.BATCHES, steps, strict=True)
        ]

    sgd, heavy = (
        optima(quadratic.REFERENCE_SGD, 0.0),
        optima(quadratic.REFERENCE_MOMENTUM, 0.9),
    )
    return quadratic.QuadraticStudy(
        sgd=sgd, momentum=heavy, cautious_sgd=sgd, cautious_momentum=heavy
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same studies on a quarter of the digits, at three batches, with few trials."""
    wide = {"lr": Log(min=0.02, max=2.0), "momentum": ReverseLog(min=0.0, max=0.9)}

    def shrunk(spec: StudySpec, steps: int, feasible: int) -> StudySpec:
        return dataclasses.replace(
            spec,
            workload="digits_tiny",
            curves={
                name: dataclasses.replace(curve, space=Space({n: wide[n] for n in curve.space}))
                for name, curve in spec.curves.items()
            },
            global_batches=(8, 32, 128),
            goals=tuple(dataclasses.replace(g, value=g.value + 0.4) for g in spec.goals),
            budget=dataclasses.replace(
                spec.budget, feasible=feasible, draws=4 * feasible, steps=steps
            ),
            repeats=min(spec.repeats, 2),
        )

    main, whole, quick = studies.digits_spec(), studies.full_spec(), studies.quick_spec()
    monkeypatch.setattr(quadratic, "run_quadratic", reference_quadratic)
    monkeypatch.setattr(studies, "digits_spec", lambda: shrunk(main, 400, 5))
    monkeypatch.setattr(studies, "full_spec", lambda: shrunk(whole, 60, 3))
    monkeypatch.setattr(studies, "quick_spec", lambda: shrunk(quick, 400, 4))


@pytest.mark.processes
def test_quick_runs_its_subset_and_says_what_it_did_not_run(tmp_path: Path, small: None) -> None:
    result = run(tmp_path / "out", quick=True, stream=io.StringIO())
    verdicts = {claim.id: claim.verdict for claim in result.claims}
    ran = {"P1", "P2", "P1r", "P2r", "P11", "Q3", "Q5"}
    assert {name for name, v in verdicts.items() if v is not Verdict.NOT_RUN} == ran
    assert verdicts["P11"] is Verdict.SHOWN
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert set(document["not_run"]) == set(verdicts) - ran
    assert "--quick" in document["not_run"]["P3"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/svg+xml;base64," in page and "not run" in page


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_whole_command_judges_everything_but_the_long_part(tmp_path: Path, small: None) -> None:
    out, stream = tmp_path / "out", io.StringIO()
    result = run(out, stream=stream)
    claims = {claim.id: claim for claim in result.claims}
    statements = (*criteria.QUADRATIC, *criteria.DIGITS, *criteria.PAPER)
    assert list(claims) == [s.id for s in statements]
    not_run = {name for name, claim in claims.items() if claim.verdict is Verdict.NOT_RUN}
    assert not_run == {"C2", "C8"}
    assert result.not_run["C2"] == "--long was not given"
    assert claims["P11"].verdict is Verdict.SHOWN, claims["P11"].value
    # The same command again measures nothing anew and says the same.
    shutil.rmtree(out / "figures")
    again = run(out, stream=stream)
    assert [c.to_dict() for c in again.claims] == [c.to_dict() for c in result.claims]
    assert (out / "figures" / "steps.svg").exists()


def test_options_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    stream = io.StringIO()
    with pytest.raises(UsageError, match="exclude each other"):
        run(tmp_path, quick=True, long=True, stream=stream)
    with pytest.raises(UsageError, match="add --long"):
        run_batch_size(Options(directory=tmp_path, long_searches=3), stream)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="must be a directory"):
        run(tmp_path / "file", quick=True, stream=stream)
    assert not list(tmp_path.glob("*/"))


def test_the_pilot_s_goal_is_its_least_error_and_a_tenth() -> None:
    rows = np.arange(4)
    column = MetricColumn(
        rows, rows, np.array([0.5, 0.2134, np.nan, 0.1]), np.array([True, True, True, False])
    )
    tables = SimpleNamespace(metric=lambda key, metric: {long.METRIC: column}[metric])
    pilot = SimpleNamespace(spec=planted_spec(is_full=True), tables=tables)
    assert long.goal_of(pilot) == 0.23


def test_the_long_part_is_not_run_until_its_searches_are_there(tmp_path: Path) -> None:
    assert [c.verdict for c in long.judge_long(None, None)] == [Verdict.NOT_RUN] * 2
    there = long.collected(tmp_path, {"cnn": 0.2})
    assert not there.is_whole and there.finished == {"cnn": 0}
    assert [c.verdict for c in long.judge_long(there, None)] == [Verdict.NOT_RUN] * 2
    rows = long.table(there).rows
    assert len(rows) == 6 and rows[0][2] == 0.2 and set(rows[0][3:]) == {"-"}
    assert long.SEARCHES == 108
