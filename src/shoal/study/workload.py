"""The workload of a study, by name, by ``package.module:function`` or by ``file.py:function``."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from shoal.errors import UsageError
from shoal.workloads.study_ghost_norm import GhostBatchNorm, ghost_batch_norm
from shoal.workloads.study_registry import REGISTRY, registered_factory
from shoal.workloads.study_workload import (
    SPLITS,
    MapDataset,
    PerSample,
    Split,
    Workload,
    classification_error,
    cross_entropy,
    materialised,
)
from shoal.workloads.users_code import users_code

__all__ = [
    "SPLITS",
    "GhostBatchNorm",
    "MapDataset",
    "PerSample",
    "Split",
    "Workload",
    "classification_error",
    "cross_entropy",
    "ghost_batch_norm",
    "load_workload",
    "materialised",
]


def load_workload(
    reference: str,
    parameters: Mapping[str, object] | None = None,
    *,
    base: Path | None = None,
) -> Workload:
    """The workload that ``reference`` names.

    Args:
        reference: a name of :data:`~shoal.workloads.study_registry.REGISTRY`, or the function that makes
            it: ``package.module:function`` or ``path/file.py:function``.
        parameters: keyword arguments of that function.
        base: what a relative path starts from; the working directory when None.

    Returns:
        A new workload; its data is read.

    Raises:
        UsageError: nothing of that name, arguments it does not take, or a result that is no workload.
    """
    given = dict(parameters or {})
    if ":" in reference:
        factory, preset = _users_factory(reference, base or Path.cwd()), {}
    elif reference in REGISTRY:
        factory, preset = registered_factory(reference)
    else:
        near = difflib.get_close_matches(reference, REGISTRY, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(REGISTRY))}"
        raise UsageError(
            f"workload = {reference!r}; {hint} Your own is given as package.module:function or "
            "file.py:function"
        )
    _check_arguments(reference, factory, {**preset, **given})
    with users_code(f"workload {reference!r}"):
        workload = factory(**{**preset, **given})
    if not isinstance(workload, Workload):
        raise UsageError(
            f"workload = {reference!r}, which returned {type(workload).__name__}; the function returns a "
            "shoal.study.Workload"
        )
    return workload


def _users_factory(reference: str, base: Path) -> Callable[..., object]:
    where, _, name = reference.rpartition(":")
    module = _file_module(base / where) if where.endswith(".py") else _module(reference, where)
    factory = getattr(module, name, None)
    if not callable(factory):
        have = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        near = difflib.get_close_matches(name, have, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(have) or 'no functions'}"
        raise UsageError(f"workload = {reference!r}; {where} has no function {name!r}; {hint}")
    return factory


def _module(reference: str, where: str) -> ModuleType:
    try:
        # An import that fails has its own line; whatever else the module raises is the user's.
        with users_code(f"workload {where!r}", but=ImportError):
            return importlib.import_module(where)
    except ImportError as error:
        raise UsageError(
            f"workload = {reference!r}; the module {where!r} cannot be imported ({error}); install it, "
            "set PYTHONPATH, or give file.py:function"
        ) from error


def _file_module(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise UsageError(
            f"workload = {path}; there is no such file; a relative path starts at the study's file"
        )
    # One module per file and process, under a name no package can have.
    name = f"shoal_workload_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with users_code(f"workload {path.name!r}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_arguments(
    reference: str, factory: Callable[..., object], given: Mapping[str, object]
) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(**given)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        raise UsageError(
            f"workload_parameters = {dict(given)}; {reference} takes {takes} ({error})"
        ) from error
