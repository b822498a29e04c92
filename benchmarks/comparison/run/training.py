"""Train a run and create its record."""

from __future__ import annotations

import datetime
import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from comparison.data.batches import loader
from comparison.run import metrics
from comparison.run.checkpoints import Checkpoint
from comparison.run.environment import environment
from comparison.run.footprint_check import digest
from comparison.run.outcome import outcome_of
from comparison.run.record import Record
from comparison.run.run_setup import RunSetup, prepare, steps_of
from comparison.spec.run_spec import Run

MEASURED_PART = 20
"""The dropped fraction is measured in the last 1/20 of the epochs, where the rate is within 5 % of its target."""
CURVE_POINTS = 8


@dataclass
class History:
    """The training history of a run."""

    first_loss: float = math.nan
    train_loss: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    rates: list[tuple[int, float]] = field(default_factory=list)
    ramp_end: int | None = None
    steps: int = 0


def execute(run: Run, scratch: Path) -> Record:
    """Train and score a run, and check the model's footprint; `scratch` is the folder for checkpoints.

    Raises:
        FloatingPointError: A loss is not finite.
    """
    started, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
    setup = prepare(run)
    checkpoint = Checkpoint(setup, scratch)
    history, measured = train(setup, checkpoint)
    outcome, images = outcome_of(setup, history, measured)
    # The checkpoint is kept until the record is stored, in case the disk is full.
    return Record(
        key=run.key,
        spec=run.model_dump(mode="json"),
        outcome=outcome,
        images=images,
        environment=environment(),
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - clock,
    )


def train(setup: RunSetup, checkpoint: Checkpoint) -> tuple[History, Any]:
    """Train from the checkpoint to the last epoch, and measure the dropped fraction in the last epochs."""
    done, saved = checkpoint.load()
    history = History(**saved) if saved else History()
    if not done:
        _note_rate(setup, history)
    last = _last_epoch(setup)
    measured, from_epoch = None, last - max(1, last // MEASURED_PART) + 1
    with ExitStack() as stack:
        for epoch in range(done + 1, last + 1):
            if setup.drop and epoch == from_epoch:
                measured = stack.enter_context(setup.drop.recording(last=0)).totals
            _train_epoch(setup, history, epoch)
            _note_rate(setup, history)
            if epoch == last or epoch % math.ceil(last / CURVE_POINTS) == 0:
                _validate(setup, history, epoch)
            if epoch < from_epoch - 1 and checkpoint.due():
                checkpoint.save(epoch, asdict(history))
    return history, measured


def batch_of(setup: RunSetup) -> tuple[Tensor, Tensor]:
    """The first training images, without augmentation."""
    size = setup.run.batch_size
    return setup.images(setup.split.train[:size]), setup.labels_N[:size].to(setup.device)


def _train_epoch(setup: RunSetup, history: History, epoch: int) -> None:
    run = setup.run
    setup.forward.train()
    losses, seen = [], []
    batches = loader(setup.task, setup.split.train, run.batch_size, run.seed, epoch, setup.labels_N, run.data.workers)
    for indices_B, x_BCHW, y_B in batches:
        if run.max_steps is not None and history.steps == run.max_steps:
            break
        seen.append(indices_B)
        losses.append(step(setup, setup.placed(x_BCHW), y_B.to(setup.device)))
        history.steps += 1
        _note_ramp(setup, history)
    numbers = torch.stack(losses).tolist()
    if not all(map(math.isfinite, numbers)):
        first = next(i for i, loss in enumerate(numbers) if not math.isfinite(loss))
        at = history.steps - len(numbers) + first + 1
        raise FloatingPointError(f"the loss of optimizer step {at} (epoch {epoch}) is {numbers[first]}")
    if epoch == 1:
        history.first_loss = numbers[0]
    history.train_loss.append(statistics.fmean(numbers))
    history.batches.append(digest(seen))


def step(setup: RunSetup, x_BCHW: Tensor, y_B: Tensor) -> Tensor:
    """Take one optimizer step and return the loss before it."""
    with setup.precision():
        loss = cross_entropy(setup.forward(x_BCHW), y_B, label_smoothing=setup.run.label_smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    setup.decay.step()
    return loss.detach()


def _validate(setup: RunSetup, history: History, epoch: int) -> None:
    indices = setup.split.validation
    scores = metrics.score(setup.logits(indices), setup.task.labels_N[indices])
    history.validation.append({"epoch": epoch, "accuracy": scores.accuracy, "nll": scores.nll})


def _note_rate(setup: RunSetup, history: History) -> None:
    if setup.rate is not None:
        history.rates.append((history.steps, setup.rate))
        _note_ramp(setup, history)


def _note_ramp(setup: RunSetup, history: History) -> None:
    drop = setup.drop
    if drop is None or drop.p is None or drop.target_p is None or history.ramp_end is not None:
        return
    if abs(drop.p - drop.target_p) <= 1e-9:
        history.ramp_end = history.steps


def _last_epoch(setup: RunSetup) -> int:
    run = setup.run
    if run.max_steps is None:
        return run.epochs
    steps_per_epoch = steps_of(run, len(setup.split.train)) // run.epochs
    return min(run.epochs, math.ceil(run.max_steps / steps_per_epoch))
