"""Hashes that tell whether two runs saw, began with or ended with the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor, nn


def of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the tensors' bytes, one after the other."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def of_model(model: nn.Module) -> str:
    """Of all parameters and buffers."""
    return of(model.state_dict().values())
