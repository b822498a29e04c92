"""Models and helpers shared by the programs that run on several ranks."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hookdrop import DropBlock, HookdropWarning, Injection, LinearSchedule, find, inject
from tests.support.models import toy

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def make_net() -> nn.Module:
    """Three residual blocks, without batch norm: the output of a rank depends only on its own batch."""
    torch.manual_seed(0)
    parts = {"stem": nn.Conv2d(3, 8, 3, padding=1), "blocks": nn.Sequential(Block(8), Block(8), Block(8))}
    return toy(lambda m, x: m.fc(m.blocks(m.stem(x)).mean((2, 3))), **parts, fc=nn.Linear(8, 10))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_gradients(twin: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle: the gradients of an unwrapped model, averaged over the ranks."""
    twin.zero_grad()
    loss.backward()
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert max((full(found[name]) - expected[name]).abs().max().item() for name in expected) <= atol


def injected() -> tuple[nn.Module, Injection]:
    net = make_net()
    return net, inject(net, DropBlock(0.4, 3), layers="blocks.*.norm", schedule=LinearSchedule(10))


def sharded() -> tuple[nn.Module, torch.optim.Optimizer, Injection]:
    """The model, optimizer and injection that are saved on two ranks and loaded on others."""
    net, drop = injected()
    for module in (*net.blocks, net):
        fully_shard(module)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    return net, optimizer, drop.follow(optimizer)


def training_state(net: nn.Module, optimizer: torch.optim.Optimizer, drop: Injection) -> dict[str, Any]:
    """What is saved and loaded; the state of the injection in three ways."""
    model_state, optimizer_state = get_state_dict(net, optimizer)
    injections = {"drop": drop, "all": find(net), "nested": {"a": [drop.state_dict()]}}
    return {"model": model_state, "optimizer": optimizer_state, **injections}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        net(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def output(net: nn.Module) -> list[float]:
    with torch.no_grad():
        y = net.eval()(X)
    net.train()
    return y.flatten()[:20].tolist()


@contextmanager
def hookdrop_warnings() -> Iterator[list[str]]:
    """Collects the warnings of hookdrop; ignores those of PyTorch."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, HookdropWarning)]


def run(checks: dict[str, Callable[[], object]]) -> None:
    """Run each check on every rank and write to a file what it returns and warns of; an error ends all ranks."""
    torch.set_num_threads(1)
    # If a rank fails, the others stop waiting after the timeout.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = {}
    for name, check in checks.items():
        with hookdrop_warnings() as texts:
            result = check()
        results[name] = result, texts
        dist.barrier()
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
    dist.destroy_process_group()
