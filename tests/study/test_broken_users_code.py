"""Whatever a user's own workload raises before training ends in one line that names the place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.study.workload import load_workload

OWN = """
import torch
from torch import nn
from shoal.study.workload import Workload, cross_entropy

X, Y = torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)


class Truncated:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise OSError("image 17 is truncated")


def _made(**changes):
    given = dict(name="w", model=lambda: nn.Linear(3, 2), loss=cross_entropy, train=(X, Y), val=(X, Y))
    return Workload(**{**given, **changes})


def factory():
    raise RuntimeError("no such data\\nanywhere")


def model():
    def broken():
        raise ZeroDivisionError
    return _made(model=broken)


def forward():
    return _made(model=lambda: nn.Linear(4, 2))


def loss():
    return _made(loss=lambda output, target: output.nosuch())


def metric():
    return _made(metrics={"error": lambda output, target: {}["error"]})


def data_set():
    return _made(train=Truncated())
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("factory", ["own.py:factory", "RuntimeError (no such data anywhere) at own.py, line 23"]),
        ("model", ["workload.model", "ZeroDivisionError at own.py, line 28"]),
        ("forward", ["workload.model", "2x3 and 4x2"]),
        ("loss", ["workload.loss", "nosuch", "own.py, line 37"]),
        ("metric", ["workload.metrics['error']", "KeyError", "own.py, line 41"]),
        ("data_set", ["workload.train", "image 17 is truncated"]),
    ],
)
def test_what_it_raises_is_one_line(tmp_path: Path, function: str, said: list[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UsageError) as caught:
        load_workload(f"own.py:{function}", base=tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert all(part in text for part in said), text


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match=r"own\.py.*SyntaxError.*line 1"):
        load_workload("own.py:f", base=tmp_path)


def test_a_module_that_fails_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_on_import.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"fails_on_import.*no licence.*line 1"):
        load_workload("fails_on_import:f")


def test_a_model_made_of_a_list_of_layer_functions_is_the_same_in_every_process(
    tmp_path: Path,
) -> None:
    """Its closure holds functions in a tuple, whose printed form has their addresses."""
    (tmp_path / "own.py").write_text(
        OWN
        + """

def layered(width=2, p=0.5):
    def made(*layers):
        return lambda: nn.Sequential(nn.Linear(3, width), *[layer() for layer in layers])
    return _made(model=made(lambda: nn.Dropout(p), nn.ReLU))
"""
    )
    code = (
        "import sys; from pathlib import Path; from shoal.study.workload import load_workload\n"
        "print(load_workload('own.py:layered', base=Path(sys.argv[1])).fingerprint)"
    )
    # Data drawn at import is fixed by the seed, so only the closure could differ.
    (tmp_path / "own.py").write_text(
        (tmp_path / "own.py").read_text().replace("X, Y =", "torch.manual_seed(0)\nX, Y =")
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", ("[].append(lambda: 0);" * count) + code, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for count in (0, 1000)
    }
    assert len(prints) == 1
