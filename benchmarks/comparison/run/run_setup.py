"""Build the model with its hooks, the optimizer and the data of a run from its spec."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import hookdrop
from comparison.data.catalog import load
from comparison.data.task import Split, Task
from comparison.run import models
from comparison.spec import arms
from comparison.spec.run_spec import Run, seed_of
from models.footprint import digest, kept

AFTER_RAMP = 10**12
"""An optimizer step after the end of every ramp."""
EVAL_BATCH_SIZE = 256


@dataclass
class RunSetup:
    """Everything that a run needs for its first training step."""

    run: Run
    task: Task
    split: Split
    model: nn.Module
    forward: Any  # the model for training, or a linear probe of it
    optimizer: Optimizer
    decay: LRScheduler
    drop: hookdrop.Injection | None
    plan: hookdrop.Plan | None
    device: torch.device
    weights: str  # SHA-256 of the initial parameters and buffers
    footprint: dict[str, Any]  # of the model without hooks

    def logits(self, indices: Tensor) -> Tensor:
        """The model's outputs in eval mode: (N, classes), float32, on the CPU."""
        self.model.eval()
        with torch.no_grad():
            parts = [self.model(self.images(part)).float().cpu() for part in torch.split(indices, EVAL_BATCH_SIZE)]
        return torch.cat(parts)

    def images(self, indices: Tensor) -> Tensor:
        """Images without augmentation, as `placed`."""
        return self.placed(self.task.source.images(indices))

    def placed(self, x_BCHW: Tensor) -> Tensor:
        """Images on the run's device, in its memory format."""
        return x_BCHW.to(self.device, memory_format=memory_format(self.run))


def prepare(run: Run) -> RunSetup:
    """Build a run; afterwards the global generator is seeded for the masks."""
    task, device = load(run.data), torch.device(run.device)
    split = task.split(run.data.train_size, run.data.validation_size, run.seed)
    torch.manual_seed(seed_of(run.seed, "weights"))
    model = models.build(run.model, task.classes, task.source.shape[0], arms.model_arguments(run.arm))
    steps = steps_of(run, len(split.train))
    weights, before = digest(model.state_dict().values()), kept(model)
    drop, plan = _inject(run, model, steps, torch.zeros(2, *task.source.shape))
    model.to(device, memory_format=memory_format(run))  # type: ignore[call-overload]
    forward = models.LinearProbe(model) if run.arm.kind == "probe" else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr, weight_decay = run.arm.lr or run.optimizer.lr, run.optimizer.weight_decay
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=weight_decay)
    decay = CosineAnnealingLR(optimizer, steps)
    if drop and run.arm.p is not None:
        drop.follow(optimizer)
    torch.manual_seed(seed_of(run.seed, "masks", 0))
    return RunSetup(run, task, split, model, forward, optimizer, decay, drop, plan, device, weights, before)


def memory_format(run: Run) -> torch.memory_format:
    return torch.channels_last if run.channels_last else torch.preserve_format


def at_final_rate(run: Run) -> RunSetup:
    """Build a run at its final rate, ready for a training step."""
    setup = prepare(run)
    setup.forward.train()
    if setup.drop and run.arm.p is not None:
        setup.drop.seek(AFTER_RAMP)
    return setup


def steps_of(run: Run, train_images: int) -> int:
    """Total number of optimizer steps; incomplete batches are dropped."""
    return run.epochs * max(1, train_images // run.batch_size)


def _inject(
    run: Run, model: nn.Module, steps: int, example: Tensor
) -> tuple[hookdrop.Injection | None, hookdrop.Plan | None]:
    """Place the hooks. The plan's warnings become flags in the report; any later warning is an error."""
    spec = arms.injection(run.arm, model, example)
    if spec is None:
        return None, None
    settings: Any = {"total_steps": steps, "example_input": example}
    plan = hookdrop.plan(model, spec, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookdrop.HookdropWarning)
        return hookdrop.inject(model, spec, **settings), plan
