"""Checks of two_ranks.py: regularizers of language models, and penalties, in DDP, FSDP2 and tensor parallelism."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from hookdrop import ActivationPenalty, Dropout, DropPath, HeadDropout, NEFTune, find, inject, seed_per_rank
from tests.integration.distributed.programs.nets import assert_close, gathered, mean_gradients
from tests.support.models import toy

IDS = torch.arange(24).view(4, 6)
MASK = torch.ones(4, 6, dtype=torch.long)
MASK[0, 3:] = 0


class Layer(nn.Module):
    """Pre-norm attention without masks, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.proj, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.mlp(x).relu()


def forward(m: Any, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    x = m.embed(ids)
    for layer in m.layers:
        x = layer(x)
    return m.head(x)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(IDS, attention_mask=MASK).square().mean() * (1 + dist.get_rank())


def check_training(wrapped: nn.Module, inner: nn.Module, twin: nn.Module) -> None:
    """Eight backward passes, compared with the mean of the gradients of unwrapped models.

    A layer is skipped on one rank, on both and on none; none of this needs `find_unused_parameters`.
    """
    seed_per_rank(3)
    skipped: list[bool] = []
    for _ in range(8):
        state = torch.get_rng_state()
        inner.zero_grad()
        loss_of(wrapped).backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        alone = torch.autograd.grad(loss := loss_of(twin), [one.proj.weight for one in twin.layers], retain_graph=True)
        assert torch.equal(torch.get_rng_state(), after), "the twin drew other random numbers"
        skipped += [not grad.any().item() for grad in alone]
        assert_close({name: one.grad for name, one in inner.named_parameters()}, mean_gradients(twin, loss))
    assert {len({*pair}) for pair in zip(*gathered(skipped), strict=True)} == {1, 2}


def placed() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(), Layer()])
    model = toy(forward, embed=nn.Embedding(24, 16), layers=layers, head=nn.Linear(16, 24))
    inject(model, NEFTune(5, attention_mask=True), layers="embed")
    inject(model, "LayerDrop(p=0.5)", layers="layers.*")
    inject(model, HeadDropout(0.3, heads=4), layers="layers.*.proj")
    inject(model, DropPath(0.5, mode="subset"), layers="layers.*.mlp")
    inject(model, Dropout(0.5), layers=["embed", "layers.*.qkv"], at="parameters", on_existing="stack")
    inject(model, "Mixout(p=0.5)", layers="head")
    return model, copy.deepcopy(model)


def ddp() -> None:
    model, twin = placed()
    check_training(DDP(model), model, twin)


def fsdp() -> None:
    model, twin = placed()
    for module in (*model.layers, model):
        fully_shard(module)
    check_training(model, model, twin)


def two_layers(checkpointed: bool = False) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.second(torch.tanh(checkpoint(m.first, x, use_reentrant=False) if checkpointed else m.first(x)))

    torch.manual_seed(0)
    return toy(forward, first=nn.Linear(8, 16), second=nn.Linear(16, 8))


def by_hand(h: torch.Tensor) -> torch.Tensor:
    return 2 * h.pow(2).mean() + (h[:, 1:] - h[:, :-1]).pow(2).mean()


def check(model: nn.Module, x: torch.Tensor) -> None:
    twin = two_layers()
    right = mean_gradients(twin, twin(x).square().mean() + by_hand(twin.first(x)))
    for _ in range(2):
        model.zero_grad()
        (model(x).square().mean() + find(model).penalty()).backward()
        assert_close({name.removeprefix("module."): one.grad for name, one in model.named_parameters()}, right)


def hooked(checkpointed: bool = False) -> nn.Module:
    model = two_layers(checkpointed)
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
