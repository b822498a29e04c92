"""The compiled loops of `_blocks.c`. They are optional and only affect speed; PyTorch operations give the same results.

Wheels for common platforms have them, and installing from source compiles them if a C compiler is available. The
environment variable `HOOKDROP_KERNEL=0` disables them; `HOOKDROP_KERNEL=require` makes a build without them fail.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookdrop.core.arguments import as_rate_tensor
from hookdrop.core.torch_internals import PLAIN_TYPES, dispatch_modes, has_storage, is_tracing, is_zero_tensor
from hookdrop.kernels.accelerators import ACCELERATORS, Accelerator
from hookdrop.kernels.blocks import Blocks, contiguous_strides
from hookdrop.kernels.masking import HALF, scaled
from hookdrop.kernels.random_numbers import kept_scale

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
_DTYPES = (*_FUSED_DTYPES, *HALF)
_HUGE_PAGE_BYTES = 2**22  # from here on, huge pages pay off
_MAX_PLACES = 2**32  # the seed positions per chunk that `_blocks.c` can address
_MIN_PARALLEL_ELEMENTS = 2**15  # below, waking other threads costs more than it saves

_Array: TypeAlias = "ctypes.Array[ctypes.c_int64]"


def available() -> bool:
    """Whether the loops are in use."""
    return isinstance(ACCELERATORS[torch.device("cpu")], NativeLoops)


def has_plain_memory(x: Tensor) -> bool:
    """Whether the memory of `x` holds its values and no trace or dispatch mode intercepts operations on it."""
    intercepted = dispatch_modes() > 0 or is_tracing()
    # A negated view has the opposite sign in memory; batched gradients and zero gradients have no memory.
    return type(x) in PLAIN_TYPES and not (intercepted or x.is_neg() or is_zero_tensor(x)) and has_storage(x)


class NativeLoops(Accelerator):
    """Loops over the memory of tensors."""

    def successes(self, logs: Tensor, divisor: float, trials: int, dtype: torch.dtype) -> Tensor | None:
        if not has_plain_memory(logs):
            return None
        at = torch.empty(logs.numel(), dtype=dtype, device=logs.device)
        gaps = logs.data_ptr(), logs.numel(), divisor
        found: int = _library.hookdrop_successes(at.data_ptr(), dtype == torch.int64, *gaps, trials)
        return None if found < 0 else at[:found]

    def scale_of_seeds(self, seeds: Tensor, blocks: Blocks, normalize: str) -> Tensor | None:
        if not (has_plain_memory(seeds) and seeds.is_contiguous()):
            return None
        each = torch.zeros(blocks.samples, dtype=torch.int64, device="cpu") if normalize == "sample" else None
        maps = None if each is None else each.data_ptr(), blocks.samples * blocks.channels, blocks.channels
        found = seeds.data_ptr(), seeds.numel(), seeds.dtype == torch.int64
        threads = _threads(seeds.numel() * math.prod(blocks.blocks))
        covered: int = _library.hookdrop_count(*maps, *found, *_map_arguments(blocks), threads)
        if covered < 0:
            return None
        if each is not None:
            return kept_scale(blocks.elements_per_sample, each, 2 + len(blocks.sizes))
        count = blocks.samples * blocks.elements_per_sample
        return as_rate_tensor(count / max(count - covered, 1))

    def mask(self, x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor | None:
        """A bool mask has the memory format of `x`, or, if `x` is contiguous, is (samples, channels or 1, ...)."""
        if dropped.dtype == torch.uint8 or x.dtype not in _DTYPES or not has_plain_memory(x):
            return None
        fused = x.dtype in _FUSED_DTYPES
        if blocks is None:
            return _mask_elements(x, dropped, scale) if fused else None
        if fused and (layout := _layout(blocks, x.shape, x.stride())):
            y = _empty_like(x)
            _run(layout, y, x, scale.to(torch.float64).contiguous(), dropped)
            return y
        y = scaled(x, scale)  # dense, for example if x was expanded
        if (layout := _layout(blocks, y.shape, y.stride())) is None:
            return None
        _run(layout, y, None, torch.ones(1, dtype=torch.float64, device="cpu"), dropped)
        return y


@lru_cache(maxsize=1024)
def _map_arguments(blocks: Blocks) -> tuple[int, _Array, _Array, _Array]:
    valid, sizes, edges = (_array(*three_axes(values)) for values in (blocks.valid, blocks.sizes, blocks.blocks))
    return math.prod(blocks.valid), valid, sizes, edges


def _mask_elements(x: Tensor, dropped: Tensor, scale: Tensor) -> Tensor | None:
    """Return `x * scale` with zeros where the bool mask is True."""
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
    seeds = seeds.contiguous()
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


def three_axes(values: Sequence[int]) -> tuple[int, ...]:
    """Prepend axes of length 1 up to three axes."""
    return (*[1] * (3 - len(values)), *values)


def _array(*values: int) -> _Array:
    return (ctypes.c_int64 * len(values))(*values)


def _load(path: Path) -> ctypes.CDLL | None:
    """Load the library if it was built from these sources."""
    try:
        library = ctypes.CDLL(str(path))
        library.hookdrop_interface.restype = ctypes.c_int64
        if library.hookdrop_interface() != _INTERFACE:
            return None
    except (OSError, AttributeError):  # not built, built for another platform, or another library
        return None
    for name, kinds in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_KINDS[kind] for kind in kinds]
        function.restype = ctypes.c_int64 if name in ("hookdrop_successes", "hookdrop_count") else None
    return library


_library: Any = _load(Path(__file__).with_name("_blocks.native"))
ACCELERATOR = Accelerator() if _library is None else NativeLoops()
