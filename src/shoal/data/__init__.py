"""Data: which sample comes when, who reads it, and reading it."""

from .cursor import epoch_end, epoch_of, offset_of, step_span, steps_left
from .digits import Digits, load_digits
from .draws import Draws
from .fashion_mnist import FashionMnist, fetch_fashion_mnist, load_fashion_mnist
from .image_tasks import ImageTask, image_task
from .order import Order, order
from .randomness import sample_generator, sample_seed
from .shares import MicroBatch, share, shares

__all__ = [
    "Digits",
    "Draws",
    "FashionMnist",
    "ImageTask",
    "MicroBatch",
    "Order",
    "epoch_end",
    "epoch_of",
    "fetch_fashion_mnist",
    "image_task",
    "load_digits",
    "load_fashion_mnist",
    "offset_of",
    "order",
    "sample_generator",
    "sample_seed",
    "share",
    "shares",
    "step_span",
    "steps_left",
]
