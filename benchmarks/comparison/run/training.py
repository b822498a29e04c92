"""Train a run, and create its record."""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from comparison.data.catalog import loader
from comparison.run import metrics
from comparison.run.record import Outcome, Record, environment
from comparison.run.run_setup import RunSetup, prepare, steps_of
from comparison.spec import arms
from comparison.spec.run_spec import Run
from models.footprint import changes, digest

MEASURED_PART = 20
"""The dropped fraction is measured in the last 1/20 of the epochs, where the rate is within 5 % of its target."""
CHECKED_IMAGES = 200


@dataclass
class History:
    """The training history of a run."""

    first_loss: float = math.nan
    train_loss: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    steps: int = 0


def execute(run: Run) -> Record:
    """Train and score a run, and check the model's footprint."""
    started, clock = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.perf_counter()
    setup = prepare(run)
    outcome, images = _outcome(setup, *train(setup))
    seconds = time.perf_counter() - clock
    return Record(run.key, run.model_dump(mode="json"), outcome, images, None, environment(), started, seconds)


def train(setup: RunSetup) -> tuple[History, Any]:
    """Train to the last epoch, and measure the dropped fraction in the last epochs."""
    history, measured, last = History(), None, _last_epoch(setup)
    with ExitStack() as stack:
        for epoch in range(1, last + 1):
            if setup.drop and epoch == last - max(1, last // MEASURED_PART) + 1:
                measured = stack.enter_context(setup.drop.recording(last=0)).totals
            _train_epoch(setup, history, epoch)
    return history, measured


def batch_of(setup: RunSetup) -> tuple[Tensor, Tensor]:
    """The first training images, without augmentation."""
    indices = setup.split.train[: setup.run.batch_size]
    return setup.images(indices), setup.task.labels_N[indices].to(setup.device)


def step(setup: RunSetup, x_BCHW: Tensor, y_B: Tensor) -> Tensor:
    """Take one optimizer step and return the loss before it."""
    with setup.precision():
        loss = cross_entropy(setup.forward(x_BCHW), y_B, label_smoothing=setup.run.label_smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    setup.decay.step()
    return loss.detach()


def _train_epoch(setup: RunSetup, history: History, epoch: int) -> None:
    run = setup.run
    setup.forward.train()
    losses, seen = [], []
    batches = loader(setup.task, setup.split.train, run.batch_size, run.seed, epoch, run.data.workers)
    for indices_B, x_BCHW, y_B in batches:
        if run.max_steps is not None and history.steps == run.max_steps:
            break
        seen.append(indices_B)
        losses.append(step(setup, setup.placed(x_BCHW), y_B.to(setup.device)))
        history.steps += 1
    numbers = torch.stack(losses).tolist()
    if not all(map(math.isfinite, numbers)):
        first = next(i for i, loss in enumerate(numbers) if not math.isfinite(loss))
        at = history.steps - len(numbers) + first + 1
        raise FloatingPointError(f"the loss of optimizer step {at} (epoch {epoch}) is {numbers[first]}")
    if epoch == 1:
        history.first_loss = numbers[0]
    history.train_loss.append(statistics.fmean(numbers))
    history.batches.append(digest(seen))


def _last_epoch(setup: RunSetup) -> int:
    run = setup.run
    if run.max_steps is None:
        return run.epochs
    return min(run.epochs, math.ceil(run.max_steps / (steps_of(run, len(setup.split.train)) // run.epochs)))


def _outcome(setup: RunSetup, history: History, measured: Any) -> tuple[Outcome, Mapping[str, Any]]:
    """Score the model after its last epoch, and remove the hooks. Return the outcome and the scores of each image."""
    run, drop, task = setup.run, setup.drop, setup.task
    scored, test_sets = (setup.split.test, task.test_sets) if run.stage == "final" else (setup.split.validation, {})
    logits = setup.logits(scored)
    scores = metrics.score(logits, task.labels_N[scored])
    # The rate of Cutout is not the fraction that it drops.
    called = [] if measured is None else [site for site in measured.sites.values() if site.calls]
    drops = measured is not None and all(site.droppable for site in called)
    asks = drops and all(site.asks for site in called)
    outcome: Outcome = {
        "call": arms.text_at_rate(run.arm),
        "sites": len(drop.sites) if drop else 0,
        "flags": setup.plan.warnings if setup.plan else [],
        "weights_before": setup.weights,
        "weights_after": digest(setup.model.state_dict().values()),
        "batches": history.batches,
        "first_loss": history.first_loss,
        "train_loss": history.train_loss,
        "rate_at_end": setup.rate,
        "asked": measured.asked if asks else None,
        "dropped": measured.dropped if drops else None,
        "changes": changes(setup.model, drop, setup.images(scored[:CHECKED_IMAGES]), setup.footprint) if drop else None,
        "accuracy": scores.accuracy,
        "nll": scores.nll,
        "ece": scores.ece,
        "outputs": digest([logits]),
        "data": task.sha256,
        "test_sets": list(test_sets),
        "steps": history.steps,
        "train_images": len(setup.split.train),
        "scored_images": len(scored),
        "skipped_images": len(task.skipped),
    }
    if not test_sets:
        return outcome, scores.images
    return outcome, {**scores.images, "test_set": torch.stack(list(test_sets.values())).int().argmax(0).numpy()}
