"""What one step and one evaluation cost on this machine, measured before a study runs.

Seconds are the processor's, with one thread: what a runner takes on a core of its own, whatever else
this machine is doing now.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from shoal.errors import UsageError
from shoal.study.design import draws
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.task import Task
from shoal.study.records import SearchKey
from shoal.study.spec import StudySpec
from shoal.study.workload import Workload

PROBE_SECONDS = 0.05
_BLOCK = 1000


@dataclass(frozen=True, kw_only=True)
class InitialError:
    """A metric on the validation data before any training.

    Args:
        mean: over the samples, of each initial model that was tried.
        is_zero_one: whether every sample's value is 0 or 1, so that the mean is a share of errors.
    """

    mean: tuple[float, ...]
    is_zero_one: bool


def step_seconds(
    spec: StudySpec, curve: str, global_batch: int, *, seconds: float = PROBE_SECONDS
) -> float:
    """Seconds of one step of the plain loop.

    Args:
        spec: the study; its workload is read.
        curve: one of its curves.
        global_batch: one of its batch sizes.
        seconds: to measure for, at least one step after a first one that does not count.

    Raises:
        UsageError: a step of this workload cannot be made; the text has its error.
    """
    key = SearchKey(curve=curve, global_batch=global_batch, repeat=0)
    engine = PoolEngine(
        Task(workload=spec.resolved, curve=spec.curves[curve], global_batch=global_batch)
    )
    # The corner with the smallest learning rate: one that diverges would time denormals and NaN.
    space = spec.curves[curve].space_at(global_batch)
    parameters = spec.curves[curve].parameters(global_batch, (0.0,) * len(space))
    trial = replace(draws(spec, key, 0, 1)[0], parameters=parameters)
    try:
        with _one_thread():
            engine.admit(trial)
            engine.advance({trial.id: 1})
            done, share, start = 1, 1, time.process_time()
            while (taken := time.process_time() - start) < seconds or done == 1:
                engine.advance({trial.id: done + share})
                done, share = done + share, 2 * share
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"workload = {spec.resolved.name}; a training step at global_batch = {global_batch} failed "
            f"({reason}); the plain loop calls loss(model(x), y).mean().backward(); correct the workload"
        ) from error
    return taken / (done - 1)


def evaluation_seconds(workload: Workload) -> float:
    """Seconds of one whole pass over the validation data, without early exit."""
    model = workload.build(0).eval()
    name = next(iter(workload.metrics))
    with _one_thread():
        start = time.process_time()
        _values(workload, model, name)
        return time.process_time() - start


def initial_error(workload: Workload, metric: str, *, seeds: int = 3) -> InitialError:
    """``metric`` of untrained models on validation data.

    Args:
        workload: what to measure.
        metric: one of its metrics, without the split.
        seeds: how many initial models to try.
    """
    every = [_values(workload, workload.build(seed).eval(), metric) for seed in range(seeds)]
    joined = torch.cat(every)
    return InitialError(
        mean=tuple(float(values.mean()) for values in every),
        is_zero_one=bool(((joined == 0) | (joined == 1)).all()),
    )


@contextmanager
def _one_thread() -> Generator[None, None, None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _values(workload: Workload, model: torch.nn.Module, metric: str) -> torch.Tensor:
    blocks = zip(*(part.split(_BLOCK) for part in workload.split("val")), strict=True)
    measure = workload.metrics[metric]
    return torch.cat([measure(model(x), y).double() for x, y in blocks])
