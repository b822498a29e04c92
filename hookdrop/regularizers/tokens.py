"""Dropout of tokens, and of features with one mask per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdrop.core.arguments import count, one_of
from hookdrop.core.errors import LayerError, ShapeError
from hookdrop.core.regularizer import DropRegularizer, P
from hookdrop.kernels.masking import keep_scale, slice_dropout, slice_mask
from hookdrop.regularizers.dropout import Dropout, drop_slices


def token_dropout(
    x: Tensor, p: float | Tensor, prefix: int = 1, training: bool = True, *, remove: bool = False
) -> Tensor:
    """Zero whole tokens of (N, L, C) after the first `prefix` and scale the kept ones: see `TokenDropout`.

    With `remove`, return the kept tokens only, (N, L', C); `p` must then be a float.
    """
    prefix = count(prefix, "prefix", "token_dropout", 0)
    one_of(remove, "remove", "token_dropout", (True, False))
    p = P.argument(P.valid(p, "token_dropout") if remove else p, x, "token_dropout", TokenDropout.axes)
    _check_prefix(x.shape, prefix)
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    samples, tokens = x.shape[0], x.shape[1] - prefix
    if remove:
        # timm's PatchDropout draws the same numbers.
        kept = torch.randn(samples, tokens, device=x.device).argsort(dim=-1)[:, : tokens_kept(tokens, float(p))]
        index = kept.add(prefix).unsqueeze(-1).expand(-1, -1, x.shape[2])
        return torch.cat([x[:, :prefix], x.gather(1, index)], 1) if prefix else x.gather(1, index)
    if not prefix:
        return slice_dropout(x, p, (samples, tokens, 1))
    # In low precision, round the product only.
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = slice_mask(x, p, (samples, tokens, 1)).to(wide) * keep_scale(p)
    return (x * F.pad(factor, (0, 0, prefix, 0), value=1.0)).to(x.dtype)


def tokens_kept(tokens: int, p: float) -> int:
    """The number of tokens that remain of `tokens`, at least one."""
    return max(1, int(tokens * (1.0 - p) + 1e-9))  # above the error of 1 - p: 10 * (1 - 0.8) is below 2


def locked_dropout(x: Tensor, p: float | Tensor, time_dim: int = 1, training: bool = True) -> Tensor:
    """`dropout` with one mask for all time steps: see `LockedDropout`."""
    time_dim = count(time_dim, "time_dim", "locked_dropout", -8)
    return drop_slices(x, p, (time_dim,), "locked_dropout", LockedDropout.axes, training)


def _check_prefix(shape: Sequence[int], prefix: int) -> None:
    if 0 < shape[1] <= prefix:
        raise ShapeError(
            f"got {tuple(shape)}: prefix={prefix} leaves no token to drop, since L={shape[1]}.\n"
            f"  use a smaller prefix, such as prefix=0, or hook a layer that returns more tokens."
        )


class TokenDropout(DropRegularizer):
    """Drop whole tokens with probability `p`, except the first `prefix` tokens.

    By default it zeroes tokens and scales the others by 1 / (1 - p). This keeps the shape: it saves no time, and
    attention sees zero tokens.

    With `remove=True` it removes them from the sequence without scaling, as the paper does: later layers see fewer
    tokens, which saves their time. Each sample keeps max(1, int((L - prefix) (1 - p))) random tokens.

    Hook the first layer that returns tokens (after the position embedding), or call `recipes.patch_dropout()`,
    which finds it.

    Args:
        p: probability of dropping a token, in [0, 1].
        prefix: number of leading tokens (class token, registers) to leave unchanged.
        remove: whether to remove tokens instead of zeroing them. In compiled code this breaks the graph.
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, L, C) with L > `prefix`. The expected fraction of zeroed elements is (L - prefix) / L * p. With `remove`,
    (N, L', C) in training mode.

    Raises:
        LayerError: in `inject` with `remove` and an example, if later layers need all tokens.

    Example:
        >>> _ = torch.manual_seed(4)
        >>> TokenDropout(p=0.5)(torch.ones(1, 5, 2))[0, :, 0]
        tensor([1., 2., 0., 2., 0.])

    Reference: Liu et al. 2022, "PatchDropout: Economizing vision transformers using patch dropout",
    arXiv:2208.07220.
    """

    axes = "N L C"
    independent_samples = True

    def __init__(
        self, p: float | None = None, prefix: int = 1, *, remove: bool = False, keep_prob: float | None = None
    ) -> None:
        super().__init__(p, keep_prob=keep_prob)
        self.prefix = count(prefix, "prefix", self.title, 0)
        self.remove: bool = one_of(remove, "remove", self.title, (True, False))
        self.keeps_shape = not self.remove

    @property
    def graph_break(self) -> str:
        if not self.remove:
            return ""
        return (
            "TokenDropout(remove=True) changes the number of tokens, which compiled code treats as a constant.\n"
            "  remove fullgraph=True: the graph breaks once, at this layer."
        )

    def for_layer(self, model: nn.Module, name: str, at: str = "output", survey: Any = None) -> TokenDropout:
        if self.remove and survey is not None and (reason := survey.why_tokens_stay(name)):
            raise LayerError(
                f"TokenDropout(remove=True) at {name!r}: {reason}.\n  use TokenDropout(p=...), which zeroes tokens"
            )
        return self

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        _check_prefix(shape, self.prefix)

    def reading(self, shape: Sequence[int]) -> str:
        keeps = f", keeps {self.prefix + tokens_kept(shape[1] - self.prefix, self.p)}" if self.remove else ""
        return f"L={shape[1]} (prefix {self.prefix}{keeps}) C={shape[2]}"

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return token_dropout(x, float(rate) if self.remove else rate, self.prefix, remove=self.remove)


class LockedDropout(Dropout):
    """Zero the same elements at all time steps with probability `p`, and scale the rest by 1 / (1 - p).

    Args:
        p: probability of dropping an element, in [0, 1].
        time_dim: the time axis: 1 for (N, T, C), 0 for (T, N, C), which `nn.LSTM` returns without `batch_first`.
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, T, C), or any shape with at least three axes. Each sequence has one mask at a layer's input or output, as
    in the papers; a hook cannot reach the recurrent state inside an `nn.LSTM`.

    Example:
        >>> _ = torch.manual_seed(4)
        >>> LockedDropout(p=0.5)(torch.ones(1, 3, 4))
        tensor([[[2., 0., 2., 0.],
                 [2., 0., 2., 0.],
                 [2., 0., 2., 0.]]])

    Reference: Gal & Ghahramani 2016, "A theoretically grounded application of dropout in recurrent neural networks",
    arXiv:1512.05287; Merity et al. 2017, "Regularizing and optimizing LSTM language models", arXiv:1708.02182.
    """

    axes = "N T C ..."

    def __init__(self, p: float | None = None, time_dim: int = 1, *, keep_prob: float | None = None) -> None:
        super().__init__(p, shared=(count(time_dim, "time_dim", self.title, -8),), keep_prob=keep_prob)
        self.time_dim = self.shared[0]

    def reading(self, shape: Sequence[int]) -> str:
        return f"T={shape[self.time_dim]}"

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        if self.time_dim in (-1, len(shape) - 1):
            return [f"reads the last axis of {tuple(shape)} as time and drops whole steps; features are usually last."]
        if len(shape) == 4:
            return [f"reads {tuple(shape)} as {self.reading(shape)}; for a map use Dropout2d, which drops channels."]
        return []
