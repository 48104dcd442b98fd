"""The fleet: what a user's loop talks to."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.fleet.arguments import check_loss, check_sizes
from shoal.fleet.batch_policy import BatchPolicy
from shoal.fleet.checkpoint import Checkpoints
from shoal.fleet.describe import describe, learning_rate
from shoal.fleet.evaluate import (
    fold_metrics,
    fold_predictions,
    metric_payload,
    over_dataset,
    prediction_payload,
    unknown_metrics,
    unknown_predictions,
)
from shoal.fleet.guards import check_parameters
from shoal.fleet.loop import Loop
from shoal.fleet.plan import Batching
from shoal.fleet.record import Recorder
from shoal.fleet.replica import Replica, Stateful
from shoal.fleet.step import Committed, Stepper
from shoal.fleet.training_set import TrainingSet
from shoal.fleet.weights import write_weights
from shoal.scaling.schedules import Schedule
from shoal.world.contract import World


class Fleet:
    """Made by :func:`shoal.init`; see there for an example.

    Attributes are read-only for users: ``step_count`` (committed optimizer steps), ``samples_seen``
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
        self._loop = Loop(
            replica,
            world,
            recorder=recorder,
            checkpoints=checkpoints,
            device=device,
            prepare=self._prepare,
            describe=self._describe,
            close=self.close,
        )
        self._training_set = TrainingSet(replica.progress, pin_memory=device.type == "cuda")
        self._epochs: int | None = None
        self._closed = False
        atexit.register(self.close)

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
        return self._loop.present().workers

    @property
    def rank(self) -> int:
        """This worker's (lowest) rank in the present membership."""
        return self._loop.present().ranks[0]

    @property
    def is_primary(self) -> bool:
        """Whether this worker speaks for the fleet now (rank 0); exactly one worker does."""
        return self._loop.is_primary

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the last committed step."""
        last = self._loop.last
        return last.lr if last else self._stepper.base_lrs[0]

    # -- the loop -----------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of ``total``; a joiner enters at the fleet's.

        An epoch counts as over when the loop's body has come to its end. If the run was stopped before
        that, in an evaluation say, a resumed run enters this epoch's body again: ``batches`` yields what
        is left to train, which may be nothing, and the rest of the body is done again.

        Args:
            total: epochs of the whole run, >= 1; also the length of schedules that name none.

        Raises:
            UsageError: ``total`` < 1, or the body of the loop drew no batches.
        """
        if total < 1:
            raise UsageError(f"epochs(total) = {total}; a run has at least one epoch")
        self._epochs = total
        return self._loop.run_epochs(total)

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
            UsageError: an empty data set, one of another length than the run's, sizes below 1; called
                twice in one body of :meth:`epochs`, or after its end.
        """
        local_batch, micro_batch = check_sizes(local_batch, micro_batch, unknown)
        draws = self._training_set.open(dataset, num_workers, collate)
        cut = Batching(
            policy=self._policy, samples=draws.n, local_batch=local_batch, micro_batch=micro_batch
        )
        return self._loop.run_epoch(draws, cut)

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
        start, stop, last = self._loop.stage.backward_due()
        check_loss(loss, reduction)
        units = float(stop - start if weight is None else weight)
        if not 0 <= units < float("inf"):
            raise UsageError(
                f"weight = {units}; a loss is a mean over a finite number of units >= 0; pass how many the "
                "loss is a mean of"
            )
        with self._loop.stage.adding():
            self._stepper.add(
                loss, samples=stop - start, weight=units, summed=reduction == "sum", last=last
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the fleet's gradient (after the exchange) to ``max_norm`` > 0.

        Returns: the norm before clipping; None while a step still accumulates, or when it is not
        committed because a worker was lost.
        """
        if not max_norm > 0:
            raise UsageError(
                f"max_norm = {max_norm}; it is positive; leave the call out to clip nothing"
            )
        last = self._loop.stage.between("clip_grad_norm_")
        return self._loop.clip(max_norm, norm_type) if last else None

    def step(self) -> bool:
        """Exchange, commit, update and zero the gradients; call it after every ``backward``.

        Returns: whether this call committed an optimizer step (False while accumulating, and when a
        worker was lost: the step's samples are then drawn again by those that are left).

        Raises:
            DivergedError: a non-finite loss on any worker; raised on all of them at this step.
        """
        return self._loop.step()

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

        scores = over_dataset(
            self._loop,
            self._model,
            dataset,
            local_batch=local_batch,
            collate=collate,
            compute=compute,
            fold=fold_metrics,
            missed=unknown_metrics,
        )
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

        return over_dataset(
            self._loop,
            self._model,
            dataset,
            local_batch=local_batch,
            collate=collate,
            compute=compute,
            fold=fold_predictions,
            missed=unknown_predictions,
        )

    def register(self, name: str, obj: Stateful) -> None:
        """Carry ``obj`` (anything with state_dict/load_state_dict) to joiners and into checkpoints."""
        self._replica.register(name, obj)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights as one safetensors file, atomically; only the primary writes."""
        if self.is_primary:
            write_weights(self._model, Path(path))

    def checkpoint(self) -> None:
        """Write a checkpoint of the last commit now and wait for it; only the primary writes."""
        self._loop.checkpoint()

    def close(self) -> None:
        """Leave the fleet and free its threads, processes and sockets. Harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._training_set.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._stepper.close()
        self._world.close()
        self._recorder.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- parts --------------------------------------------------------------------------------------

    def _prepare(self, cut: Batching) -> None:
        """Tie the run to its data set and resolve what depends on its length."""
        progress = self._progress
        resumed = self._replica.resumed_from == progress.step > 0
        self._training_set.check(cut.samples, resumed=resumed)
        stepper = self._stepper
        check_parameters(
            self._model,
            stepper.optimizer,
            known=stepper.reducer.parameters,
            groups=len(stepper.base_lrs),
        )
        self._replica.check_batching(
            {
                "local_batch": cut.local_batch,
                "micro_batch": cut.micro_batch,
                "epochs": self._epochs,
            }
        )
        if self._stepper.rate is None:
            total = None if self._epochs is None else self._epochs * cut.samples
            self._loop.total_samples = total
            self._stepper.rate = learning_rate(self._stepper.rule, self._schedule, total)

    def _describe(self, cut: Batching, last: Committed) -> dict[str, Any]:
        return describe(self._stepper, cut, last, self._progress, self._settings)
