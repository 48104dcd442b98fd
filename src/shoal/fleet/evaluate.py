"""Evaluation and prediction over the whole fleet: each sample once, whoever comes or dies.

The samples are cut into chunks whose borders do not depend on the number of workers. In a round every
worker takes one chunk, the results are gathered, and the cursor moves on by the chunks that arrived:
a round that fails is repeated by those that are left. Partial results are part of the fleet's state, so
a worker that missed one round adopts it. Sums are added in the order of the chunks, which makes the
result the same bits for any number of workers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from shoal.data.draws import Draws
from shoal.errors import ExchangeFailed, UsageError
from shoal.fleet.arguments import check_chunk
from shoal.fleet.gather import gather
from shoal.fleet.loop import Loop
from shoal.fleet.movement import to_device
from shoal.fleet.state import Evaluation, Progress
from shoal.world.alone import AloneWorld
from shoal.world.contract import Membership, World


class Missed(Exception):
    """The fleet has finished this evaluation without this worker, and the result is gone."""


def over_dataset(
    loop: Loop,
    model: nn.Module,
    dataset: Any,
    *,
    local_batch: int,
    collate: Callable[[list[Any]], Any] | None,
    compute: Callable[[Any, int], bytes],
    fold: Callable[[list[bytes]], Any],
    missed: Callable[[bytes], Any],
) -> Any:
    """One evaluation of the whole fleet over ``dataset``, or of this worker alone once it has left.

    Args:
        compute: the payload of one batch of so many samples.
        fold: the result from all payloads, in order.
        missed: the result from one payload where the fleet has evaluated without this worker.

    Raises:
        UsageError: called inside the loop over the batches, or a bad ``local_batch``.
    """
    if loop.stage.held:
        raise UsageError(
            "evaluate and predict come after the loop over fleet.batches(...), not inside it: a worker "
            "without samples in this step would not take part; evaluate between epochs"
        )
    chunk = check_chunk(local_batch)
    world: World = loop.world
    if loop.out and not isinstance(world, AloneWorld):
        world = AloneWorld(started=True)
        world.attach(loop.replica)
    try:
        draws = Draws(dataset, seed=0, shuffled=False, collate=collate)
    except TypeError as error:
        raise UsageError(str(error)) from error

    rounds = 0

    def start() -> Membership:
        nonlocal rounds
        own = world is loop.world
        membership = loop.begin("evaluate") if own else world.start_step(shrink_only=True)
        if rounds == 0 and loop.replica.expected == "evaluate":
            # From here on this worker evaluates what the others do, and ends that body with them.
            loop.bodies.adopt()
        rounds += 1
        loop.tell("evaluate", None)
        loop.exchanging()
        return membership

    def payload(begin: int, stop: int) -> bytes:
        with loop.replica.stepper.buffers.kept():
            return compute(to_device(draws.fetch(begin, stop), loop.device), stop - begin)

    with loop.evaluating(), evaluating(model):
        try:
            result = run_rounds(
                start=start,
                skip=lambda: loop.replica.expected in ("train", "end"),
                world=world,
                progress=loop.replica.progress,
                evaluation=loop.replica.evaluation,
                samples=draws.n,
                chunk=chunk,
                compute=payload,
                fold=fold,
                device=loop.device,
                waiting=lambda: loop.phase("exchange"),
            )
        except Missed:
            print(
                "shoal: the fleet has gone on training without this worker's evaluation; "
                "its result is not known here",
                file=sys.stderr,
                flush=True,
            )
            result = missed(payload(0, 1))
    loop.phase("user")
    return result


def run_rounds(
    *,
    start: Callable[[], Membership],
    skip: Callable[[], bool],
    world: World,
    progress: Progress,
    evaluation: Evaluation,
    samples: int,
    chunk: int,
    compute: Callable[[int, int], bytes],
    fold: Callable[[list[bytes]], Any],
    device: torch.device,
    waiting: Callable[[], None],
) -> Any:
    """Drive one evaluation to its end and return ``fold(parts)``.

    Args:
        start: brings the membership for the next round (nobody new is let in).
        skip: whether this worker has learned in ``start`` that the others are training.
        samples: number of samples, >= 1; ``chunk``: samples per chunk, >= 1.
        compute: the payload of the samples [start, stop).
        fold: makes the result from the payloads of all chunks, in order.
        waiting: called when this worker has nothing to do but to wait for the others.

    Raises:
        Missed: the others have finished it and gone on.
    """
    mine = None
    while True:
        membership = start()
        if mine is None:
            mine = evaluation.calls
            if not skip():
                # What an evaluation that was broken off has left behind belongs to no result.
                evaluation.cursor, evaluation.parts = 0, []
        if evaluation.calls == mine + 1 and evaluation.finished:
            return fold(evaluation.finished)
        if evaluation.calls > mine or skip():
            raise Missed
        spans = []
        for rank in range(membership.workers):
            begin = min(samples, evaluation.cursor + rank * chunk)
            spans.append((begin, min(samples, begin + chunk)))
        payloads = [
            compute(*spans[r]) if spans[r][0] < spans[r][1] else b"" for r in membership.ranks
        ]
        waiting()
        try:
            gathered, flags = gather(world, membership, payloads, device)
        except ExchangeFailed:
            world.settle(None)
            continue
        world.settle(flags)
        for part, (_, stop) in zip(gathered, spans, strict=True):
            if not part:
                break  # beyond the end; or a worker that is not in this evaluation, to be made good
            evaluation.parts.append(part)
            evaluation.cursor = stop
        progress.commit(token=membership.token)
        if evaluation.cursor >= samples:
            evaluation.finished, evaluation.parts, evaluation.cursor = evaluation.parts, [], 0
            evaluation.calls += 1
            return fold(evaluation.finished)


def metric_payload(scores: Any) -> bytes:
    """A chunk's ``{name: (sum, count)}`` as bytes.

    Raises:
        UsageError: ``metric_fn`` returned something else.
    """
    if not isinstance(scores, Mapping):
        raise UsageError(
            f"metric_fn returned {type(scores).__name__}; it returns a dict of name -> (sum, count); "
            'for example {"accuracy": ((logits.argmax(1) == y).sum(), len(y))}'
        )
    plain = {}
    for name, value in scores.items():
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(
                f"metric_fn returned {name} = {value!r}; each metric is a pair (sum, count), so that "
                "uneven chunks are weighted right; return the sum over the batch and its length"
            )
        plain[str(name)] = [float(value[0]), float(value[1])]
    return json.dumps(plain).encode()


def fold_metrics(parts: list[bytes]) -> dict[str, float]:
    """Means from the chunks' sums and counts, added in the order of the chunks."""
    totals: dict[str, list[float]] = {}
    for part in parts:
        for name, (total, count) in json.loads(part).items():
            held = totals.setdefault(name, [0.0, 0.0])
            held[0] += total
            held[1] += count
    return {
        name: total / count if count else float("nan") for name, (total, count) in totals.items()
    }


