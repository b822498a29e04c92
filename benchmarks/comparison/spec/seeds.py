"""Independent random streams: everything that is drawn has its own seed."""

from __future__ import annotations

import hashlib

import torch


def seed_of(seed: int, *stream: str | int) -> int:
    """The seed of a named stream, for example `seed_of(3, "order", epoch)`."""
    text = "/".join(map(str, (seed, *stream)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *stream: str | int) -> torch.Generator:
    """A CPU generator at the start of a named stream."""
    return torch.Generator().manual_seed(seed_of(seed, *stream))
