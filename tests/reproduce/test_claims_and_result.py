"""Claims, the schema of result.json, and how files are written."""

import json
from pathlib import Path

import pytest

from shoal.reproduce.claims import Statement, Verdict, plain
from shoal.reproduce.page import render, words
from shoal.reproduce.result import Result, Table, environment, write_json, write_text

STATEMENT = Statement(id="X1", claim="More is more.", criterion="more >= 2")


def result(**changes: object) -> Result:
    claims = (
        STATEMENT.judge(holds=True, value={"more": 2.5}, seeds=(1, 2)),
        Statement(id="X2", claim="c", criterion="k").judge(holds=False, value=float("inf")),
        Statement(id="X3", claim="c", criterion="k").not_run(),
    )
    values: dict[str, object] = {
        "name": "made-up",
        "title": "Made <up>",
        "claims": claims,
        "environment": environment(),
        "not_run": {"X3": "needs 9 seeds & a week"},
        "tables": (Table(title="t", columns=("a", "b"), rows=(("x", 1.5), ("y", None))),),
        "caveats": ("small",),
        "raw": {"numbers": [1.0, float("nan")]},
    }
    return Result(**(values | changes))  # type: ignore[arg-type]


def test_result_json_has_the_agreed_schema(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", result().to_dict())
    document = json.loads((tmp_path / "result.json").read_text())
    assert {"claims", "environment"} <= document.keys()
    for claim in document["claims"]:
        assert set(claim) == {"id", "claim", "criterion", "value", "verdict", "seeds"}
        assert claim["verdict"] in ("shown", "not shown", "not run")
    first, second, third = document["claims"]
    assert first["value"] == {"more": 2.5} and first["seeds"] == [1, 2]
    assert second["value"] is None and second["verdict"] == "not shown"
    assert third["verdict"] == "not run" and third["seeds"] == []
    assert document["raw"]["numbers"] == [1.0, None]
    assert document["environment"]["packages"].keys() == {"torch", "numpy"}


def test_strictness_is_about_claims_that_were_run() -> None:
    shown = STATEMENT.judge(holds=True, value=1)
    missing = Statement(id="X3", claim="c", criterion="k").not_run()
    assert not result().all_asked_shown
    assert result(claims=(shown, missing)).all_asked_shown
    assert [shown.verdict, missing.verdict] == [Verdict.SHOWN, Verdict.NOT_RUN]


def test_a_result_refuses_two_claims_with_one_id() -> None:
    with pytest.raises(AssertionError):
        result(claims=(STATEMENT.not_run(), STATEMENT.not_run()))


def test_plain_makes_strict_json() -> None:
    value = {"a": (1, 2.5, float("-inf")), 3: {"b": float("nan")}, "s": "x", "n": None, "t": True}
    wanted = {"a": [1, 2.5, None], "3": {"b": None}, "s": "x", "n": None, "t": True}
    assert plain(value) == wanted
    json.dumps(plain(value), allow_nan=False)


def test_page_is_one_escaped_file_with_its_pictures_inside(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page = render(result(figures=(("a.svg", "A picture"),)), tmp_path)
    assert "Made &lt;up&gt;" in page and "Made <up>" not in page
    assert "data:image/svg+xml;base64," in page and 'src="a.svg"' not in page
    assert "needs 9 seeds &amp; a week" in page
    assert 'class="verdict not-shown"' in page
    assert "1 claims shown, 1 not shown, 1 not run" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (3, "3"),
        (0.123456, "0.1235"),
        ({"static_1x": 97.333333, "n": 2}, "static 1x 97.33, n 2"),
        (["a", 1.5], "a, 1.5"),
    ],
)
def test_values_in_words(value: object, text: str) -> None:
    assert words(value) == text


def test_a_file_is_replaced_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == "new"
