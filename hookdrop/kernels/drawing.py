"""Drawing what is dropped, and the scale that keeps the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookdrop.kernels import native
from hookdrop.kernels.bernoulli import ENOUGH, finest, successes, trials
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.subclasses import PLAIN
from hookdrop.utils.torch_internals import (
    dispatch_modes,
    functorch_stack,
    is_proxy_tracing,
    mark_vmap_slices,
    vmap_levels,
)

NORMALIZE = ("batch", "sample", "expected", None)


class Drawing:
    """What is to be drawn for a tensor: what is dropped of it, and the scale of the rest."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(dropped, scale)` as `masking.masked` takes them; under `torch.func.vmap`, as its `randomness` says."""
        if functorch_stack() is not None:
            return _Drawn.apply(x, slice_marker(), self)  # type: ignore[no-any-return]
        return self.now(x)

    def now(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same, for a tensor that no `torch.func` transform holds."""
        raise NotImplementedError

    def of_each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same for each slice of `x` along axis 0 by itself; `dropped` is a bool mask."""
        raise NotImplementedError


@dataclass(frozen=True)
class Elements(Drawing):
    """Every element by itself, with probability `p`."""

    p: float

    def now(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = trials(x.numel(), self.p, x.device, static=must_not_wait(x)).view(torch.bool)
        like = torch.empty_like(x, dtype=torch.bool)
        return dropped.as_strided(like.shape, like.stride()), _of_the_rest(self.p)

    def of_each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self(x)


@dataclass(frozen=True)
class Seeded(Drawing):
    """Blocks that open at seeds, where a seed has probability `seed_rate`, so as to drop `p`."""

    blocks: Blocks
    seed_rate: float
    p: float
    normalize: str | None
    slices: int = 0
    """Above 0: the samples are those of so many batches that know nothing of one another, and a mask is drawn."""
    rows: bool = False
    """Whether a mask comes as `Blocks.rows` does."""

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
        """What keeps the mean: element count / kept count, over all of a batch or over each sample, or a constant."""
        if self.normalize not in ("batch", "sample"):
            return _of_the_rest(self.p if self.normalize == "expected" else 0.0)
        blocks = self.blocks
        together = blocks.samples // max(self.slices, 1) if self.normalize == "batch" else 1
        each = together * blocks.of_sample
        if self.normalize == "batch" and not self.slices and (covered := native.count(dropped, blocks)) is not None:
            return _number(each / max(each - covered, 1))
        kept = each - _counts(dropped, blocks).view(-1, together).sum(1)
        kept = kept.clamp_(min=1).to(finest(x.device))
        # A number over a tensor would be its reciprocal, multiplied: rounded twice.
        scale = torch.full_like(kept, each) / kept
        if self.normalize == "batch" and not self.slices:
            return scale.view(())
        return scale.repeat_interleave(together).view(-1, *[1] * (x.dim() - 1))

    def _sparse(self, static: bool) -> bool:
        """Whether to draw the seeds and write their blocks is cheaper than to draw for each place."""
        blocks = self.blocks
        seeds = blocks.places * self.seed_rate
        if self.seed_rate == 1.0 or (static and seeds < ENOUGH):
            return False
        elements = blocks.samples * blocks.of_sample
        dense = blocks.places * _TRIAL + elements * (_MASK + _DOUBLING * blocks.doublings)
        return seeds * (_SEED + _WRITE * math.prod(blocks.blocks)) < dense


# Nanoseconds on a CPU: a seed drawn and placed, an element written, a trial, an element of a dense mask, a pass.
_SEED, _WRITE, _TRIAL, _MASK, _DOUBLING = 15.0, 0.4, 0.4, 0.3, 0.06


def must_not_wait(x: Tensor) -> bool:
    """Whether no value may be asked for: on other devices than the CPU, and where there is none, as in a trace.

    It must not depend on who else watches, or a mask would change with a profiler.
    """
    if not x.is_cpu or type(x) not in PLAIN:
        return True
    return dispatch_modes() > 0 and is_proxy_tracing()


def unfolded(of_all: Tensor, slices: int) -> Tensor:
    """Axis 0 as (slices, samples of each); what is the same for all stays as it is."""
    return of_all.view(slices, -1, *of_all.shape[1:]) if of_all.dim() else of_all


def _counts(dropped: Tensor, blocks: Blocks) -> Tensor:
    """int64 (samples,): how much of each is dropped, by seeds or rows."""
    if dropped.dtype == torch.uint8:
        return blocks.counts(dropped)
    of_each = torch.zeros(blocks.samples, dtype=torch.int64, device=dropped.device)
    return blocks.counts(blocks.rows(dropped)) if native.count(dropped, blocks, of_each) is None else of_each


def _of_the_rest(p: float) -> Tensor:
    """1 / (1 - p), where anything is left."""
    return _number(1.0 if p == 1.0 else 1.0 / (1.0 - p))


def _number(value: float) -> Tensor:
    """0-d on the CPU: read as a number on every device."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


class _Drawn(torch.autograd.Function):
    """Nothing to differentiate; it is here for `torch.func.vmap`, which says whether slices differ."""

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
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if info.randomness == "same":
            return drawing(x[0]), (None, None)
        dropped, scale = drawing.of_each(x)
        return (dropped, scale), (0, 0 if scale.dim() else None)


def slice_marker() -> Tensor | None:
    """A 0 for each slice of every `torch.func.vmap` that wants other random numbers for each; None elsewhere.

    What is drawn for a tensor that all slices share, such as the input of an ensemble, must be drawn with it.

    Raises:
        RuntimeError: a `vmap` was not told what to do with random numbers.
    """
    marker = None
    for transform in vmap_levels():
        refuse_by_accident(transform.randomness())
        if transform.randomness() == "different":
            one = torch.zeros((), device="cpu") if marker is None else marker
            marker = mark_vmap_slices(one.expand(transform.batch_size()), transform.level())
    return marker


def refuse_by_accident(randomness: str) -> None:
    """Raise as torch's own random functions do where `torch.func.vmap` was not told what to do with them."""
    if randomness == "error":
        raise RuntimeError(
            "vmap: called a random operation while in randomness error mode.\n"
            '  a mask of its own for each slice: vmap(..., randomness="different"); one for all: "same".'
        )
