"""``shoal.init``: check every setting, choose the world, put the fleet together."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.errors import ShoalError, UsageError
from shoal.fleet.arguments import check_init, check_rule
from shoal.fleet.batch_policy import BatchPolicy
from shoal.fleet.batch_policy import batch_policy as _policy
from shoal.fleet.checkpoint import Checkpoints
from shoal.fleet.fleet import Fleet
from shoal.fleet.norm import install_norm
from shoal.fleet.precision import check_precision, install_autocast
from shoal.fleet.record import Recorder
from shoal.fleet.replica import Replica
from shoal.fleet.state import Evaluation, Progress
from shoal.fleet.step import Stepper
from shoal.fleet.sync_norm import SyncStatistics
from shoal.fleet.warm_up import warm_up
from shoal.scaling import Rule, Schedule, Unscaled, check_optimizer, schedules
from shoal.sync import AllReduce
from shoal.world.alone import AloneWorld
from shoal.world.contract import World
from shoal.world.virtual import VirtualWorld


def init(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scaling: Rule[Any] | None = None,
    sync: AllReduce | None = None,
    schedule: Schedule | None = None,
    batch_policy: BatchPolicy | str = "proportional",
    precision: str = "fp32",
    device: str | torch.device = "auto",
    batch_norm: str = "worker",
    deterministic: bool = False,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool | None = None,
    checkpoint_seconds: float | None = None,
    world: World | None = None,
    **unknown: Any,
) -> Fleet:
    """Make this process a worker of a fleet: alone by itself, or of the run that ``shoal run`` started.

    Args:
        model: the replica; moved to ``device``. Its BatchNorm layers take the fleet's forward. Other
            persistent buffers are kept equal: a step that changes one on any worker makes all of them
            take over rank 0's (see :mod:`shoal.fleet.buffers`).
        optimizer: one torch optimizer over the model's parameters; its lr is the base learning rate,
            tuned at the scaling rule's reference batch.
        scaling: how the learning rate follows the global batch; default ``Unscaled()``.
        sync: how replicas exchange; default ``AllReduce()``.
        schedule: a factor in [0, 1] over samples; default constant 1. Its length is that of the run
            (``fleet.epochs``) unless given.
        batch_policy: ``"proportional"``, ``"constant:N"``, ``"capped:N"``, or an object.
        precision: ``"fp32"``, or ``"bf16"`` for autocast.
        device: ``"auto"`` is the CUDA device LOCAL_RANK (0 without it) if there is one, else the CPU.
        batch_norm: ``"worker"``, ``"ghost:N"`` or ``"sync"``.
        deterministic: sum gradients exactly, so that with a constant global batch the weights are the
            same bits for any number of workers. Costs four times the bytes.
        seed: key of the data order and of everything random that depends on a sample.
        run_dir: where metrics, events and checkpoints go; default that of ``shoal run``, else nowhere.
        resume: go on from ``run_dir``'s newest checkpoint; default what ``shoal run`` says, else False.
        checkpoint_seconds: least time between checkpoints, > 0; default 60.
        world: who is there; chosen from the environment by default.

    Returns:
        The fleet.

    Raises:
        UsageError: a setting that cannot be used, with the fix; nothing has been written.

    Example:
        >>> import torch, shoal
        >>> model = torch.nn.Linear(2, 1)
        >>> fleet = shoal.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> x, y = torch.ones(8, 2), torch.zeros(8, 1)
        >>> for epoch in fleet.epochs(2):
        ...     for a, b in fleet.batches((x, y), local_batch=4):
        ...         fleet.backward(torch.nn.functional.mse_loss(model(a), b))
        ...         done = fleet.step()
        >>> fleet.samples_seen
        16
    """
    _install_hook()
    check_init(model, optimizer, unknown)
    rule: Rule[Any] = check_rule(scaling if scaling is not None else Unscaled())
    check_optimizer(rule, optimizer)
    if sync is not None and not isinstance(sync, AllReduce):
        raise UsageError(
            f"sync = {type(sync).__name__}; this version exchanges by shoal.sync.AllReduce(); pass that"
        )
    policy = _policy(batch_policy)
    check_precision(precision)
    every = _positive("checkpoint_seconds", checkpoint_seconds, "SHOAL_CHECKPOINT_SECONDS", 60.0)
    on = _device(device)
    chosen = world if world is not None else _world(on)
    directory = run_dir or os.environ.get("SHOAL_RUN_DIR")
    checkpoints = None
    if directory is not None:
        checkpoints = Checkpoints(Path(directory) / "checkpoints", every_seconds=every)
        _check_resume(checkpoints, Path(directory), resume)
    norm_sync = _sync_norm(batch_norm, chosen)
    model.to(on)
    install_norm(model, batch_norm, norm_sync)
    install_autocast(model, precision, on.type)
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    progress, evaluation = Progress(seed=seed), Evaluation()
    stepper = Stepper(
        model,
        optimizer,
        world=chosen,
        rule=rule,
        progress=progress,
        sync=sync or AllReduce(),
        deterministic=deterministic,
        norm_sync=norm_sync,
    )
    replica = Replica(stepper, progress=progress, evaluation=evaluation, checkpoints=checkpoints)
    replica.settings = {
        "batch_policy": repr(policy),
        "batch_norm": batch_norm,
        "precision": precision,
        "deterministic": deterministic,
        "bucket_bytes": (sync or AllReduce()).bucket_bytes,
        "trained_parameters": [name for name, p in model.named_parameters() if p.requires_grad],
    }
    chosen.attach(replica)
    recorder = Recorder(
        chosen,
        name=os.environ.get("SHOAL_WORKER", f"w{os.environ.get('RANK', '0')}"),
        run_dir=None if directory is None else Path(directory),
        # Under torchrun there is no supervisor and several processes: the first one writes the events.
        owns_events="SHOAL_CONTROL" not in os.environ and os.environ.get("RANK", "0") == "0",
    )
    return Fleet(
        replica,
        chosen,
        recorder=recorder,
        checkpoints=checkpoints,
        policy=policy,
        schedule=schedule if schedule is not None else schedules.constant(),
        settings={
            "precision": precision,
            "device": str(on),
            "batch_norm": batch_norm,
            "deterministic": deterministic,
            "schedule": repr(schedule),
        },
        device=on,
    )


def _positive(name: str, value: float | None, variable: str, default: float) -> float:
    if value is not None:
        if not value > 0:
            raise UsageError(f"{name} = {value}; it is a time in seconds > 0")
        return value
    told = os.environ.get(variable)
    if told is None:
        return default
    try:
        value = float(told)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UsageError(
            f"{variable} = {told!r}; it is a time in seconds > 0; set it to a number, or unset it"
        )
    return value


def _device(device: str | torch.device) -> torch.device:
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _world(device: torch.device) -> World:
    """The world this process was started into."""
    if "SHOAL_CONTROL" in os.environ:
        return _join_fleet(device)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from shoal.world.fixed import FixedWorld

        return FixedWorld.from_environment(device)
    return AloneWorld()


def _join_fleet(device: torch.device) -> World:
    """The elastic world of the run that ``shoal run`` started this process for."""
    from shoal.world.elastic.link import connect
    from shoal.world.elastic.timing import Timing
    from shoal.world.elastic.world import ElasticWorld

    link = connect()
    if threading.current_thread() is threading.main_thread():
        link.leave_on_signals()
    warm_up(device)
    return ElasticWorld(
        link,
        timing=Timing(patience_seconds=link.patience_seconds),
        device=str(device),
        min_workers=link.min_workers,
    )


def _check_resume(checkpoints: Checkpoints, directory: Path, resume: bool | None) -> None:
    if "SHOAL_CONTROL" in os.environ:
        return
    if resume is None:
        resume = os.environ.get("SHOAL_RESUME") == "1"
    if not resume and checkpoints.newest_step() >= 0:
        raise UsageError(
            f"run_dir = {directory}; it holds checkpoints of an earlier run; pass resume=True to go on from "
            "them, or choose another directory"
        )


def _sync_norm(batch_norm: str, world: World) -> SyncStatistics | None:
    if batch_norm != "sync":
        return None
    if isinstance(world, VirtualWorld):
        raise UsageError(
            'batch_norm = "sync" in a virtual world; its workers compute one after the other, so there is '
            'nothing to synchronise with; use "worker" or "ghost:N"'
        )
    return SyncStatistics(world)


_previous_hook = sys.excepthook


def _install_hook() -> None:
    """A user's mistake that nobody caught ends the process with one line and its exit status."""
    if sys.excepthook is not _hook and threading.current_thread() is threading.main_thread():
        global _previous_hook
        _previous_hook = sys.excepthook
        sys.excepthook = _hook


def _hook(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    if not isinstance(error, ShoalError):
        _previous_hook(kind, error, trace)
        return
    print(f"shoal: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # The interpreter would exit with 1 whatever the hook does; run what atexit holds, then leave.
    atexit._run_exitfuncs()
    os._exit(error.exit_code)
