"""What a run is made of, in plain values: for ``run.json``, the doctor and the report."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shoal import __version__
from shoal.fleet.plan import Batching
from shoal.fleet.state import Progress
from shoal.fleet.step import Committed, Stepper
from shoal.scaling.contract import Rule, optimizer_kind
from shoal.scaling.learning_rate import LearningRate
from shoal.scaling.schedules import Schedule


def learning_rate(
    rule: Rule[Any], schedule: Schedule, total_samples: int | None
) -> LearningRate[Any]:
    """Rule and schedule together, the schedule as long as the run unless it says otherwise.

    Raises:
        UsageError: the schedule needs a length and the loop does not use ``fleet.epochs``.
    """
    resolved = schedule if total_samples is None else schedule.resolve(total_samples)
    resolved(0.0)
    return LearningRate(rule=rule, schedule=resolved)


def installed(package: str) -> str | None:
    """Version of an installed package, None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe(
    stepper: Stepper,
    cut: Batching,
    last: Committed,
    progress: Progress,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The configuration and present standing of a run as a JSON-able dict."""
    group = stepper.optimizer.param_groups[0]
    rule: Any = stepper.rule
    hyper = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    state = stepper.rule_state
    return {
        "model": {
            "name": type(stepper.model).__name__,
            "parameters": sum(p.numel() for p in stepper.model.parameters()),
            "batch_norm_layers": len(stepper.norm.layers),
        },
        "optimizer": {
            "kind": optimizer_kind(stepper.optimizer),
            "lr": list(stepper.base_lrs),
            "momentum": group.get("momentum", 0.0),
            "weight_decay": group.get("weight_decay", 0.0),
        },
        "scaling": {
            **hyper,
            "name": rule.name,
            "reference_batch": rule.reference_batch,
            "state": None if state is None else rule.to_dict(state),
        },
        "batch_policy": {"name": cut.policy.name, "samples": getattr(cut.policy, "samples", None)},
        "local_batch": cut.local_batch,
        "micro_batch": cut.micro_batch,
        "global_batch": last.plan.nominal,
        "workers": last.plan.membership.workers,
        "samples": cut.samples,
        "seed": progress.seed,
        "step": progress.step,
        "samples_seen": progress.cursor,
        "lr": last.lr,
        "lr_target": last.lr_target,
        "multiplier": last.multiplier,
        "versions": {
            "python": platform.python_version(),
            "shoal": __version__,
            "torch": installed("torch"),
            "torchft": installed("torchft"),
        },
        **settings,
    }
