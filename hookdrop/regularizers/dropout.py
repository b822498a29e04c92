"""Dropout of elements and of slices: to zero, to SELU's saturation (alpha dropout), or to an earlier value (Mixout)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.core import torch_internals as internals
from hookdrop.core.arguments import as_rate_tensor, count, floating
from hookdrop.core.errors import ShapeError
from hookdrop.core.regularizer import DropRegularizer, P, nhwc_warnings
from hookdrop.kernels import custom_ops, drawing
from hookdrop.kernels.masking import HALF, apply_mask, keep_scale, one_for_zero, slice_dropout, slice_mask

_MIN_NATIVE_ELEMENTS = 2**15  # from here on, hookdrop's implementation is faster than PyTorch's
_SATURATION = 1.7580993408473766  # the negative of SELU's limit at minus infinity: scale * alpha
_PIXELS = {3: (2,), 4: (2, 3), 5: (2, 3, 4)}  # the axes of (N, C, ...) that the mask of a channel shares, by rank


def dropout(x: Tensor, p: float | Tensor, training: bool = True, *, shared: int | Sequence[int] = ()) -> Tensor:
    """Zero each element, or each slice along the `shared` axes, with probability `p`: see `Dropout`."""
    if shared != ():
        return drop_slices(x, p, _axes(shared, "dropout"), "dropout", training=training)
    p = P.argument(p, x, "dropout", nested=True)
    return _drop_elements(x, p) if training else x


def dropout1d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, L): see `Dropout1d`."""
    return drop_slices(x, p, Dropout1d.shared, "dropout1d", Dropout1d.axes, training)


def dropout2d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, H, W): see `Dropout2d`."""
    return drop_slices(x, p, Dropout2d.shared, "dropout2d", Dropout2d.axes, training)


def dropout3d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, D, H, W): see `Dropout3d`."""
    return drop_slices(x, p, Dropout3d.shared, "dropout3d", Dropout3d.axes, training)


def drop_slices(
    x: Tensor, p: float | Tensor, shared: tuple[int, ...], owner: str, axes: str = "...", training: bool = True
) -> Tensor:
    """`dropout` of a tensor with these `axes`, with one mask along the `shared` ones."""
    p = P.argument(p, x, owner, axes)
    fused = training and shared == _PIXELS.get(x.dim()) and x.dtype not in HALF
    if fused and isinstance(p, float) and internals.functorch_stack() is None:
        return torch.feature_dropout(x, p, True)  # one call instead of four
    shape = _mask_shape(x.shape, shared)
    return slice_dropout(x, p, shape) if training else x


def _drop_elements(x: Tensor, p: float | Tensor) -> Tensor:
    if isinstance(p, Tensor) or is_compiling():
        p = p if isinstance(p, Tensor) else as_rate_tensor(p)
        return torch.where(custom_ops.draw_elements(x, p), 0.0, x * keep_scale(p))
    if p == 0.0:
        return x
    # On the CPU, PyTorch draws one random number per element on one thread, and rounds 1 / (1 - p) to the dtype of x.
    small = x.numel() < _MIN_NATIVE_ELEMENTS and x.dtype not in HALF
    if small or x.is_nested or not x.is_cpu or internals.is_tracing():
        return torch.dropout(x, p, True)
    if internals.functorch_stack() is not None and {*internals.vmap_randomness()} - {"same"}:
        return torch.where(torch.rand_like(x, dtype=torch.float32) < p, 0.0, x * keep_scale(p))
    if type(x) not in internals.PLAIN_TYPES and internals.wraps_results(x):
        return internals.on_plain_tensor(_drop_elements, x, p)
    return apply_mask(x, *drawing.draw_elements(x, p))


def _axes(shared: int | Sequence[int], owner: str) -> tuple[int, ...]:
    several = shared if isinstance(shared, list | tuple) else [shared]
    axes = tuple(count(axis, "shared", owner, -8) for axis in several)
    if len({*axes}) < len(axes):
        raise ValueError(f"{owner}: shared must have each axis once, got {shared!r}.")
    return axes


def _mask_shape(shape: Sequence[int], shared: tuple[int, ...]) -> list[int]:
    """Return the shape of a mask that all positions along the shared axes have in common."""
    rank = len(shape)
    axes = {axis % rank for axis in shared if -rank <= axis < rank}
    if len(axes) < len(shared):
        raise ShapeError(
            f"got {tuple(shape)}: {shared} must be different ones of its axes 0 to {rank - 1}, or {-rank} to -1."
        )
    return [1 if axis in axes else size for axis, size in enumerate(shape)]


class Dropout(DropRegularizer):
    """Zero each element with probability `p` and scale the rest by 1 / (1 - p).

    Args:
        p: probability of dropping an element, in [0, 1].
        shared: axes along which all elements have one mask, so that whole slices are dropped. `(2, 3)` drops channels
            of (N, C, H, W), `(1,)` features of (N, L, C) in all tokens, `(0,)` the same elements of all samples.
        keep_prob: 1 - p, instead of `p`.

    Shape: any that has the shared axes.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> Dropout(p=0.5)(torch.ones(6))
        tensor([0., 0., 2., 0., 0., 0.])
        >>> Dropout(p=0.5, shared=(0,))(torch.ones(2, 3))
        tensor([[2., 2., 0.],
                [2., 2., 0.]])

    Reference: Srivastava et al. 2014, "Dropout: A simple way to prevent neural networks from overfitting".
    """

    shared: tuple[int, ...] = ()

    def __init__(
        self, p: float | None = None, *, shared: int | Sequence[int] = (), keep_prob: float | None = None
    ) -> None:
        super().__init__(p, keep_prob=keep_prob)
        self.shared = _axes(shared, self.title)

    @property
    def independent_samples(self) -> bool:
        return all(axis > 0 for axis in self.shared)

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        _mask_shape(shape, self.shared)

    def reading(self, shape: Sequence[int]) -> str:
        if self.axes != "..." or not self.shared:
            return super().reading(shape)
        sizes = "x".join(str(shape[axis]) for axis in self.shared)
        return f"one mask for {sizes} (axes {', '.join(map(str, self.shared))})"

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        return nhwc_warnings(shape) if self.shared == _PIXELS.get(len(shape)) else []

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        if self.shared:
            return drop_slices(x, rate, self.shared, type(self).__name__, self.axes)
        floating(x, "dropout", nested=True)
        return _drop_elements(x, rate)


