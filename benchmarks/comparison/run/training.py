"""One training run from its spec to its record."""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from comparison.data.batches import loader
from comparison.run import fingerprints, metrics, ranks
from comparison.run.checkpoints import Checkpoint
from comparison.run.environment import environment
from comparison.run.outcome import concluded
from comparison.run.record import Record
from comparison.run.run_setup import Trainee, prepare, steps_of
from comparison.run.scoring import logits_of, precision
from comparison.spec.run_spec import Run

MEASURED_PART = 20
"""What is dropped is measured in the last twentieth of the epochs, where the rate is within 5 % of its target."""
CURVE_POINTS = 8

Beat = Callable[[int, int, float], None]
"""Is told the steps done, the steps in all, and the loss."""


@dataclass
class History:
    """What a training leaves behind besides the model."""

    first_loss: float = math.nan
    train_loss: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    rates: list[tuple[int, float]] = field(default_factory=list)
    ramp_end: int | None = None
    steps: int = 0


def execute(run: Run, beat: Beat, scratch: Path) -> Record:
    """Train, score and look at what the hooks leave of the model.

    Args:
        run: all that the outcome depends on.
        beat: called after every epoch.
        scratch: the folder of checkpoints.

    Raises:
        FloatingPointError: a loss is not a finite number.
    """
    started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
    trainee = prepare(run)
    checkpoint = Checkpoint(trainee, scratch)
    history, measured = train(trainee, beat, checkpoint)
    outcome, images = concluded(trainee, history, measured)
    # The checkpoint stays until the record is kept: what finds no room for it is not lost.
    return Record(
        key=run.key,
        spec=run.model_dump(mode="json"),
        outcome=outcome,
        images=images,
        environment=environment(),
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - clock,
    )


def train(trainee: Trainee, beat: Beat, checkpoint: Checkpoint) -> tuple[History, Any]:
    """Train from where the checkpoint is to the last epoch, measuring what is dropped in the last few."""
    done, saved = checkpoint.load()
    history = History(**saved) if saved else History()
    if not done:
        _note_rate(trainee, history)
    last = _last_epoch(trainee)
    measured, from_epoch = None, last - max(1, last // MEASURED_PART) + 1
    with ExitStack() as stack:
        for epoch in range(done + 1, last + 1):
            if trainee.drop and epoch == from_epoch:
                measured = stack.enter_context(trainee.drop.measuring())
            _train_epoch(trainee, history, epoch)
            _note_rate(trainee, history)
            if epoch == last or epoch % math.ceil(last / CURVE_POINTS) == 0:
                _validate(trainee, history, epoch)
            beat(history.steps, last * _steps_per_epoch(trainee), history.train_loss[-1])
            if epoch < from_epoch - 1 and checkpoint.due():
                checkpoint.save(epoch, asdict(history))
    return history, measured


def batch_of(trainee: Trainee) -> tuple[Tensor, Tensor]:
    """The first training images, in eval form."""
    size = trainee.run.batch_size
    images = trainee.task.images(trainee.split.train[:size])
    return images.to(trainee.device), trainee.labels_N[:size].to(trainee.device)


def _train_epoch(trainee: Trainee, history: History, epoch: int) -> None:
    run = trainee.run
    trainee.forward.train()
    losses, seen = [], []
    batches = loader(
        trainee.task, trainee.split.train, run.batch_size, run.seed, epoch, trainee.labels_N, run.data.workers
    )
    for indices_B, x_BCHW, y_B in batches:
        if run.max_steps is not None and history.steps == run.max_steps:
            break
        seen.append(indices_B)
        losses.append(step(trainee, *_shard(trainee, x_BCHW, y_B)))
        history.steps += 1
        _note_ramp(trainee, history)
    numbers = torch.stack(losses).tolist()
    if not all(map(math.isfinite, numbers)):
        first = next(i for i, loss in enumerate(numbers) if not math.isfinite(loss))
        at = history.steps - len(numbers) + first + 1
        raise FloatingPointError(f"the loss of optimizer step {at} (epoch {epoch}) is {numbers[first]}")
    if epoch == 1:
        history.first_loss = numbers[0]
    history.train_loss.append(statistics.fmean(numbers))
    history.batches.append(fingerprints.of(seen))


def step(trainee: Trainee, x_BCHW: Tensor, y_B: Tensor) -> Tensor:
    """One optimizer step; the loss before it."""
    with precision(trainee):
        loss = cross_entropy(trainee.forward(x_BCHW), y_B, label_smoothing=trainee.run.label_smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    trainee.decay.step()
    return loss.detach()


def _shard(trainee: Trainee, x_BCHW: Tensor, y_B: Tensor) -> tuple[Tensor, Tensor]:
    mine = slice(ranks.rank(), None, trainee.run.world)
    return x_BCHW[mine].to(trainee.device), y_B[mine].to(trainee.device)


def _validate(trainee: Trainee, history: History, epoch: int) -> None:
    indices = trainee.split.validation
    scores = metrics.score(logits_of(trainee, indices), trainee.task.labels_N[indices])
    history.validation.append({"epoch": epoch, "accuracy": scores.accuracy, "nll": scores.nll})


def _note_rate(trainee: Trainee, history: History) -> None:
    if trainee.rate is not None:
        history.rates.append((history.steps, trainee.rate))
        _note_ramp(trainee, history)


def _note_ramp(trainee: Trainee, history: History) -> None:
    drop = trainee.drop
    if drop is None or drop.p is None or drop.target_p is None or history.ramp_end is not None:
        return
    if abs(drop.p - drop.target_p) <= 1e-9:
        history.ramp_end = history.steps


def _steps_per_epoch(trainee: Trainee) -> int:
    return steps_of(trainee.run, len(trainee.split.train)) // trainee.run.epochs


def _last_epoch(trainee: Trainee) -> int:
    run = trainee.run
    if run.max_steps is None:
        return run.epochs
    return min(run.epochs, math.ceil(run.max_steps / _steps_per_epoch(trainee)))
