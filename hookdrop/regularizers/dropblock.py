"""Zeroed regions of maps: DropBlock over one, two or three spatial axes, and Cutout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.core import torch_internals as internals
from hookdrop.core.arguments import as_rate_tensor, count, floating, one_of
from hookdrop.core.errors import InjectionError, ShapeError
from hookdrop.core.regularizer import DropRegularizer, P, Rate, Regularizer, describe_map, nhwc_warnings
from hookdrop.kernels import custom_ops
from hookdrop.kernels.accelerators import ACCELERATORS
from hookdrop.kernels.blocks import GAMMA, Blocks, blocks_of, gamma_for, given_channel_axis
from hookdrop.kernels.drawing import NORMALIZE, draw_blocks
from hookdrop.kernels.masking import apply_mask
from hookdrop.kernels.random_numbers import rand, randint


def drop_block(
    x: Tensor,
    p: float | Tensor = 0.1,
    block_size: int | tuple[int, ...] = 7,
    *,
    per_channel: bool = True,
    gamma: str = "exact",
    normalize: str | None = "batch",
    channel_dim: int | None = None,
    training: bool = True,
) -> Tensor:
    """Zero blocks that cover an expected fraction `p` of the map: see `DropBlock`."""
    one_of(normalize, "normalize", "drop_block", NORMALIZE)
    one_of(gamma, "gamma", "drop_block", GAMMA)
    p = P.argument(p, x, "drop_block")
    block_size = check_block_size(block_size)
    if training:
        return _drop_block(x, p, block_size, channel_dim, per_channel, gamma, normalize)
    _map_geometry(x.shape, block_size, channel_dim)
    return x


def _drop_block(x: Tensor, p: float | Tensor, *settings: Any) -> Tensor:
    """`drop_block` with validated settings, in the order of `DropBlock.regularize`."""
    block_size, channel_dim, per_channel, gamma, normalize = settings
    floating(x, "drop_block")
    if isinstance(p, Tensor) or is_compiling():
        p = p if isinstance(p, Tensor) else as_rate_tensor(p)
        channel, _, edges = _map_geometry(x.shape, block_size, channel_dim)
        return custom_ops.drop_block(x, p, edges, channel, per_channel, gamma, normalize) if x.numel() else x
    if internals.is_tracing():
        raise InjectionError(
            "drop_block inside torch.jit.trace: the trace would record a constant mask.\n"
            "  trace in eval mode: model.eval(), or without hooks: with hookdrop.without_hooks(model): ..."
        )
    # Under `make_fx`, sizes may be symbolic.
    blocks = _blocks(tuple(map(int, x.shape)), block_size, channel_dim, per_channel)
    if p == 0.0 or x.numel() == 0:
        return x
    if type(x) not in internals.PLAIN_TYPES:
        if internals.wraps_results(x):
            return internals.on_plain_tensor(_drop_block, x, p, *settings)
        if hasattr(x, "full_tensor"):
            raise TypeError(
                "drop_block: x is a DTensor, sharded over several ranks, and blocks cannot be drawn across ranks.\n"
                "  hook a layer whose output is local (use_local_output=True), or use Dropout or DropPath."
            )
    # A mode such as fake tensors sees operators only, not the launches of kernels.
    opaque = internals.dispatch_modes() > 0 and ACCELERATORS[x.device].can_draw(blocks, x.device)
    if opaque or (internals.functorch_stack() is not None and {*internals.vmap_randomness()} - {"same"}):
        geometry = blocks.blocks, blocks.channel, per_channel
        return custom_ops.drop_block(x, as_rate_tensor(p), *geometry, gamma, normalize)
    seed_rate = gamma_for(blocks.sizes, blocks.blocks, p, gamma)
    with internals.without_functorch():
        dropped, scale = draw_blocks(x, blocks, seed_rate, p, normalize)
    return apply_mask(x, dropped, scale, None if dropped.dtype == torch.bool else blocks)


@lru_cache(maxsize=1024)
def _blocks(
    shape: tuple[int, ...], block_size: int | tuple[int, ...], channel_dim: int | None, per_channel: bool
) -> Blocks:
    channel, sizes, edges = _map_geometry(shape, block_size, channel_dim)
    return blocks_of(shape[0], shape[channel] if per_channel else 1, sizes, edges, channel)


def _map_geometry(
    shape: Sequence[int], block_size: int | tuple[int, ...], channel_dim: int | None
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """`(channel, sizes, edges)`: the channel axis, the map's sizes, and the block clamped to the map."""
    rank, channel = len(shape), 1
    if rank not in (3, 4, 5):
        use = "use Dropout(p=...)" if rank < 3 else "flatten it to (N, C, D, H, W) first"
        raise ShapeError(f"got {tuple(shape)}: DropBlock needs 1 to 3 spatial axes.\n  {use}.")
    if channel_dim is not None:
        channel = given_channel_axis(shape, channel_dim, "DropBlock")
    elif rank == 3:
        raise ShapeError(
            f"got {tuple(shape)}: tokens have no map.\n"
            "  use TokenDropout(p=0.1) or DropPath(p=0.1), hook a layer with a 4-D output (such as "
            "'patch_embed.proj'),\n  or set the channel axis of a sequence: DropBlock(..., "
            "channel_dim=1) for (N, C, L), channel_dim=-1 for (N, L, C)."
        )
    sizes = tuple(size for axis, size in enumerate(shape) if axis not in (0, channel))
    wanted = (block_size,) * len(sizes) if isinstance(block_size, int) else block_size
    if len(wanted) != len(sizes):
        raise ShapeError(
            f"block_size={wanted} has {len(wanted)} ax{'is' if len(wanted) == 1 else 'es'}, but the map has "
            f"{len(sizes)} ({'x'.join(map(str, sizes))}).\n  pass one number, or one for each axis."
        )
    return channel, sizes, tuple(max(1, min(edge, size)) for edge, size in zip(wanted, sizes, strict=True))


