"""DropBlock on GPUs: when to use the Triton kernels, and their launches.

A forward is three launches: PyTorch draws a state, `draw_kernel` writes one bit per element, and `mask_kernel` applies
the bits, also in backward. Since the state comes from PyTorch's generator, `torch.manual_seed`, checkpoints and CUDA
graphs work as for PyTorch's random operations. Its first numbers are the seed of the kernels' random numbers. The
others count dropped elements, from which `mask_kernel` computes the scale, so nothing synchronizes.

Triton is optional: PyTorch operations replace the kernels wherever these do not support the tensor. Before their first
use on a device, a small draw is compared with the same draw by PyTorch operations, which replace kernels that fail.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from hookdrop.accel.native import has_plain_memory, three_axes
from hookdrop.core.errors import warn
from hookdrop.core.torch_internals import without_dispatch_modes, without_functorch
from hookdrop.kernels.accelerators import Accelerator
from hookdrop.kernels.blocks import Blocks, contiguous_strides
from hookdrop.kernels.drawing import COUNTED
from hookdrop.kernels.random_numbers import kept_scale

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SEED_BITS, _SEED_WORDS = 31, 2  # as in triton_kernels.py
_MAX_HALO = 4096  # words: a block that spans 131,072 elements of a map does not fit into the registers
_MAX_SAMPLE, _MAX_ELEMENTS = 2**30, 2**32  # offsets within a sample and counts of dropped elements have 32 bits
_ROWS = 64


_works: dict[int | None, bool] = {}
"""Whether the kernels have passed `_fault`, by the index of the device."""


def usable(device: torch.device) -> bool:
    if not _supported(device.index):
        return False
    known = _works.get(device.index)
    return _check(device) if known is None else known


def _check(device: torch.device) -> bool:
    """Compile and run the kernels once, and warn if they fail. The random state does not change."""
    if device.type == "cuda" and (not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()):
        return True  # fake tensors, or a CUDA graph: nothing can be read
    _works[device.index] = True
    try:
        with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes(), without_functorch():
            fault = _fault(device)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        _works[device.index] = False
        warn(
            f"the GPU kernels of DropBlock fail on {device}: {fault}.\n"
            "  PyTorch operations replace them, which are right but slower. To skip this check: HOOKDROP_KERNEL=0"
        )
    return not fault


def _fault(device: torch.device) -> str:
    """Compare small draws and their application with PyTorch operations; return the difference, empty if none."""
    from hookdrop.accel.philox import rows_of_seed

    seed, rate = (123456789, 987654321), 0.03
    for normalize, last, dtype in (("batch", False, torch.float32), ("expected", True, torch.float16)):
        blocks = Blocks(2, 8, (28, 27), (7, 4))
        for _ in "ab":  # a second launch takes another way
            state = torch.tensor([*seed, 0], device="cpu").to(device)
            packed = _draw(blocks, rate, normalize, state)
        rows = rows_of_seed(blocks, seed[0] | seed[1] << _SEED_BITS, _fixed_point(rate))
        if not torch.equal(packed.cpu(), blocks.packed(rows)):
            return "the masks differ from those of PyTorch operations"
        counted, constant = normalize == "batch", torch.tensor(1.25, device="cpu")
        if counted and state[_SEED_WORDS].cpu() >> _SEED_BITS != blocks.counts(rows).sum():
            return "the counts of dropped elements differ from those of PyTorch operations"
        x = torch.linspace(1, 2, 2 * blocks.elements_per_sample, dtype=dtype, device="cpu").view(2, 8, 28, 27)
        x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        scale = ACCELERATOR.scale_of_counters(state.cpu(), blocks) if counted else constant
        expected = torch.where(blocks.mask(rows), 0.0, x.float() * scale)
        x = x.to(device)
        y = [_mask(x, packed, state if counted else constant, blocks) for _ in "ab"][-1]
        if y is None or not torch.allclose(y.cpu().float(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0.0):
            return "the results differ from those of PyTorch operations"
    return ""


@lru_cache
def _supported(index: int | None) -> bool:
    """Whether Triton is complete and supports the GPU. Fake tensors may be on one that does not exist."""
    # Triton compiles a part of its runtime with a C compiler.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or importlib.util.find_spec("triton") is None:
        return False
    from triton import language

    nvidia = torch.cuda.is_available() and torch.version.hip is None
    # Triton 3.2, of PyTorch 2.6, has no `gather`.
    return hasattr(language, "gather") and (not nvidia or torch.cuda.get_device_capability(index) >= (7, 0))


class TritonKernels(Accelerator):
    """`counters` are the seed of the random numbers, and the dropped elements of the batch or of each sample."""

    def can_draw(self, blocks: Blocks, device: torch.device) -> bool:
        if not usable(device) or _halo(blocks) > _MAX_HALO:
            return False
        sample = blocks.elements_per_sample
        return sample <= _MAX_SAMPLE and blocks.samples * sample < _MAX_ELEMENTS

    def draw(self, blocks: Blocks, rate: float, normalize: str | None, device: torch.device) -> tuple[Tensor, Tensor]:
        state = torch.randint(2**_SEED_BITS, (self.counters_size(blocks, normalize),), device=device)
        return _draw(blocks, rate, normalize, state), state

    def counters_size(self, blocks: Blocks, normalize: str | None) -> int:
        return _SEED_WORDS + (blocks.samples if normalize == "sample" else 1)

    def mask(self, x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor | None:
        known = scale.dtype == torch.int64 or scale.is_cpu
        if blocks is None or dropped.dtype != torch.uint8 or x.dtype not in _DTYPES or not known:
            return None
        return _mask(x, dropped, scale, blocks) if usable(x.device) and has_plain_memory(x) else None

    def scale_of_counters(self, counters: Tensor, blocks: Blocks) -> Tensor:
        lost = counters[_SEED_WORDS:] >> _SEED_BITS
        count = blocks.samples // lost.numel() * blocks.elements_per_sample
        return kept_scale(count, lost.squeeze(), 2 + len(blocks.sizes))


ACCELERATOR = TritonKernels()


class _Launch:
    """A kernel with its grid and the arguments that its geometry determines."""

    def __init__(self, kernel: Any, programs: int, fixed: tuple[int, ...], constants: dict[str, int], **options: int):
        self.kernel, self.grid, self.fixed = kernel, (programs, 1, 1), (*fixed, *constants.values())
        self.options = {"enable_fp_fusion": False, **options}
        self.compiled: Any = None

    def __call__(self, *args: Any) -> None:
        if self.compiled is not None:
            # Without Triton's search for the compiled kernel, which takes longer than the launch.
            self.compiled(*args, *self.fixed)
        elif (compiled := self.kernel[self.grid](*args, *self.fixed, **self.options)) is not None:
            self.compiled = compiled[self.grid]


def _draw(blocks: Blocks, rate: float, normalize: str | None, state: Tensor) -> Tensor:
    """Draw masks, and count in `state`, the counters."""
    packed = torch.empty(blocks.packed_size, dtype=torch.uint8, device=state.device)
    with _on_device(packed):
        _drawing(blocks, normalize, state.device)(packed.view(torch.int32), state, _fixed_point(rate))
    return packed


@lru_cache(maxsize=1024)
def _drawing(blocks: Blocks, normalize: str | None, device: torch.device) -> _Launch:
    from hookdrop.accel.triton_kernels import draw_kernel

    words, halo = blocks.packed_size[1] // 4, _halo(blocks)
    lanes = _lanes(words, halo)
    tiles = -(-words // (lanes - halo))
    geometry = *three_axes(blocks.sizes), *three_axes(blocks.blocks), int(normalize == "sample")
    fixed = tiles, words, halo, blocks.elements_per_sample, *geometry
    constants = {"COUNT": normalize in COUNTED, "LANES": lanes}
    return _Launch(draw_kernel, blocks.samples * tiles, fixed, constants, num_warps=min(max(lanes // 32, 1), 16))


def _mask(x: Tensor, packed: Tensor, scale: Tensor, blocks: Blocks) -> Tensor | None:
    counted = scale.dtype == torch.int64
    if _strides(blocks, x.shape, x.stride()) is None:
        x = x.clone()  # dense, for example if it was expanded
        if _strides(blocks, x.shape, x.stride()) is None:
            return None
    y, bits = torch.empty_like(x), packed.contiguous().view(torch.int32)
    state, factor = (scale, 1.0) if counted else (bits, scale.item())
    aligned = (x.data_ptr() | bits.data_ptr() | state.data_ptr()) % 16 == 0
    kind = x.shape, x.stride(), x.dtype, x.device, aligned, scale.numel() - _SEED_WORDS if counted else 0
    with _on_device(x):
        _masking(blocks, *kind)(y, x, bits, state, factor)
    return y


@lru_cache(maxsize=1024)
def _masking(blocks: Blocks, shape: tuple[int, ...], strides: tuple[int, ...], *kind: Any) -> _Launch:
    """`kind` is what Triton compiles another kernel for, and the number of counters, 0 for a constant scale."""
    from hookdrop.accel.triton_kernels import mask_kernel

    counters = kind[-1]
    groups, length, group_stride, stride, bit_stride = cast("tuple[int, ...]", _strides(blocks, shape, strides))
    tiles = -(-groups * -(-length // 32) // _ROWS)
    elements = blocks.samples // max(counters, 1) * blocks.elements_per_sample
    geometry = groups, length, groups * length, group_stride, stride, bit_stride, int(counters > 1)
    constants = {"COUNTED": counters > 0, "ALIGNED": bit_stride % 32 == 0, "GROUPS_FASTEST": group_stride == 1}
    fixed = elements, tiles, blocks.packed_size[1] // 4, *geometry
    return _Launch(mask_kernel, blocks.samples * tiles, fixed, {**constants, "ROWS": _ROWS})


def _on_device(x: Tensor) -> Any:
    """Make the device of `x` the current one, on which kernels run. With a single device, there is nothing to do."""
    return _device_of(x) if _device_count() > 1 else nullcontext()


_device_of: Any = torch.cuda.device_of
_device_count = lru_cache(torch.cuda.device_count)


@lru_cache(maxsize=1024)
def _halo(blocks: Blocks) -> int:
    """The number of words before a word in which seeds can lie whose blocks reach it."""
    reach = zip(blocks.blocks, contiguous_strides(blocks.sizes), strict=True)
    return -(-sum((block - 1) * stride for block, stride in reach) // 32)


def _lanes(words: int, halo: int) -> int:
    """The number of words of a tile: a power of two, so that little of it is halo, or all of a small sample."""
    whole, few_overlaps, least = (1 << max(n - 1, 0).bit_length() for n in (words + halo, 8 * halo, 2 * halo))
    return max(32, min(whole, max(128, min(few_overlaps, 1024), least)))


def _fixed_point(seed_rate: float) -> int:
    """`seed_rate` as a signed 64-bit number: a random number up to this one is a success."""
    highest = max(int(seed_rate * 2.0**64) - 1, 0)
    return highest - 2**64 if highest >= 2**63 else highest


@lru_cache(maxsize=1024)
def _strides(blocks: Blocks, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """`(groups, length, group_stride, stride, bit_stride)` for `mask_kernel`, or None for another memory format."""
    channels, area = shape[blocks.channel], math.prod(blocks.sizes)
    channels_first = torch.empty_strided(shape, strides, device="meta").movedim(blocks.channel, 1)
    if channels_first.is_contiguous():
        return (channels, area, area, 1, 0) if blocks.channels == 1 else (1, channels * area, 0, 1, 0)
    if channels_first.movedim(1, -1).is_contiguous():
        return channels, area, 1, channels, 0 if blocks.channels == 1 else area
    return None
