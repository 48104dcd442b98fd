"""What a study trains: a model, a loss, metrics and data, everything measured per sample.

Per sample, because a trial's evaluation may then stop as soon as its result is decided, outcomes can be
resampled jointly over batch sizes, and the loss of a step is the plain mean over whatever batch is asked.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import UsageError
from shoal.workloads.study_ghost_norm import GhostBatchNorm
from shoal.workloads.users_code import users_code

Split: TypeAlias = tuple[Tensor, Tensor]
"""Inputs [n, ...] and targets [n, ...] of the same samples."""

PerSample: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) of B samples -> one value for each, shape [B]."""

SPLITS = ("train", "val", "test")
_PROBE_SAMPLES = 2


class MapDataset(Protocol):
    """What is taken for a data set: a length, and (input, target) at every index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[object, object]: ...


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of each sample.

    Args:
        output: logits, shape (samples, classes).
        target: classes, int64, shape (samples,).

    Returns:
        Shape (samples,), >= 0.
    """
    return nn.functional.cross_entropy(output, target, reduction="none")


def classification_error(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest logit is not the target's, else 0; shapes as :func:`cross_entropy`."""
    return (output.argmax(1) != target).to(output.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A model to train and how to judge it; what is tuned and the batch size are not part of it.

    Compare two of them by :attr:`fingerprint`.

    Args:
        name: of the workload; part of its fingerprint.
        model: makes a fresh model. It is called after ``torch.manual_seed`` with the global generator
            forked, so it may draw its weights in any way. The model gets batches of ``x`` and gives
            what ``loss`` and ``metrics`` take.
        loss: (output, target) -> loss of each sample, shape [B]; training minimises its mean over the
            step's batch.
        train: ``(x, y)`` tensors, or a map data set, which is read whole into tensors once.
        val: the same; goals and selection use it.
        test: the same; measured beside, never selected on. None when there is none.
        metrics: by name, each (output, target) -> non-negative values of shape [B], of which the mean is
            reported; the smaller the better. The default is the loss, as ``cross_entropy_error`` beside
            ``classification_error`` when it is :func:`cross_entropy`, else as ``loss``.
        allow_batch_norm: go on with BatchNorm in the model although its statistics, and with them the
            objective, change with the batch size.

    Raises:
        UsageError: splits or shapes that do not fit; a loss or metric that is not per sample.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: PerSample
    train: Split | MapDataset
    val: Split | MapDataset
    test: Split | MapDataset | None = None
    metrics: Mapping[str, PerSample] = field(default_factory=dict[str, PerSample])
    allow_batch_norm: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("workload.name = ''; results are stored under it; give it a name")
        for name in SPLITS:
            given: Split | MapDataset | None = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, materialised(given, f"workload.{name}"))
        self._check_splits()
        object.__setattr__(self, "metrics", dict(self.metrics) or self._default_metrics())
        for name in self.metrics:
            if not name or "/" in name:
                raise UsageError(
                    f"workload.metrics = {name!r}; shoal puts the split before it (val/{name or 'error'}); "
                    "give a name without a slash"
                )
        self._check_functions()

    def split(self, name: str) -> Split:
        """``(x, y)`` of ``"train"``, ``"val"`` or ``"test"``.

        Raises:
            UsageError: another name, or this workload has no test split.
        """
        data: Split | None = getattr(self, name) if name in SPLITS else None  # pyright: ignore
        if data is None:
            have = ", ".join(split for split in SPLITS if getattr(self, split) is not None)
            raise UsageError(f"split = {name!r}; the workload {self.name} has {have}")
        return data

    def samples(self, name: str) -> int:
        """How many samples a split has."""
        return len(self.split(name)[0])

    def build(self, seed: int) -> nn.Module:
        """A fresh model whose weights are a function of ``seed``; torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            # What torch.manual_seed does, which takes milliseconds to look for devices.
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)
            return self.model()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over name, data, architecture, and the source of the model's classes and functions.

        It changes with anything that changes what a trial of this workload would measure, and also with
        comments in that source: shoal cannot tell these apart. Source that cannot be read (typed at a
        prompt) counts by its name.
        """
        digest = hashlib.sha256()
        for part in [self.name, *_model_facts(self.build(0), self.model)]:
            digest.update(part.encode() + b"\0")
        for name, function in {"loss": self.loss, **self.metrics}.items():
            digest.update(f"{name}\0{source_of(function)}\0".encode())
        for name in SPLITS:
            if getattr(self, name) is not None:
                for tensor in self.split(name):
                    digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
                    flat = tensor.detach().cpu().contiguous().view(-1)
                    digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def check_batches(
        self, global_batches: Sequence[int], *, allow_batch_norm: bool = False
    ) -> None:
        """Refuse batch sizes that this workload cannot be trained with.

        Args:
            global_batches: the sizes, >= 1.
            allow_batch_norm: as the field; either is enough.

        Raises:
            UsageError: a batch larger than the training data; BatchNorm in the model that was not
                allowed; ghost normalisation whose size does not divide a batch.
        """
        count = self.samples("train")
        for batch in global_batches:
            if batch > count:
                raise UsageError(
                    f"global_batches = {batch}; the training data of {self.name} has {count} samples, and a "
                    f"batch draws each at most once; use at most {count}"
                )
        model = self.build(0)
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and not (allow_batch_norm or self.allow_batch_norm):
                raise UsageError(
                    f"model = has batch normalisation ({name or 'the model itself'}: "
                    f"{type(module).__name__}); its statistics are those of the batch, so every batch size "
                    "trains another objective and steps cannot be compared; normalise in groups of a fixed "
                    "size with shoal.study.ghost_batch_norm(model, ghost_batch=32), or set "
                    "allow_batch_norm = true to go on all the same"
                )
            if isinstance(module, GhostBatchNorm):
                size = module.ghost_batch
                odd = [batch for batch in global_batches if batch % size]
                if odd:
                    raise UsageError(
                        f"global_batches = {odd}; the model normalises in groups of ghost_batch = {size} "
                        f"samples, which must divide every batch; use multiples of {size} or a smaller "
                        "ghost_batch"
                    )

    def _default_metrics(self) -> dict[str, PerSample]:
        if self.loss is cross_entropy:
            return {
                "classification_error": classification_error,
                "cross_entropy_error": cross_entropy,
            }
        return {"loss": self.loss}

    def _check_splits(self) -> None:
        shape, dtype = self.split("train")[0].shape[1:], self.split("train")[0].dtype
        for name in SPLITS:
            if getattr(self, name) is None:
                continue
            x, y = self.split(name)
            if len(x) != len(y) or len(x) == 0:
                raise UsageError(
                    f"workload.{name} = {len(x)} inputs, {len(y)} targets; every sample has one of each and "
                    "there is at least one"
                )
            if x.shape[1:] != shape or x.dtype != dtype:
                raise UsageError(
                    f"workload.{name} = inputs of shape {tuple(x.shape[1:])}, {x.dtype}; those of train are "
                    f"{tuple(shape)}, {dtype}; prepare all splits alike"
                )

    def _check_functions(self) -> None:
        x, y = self.split("train")
        rows = torch.arange(_PROBE_SAMPLES) % len(x)
        with users_code("workload.model"):
            model = self.build(0).eval()
        if not any(p.requires_grad for p in model.parameters()):
            raise UsageError(
                "workload.model = a model without trainable parameters; a study trains them; give one"
            )
        with torch.no_grad():
            with users_code("workload.model, called with a batch of x,"):
                output = model(x[rows])
            with users_code("workload.loss"):
                loss = self.loss(output, y[rows])
            _check_per_sample("loss", loss)
            for name, metric in self.metrics.items():
                with users_code(f"workload.metrics[{name!r}]"):
                    values = metric(output, y[rows])
                _check_per_sample(f"metrics[{name!r}]", values)
                if bool((values < 0).any()):
                    raise UsageError(
                        f"workload.metrics[{name!r}] = {values.min():g} for a sample; a metric is an error, "
                        "never negative, so that an evaluation may stop early; measure 1 - accuracy instead "
                        "of accuracy"
                    )


def materialised(data: Split | MapDataset, name: str = "data") -> Split:
    """``(x, y)`` tensors of a split that is either that already or a map data set.

    Args:
        data: as :class:`Workload` takes it.
        name: for error messages.

    Returns:
        The tensors themselves when given; otherwise new ones, numbers as float32 or int64 by kind.

    Raises:
        UsageError: it is neither, or its samples differ in shape.
    """
    if isinstance(data, tuple):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            raise UsageError(
                f"{name} = a tuple of {len(data)}; a split is (x, y), two tensors; give these or a map "
                "data set"
            )
        return data
    try:
        pairs = [data[index] for index in range(len(data))]
        columns = [torch.stack([torch.as_tensor(p[c]) for p in pairs]) for c in (0, 1)]
    except Exception as error:  # The data set is the user's code and may raise anything.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{name} = {type(data).__name__}, which cannot be read as (input, target) tensors of one shape "
            f"({reason}); give (x, y) tensors or a map data set with a fixed transform"
        ) from error
    x, y = (c.float() if c.dtype == torch.float64 else c for c in columns)
    return x, y


