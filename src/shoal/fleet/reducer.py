"""Flat gradient buckets, reduced while backward is still running.

The first gradient a step brings for a parameter is moved into its bucket, later ones are added there;
so nothing has to be zeroed but the places of parameters that this worker did not use. Buckets hold
parameters in reverse order of registration, the order in which backward fills them; each is sent as
soon as it is full, always in bucket order, the last one after backward has ended. The exchange's header
(sample count, loss, flags, statistics) rides at the end of the last bucket. A worker without samples
sends the same buckets, all zero, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ExchangeFailed, UsageError
from shoal.world.contract import Work

AllReduceCall = Callable[[Tensor], Work]


@dataclass
class Bucket:
    """One flat tensor and the parameters whose gradients live in it; ``indices`` count all of them."""

    flat: Tensor
    size: int
    parameters: list[nn.Parameter]
    indices: list[int]
    views: list[Tensor]


class Reducer:
    """Owns the gradients of one model.

    Args:
        parameters: the parameters to train, on one device, floating point, dense.
        bucket_bytes: size at which a bucket is closed.
        all_reduce: sums a tensor over the fleet in place, in the background.

    Raises:
        UsageError: no parameter requires a gradient, or they lie on several devices.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, bucket_bytes: int, all_reduce: AllReduceCall
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise UsageError("model = no parameter requires a gradient; there is nothing to train")
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise UsageError(
                f"model = parameters on {sorted(map(str, devices))}; a worker holds its replica on "
                "one device; move the model to one device before shoal.init"
            )
        self.device = self.parameters[0].device
        self._all_reduce = all_reduce
        self._overlap = True
        self._collecting = False
        self._last = False
        self._next = 0
        self._works: list[Work] = []
        self._header_slots = 0
        self.header = torch.zeros(0, device=self.device)
        self._header_array: Any = None
        self.used = [False] * len(self.parameters)
        self._filled = [False] * len(self.parameters)
        self.buckets = _cut(self.parameters, bucket_bytes)
        self._waiting: list[int] = []
        self._seen: set[int] = set()
        self._late: list[tuple[int, int]] = []
        self._versions: list[int] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(hook, i, b, v))
            for b, bucket in enumerate(self.buckets)
            for v, (i, parameter) in enumerate(zip(bucket.indices, bucket.parameters, strict=True))
            for hook in [self._came_late if bucket is self.buckets[-1] else self._accumulated]
        ]
        self._point_gradients()

    def begin(self, header_slots: int, *, overlap: bool = True) -> None:
        """Start a step: forget gradients, header and reductions of an earlier one.

        Args:
            header_slots: float32 numbers that travel beside the gradients.
            overlap: whether buckets may be sent during backward. Otherwise they hold the sum of the
                gradients so far at any time, zeros included, for those who look at it.
        """
        if header_slots != self._header_slots:
            self._resize_header(header_slots)
        self._overlap = overlap
        self._works = []
        self._next = 0
        self.used = [False] * len(self.parameters)
        if overlap:
            self.header.zero_()
            for parameter in self.parameters:
                parameter.grad = None
        else:
            for bucket in self.buckets:
                bucket.flat.zero_()
            if self._header_apart:
                self.header.zero_()
            self._point_gradients()
        self._filled = [not overlap] * len(self.parameters)
        self._versions = []

    @contextmanager
    def collecting(self, *, last: bool) -> Iterator[None]:
        """Around one backward pass. During the ``last`` of a step full buckets are sent at once.

        Raises:
            UsageError: somebody changed the gradients since the micro-batch before.
        """
        if self._versions and self._versions != [b.flat._version for b in self.buckets]:
            raise UsageError(
                "gradients = changed between two micro-batches of a step, by "
                "zero_grad(set_to_none=False) perhaps; what the first ones added would be lost; leave "
                "zeroing to fleet.step()"
            )
        self._collecting, self._last = True, last
        self._waiting = [len(bucket.parameters) for bucket in self.buckets]
        self._seen.clear()
        self._late = []
        try:
            yield
        finally:
            self._collecting = False
        self._take_late()

    def seal(self) -> None:
        """Until the next micro-batch, or the end of the exchange, nobody else may change the gradients."""
        self._versions = [b.flat._version for b in self.buckets]

    def check_seal(self) -> None:
        """Make sure that nobody changed the gradients since they were sent, and own them again.

        Raises:
            UsageError: somebody did, so workers may have different sums.
        """
        if self._versions and self._versions != [b.flat._version for b in self.buckets]:
            raise UsageError(
                "gradients = changed between fleet.backward() and fleet.step(), while the fleet sums them; "
                "to clip, call fleet.clip_grad_norm_ instead of torch.nn.utils.clip_grad_norm_; leave "
                "zeroing to fleet.step()"
            )
        self._versions = []
        # A zero_grad() left in the loop took gradients off parameters that this worker did not use.
        self._point_gradients()

    def write_header(self, values: Sequence[float]) -> None:
        """Write the first slots of the header; on the CPU without the detour over a tensor."""
        if self._header_array is not None:
            self._header_array[: len(values)] = values
        else:
            self.header[: len(values)].copy_(torch.tensor(values, dtype=torch.float32))

    def send_rest(self) -> None:
        """Send every bucket that has not been sent, in order; the header must be filled by now."""
        while self._next < len(self.buckets):
            self._send_next()
        if self._header_apart:
            self._works.append(self._all_reduce(self.header))

    def send(self, tensor: Tensor) -> None:
        """Sum one more tensor within this exchange."""
        self._works.append(self._all_reduce(tensor))

    def wait(self) -> None:
        """Wait for all reductions of the step.

        Raises:
            ExchangeFailed: a peer was lost; every reduction has ended by then.
        """
        failure: ExchangeFailed | None = None
        for work in self._works:
            try:
                work.wait()
            except ExchangeFailed as error:
                failure = error
        self._works = []
        if failure is not None:
            raise failure

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.flat[: bucket.size].mul_(factor)

    def square_norm(self) -> float:
        """The squared norm of all gradients together, in float64."""
        return sum(
            float(torch.linalg.vector_norm(b.flat[: b.size], dtype=torch.float64)) ** 2
            for b in self.buckets
        )

    @contextmanager
    def only_used(self, used: Sequence[bool]) -> Iterator[None]:
        """Hide gradients of parameters no worker used, so that the optimizer leaves those alone."""
        for parameter, was_used in zip(self.parameters, used, strict=True):
            if not was_used:
                parameter.grad = None
        try:
            yield
        finally:
            self._point_gradients()

    def close(self) -> None:
        """Remove the hooks; gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def _header_apart(self) -> bool:
        return self.buckets[-1].flat.dtype != torch.float32

    def _resize_header(self, slots: int) -> None:
        self._header_slots = slots
        last = self.buckets[-1]
        if self._header_apart:
            self.header = torch.zeros(slots, device=self.device)
        else:
            last.flat = torch.zeros(last.size + slots, dtype=last.flat.dtype, device=self.device)
            last.views = _views(last.flat, last.parameters)
            self.header = last.flat[last.size :]
        self._header_array = self.header.numpy() if self.device.type == "cpu" else None

    def _point_gradients(self) -> None:
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view

    def _accumulated(self, i: int, b: int, v: int, parameter: Tensor) -> None:
        """The gradient of parameter ``i``, the ``v``-th of bucket ``b``, is there."""
        self._check_collecting()
        view = self.buckets[b].views[v]
        gradient = parameter.grad
        if gradient is not view:
            # The step's first for this parameter, or one after the loop's own zero_grad().
            assert gradient is not None
            if self._filled[i]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            parameter.grad = view
        self.used[i] = self._filled[i] = True
        if not self._last or not self._overlap:
            return
        self._check_once(i, under_way=b < self._next)
        self._waiting[b] -= 1
        while self._next < len(self.buckets) - 1 and self._waiting[self._next] == 0:
            self._send_next()

    def _came_late(self, i: int, b: int, v: int, parameter: Tensor) -> None:
        """As above in the last bucket, which waits for the end of backward anyway."""
        self._check_collecting()
        self.used[i] = True
        self._late.append((i, v))
        if self._last and self._overlap:
            self._check_once(i, under_way=False)

    def _take_late(self) -> None:
        """Move the last bucket's gradients there, all at once: a copy each is what a small model feels."""
        bucket = self.buckets[-1]
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        for i, v in self._late:
            parameter, view = bucket.parameters[v], bucket.views[v]
            gradient = parameter.grad
            if gradient is view or gradient is None:
                continue
            if self._filled[i]:
                view.add_(gradient)
            else:
                views.append(view)
                gradients.append(gradient)
            parameter.grad = view
            self._filled[i] = True
        if views:
            torch._foreach_copy_(views, gradients)  # pyright: ignore - what torch.optim uses

    def _check_once(self, i: int, *, under_way: bool) -> None:
        if under_way or i in self._seen:
            raise UsageError(
                "loss.backward() brings a parameter's gradient in several parts (reentrant activation "
                "checkpointing does); its bucket may be under way already; use use_reentrant=False"
            )
        self._seen.add(i)

    def _check_collecting(self) -> None:
        if not self._collecting:
            raise UsageError(
                "loss.backward() was called beside the fleet; the gradient would be counted twice "
                "or not exchanged; call fleet.backward(loss) instead"
            )

    def _send_next(self) -> None:
        bucket = self.buckets[self._next]
        for i, view in zip(bucket.indices, bucket.views, strict=True):
            if not self._filled[i]:
                view.zero_()
        self._works.append(self._all_reduce(bucket.flat))
        self._next += 1


def _cut(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    groups: list[list[int]] = []
    filled = 0
    for i in reversed(range(len(parameters))):
        parameter = parameters[i]
        size = parameter.numel() * parameter.element_size()
        fresh = (
            not groups
            or parameters[groups[-1][0]].dtype != parameter.dtype
            or filled + size > bucket_bytes
        )
        if fresh:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += size
    buckets = []
    for indices in groups:
        group = [parameters[i] for i in indices]
        size = sum(p.numel() for p in group)
        flat = torch.zeros(size, dtype=group[0].dtype, device=group[0].device)
        views = _views(flat, group)
        buckets.append(Bucket(flat=flat, size=size, parameters=group, indices=indices, views=views))
    return buckets


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    views, start = [], 0
    for parameter in parameters:
        views.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start += parameter.numel()
    return views
