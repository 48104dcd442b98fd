"""Made-up training curves whose steps to a goal are known, so that a whole study can be checked.

A trial with effective learning rate ``r = lr / (1 - momentum)`` at global batch B crosses the goal, but
for noise, exactly at

    T = S(B) (1 + (ln(r / r*(B)) / width)^2)        S(B) = S_min + E_min / B

where ``r*(B) = min(rate B, largest_rate)`` is the best one: linear in B, then capped. Its validation error
falls as ``e(t) = e_inf + (goal - e_inf) q^(1 - t / T)``, q such that e(0) is the error at the start, times
log-normal noise of the evaluation. A trial above the stability limit diverges within a few steps. So
perfect scaling, plateau, optimum, edge, tie, censoring and divergence can be planted, and what a study
finds can be held against them: the noisy quadratic has no evaluation noise, this has.

:class:`SyntheticWorkshop` stands in for engines and evaluation in a real study directory. Its state is a
hash chain over the steps done, which the evaluator checks: a step lost, repeated or taken from another
trial is an error, not a slightly different number.

Source: section 4.5 of the project's notes on Shallue et al. 2019 (planted truth for a synthetic set); all
of it is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from shoal.study.engines.contract import Engine, SavedTrial
from shoal.study.evaluation import SampleOutcomes
from shoal.study.records import Curve, Evaluation, Measured, SearchKey, Trial
from shoal.study.search_run import Measuring
from shoal.workloads.study_workload import Workload, classification_error, cross_entropy

_MODULUS = 2**61 - 1
_LUCK = -1
"""In place of a step: the random number that belongs to the trial as a whole."""
_FACTOR = 437_799_614_237_992_725 % _MODULUS


@dataclass(frozen=True, kw_only=True)
class SyntheticCurves:
    """What every trial of a made-up study would measure.

    Args:
        smallest_steps: S_min, the plateau, > 0.
        fewest_samples: E_min, > 0; the critical batch is ``E_min / S_min``.
        goal: validation error at which S is planted, in (``end_error``, ``start_error``).
        start_error: error before training, < 1.
        end_error: error that training tends to.
        rate: best effective learning rate per sample of the batch, while it scales linearly.
        largest_rate: its cap.
        width: how far off, in e-folds, doubles the steps; infinite makes all trials of a batch tie.
        stable_lr: trials with ``lr > stable_lr (1 + momentum)`` diverge.
        noise: standard deviation of the log of an evaluation.
        luck: standard deviation of the log of a trial's T, by its seed.
        hopeless: global batches at which no trial comes below twice the goal.

    Raises:
        ValueError: a number outside its range.
    """

    smallest_steps: float = 100.0
    fewest_samples: float = 3200.0
    goal: float = 0.1
    start_error: float = 0.9
    end_error: float = 0.02
    rate: float = 0.02
    largest_rate: float = 1.0
    width: float = 0.8
    stable_lr: float = 4.0
    noise: float = 0.0
    luck: float = 0.0
    hopeless: frozenset[int] = field(default_factory=frozenset[int])

    def __post_init__(self) -> None:
        positive = (
            "smallest_steps",
            "fewest_samples",
            "rate",
            "largest_rate",
            "width",
            "stable_lr",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}; it is positive; correct it")
        if not 0 <= self.end_error < self.goal < self.start_error < 1:
            raise ValueError(
                f"end_error, goal, start_error = {self.end_error}, {self.goal}, {self.start_error}; they "
                "rise, from 0 to below 1; correct them"
            )
        if self.noise < 0 or self.luck < 0:
            raise ValueError(
                f"noise, luck = {self.noise}, {self.luck}; standard deviations, at least 0"
            )

    @property
    def critical_batch(self) -> float:
        """``E_min / S_min``."""
        return self.fewest_samples / self.smallest_steps

    def steps(self, global_batch: int) -> float:
        """S(B) of the best setting without noise."""
        return self.smallest_steps + self.fewest_samples / global_batch

    def best_rate(self, global_batch: int) -> float:
        """r*(B)."""
        return min(self.rate * global_batch, self.largest_rate)

    def crossing(self, trial: Trial) -> float:
        """T of one trial: where it meets the goal without evaluation noise; infinite if it cannot."""
        if trial.search.global_batch in self.hopeless or self.diverges_at(trial) is not None:
            return math.inf
        batch = trial.search.global_batch
        off = math.log(_effective(trial) / self.best_rate(batch)) / self.width
        luck = math.exp(self.luck * float(_normals(trial.seed, _LUCK)[0])) if self.luck else 1.0
        return self.steps(batch) * (1 + off**2) * luck

    def diverges_at(self, trial: Trial) -> int | None:
        """The step by which an unstable trial's loss is infinite; None for a stable one."""
        limit = self.stable_lr * (1 + trial.parameters.get("momentum", 0.0))
        if trial.parameters["lr"] <= limit:
            return None
        # The farther beyond the limit, the sooner.
        return 1 + round(8 / math.log1p(trial.parameters["lr"] / limit))

    def evaluation(self, trial: Trial, step: int) -> Evaluation:
        """What is measured of ``trial`` after ``step`` steps; a pure function of both."""
        bad = self.diverges_at(trial)
        if bad is not None and step >= bad:
            lost = Measured(math.inf if trial.seed % 2 else math.nan)
            names = ("train/cross_entropy_error", *_names("val"), *_names("test"))
            return Evaluation(step=step, metrics=dict.fromkeys(names, lost), diverged=True)
        error = self._error(trial, step)
        noise = _normals(trial.seed, step) if self.noise else np.zeros(3)
        metrics: dict[str, Measured] = {}
        for split, near, draw in (("train", 0.8, 2), ("val", 1.0, 0), ("test", 1.05, 1)):
            value = min(near * error * math.exp(self.noise * float(noise[draw])), 1.0)
            metrics[f"{split}/classification_error"] = Measured(value)
            # Any rising map of the error does; this one is about ln 10 where nothing is learned.
            metrics[f"{split}/cross_entropy_error"] = Measured(2.5 * value)
        return Evaluation(step=step, metrics=metrics)

    def curve(self, trial: Trial, steps: Sequence[int]) -> Curve:
        """The trial's curve at rising grid points, which ends where it diverges."""
        curve = Curve()
        for step in steps:
            curve.evaluations.append(self.evaluation(trial, step))
            if curve.evaluations[-1].diverged:
                break
        return curve

    def workload(self, train_samples: int = 4096) -> Workload:
        """A workload for the spec of such a study: it says what is measured and is never trained."""
        x = torch.zeros(train_samples, 1)
        y = torch.zeros(train_samples, dtype=torch.int64)
        return Workload(
            name=f"synthetic_curves {self}",
            model=lambda: nn.Linear(1, 2),
            loss=cross_entropy,
            train=(x, y),
            val=(x[:8], y[:8]),
            test=(x[:8], y[:8]),
            metrics={
                "classification_error": classification_error,
                "cross_entropy_error": cross_entropy,
            },
        )

    def _error(self, trial: Trial, step: int) -> float:
        crossing = self.crossing(trial)
        if math.isinf(crossing):
            floor = 2 * self.goal
            return floor + (self.start_error - floor) * 2 ** (-step / 100)
        if step == crossing:
            # Exactly the goal, not a rounding beside it: a tie that must not count.
            return self.goal
        ratio = (self.start_error - self.end_error) / (self.goal - self.end_error)
        return self.end_error + (self.goal - self.end_error) * ratio ** (1 - step / crossing)


