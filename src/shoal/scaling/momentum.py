"""Momentum SGD in its two forms: PyTorch's buffer form, and the velocity form of Keras.

Not used in training (torch's optimizers are); these pure functions state what the rules assume, and
the tests hold both forms and ``torch.optim.SGD`` against each other over runs with changes.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Value = TypeVar("Value", float, Tensor)


def buffer_step(
    weights: Value,
    buffer: Value,
    gradient: Value,
    *,
    lr: float,
    momentum: float,
    momentum_factor: float = 1.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[Value, Value]:
    """One step of buffer form (u-form): the learning rate multiplies the whole buffer.

    ``u' = mu f u + g``, ``w' = w - lr u'``; with Nesterov ``w' = w - lr (g + mu u')``. Symbols: u
    -> ``buffer``, mu -> ``momentum``, f -> ``momentum_factor``, g -> ``gradient`` +
    ``weight_decay`` w.

    Args:
        weights: w, of any shape.
        buffer: u, of the same shape; zeros at the start.
        gradient: of the same shape, without the weight decay.
        lr: the learning rate of this step, multiplier included.
        momentum: mu in [0, 1).
        momentum_factor: what a rule's ``momentum_factor`` gives; 1 leaves the buffer alone.
        nesterov: whether the gradient is taken at the point looked ahead to.
        weight_decay: coupled decay, added to the gradient.

    Returns:
        (new weights, new buffer), new values.

    Source: arXiv 1904.12043, eq. 3.
    """
    slope = gradient + weight_decay * weights
    new_buffer = momentum * momentum_factor * buffer + slope
    direction = slope + momentum * new_buffer if nesterov else new_buffer
    return weights - lr * direction, new_buffer


def velocity_step(
    weights: Value,
    velocity: Value,
    gradient: Value,
    *,
    lr: float,
    momentum: float,
    lr_ratio: float = 1.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[Value, Value]:
    """One step of velocity form (v-form): the learning rate is inside the velocity.

    ``v' = mu c v + lr g``, ``w' = w - v'``; with Nesterov ``w' = w - (lr g + mu v')``. Symbols: v
    -> ``velocity``, mu -> ``momentum``, c -> ``lr_ratio``, g -> ``gradient`` + ``weight_decay`` w.

    Args:
        weights: w, of any shape.
        velocity: v, of the same shape; zeros at the start.
        gradient: of the same shape, without the weight decay.
        lr: the learning rate of this step, multiplier included.
        momentum: mu in [0, 1).
        lr_ratio: with momentum correction, this step's learning rate over the last one's, which
            makes the form equal to :func:`buffer_step`; 1 for none.
        nesterov: whether the gradient is taken at the point looked ahead to.
        weight_decay: coupled decay, added to the gradient.

    Returns:
        (new weights, new velocity), new values.

    Source: arXiv 1904.12043, eq. 4 and 5; correction: Goyal et al. 2017, remark 2.
    """
    slope = gradient + weight_decay * weights
    new_velocity = momentum * lr_ratio * velocity + lr * slope
    change = lr * slope + momentum * new_velocity if nesterov else new_velocity
    return weights - change, new_velocity
