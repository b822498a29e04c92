"""DropBlock: tensor in, tensor out, over one, two or three spatial axes.

Ghiasi, Lin, Le, "DropBlock: A regularization method for convolutional networks", 2018, arXiv:1810.12890.
Departs from the paper in two places: the seed rate is solved exactly by default, where the paper's formula
ignores that blocks overlap, and blocks are clamped to the map along each axis.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop.arguments import count, one_of, rate
from hookdrop.errors import ShapeError

NORMALIZE = ("batch", "sample", "expected", None)
GAMMA = ("exact", "paper")

_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_HALF = (torch.float16, torch.bfloat16)


def drop_block(
    x: Tensor,
    p: float = 0.1,
    block_size: int | tuple[int, ...] = 7,
    *,
    per_channel: bool = True,
    gamma: str = "exact",
    normalize: str | None = "batch",
    channel_dim: int | None = None,
    training: bool = True,
) -> Tensor:
    """Zero blocks of the map, `p` of its elements in expectation.

    Args:
        x: (N, C, L) with `channel_dim` given, (N, C, H, W) or (N, C, D, H, W), floating point.
        p: expected fraction of zeroed elements, in [0, 1].
        block_size: edge of a block in elements, one for all axes or one each; clamped to the map.
        per_channel: a mask of its own for every channel (Algorithm 1), or one for all channels of a sample.
        gamma: `"exact"` solves for the seed rate whose blocks cover p; `"paper"` is the paper's formula.
        normalize: what keeps the mean: `"batch"` count / kept count (Algorithm 1), `"sample"` the same for
            each sample, `"expected"` 1 / (1 - p), or None.
        channel_dim: the channels' axis; None means 1 for 4-D and 5-D. 3-D input must say it.
        training: False returns `x` itself.

    Returns:
        A tensor of the shape, dtype and memory format of `x`; `x` itself if nothing is to be dropped.

    Raises:
        ShapeError: the input has no map, or `block_size` names another number of axes.
        ValueError, TypeError: a setting is out of its range.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> y = drop_block(torch.ones(8, 16, 28, 28), p=0.2, block_size=5)
        >>> round((y == 0).float().mean().item(), 2), round(y.mean().item(), 4)
        (0.2, 1.0)

    Reference: Ghiasi et al. 2018, arXiv:1810.12890, Algorithm 1.
    """
    p = rate(p, "p", "drop_block")
    one_of(normalize, "normalize", "drop_block", NORMALIZE)
    channel = channel_axis(x.shape, channel_dim)
    sizes = [size for axis, size in enumerate(x.shape) if axis not in (0, channel)]
    blocks = block_sizes(block_size, sizes)
    if not training or p == 0.0:
        return x
    channels = x.shape[channel] if per_channel else 1
    seed_rate = gamma_for(tuple(sizes), blocks, p, gamma)
    keep = _keep_mask(x, (x.shape[0], channels), sizes, blocks, seed_rate).movedim(1, channel)
    return _normalized(x, keep, p, normalize)


def channel_axis(shape: Sequence[int], channel_dim: int | None) -> int:
    """The axis of the channels, or a `ShapeError` if `shape` has no map beside it."""
    rank = len(shape)
    if rank not in (3, 4, 5):
        use = "use Dropout(p=...)" if rank < 3 else "flatten it to (N, C, D, H, W) first"
        raise ShapeError(f"got {tuple(shape)}: DropBlock needs a map of 1 to 3 axes.\n  {use}.")
    if channel_dim is None:
        if rank == 3:
            raise ShapeError(
                f"got {tuple(shape)}: tokens have no map.\n"
                "  use Dropout(p=0.1) or DropPath(p=0.1), hook a layer with a 4-D output (such as "
                "'patch_embed.proj'),\n  or say where the channels of a sequence are: DropBlock(..., "
                "channel_dim=1) for (N, C, L), channel_dim=-1 for (N, L, C)."
            )
        return 1
    if not -rank < channel_dim < rank or channel_dim == 0:
        raise ShapeError(f"got {tuple(shape)}: channel_dim={channel_dim} is not one of its axes 1 to {rank - 1}.")
    return channel_dim % rank


def block_sizes(block_size: int | Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The block along each spatial axis, clamped to the map."""
    wanted = (block_size,) * len(sizes) if isinstance(block_size, int) else tuple(block_size)
    if len(wanted) != len(sizes):
        raise ShapeError(
            f"block_size={wanted} names {len(wanted)} axes, the map has {len(sizes)} "
            f"({'x'.join(map(str, sizes))}).\n  give one number, or one for each axis."
        )
    return tuple(
        max(1, min(count(block, "block_size", "DropBlock"), size)) for block, size in zip(wanted, sizes, strict=True)
    )


