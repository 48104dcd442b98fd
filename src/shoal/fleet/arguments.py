"""Checks of what users hand to a fleet: each error names the value, the rule and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shoal.errors import UsageError
from shoal.scaling import Rule


def check_init(model: object, optimizer: object, unknown: Mapping[str, Any]) -> None:
    """Refuse what :func:`shoal.init` cannot work with.

    Raises:
        UsageError: no module, an uninitialised one, no optimizer or several, an optimizer that needs
            several gradients a step or holds foreign tensors, an unknown argument.
    """
    if "batch_size" in unknown:
        raise UsageError(
            f"batch_size = {unknown['batch_size']}; shoal tells apart local_batch (samples per worker and "
            "step), micro_batch (per forward pass) and the global batch; pass local_batch= to "
            "fleet.batches and reference_batch= to the scaling rule"
        )
    if unknown:
        raise UsageError(f"init({', '.join(unknown)}): no such argument; see help(shoal.init)")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model = {type(model).__name__}; it is a torch.nn.Module")
    lazy = [n for n, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise UsageError(
            f"model = one whose parameter {lazy[0]} has no shape yet; gradients need their place before "
            "the first step; run one batch through the model before shoal.init"
        )
    if isinstance(optimizer, list | tuple | dict):
        raise UsageError(
            f"optimizer = {len(optimizer)} of them; shoal drives one optimizer, because a step is one "
            "commit; put all parameters into one optimizer as parameter groups"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer = {type(optimizer).__name__}; it is a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "optimizer = LBFGS; it asks for several gradients in one step, and a fleet's step has one; "
            "use SGD, Adam or AdamW"
        )
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in own for p in held)
    if strangers:
        raise UsageError(
            f"optimizer = holds {strangers} tensor(s) that are not parameters of the model; their gradients "
            "would not be exchanged; build the optimizer from model.parameters()"
        )


def check_rule(rule: Rule[Any]) -> Rule[Any]:
    """The rule itself; a class in place of an instance is a usual slip.

    Raises:
        UsageError: ``rule`` is a class.
    """
    if isinstance(rule, type):
        raise UsageError(
            f"scaling = the class {rule.__name__}; a rule is an instance; "
            f"write scaling=shoal.scaling.{rule.__name__}(...)"
        )
    return rule


def check_sizes(
    local_batch: int | None, micro_batch: int | None, unknown: Mapping[str, Any]
) -> tuple[int, int]:
    """Samples per worker and step, and per forward pass.

    Raises:
        UsageError: one is missing, no whole number or out of range; an unknown argument.
    """
    if "batch_size" in unknown:
        raise UsageError(
            f"batch_size = {unknown['batch_size']}; shoal tells apart local_batch (samples per worker "
            "and step), micro_batch (per forward pass) and the global batch; pass local_batch="
        )
    if unknown:
        raise UsageError(
            f"batches({', '.join(unknown)}): no such argument; see help(shoal.Fleet.batches)"
        )
    if not isinstance(local_batch, int) or local_batch < 1:
        raise UsageError(
            f"local_batch = {local_batch}; each worker needs a whole number of at least 1 sample a step; "
            "pass local_batch="
        )
    micro = local_batch if micro_batch is None else micro_batch
    if not isinstance(micro, int) or not 1 <= micro <= local_batch:
        raise UsageError(
            f"micro_batch = {micro}; it is a whole number between 1 and local_batch = {local_batch}; pass "
            "a smaller one to save memory, or leave it out"
        )
    return local_batch, micro


def check_loss(loss: Tensor, reduction: str) -> None:
    """Refuse a loss per sample and an unknown reduction.

    Raises:
        UsageError: as said.
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"loss = {what}; backward needs a scalar tensor; take the mean over the batch"
        )
    if reduction not in ("mean", "sum"):
        raise UsageError(
            f'reduction = {reduction!r}; known are "mean" and "sum"; say which one the loss is'
        )


def check_chunk(local_batch: int) -> int:
    """Samples per chunk of an evaluation.

    Raises:
        UsageError: no whole number, or below 1.
    """
    if not isinstance(local_batch, int) or local_batch < 1:
        raise UsageError(
            f"local_batch = {local_batch}; a chunk has a whole number of at least 1 sample; "
            "pass local_batch=256 or leave it out"
        )
    return local_batch
