"""The fleet: what a user's loop talks to."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.draws import Draws
from shoal.data.randomness import sample_seed
from shoal.errors import ResumableStop, UsageError
from shoal.fleet.batch_policy import BatchPolicy
from shoal.fleet.checkpoint import Checkpoints
from shoal.fleet.describe import describe, learning_rate
from shoal.fleet.evaluate import (
    evaluating,
    fold_metrics,
    fold_predictions,
    metric_payload,
    prediction_payload,
    run_rounds,
)
from shoal.fleet.movement import to_device
from shoal.fleet.plan import Batching, StepPlan, goodbye
from shoal.fleet.record import Recorder, event_line
from shoal.fleet.replica import Replica, Stateful
from shoal.fleet.step import Committed, Stepper
from shoal.fleet.weights import write_weights
from shoal.scaling.schedules import Schedule
from shoal.world.alone import AloneWorld
from shoal.world.contract import Membership, World


class Fleet:
    """Made by :func:`shoal.init`; see there for an example.

    Attributes are read-only for users: ``step`` (committed optimizer steps), ``samples_seen``
    (committed samples of the whole fleet), ``epoch``, ``workers``, ``rank``, ``is_primary``, ``lr``.
    """

    def __init__(
        self,
        replica: Replica,
        world: World,
        *,
        recorder: Recorder,
        checkpoints: Checkpoints | None,
        policy: BatchPolicy,
        schedule: Schedule,
        settings: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._replica = replica
        self._stepper: Stepper = replica.stepper
        self._model = replica.stepper.model
        self._progress = replica.progress
        self._world = world
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._policy = policy
        self._schedule = schedule
        self._settings = dict(settings)
        self._device = device
        self._membership: Membership | None = None
        self._draws: Draws | None = None
        self._drawn: tuple[Any, ...] | None = None
        self._epochs: int | None = None
        self._piece: tuple[int, int, bool] | None = None
        self._stage = "idle"
        self._out = False
        self._closed = False
        self._last: Committed | None = None
        self._cut: Batching | None = None
        self._total_samples: int | None = None

    # -- where the run stands -----------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Committed optimizer steps of the fleet."""
        return self._progress.step

    @property
    def samples_seen(self) -> int:
        """Committed training samples of the whole fleet."""
        return self._progress.cursor

    @property
    def epoch(self) -> int:
        """The present epoch, counted from 0."""
        return self._progress.epoch

    @property
    def workers(self) -> int:
        """Workers in the present membership."""
        return self._membership.workers if self._membership else 1

    @property
    def rank(self) -> int:
        """This worker's (lowest) rank in the present membership."""
        return self._membership.ranks[0] if self._membership else 0

    @property
    def is_primary(self) -> bool:
        """Whether this worker speaks for the fleet now (rank 0); exactly one worker does."""
        return self.rank == 0 and (not self._out or self._world.survivors == 0)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the last committed step."""
        return self._last.lr if self._last else self._stepper.base_lrs[0]

    # -- the loop -----------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of ``total``; a joiner enters at the fleet's.

        Args:
            total: epochs of the whole run, >= 1; also the length of schedules that name none.

        Raises:
            UsageError: ``total`` < 1, or the body of the loop drew no batches.
        """
        if total < 1:
            raise UsageError(f"epochs(total) = {total}; a run has at least one epoch")
        self._epochs = total
        return self._run_epochs(total)

    def _run_epochs(self, total: int) -> Iterator[int]:
        self._begin()
        while not self._out and self._progress.epoch < total:
            before = self._progress.cursor
            yield self._progress.epoch
            if not self._out and self._progress.cursor == before and self._progress.epoch < total:
                raise UsageError(
                    "fleet.epochs: the loop's body drew no batches; iterate over fleet.batches(...) in it"
                )
        if not self._out:
            self._finish()

    def batches(
        self,
        dataset: Any,
        *,
        local_batch: int | None = None,
        micro_batch: int | None = None,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        **unknown: Any,
    ) -> Iterator[Any]:
        """Yield this worker's micro-batches of the present epoch, on the fleet's device.

        Every sample of ``dataset`` is trained exactly once an epoch by the fleet as a whole, in an
        order that depends on the seed and the epoch alone. After each batch the loop calls
        :meth:`backward` and :meth:`step`.

        Args:
            dataset: tensors, a ``TensorDataset``, or anything with ``__getitem__`` and ``__len__``.
            local_batch: samples per worker per step, >= 1 (see the batch policy).
            micro_batch: samples per forward pass, 1 to ``local_batch``; default ``local_batch``. A
                smaller one saves memory: gradients are accumulated, the step stays the same.
            num_workers: background loading processes, as in PyTorch's DataLoader.
            collate: makes a batch of a list of samples; default PyTorch's.

        Raises:
            UsageError: an empty data set, one of another length than the run's, sizes below 1.
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
        if local_batch is None or local_batch < 1:
            raise UsageError(
                f"local_batch = {local_batch}; each worker needs at least 1 sample a step; pass local_batch="
            )
        micro = local_batch if micro_batch is None else micro_batch
        if not 1 <= micro <= local_batch:
            raise UsageError(
                f"micro_batch = {micro}; it lies between 1 and local_batch = {local_batch}"
            )
        draws = self._open_draws(dataset, num_workers, collate)
        cut = Batching(
            policy=self._policy, samples=draws.n, local_batch=local_batch, micro_batch=micro
        )
        return self._run_epoch(draws, cut)

    def backward(
        self, loss: Tensor, *, weight: float | Tensor | None = None, reduction: str = "mean"
    ) -> None:
        """Backward of this micro-batch's loss; the last one of a step starts the exchange.

        Args:
            loss: scalar. With ``reduction="mean"`` a mean over the micro-batch's samples, or over
                ``weight`` units (tokens, say); with ``"sum"`` the sum over them.
            weight: units the loss is a mean or sum over; default the number of samples. The fleet's
                gradient is that of the mean over all units of the global batch.
            reduction: ``"mean"`` or ``"sum"``.

        Raises:
            UsageError: called twice or outside ``batches``, a loss per sample, a negative weight.
        """
        if self._piece is None or self._stage != "drawn":
            raise UsageError(
                "fleet.backward() was called "
                + (
                    "twice for one batch; add the losses up and call it once"
                    if self._piece
                    else "outside of fleet.batches(); call it inside the loop"
                )
            )
        if loss.dim() != 0:
            raise UsageError(
                f"loss = a tensor of shape {tuple(loss.shape)}; backward needs a scalar; take its mean"
            )
        if reduction not in ("mean", "sum"):
            raise UsageError(f'reduction = {reduction!r}; known are "mean" and "sum"')
        start, stop, last = self._piece
        units = float(stop - start if weight is None else weight)
        if not units >= 0:
            raise UsageError(f"weight = {units}; a loss is a mean over a number of units >= 0")
        self._stage = "exchange"
        self._stepper.add(
            loss, samples=stop - start, weight=units, summed=reduction == "sum", last=last
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the fleet's gradient (after the exchange) to ``max_norm`` > 0.

        Returns: the norm before clipping; None while a step still accumulates, or when it is not
        committed because a worker was lost.
        """
        if not max_norm > 0:
            raise UsageError(f"max_norm = {max_norm}; it is positive")
        if self._piece is None or self._stage != "exchange":
            raise UsageError(
                "fleet.clip_grad_norm_() comes between fleet.backward() and fleet.step()"
            )
        return self._stepper.clip(max_norm, norm_type) if self._piece[2] else None

    def step(self) -> bool:
        """Exchange, commit, update and zero the gradients; call it after every ``backward``.

        Returns: whether this call committed an optimizer step (False while accumulating, and when a
        worker was lost: the step's samples are then drawn again by those that are left).

        Raises:
            DivergedError: a non-finite loss on any worker; raised on all of them at this step.
        """
        if self._piece is None or self._stage != "exchange":
            raise UsageError("fleet.step() comes once after each fleet.backward(), inside the loop")
        self._stage = "done"
        return self._conclude() if self._piece[2] else False

    # -- beside the loop ------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: Any,
        metric_fn: Callable[[nn.Module, Any], Mapping[str, Any]],
        *,
        local_batch: int = 256,
        collate: Callable[[list[Any]], Any] | None = None,
        name: str = "evaluate",
    ) -> dict[str, float]:
        """Means of metrics over ``dataset``, each sample once, computed by all workers together.

        Args:
            dataset: as for :meth:`batches`; read in its own order.
            metric_fn: ``metric_fn(model, batch) -> {name: (sum, count)}``; the model is in evaluation
                mode, without gradients.
            local_batch: samples per chunk, >= 1.
            name: under which the scores are stored.

        Returns: ``{name: sum of sums / sum of counts}``, the same bits on every worker and for any
        number of workers.
        """

        def compute(batch: Any, samples: int) -> bytes:
            return metric_payload(metric_fn(self._model, batch))

        scores = self._over(dataset, local_batch, collate, compute, fold_metrics)
        if self.is_primary:
            self._recorder.event(
                {
                    "kind": "evaluate",
                    "name": name,
                    "step": self._progress.step,
                    "samples": self._progress.cursor,
                    "epoch": self._progress.epoch,
                    "scores": scores,
                }
            )
        return scores

    def predict(
        self,
        dataset: Any,
        predict_fn: Callable[[nn.Module, Any], Any] | None = None,
        *,
        local_batch: int = 256,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Predictions for every sample of ``dataset``, in its order, on the CPU of every worker.

        Args:
            predict_fn: ``predict_fn(model, batch)`` -> a tensor (or dict or tuple of tensors) with one
                row a sample; default ``model(batch)``, or ``model(batch[0])`` for a tuple or list.
        """

        def default(model: nn.Module, batch: Any) -> Any:
            return model(batch[0] if isinstance(batch, list | tuple) else batch)

        call = predict_fn or default

        def compute(batch: Any, samples: int) -> bytes:
            return prediction_payload(call(self._model, batch), samples)

        return self._over(dataset, local_batch, collate, compute, fold_predictions)

    def register(self, name: str, obj: Stateful) -> None:
        """Carry ``obj`` (anything with state_dict/load_state_dict) to joiners and into checkpoints."""
        self._replica.register(name, obj)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights as one safetensors file, atomically; only the primary writes."""
        if self.is_primary:
            write_weights(self._model, Path(path))

    def checkpoint(self) -> None:
        """Write a checkpoint of the last commit now and wait for it; only the primary writes."""
        if self._checkpoints is not None and self.is_primary:
            self._checkpoints.write(self._replica.snapshot, self._progress.step, wait=True)

    def close(self) -> None:
        """Leave the fleet and free its threads, processes and sockets. Harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        if self._draws is not None:
            self._draws.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._stepper.close()
        self._world.close()
        self._recorder.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- one epoch --------------------------------------------------------------------------------

    def _run_epoch(self, draws: Draws, cut: Batching) -> Iterator[Any]:
        membership = self._begin()
        self._check_data(cut)
        epoch = self._progress.epoch
        while not self._out and self._progress.epoch == epoch:
            self._check_length(draws)
            plan = cut.plan(self._progress.cursor, membership)
            self._stepper.open(plan)
            self._phase("compute", plan)
            for index, (start, stop) in enumerate(plan.pieces):
                self._piece = (start, stop, index == len(plan.pieces) - 1)
                upcoming = functools.partial(cut.upcoming, plan, index)
                batch = to_device(draws.fetch(start, stop, upcoming), self._device)
                self._seed(start)
                self._stage = "drawn"
                try:
                    yield batch
                except GeneratorExit:
                    self._break_off()
                    raise
                if self._stage != "done":
                    missing = "backward() and step()" if self._stage == "drawn" else "step()"
                    raise UsageError(
                        f"fleet.{missing} was not called for the last batch; call it in the loop"
                    )
                self._piece = None
            if not plan.pieces:
                self._stepper.launch(void=False)
                self._conclude()
            if self._world.left:
                self._depart()
            membership = self._begin()

    def _begin(self, *, shrink_only: bool = False) -> Membership:
        """The membership of the coming exchange; tells the recorder what changed."""
        commits = self._progress.commits
        self._membership = self._world.start_step(shrink_only=shrink_only)
        self._recorder.changes(self._world.take_changes())
        if commits < 0 <= self._replica.resumed_from:
            self._recorder.event({"kind": "resume", "step": self._progress.step})
        return self._membership

    def _conclude(self) -> bool:
        done = self._stepper.finish()
        if done is None:
            return False
        first = self._last is None
        self._last = done
        self._replica.evaluation.finished = []
        for row in self._recorder.committed(done, self._progress):
            print(event_line(row), file=sys.stderr, flush=True)
            first = True
        if first and self.is_primary:
            self._recorder.event({"kind": "describe", "config": self._describe()})
        self._phase("compute", done.plan)
        if self._checkpoints is not None and self.is_primary:
            self._checkpoints.maybe_write(self._replica.snapshot, self._progress.step)
        return True

    def _break_off(self) -> None:
        """The loop was left by ``break``: finish or void the present step, then say goodbye."""
        self._world.request_leave()
        launched = self._piece is not None and self._piece[2] and self._stage == "exchange"
        if launched:
            self._stepper.finish()
        elif self._piece is not None and not (self._piece[2] and self._stage == "done"):
            self._stepper.leave_void()
        if not self._world.left:
            membership = self._begin()
            if membership.workers > len(membership.ranks):
                self._stepper.open(goodbye(self._progress.cursor, membership))
                self._stepper.leave_void()
        self._piece, self._out = None, True

    def _depart(self) -> None:
        """An announced leave has taken effect; end this process in order."""
        self._out = True
        alone = self._world.survivors == 0
        if alone and self.is_primary:
            self.checkpoint()
        self.close()
        raise SystemExit(ResumableStop.exit_code if alone else 0)

    def _finish(self) -> None:
        if self.is_primary:
            self._recorder.event(
                {"kind": "finish", "step": self._progress.step, "samples": self._progress.cursor}
            )
            self.checkpoint()

    # -- parts --------------------------------------------------------------------------------------

    def _over(
        self,
        dataset: Any,
        chunk: int,
        collate: Callable[[list[Any]], Any] | None,
        compute: Callable[[Any, int], bytes],
        fold: Callable[[list[bytes]], Any],
    ) -> Any:
        if self._piece is not None:
            raise UsageError(
                "evaluate and predict come after the step, not between backward and step"
            )
        if chunk < 1:
            raise UsageError(f"local_batch = {chunk}; a chunk has at least 1 sample")
        world: World = self._world
        if self._out and not isinstance(world, AloneWorld):
            world = AloneWorld(started=True)
            world.attach(self._replica)
        draws = Draws(dataset, seed=0, shuffled=False, collate=collate)

        def start() -> Membership:
            if world is self._world:
                if world.left and not self._out:
                    self._depart()
                membership = self._begin(shrink_only=True)
            else:
                membership = world.start_step(shrink_only=True)
            self._phase("evaluate", None)
            return membership

        def on_chunk(begin: int, stop: int) -> bytes:
            batch = to_device(draws.fetch(begin, stop), self._device)
            return compute(batch, stop - begin)

        with evaluating(self._model):
            return run_rounds(
                start=start,
                world=world,
                progress=self._progress,
                evaluation=self._replica.evaluation,
                samples=draws.n,
                chunk=chunk,
                compute=on_chunk,
                fold=fold,
                device=self._device,
            )

    def _open_draws(self, dataset: Any, num_workers: int, collate: Any) -> Draws:
        """The loader of ``dataset``; kept from epoch to epoch while it is asked for the same."""
        asked = (id(dataset), num_workers, collate)
        if self._draws is None or self._drawn != asked:
            if self._draws is not None:
                self._draws.close()
            self._draws = Draws(
                dataset, seed=self._progress.seed, num_workers=num_workers, collate=collate
            )
            self._drawn = asked
        return self._draws

    def _check_data(self, cut: Batching) -> None:
        """Tie the run to its data set and resolve what depends on its length."""
        progress = self._progress
        if progress.samples is None:
            progress.samples = cut.samples
        elif progress.samples != cut.samples:
            raise UsageError(
                f"dataset = {cut.samples:,} samples, but this run was begun on {progress.samples:,}; positions "
                "would mean other samples; pass the same training set, or start a new run directory"
            )
        self._cut = cut
        if self._stepper.rate is None:
            total = None if self._epochs is None else self._epochs * cut.samples
            self._total_samples = total
            self._stepper.rate = learning_rate(self._stepper.rule, self._schedule, total)

    def _check_length(self, draws: Draws) -> None:
        try:
            draws.check_length()
        except UsageError as error:
            raise UsageError(f"at step {self._progress.step}: {error}") from error

    def _seed(self, position: int) -> None:
        """Dropout and the like follow from (seed, position), never from a rank."""
        torch.manual_seed(sample_seed(self._progress.seed, self.epoch, position, stream=2**32))

    def _phase(self, phase: str, plan: StepPlan | None) -> None:
        extra: dict[str, float | int | str] = {"workers": self.workers}
        if self._total_samples is not None:
            extra["total_samples"] = self._total_samples
        if plan is not None:
            extra["global_batch"] = plan.nominal
        if self._last is not None:
            extra |= {
                "lr": self._last.lr,
                "lr_target": self._last.lr_target,
                "loss": self._last.loss,
            }
        self._recorder.phase(phase, self._progress, extra)

    def _describe(self) -> dict[str, Any]:
        assert self._last is not None and self._cut is not None
        return describe(self._stepper, self._cut, self._last, self._progress, self._settings)
