"""The ranks of a distributed job: seeding each differently, and noticing where that was forgotten.

Masks come from PyTorch's global generators. Ranks with the same seed drop the same places of their batches.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hookdrop.utils.torch_internals import default_store
from hookdrop.utils.validation import count

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# --- seeding


class _Seeded(NamedTuple):
    """What `seed_per_rank` did last in this process."""

    job: int
    own: int
    shared: bool
    """Whether ranks outside of the group are meant to have the same seed."""


_last: _Seeded | None = None


def seed_per_rank(seed: int | None = None, *, rank: int | None = None, group: dist.ProcessGroup | None = None) -> int:
    """Seed PyTorch's generators, on the CPU and on accelerators, differently on each rank.

    Call it on every rank once model and data sets are built: `fully_shard` keeps the weights that each rank made (DDP
    takes those of rank 0), and random splits must be the same everywhere. The seed is a hash of `seed` and the rank, so
    that the jobs of seeds 0 and 1 have no rank in common. Nothing is communicated. Python's and NumPy's generators are
    left alone: no mask comes from them. A second call (a re-run cell) gives the same seeds again.

    Args:
        seed: the job's, any whole number; None is the one that PyTorch was last seeded with (`torch.initial_seed()`),
            or if that was done by this function, the job's seed that it used.
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
    global _last
    job = _job_seed() if seed is None else count(seed, "seed", "seed_per_rank", -(2**63))
    own = _mixed(job, _own_rank(rank, group))
    torch.manual_seed(own)
    _last = _Seeded(job, own, shared=group is not None)
    return own


def _job_seed() -> int:
    seed = torch.initial_seed()
    return _last.job if _last is not None and _last.own == seed else seed


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
# Each rank writes its seed into the job's store, and its number into the first free slot of that seed: two requests for
# each rank and seed. No rank ever waits for another. Who asks reads the slots.

_announced: tuple[weakref.ref[Store], dict[str, tuple[int, str]]] | None = None
"""A store, and the seed and the slot there that this process wrote last, by the kind of generator."""

_ABSENT = "-"


class _Job(NamedTuple):
    """A rank in its job, and the seed that its masks come from."""

    store: Store
    rank: int
    kind: str
    """The generator's device type: a seed gives other masks on another type."""
    seed: int

    def key(self, what: str, of: int) -> str:
        return f"hookdrop/{what} {self.kind} {of}"


def announce(device: torch.device) -> None:
    """Let the other ranks of the job know the seed that masks on `device` come from: once for each seed."""
    job = _job(device)
    if job is not None and _written(job.store).get(job.kind, (None,))[0] != job.seed:
        with suppress(RuntimeError):
            _claim(job)


def find_rank_with_same_seed(where: nn.Module | torch.device) -> tuple[int, int, int] | None:
    """The number of this rank, that of another which draws masks there from the same seed, and that seed.

    None if none is known: another is known once it has announced its seed. Without `torch.distributed` nothing is done.
    """
    job = _job(where if isinstance(where, torch.device) else _device_of(where))
    if job is None:
        return None
    try:
        first = _claim(job)
        other = first if first != job.rank else _read(job.store, job.key("second with seed", job.seed))
        if other in (None, job.rank) or _read(job.store, job.key("seed of", other)) != job.seed:
            return None
    except RuntimeError:  # the store is gone with the rank that had it, or is one that can't be asked
        return None
    return job.rank, other, job.seed


def _job(device: torch.device) -> _Job | None:
    """None where no other rank could draw the same masks, or where this is intended."""
    if not _initialized() or dist.get_world_size() < 2:
        return None
    kind, seed = _seed_in_use(device)
    store = default_store()
    if store is None or (_last is not None and _last.shared and _last.own == seed):
        return None
    return _Job(store, dist.get_rank(), kind, seed)


def _device_of(model: nn.Module) -> torch.device:
    """The accelerator, if some of the model is on one."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "meta"}
    return max(devices, key=lambda device: device.type != "cpu", default=torch.device("cpu"))


def _seed_in_use(device: torch.device) -> tuple[str, int]:
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        # Fake tensors may be on a device that this machine has not got.
        if getattr(module, "is_initialized", lambda: True)():
            return device.type, int(module.initial_seed())
    return "cpu", torch.initial_seed()


def _claim(job: _Job) -> int:
    """Write down the seed, once, and take a slot of it; the rank that is first with this seed."""
    store, written = job.store, _written(job.store)
    seed, before = written.get(job.kind, (None, ""))
    if seed != job.seed:
        store.set(job.key("seed of", job.rank), str(job.seed))
    slot = job.key("first with seed", job.seed)
    first = int(store.compare_set(slot, "", str(job.rank)))
    if first != job.rank and _read(store, job.key("seed of", first)) == job.seed:
        slot = job.key("second with seed", job.seed)
        store.set(slot, str(job.rank))
    elif first != job.rank:  # that rank was seeded anew
        store.set(slot, str(job.rank))
        first = job.rank
    written[job.kind] = job.seed, slot
    # Or the slots of a job that is seeded at every step would fill the store.
    if before not in ("", slot) and _read(store, before) == job.rank:
        store.delete_key(before)
    return first


def _written(store: Store) -> dict[str, tuple[int, str]]:
    global _announced
    if _announced is None or _announced[0]() is not store:
        _announced = weakref.ref(store), {}
    return _announced[1]


def _read(store: Store, key: str) -> int | None:
    """What is there now; `store.get` would wait for a key that is not."""
    text = store.compare_set(key, _ABSENT, _ABSENT).decode()
    return None if text == _ABSENT else int(text)
