"""Run by test_distributed.py on two ranks: penalties in DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from hookdrop import ActivationPenalty, find, inject


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.checkpointed = nn.Linear(8, 16), nn.Linear(16, 8), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        return self.second(torch.tanh(h))


def by_hand(h: torch.Tensor) -> torch.Tensor:
    return 2 * h.pow(2).mean() + (h[:, 1:] - h[:, :-1]).pow(2).mean()


def expected(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle: the gradients of a model without hooks, averaged over the ranks."""
    twin = Net()
    (twin(x).square().mean() + by_hand(twin.first(x))).backward()
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def error(model: nn.Module, x: torch.Tensor, steps: int = 2) -> float:
    """The largest error of a gradient in any step."""
    found, right = [], expected(x)
    for _ in range(steps):
        model.zero_grad()
        (model(x).square().mean() + find(model).penalty()).backward()
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found.append((grad - right[name.removeprefix("module.")]).abs().max().item())
    return max(found)


def hooked(checkpointed: bool = False) -> Net:
    model = Net(checkpointed)
    inject(model, ActivationPenalty(), layers="first")
    return model


def main() -> None:
    dist.init_process_group("gloo")
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    facts: dict[str, Any] = {
        "ddp": error(DDP(hooked()), x),
        "ddp checkpointed": error(DDP(hooked(checkpointed=True)), x),
        "ddp find_unused_parameters": error(DDP(hooked(), find_unused_parameters=True), x),
        "fsdp": error(fully_shard(hooked()), x),
    }
    layers = hooked()
    fully_shard(layers.first)
    facts["fsdp of layers"] = error(fully_shard(layers), x)
    dist.broadcast(same := x.clone(), 0)
    mesh = init_device_mesh("cpu", (2,))
    parallel = parallelize_module(hooked(), mesh, {"first": ColwiseParallel(use_local_output=False)})
    parallel.first.register_forward_hook(lambda layer, args, h: h.full_tensor())
    facts["tensor parallel"] = error(parallel, same)
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


main()
