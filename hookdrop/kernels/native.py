"""The compiled loops of `_blocks.c`. They are optional and only affect speed; PyTorch operations give the same results.

Wheels for common platforms have them, and installing from source compiles them if a C compiler is available. The
environment variable `HOOKDROP_KERNEL=0` disables them; `HOOKDROP_KERNEL=require` makes a build without them fail.
"""

from __future__ import annotations

import ctypes
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookdrop.core.torch_internals import PLAIN_TYPES, dispatch_modes, has_storage, is_tracing, is_zero_tensor
from hookdrop.kernels.blocks import Blocks, contiguous_strides, three_axes

_INTERFACE = 4
_SIGNATURES = {  # p: a pointer, w: a 64-bit integer, d: a double
    "hookdrop_successes": "pwpwdw",
    "hookdrop_mask": "ppwpwwwwpwwwppppw",
    "hookdrop_clear": "ppwpwwwwpwww",
    "hookdrop_count": "pwwpwwwpppw",
    "hookdrop_advise": "pw",
}
_KINDS = {"p": ctypes.c_void_p, "w": ctypes.c_int64, "d": ctypes.c_double}
_FUSED_DTYPES = (torch.float32, torch.float64)
_SEED_DTYPES = (torch.int32, torch.int64)
_HUGE_PAGE_BYTES = 2**22  # from here on, huge pages pay off
_MAX_PLACES = 2**32  # the seed positions per chunk that `_blocks.c` can address
_MIN_PARALLEL_ELEMENTS = 2**15  # below, waking other threads costs more than it saves

_Array: TypeAlias = "ctypes.Array[ctypes.c_int64]"


def available() -> bool:
    return _library is not None


def has_plain_memory(x: Tensor) -> bool:
    """Whether the memory of `x` holds its values and no trace or dispatch mode intercepts operations on it."""
    intercepted = dispatch_modes() > 0 or is_tracing()
    # A negated view has the opposite sign in memory; batched gradients and zero gradients have no memory.
    return type(x) in PLAIN_TYPES and not (intercepted or x.is_neg() or is_zero_tensor(x)) and has_storage(x)


def _is_supported(x: Tensor) -> bool:
    return _library is not None and x.is_cpu and x.element_size() > 1 and has_plain_memory(x)


# The functions below return None (`zero_`: False) for tensors that the loops do not support.


def success_positions(logs: Tensor, divisor: float, trials: int, dtype: torch.dtype) -> Tensor | None:
    """Return the positions below `trials` at gaps of ceil(logs / divisor), or None if the gaps end before."""
    if logs.dtype != torch.float64 or dtype not in _SEED_DTYPES or not _is_supported(logs):
        return None
    at = torch.empty(logs.numel(), dtype=dtype, device=logs.device)
    gaps = logs.data_ptr(), logs.numel(), divisor
    found: int = _library.hookdrop_successes(at.data_ptr(), dtype == torch.int64, *gaps, trials)
    return None if found < 0 else at[:found]


def mask_blocks(x: Tensor, seeds: Tensor, scale: Tensor, blocks: Blocks) -> Tensor | None:
    """Return `x * scale` with zeros in the seeds' blocks, in one pass."""
    if x.dtype not in _FUSED_DTYPES or not _is_supported(x) or (layout := _layout(blocks, x.shape, x.stride())) is None:
        return None
    y = _empty_like(x)
    _run(layout, y, x, scale.to(torch.float64).contiguous(), seeds)
    return y


def zero_(y: Tensor, seeds: Tensor, blocks: Blocks) -> bool:
    if not _is_supported(y) or (layout := _layout(blocks, y.shape, y.stride())) is None:
        return False
    _run(layout, y, None, torch.ones(1, dtype=torch.float64, device="cpu"), seeds)
    return True


def count_covered(seeds: Tensor, blocks: Blocks, per_sample: Tensor | None = None) -> int | None:
    """Count the elements that the seeds' blocks cover, and add those of each sample to `per_sample` (int64 zeros)."""
    if seeds.dtype not in _SEED_DTYPES or not (_is_supported(seeds) and seeds.is_contiguous()):
        return None
    maps = blocks.samples * blocks.channels, blocks.channels
    found = seeds.data_ptr(), seeds.numel(), seeds.dtype == torch.int64
    counts = None if per_sample is None else per_sample.data_ptr()
    threads = _threads(seeds.numel() * math.prod(blocks.blocks))
    covered: int = _library.hookdrop_count(counts, *maps, *found, *_map_arguments(blocks), threads)
    return None if covered < 0 else covered


