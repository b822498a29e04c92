"""Seed the ranks of a distributed job differently.

Masks are drawn from PyTorch's global generators, so ranks with equal seeds drop the same positions of their batches.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from hookdrop.utils.validation import count


class _Seeded(NamedTuple):
    """The last call of `seed_per_rank` in this process."""

    job: int
    own: int
    shared: bool
    """Whether equal seeds on ranks outside the group are intended."""


_last: _Seeded | None = None


def seed_per_rank(seed: int | None = None, *, rank: int | None = None, group: dist.ProcessGroup | None = None) -> int:
    """Seed PyTorch's CPU and accelerator generators differently on each rank.

    Call it on every rank after building the model and the data sets: `fully_shard` keeps the weights that each rank
    initialized (DDP broadcasts those of rank 0), and random splits must agree between ranks. The seed is a hash of
    `seed` and the rank, so that jobs with the seeds 0 and 1 have no rank seeds in common. Nothing is communicated. The
    generators of Python and NumPy are not seeded, because masks do not use them. The function is idempotent.

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
        >>> seed_per_rank(0, rank=0) == seed_per_rank(0, rank=0) != seed_per_rank(0, rank=1) == torch.initial_seed()
        True
    """
    global _last
    job = _job_seed() if seed is None else count(seed, "seed", "seed_per_rank", -(2**63))
    own = _mixed(job, _own_rank(rank, group))
    torch.manual_seed(own)
    _last = _Seeded(job, own, shared=group is not None)
    return own


def is_shared(seed: int) -> bool:
    """Whether `seed` came from `seed_per_rank` with a group, so that ranks outside the group may have it too."""
    return _last is not None and _last.shared and _last.own == seed


def _job_seed() -> int:
    seed = torch.initial_seed()
    return _last.job if _last is not None and _last.own == seed else seed


def _mixed(seed: int, rank: int) -> int:
    """Hash both numbers to 63 bits."""
    # Like torch, reinterpret a negative seed as unsigned 64 bits.
    digest = hashlib.sha256(f"{seed % 2**64} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


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
    if in_job():
        return dist.get_rank()
    text = os.environ.get("RANK", "0")
    if not text.isdecimal():
        raise ValueError(f"seed_per_rank: the environment variable RANK={text!r} is not a rank; nothing was seeded.")
    return int(text)


def in_job() -> bool:
    return dist.is_available() and dist.is_initialized()
