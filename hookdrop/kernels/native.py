"""The compiled loops of `_blocks.c`, which only make masking faster: PyTorch operations do the same without them.

Installing hookdrop compiles them if there is a C compiler. The environment variable `HOOKDROP_KERNEL=0` disables them.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookdrop.kernels.blocks import Blocks, contiguous_strides
from hookdrop.kernels.subclasses import PLAIN
from hookdrop.utils.torch_internals import dispatch_modes, has_storage, is_tracing, is_zero_tensor

_INTERFACE = 3
_SIGNATURES = {  # p: a pointer, w: a word of 64 bits
    "hookdrop_mask": "ppwpwwwwpwwwppppw",
    "hookdrop_clear": "ppwpwwwwpwww",
    "hookdrop_count": "pwwpwwwpppw",
    "hookdrop_advise": "pw",
}
_FUSED = (torch.float32, torch.float64)
_SEEDS = (torch.int32, torch.int64)
_LARGE = 2**22
"""Bytes from which huge pages pay off."""
_PLACES = 2**32
"""Places for seeds in a chunk that `_blocks.c` can number."""
_WORTH_A_THREAD = 2**15
"""Elements below which waking other threads costs more than they save."""

_Array: TypeAlias = "ctypes.Array[ctypes.c_int64]"


def available() -> bool:
    """Whether the compiled loops are there and in use."""
    return _library is not None


def plain(x: Tensor) -> bool:
    """Whether the memory of `x` holds its values, and no trace or dispatch mode observes operations on it."""
    observed = dispatch_modes() > 0 or is_tracing()
    # A negated view has the opposite sign in memory; batched gradients and gradients of 0 have no memory.
    return type(x) in PLAIN and not (observed or x.is_neg() or is_zero_tensor(x)) and has_storage(x)


def _serves(x: Tensor) -> bool:
    return _library is not None and x.is_cpu and x.element_size() > 1 and plain(x)


# Each of the functions below returns None (`zero_`: False) for a tensor that the loops were not compiled for.


def masked(x: Tensor, seeds: Tensor, scale: Tensor, blocks: Blocks) -> Tensor | None:
    """`x * scale`, and 0 in the seeds' blocks, in one pass."""
    if x.dtype not in _FUSED or not _serves(x) or (layout := _layout(blocks, x.shape, x.stride())) is None:
        return None
    y = _empty_like(x)
    layout.run(y, x, scale.to(torch.float64).contiguous(), seeds)
    return y


def zero_(y: Tensor, seeds: Tensor, blocks: Blocks) -> bool:
    """Zero the seeds' blocks in `y`."""
    if not _serves(y) or (layout := _layout(blocks, y.shape, y.stride())) is None:
        return False
    layout.run(y, None, torch.ones(1, dtype=torch.float64, device="cpu"), seeds)
    return True


def count(seeds: Tensor, blocks: Blocks, of_each: Tensor | None = None) -> int | None:
    """How many elements the seeds' blocks cover; adds each sample's number to `of_each`, int64 zeros of (samples,)."""
    if seeds.dtype not in _SEEDS or not (_serves(seeds) and seeds.is_contiguous()):
        return None
    maps = blocks.samples * blocks.channels, blocks.channels
    found = seeds.data_ptr(), seeds.numel(), seeds.dtype == torch.int64
    threads = _threads(seeds.numel() * math.prod(blocks.blocks))
    counts = None if of_each is None else of_each.data_ptr()
    covered: int = _library.hookdrop_count(counts, *maps, *found, *_map(blocks), threads)
    return None if covered < 0 else covered


@lru_cache(maxsize=1024)
def _map(blocks: Blocks) -> tuple[int, _Array, _Array, _Array]:
    valid, sizes, edges = (_array(*_three(values)) for values in (blocks.valid, blocks.sizes, blocks.blocks))
    return math.prod(blocks.valid), valid, sizes, edges


