"""Run by test_distributed.py on two ranks: checks of DDP, FSDP2, tensor parallelism, seeds and sharded checkpoints."""

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import hookdrop
from hookdrop import DropBlock, Dropout, Dropout1d, DropPath, Injection, LinearSchedule, find, inject, seed_per_rank
from hookdrop.core.events import MOVES
from tests.integration.distributed.programs import language_model, nets
from tests.integration.distributed.programs.nets import X, full, gathered, make_net, train


def rank() -> int:
    return dist.get_rank()


# --- DDP and FSDP2


def place(model: nn.Module) -> Injection:
    """A branch that is always dropped, one that is dropped on some ranks, and DropBlock with a schedule."""
    inject(model, DropPath(p=1.0, mode="batch"), layers="blocks.0.norm", name="always")
    inject(model, DropPath(p=0.5, mode="batch"), layers="blocks.1.norm", name="sometimes")
    return inject(model, DropBlock(0.4, 3), layers="blocks.2.norm", schedule=LinearSchedule(4))


def check_training(model: nn.Module, inner: nn.Module, twin: nn.Module, drop: Injection, factor: float = 1.0) -> None:
    """Three steps of a wrapped model: its gradients are the mean over unwrapped twins, with masks that differ."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drop.follow(optimizer)
    seed_per_rank(7)
    x, masks, dropped = X + rank(), [], []
    inner.blocks[1].norm.register_forward_hook(lambda module, args, y: dropped.append(not y.any().item()))
    inner.blocks[2].norm.register_forward_hook(lambda module, args, y: masks.append((y == 0).numpy().tobytes()))
    for _ in range(3):
        state = torch.get_rng_state()
        model(x).square().mean().backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        find(twin).seek(drop.step_count)
        wanted = nets.mean_gradients(twin, twin(x).square().mean())
        assert torch.equal(torch.get_rng_state(), after), "the twin drew other random numbers"
        names = {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in inner.named_parameters()}
        got = {name: full(one.grad) for name, one in names.items()}
        nets.assert_close(got, {name: gradient * factor for name, gradient in wanted.items()}, 1e-7)
        optimizer.step()
        optimizer.zero_grad()
        twin.load_state_dict({name: full(value) for name, value in inner.state_dict().items()})
    assert got["stem.weight"].abs().max() > 1e-3
    # A dropped branch has gradients, equal to 0: DDP would wait for one that is None.
    assert not any(got[f"blocks.0.{name}"].any() for name in ("conv.weight", "norm.weight"))
    assert any(one != other for one, other in zip(*gathered(dropped), strict=True)), "it was dropped on one rank"
    times = len(masks) // 3  # forwards per step: two with a checkpoint
    first, second = gathered(masks)
    assert first[0] == second[0], "the schedule starts at rate 0"
    assert not set(first[times:]) & set(second[times:])
    assert len(set(first)) == 3
    assert first[0::times] == first[times - 1 :: times], "the recompute has the mask of its forward"
    assert (drop.step_count, drop.p) == (3, pytest.approx(0.3))
    assert len({*gathered(full(inner.fc.weight).sum().item())}) == 1
    assert [one.name for one in find(model)] == ["always", "sometimes", "dropblock"]
    assert drop.check() == []


def ddp(before: bool, **settings: Any) -> None:
    net = make_net()
    drop = place(net) if before else None
    wrapped = DDP(net, **settings)
    drop = drop or place(wrapped)
    check_training(wrapped, net, copy.deepcopy(net), drop)


def factor_of_fsdp() -> float:
    """1 if FSDP2 averages gradients over ranks; PyTorch 2.7 adds them over gloo, with or without hooks."""
    layer = fully_shard(nn.Linear(1, 1))
    layer(torch.ones(1, 1)).sum().backward()
    return full(layer.bias.grad).item()


def fsdp(before: bool, reshard: bool, checkpointed: bool = False) -> None:
    net = make_net()
    drop = place(net) if before else None
    twin = copy.deepcopy(net)
    if checkpointed:
        net.blocks[2] = checkpoint_wrapper(net.blocks[2])
    for module in (*net.blocks, net):
        fully_shard(module, reshard_after_forward=reshard)
    if drop is None:
        drop = place(net)
        place(twin)
    check_training(net, net, twin, drop, factor_of_fsdp())


def hooks_placed_on_the_meta_device() -> None:
    """Before the parameters are allocated, as for large models."""
    with torch.device("meta"):
        net = make_net()
        drop = inject(net, DropBlock(0.4, 3), layers="blocks.*.norm")
    fully_shard(net)
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    seed_per_rank(0)
    train(net, torch.optim.SGD(net.parameters(), 0.1), 2)
    assert drop.probe(X).dropped == pytest.approx(0.4, abs=0.03)
    assert drop.check() == []


def a_step_skipped_on_one_rank_counts_on_no_rank(wrap: Callable[[nn.Module], nn.Module], fused: bool) -> None:
    """Two accumulated batches, then a batch whose gradients overflow on only one rank, then one more."""
    wrapped = wrap(make_net())
    optimizer = torch.optim.AdamW(wrapped.parameters(), 0.1, fused=fused)
    drop = inject(wrapped, Dropout(0.4), layers="blocks.*", schedule=LinearSchedule(10)).follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seed_per_rank(0)
    with no_sync(wrapped):
        scaler.scale(wrapped(X).mean()).backward()
    for factor, count in ((1.0, 1), (float("inf") if rank() == 1 else 1.0, 1), (1.0, 2)):
        scaler.scale(wrapped(X).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert drop.step_count == count
    assert drop.p == pytest.approx(0.08)
    assert scaler.get_scale() == 2.0, "halved by the overflow"


@contextmanager
def no_sync(wrapped: nn.Module) -> Iterator[None]:
    if isinstance(wrapped, DDP):
        with wrapped.no_sync():
            yield
        return
    wrapped.set_requires_gradient_sync(False)
    yield
    wrapped.set_requires_gradient_sync(True)


def steps_of_a_sharded_optimizer() -> None:
    wrapped = DDP(make_net())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    drop = inject(wrapped, Dropout(0.4), layers="blocks.*", schedule=LinearSchedule(10)).follow(optimizer)
    seed_per_rank(0)
    train(wrapped, optimizer, 3)
    assert (drop.step_count, drop.p) == (3, pytest.approx(0.12))


def branches_are_skipped_on_all_ranks_together() -> None:
    """With one seed per step, also if ranks have batches of different sizes and checkpoints recompute."""
    alone, _ = dist.new_subgroups(group_size=1)
    net, skipped, found = make_net(), [], {}
    drop = inject(net, DropPath(p=0.5, mode="batch"), layers="blocks.*.norm")
    for block in net.blocks:
        block.norm.register_forward_hook(lambda module, args, y: skipped.append(not y.any().item()))
    for how in ("own", "same"):
        seed_per_rank(0)
        skipped.clear()
        for step in range(8):
            torch.rand(rank())  # ranks draw different numbers between the steps
            if how == "same":
                seed_per_rank(step, group=alone)
            images = X[: 2 + rank()].clone().requires_grad_()
            checkpoint(net, images, use_reentrant=False).sum().backward()
        found[how] = gathered(skipped)
    assert found["own"][0] != found["own"][1]
    assert found["same"][0] == found["same"][1]
    steps = [tuple(found["same"][0][i : i + 6]) for i in range(0, 48, 6)]
    assert all(step[:3] == step[3:] for step in steps), "the recompute is that of its forward"
    assert len(set(steps)) > 3
    assert not drop.check()


def hook_of_a_sharded_layer(regularizer: hookdrop.Regularizer, local: bool) -> None:
    """Tensor parallelism: a DTensor stays a DTensor, and a probe counts all of its shards."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(use_local_output=local)})
    seen: list[torch.Tensor] = []
    net[0].register_forward_hook(lambda module, args, y: seen.append(y))
    drop = inject(net, regularizer, layers="0")
    net[0].register_forward_hook(lambda module, args, y: seen.append(y))
    x = torch.randn(32, 6, 8)
    if isinstance(regularizer, DropBlock) and not local:
        with pytest.raises(TypeError, match="x is a DTensor, sharded over several ranks") as error:
            net(x)
        assert "DropBlock at '0'" in " ".join([str(error.value), *getattr(error.value, "__notes__", [])])
        return
    net(x).sum().backward()
    given, returned = ((type(y).__name__, str(getattr(y, "placements", "")), y.dtype, y.shape) for y in seen)
    assert given == returned
    assert given[:2] == (("Tensor", "") if local else ("DTensor", "(Shard(dim=2),)"))
    assert full(net[0].weight.grad).any()
    p = 0.0 if isinstance(regularizer, hookdrop.GaussianNoise) else drop.p
    # 32 samples: the standard deviation for DropPath is .09.
    assert (full(seen[1]) == 0).float().mean().item() == pytest.approx(p, abs=0.2)
    assert (full(seen[0]) != full(seen[1])).float().mean() > 0.99
    if isinstance(regularizer, Dropout1d):  # 192 channels in three forwards: the standard deviation is .02
        assert drop.probe(x).dropped == pytest.approx(0.5, abs=0.1)
        assert drop.probe(x).mean_ratio == pytest.approx(1.0, abs=0.2)


