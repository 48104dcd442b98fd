"""Judgements on a run's configuration: batches, BatchNorm, scaling, versions. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.errors import UsageError
from shoal.fleet.batch_policy import idle_remedy, idle_workers
from shoal.fleet.findings import Check, ok, trap, warn
from shoal.fleet.machine import Machine
from shoal.fleet.outlook import outlook, policy_of, rule_of
from shoal.fleet.run_config import Config, part, whole

LEAST_NORM_SAMPLES = 8


def config_checks(config: Config, machine: Machine) -> list[Check]:
    """All judgements on ``run.json``; what cannot be read in it is a trap of its own."""
    found = version_checks(config, machine)
    for checks in (batch_checks, norm_checks, scaling_checks):
        try:
            found += checks(config)
        except UsageError as error:
            value, _, rest = str(error).partition("; ")
            rule, _, fix = rest.rpartition("; ")
            known = trap("configuration", value, rule, fix)
            found += [known] if known not in found else []
    return found


def version_checks(config: Config, machine: Machine) -> list[Check]:
    """Versions the run was made with against those installed here."""
    recorded = part(config, "versions")
    found: list[Check] = []
    for package in ("shoal", "torch", "torchft"):
        theirs, ours = recorded.get(package), machine.versions.get(package)
        if not isinstance(theirs, str) or ours is None:
            continue
        if theirs.partition("+")[0] != ours.partition("+")[0]:
            value = f"{theirs} in the run, {ours} here"
            rule = "one fleet runs one version, mixed ones fail without an error"
            fix = f"pip install {package}=={theirs.partition('+')[0]}"
            found.append(trap(f"{package} of the run", value, rule, fix))
    theirs = recorded.get("python")
    if isinstance(theirs, str) and theirs.split(".")[:2] != machine.python.split(".")[:2]:
        value = f"{theirs} in the run, {machine.python} here"
        rule = "workers of one fleet should run one Python"
        fix = f"use Python {'.'.join(theirs.split('.')[:2])}"
        found.append(warn("python of the run", value, rule, fix))
    return found


def batch_checks(config: Config) -> list[Check]:
    """Local, micro and global batch, accumulation and who has samples at all."""
    from shoal.data.shares import shares

    local_batch, workers = whole(config, "local_batch"), whole(config, "workers")
    micro_batch, samples = whole(config, "micro_batch"), whole(config, "samples")
    policy = policy_of(config)
    global_batch = policy.global_batch(local_batch, workers)
    found = [
        ok("batch policy", policy.name),
        ok("local batch", str(local_batch)),
        ok("global batch", f"{global_batch} with {workers} workers"),
    ]
    if micro_batch > local_batch:
        value = f"{micro_batch}, local batch = {local_batch}"
        rule = "a micro-batch is a part of a worker's local share"
        found.append(trap("micro batch", value, rule, f"micro_batch={local_batch} or smaller"))
    else:
        found.append(ok("micro batch", str(micro_batch)))
    dealt = shares(global_batch, micro_batch, workers)
    idle = idle_workers(global_batch, micro_batch, workers)
    if idle:
        value = f"{idle} of {workers} workers have none"
        rule = f"{global_batch} samples are {math.ceil(global_batch / micro_batch)} micro-batches"
        found.append(warn("samples per worker", value, rule, idle_remedy(global_batch, workers)))
    passes = max(len(pieces) for pieces in dealt)
    text = f"{passes} micro-batches a step" if passes > 1 else "none, one micro-batch a step"
    found.append(ok("accumulation", text))
    if global_batch > samples:
        value = f"{global_batch}, the training set has {samples}"
        rule = "a step never reaches over the end of an epoch"
        fix = "a smaller local_batch or fewer workers"
        found.append(warn("steps per epoch", value, rule, fix))
    return found


def norm_checks(config: Config) -> list[Check]:
    """Over how few samples BatchNorm normalises, and whether workers' statistics differ in weight."""
    from shoal.data.shares import shares

    layers = part(config, "model").get("batch_norm_layers")
    if not isinstance(layers, int) or layers == 0:
        return [ok("batch norm", "no layers")]
    mode = str(config.get("batch_norm", "worker"))
    workers, micro_batch = whole(config, "workers"), whole(config, "micro_batch")
    kind, _, digits = mode.partition(":")
    ghost = int(digits) if kind == "ghost" and digits.isdigit() else 0
    size = micro_batch * workers if kind == "sync" else min(micro_batch, ghost or micro_batch)
    value = f"{mode}, {layers} layers, {size} samples at a time"
    fix = 'a larger micro_batch, batch_norm="sync", or GroupNorm'
    found: list[Check] = []
    if size == 1:
        rule = "one sample has no variance: it is normalised by running statistics that never move"
        found.append(trap("batch norm", value, rule, fix))
    elif size < LEAST_NORM_SAMPLES:
        rule = f"below {LEAST_NORM_SAMPLES} samples the statistics are mostly noise"
        found.append(warn("batch norm", value, rule, fix))
    else:
        found.append(ok("batch norm", value))
    if ghost and (ghost > micro_batch or micro_batch % ghost):
        value = f"{ghost} in a micro-batch of {micro_batch}"
        rule = "where it does not divide, the last ghost batch is smaller and noisier"
        divisor = max(d for d in range(1, micro_batch + 1) if micro_batch % d == 0 and d <= ghost)
        better = f'batch_norm="ghost:{divisor}"' if divisor > 1 else "an even micro_batch"
        found.append(warn("ghost size", value, rule, better))
    global_batch = policy_of(config).global_batch(whole(config, "local_batch"), workers)
    dealt = [sum(map(len, own)) for own in shares(global_batch, micro_batch, workers)]
    if kind == "worker" and len(set(dealt)) > 1:
        value = f"{min(dealt)} to {max(dealt)} samples per worker"
        rule = (
            "each worker normalises by its own statistics, so its share decides how noisy they are"
        )
        fix = 'batch_norm="ghost:N" with N dividing the micro-batch, or "sync"'
        found.append(warn("unequal shares", value, rule, fix))
    return found


