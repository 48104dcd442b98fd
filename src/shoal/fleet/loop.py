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
from shoal.fleet.checkpoint import Checkpoints
from shoal.fleet.gather import gather
from shoal.fleet.movement import to_device
from shoal.fleet.plan import Batching, StepPlan
from shoal.fleet.record import Recorder
from shoal.fleet.replica import Replica
from shoal.fleet.step import Committed
from shoal.scaling import check_range
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
        self.total_samples: int | None = None
        self._progress = replica.progress
        self._stepper = replica.stepper
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._prepare = prepare
        self._describe = describe
        self._close = close
        self._cut: Batching | None = None
        self._piece: tuple[int, int, bool] | None = None
        self._stage = "idle"
        self._known_batches: set[int] = set()
        self._quitting = False
        self._broken = False
        if self._stepper.norm_sync is not None:
            self._stepper.norm_sync.on_wait = lambda waiting: self.phase(
                "exchange" if waiting else "compute"
            )

    @property
    def is_primary(self) -> bool:
        """Whether this worker speaks for the fleet."""
        return self.present().ranks[0] == 0 and (not self.out or self.world.survivors == 0)

    @property
    def in_step(self) -> bool:
        """Whether the user's loop body holds a batch now."""
        return self._piece is not None

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

    def backward_due(self) -> tuple[int, int, bool]:
        """The batch whose backward comes now, as (start, stop, whether it is the step's last).

        Raises:
            UsageError: there is none.
        """
        if self._piece is None or self._stage != "drawn":
            raise UsageError(
                "fleet.backward() was called "
                + (
                    "twice for one batch; add the losses up and call it once"
                    if self._piece
                    else "outside of fleet.batches(); call it inside the loop"
                )
            )
        return self._piece

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Around a backward pass: once it is done step() may follow; one that fails ends the step."""
        self._stage = "failed"
        yield
        self._stage = "exchange"

    def between(self, what: str) -> bool:
        """Make sure that backward has been called and step has not; True for a step's last batch.

        Raises:
            UsageError: otherwise.
        """
        if self._piece is None or self._stage != "exchange":
            raise UsageError(
                f"fleet.{what}() comes once for each batch, after fleet.backward(loss) and inside the loop "
                "over fleet.batches(); call backward first"
            )
        return self._piece[2]

    def step(self) -> bool:
        """What the user's ``fleet.step()`` does."""
        last = self.between("step")
        self._stage = "done"
        return self._conclude() if last else False

    def clip(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the fleet's gradient once the exchange is over."""
        self.phase("exchange")
        norm = self._stepper.clip(max_norm, norm_type)
        self.phase("compute")
        return norm

    # -- epochs -----------------------------------------------------------------------------------

    def run_epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain."""
        if self._gone(total):
            return
        self.begin("open")
        while not self._gone(total) and self._progress.epoch < total:
            before = self._progress.cursor
            try:
                yield self._progress.epoch
            except GeneratorExit:
                if not (self.out or self._broken or self._progress.epoch >= total):
                    self._say_goodbye()
                raise
            idle = self._progress.cursor == before and self._progress.epoch < total
            if idle and not (self.out or self._quitting):
                raise UsageError(
                    "fleet.epochs: the loop's body drew no batches; iterate over fleet.batches(...) in it"
                )
        self._end_together()
        if self.is_primary:
            self._recorder.event(
                {"kind": "finish", "step": self._progress.step, "samples": self._progress.cursor}
            )
            self.checkpoint()

    def _end_together(self) -> None:
        """One exchange after the last step, so that whoever saw that one fail alone adopts it."""
        while not self.out:
            membership = self.begin("open")
            if membership.workers == len(membership.ranks):
                return
            self.phase("exchange")
            self._broken = True
            try:
                _, flags = gather(self.world, membership, [b""], self.device)
            except ExchangeFailed:
                self.world.settle(None)
                continue
            self.world.settle(flags)
            self._broken = False
            return

    def run_epoch(self, draws: Draws, cut: Batching) -> Iterator[Any]:
        """Yield this worker's micro-batches of the present epoch."""
        if self._gone(None):
            return
        membership = self.begin("train")
        self._prepare(cut)
        self._cut = cut
        epoch = self._progress.epoch
        while True:
            if self.replica.expected == "train":
                # Healed after an absence: go on where the fleet is, even in a later epoch.
                epoch = self._progress.epoch
            if self._progress.epoch != epoch:
                return
            self._check_length(draws)
            yield from self._run_step(draws, cut, cut.plan(self._progress.cursor, membership))
            if self._progress.epoch != epoch or self.out:
                self.phase("user")
                return
            membership = self.begin("train")

    def _run_step(self, draws: Draws, cut: Batching, plan: StepPlan) -> Iterator[Any]:
        self._stepper.open(plan)
        self._check_range(plan.nominal)
        self.tell("compute", plan)
        for index, (start, stop) in enumerate(plan.pieces):
            self._piece = (start, stop, index == len(plan.pieces) - 1)
            upcoming = functools.partial(cut.upcoming, plan, index)
            batch = to_device(draws.fetch(start, stop, upcoming), self.device)
            self._seed(start)
            self._stage = "drawn"
            try:
                yield batch
            except GeneratorExit:
                self._break_off(plan)
                raise
            if self._stage != "done":
                missing = "backward() and step()" if self._stage == "drawn" else "step()"
                raise UsageError(
                    f"fleet.{missing} was not called for the last batch; call it in the loop"
                )
            self._piece = None
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
        assert self._piece is not None
        done = self._piece[2] and self._stage == "done"
        self._piece = None
        alone = plan.membership.workers == len(plan.membership.ranks)
        if self._stage == "failed":
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

    def failing(self, broken: bool) -> None:
        """Whether an exchange other than a step's is under way: an exception now means no goodbye."""
        self._broken = broken

    def tell(self, phase: str, plan: StepPlan | None) -> None:
        """Report to the supervisor what this worker does."""
        workers = self.membership.workers if self.membership else 1
        extra: dict[str, float | int | str] = {"workers": workers}
        if self.total_samples is not None:
            extra["total_samples"] = self.total_samples
        if plan is not None:
            extra["global_batch"] = plan.nominal
        if self.last is not None:
            extra["lr"] = self.last.lr
            extra["lr_target"] = self.last.lr_target
            extra["loss"] = self.last.loss
        self._recorder.standing(self._progress, extra)
        self._recorder.phase(phase)

    def phase(self, phase: str) -> None:
        """Report a phase of the step or evaluation under way: ``quorum exchange compute evaluate user``."""
        self._recorder.phase(phase)

    def _check_range(self, global_batch: int) -> None:
        """Warn, once for each global batch, outside of what the scaling rule was tested at."""
        if global_batch in self._known_batches:
            return
        self._known_batches.add(global_batch)
        text = check_range(self._stepper.rule, global_batch)
        if text is not None:
            print(f"shoal: {text}", file=sys.stderr, flush=True)

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
