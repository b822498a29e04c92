"""HeadDropout: dropping whole attention heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookdrop.errors import LayerError, ShapeError
from hookdrop.kernels.random_numbers import rand
from hookdrop.regularizers.base import BELOW_1, Rate, Regularizer
from hookdrop.utils.validation import count, drop_rate, floating


def head_dropout(x: Tensor, p: float | Tensor, heads: int, training: bool = True) -> Tensor:
    """Zero whole heads of (N, L, H d) with probability `p`, in [0, 1), and scale the rest: see `HeadDropout`."""
    heads = count(heads, "heads", "head_dropout", 2)
    return _head_dropout(x, BELOW_1.argument(p, "head_dropout"), heads, training)


def _head_dropout(x: Tensor, p: float | Tensor, heads: int, training: bool = True) -> Tensor:
    floating(x, "head_dropout")
    check_heads(x.shape, heads, "head_dropout")
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    kept_NH = _kept_heads(x.shape[0], heads, p, x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    factor_NH = kept_NH.to(wide) * (heads / kept_NH.sum(1, keepdim=True, dtype=wide))
    factor = factor_NH.view(len(x), *[1] * (x.dim() - 2), heads, 1)
    by_head = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
    return (by_head * factor).flatten(-2).to(x.dtype)


def _kept_heads(samples: int, heads: int, p: float | Tensor, device: torch.device) -> Tensor:
    """Draw which heads are kept, (samples, heads), given that at least one is.

    The first kept head has a geometric distribution, truncated at `heads`. Those after it are independent. This draws
    from the distribution of repeated draws, without repeating any.
    """
    log_p = p.log() if isinstance(p, Tensor) else math.log(p)
    uniform = rand((samples, heads + 1), torch.float32, device)
    first = (torch.log1p(-uniform[:, :1] * (1.0 - p**heads)) / log_p).floor().clamp(max=heads - 1)
    index = torch.arange(heads, device=device)
    return (index == first) | ((index > first) & (uniform[:, 1:] >= p))


def check_heads(shape: Sequence[int], heads: int | None, owner: str) -> None:
    """Raise `ShapeError` unless `shape` is (N, ..., H d)."""
    if len(shape) < 3:
        raise ShapeError(f"got {tuple(shape)}: {owner} expects the input of an output projection, (N, L, H d).")
    if heads is not None and shape[-1] % heads:
        near = [n for n in range(2, min(shape[-1], 4 * heads) + 1) if shape[-1] % n == 0]
        nearest = sorted(sorted(near, key=lambda n: abs(n - heads))[:3])
        raise ShapeError(
            f"got {tuple(shape)}: {shape[-1]} features do not divide into {heads} heads.\n"
            f"  nearest numbers of heads that do: {', '.join(map(str, nearest)) or 'none'}"
        )


class HeadDropout(Regularizer):
    """Zero whole attention heads with probability `p`, drawn for each sample, and scale the rest by H / kept: DropHead.

    Hook the output projection of attention (`o_proj`, `attn.proj`, ...): it acts on the input of that layer, where the
    heads are still side by side. This works with fused attention. If a draw would drop all heads of a sample, it is
    drawn again, so the expected fraction of dropped heads is (p - p^H) / (1 - p^H).

    Args:
        p: probability of dropping a head, in [0, 1).
        heads: number of query heads H, at least 2. None: `inject` reads it from the module around the layer
            (`num_heads`, `num_attention_heads`, ... or its config).
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, L, H d), or (N, ..., H d); each row of the first axis gets its own draw.

    Raises:
        ShapeError: in forward, if the features do not divide into the heads.
        LayerError: in `inject`, if `heads` is None and the model does not say how many heads there are.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> HeadDropout(p=0.5, heads=4)(torch.ones(2, 1, 8))
        tensor([[[4., 4., 0., 0., 0., 0., 0., 0.]],
        <BLANKLINE>
                [[0., 0., 2., 2., 0., 0., 2., 2.]]])

    Reference: Zhou et al. 2020, "Scheduled DropHead: A regularization method for transformer models",
    arXiv:2004.13342, section 3.1.
    """

    rate: ClassVar[Rate] = BELOW_1
    only_at = "input"
    independent_samples = True

    def __init__(self, p: float | None = None, heads: int | None = None, *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = self.rate.valid(drop_rate(p, keep_prob, self.title), self.title)
        self.heads = None if heads is None else count(heads, "heads", self.title, 2)

    def for_layer(self, model: nn.Module, name: str) -> HeadDropout:
        heads = self.heads
        if heads is None:
            _check_is_output_projection(model, name)
            heads = heads_of(model, name)
        if heads is None:
            raise LayerError(
                f"HeadDropout at {name!r}: the modules around it do not say how many heads there are.\n"
                "  pass the number: HeadDropout(p=..., heads=12)"
            )
        width = getattr(model.get_submodule(name), "in_features", None)
        try:
            count(heads, "heads", f"HeadDropout at {name!r}", 2)
            check_heads((1, 1, width or heads), heads, self.title)
        except ShapeError as error:
            raise LayerError(f"HeadDropout at {name!r} {error}") from None
        except ValueError as error:
            raise LayerError(str(error)) from None
        return HeadDropout(self.p, heads)

    def check(self, shape: Sequence[int]) -> None:
        check_heads(shape, self.heads, self.title)

    def reading(self, shape: Sequence[int]) -> str:
        assert self.heads is not None
        return f"H={self.heads} d={shape[-1] // self.heads}"

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        if self.heads is None:
            raise ShapeError("HeadDropout: heads is missing, and there is no model to read it from: pass heads=...")
        return _head_dropout(x, rate, self.heads)


_ATTENTION = re.compile("att(entio)?n", re.IGNORECASE)
_INPUT_PROJECTION = re.compile(r"(to_|w)?(q|k|v|qk|kv|qkv|query|key|value|query_key_value|c_attn|in)(_proj|_lin)?")


def _check_is_output_projection(model: nn.Module, name: str) -> None:
    """Raise `LayerError` unless a layer is in attention and may be its output projection."""
    path = name.split(".")
    parents = [".".join(path[:end]) for end in range(len(path) - 1, max(len(path) - 4, -1), -1)]
    kinds = [type(model.get_submodule(parent)).__name__ for parent in parents]
    if any(map(_ATTENTION.search, (*path[-4:-1], *kinds))) and not _INPUT_PROJECTION.fullmatch(path[-1]):
        return
    raise LayerError(
        f"HeadDropout at {name!r}: this is not an output projection of attention, so its input has no heads.\n"
        '  find the projections: hookdrop.recipes.head_dropout(model, p)   or name them: layers="**.o_proj"\n'
        "  if its input is (N, L, H d) all the same, pass H: HeadDropout(p=..., heads=12)"
    )


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "encoder_attention_heads")
_LEVELS = 3
"""BERT's projection is `attention.output.dense`, and `attention.self` has the number of heads."""


def heads_of(model: nn.Module, name: str) -> int | None:
    """Read the number of attention heads from the modules around a layer, innermost first; None if none says it."""
    for module in _around(model, name):
        for attribute in _HEADS:
            heads = getattr(module, attribute, None)
            if isinstance(heads, int) and not isinstance(heads, bool):
                return heads
    parents = [module for module in _around(model, name) if hasattr(module, "config")]
    return next((heads for module in parents if (heads := _configured_heads(module.config)) is not None), None)


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules around a layer: each parent, and its direct children."""
    for _ in range(_LEVELS):
        name, dot, _ = name.rpartition(".")
        parent = model.get_submodule(name)
        yield parent
        yield from parent.children()
        if not dot:
            return


def _configured_heads(config: Any) -> int | None:
    found = [getattr(config, attribute, None) for attribute in _HEADS]
    return next((heads for heads in found if isinstance(heads, int) and not isinstance(heads, bool)), None)
