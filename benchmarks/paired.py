"""One training run of one arm; the runs of a seed are pairs."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import unchanged
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import digits
import hookdrop
from arms import Arm

# The rates of these last epochs are within 5 % of the target, and enough is drawn to tell the fraction.
MEASURED_EPOCHS = 4
CURVE_POINTS = 8
CHECKED_IMAGES = 200


class Trainee(NamedTuple):
    """What a training step needs."""

    model: nn.Module
    optimizer: Optimizer
    drop: hookdrop.Injection | None

    @property
    def rate(self) -> float:
        """The rate in force."""
        return (self.drop and self.drop.p) or 0.0

    def step(self, x_N1HW: Tensor, y_N: Tensor) -> float:
        """Train on one batch; the loss before it."""
        loss = cross_entropy(self.model(x_N1HW), y_N)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@dataclass
class History:
    """What a training leaves behind besides the model."""

    first_loss: float = math.nan
    train_loss: list[float] = field(default_factory=list)
    """Mean of each epoch."""
    rates: list[float] = field(default_factory=list)
    """In force before the first epoch and after each."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(epoch, test accuracy in per cent, test NLL); the last one counts."""
    batches: str = ""
    """SHA-256 of the indices of all batches in their order."""
    asked: float = 0.0
    """The mean rate while `dropped` was measured."""
    dropped: float = 0.0
    """The fraction of all elements that training forwards really lost."""


def run(arm: Arm, seed: int, epochs: int) -> dict[str, Any]:
    """Train one model, and see what the hooks leave of it; all of the outcome is JSON."""
    started = time.perf_counter()
    # Of the weights, and after them of the masks: the batches have a generator of their own.
    torch.manual_seed(seed)
    model = digits.make_model()
    before, weights = unchanged.face(model), _digest(model.state_dict().values())
    optimizer = digits.make_optimizer(model)
    drop = arm.inject(model, optimizer, epochs * digits.STEPS_PER_EPOCH)
    history = train(Trainee(model, optimizer, drop), seed, epochs)
    outcome = {"arm": arm.name, "seed": seed, "weights": weights, **vars(history)}
    outcome |= dict(zip(("accuracy", "nll"), history.curve[-1][1:], strict=True))
    outcome |= {"sites": len(drop.sites) if drop else 0, "rate_at_end": history.rates[-1]}
    outcome["changes"] = None
    if drop:
        outcome["changes"] = unchanged.changes(model, drop, digits.test_images()[:CHECKED_IMAGES], before)
    return outcome | {"seconds": time.perf_counter() - started}


def train(trainee: Trainee, seed: int, epochs: int) -> History:
    """Train to the last epoch, measuring what is dropped in the last few.

    Raises:
        FloatingPointError: a loss is not a finite number.
    """
    history, sha = History(rates=[trainee.rate]), hashlib.sha256()
    loader = digits.make_loader(seed)
    decay = CosineAnnealingLR(trainee.optimizer, epochs * digits.STEPS_PER_EPOCH)
    measured = None
    with ExitStack() as stack:
        for epoch in range(1, epochs + 1):
            if trainee.drop and epoch == max(1, epochs - MEASURED_EPOCHS + 1):
                measured = stack.enter_context(trainee.drop.measuring())
            losses = _train_epoch(trainee, decay, loader, sha)
            if epoch == 1:
                history.first_loss = losses[0]
            history.train_loss.append(statistics.fmean(losses))
            history.rates.append(trainee.rate)
            if epoch == epochs or epoch % math.ceil(epochs / CURVE_POINTS) == 0:
                history.curve.append((epoch, *_finite(digits.evaluate(trainee.model))))
    if measured:
        history.asked, history.dropped = measured.asked, measured.dropped
    history.batches = sha.hexdigest()
    return history


def check_pairs(runs: Iterable[dict[str, Any]]) -> None:
    """See that the arms of a seed share weights, batches and the first loss, as all rates are 0 there.

    Raises:
        RuntimeError: they do not; their differences would not be paired.
    """
    of_seed: dict[int, dict[str, Any]] = {}
    for outcome in runs:
        other = of_seed.setdefault(outcome["seed"], outcome)
        for what in ("weights", "batches", "first_loss"):
            if outcome[what] != other[what]:
                raise RuntimeError(
                    f"{outcome['arm']} and {other['arm']} of seed {outcome['seed']} are no pair: "
                    f"{what} is {outcome[what]} and {other[what]}."
                )


def same_numbers(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two runs agree in all but the time they took."""
    return a | {"seconds": 0} == b | {"seconds": 0}


def _train_epoch(trainee: Trainee, decay: CosineAnnealingLR, loader: Iterable[Any], sha: Any) -> list[float]:
    task = digits.load()
    trainee.model.train()
    losses = []
    for (batch,) in loader:
        sha.update(batch.numpy().tobytes())
        losses.append(trainee.step(task.x_N1HW[batch], task.y_N[batch]))
        decay.step()
    return _finite(losses)


def _finite(numbers: Any) -> Any:
    if not all(map(math.isfinite, numbers)):
        raise FloatingPointError(f"a loss is not a finite number: {numbers}")
    return numbers


def _digest(tensors: Iterable[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()
