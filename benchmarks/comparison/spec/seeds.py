"""Random streams that do not touch one another: each thing that is drawn has a seed of its own."""

from __future__ import annotations

import hashlib

import torch


def seed_of(seed: int, *stream: str | int) -> int:
    """The seed of a named stream, as `seed_of(3, "order", epoch)`: another one for every name and number."""
    text = "/".join(map(str, (seed, *stream)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *stream: str | int) -> torch.Generator:
    """A generator on the CPU at the start of a named stream."""
    return torch.Generator().manual_seed(seed_of(seed, *stream))
