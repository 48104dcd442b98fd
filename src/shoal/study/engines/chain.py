"""A model read as a chain of plain layers, so that its gradients can be written out.

Found by tracing: a ``Sequential``, nested or not, or a module of one's own whose ``forward`` amounts to one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional

from shoal.study.engines.block import NotStackable

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer, and whether a ReLU follows; ``bias`` is None where it has none."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    relu: bool = False


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A two-dimensional convolution with zero padding, and whether a ReLU follows."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    relu: bool = False


@dataclass(frozen=True, kw_only=True)
class MaxPool:
    """A maximum over windows, and whether a ReLU follows."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    relu: bool = False


@dataclass(frozen=True, kw_only=True)
class Flatten:
    """All but the samples becomes one axis."""


Layer: TypeAlias = Linear | Convolution | MaxPool | Flatten

_RELU_CALLS: tuple[object, ...] = (torch.relu, functional.relu, "relu", "relu_")
_POOL_CALLS: tuple[object, ...] = (functional.max_pool2d, torch.max_pool2d)
_POOL_ARGUMENTS = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_FLATTEN_CALLS: tuple[object, ...] = (torch.flatten, "flatten")


def chain_of(model: nn.Module) -> list[Layer]:
    """The model's layers in order, each with the ReLU behind it.

    A maximum over windows of what a ReLU gives is taken before the ReLU, which comes to the same and
    leaves it less to do.

    Args:
        model: to be read.

    Raises:
        NotStackable: it holds anything else, branches, uses a layer twice, or cannot be traced.
    """
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # a user's forward may fail in any way under a tracer
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NotStackable(f"its forward cannot be traced: {reason[0]}") from error
    modules = dict(model.named_modules())
    nodes = list(graph.nodes)
    chain: list[Layer] = []
    previous = nodes[0]
    for node in nodes[1:]:
        if node.all_input_nodes != [previous] or len(previous.users) != 1:
            raise NotStackable(f"it is not a chain at {node.name}")
        previous = node
        if node.op == "output":
            break
        _take(chain, node, modules.get(str(node.target)) if node.op == "call_module" else None)
    _check(chain)
    return chain


def _check(chain: list[Layer]) -> None:
    """Images first, then, behind one flattening, what is linear."""
    names = [layer.weight for layer in chain if isinstance(layer, Linear | Convolution)]
    if len(set(names)) != len(names):
        raise NotStackable("it uses a layer twice")
    if not chain or not isinstance(chain[-1], Linear):
        raise NotStackable("it does not end with a linear layer")
    is_flat = [isinstance(layer, Linear) for layer in chain if not isinstance(layer, Flatten)]
    if is_flat != sorted(is_flat):
        raise NotStackable("it has an image layer behind a linear one")
    images = is_flat.count(False)
    if images:
        if images >= len(chain) or not isinstance(chain[images], Flatten):
            raise NotStackable("its linear layers act on images that were not flattened")
        if any(isinstance(layer, Flatten) for layer in chain[:images]):
            raise NotStackable("it flattens before an image layer")


def _take(chain: list[Layer], node: fx.Node, module: nn.Module | None) -> None:
    """Add what a node does to the chain."""
    prefix = str(node.target)
    if type(module) is nn.Linear:
        bias = None if module.bias is None else f"{prefix}.bias"
        chain.append(
            Linear(
                weight=f"{prefix}.weight",
                bias=bias,
                inputs=module.in_features,
                outputs=module.out_features,
            )
        )
    elif type(module) is nn.Conv2d:
        chain.append(_convolution(prefix, module))
    elif type(module) is nn.MaxPool2d and not module.ceil_mode and not module.return_indices:
        _take_pool(chain, module.kernel_size, module.stride, module.padding, module.dilation)
    elif node.target in _POOL_CALLS:
        given = dict(zip(_POOL_ARGUMENTS, node.args, strict=False)) | node.kwargs
        if given.get("ceil_mode") or given.get("return_indices"):
            raise NotStackable("it has max_pool2d with ceil_mode or return_indices")
        _take_pool(
            chain,
            given["kernel_size"],
            given.get("stride"),
            given.get("padding", 0),
            given.get("dilation", 1),
        )
    elif _flattens(node, module):
        chain.append(Flatten())
    elif type(module) is nn.Identity:
        pass
    elif _is_relu(node, module) and chain and not isinstance(chain[-1], Flatten):
        chain[-1] = replace(chain[-1], relu=True)
    else:
        what = (
            type(module).__name__
            if module is not None
            else getattr(node.target, "__name__", prefix)
        )
        raise NotStackable(
            f"it has {what}; only linear layers, plain convolutions, MaxPool2d, Flatten and ReLUs behind "
            "them are written out"
        )


def _convolution(prefix: str, module: nn.Conv2d) -> Convolution:
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise NotStackable(f"it has {module}; only plain convolutions are written out")
    return Convolution(
        weight=f"{prefix}.weight",
        bias=None if module.bias is None else f"{prefix}.bias",
        inputs=module.in_channels,
        outputs=module.out_channels,
        kernel=_pair(module.kernel_size),
        stride=_pair(module.stride),
        padding=_pair(module.padding),
        dilation=_pair(module.dilation),
    )


def _take_pool(
    chain: list[Layer], kernel: object, stride: object, padding: object, dilation: object
) -> None:
    relu = False
    if chain and isinstance(chain[-1], Convolution | MaxPool) and chain[-1].relu:
        relu, chain[-1] = True, replace(chain[-1], relu=False)
    chain.append(
        MaxPool(
            kernel=_pair(kernel),
            stride=_pair(kernel if stride is None else stride),
            padding=_pair(padding),
            dilation=_pair(dilation),
            relu=relu,
        )
    )


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    if type(module) is nn.Flatten:
        return (module.start_dim, module.end_dim) == (1, -1)
    return node.target in _FLATTEN_CALLS and node.args[1:] == (1,) and not node.kwargs


def _is_relu(node: fx.Node, module: nn.Module | None) -> bool:
    is_call = node.op in ("call_function", "call_method") and node.target in _RELU_CALLS
    return is_call or type(module) is nn.ReLU


def _pair(value: object) -> Pair:
    if isinstance(value, int):
        return (value, value)
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(v) is int for v in value):
        return (value[0], value[1])
    raise NotStackable(f"it has a layer with the size {value}; only numbers and pairs are read")