def source_of(thing: object) -> str:
    """Source text of a function or class with line ends trimmed; its name where there is none."""
    try:
        text = inspect.getsource(thing)  # pyright: ignore[reportArgumentType]
    except (OSError, TypeError):
        module = getattr(thing, "__module__", type(thing).__module__)
        return f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    lines = [line.rstrip() for line in inspect.cleandoc(text).splitlines()]
    return "\n".join([*lines, *_enclosed(thing)])


def _enclosed(thing: object) -> list[str]:
    """Plain values and functions that a function takes from the function around it."""
    code, cells = getattr(thing, "__code__", None), getattr(thing, "__closure__", None) or ()
    facts = []
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=True):
        try:
            value: object = cell.cell_contents
        except ValueError:  # Of a variable that was never set.
            continue
        if inspect.isfunction(value):
            facts += [] if value is thing else [f"{name} = {source_of(value)}"]
        elif _is_plain(value):
            facts.append(f"{name} = {value!r}")
        elif isinstance(value, list | tuple):
            entries = cast(Sequence[object], value)
            facts += [f"{name} = {_element(entry)}" for entry in entries]
    return facts


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(entry) for entry in cast(Sequence[object], value))
    return isinstance(value, int | float | str | None)


def _element(value: object) -> str:
    """What says the same in every process: nothing with an address in it."""
    if _is_plain(value):
        return repr(value)
    if inspect.isfunction(value) or inspect.isclass(value):
        return source_of(value)
    return type(value).__qualname__


def _model_facts(model: nn.Module, factory: object) -> list[str]:
    """What decides the model: its printed structure, its state's shapes, the source of its own classes."""
    facts = [repr(model), source_of(factory)]
    for name, tensor in model.state_dict().items():
        facts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
    own = {type(m) for m in model.modules() if not type(m).__module__.startswith("torch.")}
    facts += [source_of(kind) for kind in sorted(own, key=lambda k: k.__qualname__)]
    return facts


def _check_per_sample(name: str, values: object) -> None:
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape == (_PROBE_SAMPLES,):
        return
    hint = (
        "a single number is the mean (or sum) already; use reduction='none'"
        if shape == ()
        else "reduce everything but the sample axis, for example values.flatten(1).mean(1)"
    )
    raise UsageError(
        f"workload.{name} = a result of shape {shape} for {_PROBE_SAMPLES} samples; it is needed per sample, "
        f"shape ({_PROBE_SAMPLES},); {hint}"
    )
