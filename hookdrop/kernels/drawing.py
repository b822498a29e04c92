"""Drawing what to drop, and the scale that keeps the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookdrop.kernels import native
from hookdrop.kernels.bernoulli import ENOUGH, finest, successes, trials
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.masking import slices_in_front
from hookdrop.kernels.subclasses import PLAIN
from hookdrop.utils.torch_internals import (
    dispatch_modes,
    functorch_stack,
    is_proxy_tracing,
    mark_vmap_slices,
    vmap_levels,
)
from hookdrop.utils.validation import as_rate_tensor

NORMALIZE = ("batch", "sample", "expected", None)


class Drawing:
    """A random choice of what to drop of a tensor, with the scale of the rest."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(dropped, scale)` for `masking.masked`; in `torch.func.vmap` its `randomness` applies."""
        if functorch_stack() is not None:
            return _Drawn.apply(x, _slice_marker(), self)  # type: ignore[no-any-return]
        return self.now(x)

    def now(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(dropped, scale)` outside of `torch.func` transforms."""
        raise NotImplementedError

    def of_each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Independent `(dropped, scale)` for each slice of `x` along axis 0; `dropped` is a bool mask."""
        raise NotImplementedError


@dataclass(frozen=True)
class Elements(Drawing):
    """Drops each element independently with probability `p`."""

    p: float

    def now(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = trials(x.numel(), self.p, x.device, static=must_not_wait(x)).view(torch.bool)
        like = torch.empty_like(x, dtype=torch.bool)
        return dropped.as_strided(like.shape, like.stride()), _of_the_rest(self.p)

    def of_each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self(x)


@dataclass(frozen=True)
class Seeded(Drawing):
    """Drops blocks: a place is a seed with probability `seed_rate`, so that blocks cover `p` in expectation."""

    blocks: Blocks
    seed_rate: float
    p: float
    normalize: str | None
    slices: int = 0
    """Above 0: the samples belong to that many independent batches, and `dropped` is a mask."""
    rows: bool = False
    """Whether to return a mask in the form of `Blocks.rows`."""

    def now(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks, static = self.blocks, must_not_wait(x)
        if self._sparse(static):
            dropped = successes(blocks.places, self.seed_rate, x.device, static=static, dtype=blocks.index)
        else:
            dropped = blocks.grown(trials(blocks.places, self.seed_rate, x.device, static=static))
        scale = self._scale(dropped, x)
        if self.slices and dropped.dtype != torch.uint8:
            dropped = blocks.rows(dropped)
        if dropped.dtype == torch.uint8 and not self.rows:
            dropped = blocks.mask(dropped)
        return dropped, scale

    def of_each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slices = x.shape[0]
        all_of_them = replace(self, blocks=self.blocks.times(slices), slices=max(self.slices, 1) * slices)
        dropped, scale = all_of_them(x.flatten(0, 1))
        return unfolded(dropped, slices), unfolded(scale, slices)

    def _scale(self, dropped: Tensor, x: Tensor) -> Tensor:
        """What keeps the mean: element count / kept count of the batch or of each sample, or a constant."""
        if self.normalize not in ("batch", "sample"):
            return _of_the_rest(self.p if self.normalize == "expected" else 0.0)
        blocks = self.blocks
        together = blocks.samples // max(self.slices, 1) if self.normalize == "batch" else 1
        each = together * blocks.of_sample
        if self.normalize == "batch" and not self.slices and (covered := native.count(dropped, blocks)) is not None:
            return as_rate_tensor(each / max(each - covered, 1))
        kept = each - _counts(dropped, blocks).view(-1, together).sum(1)
        kept = kept.clamp_(min=1).to(finest(x.device))
        # PyTorch multiplies a number over a tensor by the reciprocal, which rounds twice.
        scale = torch.full_like(kept, each) / kept
        if self.normalize == "batch" and not self.slices:
            return scale.view(())
        return scale.repeat_interleave(together).view(-1, *[1] * (x.dim() - 1))

    def _sparse(self, static: bool) -> bool:
        """Whether drawing only the seeds is faster than a trial for each place."""
        blocks = self.blocks
        seeds = blocks.places * self.seed_rate
        if self.seed_rate == 1.0 or (static and seeds < ENOUGH):
            return False
        elements = blocks.samples * blocks.of_sample
        dense = blocks.places * _TRIAL + elements * (_MASK + _DOUBLING * blocks.doublings)
        return seeds * (_SEED + _WRITE * math.prod(blocks.blocks)) < dense


# Nanoseconds on a CPU: to draw and place a seed, write an element, do a trial, fill an element of a mask, grow it.
_SEED, _WRITE, _TRIAL, _MASK, _DOUBLING = 15.0, 0.4, 0.4, 0.3, 0.06


def must_not_wait(x: Tensor) -> bool:
    """Whether reading a value must be avoided: on an accelerator it synchronizes, and in a trace it does not exist.

    This must not depend on other dispatch modes, or a profiler would change the masks.
    """
    if not x.is_cpu or type(x) not in PLAIN:
        return True
    return dispatch_modes() > 0 and is_proxy_tracing()


def unfolded(of_all: Tensor, slices: int) -> Tensor:
    """Axis 0 as (slices, samples of each); a 0-d tensor stays as it is."""
    return of_all.view(slices, -1, *of_all.shape[1:]) if of_all.dim() else of_all


def _counts(dropped: Tensor, blocks: Blocks) -> Tensor:
    """int64 (samples,): how many elements of each sample the seeds or rows drop."""
    if dropped.dtype == torch.uint8:
        return blocks.counts(dropped)
    of_each = torch.zeros(blocks.samples, dtype=torch.int64, device=dropped.device)
    return blocks.counts(blocks.rows(dropped)) if native.count(dropped, blocks, of_each) is None else of_each


def _of_the_rest(p: float) -> Tensor:
    """1 / (1 - p), if anything is kept: 0-d on the CPU, which works as a number on every device."""
    return as_rate_tensor(1.0 if p == 1.0 else 1.0 / (1.0 - p))


class _Drawn(torch.autograd.Function):
    """No derivative, but a rule for `torch.func.vmap`, which says whether slices differ."""

    @staticmethod
    def forward(x: Tensor, marker: Tensor | None, drawing: Drawing) -> tuple[Tensor, Tensor]:
        return drawing.now(x)

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
        x = slices_in_front(x, in_dims[0], info.batch_size)
        if info.randomness == "same":
            return drawing(x[0]), (None, None)
        dropped, scale = drawing.of_each(x)
        return (dropped, scale), (0, 0 if scale.dim() else None)


def _slice_marker() -> Tensor | None:
    """A 0 for each slice of every `torch.func.vmap` with `randomness="different"`; None if there is none.

    A drawing that takes it differs between slices even if they share the tensor, such as the input of an ensemble.

    Raises:
        RuntimeError: a `vmap` has `randomness="error"`.
    """
    marker = None
    for transform in vmap_levels():
        refuse_by_accident(transform.randomness())
        if transform.randomness() == "different":
            one = torch.zeros((), device="cpu") if marker is None else marker
            marker = mark_vmap_slices(one.expand(transform.batch_size()), transform.level())
    return marker


def refuse_by_accident(randomness: str) -> None:
    """Raise as PyTorch's random functions do in a `torch.func.vmap` with `randomness="error"`."""
    if randomness == "error":
        raise RuntimeError(
            "vmap: called a random operation while in randomness error mode.\n"
            '  a mask of its own for each slice: vmap(..., randomness="different"); one for all: "same".'
        )
