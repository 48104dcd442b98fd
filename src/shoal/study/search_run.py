"""One search carried out: what the search wants, the engine trains, the evaluator measures, the journal keeps.

The way of the data: the search names trials and the grid points they are to reach; the engine advances
them; each is evaluated at its grid point; the row goes into this runner's journal; then the search hears of
it. Between two such rounds the whole search can be put aside and taken up by another process, bit for bit.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shoal.ledger.study_rows import StudyWriter
from shoal.study.claims import Claim
from shoal.study.directory import StudyDirectory
from shoal.study.engines.contract import Engine, SavedTrial
from shoal.study.evaluation import SampleOutcomes
from shoal.study.paused import Paused, clear, put_aside, take_up
from shoal.study.records import CONFIRM, Evaluation, Measured, Outcome, SearchKey, Trial

PAUSE_SECONDS = 2.0
"""The least time between two times that a search is put aside ..."""
PAUSE_SHARE = 0.05
"""... and the most of its time that may go into it."""


class Wanting(Protocol):
    """Decides which trials go how far: a search, or a confirmation of its winner."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is wanted."""
        ...

    def wanted(self) -> Mapping[int, int]:
        """Trials by id, and the grid point each is to reach next."""
        ...

    def add(self, trial: int, evaluation: Evaluation) -> None:
        """Hear what was measured there."""
        ...

    def outcome(self, trial: int) -> Outcome:
        """How a trial stands, once the whole is finished."""
        ...

    def summary(self) -> dict[str, Any]:
        """What was found out, as JSON values."""
        ...


class Measuring(Protocol):
    """Measures weights at grid points."""

    def evaluate_portion(
        self, engine: Engine, steps: Mapping[int, int]
    ) -> Mapping[int, Evaluation]:
        """The evaluations of trials, by id, at the grid points that the engine has brought them to."""
        ...

    def measure(self, weights: Mapping[str, Tensor], split: str) -> Mapping[str, Measured]:
        """Every metric of a split, whole."""
        ...

    def outcomes(self, trial: int) -> Sequence[SampleOutcomes]:
        """Each validation sample's outcomes at the trial's last evaluation, if that came near a goal."""
        ...

    def forget(self, trial: int) -> None:
        """A trial has ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it remembers of each trial, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that up."""
        ...


class Making(Protocol):
    """Makes what the searches of a study are carried out with."""

    def engine(self, key: SearchKey) -> Engine:
        """A fresh engine for a search."""
        ...

    def measuring(self, key: SearchKey) -> Measuring:
        """A fresh evaluator for a search."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What a search is carried out with.

    Args:
        trials: the trial of an id.
        wanting: decides.
        engine: trains.
        measuring: measures.
        rows: keeps.
        directory: of the study.
    """

    trials: Callable[[int], Trial]
    wanting: Wanting
    engine: Engine
    measuring: Measuring
    rows: StudyWriter
    directory: StudyDirectory