class SyntheticEngine:
    """An engine whose trials carry a hash chain over their steps; as :class:`Engine`."""

    name = "synthetic"

    def __init__(self) -> None:
        self._held: dict[int, tuple[Trial, int, int]] = {}

    def admit(self, trial: Trial, saved: SavedTrial | None = None) -> None:
        """Take a trial in, at step 0 or where ``saved`` left it."""
        if trial.id in self._held:
            raise ValueError(f"trial {trial.id} is in already; release it first")
        if saved is None:
            self._held[trial.id] = (trial, 0, chained(trial.seed, 0))
        else:
            self._held[trial.id] = (trial, saved.step, int(saved.tensors["p/chain"]))

    def advance(self, targets: Mapping[int, int]) -> None:
        """Do the steps up to each target."""
        for number, target in targets.items():
            trial, step, chain = self._held[number]
            if target > step:
                self._held[number] = (trial, target, _ahead(chain, trial.seed, target - step))

    def portions(self, trials: Sequence[int]) -> Sequence[Sequence[int]]:
        """Two at a time, so that rounds have several portions."""
        return [list(trials[start : start + 2]) for start in range(0, len(trials), 2)]

    def outputs(self, trials: Sequence[int], inputs: Tensor) -> Tensor | None:
        """None: there is no model."""
        return None

    def step(self, trial: int) -> int:
        """Steps done."""
        return self._held[trial][1]

    def losses(self, trial: int) -> tuple[float, float]:
        """A constant: divergence is the evaluator's to plant."""
        return (1.0, 1.0) if self._held[trial][1] else (math.nan, math.nan)

    def weights(self, trial: int) -> Mapping[str, Tensor]:
        """The chain, and the identity of the trial that it belongs to."""
        held, _, chain = self._held[trial]
        return {"chain": torch.tensor(chain), "seed": torch.tensor(held.seed)}

    def save(self, trial: int) -> SavedTrial:
        """A copy of everything."""
        first, recent = self.losses(trial)
        return SavedTrial(
            step=self.step(trial),
            tensors={"p/chain": torch.tensor(self._held[trial][2])},
            first_loss=first,
            recent_loss=recent,
        )

    def release(self, trial: int) -> None:
        """Forget a trial."""
        del self._held[trial]


