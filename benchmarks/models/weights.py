"""Fast random initialization: large tensors are filled with copies of a pool of random values.

Drawing every weight of a thousand models would take longer than all checks. The values have the scale that the
initializer requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_POOL = 2**20 + 7  # prime, so that no two rows of a weight are equal
_SMALL = 2**14


@contextmanager
def quick_weights() -> Iterator[None]:
    """Fill large tensors from the pool, and skip tensors on the meta device."""
    with ExitStack() as stack:
        for method, fill in (("normal_", _normal), ("uniform_", _uniform), ("erfinv_", _erfinv)):
            stack.enter_context(patch.object(Tensor, method, _accelerated(getattr(Tensor, method), fill)))
        yield


def _accelerated(original: Any, fill: Any) -> Any:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_meta:
            return self
        if self.numel() < _SMALL or not self.is_contiguous() or self.dtype != torch.float32:
            return original(self, *args, **kwargs)
        fill(self.detach().view(-1), *args, **kwargs)
        return self

    return method


def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> None:
    _tile(x, _pool()[0])
    x.mul_(std).add_(mean)


# `uniform_` calls its first argument "from", a Python keyword, so it is always positional.
def _uniform(x: Tensor, a: float = 0.0, b: float = 1.0, generator: object = None) -> None:
    _tile(x, _pool()[1])
    x.mul_(b - a).add_(a)


def _erfinv(x: Tensor) -> None:
    """Keep uniform values, scaled so that `trunc_normal_` ends with the requested standard deviation."""
    x.mul_(math.sqrt(1.5))


def _tile(x: Tensor, pool: Tensor) -> None:
    for part in x.split(len(pool)):
        part.copy_(pool[: len(part)])


@lru_cache(1)
def _pool() -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    # The caller may be building a model on the meta device.
    with torch.device("cpu"):
        return torch.randn(_POOL, generator=generator), torch.rand(_POOL, generator=generator)