# --- seeds


def about_equal_masks(problems: list[str]) -> list[str]:
    return [problem for problem in problems if "identical masks" in problem]


def check_finds_equal_seeds_without_waiting() -> None:
    net = make_net()
    torch.manual_seed(11)
    drop = inject(net, Dropout(0.4), layers="blocks.*")
    if rank() == 1:  # rank 0 does not check, and has not announced its seed: this must not wait
        assert not about_equal_masks(drop.check())
    dist.barrier()
    if rank() == 0:
        assert about_equal_masks(drop.check())
    dist.barrier()
    (text,) = about_equal_masks(drop.check())
    assert re.search(r"ranks 0 and 1 draw identical masks.* seeded with 11\.\n.*hookdrop\.seed_per_rank\(\)", text)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    drop.follow(optimizer)
    with nets.hookdrop_warnings() as texts:
        train(net, optimizer, 2 * MOVES)
    assert texts == about_equal_masks(texts)
    assert len(texts) == 1, "each rank warns once"
    seed_per_rank(11)
    for _ in range(2):
        dist.barrier()
        problems = drop.check()
    assert not about_equal_masks(problems)


def a_group_declares_that_equal_seeds_are_intended() -> None:
    """Each rank is its own data parallel group. A rank declares nothing: LOCAL_RANK on two machines is a mistake."""
    groups = [dist.new_group([i]) for i in range(2)]
    net = make_net()
    torch.manual_seed(12)
    drop = inject(net, Dropout(0.4), layers="blocks.*")
    with pytest.raises(ValueError, match="not in `group`; nothing was seeded"):
        seed_per_rank(3, group=groups[1 - rank()])
    seeds = set()
    for settings, count in (({"group": groups[rank()]}, 0), ({"rank": 0}, 1)):
        seeds.add(seed_per_rank(3, **settings))
        for _ in range(2):
            dist.barrier()
            problems = drop.check()
        assert len(about_equal_masks(problems)) == count, (settings, problems)
    assert seeds == {seed_per_rank(3, rank=0)}


