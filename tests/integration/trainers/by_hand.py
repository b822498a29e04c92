"""What a user writes without hookdrop: dropout in chosen layers, with a rate that rises from 0 to `p` in `steps` steps.

`docs/trainers/index.md` counts these lines. Nothing here checks names, shapes or seeds, or warns about hooks that are lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout2d


class Ramp:
    def __init__(self, model: nn.Module, layers: Iterable[str], p: float, steps: int) -> None:
        self.p, self.steps, self.step_count = p, steps, 0
        for name in layers:
            model.get_submodule(name).register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return dropout2d(output, self.rate) if layer.training else None

    @property
    def rate(self) -> float:
        return self.p * min(self.step_count / self.steps, 1)

    def metrics(self) -> dict[str, float]:
        return {"p": self.rate, "step": self.step_count}


class FollowingRamp(Ramp):
    """For trainers that do not restore a step counter."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(self.count)

    def count(self, *args: Any) -> None:
        self.step_count += 1

    def state_dict(self) -> dict[str, int]:
        return {"step_count": self.step_count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step_count = state["step_count"]
