"""DropBlock: tensor in, tensor out, over one, two or three spatial axes.

Ghiasi, Lin, Le, "DropBlock: A regularization method for convolutional networks", 2018, arXiv:1810.12890.
Departs from the paper in two places: the seed rate is solved exactly by default, where the paper's formula
ignores that blocks overlap, and blocks are clamped to the map along each axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookdrop.errors import InjectionError, ShapeError
from hookdrop.kernels import custom_ops as graph
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.drawing import NORMALIZE, Seeded
from hookdrop.kernels.masking import masked
from hookdrop.kernels.seed_rate import GAMMA, gamma_for
from hookdrop.utils.validation import count, floating, one_of, rate


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
        TypeError: `x` is not a dense tensor of real floating-point numbers, or a setting is not what it must be.
        ValueError: a setting is out of its range.
        InjectionError: this is being recorded by `torch.jit.trace`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> y = drop_block(torch.ones(32, 64, 28, 28), p=0.2, block_size=5)
        >>> round((y == 0).float().mean().item(), 2), round(y.mean().item(), 4)
        (0.2, 1.0)

    Reference: Ghiasi et al. 2018, arXiv:1810.12890, Algorithm 1.
    """
    floating(x, "drop_block")
    if hasattr(x, "full_tensor"):
        raise TypeError(
            "drop_block: x is a DTensor, in parts on several ranks: blocks can't be drawn across them.\n"
            "  hook a layer whose output is local (use_local_output=True), or use Dropout or DropPath there."
        )
    one_of(normalize, "normalize", "drop_block", NORMALIZE)
    one_of(gamma, "gamma", "drop_block", GAMMA)
    if training and torch._C._get_tracing_state() is not None:
        raise InjectionError(
            "drop_block inside torch.jit.trace: the trace would keep one mask for good.\n"
            "  trace in eval mode: model.eval(), or without hooks: with hookdrop.without_hooks(model): ..."
        )
    compiling = torch.compiler.is_compiling()
    # In a graph the rate is checked where it is read.
    value = None if compiling else rate(p, "p", "drop_block")
    channel = channel_axis(x.shape, channel_dim)
    sizes = tuple(size for axis, size in enumerate(x.shape) if axis != 0 and axis != channel)
    edges = block_sizes(block_size, sizes)
    if not training or x.numel() == 0 or value == 0.0:
        return x
    if value is None:
        tensor = p if isinstance(p, Tensor) else torch.tensor(p, dtype=torch.float64, device="cpu")
        return graph.drop_block(x, tensor, edges, channel, per_channel, gamma, normalize)
    sizes, edges = tuple(map(int, sizes)), tuple(map(int, edges))  # they may be symbols, in a trace
    blocks = Blocks(int(x.shape[0]), int(x.shape[channel]) if per_channel else 1, sizes, edges, channel)
    dropped, scale = Seeded(blocks, gamma_for(sizes, edges, value, gamma), value, normalize)(x)
    return masked(x, dropped, scale, None if dropped.dtype == torch.bool else blocks)


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
                "  use TokenDropout(p=0.1) or DropPath(p=0.1), hook a layer with a 4-D output (such as "
                "'patch_embed.proj'),\n  or say where the channels of a sequence are: DropBlock(..., "
                "channel_dim=1) for (N, C, L), channel_dim=-1 for (N, L, C)."
            )
        return 1
    channel_dim = count(channel_dim, "channel_dim", "DropBlock", -5)
    if not -rank < channel_dim < rank or channel_dim == 0:
        raise ShapeError(f"got {tuple(shape)}: channel_dim={channel_dim} is not one of its axes 1 to {rank - 1}.")
    return channel_dim + rank if channel_dim < 0 else channel_dim


def block_sizes(block_size: int | Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The block along each spatial axis, clamped to the map."""
    checked = block_edges(block_size)
    wanted = (checked,) * len(sizes) if isinstance(checked, int) else checked
    if len(wanted) != len(sizes):
        raise ShapeError(
            f"block_size={wanted} names {len(wanted)} ax{'is' if len(wanted) == 1 else 'es'}, the map has {len(sizes)} "
            f"({'x'.join(map(str, sizes))}).\n  give one number, or one for each axis."
        )
    return tuple(max(1, min(edge, size)) for edge, size in zip(wanted, sizes, strict=True))


def block_edges(block_size: object) -> int | tuple[int, ...]:
    """`block_size` as one whole number or some, whatever the map."""
    if not isinstance(block_size, (tuple, list)):
        return count(block_size, "block_size", "DropBlock")
    if not block_size:
        raise ValueError("DropBlock: block_size must name at least one edge, got an empty sequence.")
    return tuple(count(edge, "block_size", "DropBlock") for edge in block_size)
