"""The ranks of a distributed job: seeding each differently, and noticing where that was forgotten.

Masks come from PyTorch's global generators. Ranks that are seeded alike drop the same places of their batches.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hookdrop.utils.validation import count

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# --- seeding


def seed_per_rank(seed: int | None = None, *, rank: int | None = None, group: dist.ProcessGroup | None = None) -> int:
    """Seed PyTorch's generators, on the CPU and on accelerators, differently on each rank.

    Call it on every rank once model and data sets are built: `fully_shard` keeps the weights that each rank made (DDP
    takes those of rank 0), and random splits must be the same everywhere. The seed is a hash of `seed` and the rank, so
    that the jobs of seeds 0 and 1 have no rank in common. Nothing is communicated. Python's and NumPy's generators are
    left alone: no mask comes from them.

    Args:
        seed: the job's, any whole number; None is the one that PyTorch was last seeded with (`torch.initial_seed()`).
        rank: which of the ranks that draw different masks this is, from 0 up. If neither this nor `group` is given:
            the rank in the job, from `torch.distributed`, or before that is initialized from `RANK`, or 0.
        group: the process group whose rank counts: that of data parallelism where tensor parallel ranks work on the
            same samples and so must draw the same masks. `check()` then takes equal seeds for meant.

    Returns:
        The seed of this rank, in [0, 2**63), for the generators of other libraries.

    Raises:
        TypeError, ValueError: a number is none or out of range, both `rank` and `group` are given, or this process is
            not in `group`. Nothing was seeded.

    Example:
        >>> seed_per_rank(0, rank=0) == seed_per_rank(0, rank=0) != seed_per_rank(0, rank=1) == torch.initial_seed()
        True
    """
    global _meant
    base = torch.initial_seed() if seed is None else count(seed, "seed", "seed_per_rank", -(2**63))
    own = _mixed(base, _own_rank(rank, group))
    torch.manual_seed(own)
    _meant = None if group is None else own
    return own


def _mixed(seed: int, rank: int) -> int:
    """63 bits, of which every one depends on all of both."""
    # As torch does it, a negative seed is its 64 bits without the sign.
    digest = hashlib.sha256(f"{seed % 2**64} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _own_rank(rank: int | None, group: dist.ProcessGroup | None) -> int:
    if rank is not None and group is not None:
        raise ValueError("seed_per_rank: give rank or group, not both; nothing was seeded.")
    if rank is not None:
        return count(rank, "rank", "seed_per_rank", 0)
    if group is not None:
        own = dist.get_rank(group)
        if own < 0:
            raise ValueError("seed_per_rank: this process is not in `group`; nothing was seeded.")
        return own
    if _initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "0")
    if not text.isdecimal():
        raise ValueError(f"seed_per_rank: the environment has RANK={text!r}, which is no rank; nothing was seeded.")
    return int(text)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


# --- noticing equal seeds
#
# Each rank writes its seed into the job's store, and its name on a slot of that seed. So it takes two requests to see
# whether another rank has the seed, however many there are, and no rank ever waits for another.

_meant: int | None = None
"""The seed that this process shares with others because it was told to."""

_announced: tuple[weakref.ref[Store], int] | None = None
"""The store and the seed that this process wrote last."""

_ABSENT = "-"


def alike(where: nn.Module | torch.device) -> tuple[int, int, int] | None:
    """The ranks of this process and of another that draws masks there from the same seed, and that seed.

    None if none is known: another is known once it has asked the same. Without `torch.distributed` nothing is done.
    """
    if not _initialized() or dist.get_world_size() < 2:
        return None
    seed = _seed_in_use(where if isinstance(where, torch.device) else _device_of(where))
    store: Store | None = dist.distributed_c10d._get_default_store()
    if seed == _meant or store is None:
        return None
    try:
        rank = dist.get_rank()
        other = _other_with(seed, rank, store)
    except RuntimeError:  # it is gone with the rank that had it, or is one that can't be asked
        return None
    return None if other is None else (rank, other, seed)


def _device_of(model: nn.Module) -> torch.device:
    """The accelerator, if some of the model is on one."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "meta"}
    return max(devices, key=lambda device: device.type != "cpu", default=torch.device("cpu"))


def _seed_in_use(device: torch.device) -> int:
    if device.type in ("cpu", "meta"):
        return torch.initial_seed()
    module = torch.get_device_module(device)
    # Fake tensors may be on a device that this machine has not got.
    usable = getattr(module, "is_initialized", lambda: True)()
    return int(module.initial_seed()) if usable else torch.initial_seed()


def _other_with(seed: int, rank: int, store: Store) -> int | None:
    _announce(seed, rank, store)
    first = int(store.compare_set(_first(seed), "", str(rank)))
    if first == rank:
        other = _read(store, _second(seed))
        return None if other is None or _read(store, _of(other)) != seed else other
    if _read(store, _of(first)) == seed:
        store.set(_second(seed), str(rank))
        return first
    store.set(_first(seed), str(rank))  # who had it was seeded anew
    return None


def _announce(seed: int, rank: int, store: Store) -> None:
    global _announced
    before = _announced[1] if _announced is not None and _announced[0]() is store else None
    if before == seed:
        return
    if before is not None:  # or the slots of a job that is seeded at every step would fill the store
        for slot in (_first(before), _second(before)):
            if _read(store, slot) == rank:
                store.delete_key(slot)
    store.set(_of(rank), str(seed))
    _announced = weakref.ref(store), seed


def _read(store: Store, key: str) -> int | None:
    """What is there now; `store.get` would wait for a key that is not."""
    text = store.compare_set(key, _ABSENT, _ABSENT).decode()
    return None if text == _ABSENT else int(text)


def _of(rank: int) -> str:
    return f"hookdrop/seed of rank {rank}"


def _first(seed: int) -> str:
    return f"hookdrop/first rank of seed {seed}"


def _second(seed: int) -> str:
    return f"hookdrop/another rank of seed {seed}"