def cleared(x: Tensor, dropped: Tensor, scale: Tensor) -> Tensor | None:
    """`x * scale`, and 0 where the bool mask is True.

    `dropped` has the memory format of `x`, or is (samples, channels or 1, ...) where `x` is contiguous. Its samples may
    lie apart in memory.
    """
    if x.dtype not in _FUSED or not _serves(x):
        return None
    shared = dropped.shape != x.shape
    if not shared and dropped.stride() == x.stride() and _is_dense(x):
        maps = 1, 1, x.numel(), dropped.data_ptr(), 0
    elif x.is_contiguous() and x.dim() == dropped.dim() > 2 and dropped[0].is_contiguous():
        if shared and dropped.shape != (x.shape[0], 1, *x.shape[2:]):
            return None
        maps = x.shape[0], x.shape[1], math.prod(x.shape[2:]), dropped.data_ptr(), dropped.stride(0)
    else:
        return None
    if (scales := _in_memory_order(scale, x)) is None:
        return None
    y = _empty_like(x)
    scaling = x.data_ptr(), x.element_size(), scales.data_ptr(), x.numel() // scales.numel()
    _library.hookdrop_clear(y.data_ptr(), *scaling, *maps, shared, _threads(x.numel()))
    return y


_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def _empty_like(x: Tensor) -> Tensor:
    """Memory for a result like `x`: huge pages, if it is large and the system has them."""
    y = torch.empty_like(x)
    if y.nbytes >= _LARGE:
        _library.hookdrop_advise(y.data_ptr(), y.nbytes)
    return y


def _in_memory_order(scale: Tensor, x: Tensor) -> Tensor | None:
    """One scale for each of equal parts of the memory of `x`; None if the scales do not apply to such parts."""
    if scale.numel() == 1:
        return scale.to(torch.float64)
    axes = max(axis for axis, size in enumerate(scale.shape) if size > 1) + 1
    if not (x.is_contiguous() or (axes == 1 and x.stride(0) * x.shape[0] == x.numel())):
        return None
    return scale.to(torch.float64).expand(*x.shape[:axes], *[1] * (x.dim() - axes)).contiguous()


@dataclass(frozen=True)
class _Layout:
    """Where blocks lie in memory, in the terms of `_blocks.c`."""

    chunks: int
    size: int
    repeat: int
    places: int
    arrays: tuple[_Array, ...]
    """Valid, strides, edges, steps."""

    def run(self, y: Tensor, x: Tensor | None, scales: Tensor, seeds: Tensor) -> None:
        seeds = seeds.contiguous() if seeds.dtype in _SEEDS else seeds.long()
        scaling = y.element_size(), scales.data_ptr(), self.chunks // scales.numel()
        chunks = self.chunks, self.size, self.repeat
        found = seeds.data_ptr(), seeds.numel(), seeds.dtype == torch.int64, self.places, *self.arrays
        source = None if x is None else x.data_ptr()
        _library.hookdrop_mask(y.data_ptr(), source, *scaling, *chunks, *found, _threads(y.numel()))


@lru_cache(maxsize=1024)
def _layout(blocks: Blocks, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Layout | None:
    """None if neither the maps nor the samples of the tensor are in one piece each."""
    valid, edges, size = _three(blocks.valid), _three(blocks.blocks), math.prod(blocks.sizes)
    lines = contiguous_strides(_three(blocks.sizes))
    channels = shape[blocks.channel]
    shared_by = channels // blocks.channels
    channels_first = torch.empty_strided(shape, strides, device="meta").movedim(blocks.channel, 1)
    if channels_first.is_contiguous():
        chunks = blocks.samples * channels, size, shared_by
        arrays = (1, *valid), (0, *lines), (1, *edges), (0, *lines)
    elif channels_first.movedim(1, -1).is_contiguous():
        chunks = blocks.samples, size * channels, 1
        lines = tuple(stride * channels for stride in lines)
        arrays = (blocks.channels, *valid), (1, *lines), (*edges, shared_by), (*lines, 1)
    else:
        return None
    places = math.prod(arrays[0])
    return _Layout(*chunks, places, tuple(_array(*values) for values in arrays)) if places < _PLACES else None


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _WORTH_A_THREAD else 1


def _three(values: Sequence[int]) -> tuple[int, ...]:
    """The same for three axes: missing ones have length 1."""
    return (*[1] * (3 - len(values)), *values)


def _array(*values: int) -> _Array:
    return (ctypes.c_int64 * len(values))(*values)


def _load() -> ctypes.CDLL | None:
    """The library, if it was built from these sources."""
    path = Path(__file__).with_name("_blocks.native")
    if os.environ.get("HOOKDROP_KERNEL") == "0" or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.hookdrop_interface.restype = ctypes.c_int64
        if library.hookdrop_interface() != _INTERFACE:
            return None
    except (OSError, AttributeError):  # built for another machine, or not this library
        return None
    for name, kinds in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in kinds]
        function.restype = ctypes.c_int64 if name == "hookdrop_count" else None
    return library


_library: Any = _load()
