"""The compiled loops of `_blocks.c`, where they were built; nothing depends on them but speed.

Installing compiles them if there is a C compiler. `HOOKDROP_KERNEL=0` in the environment leaves them out.
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

from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.subclasses import PLAIN
from hookdrop.utils.torch_internals import dispatch_modes, has_storage, is_tracing, is_zero_tensor

_INTERFACE = 3
_Array: TypeAlias = "ctypes.Array[ctypes.c_int64]"


def available() -> bool:
    """Whether the compiled loops are there and in use."""
    return _library is not None


def plain(x: Tensor) -> bool:
    """Whether `x` is numbers in memory as they are, and no trace or dispatch mode watches the operations on it."""
    watched = dispatch_modes() > 0 or is_tracing()
    # A negated view is the memory of the other sign; a batch of gradients and a gradient of 0 have no memory.
    return type(x) in PLAIN and not (watched or x.is_neg() or is_zero_tensor(x)) and has_storage(x)


def _serves(x: Tensor) -> bool:
    return _library is not None and x.is_cpu and x.element_size() > 1 and plain(x)


def masked(x: Tensor, seeds: Tensor, scale: Tensor, blocks: Blocks) -> Tensor | None:
    """`x * scale`, and 0 in the seeds' blocks, in one pass; None if that is not among what was compiled."""
    if x.dtype not in _FUSED or not _serves(x) or (layout := _layout(blocks, x.shape, x.stride())) is None:
        return None
    y = _fresh(x)
    scales = scale.to(torch.float64).contiguous()
    layout.run(y, x, scales, seeds)
    return y


def zero_(y: Tensor, seeds: Tensor, blocks: Blocks) -> bool:
    """Zero the seeds' blocks in `y`; False if that is not among what was compiled."""
    if not _serves(y) or (layout := _layout(blocks, y.shape, y.stride())) is None:
        return False
    layout.run(y, None, torch.ones(1, dtype=torch.float64, device="cpu"), seeds)
    return True


def count(seeds: Tensor, blocks: Blocks, of_each: Tensor | None = None) -> int | None:
    """How much the seeds' blocks cover; None if that is not among what was compiled.

    `of_each`, int64 zeros of (samples,), is filled with how much of each sample.
    """
    if seeds.dtype not in _SEEDS or not (_serves(seeds) and seeds.is_contiguous()):
        return None
    assert _library is not None
    covered: int = _library.hookdrop_count(
        None if of_each is None else of_each.data_ptr(),
        blocks.samples * blocks.channels,
        blocks.channels,
        seeds.data_ptr(),
        seeds.numel(),
        seeds.dtype == torch.int64,
        *_map(blocks),
        _threads(seeds.numel() * math.prod(blocks.blocks)),
    )
    return None if covered < 0 else covered


_FUSED = (torch.float32, torch.float64)
_SEEDS = (torch.int32, torch.int64)


@lru_cache(maxsize=1024)
def _map(blocks: Blocks) -> tuple[int, _Array, _Array, _Array]:
    valid, sizes, edges = (_three(values) for values in (blocks.valid, blocks.sizes, blocks.blocks))
    return math.prod(valid), _array(*valid), _array(*sizes), _array(*edges)


def cleared(x: Tensor, dropped: Tensor, scale: Tensor) -> Tensor | None:
    """`x * scale`, and 0 where the bool mask is; None if that is not among what was compiled.

    `dropped` is of the memory format of `x`, or (samples, channels or 1, ...) where `x` is contiguous; its samples may
    lie apart.
    """
    if x.dtype not in _FUSED or not _serves(x):
        return None
    if dropped.shape == x.shape and dropped.stride() == x.stride() and _is_dense(x):
        samples, channels, size, pitch = 1, 1, x.numel(), 0
    elif x.is_contiguous() and x.dim() == dropped.dim() > 2 and dropped[0].is_contiguous():
        samples, channels, size, pitch = x.shape[0], x.shape[1], math.prod(x.shape[2:]), dropped.stride(0)
        if dropped.shape not in (x.shape, (samples, 1, *x.shape[2:])):
            return None
    else:
        return None
    if (scales := _in_memory_order(scale, x)) is None:
        return None
    y = _fresh(x)
    assert _library is not None
    _library.hookdrop_clear(
        y.data_ptr(),
        x.data_ptr(),
        x.element_size(),
        scales.data_ptr(),
        x.numel() // scales.numel(),
        samples,
        channels,
        size,
        dropped.data_ptr(),
        pitch,
        dropped.shape != x.shape,
        _threads(x.numel()),
    )
    return y


def _fresh(x: Tensor) -> Tensor:
    """Memory for a result like `x`, in huge pages where it is large and the system has them."""
    y = torch.empty_like(x)
    if y.nbytes >= _LARGE:
        assert _library is not None
        _library.hookdrop_advise(y.data_ptr(), y.nbytes)
    return y


_LARGE = 2**22


