"""Figures as objects: reusable one by one, made without pyplot."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from shoal.report.figures import overview, panel
from shoal.report.panels import PANELS
from shoal.report.run import load_run


def axes_of(figure, name: str):
    (axes,) = [axes for axes in figure.axes if axes.get_gid() == f"panel-{name}"]
    return axes


@pytest.mark.parametrize("width", [9.2, 4.1])
def test_panels_are_aligned_and_share_their_axis(make_run, width: float) -> None:
    run = load_run(make_run().directory)
    figure = overview(run, width=width)
    boxes = [axes.get_position() for axes in figure.axes]
    assert len(boxes) == len(PANELS)
    assert len({(box.x0, box.x1) for box in boxes}) == 1
    assert all(above.y0 > below.y1 for above, below in itertools.pairwise(boxes))
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 60_000.0)}


def test_the_learning_rate_is_drawn_with_target_and_ramps(make_run) -> None:
    made = make_run()
    run = load_run(made.directory)
    axes = axes_of(panel(run, "lr"), "lr")
    lines = {line.get_label(): line for line in axes.lines}
    assert max(lines["in force"].get_ydata()) == pytest.approx(0.08)
    assert set(lines["target"].get_ydata()) == {0.02, 0.04, 0.06, 0.08}
    assert len([patch for patch in axes.patches if str(patch.get_gid()).startswith("ramp")]) == 2


def test_events_are_told_apart_without_colour(make_run) -> None:
    run = load_run(make_run().directory)
    for chosen in PANELS:
        axes = axes_of(panel(run, chosen.name), chosen.name)
        lines = [line for line in axes.lines if str(line.get_gid()).startswith("event-")]
        vertical = {line.get_gid(): line for line in lines if "marker" not in line.get_gid()}
        markers = [line.get_marker() for line in lines if "marker" in line.get_gid()]
        changes = [row for row in run.events if row["kind"] != "checkpoint"]
        assert [m for m in markers if m != "|"] == ["^", "^", "X", "v"]
        assert [line.get_xdata()[0] for line in vertical.values()] == [r["at"] for r in changes]


def test_an_unknown_panel_is_refused(make_run) -> None:
    run = load_run(make_run(total=64, script=((0.0, "", ("w0",), 0.0),)).directory)
    with pytest.raises(ValueError, match="name = 'lose'; a panel is one of workers, global_batch"):
        panel(run, "lose")


def test_no_pyplot_and_no_matplotlib_before_it_is_needed(make_run) -> None:
    made = make_run(total=640, script=((0.0, "", ("w0",), 0.0),))
    code = (
        "import sys, pathlib, shoal.report\n"
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules\n"
        f"shoal.report.write_run_report(pathlib.Path({str(made.directory)!r}))\n"
        "assert 'matplotlib.figure' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
