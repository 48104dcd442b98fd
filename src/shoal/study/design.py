"""Which trials a search consists of: quasi-random points, seeds and addresses, all pure functions.

The points of a search are one scrambled low-discrepancy sequence. Point i does not depend on how many
are drawn, so a search can ask for more, and a study can grow; another repeat, batch size or curve has a
scramble of its own, so nothing is transferred between batch sizes.

Source: quasi-random search after Bousquet et al. 2017, independent for every batch size, as in Shallue
et al. 2019; scrambling after Owen 2017 (Halton) and Matousek 1998 (Sobol), as SciPy implements them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.study.records import CONFIRM, SearchKey, Trial
from shoal.study.spec import FORMAT, StudySpec, canonical_json

_SEEDS = 2**63


def draws(spec: StudySpec, key: SearchKey, start: int, stop: int) -> list[Trial]:
    """Trials ``start ... stop - 1`` of a search, in the order in which they are drawn.

    Args:
        spec: the study.
        key: one of its searches.
        start: first trial id, >= 0.
        stop: one past the last.

    Returns:
        Equal trials in every process; trial i is the same whatever ``start`` and ``stop`` are.

    Raises:
        UsageError: ``key`` names no curve of the study; SciPy is not installed.
        ValueError: not 0 <= start <= stop.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"start = {start}, stop = {stop}; draws are counted from 0, start <= stop")
    curve = spec.curves.get(key.curve)
    if curve is None:
        raise UsageError(
            f"curve = {key.curve!r}; the study {spec.name} has {', '.join(spec.curves)}"
        )
    space = curve.space_at(key.global_batch)
    points = unit_points(spec.sampler, len(space), search_seed(spec, key), start, stop)
    trials: list[Trial] = []
    for number, row in enumerate(points, start):
        unit = tuple(float(u) for u in row)
        parameters = curve.parameters(key.global_batch, unit)
        seed = trial_seed(spec, key, number)
        trials.append(
            Trial(
                search=key,
                id=number,
                unit=unit,
                parameters=parameters,
                seed=seed,
                address=address(spec, key, parameters, seed),
            )
        )
    return trials


def confirmations(spec: StudySpec, winner: Trial, start: int, stop: int) -> list[Trial]:
    """The winning setting again, with fresh seeds ``start ... stop - 1``.

    Args:
        spec: the study.
        winner: a trial of it; its parameters are taken over, its seed is not.
        start: first, >= 0.
        stop: one past the last.

    Returns:
        Trials of the winner's search with ``CONFIRM`` in place of the repeat.
    """
    key = SearchKey(
        curve=winner.search.curve, global_batch=winner.search.global_batch, repeat=CONFIRM
    )
    trials: list[Trial] = []
    for number in range(start, stop):
        seed = trial_seed(spec, key, number)
        trials.append(
            Trial(
                search=key,
                id=number,
                unit=winner.unit,
                parameters=winner.parameters,
                seed=seed,
                address=address(spec, key, winner.parameters, seed),
            )
        )
    return trials


def unit_points(
    sampler: str, dimensions: int, seed: int, start: int, stop: int
) -> NDArray[np.float64]:
    """Points ``start ... stop - 1`` of a scrambled sequence in the unit cube.

    Args:
        sampler: ``"halton"`` or ``"sobol"``.
        dimensions: >= 1.
        seed: of the scramble, >= 0.
        start: first point, >= 0.
        stop: one past the last.

    Returns:
        Shape (stop - start, dimensions), in [0, 1).

    Raises:
        UsageError: SciPy is not installed.
    """
    try:
        from scipy.stats import qmc
    except ImportError as error:
        raise UsageError(
            "a study draws its trials with SciPy, which is not installed; pip install 'shoal[study]'"
        ) from error
    generator = np.random.default_rng(seed)
    if sampler == "sobol":
        # Sobol points are balanced, and drawn without a warning, in powers of two.
        engine = qmc.Sobol(dimensions, rng=generator)
        points = engine.random_base2(max(0, stop - 1).bit_length())[start:stop]
    else:
        points = qmc.Halton(dimensions, rng=generator).random(stop)[start:stop]
    return np.minimum(points, 1 - 2.0**-53)


def search_seed(spec: StudySpec, key: SearchKey) -> int:
    """The seed of a search's scramble: a hash of study seed, curve, optimizer, repeat and batch.

    The curve's name is in it so that two curves of one optimizer (two schedules, say) are drawn
    independently and their comparison may treat them so.
    """
    return _hashed("scramble", *_search_facts(spec, key))


def trial_seed(spec: StudySpec, key: SearchKey, trial: int) -> int:
    """The seed of a trial's weights and data order, in [0, 2**63)."""
    return _hashed("trial", *_search_facts(spec, key), trial)


def address(spec: StudySpec, key: SearchKey, parameters: Mapping[str, float], seed: int) -> str:
    """SHA-256 of everything that decides a trial's curve, in hexadecimal.

    Two trials of one address measure the same thing, in whatever study they stand. What only decides how
    far a trial is trained (budget, goals, repeats) is not in it, nor which engine trains it.
    """
    curve = spec.curves[key.curve]
    facts = {
        "format": FORMAT,
        "workload": spec.fingerprint,
        "workload_parameters": dict(sorted(spec.workload_parameters.items())),
        "optimizer": curve.optimizer,
        "schedule": curve.schedule,
        "global_batch": key.global_batch,
        "parameters": {name: float(parameters[name]) for name in sorted(parameters)},
        "seed": seed,
        "grid": {"ratio": float(spec.grid.ratio), "stride": spec.grid.stride},
    }
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()


def _search_facts(spec: StudySpec, key: SearchKey) -> tuple[object, ...]:
    return spec.seed, key.curve, spec.curves[key.curve].optimizer, key.repeat, key.global_batch


def _hashed(*facts: object) -> int:
    digest = hashlib.sha256(canonical_json(["shoal", FORMAT, *facts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SEEDS
