"""The regularizers as pure functions: tensor in, tensor out, drawn from PyTorch's global generators.

Every function returns `x` itself where there is nothing to do, writes nothing in place, and keeps shape, dtype
and memory format. `x` must be of real floating-point numbers and dense, or it is a `TypeError`. `p` is the
probability to drop, as in `torch.nn.functional`; in compiled code it may be a 0-d tensor, which is not compiled in.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop import in_graph
from hookdrop.arguments import floating, one_of, rate
from hookdrop.dropblock import drop_block
from hookdrop.errors import ShapeError
from hookdrop.ops.drawing import Elements
from hookdrop.ops.masking import masked

__all__ = [
    "alpha_dropout",
    "drop_block",
    "drop_path",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
    "gaussian_dropout",
    "gaussian_noise",
]

_HALF = (torch.float16, torch.bfloat16)
_WORTHWHILE = 2**15
"""Elements from which on our own dropout is faster than PyTorch's."""


def dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero each element with probability `p`, scale the rest by 1 / (1 - p).

    Args:
        x: any shape, floating point.
        p: in [0, 1].
        training: False returns `x` itself.

    Example:
        >>> dropout(torch.ones(3), p=1.0)
        tensor([0., 0., 0.])

    Reference: Srivastava et al. 2014, "Dropout: A simple way to prevent neural networks from overfitting".
    """
    floating(x, "dropout", nested=True)
    p = _rate(p, owner="dropout")
    if isinstance(p, Tensor):
        return in_graph.dropout(x, p) if training else x
    if not training or p == 0.0:
        return x
    # On a CPU PyTorch draws a random number for each element, on one thread, and in low precision rounds 1 / (1 - p).
    small = x.numel() < _WORTHWHILE and x.dtype not in _HALF
    if small or x.is_nested or x.device.type != "cpu" or torch._C._get_tracing_state() is not None:
        return F.dropout(x, p, True)
    return masked(x, *Elements(p)(x))


def dropout1d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, L). Reference: Tompson et al. 2015, arXiv:1411.4280."""
    return _channel_dropout(x, p, training, rank=3)


def dropout2d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, H, W). Reference: Tompson et al. 2015, arXiv:1411.4280."""
    return _channel_dropout(x, p, training, rank=4)


def dropout3d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, D, H, W). Reference: Tompson et al. 2015, arXiv:1411.4280."""
    return _channel_dropout(x, p, training, rank=5)


def alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Set elements to SELU's negative saturation value, keeping mean and variance.

    Reference: Klambauer et al. 2017, "Self-normalizing neural networks", arXiv:1706.02515, section 3.
    """
    floating(x, "alpha_dropout")
    p = _rate(p, owner="alpha_dropout")
    if isinstance(p, Tensor):
        return in_graph.alpha_dropout(x, p) if training else x
    return F.alpha_dropout(x, p, True) if training and p > 0.0 else x


def feature_alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """`alpha_dropout` of whole channels of (N, C, ...)."""
    floating(x, "feature_alpha_dropout")
    p = _rate(p, owner="feature_alpha_dropout")
    check_channels(x.shape, "feature_alpha_dropout")
    if isinstance(p, Tensor):
        return in_graph.feature_alpha_dropout(x, p) if training else x
    return F.feature_alpha_dropout(x, p, True) if training and p > 0.0 else x


def gaussian_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Multiply by 1 + e, e ~ N(0, p / (1 - p)): the mean and variance of dropout, with nothing zeroed.

    Args:
        x: any shape, floating point.
        p: in [0, 1).
        training: False returns `x` itself.

    Reference: Srivastava et al. 2014, section 10.
    """
    floating(x, "gaussian_dropout", nested=True)
    p = _rate(p, owner="gaussian_dropout", open_end=True)
    if isinstance(p, Tensor):
        return in_graph.gaussian_dropout(x, p) if training else x
    if not training or p == 0.0:
        return x
    return x * torch.randn_like(x).mul_(math.sqrt(p / (1.0 - p))).add_(1.0)