def unknown_metrics(payload: bytes) -> dict[str, float]:
    """The names of the metrics in ``payload``, each not a number."""
    return {name: float("nan") for name in json.loads(payload)}


def unknown_predictions(payload: bytes) -> Any:
    """Predictions cannot be left open.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "predict = called by a worker that joined while the others were training; they would wait for "
        "it; call fleet.predict after an epoch, not before the first one"
    )


def prediction_payload(predicted: Any, samples: int) -> bytes:
    """A chunk's predictions (one tensor, or a dict or tuple of them, one row a sample) as bytes.

    Raises:
        UsageError: not tensors, or not one row for each sample.
    """
    if isinstance(predicted, Tensor):
        named = {"": predicted}
    elif isinstance(predicted, Mapping):
        named = {str(k): v for k, v in predicted.items()}
    elif isinstance(predicted, tuple | list):
        named = {str(i): v for i, v in enumerate(predicted)}
    else:
        named = {"": predicted}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() < 1 or len(value) != samples:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"predict_fn returned {name or 'predictions'} = {shape} for {samples} samples; it "
                "returns tensors with one row for each sample"
            )
    return tensors_to_bytes({k: v.detach().cpu().contiguous() for k, v in named.items()})


def fold_predictions(parts: list[bytes]) -> Any:
    """All predictions in the order of the samples, in the structure ``predict_fn`` returned."""
    loaded = [tensors_from_bytes(part) for part in parts]
    names = list(loaded[0])
    joined = {name: torch.cat([chunk[name] for chunk in loaded]) for name in names}
    if names == [""]:
        return joined[""]
    if all(name.isdigit() for name in names):
        return tuple(joined[name] for name in sorted(names, key=int))
    return joined


class evaluating:
    """The model in evaluation mode without gradients; every module's own mode comes back after."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modes: list[tuple[nn.Module, bool]] = []
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._modes = [(m, m.training) for m in self._model.modules()]
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._no_grad.__exit__(*exc)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for module, mode in self._modes:
            module.training = mode