def scaling_checks(config: Config) -> list[Check]:
    """Whether the rule fits the optimizer and its tested range, now and with one worker +-1."""
    from shoal.scaling import RULES, check_range

    rule, policy = rule_of(config), policy_of(config)
    optimizer = part(config, "optimizer")
    kind = str(optimizer.get("kind"))
    found: list[Check] = []
    if kind in rule.optimizers or "any" in rule.optimizers:
        found.append(ok("scaling rule", f"{rule.name} for {kind}"))
    else:
        fitting = [r.__name__ for r in RULES.values() if {kind, "any"} & r.optimizers]
        found.append(
            trap(
                "scaling rule",
                f"{rule.name} for {kind}",
                f"it is meant for {', '.join(sorted(rule.optimizers))}",
                f"scaling={' or '.join(fitting)}, or another optimizer",
            )
        )
    found += _reference(config, rule.name, policy.name)
    if policy.name != "constant":
        seen = [(entry.workers, entry.global_batch) for entry in outlook(config)]
        for workers, global_batch in seen:
            text = check_range(rule, global_batch)
            if text:
                value, _, rest = text.partition("; ")
                rule_text, _, fix = rest.rpartition("; ")
                found.append(warn(f"range, {workers} workers", value, rule_text, fix))
    return found + _rates(config)


def _reference(config: Config, rule: str, policy: str) -> list[Check]:
    reference = part(config, "scaling").get("reference_batch")
    if rule == "unscaled":
        if policy == "constant":
            return []
        value = f"unscaled under batch policy {policy}"
        text = "the global batch follows the workers and the learning rate does not"
        fix = "scaling=shoal.scaling.Dynamic(reference_batch=...), or a constant batch"
        return [warn("reference batch", value, text, fix)]
    if not isinstance(reference, int):
        text = "the learning rate was tuned at some global batch, which the rule starts from"
        return [warn("reference batch", "missing", text, "pass reference_batch= to the rule")]
    return [ok("reference batch", str(reference))]


def _rates(config: Config) -> list[Check]:
    rates: Mapping[str, object] = {key: config.get(key) for key in ("lr", "lr_target")}
    for key, value in rates.items():
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
            text = "a learning rate is a finite number of at least 0"
            return [
                trap(key.replace("_", " "), str(value), text, "look at the schedule and base lr")
            ]
    return []
