"""Train a run, and create its record."""

import math
import statistics
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from comparison.data.catalog import batches
from comparison.run import metrics
from comparison.run.record import Outcome, Record, environment
from comparison.run.run_setup import RunSetup, prepare, steps_of
from comparison.spec import arms
from comparison.spec.run_spec import Run
from models.footprint import changes, digest

MEASURED_PART = 20
"""The dropped fraction is measured in the last 1/20 of the epochs, where the rate is within 5 % of its target."""
CHECKED_IMAGES = 200


def execute(run: Run) -> Record:
    """Train and score a run, and check the model's footprint."""
    setup = prepare(run)
    outcome, images = _outcome(setup, *train(setup))
    return Record(run.key, run.model_dump(mode="json"), outcome, images, environment=environment())


def train(setup: RunSetup) -> tuple[list[list[float]], list[str], Any]:
    """Return the losses of the steps of each epoch, the hash of its images, and what was dropped in the last epochs."""
    losses, seen, measured, last = list[list[float]](), list[str](), None, _last_epoch(setup)
    with ExitStack() as stack:
        for epoch in range(1, last + 1):
            if setup.drop and epoch == last - max(1, last // MEASURED_PART) + 1:
                measured = stack.enter_context(setup.drop.recording(last=0)).totals
            of_epoch, indices = _train_epoch(setup, epoch, sum(map(len, losses)))
            losses.append(of_epoch)
            seen.append(digest(indices))
    return losses, seen, measured


def batch_of(setup: RunSetup) -> tuple[Tensor, Tensor]:
    """The first training images, without augmentation."""
    indices = setup.split.train[: setup.run.batch_size]
    return setup.images(indices), setup.task.labels_N[indices].to(setup.device)


def step(setup: RunSetup, x_BCHW: Tensor, y_B: Tensor) -> Tensor:
    """Take one optimizer step and return the loss before it."""
    loss = cross_entropy(setup.forward(x_BCHW), y_B, label_smoothing=setup.run.label_smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    setup.decay.step()
    return loss.detach()


def _train_epoch(setup: RunSetup, epoch: int, done: int) -> tuple[list[float], list[Tensor]]:
    """Train after `done` optimizer steps; return the losses and the image indices of the steps."""
    run, task = setup.run, setup.task
    setup.forward.train()
    losses, seen = [], []
    every = batches(task, setup.split.train, run.batch_size, run.seed, epoch)
    for indices_B, x_BCHW, y_B in islice(every, None if run.max_steps is None else run.max_steps - done):
        seen.append(indices_B)
        losses.append(step(setup, setup.placed(x_BCHW), y_B.to(setup.device)))
    numbers: list[float] = torch.stack(losses).tolist()
    for at, loss in enumerate(numbers, done + 1):
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of optimizer step {at} (epoch {epoch}) is {loss}")
    return numbers, seen


def _last_epoch(setup: RunSetup) -> int:
    run = setup.run
    if run.max_steps is None:
        return run.epochs
    return min(run.epochs, math.ceil(run.max_steps / (steps_of(run, len(setup.split.train)) // run.epochs)))


def _outcome(setup: RunSetup, losses: list[list[float]], seen: list[str], measured: Any) -> tuple[Outcome, Any]:
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
        "call": arms.text_at_rate(run.arm), "sites": len(drop.sites) if drop else 0,
        "flags": setup.plan.warnings if setup.plan else [],
        "weights_before": setup.weights, "weights_after": digest(setup.model.state_dict().values()), "batches": seen,
        "first_loss": losses[0][0], "train_loss": [*map(statistics.fmean, losses)],
        "rate_at_end": drop.p if drop else None, "asked": measured.requested if asks else None,
        "dropped": measured.dropped if drops else None,
        "changes": changes(setup.model, drop, setup.images(scored[:CHECKED_IMAGES]), setup.footprint) if drop else None,
        "accuracy": scores.accuracy, "nll": scores.nll, "ece": scores.ece,
        "outputs": digest([logits]), "data": task.sha256, "test_sets": list(test_sets),
        "steps": sum(map(len, losses)), "train_images": len(setup.split.train), "scored_images": len(scored),
    }  # fmt: skip
    images = {**scores.images, "label": task.labels_N[scored].numpy()}
    if test_sets:
        images["test_set"] = torch.stack(list(test_sets.values())).int().argmax(0).numpy()
    return outcome, images
