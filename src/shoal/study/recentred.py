"""A study's next version, with the spaces moved where its optima lay at a boundary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from shoal.errors import UsageError
from shoal.study.analysis import StudyAnalysis
from shoal.study.edges import Proposal, recenter
from shoal.study.spec import StudySpec


def proposals(
    spec: StudySpec, analysis: StudyAnalysis, *, how: Literal["move", "widen"] = "move"
) -> list[Proposal]:
    """One proposal per curve and batch whose best settings lie at a boundary or a stability limit.

    Args:
        spec: the study.
        analysis: of it; its first goal decides.
        how: see :func:`~shoal.study.edges.recenter`.
    """
    found: list[Proposal] = []
    for (curve, batch), edges in analysis.main.edges.items():
        proposal = recenter((curve, batch), spec.curves[curve].space_at(batch), edges, how=how)
        if proposal.changes or proposal.kept:
            found.append(proposal)
    return found


def recentred(spec: StudySpec, found: list[Proposal], *, name: str) -> StudySpec:
    """The study to run next: the same but for its name and the changed spaces. Old data stay as they are.

    Args:
        spec: the study.
        found: of :func:`proposals`.
        name: of the next version.

    Raises:
        UsageError: nothing is to be changed, or the name is the old one.
    """
    changed = [proposal for proposal in found if proposal.changes]
    if not changed:
        raise UsageError(
            "recenter = nothing to change; no optimum lies at a boundary that a wider range would move"
        )
    if name == spec.name:
        raise UsageError(
            f"name = {name!r}, which is the old study's; give the new version another one"
        )
    curves = dict(spec.curves)
    for proposal in changed:
        curve = curves[proposal.curve]
        spaces = {**curve.spaces, proposal.global_batch: proposal.space}
        curves[proposal.curve] = replace(curve, spaces=spaces)
    return replace(spec, name=name, curves=curves)


def as_toml(spec: StudySpec) -> str:
    """The spec as a TOML file that :func:`~shoal.study.load_spec` reads.

    Raises:
        UsageError: its workload is not given by name.
    """
    if not isinstance(spec.workload, str):
        raise UsageError(
            "workload = made in Python; only one given by name can be written to a file"
        )
    facts = {
        k: v for k, v in spec.canonical().items() if k not in ("format", "workload_fingerprint")
    }
    curves = facts.pop("curves")
    assert isinstance(curves, Mapping)
    if not facts["workload_parameters"]:
        del facts["workload_parameters"]
    lines = [f"{key} = {_value(value)}" for key, value in facts.items()]
    for curve, entry in curves.items():
        lines += ["", f"[curves.{curve}]"]
        lines += [f"{key} = {_value(value)}" for key, value in entry.items() if value]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """JSON's numbers, texts and lists are TOML's; tables go inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    return json.dumps(value)


def _key(name: object) -> str:
    return json.dumps(str(name))
