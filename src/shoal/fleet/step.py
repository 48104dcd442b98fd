"""One optimizer step of the fleet, from the first micro-batch to the commit.

The data's way: a plan of the step (who takes which positions) -> gradients of this worker's
micro-batches, each weighted by its share of the step -> one exchange -> commit -> learning rate and
optimizer. A step that is not committed leaves no trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import DivergedError, ExchangeFailed, UsageError
from shoal.fleet.buffers import ModelBuffers
from shoal.fleet.exact import ExactGradients
from shoal.fleet.guards import OptimizerGuard
from shoal.fleet.header import (
    EXACT_FLOAT32,
    FIXED_SLOTS,
    LOSS,
    NONFINITE,
    PIECES,
    SAMPLES,
    SQUARES,
    VOID,
    add_weight,
    summed_weight,
)
from shoal.fleet.noise import NoiseMeter, measured
from shoal.fleet.norm import RunningStatistics
from shoal.fleet.plan import StepPlan
from shoal.fleet.reducer import Reducer
from shoal.fleet.state import Progress
from shoal.scaling.contract import At, Rule
from shoal.scaling.learning_rate import LearningRate
from shoal.sync import AllReduce
from shoal.world.contract import World


@dataclass(frozen=True)
class Committed:
    """What a committed step looked like, for events, metrics and the progress line."""

    plan: StepPlan
    loss: float
    lr: float
    lr_target: float
    multiplier: float
    ramp_end: int | None
    parent_row: str


class Stepper:
    """Carries out steps on one replica; see the module text."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        world: World,
        rule: Rule[Any],
        progress: Progress,
        sync: AllReduce,
        deterministic: bool,
        norm_sync: Any = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.rule = rule
        self.rate: LearningRate[Any] | None = None
        self.progress = progress
        self.guard = OptimizerGuard(optimizer)
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.rule_state: Any = None
        self.norm = RunningStatistics(model)
        self.buffers = ModelBuffers(model, self.norm)
        self.norm_sync = norm_sync
        if norm_sync is not None:
            layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
            norm_sync.know(layers, next(model.parameters()).device)
        self.reducer = Reducer(
            list(model.parameters()), bucket_bytes=sync.bucket_bytes, all_reduce=world.all_reduce
        )
        if deterministic and rule.needs_noise:
            raise UsageError(
                f"deterministic = True with scaling = {rule.name}; the rule's noise estimate depends on "
                "the order of a sum; use another scaling rule"
            )
        self._noise = NoiseMeter(self.reducer) if rule.needs_noise else None
        self._exact = ExactGradients(self.reducer, self.norm.size) if deterministic else None
        self.launched = False
        self._plan: StepPlan | None = None
        self._summed: list[float] | None = None
        self._failed = False
        self._good: bool | None = None
        self._clip: tuple[float, float] | None = None
        self._mean_square = 0.0
        self._seed: tuple[tuple[float, torch.dtype, torch.device], Tensor] | None = None

    # -- one step -----------------------------------------------------------------------------

    def open(self, plan: StepPlan) -> None:
        """Begin the step ``plan``; gradients and statistics start from the last commit."""
        self._plan = plan
        self._at = At(
            step=self.progress.step,
            samples=self.progress.cursor,
            global_batch=plan.nominal,
            momentum=_momentum(self.optimizer),
            epoch_samples=self.progress.samples or 1,
        )
        self._norm_start = FIXED_SLOTS + len(self.reducer.parameters)
        self._buffer_start = self._norm_start + self.norm.slots
        self._slots = self._buffer_start + self.buffers.slots
        self._flags = self.world.flag_slots
        self.reducer.begin(
            self._slots + self._flags, overlap=not (self._noise or self._exact or self.norm_sync)
        )
        self.norm.begin()
        self.buffers.begin()
        self._pieces_done = 0
        if self._exact is not None:
            self._exact.zero()
        if self.norm_sync is not None:
            self.norm_sync.begin(plan.membership.workers)
        self._sums = [0.0] * FIXED_SLOTS
        self._summed, self._failed, self._good, self._clip = None, False, None, None
        self.launched = False

    def add(self, loss: Tensor, *, samples: int, weight: float, summed: bool, last: bool) -> None:
        """Backward of one micro-batch of ``samples``; the ``last`` one of the step starts the exchange."""
        assert self._plan is not None
        total = self._plan.stop - self._plan.start
        factor = (1.0 if summed else weight) / total
        value = float(loss.detach())
        finite = math.isfinite(value)
        self._sums[SAMPLES] += samples
        add_weight(self._sums, weight)
        self._sums[LOSS] += value if summed else value * weight
        self._sums[NONFINITE] += not finite
        if self._noise is not None:
            self._noise.before()
        # With synchronised statistics the others' backward waits for this one's, finite or not.
        backward = finite or self.norm_sync is not None
        with self.reducer.collecting(last=last and backward):
            if backward:
                # What a product would hand to backward, without a node for it in the graph.
                loss.backward(None if factor == 1.0 else self._seed_of(loss, factor))
        if self.norm_sync is not None:
            self.norm_sync.piece_done()
        moved = self.norm.after_piece(samples / total) if self.norm.size else None
        if self.buffers.slots:
            self._end_rank(self._plan.shares)
        if self._noise is not None:
            self._sums[SQUARES] += self._noise.weighted_square(
                samples=samples, weight=weight, total=total
            )
            self._sums[PIECES] += 1
        if self._exact is not None:
            self._sums[NONFINITE] += not self._exact.take(moved)
        if last:
            self.launch(void=False)
        else:
            self.reducer.seal()

    def launch(self, *, void: bool) -> None:
        """Send whatever has not been sent; ``void`` tells all others to forget the step."""
        self.launched = True
        if self.norm_sync is not None and self._plan is not None:
            self.norm_sync.phantom(self._plan.rounds)
        self._sums[VOID] = float(void)
        header = self.reducer.header
        self.reducer.write_header([*self._sums, *self.reducer.used])
        if self.norm.size:
            self.norm.write(header[self._norm_start : self._buffer_start])
        if self.buffers.slots:
            self.buffers.write(header[self._buffer_start : self._slots])
        if self._flags:
            slots = header[self._slots :]
            flags = slots if header.device.type == "cpu" else torch.zeros(self._flags)
            self.world.write_flags(flags)
            if flags is not slots:
                slots.copy_(flags)
        if self._exact is not None:
            self.reducer.send(self._exact.parts)
        self.reducer.send_rest()
        self.reducer.seal()

    def conclude(self) -> bool:
        """Wait for the exchange; True if it succeeded and the gradients are the fleet's mean.

        Asked again it answers the same: those who clip ask twice, those without samples once, and
        all of them must come to the same reductions after it.
        """
        if self._good is None:
            self._good = self._exchanged()
        return self._good

    def _exchanged(self) -> bool:
        assert self._plan is not None
        self.reducer.check_seal()
        try:
            self.reducer.wait()
            if self.norm_sync is not None:
                self.norm_sync.check()
        except ExchangeFailed:
            self._failed = True
            return False
        self._summed = self.reducer.header.tolist()
        if self._void():
            return False
        if self._exact is not None:
            self._exact.give_back()
        total = self._plan.stop - self._plan.start
        assert total >= EXACT_FLOAT32 or self._summed[SAMPLES] == total, (
            "every share was trained once"
        )
        weight = summed_weight(self._summed)
        if weight > 0 and weight != total and math.isfinite(weight):
            self.reducer.scale(total / weight)
        if self._noise is not None:
            # Before clipping, which would hide the step's own gradient from the rule.
            self._mean_square = self.reducer.square_norm()
        return True

    def clip(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the fleet's gradient; None if the step will not be committed."""
        if not self.conclude():
            return None
        self._clip = (float(max_norm), float(norm_type))
        return torch.nn.utils.clip_grad_norm_(self._used_parameters(), max_norm, norm_type)

    def finish(self) -> Committed | None:
        """Commit the step and update, or forget it (None).

        Raises:
            DivergedError: the loss of some worker was non-finite; raised on all of them.
        """
        good = self.conclude()
        if good and self._plan is not None and self._plan.someone_idle:
            good = self._share_clipping()
        if good and self.buffers.slots:
            good = self._agree_on_buffers()
        if self._summed is None or self._failed:
            self.world.settle(None)
            self._abandon()
            return None
        flags = torch.tensor(self._summed[self._slots :])
        self.world.settle(flags)
        if self._summed[NONFINITE] > 0:
            self._abandon()
            raise DivergedError(
                f"loss = not finite at step {self.progress.step} (sample {self.progress.cursor:,}) on "
                f"{int(self._summed[NONFINITE])} micro-batch(es); all workers stopped before the update "
                "and the last good checkpoint is kept; try a smaller lr, a longer warm-up, or "
                "fleet.clip_grad_norm_"
            )
        if not good:
            self._abandon()
            return None
        return self._update()

    def leave_void(self) -> None:
        """Take part in one exchange only to say goodbye; nobody commits it."""
        self.launch(void=True)
        try:
            self.reducer.wait()
            flags = torch.tensor(self.reducer.header.tolist()[self._slots :])
            self.world.settle(flags)
        except ExchangeFailed:
            self.world.settle(None)
        self._abandon()

    def forget(self) -> None:
        """Give the step up where nobody else takes part in it."""
        self.world.settle(None)
        self._abandon()

    # -- parts of it ----------------------------------------------------------------------------

    def _void(self) -> bool:
        assert self._summed is not None
        return self._summed[VOID] > 0 or self._summed[NONFINITE] > 0

    def _update(self) -> Committed:
        assert self._plan is not None and self._summed is not None and self.rate is not None
        # The rule's state begins with the first step that is committed, not with the first attempt.
        held = self.rule.init(self._at) if self.rule_state is None else self.rule_state
        state, factor, multiplier, momentum_factor = self.rate.before_step(held, self._at)
        if momentum_factor != 1.0:
            for buffers in self.optimizer.state.values():
                buffer = buffers.get("momentum_buffer")
                if buffer is not None:
                    buffer.mul_(momentum_factor)
        rates = [base * factor * multiplier for base in self.base_lrs]
        used = self._used_mask()
        with self.reducer.only_used(used), self.guard.stepping(rates):
            self.optimizer.step()
        noise = None
        if self._noise is not None:
            noise = measured(self._summed, mean_square=self._mean_square)
        self._commit_norm()
        rule = self.rule
        target = rule.target(state, self._at)
        ramp_end = rule.ramp_end(state, self._at)
        self.rule_state = rule.commit(state, self._at, noise)
        parent = self.progress.row
        self.progress.commit(token=self._plan.membership.token, cursor=self._plan.stop)
        weight = summed_weight(self._summed)
        done = Committed(
            plan=self._plan,
            loss=self._summed[LOSS] / weight if weight else math.nan,
            lr=rates[0],
            lr_target=self.base_lrs[0] * factor * target,
            multiplier=multiplier,
            ramp_end=ramp_end,
            parent_row=parent,
        )
        self._over()
        return done

    def _abandon(self) -> None:
        self.norm.abandon()
        self.buffers.abandon()
        self._over()

    def _over(self) -> None:
        self._plan, self.launched = None, False
        if self.norm_sync is not None:
            self.norm_sync.end()

    def _used_mask(self) -> list[bool]:
        assert self._summed is not None
        marks = self._summed[FIXED_SLOTS : self._norm_start]
        return [mark > 0 for mark in marks]

    def _used_parameters(self) -> list[nn.Parameter]:
        pairs = zip(self.reducer.parameters, self._used_mask(), strict=True)
        return [p for p, used in pairs if used]

    def _commit_norm(self) -> None:
        if not self.norm.size:
            return
        assert self._plan is not None and self._summed is not None
        header, start = self.reducer.header, self._norm_start
        moved = header[start : start + self.norm.size]
        if self._exact is not None:
            moved = self._exact.read_moved(torch.empty_like(self.norm.flat))
        touched = header[start + self.norm.size : self._buffer_start]
        alone = self._plan.membership.workers == 1 and self._exact is None
        self.norm.commit(moved, touched, alone=alone and len(self._plan.pieces) == 1)

    def _seed_of(self, loss: Tensor, factor: float) -> Tensor:
        """``factor`` like ``loss``; most steps take the same one."""
        kind = (factor, loss.dtype, loss.device)
        if self._seed is None or self._seed[0] != kind:
            self._seed = (kind, torch.full_like(loss, factor, requires_grad=False))
        return self._seed[1]

    def _end_rank(self, shares: tuple[int, ...]) -> None:
        """Where this process plays several ranks, each of them begins with the agreed buffers."""
        self._pieces_done += 1
        ends = [end for end, share in zip(accumulate(shares), shares, strict=True) if share]
        if len(shares) > 1 and self._pieces_done in ends:
            done = self._pieces_done
            self.buffers.rank_done(first=done == ends[0], last=done == ends[-1])

    def _agree_on_buffers(self) -> bool:
        assert self._plan is not None and self._summed is not None
        marks = self._summed[self._buffer_start : self._slots]
        try:
            speaks = 0 in self._plan.membership.ranks
            self.buffers.agree(marks, self.world.all_reduce, speaks=speaks)
        except ExchangeFailed:
            self._failed = True
            return False
        return True

    def _share_clipping(self) -> bool:
        """Tell workers without samples, whose loop did not run, how the others clipped."""
        assert self._plan is not None
        setting = torch.zeros(2, dtype=torch.float64, device=self.reducer.device)
        if 0 in self._plan.membership.ranks and self._clip is not None:
            setting.copy_(torch.tensor(self._clip, dtype=torch.float64))
        try:
            self.world.all_reduce(setting).wait()
        except ExchangeFailed:
            self._failed = True
            return False
        max_norm, norm_type = setting.tolist()
        if max_norm > 0 and not self._plan.pieces:
            torch.nn.utils.clip_grad_norm_(self._used_parameters(), max_norm, norm_type)
        return True

    def close(self) -> None:
        """Take the hooks off the model and the optimizer."""
        self.reducer.close()
        self.guard.close()


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    group = optimizer.param_groups[0]
    if "betas" in group:
        return float(group["betas"][0])
    return float(group.get("momentum", 0.0))
