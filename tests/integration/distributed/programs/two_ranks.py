"""Run by test_distributed.py on two ranks: each rank writes the results of its checks to a file."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import language_model
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nets import Net, X, hookdrop_warnings, output, run, sharded, train, training_state
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    AlphaDropout,
    DropBlock,
    Dropout,
    Dropout1d,
    DropPath,
    GaussianNoise,
    Injection,
    LinearSchedule,
    find,
    inject,
    seed_per_rank,
)
from hookdrop.guards.problems import STEPS_BEFORE_WARNING

Facts = dict[str, Any]


def rank() -> int:
    return dist.get_rank()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def without_wrapper(name: str) -> str:
    """A parameter's name without that of the checkpoint wrapper."""
    return name.replace("_checkpoint_wrapped_module.", "")


def mask_hash(y: torch.Tensor) -> str:
    """A hash of where `y` is 0."""
    return hashlib.sha256((y == 0).numpy().tobytes()).hexdigest()[:8]


def place(model: nn.Module) -> Injection:
    """A branch that is always dropped, one that is dropped on some ranks, and DropBlock with a schedule."""
    inject(model, DropPath(p=1.0, mode="batch"), layers="blocks.0.norm", name="always")
    inject(model, DropPath(p=0.5, mode="batch"), layers="blocks.1.norm", name="sometimes")
    return inject(model, DropBlock(0.4, 3), layers="blocks.2.norm", schedule=LinearSchedule(4))


def mean_gradients(twin: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle: the gradients of an unwrapped model, averaged over the ranks."""
    twin.zero_grad()
    twin(x).square().mean().backward()
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def trained(model: nn.Module, inner: nn.Module, twin: nn.Module, drop: Injection, factor: float = 1.0) -> Facts:
    """Three steps of a wrapped model, compared with those of an unwrapped twin."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drop.follow(optimizer)
    seed_per_rank(7)
    x, errors, masks, dropped = X + rank(), [], [], []
    inner.blocks[1].norm.register_forward_hook(lambda module, args, y: dropped.append(not y.any()))
    inner.blocks[2].norm.register_forward_hook(lambda module, args, y: masks.append(mask_hash(y)))
    for _ in range(3):
        state = torch.get_rng_state()
        model(x).square().mean().backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        find(twin).seek(drop.step_count)
        wanted = mean_gradients(twin, x)
        assert torch.equal(torch.get_rng_state(), after), "the twin drew other random numbers"
        got = {without_wrapper(name): full(parameter.grad) for name, parameter in inner.named_parameters()}
        errors.append(max((got[name] - wanted[name] * factor).abs().max().item() for name in wanted))
        optimizer.step()
        optimizer.zero_grad()
        twin.load_state_dict({name: full(value) for name, value in inner.state_dict().items()})
    branch = [got[f"blocks.0.{name}"].abs().max().item() for name in ("conv.weight", "norm.weight")]
    size = got["stem.weight"].abs().max().item()
    weights = full(inner.fc.weight).sum().item()
    return {
        "errors": errors, "masks": masks, "dropped": [bool(d) for d in dropped], "branch": branch, "size": size, "weights": weights,
        "step": drop.step_count, "p": drop.p, "found": [i.name for i in find(model)], "check": drop.check(),
    }  # fmt: skip


def ddp(before: bool, **settings: Any) -> Facts:
    torch.manual_seed(0)
    net = Net()
    drop = place(net) if before else None
    wrapped = DDP(net, **settings)
    drop = drop or place(wrapped)
    return trained(wrapped, net, copy.deepcopy(net), drop)


def factor_of_fsdp() -> float:
    """1 if FSDP2 averages gradients over ranks; PyTorch 2.7 adds them over gloo, with or without hooks."""
    layer = fully_shard(nn.Linear(1, 1))
    layer(torch.ones(1, 1)).sum().backward()
    return full(layer.bias.grad).item()


def fsdp(before: bool, reshard: bool, checkpointed: bool = False) -> Facts:
    torch.manual_seed(0)
    net = Net()
    drop = place(net) if before else None
    twin = copy.deepcopy(net)
    if checkpointed:
        net.blocks[2] = checkpoint_wrapper(net.blocks[2])
    for module in (*net.blocks, net):
        fully_shard(module, reshard_after_forward=reshard)
    if drop is None:
        drop = place(net)
        place(twin)
    return trained(net, net, twin, drop, factor_of_fsdp()) | {"class": type(net).__name__}


def fsdp_in_bfloat16(before: bool) -> Facts:
    """Inputs and outputs of the hook, on a sharded module and on a module inside one."""
    torch.manual_seed(0)
    net, seen = Net(), []

    def note(module: nn.Module, args: Any, y: torch.Tensor) -> None:
        seen.append((type(y).__name__, str(y.dtype), tuple(y.shape), y.stride()))

    def hook() -> Injection:
        for name in ("blocks.0.conv", "blocks.1"):
            net.get_submodule(name).register_forward_hook(note)
        drop = inject(net, DropBlock(0.3, 3), layers=["blocks.0.conv", "blocks.1"], schedule=LinearSchedule(2))
        for name in ("blocks.0.conv", "blocks.1"):
            net.get_submodule(name).register_forward_hook(note)
        return drop

    drop = hook() if before else None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*net.blocks, net):
        fully_shard(module, mp_policy=policy)
    drop = drop or hook()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    drop.follow(optimizer)
    seed_per_rank(0)
    train(net, optimizer, 2)
    drop.enabled = False
    net(X)
    drop.enabled = True
    classes = [type(net.get_submodule(name)).__name__ for name in ("blocks.0", "blocks.0.conv")]
    probe = drop.probe(X)
    pairs = sorted({(str(before), str(after)) for before, after in zip(seen[0::2], seen[1::2], strict=True)})
    return {"pairs": pairs, "classes": classes, "step": drop.step_count, "asked": probe.asked, "dropped": probe.dropped}


