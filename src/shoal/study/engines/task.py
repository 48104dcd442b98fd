"""What an engine trains: a workload at one global batch, and the optimizer's numbers of each trial."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.study.engines.order import TrialOrder
from shoal.study.engines.update import Floats, Settings
from shoal.study.records import Trial
from shoal.study.schedule import linear_decay
from shoal.study.spec import CurveSpec, OptimizerName
from shoal.study.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Task:
    """One workload, optimizer and global batch.

    Args:
        workload: model, loss and training data.
        curve: the optimizer and its schedule.
        global_batch: samples per step, >= 1.
        device: that trains; the training data is moved there.

    Raises:
        UsageError: ``global_batch`` below 1.
    """

    workload: Workload
    curve: CurveSpec
    global_batch: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    inputs: Tensor = field(init=False, repr=False)
    targets: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UsageError(f"global_batch = {self.global_batch}; a step has at least 1 sample")
        x, y = self.workload.split("train")
        object.__setattr__(self, "inputs", x.to(self.device).contiguous())
        object.__setattr__(self, "targets", y.to(self.device).contiguous())

    @property
    def kind(self) -> OptimizerName:
        """The optimizer."""
        return self.curve.optimizer

    @property
    def decays(self) -> bool:
        """Whether any trial may have a weight decay other than 0."""
        space = self.curve.space_at(self.global_batch)
        given = self.curve.fixed.get("weight_decay", self.curve.defaults["weight_decay"])
        return "weight_decay" in space or given != 0

    def settings(self, trial: Trial) -> Settings:
        """The optimizer's numbers of a trial."""
        p = trial.parameters
        return Settings(
            lr=_Rates(self.curve.schedule, dict(p)),
            momentum=p.get("momentum", 0.0),
            weight_decay=p.get("weight_decay", 0.0),
            betas=(p.get("beta1", 0.0), p.get("beta2", 0.0)),
            eps=p.get("eps", 0.0),
        )

    def initial(self, seed: int) -> nn.Module:
        """The model with a trial's initial weights, in training mode; global generators stay as they were."""
        return self.workload.build(seed).to(self.device).train()

    def order(self, trial: Trial) -> TrialOrder:
        """The trial's batches."""
        return TrialOrder(seed=trial.seed, samples=len(self.inputs), global_batch=self.global_batch)

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that is trained: the mean over a batch."""
        return self.workload.loss(outputs, targets).mean()


@dataclass(frozen=True)
class _Rates:
    """A trial's learning rates by step."""

    schedule: str
    parameters: dict[str, float]

    def __call__(self, start: int, steps: int) -> Floats:
        lr = self.parameters["lr"]
        if self.schedule == "constant":
            return np.full(steps, lr)
        length, end = self.parameters["decay_steps"], self.parameters["end_factor"]
        return lr * np.array([linear_decay(t, length, end) for t in range(start, start + steps)])