class Dropout1d(Dropout):
    """Zero whole channels with probability `p` and scale the rest by 1 / (1 - p): `Dropout(p, shared=(2,))`.

    Args:
        p: probability of dropping a channel, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, C, L). With tokens (N, L, C) it would drop whole tokens.

    Reference: Tompson et al. 2015, "Efficient object localization using convolutional networks",
    arXiv:1411.4280 (SpatialDropout).
    """

    axes = "N C L"
    shared = _PIXELS[3]
    __init__ = DropRegularizer.__init__


class Dropout2d(Dropout):
    """Zero whole channels of (N, C, H, W) maps with probability `p`. Warns if a map looks like NHWC.

    Reference: Tompson et al. 2015, arXiv:1411.4280 (SpatialDropout).
    """

    axes = "N C H W"
    shared = _PIXELS[4]
    __init__ = DropRegularizer.__init__


class Dropout3d(Dropout):
    """Zero whole channels of (N, C, D, H, W) volumes with probability `p`. Reference: Tompson et al. 2015."""

    axes = "N C D H W"
    shared = _PIXELS[5]
    __init__ = DropRegularizer.__init__


def alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Set elements to SELU's negative saturation value, keeping mean and variance: see `AlphaDropout`."""
    p = P.argument(p, x, "alpha_dropout")
    if not training:
        return x
    if isinstance(p, Tensor):
        return _saturate(x, (~custom_ops.draw_elements(x, p)).to(x.dtype), p)
    return F.alpha_dropout(x, p, True) if p > 0.0 else x


def feature_alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """`alpha_dropout` of whole channels of (N, C, ...): see `FeatureAlphaDropout`."""
    p = P.argument(p, x, "feature_alpha_dropout", FeatureAlphaDropout.axes)
    if not training:
        return x
    if isinstance(p, Tensor):
        return _saturate(x, slice_mask(x, p, (*x.shape[:2], *[1] * (x.dim() - 2))), p)
    return F.feature_alpha_dropout(x, p, True) if p > 0.0 else x


def _saturate(x: Tensor, kept: Tensor, p: Tensor) -> Tensor:
    """`AlphaDropout` where `kept` is 0; all zeros if p is 1, as in PyTorch."""
    kept_share = 1.0 - p
    a = one_for_zero((_SATURATION**2 * p + 1.0) * kept_share).rsqrt() * kept_share.sign()
    return (x * kept + (kept - 1.0) * _SATURATION) * a + _SATURATION * a * p


class AlphaDropout(DropRegularizer):
    """Set elements to SELU's negative saturation with probability `p`, then restore mean and variance.

    Args:
        p: probability to drop, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: any. Inputs with mean 0 and variance 1 keep both.

    Reference: Klambauer et al. 2017, "Self-normalizing neural networks", arXiv:1706.02515, "New Dropout Technique".
    """

    independent_samples = True
    regularize = staticmethod(alpha_dropout)


class FeatureAlphaDropout(DropRegularizer):
    """`AlphaDropout` of whole channels of (N, C, ...).

    Reference: Klambauer et al. 2017, arXiv:1706.02515.
    """

    axes = "N C ..."
    independent_samples = True
    regularize = staticmethod(feature_alpha_dropout)


def mixout(x: Tensor, start: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Return the parameter `x` with each element replaced by that of `start` with probability `p`: see `Mixout`."""
    p = P.argument(p, x, "mixout")
    return start + dropout(x - start, p) if training else x


class Mixout(DropRegularizer):
    """Replace each element of a parameter by its value at the injection with probability `p`, and keep the mean.

    With the parameter W, its value U at the injection, and a mask M that is 1 with probability 1 - p, the layer uses
    (M W + (1 - M) U - p U) / (1 - p), which is U + dropout(W - U). For fine-tuning, inject after the pretrained weights
    are loaded, and before those of a checkpoint. U takes the memory of the parameters once more.

    Args:
        p: probability of replacing an element, in [0, 1]. At 1, the layer uses U.
        keep_prob: 1 - p, instead of `p`.

    Shape: any; only for parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> inject(model, Mixout(p=0.5), layers=nn.Linear)
        <Injection 'mixout': 2 sites, p=0.5 of 0.5, step 0 of ConstantSchedule()>

    Reference: Lee et al. 2020, "Mixout: Effective regularization to finetune large-scale pretrained language models",
    arXiv:1909.11299, equation 4. The authors' code draws one row of the mask and repeats it for all rows.
    """

    needs = ("start",)
    only_at = "parameters"

    def regularize(self, x: Tensor, rate: Any, start: Tensor) -> Tensor:
        return mixout(x, start, rate)