def check_block_size(block_size: object) -> int | tuple[int, ...]:
    if not isinstance(block_size, (tuple, list)):
        return count(block_size, "block_size", "DropBlock")
    if not block_size:
        raise ValueError("DropBlock: block_size must not be empty.")
    return tuple(count(edge, "block_size", "DropBlock") for edge in block_size)


class DropBlock(DropRegularizer):
    """Zero contiguous blocks that cover an expected fraction `p` of the map, for any map size.

    Differs from the paper in two ways: the default `gamma="exact"` accounts for overlapping blocks, which the paper's
    formula ignores, and blocks are clamped to the map along each axis.

    Args:
        p: expected fraction of zeroed elements, in [0, 1]. The default is 0.1.
        block_size: edge of a block in elements: one for all axes, or one for each axis.
        keep_prob: 1 - p, instead of `p`.
        per_channel: whether each channel has its own mask (Algorithm 1), or all channels of a sample share one.
        gamma: `"exact"` solves for the seed rate at which blocks cover a fraction p; `"paper"` is the paper's formula,
            which drops less than p.
        normalize: the scale that keeps the mean: `"batch"` count / kept count (Algorithm 1), `"sample"` the same ratio
            for each sample, `"expected"` 1 / (1 - p), or None for no scaling.
        channel_dim: the channel axis. None means 1 for 4-D and 5-D input; 3-D input requires it.

    Shape: (N, C, L) with `channel_dim`, (N, C, H, W), (N, C, D, H, W), or with the channels at `channel_dim`.

    Raises:
        ShapeError: in forward, if the input has no spatial axes, or `block_size` has another number of axes.
        InjectionError: in forward inside `torch.jit.trace`, which would record a fixed mask.

    Example:
        >>> _ = torch.manual_seed(3)
        >>> drop = DropBlock(p=0.3, block_size=3, per_channel=False, normalize=None)
        >>> drop(torch.ones(1, 1, 5, 7))
        tensor([[[[1., 0., 0., 0., 0., 0., 1.],
                  [0., 0., 0., 0., 0., 0., 1.],
                  [0., 0., 0., 0., 0., 0., 1.],
                  [0., 0., 0., 0., 0., 1., 1.],
                  [0., 0., 0., 1., 1., 1., 1.]]]])

    Reference: Ghiasi, Lin, Le 2018, "DropBlock: A regularization method for convolutional networks",
    arXiv:1810.12890.
    """

    axes = "N ..."

    def __init__(
        self,
        p: float | None = None,
        block_size: int | tuple[int, ...] = 7,
        *,
        keep_prob: float | None = None,
        per_channel: bool = True,
        gamma: str = "exact",
        normalize: str | None = "batch",
        channel_dim: int | None = None,
    ) -> None:
        if type(p) is int and p > 1:
            raise ValueError(
                f"DropBlock: p must lie in [0, 1], got {p}.\n  the edge of a block? write block_size={p}"
                f"   a percentage? write p={p / 100:g}"
            )
        super().__init__(0.1 if p is None and keep_prob is None else p, keep_prob=keep_prob)
        self.block_size = check_block_size(block_size)
        self.per_channel: bool = one_of(per_channel, "per_channel", self.title, (True, False))
        self.gamma: str = one_of(gamma, "gamma", self.title, GAMMA)
        self.normalize: str | None = one_of(normalize, "normalize", self.title, NORMALIZE)
        self.channel_dim = None if channel_dim is None else count(channel_dim, "channel_dim", self.title, -4)

    def check(self, shape: Sequence[int]) -> None:
        _map_geometry(shape, self.block_size, self.channel_dim)

    def reading(self, shape: Sequence[int]) -> str:
        return describe_map(shape, _map_geometry(shape, self.block_size, self.channel_dim)[0])

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        found = [] if self.channel_dim else nhwc_warnings(shape, "use DropBlock(..., channel_dim=-1).")
        _, sizes, edges = _map_geometry(shape, self.block_size, self.channel_dim)
        if edges == sizes:
            covers = f"Dropout{len(sizes)}d" if self.per_channel else "DropPath"
            found.append(
                f"block_size={self.block_size} covers the whole {'x'.join(map(str, sizes))} map: DropBlock drops "
                f"blocks of {'x'.join(map(str, edges))} there, which is {covers}.\n"
                f"  there, use a smaller block or {covers}, in a mapping with these layers apart: "
                f"inject(model, {{'...': DropBlock(...), '...': {covers}(...)}})"
            )
        return found

    @property
    def independent_samples(self) -> bool:
        return self.normalize != "batch"

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        if not isinstance(rate, Tensor) and not 0.0 <= rate <= 1.0:  # set on the layer
            P.valid(rate, self.title)
        return _drop_block(x, rate, self.block_size, self.channel_dim, self.per_channel, self.gamma, self.normalize)


