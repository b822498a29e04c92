"""Seed the ranks of a distributed job differently, and detect ranks that share a seed.

Masks are drawn from PyTorch's global generators, so ranks with equal seeds drop the same positions of their batches.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hookdrop.core.arguments import count
from hookdrop.core.torch_internals import default_store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


# The last call of `seed_per_rank`: the job's seed, this rank's, and whether other ranks may intentionally share it.
_last: tuple[int, int, bool] | None = None


def seed_per_rank(seed: int | None = None, *, rank: int | None = None, group: dist.ProcessGroup | None = None) -> int:
    """Seed PyTorch's CPU and accelerator generators differently on each rank.

    Call it on every rank after building the model and the data sets: `fully_shard` keeps the weights that each rank
    initialized (DDP broadcasts those of rank 0), and random splits must agree between ranks. The seed is a hash of
    `seed` and the rank, so that jobs with the seeds 0 and 1 have no rank seeds in common. Nothing is communicated, and
    the generators of Python and NumPy are not seeded. The function is idempotent.

    Args:
        seed: the seed of the job, any integer. None uses `torch.initial_seed()`, or the same job seed as before if
            this function was the last to seed PyTorch.
        rank: the index of this rank among those that draw different masks, from 0. By default the rank in `group`, or
            else in the job: from `torch.distributed` if it is initialized, from the environment variable `RANK`, or 0.
        group: the process group that defines the rank. Pass the data-parallel group if tensor-parallel ranks process
            the same samples and must draw identical masks. `check()` then accepts equal seeds.

    Returns:
        The seed of this rank, in [0, 2**63), which can also seed the generators of other libraries.

    Raises:
        TypeError, ValueError: an argument is not an integer or is out of range, both `rank` and `group` are given, or
            this process is not in `group`. Nothing was seeded.

    Example:
        >>> seed_per_rank(0, rank=0) == seed_per_rank(0, rank=0)
        True
        >>> seed_per_rank(0, rank=0) == seed_per_rank(0, rank=1)
        False
    """
    global _last
    if seed is None:
        now = torch.initial_seed()
        job = _last[0] if _last is not None and _last[1] == now else now
    else:
        job = count(seed, "seed", "seed_per_rank", -(2**63))
    # Like torch, reinterpret a negative seed as unsigned 64 bits.
    digest = hashlib.sha256(f"{job % 2**64} {_own_rank(rank, group)}".encode()).digest()
    own = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(own)
    _last = job, own, group is not None
    return own


def _own_rank(rank: int | None, group: dist.ProcessGroup | None) -> int:
    if rank is not None and group is not None:
        raise ValueError("seed_per_rank: pass rank or group, not both; nothing was seeded.")
    if rank is not None:
        return count(rank, "rank", "seed_per_rank", 0)
    if group is not None:
        own = dist.get_rank(group)
        if own < 0:
            raise ValueError("seed_per_rank: this process is not in `group`; nothing was seeded.")
        return own
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "0")
    if not text.isdecimal():
        raise ValueError(f"seed_per_rank: the environment variable RANK={text!r} is not a rank; nothing was seeded.")
    return int(text)


# --- detecting equal seeds

_announced: tuple[int, str, int] | None = None  # the store's id, the device type and the seed of the last `announce`
_ABSENT = "-"


def announce(device: torch.device) -> None:
    """Publish the seed of the masks on `device` to the other ranks of the job, once per seed."""
    global _announced
    job = _job(device)
    if job is not None and _announced != (key := (id(job[0]), *job[1:])):
        _announced = key
        find_rank_with_same_seed(device)


def find_rank_with_same_seed(where: nn.Module | torch.device) -> tuple[int, int, int] | None:
    """Publish the seed of this rank; return this rank, another that draws masks from the same seed, and the seed.

    Returns None if no such rank has published its seed yet, or if `torch.distributed` is not initialized. No rank waits
    for another: the job's store has the seed of each rank, and the first and the last rank that published each seed.
    """
    if isinstance(where, nn.Module):  # the accelerator, if any parameter is on one
        devices = {parameter.device for parameter in where.parameters() if parameter.device.type != "meta"}
        where = max(devices, key=lambda device: device.type != "cpu", default=torch.device("cpu"))
    if (job := _job(where)) is None:
        return None
    (store, kind, seed), rank = job, dist.get_rank()
    prefix = f"hookdrop/{kind}"

    def read(key: str) -> int | None:
        # `store.get` would wait for a missing key.
        text = store.compare_set(f"{prefix} {key}", _ABSENT, _ABSENT).decode()
        return None if text == _ABSENT else int(text)

    try:
        store.set(f"{prefix} seed of {rank}", str(seed))
        other: int | None = int(store.compare_set(f"{prefix} first with {seed}", "", str(rank)))
        if other != rank and read(f"seed of {other}") == seed:
            store.set(f"{prefix} last with {seed}", str(rank))
        else:  # this rank is the first, or that rank was reseeded
            store.set(f"{prefix} first with {seed}", str(rank))
            other = read(f"last with {seed}")
        same = other not in (None, rank) and read(f"seed of {other}") == seed
    except RuntimeError:  # the rank that hosted the store is gone, or the store is not readable
        return None
    return (rank, other, seed) if same and other is not None else None


def _job(device: torch.device) -> tuple[Store, str, int] | None:
    """Return the store of the job, and the device type and seed of this rank's generator.

    None if no other rank can draw the same masks, or if equal masks are intended.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    kind, seed, store = "cpu", torch.initial_seed(), default_store()
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        # Fake tensors may be on a device that does not exist here.
        if getattr(module, "is_initialized", lambda: True)():
            kind, seed = device.type, int(module.initial_seed())
    if store is None or (_last is not None and _last[1:] == (seed, True)):
        return None
    return store, kind, seed