class SyntheticMeasuring:
    """Evaluates the trials of a :class:`SyntheticEngine` after checking their chains."""

    def __init__(self, curves: SyntheticCurves, trials: Mapping[int, Trial]) -> None:
        self._curves = curves
        self._trials = trials
        self._seen: dict[int, int] = {}

    def evaluate(
        self, trial: int, step: int, weights: Mapping[str, Tensor], losses: tuple[float, float]
    ) -> Evaluation:
        """The planted evaluation.

        Raises:
            AssertionError: the weights are not those of ``trial`` after exactly ``step`` steps, or it
                was evaluated out of order.
        """
        held = self._trials[trial]
        assert int(weights["seed"]) == held.seed, (trial, step, "weights of another trial")
        assert int(weights["chain"]) == chained(held.seed, step), (
            trial,
            step,
            "steps lost or done twice",
        )
        assert math.isnan(losses[0]) == (step == 0), (trial, step, losses)
        assert self._seen.get(trial, -1) < step, (trial, step, "evaluated out of order")
        self._seen[trial] = step
        return self._curves.evaluation(held, step)

    def evaluate_portion(self, engine: Engine, steps: Mapping[int, int]) -> dict[int, Evaluation]:
        """The planted evaluations of several trials, at the steps the engine has brought them to."""
        return {
            trial: self.evaluate(trial, step, engine.weights(trial), engine.losses(trial))
            for trial, step in steps.items()
        }

    def measure(self, weights: Mapping[str, Tensor], split: str) -> dict[str, Measured]:
        """The metrics of a split at the trial's last evaluation."""
        seed = int(weights["seed"])
        trial = next(trial for trial in self._trials.values() if trial.seed == seed)
        measured = self._curves.evaluation(trial, self._seen[trial.id]).metrics
        return {name: value for name, value in measured.items() if name.startswith(f"{split}/")}

    def outcomes(self, trial: int) -> Sequence[SampleOutcomes]:
        """None: there are no samples."""
        return ()

    def forget(self, trial: int) -> None:
        """A trial has ended."""
        self._seen.pop(trial, None)

    def state_dict(self) -> dict[str, object]:
        """The last step of each trial."""
        return {str(trial): step for trial, step in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take that up."""
        self._seen = {int(trial): int(str(step)) for trial, step in state.items()}


class _Admissions(SyntheticEngine):
    """An engine that tells its evaluator which trials there are."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: dict[int, Trial] = {}

    def admit(self, trial: Trial, saved: SavedTrial | None = None) -> None:
        super().admit(trial, saved)
        self.trials[trial.id] = trial


class SyntheticWorkshop:
    """Makes engines and evaluators of a made-up study; takes the workshop's place in a runner.

    Args:
        curves: what is measured.
    """

    def __init__(self, curves: SyntheticCurves) -> None:
        self._curves = curves
        self._engines: dict[SearchKey, _Admissions] = {}

    def engine(self, key: SearchKey) -> Engine:
        """A new engine for one search."""
        self._engines[key] = _Admissions()
        return self._engines[key]

    def measuring(self, key: SearchKey) -> Measuring:
        """The evaluator of the engine made last for that search."""
        return SyntheticMeasuring(self._curves, self._engines[key].trials)


def chained(seed: int, steps: int) -> int:
    """The hash chain of a trial after so many steps."""
    return _ahead(seed % _MODULUS, seed, steps)


def _ahead(chain: int, seed: int, steps: int) -> int:
    """``steps`` rounds of ``c <- a c + seed`` at once."""
    power = pow(_FACTOR, steps, _MODULUS)
    total = (power - 1) * pow(_FACTOR - 1, -1, _MODULUS)
    return (chain * power + seed * total) % _MODULUS


def _effective(trial: Trial) -> float:
    return trial.parameters["lr"] / (1 - trial.parameters.get("momentum", 0.0))


def _names(split: str) -> tuple[str, str]:
    return f"{split}/classification_error", f"{split}/cross_entropy_error"


def _normals(seed: int, step: int) -> np.ndarray:
    """Three independent normal numbers, a function of seed and step alone."""
    # The step in the second word: streams of neighbouring steps never meet.
    counter = np.array([0, step + 1, 0, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=seed, counter=counter)).standard_normal(3)