# --- checkpoints


def saved() -> list[float]:
    """Save the state after five steps; return outputs of the model."""
    net, optimizer, drop = nets.sharded()
    seed_per_rank(0)
    train(net, optimizer, 5)
    drop.target_p = 0.2
    state = nets.training_state(net, optimizer, drop)
    dcp.save(state, checkpoint_id=f"{sys.argv[1]}/saved")
    dcp.async_save({"drop": drop, "all": find(net)}, checkpoint_id=f"{sys.argv[1]}/async").result()
    assert not [key for key in state["model"] if "drop" in key], "the state of the model contains nothing of hookdrop"
    return nets.output(net)


SHARDED = (Dropout1d(0.5), DropPath(0.5), hookdrop.GaussianNoise(0.1), DropBlock(0.4, 2, channel_dim=1))
CHECKS: dict[str, Callable[[], object]] = {
    "ddp before": partial(ddp, True),
    "ddp after": partial(ddp, False),
    "ddp find_unused_parameters": partial(ddp, True, find_unused_parameters=True),
    "ddp static_graph": partial(ddp, False, static_graph=True),
    "fsdp before, reshard": partial(fsdp, True, True),
    "fsdp after": partial(fsdp, False, False),
    "fsdp checkpointed": partial(fsdp, True, True, checkpointed=True),
    "meta": hooks_placed_on_the_meta_device,
    "scaler ddp": partial(a_step_skipped_on_one_rank_counts_on_no_rank, DDP, fused=True),
    "scaler fsdp": partial(a_step_skipped_on_one_rank_counts_on_no_rank, fully_shard, fused=False),
    "zero": steps_of_a_sharded_optimizer,
    **{
        f"tensor parallel {drop.title} {local}": partial(hook_of_a_sharded_layer, drop, local)
        for drop in SHARDED
        for local in (False, True)
    },
    "branches": branches_are_skipped_on_all_ranks_together,
    "check": check_finds_equal_seeds_without_waiting,
    "equal seeds intended": a_group_declares_that_equal_seeds_are_intended,
    "language model ddp": language_model.ddp,
    "language model fsdp": language_model.fsdp,
    "penalties": language_model.penalties_are_part_of_the_loss_of_each_rank,
    "saved": saved,
}

if __name__ == "__main__":
    only = sys.argv[2:]
    nets.run({name: check for name, check in CHECKS.items() if not only or name in only})
