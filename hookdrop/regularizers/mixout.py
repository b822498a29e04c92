"""Mixout: parameters that return to where they started."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookdrop.regularizers.base import DropRegularizer, P
from hookdrop.regularizers.dropout import dropout


def mixout(x: Tensor, start: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Return the parameter `x` with each element replaced by that of `start` with probability `p`: see `Mixout`."""
    p = P.argument(p, x, "mixout")
    return start + dropout(x - start, p) if training else x


class Mixout(DropRegularizer):
    """Replace each element of a parameter by its value at the injection with probability `p`, and keep the mean.

    With the parameter W, its value U at the injection, and a mask M that is 1 with probability 1 - p, the layer uses
    (M W + (1 - M) U - p U) / (1 - p), which is U + dropout(W - U). For fine-tuning, inject after the pretrained weights
    are loaded, and before those of a checkpoint. U takes the memory of the parameters once more.

    Args:
        p: probability of replacing an element, in [0, 1]. At 1, the layer uses U.
        keep_prob: 1 - p, instead of `p`.

    Shape: any; only for parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> inject(model, Mixout(p=0.5), layers=nn.Linear)
        <Injection 'mixout': 2 sites, p=0.5 of 0.5, step 0 of ConstantSchedule()>

    Reference: Lee et al. 2020, "Mixout: Effective regularization to finetune large-scale pretrained language models",
    arXiv:1909.11299, equation 4. The authors' code draws one row of the mask and repeats it for all rows.
    """

    needs = ("start",)
    only_at = "parameters"

    def regularize(self, x: Tensor, rate: Any, start: Tensor) -> Tensor:
        return mixout(x, start, rate)
