"""The learning rate a run has now, and what it would become with one worker more or fewer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from shoal.errors import UsageError
from shoal.fleet.batch_policy import BatchPolicy, Capped, Constant, Proportional
from shoal.fleet.run_config import Config, part, whole
from shoal.scaling import RULES, At, by_name


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """One possible membership.

    Args:
        workers: number of workers.
        global_batch: samples per step with them.
        lr: learning rate of the first step with them.
        lr_target: learning rate once the rule's ramp has ended.
        ramp_end_step: first step at the target; None without a ramp.
    """

    workers: int
    global_batch: int
    lr: float
    lr_target: float
    ramp_end_step: int | None


def outlook(config: Config) -> list[Outlook]:
    """The present membership between those with one worker fewer and one more.

    The run's own rule is asked, from its recorded state; the schedule's factor is taken as it is
    now.

    Args:
        config: ``run.json``.

    Raises:
        UsageError: the configuration lacks what the rule needs, or names no rule of this version.
    """
    rule, policy = rule_of(config), policy_of(config)
    workers, local_batch = whole(config, "workers"), whole(config, "local_batch")
    optimizer = part(config, "optimizer")
    rates = optimizer.get("lr")
    base = rates[0] if isinstance(rates, list) and rates else None
    if not isinstance(base, (int, float)):
        raise UsageError("run.json, optimizer.lr: a list of base learning rates is missing there")
    momentum = optimizer.get("momentum")

    def at(global_batch: int) -> At:
        return At(
            step=whole(config, "step", least=0),
            samples=whole(config, "samples_seen", least=0),
            global_batch=global_batch,
            momentum=float(momentum) if isinstance(momentum, (int, float)) else 0.0,
            epoch_samples=whole(config, "samples"),
        )

    now = at(policy.global_batch(local_batch, workers))
    recorded = part(config, "scaling").get("state")
    state = rule.from_dict(recorded) if isinstance(recorded, Mapping) else rule.init(now)
    factor = _schedule_factor(config, float(base), rule.multiplier(rule.advance(state, now), now))
    found: list[Outlook] = []
    for count in (workers - 1, workers, workers + 1):
        if count < 1:
            continue
        moment = at(policy.global_batch(local_batch, count))
        changed = rule.advance(state, moment)
        found.append(
            Outlook(
                workers=count,
                global_batch=moment.global_batch,
                lr=float(base) * factor * rule.multiplier(changed, moment),
                lr_target=float(base) * factor * rule.target(changed, moment),
                ramp_end_step=rule.ramp_end(changed, moment),
            )
        )
    return found


def _schedule_factor(config: Config, base: float, multiplier: float) -> float:
    """The schedule's factor at the recorded step: what remains of the learning rate recorded."""
    lr, recorded = config.get("lr"), config.get("multiplier")
    if not isinstance(lr, (int, float)) or not base:
        return 1.0
    used = float(recorded) if isinstance(recorded, (int, float)) and recorded else multiplier
    factor = lr / (base * used)
    return factor if math.isfinite(factor) else 1.0


# The type of a rule's state depends on its name.
def rule_of(config: Config) -> Any:
    """The run's scaling rule.

    Raises:
        UsageError: no such rule in this version, or a setting it refuses.
    """
    scaling = part(config, "scaling")
    name = str(scaling.get("name"))
    known = {field.name for field in dataclasses.fields(RULES[name])} if name in RULES else set()
    settings = {key: value for key, value in scaling.items() if key in known}
    return by_name(name, **cast(dict[str, Any], settings))


def policy_of(config: Config) -> BatchPolicy:
    """The run's batch policy.

    Raises:
        UsageError: no such policy in this version, or its number of samples is missing.
    """
    policy = part(config, "batch_policy")
    name = policy.get("name")
    if name == "proportional":
        return Proportional()
    samples = next((policy[k] for k in ("samples", "cap", "global_batch") if policy.get(k)), None)
    if name in ("constant", "capped") and isinstance(samples, int):
        return Constant(samples) if name == "constant" else Capped(samples)
    raise UsageError(
        f"run.json, batch_policy = {dict(policy)}; known are proportional, constant and capped, the "
        "latter two with samples; was this run made by another version of shoal?"
    )