def gamma_for(sizes: tuple[int, ...], blocks: tuple[int, ...], p: float, how: str = "exact") -> float:
    """The probability that a place where a whole block fits is a seed.

    Args:
        sizes: the map's edges.
        blocks: the block's edge along each, at most the map's.
        p: the fraction to drop, in [0, 1].
        how: `"exact"` or `"paper"`.

    Example:
        >>> round(gamma_for((14, 14), (7, 7), 0.5) / gamma_for((14, 14), (7, 7), 0.5, "paper"), 2)
        1.68
    """
    one_of(how, "gamma", "DropBlock", GAMMA)
    if p in (0.0, 1.0) or 0 in sizes:
        return p
    if how == "paper":
        area = math.prod(size / (block * (size - block + 1)) for size, block in zip(sizes, blocks, strict=True))
        return min(1.0, p * area)
    return _exact_gamma(sizes, blocks, p)


@lru_cache(maxsize=4096)
def _exact_gamma(sizes: tuple[int, ...], blocks: tuple[int, ...], p: float) -> float:
    """Solve mean over positions of 1 - (1 - gamma)^n(position) = p by Newton's method.

    The left side is concave and increasing in gamma, so that Newton from below the root stays below it and
    climbs to it: no safeguard is needed.
    """
    cover = _cover_counts(sizes, blocks)
    total = sum(cover.values())
    gamma = p * total / sum(n * times for n, times in cover.items())
    for _ in range(200):
        log_miss = math.log1p(-gamma)
        dropped = -sum(times * math.expm1(n * log_miss) for n, times in cover.items()) / total
        slope = sum(times * n * math.exp((n - 1) * log_miss) for n, times in cover.items()) / total
        better = min(gamma + (p - dropped) / slope, math.nextafter(1.0, 0.0))
        if better <= gamma * (1 + 1e-14):
            break
        gamma = better
    return gamma


def _cover_counts(sizes: Sequence[int], blocks: Sequence[int]) -> Counter[int]:
    """How many positions (value) can be covered by how many seeds (key)."""
    cover = Counter({1: 1})
    for size, block in zip(sizes, blocks, strict=True):
        valid = size - block + 1
        along = Counter(min(i, valid - 1) - max(0, i - block + 1) + 1 for i in range(size))
        product: Counter[int] = Counter()
        for n, times in cover.items():
            for m, more in along.items():
                product[n * m] += times * more
        cover = product
    return cover


def _keep_mask(
    x: Tensor, lead: tuple[int, int], sizes: Sequence[int], blocks: Sequence[int], seed_rate: float
) -> Tensor:
    """(N, C or 1, *sizes) float32: 0 in every block that a seed opens, else 1."""
    valid = [size - block + 1 for size, block in zip(sizes, blocks, strict=True)]
    if x.numel() == 0:
        return x.new_ones((*lead, *sizes), dtype=torch.float32)
    # Seeds are drawn in float32: a low-precision uniform number can't tell .999 from 1.
    dropped = torch.empty((*lead, *valid), dtype=torch.float32, device=x.device).bernoulli_(seed_rate)
    dropped = F.pad(dropped, [pad for block in reversed(blocks) for pad in (block - 1, block - 1)])
    # A maximum over a box is the maximum over its edges in turn: the cost is the sum of the edges.
    for axis, block in enumerate(blocks):
        if block > 1:
            window = [block if i == axis else 1 for i in range(len(blocks))]
            dropped = _MAX_POOL[len(blocks)](dropped, window, stride=1)
    return dropped.neg_().add_(1.0)


def _normalized(x: Tensor, keep: Tensor, p: float, normalize: str | None) -> Tensor:
    """X * keep, scaled so that the mean is kept. `x` comes first: its memory format is the result's."""
    kept = x * keep.to(x.dtype)
    if normalize is None:
        return kept
    if normalize == "expected":
        return kept if p == 1.0 else kept * (1.0 / (1.0 - p))
    if normalize == "batch":
        # A 0-d float32 factor does not promote a lower dtype, and is not rounded to it.
        return kept * (keep.numel() / keep.sum().clamp_min(1.0))
    over = tuple(range(1, keep.dim()))
    scale = math.prod(keep.shape[1:]) / keep.sum(dim=over, keepdim=True).clamp_min(1.0)
    return (kept.float() * scale).to(x.dtype) if x.dtype in _HALF else kept * scale.to(x.dtype)
