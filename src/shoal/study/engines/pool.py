"""The plain loop: one model and one ``torch.optim`` optimizer per trial, one trial after another.

The reference that every other engine is held to, and the fallback for what they cannot train. Several
runner processes with one thread each make the pool; inside one process nothing runs side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.study.engines.contract import SavedTrial
from shoal.study.engines.held import Held, HeldTrials
from shoal.study.engines.task import Task
from shoal.study.engines.update import SLOTS, Settings
from shoal.study.records import Trial
from shoal.study.spec import OptimizerName

_TORCH_SLOTS = {"momentum": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq"}
_PLANNED_STEPS = 256


class PoolEngine(HeldTrials):
    """Trains trials one by one with the plain eager loop.

    Args:
        task: what to train.
    """

    name = "pool"

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        self._models: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._draws: bool | None = None

    def admit(self, trial: Trial, saved: SavedTrial | None = None) -> None:
        """Take a trial in; see the contract."""
        held = self._hold(trial, saved, self._task)
        model = self._task.initial(trial.seed)
        optimizer = torch_optimizer(self._task.kind, held.settings, model)
        if saved is not None:
            _restore(model, optimizer, saved, self._task.kind)
        self._models[trial.id], self._optimizers[trial.id] = model, optimizer

    def advance(self, targets: Mapping[int, int]) -> None:
        """Train trials to the given steps; see the contract."""
        for number, target in targets.items():
            held = self._held[number]
            if held.step < target:
                held.begin()
                while held.step < target:
                    self._run(held, min(target - held.step, _PLANNED_STEPS))

    def _run(self, held: Held, steps: int) -> None:
        task, number = self._task, held.trial.id
        model, optimizer = self._models[number], self._optimizers[number]
        samples = torch.from_numpy(held.order.take(held.step, steps)).to(task.inputs.device)
        rates = held.settings.lr(held.step, steps).tolist()
        losses: list[Tensor] = []
        for step, (rows, rate) in enumerate(zip(samples.unbind(0), rates, strict=True), held.step):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            x, y = task.inputs.index_select(0, rows), task.targets.index_select(0, rows)
            loss = self._loss(model, x, y, held.trial.seed, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        held.record(torch.stack(losses).tolist())

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor, seed: int, step: int) -> Tensor:
        """The step's loss; a model that draws (dropout) draws from a generator set by seed and step."""
        if self._draws is None:
            before = torch.get_rng_state()
            with torch.no_grad():
                copies = {name: b.clone() for name, b in model.named_buffers()}
                torch.func.functional_call(model, copies, (x,))
            self._draws = not torch.equal(before, torch.get_rng_state())
            torch.set_rng_state(before)
        if not self._draws:
            return self._task.mean_loss(model(x), y)
        with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
            torch.manual_seed((seed * 0x9E3779B97F4A7C15 + step) % 2**63)
            return self._task.mean_loss(model(x), y)

    def weights(self, trial: int) -> Mapping[str, Tensor]:
        """Parameters and buffers by name; see the contract."""
        model = self._models[trial]
        return {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}

    def save(self, trial: int) -> SavedTrial:
        """A copy of everything; see the contract."""
        model, optimizer = self._models[trial], self._optimizers[trial]
        tensors = {f"p/{n}": p.detach() for n, p in model.named_parameters()}
        tensors |= {f"b/{n}": b for n, b in model.named_buffers()}
        for name, parameter in model.named_parameters():
            for slot in SLOTS[self._task.kind]:
                kept = optimizer.state[parameter].get(_TORCH_SLOTS[slot])
                kept = torch.zeros_like(parameter) if kept is None else kept
                tensors[f"o/{slot}/{name}"] = kept
        return self._held[trial].saved(tensors)

    def release(self, trial: int) -> None:
        """Forget a trial."""
        del self._held[trial], self._models[trial], self._optimizers[trial]

    def portions(self, trials: Sequence[int]) -> Sequence[Sequence[int]]:
        """Trials that are best advanced in one call: here each on its own."""
        return [[number] for number in trials]


def torch_optimizer(
    kind: OptimizerName, settings: Settings, model: nn.Module
) -> torch.optim.Optimizer:
    """The optimizer a user's own script would have, with torch's fused kernels: its quickest on a CPU too."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = all(p.is_floating_point() for p in parameters)
    if kind == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=1.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=fused,
        )
    momentum = 0.0 if kind == "sgd" else settings.momentum
    return torch.optim.SGD(
        parameters,
        lr=1.0,
        momentum=momentum,
        weight_decay=settings.weight_decay,
        nesterov=kind == "nesterov" and momentum > 0,
        fused=fused,
    )


@torch.no_grad()
def _restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedTrial, kind: OptimizerName
) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(saved.tensors[f"p/{name}"])
        if saved.step == 0 or not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        for slot in SLOTS[kind]:
            state[_TORCH_SLOTS[slot]] = saved.tensors[f"o/{slot}/{name}"].to(
                parameter.device, copy=True
            )
        if kind == "adamw":
            state["step"] = torch.tensor(float(saved.step), device=parameter.device)
    for name, buffer in model.named_buffers():
        buffer.copy_(saved.tensors[f"b/{name}"])
