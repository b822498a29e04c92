"""Dropout of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from hookdrop.errors import ShapeError
from hookdrop.functional.rates import checked_rate
from hookdrop.functional.slices import slice_dropout
from hookdrop.utils.validation import floating


def dropout1d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, L). Reference: Tompson et al. 2015, arXiv:1411.4280."""
    return _channel_dropout(x, p, training, rank=3)


def dropout2d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, H, W). Reference: Tompson et al. 2015, arXiv:1411.4280."""
    return _channel_dropout(x, p, training, rank=4)


def dropout3d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, D, H, W). Reference: Tompson et al. 2015, arXiv:1411.4280."""
    return _channel_dropout(x, p, training, rank=5)


def check_channels(shape: torch.Size | tuple[int, ...], owner: str, rank: int | None = None) -> None:
    """Raise `ShapeError` unless `shape` is (N, C, ...) of this rank."""
    if len(shape) == rank or (rank is None and len(shape) >= 2):
        return
    use = {4: "use Dropout2d(p=...)", 5: "use Dropout3d(p=...)"}.get(len(shape), "use Dropout(p=...)")
    if len(shape) == 3:
        use = "for tokens (N, L, C) use TokenDropout(p=...), for a sequence (N, C, L) Dropout1d(p=...)"
    wanted = {3: "(N, C, L)", 4: "(N, C, H, W)", 5: "(N, C, D, H, W)", None: "(N, C, ...)"}[rank]
    raise ShapeError(f"got {tuple(shape)}: {owner} drops channels of {wanted}.\n  {use} there.")


def _channel_dropout(x: Tensor, p: float | Tensor, training: bool, rank: int) -> Tensor:
    name = f"dropout{rank - 2}d"
    floating(x, name)
    p = checked_rate(p, owner=name)
    check_channels(x.shape, name, rank)
    return slice_dropout(x, p, x.shape[:2] + (1,) * (rank - 2), training)
