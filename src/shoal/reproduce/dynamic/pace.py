"""The scaling rule and the schedule of one run, asked once per step and committed after it.

Every baseline of this reproduction goes through the very rule objects of :mod:`shoal.scaling`;
nothing here knows how any of them works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.scaling.contract import At, Rule
from shoal.scaling.learning_rate import LearningRate, StepRate
from shoal.scaling.schedules import Schedule


class Pace:
    """Steps and samples committed so far, and the rule's state with them.

    Args:
        rule: a scaling rule.
        schedule: a resolved schedule in samples.
        momentum: the optimizer's momentum, in [0, 1).
        epoch_samples: samples in an epoch, >= 1.
        global_batch: nominal global batch of the first step, in samples.
    """

    def __init__(
        self,
        rule: Rule[Any],
        schedule: Schedule,
        *,
        momentum: float,
        epoch_samples: int,
        global_batch: int,
    ) -> None:
        self._rate = LearningRate(rule=rule, schedule=schedule)
        self._momentum = momentum
        self._epoch_samples = epoch_samples
        self.step = 0
        self.samples = 0
        self._state = rule.init(self._at(global_batch))

    def _at(self, global_batch: int) -> At:
        return At(
            step=self.step,
            samples=self.samples,
            global_batch=global_batch,
            momentum=self._momentum,
            epoch_samples=self._epoch_samples,
        )

    def next(self, global_batch: int) -> StepRate[Any]:
        """What the coming step with ``global_batch`` samples uses; nothing changes yet."""
        return self._rate.before_step(self._state, self._at(global_batch))

    def commit(self, rate: StepRate[Any], global_batch: int, *, samples: int | None = None) -> None:
        """The step that used ``rate`` was taken.

        Args:
            rate: what :meth:`next` gave for it.
            global_batch: its nominal global batch.
            samples: what it really held, where an epoch's last batch was short.
        """
        at = self._at(global_batch)
        self._state = self._rate.rule.commit(rate.state, at, None)
        self.step += 1
        self.samples += global_batch if samples is None else samples

    def take_step(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Tensor,
        *,
        base_lr: float,
        global_batch: int,
        samples: int | None = None,
    ) -> None:
        """One whole optimizer step: gradient, learning rate, update, commit.

        Args:
            optimizer: SGD in buffer form.
            loss: a scalar whose gradient is the step's.
            base_lr: learning rate at the reference batch and schedule factor 1.
            global_batch: the step's nominal global batch.
            samples: what it really held, where an epoch's last batch was short.
        """
        rate = self.next(global_batch)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate.lr(base_lr)
        if rate.momentum_factor != 1.0:
            for state in optimizer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"].mul_(rate.momentum_factor)
        optimizer.step()
        self.commit(rate, global_batch, samples=samples)