_CUT = Rate("p", kind="factor")  # not the fraction of dropped elements


def cutout(x: Tensor, size: int | tuple[int, int], p: float | Tensor = 1.0, training: bool = True) -> Tensor:
    """Zero one rectangle per sample of (N, C, H, W), in all channels and without rescaling: see `Cutout`."""
    height, width = height_and_width(size, "cutout")
    p = _CUT.argument(p, x, "cutout", Cutout.axes)
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    n, _, h, w = x.shape
    # Always float32: bfloat16 has no random numbers between .998 and 1.
    cut_N = rand((n,), torch.float32, x.device) < p
    rows_NH = _window_mask(n, h, height, x.device)
    columns_NW = _window_mask(n, w, width, x.device)
    cut_N1HW = (cut_N[:, None, None] & rows_NH[:, :, None] & columns_NW[:, None, :])[:, None]
    return x * (~cut_N1HW).to(x.dtype)


def height_and_width(size: object, owner: str) -> tuple[int, int]:
    if not isinstance(size, (tuple, list)):
        return (count(size, "size", owner),) * 2
    if len(size) != 2:
        raise ValueError(f"{owner}: size must be one number or (height, width), got {size!r}.")
    return count(size[0], "size", owner), count(size[1], "size", owner)


def _window_mask(samples: int, length: int, size: int, device: torch.device) -> Tensor:
    """(samples, length): True inside a window with a uniformly random center."""
    first = randint(length, (samples, 1), device) - size // 2
    position = torch.arange(length, device=device)
    return (position >= first) & (position < first + size)


class Cutout(Regularizer):
    """Zero one square of each sample in all channels, without rescaling.

    `p` is the probability of cutting a sample, not the fraction of zeroed elements. The expected fraction is
    `p * g(height, H) * g(width, W)`, with `g(s, n) = (s * n - s**2 // 4) / n**2` for s <= n: the center may be any
    pixel, so part of the square may lie outside the map.

    Args:
        size: edge of the square in pixels of the hooked map, or (height, width) of a rectangle.
        p: probability of cutting each sample, in [0, 1].

    Shape: (N, C, H, W). Unlike the paper, it cuts the activations of the hooked layer (to cut images, hook the model's
    first layer with `at="input"`), and it does not reduce an odd `size` by 1 as the paper's code does.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> Cutout(size=3)(torch.ones(1, 1, 4, 6))
        tensor([[[[1., 1., 1., 1., 1., 1.],
                  [1., 1., 1., 1., 1., 1.],
                  [1., 1., 1., 1., 0., 0.],
                  [1., 1., 1., 1., 0., 0.]]]])

    Reference: DeVries & Taylor 2017, "Improved regularization of convolutional neural networks with Cutout",
    arXiv:1708.04552.
    """

    rate: ClassVar[Rate] = _CUT
    axes = "N C H W"
    independent_samples = True

    def __init__(self, size: int | tuple[int, int], p: float = 1.0) -> None:
        super().__init__()
        height, width = height_and_width(size, self.title)
        self.size: int | tuple[int, int] = height if height == width else (height, width)
        self.p = self.rate.valid(p, self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return cutout(x, self.size, rate)