class SearchRun:
    """Carries one search out, from the start or from where it was put aside.

    Args:
        key: the search.
        tools: see there.
        claim: this process's right to it.
        stopped: asked between rounds; True puts the search aside and ends.
    """

    def __init__(
        self, key: SearchKey, tools: Tools, *, claim: Claim, stopped: Callable[[], bool]
    ) -> None:
        self.key = key
        self._tools = tools
        self._claim = claim
        self._stopped = stopped
        self._attempts: dict[int, str] = {}
        self._trials: dict[int, Trial] = {}
        self._curves: dict[int, list[Evaluation]] = {}
        self._running: set[int] = set()
        self._place = tools.directory.search(key)
        self._began = self._put_aside_at = time.monotonic()
        self._seconds_before = 0.0
        self._pause_cost = 0.0
        self._steps_trained = 0

    def go(self) -> bool:
        """Carry it out.

        Returns:
            True if it is finished, False if it was put aside because of ``stopped``.

        Raises:
            ClaimLost: another process has it now.
            OSError: the disk is full; what was written stays.
        """
        tools = self._tools
        self._take_up()
        while not tools.wanting.finished:
            for round_ in self._rounds(tools.wanting.wanted()):
                self._claim.check()
                self._train(round_)
                if self._stopped():
                    self._put_aside()
                    self._write_row(tools.wanting.summary(), str(Outcome.PREEMPTED))
                    return False
                if self._pause_is_due():
                    self._put_aside()
        self._end()
        return True

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    # -- a round ------------------------------------------------------------------------------------

    def _rounds(self, wanted: Mapping[int, int]) -> Iterator[dict[int, int]]:
        """What is wanted, in portions that the engine trains together."""
        for number in sorted(wanted):
            if number not in self._running:
                self._admit(number)
        portions: Sequence[Sequence[int]] = self._tools.engine.portions(sorted(wanted))
        for portion in portions:
            yield {number: wanted[number] for number in portion}

    def _admit(self, number: int) -> None:
        trial = self._tools.trials(number)
        self._trials[number] = trial
        self._attempts[number] = uuid.uuid4().hex
        self._curves[number] = []
        self._tools.rows.trial(
            trial,
            attempt=self._attempts[number],
            segment=self._claim.number,
            engine=self._tools.engine.name,
        )
        self._tools.engine.admit(trial)
        self._running.add(number)

    def _train(self, targets: Mapping[int, int]) -> None:
        tools = self._tools
        before = {number: tools.engine.step(number) for number in targets}
        tools.engine.advance(targets)
        evaluations = tools.measuring.evaluate_portion(tools.engine, targets)
        for number, step in targets.items():
            self._steps_trained += step - before[number]
            evaluation = evaluations[number]
            tools.rows.evaluation(
                self.key,
                number,
                evaluation,
                attempt=self._attempts[number],
                segment=self._claim.number,
            )
            self._write_samples(number, step)
            self._curves[number].append(evaluation)
            tools.wanting.add(number, evaluation)
            if evaluation.diverged:
                self._leave_out(number)

    def _write_samples(self, number: int, step: int) -> None:
        for outcomes in self._tools.measuring.outcomes(number):
            if outcomes.is_binary:
                self._tools.rows.samples(
                    self.key,
                    number,
                    step,
                    outcomes.metric,
                    outcomes.values,
                    attempt=self._attempts[number],
                    segment=self._claim.number,
                )

    def _leave_out(self, number: int) -> None:
        """A diverged trial is never trained again."""
        self._tools.engine.release(number)
        self._tools.measuring.forget(number)
        self._running.discard(number)

    # -- putting aside and taking up ------------------------------------------------------------------

    def _pause_is_due(self) -> bool:
        since = time.monotonic() - self._put_aside_at
        return since >= max(PAUSE_SECONDS, self._pause_cost / PAUSE_SHARE)

    def _put_aside(self) -> None:
        began = time.monotonic()
        tensors: dict[str, Tensor] = {}
        trials: dict[str, object] = {}
        for number, attempt in self._attempts.items():
            entry: dict[str, object] = {
                "attempt": attempt,
                "address": self._trials[number].address,
                "curve": [_plain(evaluation) for evaluation in self._curves[number]],
            }
            if number in self._running:
                saved = self._tools.engine.save(number)
                entry |= {"step": saved.step, "losses": [saved.first_loss, saved.recent_loss]}
                tensors |= {f"{number}/{name}": t for name, t in saved.tensors.items()}
            trials[str(number)] = entry
        facts = {
            "engine": self._tools.engine.name,
            "seconds": self._seconds,
            "trial_steps": self._steps_trained,
            "trials": trials,
            "measuring": self._tools.measuring.state_dict(),
        }
        put_aside(self._place, Paused(segment=self._claim.number, facts=facts, tensors=tensors))
        self._put_aside_at = time.monotonic()
        self._pause_cost = self._put_aside_at - began
        self._tell(finished=False)

    def _take_up(self) -> None:
        paused = take_up(self._place)
        facts: Any = paused.facts if paused is not None else {}
        if paused is None or facts["engine"] != self._tools.engine.name:
            return
        if any(
            self._tools.trials(int(n)).address != e["address"] for n, e in facts["trials"].items()
        ):
            # A confirmation of what was the winner then; begin again.
            return
        self._tools.measuring.load_state_dict(facts["measuring"])
        self._seconds_before, self._steps_trained = facts["seconds"], facts["trial_steps"]
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in paused.tensors.items():
            number, _, rest = name.partition("/")
            states.setdefault(int(number), {})[rest] = tensor
        for text, entry in facts["trials"].items():
            number = int(text)
            self._trials[number] = self._tools.trials(number)
            self._attempts[number] = entry["attempt"]
            self._curves[number] = [_evaluation(row) for row in entry["curve"]]
            if "step" in entry:
                first, recent = entry["losses"]
                saved = SavedTrial(
                    step=entry["step"],
                    tensors=states.get(number, {}),
                    first_loss=first,
                    recent_loss=recent,
                )
                self._tools.engine.admit(self._trials[number], saved)
                self._running.add(number)
        self._replay()

    def _replay(self) -> None:
        """Tell the search again what it had heard, in the order in which it asks."""
        heard = {number: iter(list(curve)) for number, curve in self._curves.items()}
        left = {number: len(curve) for number, curve in self._curves.items()}
        wanting = self._tools.wanting
        while not wanting.finished:
            known = [number for number in sorted(wanting.wanted()) if left.get(number, 0)]
            if not known:
                return
            for number in known:
                left[number] -= 1
                wanting.add(number, next(heard[number]))

    # -- the end ------------------------------------------------------------------------------------

    def _end(self) -> None:
        tools = self._tools
        for number in sorted(self._trials):
            tools.rows.outcome(
                self.key,
                number,
                tools.wanting.outcome(number),
                max(self._last_step(number), 0),
                attempt=self._attempts[number],
                segment=self._claim.number,
            )
        self._tell(finished=True)
        summary = tools.wanting.summary()
        self._write_row(summary, str(summary["state"]))
        tools.directory.write_end(
            self.key,
            self._claim.number,
            {
                "engine": tools.engine.name,
                "seconds": self._seconds,
                "trial_steps": self._steps_trained,
                "trials": len(self._trials),
                "diverged": sum(c[-1].diverged for c in self._curves.values() if c),
                "closest": self._closest(summary),
                **summary,
            },
        )
        clear(self._place)

    def _closest(self, summary: Mapping[str, Any]) -> dict[str, object] | None:
        """How far the best trial came where a goal was not reached; evaluations were cut short there."""
        missed = [goal for goal in summary["goals"] if goal.get("steps") is None]
        if not missed or self.key.repeat == CONFIRM:
            return None
        metric = missed[0]["metric"]
        split = metric.partition("/")[0]
        best: tuple[float, int] | None = None
        for number in sorted(self._running):
            found = self._tools.measuring.measure(self._tools.engine.weights(number), split)
            value = found[metric].value
            if math.isfinite(value) and (best is None or value < best[0]):
                best = (value, number)
        if best is None:
            return None
        step = self._last_step(best[1])
        return {"metric": metric, "value": best[0], "trial": best[1], "step": step}

    def _write_row(self, summary: Mapping[str, Any], state: str) -> None:
        self._tools.rows.search(
            self.key,
            state,
            end=summary["end"],
            draws=len(self._trials),
            goals=summary["goals"],
            segment=self._claim.number,
        )

    def _last_step(self, number: int) -> int:
        curve = self._curves[number]
        return curve[-1].step if curve else -1

    def _tell(self, *, finished: bool) -> None:
        curves = [curve for curve in self._curves.values() if curve]
        self._tools.directory.write_progress(
            self.key,
            self._claim.number,
            {
                "finished": finished,
                "trials": len(self._attempts),
                "diverged": sum(curve[-1].diverged for curve in curves),
                "step": max((curve[-1].step for curve in curves), default=0),
                "trial_steps": self._steps_trained,
                "seconds": self._seconds,
                "engine": self._tools.engine.name,
            },
        )


def _plain(evaluation: Evaluation) -> list[object]:
    metrics = {name: list(measured) for name, measured in evaluation.metrics.items()}
    return [evaluation.step, metrics, evaluation.diverged]


def _evaluation(row: Sequence[Any]) -> Evaluation:
    step, metrics, diverged = row
    return Evaluation(
        step=step,
        metrics={name: Measured(value, bound) for name, (value, bound) in metrics.items()},
        diverged=diverged,
    )
