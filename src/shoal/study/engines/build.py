"""The engines by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shoal.errors import UsageError
from shoal.study.engines.block import Layout
from shoal.study.engines.contract import Engine
from shoal.study.engines.layers import LayersProgram
from shoal.study.engines.pool import PoolEngine
from shoal.study.engines.stack import StackEngine
from shoal.study.engines.task import Task
from shoal.study.engines.vmap import VmapProgram

EngineName = Literal["pool", "vmap", "layers"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine and the size of its stacks.

    Args:
        engine: by name.
        slots: trials side by side, >= 1; 1 for ``pool``.
        sizes: numbers of rows that a call may take, rising to ``slots``; only ``slots`` when empty.

    Raises:
        UsageError: no engine of that name.
    """

    engine: EngineName
    slots: int = 1
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineName):
            raise UsageError(
                f"engine = {self.engine!r}; known are {', '.join(get_args(EngineName))}; choose one"
            )
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def __str__(self) -> str:
        return self.engine if self.engine == "pool" else f"{self.engine}-{self.slots}"


def build_engine(task: Task, candidate: Candidate) -> Engine:
    """The engine itself, holding no trials.

    Raises:
        NotStackable: the model cannot be trained by it.
        UsageError: slots or sizes out of range.
    """
    if candidate.engine == "pool":
        return PoolEngine(task)
    layout = Layout(task.initial(0))
    if candidate.engine == "layers":
        program = LayersProgram(task, layout, candidate.slots)
    else:
        program = VmapProgram(task, layout)
    sizes: Sequence[int] | None = candidate.sizes or None
    return StackEngine(candidate.engine, task, layout, program, slots=candidate.slots, sizes=sizes)
