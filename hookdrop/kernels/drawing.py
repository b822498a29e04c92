"""Drawing masks, and the scale that keeps the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookdrop.kernels import native, triton_dropblock
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.masking import slices_to_front
from hookdrop.kernels.random_numbers import MIN_EXPECTED_SUCCESSES, most_precise_dtype, successes, trials
from hookdrop.utils.torch_internals import (
    PLAIN_TYPES,
    dispatch_modes,
    functorch_stack,
    is_proxy_tracing,
    mark_vmap_slices,
    vmap_levels,
)
from hookdrop.utils.validation import as_rate_tensor

NORMALIZE = ("batch", "sample", "expected", None)


class Drawing:
    """A random choice of the elements of a tensor to drop, with the scale for the rest."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(dropped, scale)` for `masking.apply_mask`, respecting the `randomness` of `torch.func.vmap`."""
        if functorch_stack() is not None:
            drawn: tuple[Tensor, Tensor] = _Draw.apply(x, _slice_marker(), self)
            return drawn
        return self.draw(x)

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(dropped, scale)` outside of `torch.func` transforms."""
        raise NotImplementedError

    def draw_slices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return independent `(dropped, scale)` for each slice of `x` along axis 0; `dropped` is a bool mask."""
        raise NotImplementedError


@dataclass(frozen=True)
class ElementDrawing(Drawing):
    """Drops each element independently with probability `p`."""

    p: float

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = trials(x.numel(), self.p, x.device, static=must_avoid_sync(x)).view(torch.bool)
        like = torch.empty_like(x, dtype=torch.bool)
        return dropped.as_strided(like.shape, like.stride()), _keep_scale(self.p)

    def draw_slices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self(x)


@dataclass(frozen=True)
class BlockDrawing(Drawing):
    """Drops blocks: each valid position is a seed with probability `seed_rate`, so blocks cover `p` in expectation."""

    blocks: Blocks
    seed_rate: float
    p: float
    normalize: str | None
    slices: int = 0
    """If positive, the samples belong to this many independent batches, and `dropped` is a mask."""
    rows: bool = False
    """Whether to return masks in the format of `Blocks.rows`."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks, plain = self.blocks, x.device.type == triton_dropblock.DEVICE_TYPE and type(x) in PLAIN_TYPES
        if not plain or self.slices or functorch_stack() is not None or not triton_dropblock.can_draw(blocks, x.device):
            return super().__call__(x)
        packed, counters = triton_dropblock.draw(blocks, self.seed_rate, self.normalize, x.device)
        return packed, self._constant_scale() if counters is None else counters

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks, static = self.blocks, must_avoid_sync(x)
        if self._sparse(static):
            dropped = successes(blocks.places, self.seed_rate, x.device, static=static, dtype=blocks.index_dtype)
        else:
            dropped = blocks.dilated(trials(blocks.places, self.seed_rate, x.device, static=static))
        scale = self._scale(dropped, x)
        if self.slices and dropped.dtype != torch.uint8:
            dropped = blocks.rows(dropped)
        if dropped.dtype == torch.uint8 and not self.rows:
            dropped = blocks.mask(dropped)
        return dropped, scale

    def draw_slices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slices = x.shape[0]
        batched = replace(self, blocks=self.blocks.repeated(slices), slices=max(self.slices, 1) * slices)
        dropped, scale = batched(x.flatten(0, 1))
        return split_slices(dropped, slices), split_slices(scale, slices)

    def _scale(self, dropped: Tensor, x: Tensor) -> Tensor:
        """The scale that keeps the mean: count / kept count of the batch or of each sample, or a constant."""
        if self.normalize not in ("batch", "sample"):
            return self._constant_scale()
        blocks = self.blocks
        one_scale = self.normalize == "batch" and not self.slices
        together = blocks.samples // max(self.slices, 1) if self.normalize == "batch" else 1
        each = together * blocks.elements_per_sample
        if one_scale and (covered := native.count_covered(dropped, blocks)) is not None:
            return as_rate_tensor(each / max(each - covered, 1))
        kept = each - _dropped_counts(dropped, blocks).view(-1, together).sum(1)
        kept = kept.clamp_(min=1).to(most_precise_dtype(x.device))
        # `number / tensor` multiplies by the reciprocal in PyTorch, which rounds twice.
        scale = torch.full_like(kept, each) / kept
        return scale.view(()) if one_scale else scale.repeat_interleave(together).view(-1, *[1] * (x.dim() - 1))

    def _constant_scale(self) -> Tensor:
        return _keep_scale(self.p if self.normalize == "expected" else 0.0)

    def _sparse(self, static: bool) -> bool:
        """Whether drawing only the seeds is faster than one trial per position."""
        blocks = self.blocks
        seeds = blocks.places * self.seed_rate
        if self.seed_rate == 1.0 or (static and seeds < MIN_EXPECTED_SUCCESSES):
            return False
        elements = blocks.samples * blocks.elements_per_sample
        dense = blocks.places * _TRIAL + elements * (_MASK + _DOUBLING * blocks.dilation_passes)
        return seeds * (_SEED + _WRITE * math.prod(blocks.blocks)) < dense


# Nanoseconds on a CPU: draw and place a seed, write an element, do a trial, fill a mask element, dilate it once.
_SEED, _WRITE, _TRIAL, _MASK, _DOUBLING = 15.0, 0.4, 0.4, 0.3, 0.06


def must_avoid_sync(x: Tensor) -> bool:
    """Whether reading a value must be avoided: an accelerator would synchronize, and a traced tensor has no value.

    This must not depend on other dispatch modes, or a profiler would change the masks.
    """
    if not x.is_cpu or type(x) not in PLAIN_TYPES:
        return True
    return dispatch_modes() > 0 and is_proxy_tracing()


def split_slices(x: Tensor, slices: int) -> Tensor:
    """Split axis 0 into (slices, samples per slice). A 0-d tensor is returned unchanged."""
    return x.view(slices, -1, *x.shape[1:]) if x.dim() else x


def _dropped_counts(dropped: Tensor, blocks: Blocks) -> Tensor:
    """int64 (samples,): the number of elements of each sample that the seeds or rows drop."""
    if dropped.dtype == torch.uint8:
        return blocks.counts(dropped)
    counts = torch.zeros(blocks.samples, dtype=torch.int64, device=dropped.device)
    return blocks.counts(blocks.rows(dropped)) if native.count_covered(dropped, blocks, counts) is None else counts


def _keep_scale(p: float) -> Tensor:
    """1 / (1 - p), or 1 if p is 1, as a 0-d CPU tensor, which acts as a number on every device."""
    return as_rate_tensor(1.0 if p == 1.0 else 1.0 / (1.0 - p))


class _Draw(torch.autograd.Function):
    """Has no derivative, but a `torch.func.vmap` rule, which decides whether slices differ."""

    @staticmethod
    def forward(x: Tensor, marker: Tensor | None, drawing: Drawing) -> tuple[Tensor, Tensor]:
        return drawing.draw(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, marker: Tensor | None, drawing: Drawing
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        x = slices_to_front(x, in_dims[0], info.batch_size)
        if info.randomness == "same":
            return drawing(x[0]), (None, None)
        dropped, scale = drawing.draw_slices(x)
        return (dropped, scale), (0, 0 if scale.dim() else None)


def _slice_marker() -> Tensor | None:
    """A zero tensor batched over every `torch.func.vmap` with `randomness="different"`, or None if there is none.

    With this argument, draws differ between slices even if all slices share the tensor, such as an ensemble's input.

    Raises:
        RuntimeError: if a `vmap` has `randomness="error"`.
    """
    marker = None
    for transform in vmap_levels():
        check_vmap_randomness(transform.randomness())
        if transform.randomness() == "different":
            one = torch.zeros((), device="cpu") if marker is None else marker
            marker = mark_vmap_slices(one.expand(transform.batch_size()), transform.level())
    return marker


def check_vmap_randomness(randomness: str) -> None:
    """Raise the error of PyTorch's random functions in a `torch.func.vmap` with `randomness="error"`."""
    if randomness == "error":
        raise RuntimeError(
            "vmap: called a random operation while in randomness error mode.\n"
            '  draw one mask per slice with vmap(..., randomness="different"), or one for all with "same".'
        )
