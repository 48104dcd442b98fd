"""How the learning rate follows the global batch (scaling rules) and progress (schedules)."""

from shoal.scaling import schedules
from shoal.scaling.adascale import AdaScale
from shoal.scaling.contract import At, GradientNoise, Rule, optimizer_kind
from shoal.scaling.dynamic import Dynamic, noise_matched_steps
from shoal.scaling.learning_rate import LearningRate, StepRate
from shoal.scaling.legw import Legw
from shoal.scaling.linear import Linear
from shoal.scaling.momentum import buffer_step, velocity_step
from shoal.scaling.noise_matched import NoiseMatched
from shoal.scaling.schedules import Schedule
from shoal.scaling.square_root import SquareRoot
from shoal.scaling.suitability import check_optimizer, check_range
from shoal.scaling.table import RULES, ShippedRule, by_name
from shoal.scaling.unscaled import Unscaled

__all__ = [
    "RULES",
    "AdaScale",
    "At",
    "Dynamic",
    "GradientNoise",
    "LearningRate",
    "Legw",
    "Linear",
    "NoiseMatched",
    "Rule",
    "Schedule",
    "ShippedRule",
    "SquareRoot",
    "StepRate",
    "Unscaled",
    "buffer_step",
    "by_name",
    "check_optimizer",
    "check_range",
    "noise_matched_steps",
    "optimizer_kind",
    "schedules",
    "velocity_step",
]
