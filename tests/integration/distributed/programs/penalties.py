"""Check of two_ranks.py: penalties in DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from hookdrop import ActivationPenalty, find, inject
from tests.integration.distributed.programs.nets import assert_close, mean_gradients


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


def check(model: nn.Module, x: torch.Tensor) -> None:
    twin = Net()
    right = mean_gradients(twin, twin(x).square().mean() + by_hand(twin.first(x)))
    for _ in range(2):
        model.zero_grad()
        (model(x).square().mean() + find(model).penalty()).backward()
        assert_close({name.removeprefix("module."): one.grad for name, one in model.named_parameters()}, right)


def hooked(checkpointed: bool = False) -> Net:
    model = Net(checkpointed)
    inject(model, ActivationPenalty(), layers="first")
    return model


def penalties_are_part_of_the_loss_of_each_rank() -> None:
    """The gradients are the mean over models without hooks, with the penalty by hand; also with sharded activations."""
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    layers = hooked()
    fully_shard(layers.first)
    for model in (
        DDP(hooked()), DDP(hooked(checkpointed=True)), DDP(hooked(), find_unused_parameters=True), fully_shard(hooked()),
        fully_shard(layers),
    ):  # fmt: skip
        check(model, x)
    plan = {"first": ColwiseParallel(use_local_output=False)}
    parallel = parallelize_module(hooked(), init_device_mesh("cpu", (2,)), plan)
    parallel.first.register_forward_hook(lambda layer, args, h: h.full_tensor())
    dist.broadcast(x, 0)
    check(parallel, x)