def gaussian_noise(x: Tensor, std: float | Tensor, training: bool = True) -> Tensor:
    """Add N(0, std^2), `std` in the units of `x`. Reference: Bishop 1995, "Training with noise ..."."""
    floating(x, "gaussian_noise", nested=True)
    std = _rate(std, "std", "gaussian_noise", math.inf)
    if isinstance(std, Tensor):
        return in_graph.gaussian_noise(x, std) if training else x
    return x + torch.randn_like(x).mul_(std) if training and std > 0.0 else x


def drop_path(x: Tensor, p: float | Tensor, mode: str = "row", training: bool = True) -> Tensor:
    """Zero whole samples (`mode="row"`) or the whole batch (`"batch"`), scale the rest by 1 / (1 - p).

    Args:
        x: (N, ...), the output of a residual branch.
        p: in [0, 1].
        mode: `"row"` draws for each sample, `"batch"` once.
        training: False returns `x` itself.

    Reference: Huang et al. 2016, "Deep networks with stochastic depth", arXiv:1603.09382.
    """
    floating(x, "drop_path")
    p = _rate(p, owner="drop_path")
    one_of(mode, "mode", "drop_path", ("row", "batch"))
    if x.dim() == 0:
        raise ShapeError("got a 0-d tensor: drop_path needs samples along axis 0.")
    rows = x.shape[0] if mode == "row" else 1
    return _slice_dropout(x, p, (rows,) + (1,) * (x.dim() - 1), training)


def check_channels(shape: torch.Size | tuple[int, ...], owner: str, rank: int | None = None) -> None:
    """Raise `ShapeError` unless `shape` is (N, C, ...) of this rank."""
    if len(shape) == rank or (rank is None and len(shape) >= 2):
        return
    use = {4: "use Dropout2d(p=...)", 5: "use Dropout3d(p=...)"}.get(len(shape), "use Dropout(p=...)")
    if len(shape) == 3:
        use = "for tokens (N, L, C) use Dropout(p=...), for a sequence (N, C, L) Dropout1d(p=...)"
    wanted = {3: "(N, C, L)", 4: "(N, C, H, W)", 5: "(N, C, D, H, W)", None: "(N, C, ...)"}[rank]
    raise ShapeError(f"got {tuple(shape)}: {owner} drops channels of {wanted}.\n  {use} there.")


def _channel_dropout(x: Tensor, p: float | Tensor, training: bool, rank: int) -> Tensor:
    name = f"dropout{rank - 2}d"
    floating(x, name)
    p = _rate(p, owner=name)
    check_channels(x.shape, name, rank)
    return _slice_dropout(x, p, x.shape[:2] + (1,) * (rank - 2), training)


def _slice_dropout(x: Tensor, p: float | Tensor, shape: tuple[int, ...], training: bool) -> Tensor:
    """X * Bernoulli(1 - p) / (1 - p), one draw for each element of `shape`, which broadcasts to `x`."""
    if isinstance(p, Tensor):
        return in_graph.slice_dropout(x, p, shape) if training else x
    if not training or p == 0.0:
        return x
    if torch._C._functorch.peek_interpreter_stack() is None:
        mask = x.new_empty(shape).bernoulli_(1.0 - p)
    else:
        # The same numbers drawn; in place, `vmap` refuses a tensor that slices share, and crashes in another `vmap`.
        ones = torch.ones(shape, dtype=torch.float32, device=x.device)
        mask = (F.dropout(ones, p, True) != 0.0).to(x.dtype)
    if p == 1.0:
        return x * mask
    scale = 1.0 / (1.0 - p)
    # In low precision the scale is applied by itself, where it is not rounded before it is used.
    return x * mask * scale if x.dtype in _HALF else x * mask.mul_(scale)


def _rate(p: float | Tensor, *args: Any, **kwargs: Any) -> float | Tensor:
    """`p` checked, as a float; in compiled code as a 0-d tensor."""
    if not torch.compiler.is_compiling():
        return rate(p, *args, **kwargs)
    return p if isinstance(p, Tensor) else torch.tensor(rate(p, *args, **kwargs), dtype=torch.float64, device="cpu")
