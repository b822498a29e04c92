"""Dropout of tokens, and of features over all of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop import in_graph
from hookdrop.errors import ShapeError
from hookdrop.functional.rates import checked_rate
from hookdrop.functional.slices import slice_dropout, slice_mask
from hookdrop.utils.validation import count, floating


def token_dropout(x: Tensor, p: float | Tensor, prefix: int = 1, training: bool = True) -> Tensor:
    """Zero whole tokens with probability `p`, scale the rest by 1 / (1 - p); the first `prefix` are spared both.

    Args:
        x: (N, L, C), floating point.
        p: in [0, 1].
        prefix: how many tokens at the start (class token, registers) stay as they are.
        training: False returns `x` itself.

    Raises:
        ShapeError: no tokens, or all are spared.

    Example:
        >>> token_dropout(torch.ones(1, 3, 2), p=1.0)
        tensor([[[1., 1.],
                 [0., 0.],
                 [0., 0.]]])

    Reference: Liu et al. 2022, "PatchDropout", arXiv:2208.07220, which takes the tokens out of the sequence.
    """
    floating(x, "token_dropout")
    p = checked_rate(p, owner="token_dropout")
    prefix = count(prefix, "prefix", "token_dropout", 0)
    check_tokens(x.shape, prefix, "token_dropout")
    if not training or x.numel() == 0:
        return x
    shape = (x.shape[0], x.shape[1] - prefix, 1)
    if not prefix:
        return slice_dropout(x, p, shape, training)
    wide = torch.promote_types(x.dtype, torch.float32)
    if isinstance(p, Tensor):
        factor = in_graph.slice_factor(x, p, shape, wide)
    elif p == 0.0:
        return x
    else:
        factor = slice_mask(x, p, shape).to(wide) * (1.0 / (1.0 - p) if p < 1.0 else 1.0)
    # In low precision only the product is rounded.
    return (x * F.pad(factor, (0, 0, prefix, 0), value=1.0)).to(x.dtype)


def locked_dropout(x: Tensor, p: float | Tensor, time_dim: int = 1, training: bool = True) -> Tensor:
    """`dropout` with one mask for all steps of time: what is dropped stays dropped to the end of the sequence.

    Args:
        x: (N, T, C) or another shape of three axes or more, floating point.
        p: in [0, 1].
        time_dim: the axis of time: 1 for (N, T, C), 0 for (T, N, C).
        training: False returns `x` itself.

    Raises:
        ShapeError: fewer than three axes, or no such axis.

    Reference: Gal & Ghahramani 2016, arXiv:1512.05287; Merity et al. 2017, arXiv:1708.02182, section 4.3.
    """
    floating(x, "locked_dropout")
    p = checked_rate(p, owner="locked_dropout")
    axis = time_axis(x.shape, time_dim, "locked_dropout")
    shape = tuple(1 if at == axis else size for at, size in enumerate(x.shape))
    return slice_dropout(x, p, shape, training)


def check_tokens(shape: Sequence[int], prefix: int, owner: str) -> None:
    """Raise `ShapeError` unless `shape` is (N, L, C) with tokens that are not spared."""
    if len(shape) != 3:
        use = {
            4: "for the channels of a map use Dropout2d(p=...), for its regions DropBlock(p=...)",
            5: "for the channels of a map use Dropout3d(p=...), for its regions DropBlock(p=...)",
        }.get(len(shape), "use Dropout(p=...)")
        raise ShapeError(f"got {tuple(shape)}: {owner} drops tokens of (N, L, C).\n  {use}.")
    if 0 < shape[1] <= prefix:
        raise ShapeError(
            f"got {tuple(shape)}: prefix={prefix} spares all tokens there are, L={shape[1]}.\n"
            f"  a smaller prefix, such as prefix=0, or a layer that gives more tokens."
        )


def time_axis(shape: Sequence[int], time_dim: int, owner: str) -> int:
    """The axis of time, or a `ShapeError` if there is none."""
    time_dim, rank = count(time_dim, "time_dim", owner, -8), len(shape)
    if rank < 3:
        raise ShapeError(
            f"got {tuple(shape)}: {owner} needs time, samples and features: (N, T, C), or (T, N, C) with time_dim=0.\n"
            "  use Dropout(p=...); a packed sequence: torch.nn.utils.rnn.pad_packed_sequence first."
        )
    if not -rank <= time_dim < rank:
        raise ShapeError(f"got {tuple(shape)}: time_dim={time_dim} is not one of its axes 0 to {rank - 1}.")
    return time_dim % rank
