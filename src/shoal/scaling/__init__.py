"""How the learning rate follows the global batch (scaling rules) and progress (schedules)."""

from shoal.scaling import schedules
from shoal.scaling.contract import At, GradientNoise, Rule, optimizer_kind
from shoal.scaling.dynamic import Dynamic, noise_matched_steps
from shoal.scaling.learning_rate import LearningRate, StepRate
from shoal.scaling.linear import Linear
from shoal.scaling.schedules import Schedule
from shoal.scaling.square_root import SquareRoot
from shoal.scaling.unscaled import Unscaled

__all__ = [
    "At",
    "Dynamic",
    "GradientNoise",
    "LearningRate",
    "Linear",
    "Rule",
    "Schedule",
    "SquareRoot",
    "StepRate",
    "Unscaled",
    "noise_matched_steps",
    "optimizer_kind",
    "schedules",
]