def fsdp_made_on_meta() -> Facts:
    """Hooks are placed before the parameters are allocated, as for large models."""
    torch.manual_seed(0)
    with torch.device("meta"):
        net = Net()
        drop = inject(net, DropBlock(0.4, 3), layers="blocks.*.norm")
    fully_shard(net)
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    seed_per_rank(0)
    train(net, torch.optim.SGD(net.parameters(), 0.1), 2)
    return {"dropped": drop.probe(X).dropped, "check": drop.check()}


def steps_with_a_scaler(wrap: Callable[[nn.Module], nn.Module], fused: bool) -> Facts:
    """Two accumulated batches, then a batch that overflows on only one rank, then one more."""
    torch.manual_seed(0)
    wrapped = wrap(Net())
    optimizer = torch.optim.AdamW(wrapped.parameters(), 0.1, fused=fused)
    drop = inject(wrapped, Dropout(0.4), layers="blocks.*", schedule=LinearSchedule(10)).follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    counts = []

    def step(factor: float) -> None:
        scaler.scale(wrapped(X).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counts.append(drop.step_count)

    seed_per_rank(0)
    with no_sync(wrapped):
        scaler.scale(wrapped(X).mean()).backward()
    step(1.0)
    step(float("inf") if rank() == 1 else 1.0)
    step(1.0)
    return {"counts": counts, "p": drop.p, "scale": scaler.get_scale()}


@contextmanager
def no_sync(wrapped: nn.Module) -> Iterator[None]:
    if isinstance(wrapped, DDP):
        with wrapped.no_sync():
            yield
        return
    wrapped.set_requires_gradient_sync(False)
    yield
    wrapped.set_requires_gradient_sync(True)


def steps_of_a_sharded_optimizer() -> Facts:
    torch.manual_seed(0)
    wrapped = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    drop = inject(wrapped, Dropout(0.4), layers="blocks.*", schedule=LinearSchedule(10)).follow(optimizer)
    seed_per_rank(0)
    train(wrapped, optimizer, 3)
    return {"step": drop.step_count, "p": drop.p}


def schedule_not_advancing() -> Facts:
    torch.manual_seed(0)
    net = Net()
    drop = inject(net, Dropout(0.4), layers="blocks.*", schedule=LinearSchedule(100))
    fully_shard(net)
    seed_per_rank(0)
    with hookdrop_warnings() as before:
        train(net, torch.optim.SGD(net.parameters(), 0.1), 30)
    return {"before": before, "problems": drop.check()}


def compiled_ddp() -> Facts:
    torch.manual_seed(0)
    wrapped = DDP(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Hardtanh(1.0, 2.0)))  # never 0 without dropping
    drop = inject(wrapped, DropBlock(0.4, 3, normalize=None), layers="1", schedule=LinearSchedule(2))
    fast = torch.compile(wrapped, backend="aot_eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.001)
    drop.follow(optimizer)
    seed_per_rank(0)
    dropped, masks = [], []
    for _ in range(4):
        y = fast(X.repeat(4, 1, 1, 1))
        dropped.append((y == 0).float().mean().item())
        masks.append(mask_hash(y))
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = sum(parameter.sum().item() for parameter in wrapped.parameters())
    return {"step": drop.step_count, "p": drop.p, "dropped": dropped, "masks": masks, "weights": weights}


def tensor_parallel() -> Facts:
    """Inputs and outputs of hooks on a layer that is sharded over both ranks."""
    mesh = init_device_mesh("cpu", (2,))
    facts: Facts = {}
    for regularizer in (
        Dropout(0.5), Dropout1d(0.5), DropPath(0.5), GaussianNoise(0.1), AlphaDropout(0.5),
        DropBlock(0.4, 2, channel_dim=1),
    ):  # fmt: skip
        for local in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
            parallelize_module(net, mesh, {"0": ColwiseParallel(use_local_output=local)})
            seen: list[torch.Tensor] = []
            net[0].register_forward_hook(lambda module, args, y, seen=seen: seen.append(y))
            drop = inject(net, regularizer, layers="0")
            net[0].register_forward_hook(lambda module, args, y, seen=seen: seen.append(y))
            try:
                net(torch.randn(32, 6, 8)).sum().backward()
            except Exception as error:
                text = " ".join([str(error), *getattr(error, "__notes__", [])])
                facts[f"{type(regularizer).__name__} {local}"] = {"error": text}
                continue
            kinds = [(type(y).__name__, str(getattr(y, "placements", "")), str(y.dtype), tuple(y.shape)) for y in seen]
            zeroed = (full(seen[1]) == 0).float().mean().item()
            changed = (full(seen[0]) != full(seen[1])).float().mean().item()
            gradient = full(net[0].weight.grad).abs().sum().item()
            probe = drop.probe(torch.randn(32, 6, 8))
            drop.remove()
            facts[f"{type(regularizer).__name__} {local}"] = {
                "kinds": kinds,
                "zeroed": zeroed,
                "changed": changed,
                "gradient": gradient,
                "dropped": probe.dropped,
                "mean ratio": probe.mean_ratio,
            }
    return facts


# --- seeds


def seeds() -> Facts:
    first = seed_per_rank(5)
    mask = torch.rand(4).tolist()
    torch.manual_seed(5)
    again = seed_per_rank()
    return {"seed": first, "mask": mask, "again": again, "next": seed_per_rank(6), "rank": seed_per_rank(5, rank=1)}


def about_equal_masks(problems: list[str]) -> list[str]:
    return [problem for problem in problems if "identical masks" in problem]


def check_finds_equal_seeds() -> Facts:
    torch.manual_seed(11)
    net = Net()
    drop = inject(net, Dropout(0.4), layers="blocks.*")
    alone: list[str] = []
    if rank() == 1:  # rank 0 does not check: this must not wait
        alone = drop.check()
    dist.barrier()
    after = drop.check() if rank() == 0 else []
    dist.barrier()
    both = drop.check()
    seed_per_rank(11)
    dist.barrier()
    drop.check()
    dist.barrier()
    return {
        "alone": about_equal_masks(alone),
        "after": about_equal_masks(after),
        "both": about_equal_masks(both),
        "seeded": about_equal_masks(drop.check()),
    }


def warns_once_while_training() -> Facts:
    torch.manual_seed(12)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    drop = inject(net, Dropout(0.4), layers="blocks.*", schedule=LinearSchedule(100)).follow(optimizer)
    with hookdrop_warnings() as before:
        str(drop)  # no mask has been drawn yet: no warning
    during = []
    for step in range(2 * STEPS_BEFORE_WARNING):
        with hookdrop_warnings() as texts:
            train(net, optimizer, 1)
            dist.barrier()
            if rank() == 1 and step == STEPS_BEFORE_WARNING + 3:
                drop.metrics()
        during += [(step + 1, text) for text in texts]
    with hookdrop_warnings() as texts:
        drop.metrics()
        str(drop)
        drop.state_dict()
    return {"before": before, "during": during, "later": texts}


def equal_seeds_are_intended() -> Facts:
    """Each rank is its own data parallel group, so both get the seed of rank 0."""
    groups = [dist.new_group([i]) for i in range(2)]
    net = Net()
    drop = inject(net, Dropout(0.4), layers="blocks.*")
    facts: Facts = {}
    try:
        seed_per_rank(3, group=groups[1 - rank()])
    except ValueError as error:
        facts["not a member"] = str(error)
    for name, group, number in (("group", groups[rank()], None), ("rank", None, 0)):
        seed = seed_per_rank(3, group=group, rank=number)
        for _ in range(2):
            dist.barrier()
            problems = drop.check()
        facts[name] = {"seed": seed, "problems": about_equal_masks(problems)}
    return facts


def branches_skipped_on_all_ranks() -> Facts:
    """Which branches are skipped in each step, in forward and recompute, with own seeds and with one seed per step."""
    alone, _ = dist.new_subgroups(group_size=1)
    torch.manual_seed(0)
    net, skipped = Net(), []
    drop = inject(net, DropPath(p=0.5, mode="batch"), layers="blocks.*.norm")
    for block in net.blocks:
        block.norm.register_forward_hook(lambda module, args, y: skipped.append(not y.any().item()))
    found: Facts = {}
    for how in ("own", "same"):
        seed_per_rank(0)
        skipped.clear()
        for step in range(8):
            torch.rand(rank())  # ranks draw different numbers between the steps
            if how == "same":
                seed_per_rank(step, group=alone)
            images = X[: 2 + rank()].clone().requires_grad_()
            checkpoint(net, images, use_reentrant=False).sum().backward()
        found[how] = skipped[:]
    return found | {"problems": drop.check()}


# --- checkpoints


def saved() -> Facts:
    net, optimizer, drop = sharded()
    seed_per_rank(0)
    train(net, optimizer, 5)
    drop.target_p = 0.2
    state = training_state(net, optimizer, drop)
    dcp.save(state, checkpoint_id=f"{sys.argv[1]}/saved")
    dcp.async_save({"drop": drop, "all": find(net)}, checkpoint_id=f"{sys.argv[1]}/async").result()
    keys = [key for key in state["model"] if "hookdrop" in key or "drop" in key]
    return {"keys": keys, "output": output(net), "step": drop.step_count, "p": drop.p}


CHECKS: dict[str, Callable[[], Facts]] = {
    "ddp default before": partial(ddp, True),
    "ddp default after": partial(ddp, False),
    "ddp find_unused_parameters before": partial(ddp, True, find_unused_parameters=True),
    "ddp static_graph after": partial(ddp, False, static_graph=True),
    "fsdp before reshard=True": partial(fsdp, True, True),
    "fsdp after reshard=False": partial(fsdp, False, False),
    "fsdp checkpointed": partial(fsdp, True, True, checkpointed=True),
    **{f"bfloat16 {when}": partial(fsdp_in_bfloat16, when == "before") for when in ("before", "after")},
    "meta": fsdp_made_on_meta,
    "scaler DistributedDataParallel fused=True": partial(steps_with_a_scaler, DDP, True),
    "scaler fully_shard fused=False": partial(steps_with_a_scaler, fully_shard, False),
    "zero": steps_of_a_sharded_optimizer,
    "not advancing": schedule_not_advancing,
    "compiled": compiled_ddp,
    "tensor parallel": tensor_parallel,
    "seeds": seeds,
    "check": check_finds_equal_seeds,
    "warns once": warns_once_while_training,
    "equal seeds intended": equal_seeds_are_intended,
    "branches": branches_skipped_on_all_ranks,
    "language model ddp": language_model.ddp,
    "language model fsdp": language_model.fsdp,
    "saved": saved,
}  # fmt: skip

if __name__ == "__main__":
    only = sys.argv[2:]
    run({name: check for name, check in CHECKS.items() if not only or name in only})
