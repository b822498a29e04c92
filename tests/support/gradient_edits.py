"""A model, gradients and expected results for the tests of gradient edits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hookdrop import ClampActivationGrad, ClipActivationGrad, Regularizer, ScaleActivationGrad

G = torch.tensor([[3.0, 4.0, 0.0], [0.3, -0.4, 0.0], [0.0, 0.0, 0.0]])
"""A gradient whose samples have norms 5, .5 and 0."""


SAMPLE_NORMS = G.norm(dim=1, keepdim=True)
CASES: dict[str, tuple[Regularizer, Tensor]] = {
    "norm": (ClipActivationGrad(max_norm=1.0), G / G.norm()),
    "norm below the limit": (ClipActivationGrad(max_norm=6.0), G),
    "norm per sample": (ClipActivationGrad(max_norm=1.0, per_sample=True), G / SAMPLE_NORMS.clamp(min=1.0)),
    "value": (ClipActivationGrad(max_value=0.35), G.clamp(-0.35, 0.35)),
    "clamp": (ClampActivationGrad(-0.1, 3.5), G.clamp(-0.1, 3.5)),
    "clamp from below": (ClampActivationGrad(min=0), G.clamp(min=0)),
    "clamp from above": (ClampActivationGrad(max=1), G.clamp(max=1)),
    "halved": (ScaleActivationGrad(0.5), G * 0.5),
    "stopped": (ScaleActivationGrad(0), G * 0),
    "reversed": (ScaleActivationGrad(-1), -G),
}


class Net(nn.Module):
    """x -> act(inner(2 x)). The gradient of x is twice that of the hooked tensor."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.act = act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x * 2.0))


def gradient(call: Callable[[Tensor], Tensor], g: Tensor = G) -> Tensor:
    """The gradient of the input if `g` is the gradient of the output."""
    x = (torch.rand(g.shape, dtype=torch.float64) + 0.5).to(g.dtype).requires_grad_()
    call(x).backward(g)
    assert x.grad is not None
    return x.grad


NON_FINITE = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
