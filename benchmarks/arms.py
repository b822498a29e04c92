"""What is compared: the regularizers, where they sit, and at which rate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

import digits
import hookdrop

P = 0.1
BLOCK = 3
_NORMS = "layer[34].*.bn[12]"
# The last norm of each residual branch: on a whole block's output the shortcut would be dropped with the branch.
_BRANCH_ENDS = "layer*.*.bn2"


@dataclass(frozen=True)
class Arm:
    """A regularizer and its layers; the arm without a regularizer has neither."""

    name: str
    regularizer: str = ""
    layers: str = ""

    def plan(self, model: nn.Module, steps: int) -> hookdrop.Plan:
        """The injection with keep_prob falling linearly over all steps, its shapes checked on an image."""
        return hookdrop.plan(
            model,
            self.regularizer,
            layers=self.layers,
            schedule=hookdrop.LinearSchedule(steps=steps),
            example_input=digits.load().x_N1HW[:1],
        )

    def inject(self, model: nn.Module, optimizer: Optimizer, steps: int) -> hookdrop.Injection | None:
        """The injection, stepped by the optimizer; None if there is no regularizer."""
        if not self.regularizer:
            return None
        planned = self.plan(model, steps)
        if planned.warnings:
            # Such as a block that covers the whole map, which would be Dropout2d under another name.
            raise RuntimeError(f"{self.name}: {planned.warnings[0]}")
        return planned.apply().follow(optimizer)


NONE = Arm("none")
ARMS = (
    NONE,
    Arm("Dropout", f"Dropout(p={P})", _NORMS),
    Arm("Dropout2d", f"Dropout2d(p={P})", _NORMS),
    Arm("DropBlock", f"DropBlock(p={P}, block_size={BLOCK})", _NORMS),
    Arm("DropPath", f"DropPath(p={P})", _BRANCH_ENDS),
)
