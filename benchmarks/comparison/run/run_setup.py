"""What a run trains: the model, its hooks, its optimizer and the images; all of it follows from the run's spec."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

import hookdrop
from comparison.data import load
from comparison.data.task import Split, Task
from comparison.run import fingerprints, models, ranks
from comparison.run import footprint_check as unchanged
from comparison.spec import arms
from comparison.spec.run_spec import Run
from comparison.spec.seeds import seed_of

AT_THE_END = 10**12
"""An optimizer step by which every ramp is over."""


@dataclass
class Trainee:
    """A model that is ready for its first step."""

    run: Run
    task: Task
    split: Split
    labels_N: Tensor
    """Of the training images, in their order."""
    model: nn.Module
    forward: Any
    """The same for training: shared by processes, or compiled."""
    optimizer: Optimizer
    decay: LRScheduler
    drop: hookdrop.Injection | None
    flags: list[str]
    call: str
    device: torch.device
    weights: str
    """SHA-256 of all parameters and buffers."""
    face: Any
    """Of the model before it had hooks."""

    @property
    def rate(self) -> float | None:
        """The rate in force."""
        return self.drop.p if self.drop else None


def prepare(run: Run) -> Trainee:
    """The model with fresh weights and hooks; the global generator is left at the start of the masks' stream."""
    task = load(run.data)
    split = task.split(run.data.train_size, run.data.validation_size, run.seed)
    device = ranks.device_of(run)
    torch.manual_seed(seed_of(run.seed, "weights"))
    model = models.build(run.model, task.classes, task.shape[0])
    weights, face = fingerprints.of_model(model), unchanged.face(model)
    example = torch.zeros(2, *task.shape)
    planned = arms.plan(run.arm, model, steps_of(run, len(split.train)), example)
    model.to(device)
    optimizer, decay = _optimizer(run, model, len(split.train))
    drop, flags = _placed(planned)
    if drop and run.arm.p is not None:
        drop.follow(optimizer)
    forward = ranks.shared(run, model)
    torch.manual_seed(seed_of(run.seed, "masks", ranks.rank()))
    return Trainee(
        run,
        task,
        split,
        task.training_labels(split.train, run.seed),
        model,
        torch.compile(forward) if run.compile else forward,
        optimizer,
        decay,
        drop,
        flags,
        arms.spelled(run.arm),
        device,
        weights,
        face,
    )


def at_final_rate(run: Run) -> Trainee:
    """A trainee as it is when its ramp is over, in one process, ready for a training step."""
    trainee = prepare(run.model_copy(update={"world": 1}))
    trainee.forward.train()
    if trainee.drop and run.arm.p is not None:
        trainee.drop.seek(AT_THE_END)
    return trainee


def steps_of(run: Run, train_images: int) -> int:
    """Optimizer steps of all epochs; what is left after an epoch's last full batch is not trained on."""
    return run.epochs * max(1, train_images // run.batch_size)


def _placed(planned: hookdrop.Plan | None) -> tuple[hookdrop.Injection | None, list[str]]:
    """The hooks, and what hookdrop warned of: a flag in the report, while any later warning is an error."""
    if planned is None:
        return None, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookdrop.HookdropWarning)
        return planned.apply(), list(planned.warnings)


def _optimizer(run: Run, model: nn.Module, train_images: int) -> tuple[Optimizer, LRScheduler]:
    settings, steps = run.optimizer, steps_of(run, train_images)
    optimizer: Optimizer
    if settings.name == "SGD":
        nesterov = settings.momentum > 0
        optimizer = torch.optim.SGD(
            model.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay, nesterov=nesterov
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay)
    if settings.decay == "steps":
        return optimizer, MultiStepLR(optimizer, [round(steps / 2), round(steps * 3 / 4)])
    return optimizer, CosineAnnealingLR(optimizer, steps)
