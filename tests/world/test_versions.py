"""What has to be equal on all workers of a fleet, and how a difference is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.world.elastic import endpoint
from shoal.world.elastic.endpoint import SOURCE, version_conflict, versions


def digest_of(package: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(endpoint, "__file__", str(package / "world" / "elastic" / "endpoint.py"))
    return endpoint.source_digest()


def test_the_source_is_what_workers_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, page = tmp_path / "fleet" / "step.py", tmp_path / "report" / "page.py"
    for path in (step, page):
        path.parent.mkdir()
        path.write_text("SLOTS = 7\n")
    before = digest_of(tmp_path, monkeypatch)
    page.write_text("SLOTS = 8\n")
    assert digest_of(tmp_path, monkeypatch) == before, "the report is nobody else's business"
    step.write_text("SLOTS = 8\n")
    edited = digest_of(tmp_path, monkeypatch)
    assert edited != before
    step.rename(step.with_name("steps.py"))
    assert digest_of(tmp_path, monkeypatch) not in (before, edited)


def test_files_edited_later_do_not_change_what_a_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = versions()[SOURCE]
    assert digest_of(tmp_path, monkeypatch) != before
    assert versions()[SOURCE] == before


def test_another_source_is_named_with_what_to_do() -> None:
    ours = versions()
    assert ours[SOURCE] and version_conflict(ours, ours) is None
    said = version_conflict(ours, {**ours, SOURCE: "00000000"})
    assert said is not None and "\n" not in said
    assert "00000000 on the worker" in said and str(ours[SOURCE]) in said and "--resume" in said
