"""The coordinator's process: torchft's lighthouse, without the seconds that importing torch takes.

Run by path:  python coordinator_main.py --bind ... (the options of ``torchft_lighthouse``)

The lighthouse is a function of torchft's compiled extension. Loading that extension alone takes a
hundredth of a second; where it is not laid out as expected, the console script's way is taken.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
# The script's own directory stands first in sys.path: it must not shadow anything.
sys.path.pop(0)


def load(name: str, path: Path) -> ModuleType:
    """The module in a file, extension modules included."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lighthouse() -> Callable[[], object]:
    """The lighthouse's main function; it reads the process's own arguments."""
    package = importlib.util.find_spec("torchft")
    for place in (package.submodule_search_locations or []) if package else []:
        for suffix in EXTENSION_SUFFIXES:
            path = Path(place) / f"_torchft{suffix}"
            if path.exists():
                return load("_torchft", path).lighthouse_main
    return importlib.import_module("torchft._torchft").lighthouse_main


def main() -> None:
    """Die with the parent; serve until killed."""
    load("worker_main", HERE / "worker_main.py").die_with_parent()
    lighthouse()()


if __name__ == "__main__":
    main()