def _in_memory_order(scale: Tensor, x: Tensor) -> Tensor | None:
    """A number for each of equal parts of the memory of `x`; None if the scales are not those of such parts."""
    if scale.numel() == 1:
        return scale.to(torch.float64)
    axes = max(axis for axis, size in enumerate(scale.shape) if size > 1) + 1
    if not (x.is_contiguous() or (axes == 1 and x.stride(0) * x.shape[0] == x.numel())):
        return None
    return scale.to(torch.float64).expand(*x.shape[:axes], *[1] * (x.dim() - axes)).contiguous()


_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


@dataclass(frozen=True)
class _Layout:
    """How `_blocks.c` finds the blocks in memory; the words are its own."""

    chunks: int
    size: int
    repeat: int
    places: int
    arrays: tuple[_Array, _Array, _Array, _Array]
    """Valid, strides, edges, steps."""

    def run(self, y: Tensor, x: Tensor | None, scales: Tensor, seeds: Tensor) -> None:
        seeds = seeds.contiguous() if seeds.dtype in _SEEDS else seeds.long()
        assert _library is not None
        _library.hookdrop_mask(
            y.data_ptr(),
            None if x is None else x.data_ptr(),
            y.element_size(),
            scales.data_ptr(),
            self.chunks // scales.numel(),
            self.chunks,
            self.size,
            self.repeat,
            seeds.data_ptr(),
            seeds.numel(),
            seeds.dtype == torch.int64,
            self.places,
            *self.arrays,
            _threads(y.numel()),
        )


@lru_cache(maxsize=1024)
def _layout(blocks: Blocks, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Layout | None:
    """None if the tensor has neither its maps nor its samples in one piece each."""
    maps_first = torch.empty_strided(shape, strides, device="meta").movedim(blocks.channel, 1)
    if maps_first.is_contiguous():
        return _maps_in_one_piece(blocks, shape[blocks.channel])
    if maps_first.movedim(1, -1).is_contiguous():
        return _samples_in_one_piece(blocks, shape[blocks.channel])
    return None


def _maps_in_one_piece(blocks: Blocks, channels: int) -> _Layout | None:
    valid, edges, lines = _three(blocks.valid), _three(blocks.blocks), _strides(_three(blocks.sizes))
    places, repeat = math.prod(valid), channels // blocks.channels
    arrays = _array(1, *valid), _array(0, *lines), _array(1, *edges), _array(0, *lines)
    if places >= _LIMIT:
        return None
    return _Layout(blocks.samples * channels, math.prod(blocks.sizes), repeat, places, arrays)


def _samples_in_one_piece(blocks: Blocks, channels: int) -> _Layout | None:
    valid, edges = _three(blocks.valid), _three(blocks.blocks)
    lines = [stride * channels for stride in _strides(_three(blocks.sizes))]
    places, run = math.prod(valid) * blocks.channels, channels // blocks.channels
    arrays = _array(blocks.channels, *valid), _array(1, *lines), _array(*edges, run), _array(*lines, 1)
    if places >= _LIMIT:
        return None
    return _Layout(blocks.samples, math.prod(blocks.sizes) * channels, 1, places, arrays)


_LIMIT = 2**32
"""Places of a chunk that `_blocks.c` can number."""


def _threads(elements: int) -> int:
    """One where to wake the others would cost more than they do."""
    return torch.get_num_threads() if elements >= _WORTH_A_THREAD else 1


_WORTH_A_THREAD = 2**15


def _three(values: Sequence[int]) -> tuple[int, ...]:
    """The same for three axes: those that are missing are 1 long."""
    return (*[1] * (3 - len(values)), *values)


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def _array(*values: int) -> _Array:
    return (ctypes.c_int64 * len(values))(*values)


def _load() -> ctypes.CDLL | None:
    """The library, if it was built from the sources that are here."""
    path = Path(__file__).with_name("_blocks.native")
    if os.environ.get("HOOKDROP_KERNEL") == "0" or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.hookdrop_interface.restype = ctypes.c_int64
        if library.hookdrop_interface() != _INTERFACE:
            return None
    except (OSError, AttributeError):  # built for another machine, or something else altogether
        return None
    word: Any = ctypes.c_int64
    pointer: Any = ctypes.c_void_p
    library.hookdrop_mask.argtypes = [
        *[pointer, pointer, word, pointer, word, word, word, word],
        *[pointer, word, word, word, pointer, pointer, pointer, pointer, word],
    ]
    library.hookdrop_mask.restype = None
    library.hookdrop_clear.argtypes = [pointer, pointer, word, pointer, *[word] * 4, pointer, *[word] * 3]
    library.hookdrop_clear.restype = None
    library.hookdrop_advise.argtypes = [pointer, word]
    library.hookdrop_advise.restype = None
    library.hookdrop_count.argtypes = [pointer, word, word, pointer, *[word] * 3, *[pointer] * 3, word]
    library.hookdrop_count.restype = word
    return library


_library = _load()
