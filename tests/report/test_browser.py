"""The page in a headless browser: the plots are really there, in their places and colours.

The places are asked from the browser itself (a copy of the page with a script that writes them
down); the pixels are those of the page as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from shoal.report import write_run_report
from shoal.report.panels import PANELS

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
LIMIT_SECONDS = 60
MARKED = """<script>
const places = {};
for (const part of document.querySelectorAll('[id*="-panel-"], table, h1')) {
  const box = part.getBoundingClientRect();
  if (box.width) places[part.id || part.tagName] = [box.left, box.top, box.right, box.bottom];
}
places.width = [document.documentElement.scrollWidth];
const note = document.createElement('pre');
note.id = 'places';
note.textContent = JSON.stringify(places);
document.body.append(note);
</script>
"""
COLOURS = {
    "ink": (0x2F, 0x3E, 0x56),
    "join": (0x00, 0x83, 0x6B),
    "leave": (0x00, 0x69, 0xB4),
    "kill": (0xC8, 0x28, 0x1E),
}


@pytest.fixture(scope="module")
def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found:
        return found
    reason = f"no headless browser: none of {', '.join(names)} is installed"
    if os.environ.get("SHOAL_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{reason}, and SHOAL_REQUIRE_BROWSER=1 forbids the skip")
    pytest.skip(
        f"{reason}; the picture of the report is NOT checked (Debian: apt install chromium)"
    )


def browse(chromium: str, page: Path, scratch: Path, *flags: str) -> str:
    """Run the browser once on a page; it and its children are gone afterwards."""
    profile = scratch / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "HOME": str(scratch)},
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, f"the browser exited with {process.returncode}"
    return output


def look(chromium: str, page: Path, scratch: Path, width: int, height: int):
    """A screenshot as (height, width, 3) bytes, and the boxes of its parts in the same pixels."""
    from matplotlib.image import imread

    size = f"--window-size={width},{height}"
    picture = scratch / f"{width}.png"
    browse(chromium, page, scratch, size, f"--screenshot={picture}")
    copy = scratch / "marked.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", MARKED + "</body>"))
    dom = browse(chromium, copy, scratch, size, "--dump-dom")
    found = re.search(r'<pre id="places">(.*?)</pre>', dom, re.DOTALL)
    assert found, "the browser did not say where the panels are"
    pixels = np.asarray(imread(picture))[..., :3]
    return np.round(pixels * 255).astype(int), json.loads(found[1])


def shade(pixels: np.ndarray, colour: str, least: float = 70.0) -> np.ndarray:
    """Where pixels are a tint of a colour on white: thin lines are blended with the background."""
    wanted = 255.0 - np.array(COLOURS[colour])
    found = 255.0 - pixels
    length = np.linalg.norm(found, axis=-1)
    along = (found @ wanted) / np.linalg.norm(wanted)
    return (length > least) & (along > 0.985 * length)


@pytest.mark.parametrize(
    ("layout", "width", "height"), [("wide", 1100, 2600), ("narrow", 500, 3600)]
)
def test_the_plots_are_there(
    make_run, chromium: str, tmp_path: Path, layout: str, width: int, height: int
) -> None:
    page = write_run_report(make_run().directory)
    pixels, places = look(chromium, page, tmp_path, width, height)
    assert places["width"][0] <= width, "the page is wider than the screen"
    other = {"wide": "narrow", "narrow": "wide"}[layout]
    assert not any(name.startswith(f"{other}-panel-") for name in places)
    for panel in PANELS:
        left, top, right, bottom = map(round, places[f"{layout}-panel-{panel.name}"])
        assert right - left > 0.7 * width * (1 if layout == "narrow" else 0.75)
        shot = pixels[top:bottom, left:right]
        assert shot.shape[0] > 60
        assert (np.ptp(shot.reshape(-1, 3), axis=0) > 100).all(), f"{panel.name} is blank"
        # The data's line reaches over most of the panel, and is no frame: its height varies.
        data = shade(shot, "ink", least=200.0)
        title = shot.shape[0] - round(0.72 * shot.shape[0])
        columns = data[title:].any(axis=0)
        reach = 0.4 if panel.name == "scores" else 0.7
        assert columns.mean() > reach, f"{panel.name}: a line over {columns.mean():.0%} only"
        heights = {int(np.argmax(data[title:, x])) for x in np.flatnonzero(columns)}
        assert len(heights) >= 4, f"{panel.name}: a flat line"
        for kind in ("join", "leave", "kill"):
            seen = shade(shot, kind)
            assert seen.sum() > 25, f"{panel.name}: no mark of a {kind}"
            line = seen.any(axis=1)
            assert line.mean() > 0.3, f"{panel.name}: the line of a {kind} is cut short"


def test_the_phone_shows_tables_as_cards_within_the_screen(
    make_run, chromium: str, tmp_path: Path
) -> None:
    page = write_run_report(make_run().directory)
    _, places = look(chromium, page, tmp_path, 500, 1200)
    left, _, right, _ = places["TABLE"]
    assert 0 <= left < right <= 500


def test_a_run_without_a_step_shows_its_headline(chromium: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").write_text("")
    pixels, places = look(chromium, write_run_report(run), tmp_path, 1100, 700)
    left, top, right, bottom = map(round, places["headline"])
    assert (pixels[top:bottom, left:right].min(axis=-1) < 80).sum() > 200
    assert not any("panel" in name for name in places)