@lru_cache(maxsize=1024)
def _map_arguments(blocks: Blocks) -> tuple[int, _Array, _Array, _Array]:
    valid, sizes, edges = (_array(*three_axes(values)) for values in (blocks.valid, blocks.sizes, blocks.blocks))
    return math.prod(blocks.valid), valid, sizes, edges


def mask_elements(x: Tensor, dropped: Tensor, scale: Tensor) -> Tensor | None:
    """Return `x * scale` with zeros where the bool mask `dropped` is True.

    `dropped` has the memory format of `x`, or, if `x` is contiguous, is (samples, channels or 1, ...), samples apart.
    """
    if x.dtype not in _FUSED_DTYPES or not _is_supported(x):
        return None
    shared = dropped.shape != x.shape
    if not shared and dropped.stride() == x.stride() and torch.ops.aten.is_non_overlapping_and_dense.default(x):
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


def _empty_like(x: Tensor) -> Tensor:
    """`torch.empty_like`, with huge pages for large results if the system supports them."""
    y = torch.empty_like(x)
    if y.nbytes >= _HUGE_PAGE_BYTES:
        _library.hookdrop_advise(y.data_ptr(), y.nbytes)
    return y


def _in_memory_order(scale: Tensor, x: Tensor) -> Tensor | None:
    """One scale for each of several equal parts of the memory of `x`; None if the scales do not map to such parts."""
    if scale.numel() == 1:
        return scale.to(torch.float64)
    axes = max(axis for axis, size in enumerate(scale.shape) if size > 1) + 1
    if not (x.is_contiguous() or (axes == 1 and x.stride(0) * x.shape[0] == x.numel())):
        return None
    return scale.to(torch.float64).expand(*x.shape[:axes], *[1] * (x.dim() - axes)).contiguous()


_Layout: TypeAlias = tuple[int, int, int, int, tuple[_Array, ...]]
"""(chunks, size, repeat, places, (valid, strides, edges, steps)) of a tensor in memory, in the terms of `_blocks.c`."""


def _run(layout: _Layout, y: Tensor, x: Tensor | None, scales: Tensor, seeds: Tensor) -> None:
    chunks, size, repeat, places, arrays = layout
    seeds = seeds.contiguous() if seeds.dtype in _SEED_DTYPES else seeds.long()
    scaling = y.element_size(), scales.data_ptr(), chunks // scales.numel()
    found = seeds.data_ptr(), seeds.numel(), seeds.dtype == torch.int64, places, *arrays
    source = None if x is None else x.data_ptr()
    _library.hookdrop_mask(y.data_ptr(), source, *scaling, chunks, size, repeat, *found, _threads(y.numel()))


@lru_cache(maxsize=1024)
def _layout(blocks: Blocks, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Layout | None:
    """Return None unless each map or each sample of the tensor is contiguous in memory."""
    valid, edges, size = three_axes(blocks.valid), three_axes(blocks.blocks), math.prod(blocks.sizes)
    lines = contiguous_strides(three_axes(blocks.sizes))
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
    return (*chunks, places, tuple(_array(*values) for values in arrays)) if places < _MAX_PLACES else None


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _MIN_PARALLEL_ELEMENTS else 1


def _array(*values: int) -> _Array:
    return (ctypes.c_int64 * len(values))(*values)


def _load(path: Path) -> ctypes.CDLL | None:
    """Load the library if it was built from these sources."""
    if os.environ.get("HOOKDROP_KERNEL") == "0" or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.hookdrop_interface.restype = ctypes.c_int64
        if library.hookdrop_interface() != _INTERFACE:
            return None
    except (OSError, AttributeError):  # built for another platform, or another library
        return None
    for name, kinds in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_KINDS[kind] for kind in kinds]
        function.restype = ctypes.c_int64 if name in ("hookdrop_successes", "hookdrop_count") else None
    return library


_library: Any = _load(Path(__file__).with_name("_blocks.native"))
