"""The training loop from the inside: memberships, steps, leaving, and who is told about it.

Every exchange is preceded by :meth:`Loop.begin`, which says what the exchange is for: ``train``,
``evaluate``, or ``open`` where the loop has not come to know yet. A worker that is healed in it learns what
its peers are about to do, and does the same, wherever its own loop stood.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.data.draws import Draws
from shoal.data.randomness import sample_seed
from shoal.errors import ExchangeFailed, ResumableStop, ShoalError, UsageError
from shoal.fleet.bodies import Bodies
from shoal.fleet.checkpoint import Checkpoints
from shoal.fleet.gather import gather
from shoal.fleet.movement import to_device
from shoal.fleet.plan import Batching, StepPlan
from shoal.fleet.record import Recorder
from shoal.fleet.replica import Replica
from shoal.fleet.stage import Stage
from shoal.fleet.step import Committed
from shoal.world.contract import Membership, World

# How often a worker that leaves tries to say goodbye when the others are lost meanwhile.
_GOODBYES = 3


class Loop:
    """Drives one worker through epochs and steps.

    Args:
        replica: this worker's state and its stepper.
        world: who is there.
        recorder: is told what was committed and what changed.
        checkpoints: where to write state, or None.
        device: where batches go.
        prepare: called with the way the epoch is cut before its first step; may raise UsageError.
        describe: the run's configuration, stored once and again when it changes.
        close: frees everything, when this worker has left as announced.
    """

    def __init__(
        self,
        replica: Replica,
        world: World,
        *,
        recorder: Recorder,
        checkpoints: Checkpoints | None,
        device: torch.device,
        prepare: Callable[[Batching], None],
        describe: Callable[[Batching, Committed], dict[str, Any]],
        close: Callable[[], None],
    ) -> None:
        self.replica = replica
        self.world = world
        self.device = device
        self.membership: Membership | None = None
        self.last: Committed | None = None
        self.out = False
        self.stage = Stage()
        self.bodies = Bodies(replica.progress)
        self.total_samples: int | None = None
        self._progress = replica.progress
        self._stepper = replica.stepper
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._prepare = prepare
        self._describe = describe
        self._close = close
        self._cut: Batching | None = None
        self._quitting = False
        self._broken = False
        # Evaluations since the last step, and how many there were at the end of the epoch before.
        self._evaluated = 0
        self._usually_evaluated = 0
        if self._stepper.norm_sync is not None:
            self._stepper.norm_sync.on_wait = lambda waiting: self.phase(
                "exchange" if waiting else "compute"
            )

    @property
    def is_primary(self) -> bool:
        """Whether this worker speaks for the fleet."""
        return self.present().ranks[0] == 0 and (not self.out or self.world.survivors == 0)

    def present(self) -> Membership:
        """The membership as last known; the first time, that of the coming exchange."""
        return self.membership if self.membership is not None else self.begin("open")

    # -- one exchange -----------------------------------------------------------------------------

    def begin(self, kind: str) -> Membership:
        """The membership of the coming exchange, which is for ``kind``."""
        if self.world.left and not self.out:
            self._depart()
        commits = self._progress.commits
        self._broken = True
        self.phase("quorum")
        try:
            with self.replica.announcing(kind):
                self.membership = self.world.start_step(shrink_only=kind == "evaluate")
        except ResumableStop:
            if self._checkpoints is not None and commits >= 0:
                self._checkpoints.write(self.replica.snapshot, self._progress.step, wait=True)
            raise
        self._broken = False
        self._recorder.changes(self.world.take_changes())
        if commits < 0 <= self.replica.resumed_from:
            self._recorder.event({"kind": "resume", "step": self._progress.step})
        return self.membership

    def step(self) -> bool:
        """What the user's ``fleet.step()`` does."""
        return self._conclude() if self.stage.step_called() else False

    def clip(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the fleet's gradient once the exchange is over."""
        self.phase("exchange")
        norm = self._stepper.clip(max_norm, norm_type)
        self.phase("compute")
        return norm

    # -- epochs -----------------------------------------------------------------------------------

    def run_epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs whose bodies have not come to their end."""
        if self._gone(total):
            return
        self.begin("open")
        while not self._gone(total) and self._progress.bodies < total:
            try:
                yield self.bodies.enter()
            except GeneratorExit:
                self._break_outer(total)
                raise
            if not self.out:
                self.bodies.complete()
        self.bodies.end()
        self._end_together()
        if self.is_primary:
            self._recorder.event(
                {"kind": "finish", "step": self._progress.step, "samples": self._progress.cursor}
            )
            self.checkpoint()

    def _end_together(self) -> None:
        """One exchange after the last step, so that whoever saw that one fail alone adopts it."""
        while not self.out:
            membership = self.begin("end")
            if membership.workers == len(membership.ranks) or self.replica.expected == "evaluate":
                return  # alone, or healed by others that have ended this and gone on
            self.phase("exchange")
            self._broken = True
            try:
                _, flags = gather(self.world, membership, [b""], self.device)
            except ExchangeFailed:
                self.world.settle(None)
                continue
            self.world.settle(flags)
            self._progress.commit(token=membership.token)
            self._broken = False
            return

    def run_epoch(self, draws: Draws, cut: Batching) -> Iterator[Any]:
        """Yield this worker's micro-batches of the present epoch."""
        if self._gone(None):
            return
        self._cut = cut
        if not self.bodies.draw():
            # Trained before the run was stopped. The others know that as well: no exchange.
            self._prepare(cut)
            self.phase("user")
            return
        if self.last is not None:
            self._usually_evaluated = self._evaluated
        membership = self.begin("train")
        self._prepare(cut)
        epoch = self._progress.epoch
        while True:
            if self.replica.expected == "train":
                # Healed after an absence: go on where the fleet is, even in a later epoch.
                epoch = self._progress.epoch
            if self.replica.expected in ("train", "evaluate"):
                self.bodies.adopt()
            self.bodies.drawn()
            if self._progress.epoch != epoch:
                return
            self._check_length(draws)
            yield from self._run_step(draws, cut, cut.plan(self._progress.cursor, membership))
            if self._progress.epoch != epoch or self.out:
                self.bodies.drawn()
                self.phase("user")
                return
            membership = self.begin("train")

    def _run_step(self, draws: Draws, cut: Batching, plan: StepPlan) -> Iterator[Any]:
        self._stepper.open(plan)
        self._recorder.check_range(self._stepper.rule, plan.nominal)
        self._recorder.check_idle(plan, cut.micro_batch)
        self.tell("compute", plan)
        for index, (start, stop) in enumerate(plan.pieces):
            upcoming = functools.partial(cut.upcoming, plan, index)
            batch = to_device(draws.fetch(start, stop, upcoming), self.device)
            self._seed(start)
            self.stage.hand_out(start, stop, index == len(plan.pieces) - 1)
            try:
                yield batch
            except GeneratorExit:
                self._break_off(plan)
                raise
            self.stage.take_back()
        if not plan.pieces:
            self._broken = True
            self._stepper.launch(void=False)
            self._conclude()

    def _conclude(self) -> bool:
        self._broken = True
        self.phase("exchange")
        done = self._stepper.finish()
        self._broken = False
        if done is None:
            return False
        first = self.last is None
        self.last = done
        self.replica.evaluation.finished = []
        self._evaluated = 0
        changed = self._recorder.committed(done, self._progress)
        if (first or changed) and self.is_primary and self._cut is not None:
            self._recorder.event({"kind": "describe", "config": self._describe(self._cut, done)})
        self.tell("compute", done.plan)
        store = self._checkpoints if self.is_primary else None
        if store is not None and store.maybe_write(self.replica.snapshot, self._progress.step):
            self._recorder.event({"kind": "checkpoint", "step": self._progress.step})
        return True

    # -- leaving ----------------------------------------------------------------------------------

    def _break_off(self, plan: StepPlan) -> None:
        """The loop over the batches was left early, by ``break`` or by an exception.

        A step whose exchange has begun is finished, any other one is void for all. At the very end of an
        epoch the others may evaluate next, so the goodbye waits for the next epoch.
        """
        done = self.stage.step_done
        self.stage.drop()
        alone = plan.membership.workers == len(plan.membership.ranks)
        if self.stage.failed:
            # Some of the step's gradients may be under way: the others must see at once that no more come.
            self._broken = self.out = True
            if not alone:
                self.world.close()
        if self._broken:
            return
        try:
            if self._stepper.launched and not alone:
                done = True
                self._conclude()
            if done and plan.stop == self._progress.cursor == self._end_of_epoch(plan):
                self._quitting = True
                return
            if not done:
                self.world.request_leave()
                if alone:
                    self._stepper.forget()
                else:
                    self._stepper.leave_void()
            self._say_goodbye()
        except ShoalError as error:
            self.out = True
            print(f"shoal: {error}", file=sys.stderr, flush=True)

    def _break_outer(self, total: int) -> None:
        """The loop over the epochs was left early, by ``break`` or by an exception.

        The others come to their next training step, or to the end. Where they evaluate first, as they
        did after the last epoch, no goodbye would fit into what they exchange.
        """
        if self.out or self._broken:
            return
        try:
            if self._evaluated < self._usually_evaluated:
                self.out = True
                self.world.close()
            elif self._progress.epoch < total:
                self._say_goodbye()
            else:
                self._end_together()
        except ShoalError as error:
            self.out = True
            print(f"shoal: {error}", file=sys.stderr, flush=True)

    def _end_of_epoch(self, plan: StepPlan) -> int:
        samples = self._progress.samples or 1
        return (plan.start // samples + 1) * samples

    def _say_goodbye(self) -> None:
        """Announce in one more training exchange, which nobody commits, that this worker leaves."""
        self.world.request_leave()
        for _ in range(_GOODBYES):
            if self.world.left:
                break
            membership = self.begin("train")
            if self._cut is None or membership.workers == len(membership.ranks):
                break
            self._stepper.open(self._cut.plan(self._progress.cursor, membership))
            self._stepper.leave_void()
        self.out = True

    def _gone(self, total: int | None) -> bool:
        """Whether this worker takes no part any more; carries out a goodbye that was put off."""
        if self._quitting and not self.out and (total is None or self._progress.epoch < total):
            self._say_goodbye()
        return self.out

    def _depart(self) -> None:
        """An announced leave has taken effect; end this process in order."""
        self.out = True
        alone = self.world.survivors == 0
        if alone:
            self.checkpoint()
        self._close()
        raise SystemExit(ResumableStop.exit_code if alone else 0)

    def checkpoint(self) -> None:
        """Write a checkpoint now and wait for it, if this worker is the primary."""
        if self._checkpoints is not None and self.is_primary:
            self._checkpoints.write(self.replica.snapshot, self._progress.step, wait=True)

    # -- parts ------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation: an error in it means that no goodbye fits."""
        yield
        self._broken = False
        self._evaluated += 1

    def exchanging(self) -> None:
        """An exchange other than a step's is under way; an error means that no goodbye fits."""
        self._broken = True

    def tell(self, phase: str, plan: StepPlan | None) -> None:
        """Report to the supervisor what this worker does."""
        self._recorder.standing(
            self._progress,
            workers=self.membership.workers if self.membership else 1,
            total_samples=self.total_samples,
            plan=plan,
            last=self.last,
        )
        self._recorder.phase(phase)

    def phase(self, phase: str) -> None:
        """Report a phase of the step or evaluation under way: ``quorum exchange compute evaluate user``."""
        self._recorder.phase(phase)

    def _check_length(self, draws: Draws) -> None:
        try:
            draws.check_length()
        except UsageError as error:
            raise UsageError(f"at step {self._progress.step}: {error}") from error

    def _seed(self, position: int) -> None:
        """Dropout and the like follow from (seed, position), never from a rank."""
        progress = self._progress
        seed = sample_seed(progress.seed, progress.epoch, position, stream=2**32)
        # torch.manual_seed would also queue a call for every accelerator, at 100 times the cost.
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)
