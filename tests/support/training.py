"""Models with an injection, forwards, backward passes and short trainings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop import DropBlock, Dropout, Injection, LinearSchedule, inject
from tests.support.models import Small


def train(model: nn.Module, x: Tensor, times: int = 1) -> None:
    for _ in range(times):
        model(x)


def optimize(model: nn.Module, steps: int = 1, optimizer: Any = None, x: Tensor | None = None) -> None:
    """A training loop without hookdrop calls."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        model(torch.ones(2) if x is None else x).sum().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def seeded(function: Callable[..., Any], *args: Any, seed: int = 3, **settings: Any) -> Any:
    """Return what a function returns from this seed."""
    torch.manual_seed(seed)
    return function(*args, **settings)


def backward(model: nn.Module, scale: float = 1.0) -> Tensor:
    loss = model(torch.ones(2, 4)).sum() * scale
    loss.backward()
    return loss


def gradients_of(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def train_step(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Return output, gradients and buffers of one forward (by default of the model) and backward from seed 0."""
    model.train().zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = (forward or model)(x)
    out.square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *grads, *(buffer.clone() for buffer in model.buffers())]


def layer(p: float = 0.5, **settings: object) -> tuple[nn.Sequential, Injection]:
    """An identity with Dropout."""
    model = nn.Sequential(nn.Identity())
    return model, inject(model, Dropout(p), layers="0", **settings)


def injected(**kwargs: object) -> tuple[Small, Injection]:
    """DropBlock on two layers, with a schedule."""
    torch.manual_seed(0)
    model = Small()
    settings = {"layers": "layer1.*", "schedule": LinearSchedule(20)} | kwargs
    return model, inject(model, settings.pop("regularizer", DropBlock(0.4, 3)), **settings)


def half_ramped(model: nn.Module) -> Injection:
    """Inject DropBlock halfway through its schedule."""
    drop = inject(model, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(10), p_scale="depth")
    drop.seek(5)
    return drop


def scheduled(**optimizer: object) -> tuple[nn.Module, Injection, torch.optim.Optimizer]:
    """Dropout with a schedule, and an optimizer that it can follow."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(100))
    return model, drop, torch.optim.SGD(model.parameters(), 0.1, **optimizer)


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2
