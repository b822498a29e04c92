"""Noise: on activations, on token embeddings (NEFTune), and on residual branches (ShakeDrop)."""

from __future__ import annotations

import math
from ctypes import c_float
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookdrop.core.arguments import as_rate_tensor, number, one_of
from hookdrop.core.errors import ShapeError
from hookdrop.core.regularizer import LARGEST, STD, DropRegularizer, Rate, Regularizer
from hookdrop.core.torch_internals import functorch_stack
from hookdrop.kernels.random_numbers import rand, rand_like, randn_like

_P_BELOW_1 = Rate("p", kind="noise", open_end=True)
_BETA = Rate("beta", kind="noise")
_ALPHA = Rate("alpha", high=LARGEST, kind="noise")

Range = tuple[float, float]


def gaussian_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Multiply by 1 + e, e ~ N(0, p / (1 - p)), `p` in [0, 1): see `GaussianDropout`."""
    p = _P_BELOW_1.argument(p, x, "gaussian_dropout", nested=True)
    if not training:
        return x
    if isinstance(p, Tensor):
        return x * (1.0 + randn_like(x) * (p / (1.0 - p)).sqrt())
    return x * torch.randn_like(x).mul_(math.sqrt(p / (1.0 - p))).add_(1.0) if p > 0.0 else x


def gaussian_noise(x: Tensor, std: float | Tensor, training: bool = True) -> Tensor:
    """Add N(0, std^2), `std` in the units of `x`: see `GaussianNoise`."""
    std = STD.argument(std, x, "gaussian_noise", nested=True)
    if not training:
        return x
    if isinstance(std, Tensor):
        return x + randn_like(x) * std
    return torch.add(x, torch.randn_like(x), alpha=std) if std > 0.0 else x


def uniform_noise(x: Tensor, beta: float | Tensor = 0.1, training: bool = True) -> Tensor:
    """Multiply by 1 + r, r ~ U[-beta, beta] for each element: see `UniformNoise`."""
    beta = _BETA.argument(beta, x, "uniform_noise")
    if not training or (not isinstance(beta, Tensor) and beta == 0.0):
        return x
    # In low precision the few possible random numbers do not average 1/2, so round the product only.
    r = rand_like(x, torch.promote_types(x.dtype, torch.float32))
    if isinstance(beta, Tensor):
        return (x * (1.0 + (2.0 * r - 1.0) * beta)).to(x.dtype)
    return (x * torch.add(as_rate_tensor(1.0 - beta), r, alpha=2.0 * beta)).to(x.dtype)


class GaussianDropout(DropRegularizer):
    """Multiply by 1 + e, e ~ N(0, p / (1 - p)): the mean and variance of dropout, without zeros.

    Args:
        p: the drop probability of the equivalent dropout, in [0, 1).
        keep_prob: 1 - p, instead of `p`.

    Shape: any.

    Reference: Srivastava et al. 2014, "Dropout: A simple way ...", section 10.
    """

    rate: ClassVar[Rate] = _P_BELOW_1
    independent_samples = True
    regularize = staticmethod(gaussian_dropout)


class GaussianNoise(Regularizer):
    """Add N(0, std^2). A schedule drives `std`.

    Args:
        std: standard deviation in the units of the activations, at least 0.

    Shape: any.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> GaussianNoise(std=0.5)(torch.zeros(10_000)).std().round(decimals=1)
        tensor(0.5000)

    Reference: Bishop 1995, "Training with noise is equivalent to Tikhonov regularization".
    """

    rate: ClassVar[Rate] = STD
    independent_samples = True
    regularize = staticmethod(gaussian_noise)

    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        self.std = self.rate.valid(std, self.title)


class UniformNoise(Regularizer):
    """Multiply by 1 + r, r ~ U[-beta, beta] for each element: Uout. A schedule drives `beta`.

    Intended for networks with batch norm: it keeps the mean and adds only beta^2 / 3 of the mean square to the
    variance, where dropout adds p / (1 - p) of it.

    Args:
        beta: the largest relative change of an element, in [0, 1].

    Shape: any.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> y = UniformNoise(beta=0.5)(torch.ones(10_000))
        >>> y.amin().round(decimals=2), y.amax().round(decimals=2)
        (tensor(0.5000), tensor(1.5000))

    Reference: Li et al. 2019, "Understanding the disharmony between dropout and batch normalization by variance
    shift", arXiv:1801.05134, section 5.
    """

    rate: ClassVar[Rate] = _BETA
    independent_samples = True
    regularize = staticmethod(uniform_noise)

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = self.rate.valid(beta, self.title)


def neftune(x: Tensor, alpha: float | Tensor, attention_mask: Tensor | None = None, training: bool = True) -> Tensor:
    """Add U(-1, 1) * alpha / sqrt(L d) to embeddings (N, L, d): see `NEFTune`.

    With `attention_mask` (N, L), padding gets no noise, and L is the number of real tokens of each sample.
    """
    alpha, mask = _ALPHA.argument(alpha, x, "neftune", NEFTune.axes), attention_mask
    if not training or x.numel() == 0 or (not isinstance(alpha, Tensor) and alpha == 0.0):
        return x
    if mask is not None and mask.shape != x.shape[:2]:
        raise ShapeError(
            f"got {tuple(x.shape)}: the attention mask must be {tuple(x.shape[:2])}, got {tuple(mask.shape)}.\n"
            "  without the mask, padding gets noise too: attention_mask=False"
        )
    if mask is None and not isinstance(alpha, Tensor):
        # In float32, as the reference computes it.
        root = c_float(math.sqrt(c_float(x.shape[1] * x.shape[2]).value)).value
        largest = c_float(c_float(alpha).value / root).value
        if functorch_stack() is None:
            return x + torch.empty_like(x).uniform_(-largest, largest)
        # The same numbers: `vmap` does not support in-place draws for tensors that it does not map.
        return x + torch.add(x.new_tensor(-largest), torch.rand_like(x), alpha=2.0 * largest)
    wide = torch.promote_types(x.dtype, torch.float32)
    noise = (2.0 * rand_like(x, wide) - 1.0) * alpha
    if mask is None:
        return x + (noise / math.sqrt(x.shape[1] * x.shape[2])).to(x.dtype)
    real_NL1 = (mask != 0).unsqueeze(-1).to(wide)
    lengths_N11 = real_NL1.sum(1, keepdim=True).clamp(min=1.0)
    return x + (noise * real_NL1 / (lengths_N11 * x.shape[2]).sqrt()).to(x.dtype)


class NEFTune(Regularizer):
    """Add uniform noise to the token embeddings: e + alpha / sqrt(L d) * u, u ~ U(-1, 1). A schedule drives `alpha`.

    The norm of the noise is about alpha / sqrt(3), whatever the length. Hook the token embedding, or call
    `recipes.neftune()`, which finds it. Callers that pass `inputs_embeds` bypass the embedding and the noise.

    Args:
        alpha: scale of the noise, at least 0; 5, 10 or 15 in the paper.
        attention_mask: False computes as transformers does: L is the padded length, and padding gets noise too. True
            computes as the authors' training code does: L is the number of real tokens of each sample, and padding gets
            no noise. A hook reads the mask from the call of the model, which must take `attention_mask`.

    Shape: (N, L, d), and a mask (N, L).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> noise = NEFTune(alpha=5)(torch.zeros(2, 100, 16))
        >>> bool(noise.abs().amax() <= 5 / 1600**0.5)
        True

    Reference: Jain et al. 2023, "NEFTune: Noisy embeddings improve instruction finetuning", arXiv:2310.05914,
    algorithm 1.
    """

    rate: ClassVar[Rate] = _ALPHA
    axes = "N L d"
    only_at = "output"
    independent_samples = True

    def __init__(self, alpha: float = 5.0, *, attention_mask: bool = False) -> None:
        super().__init__()
        self.alpha = self.rate.valid(alpha, self.title)
        self.attention_mask: bool = one_of(attention_mask, "attention_mask", self.title, (True, False))
        self.needs = ("attention_mask",) if self.attention_mask else ()

    def regularize(self, x: Tensor, rate: Any, attention_mask: Tensor | None = None) -> Tensor:
        return neftune(x, rate, attention_mask)


def shake_drop(
    x: Tensor, p: float | Tensor = 0.5, alpha: Range = (-1.0, 1.0), beta: Range = (0.0, 1.0), training: bool = True
) -> Tensor:
    """With probability `p`, multiply a sample and its gradient by different random factors: see `ShakeDrop`."""
    alpha, beta = _range(alpha, "alpha", "shake_drop"), _range(beta, "beta", "shake_drop")
    p = _P_BELOW_1.argument(p, x, "shake_drop", ShakeDrop.axes)
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    shape = (x.shape[0],) + (1,) * (x.dim() - 1)
    # In low precision, round the product only.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    kept = rand(shape, torch.float32, x.device) >= p
    mean = 1.0 - p * (1.0 - sum(alpha) / 2.0)
    draws = (low + (high - low) * rand(shape, torch.float32, x.device) for low, high in (alpha, beta))
    forward, backward = (torch.where(kept, 1.0, factor.to(wide.dtype)) / mean for factor in draws)
    # The gradient sees only the first summand. For a kept sample, the second is 0.
    return torch.addcmul(wide * backward, wide.detach(), forward - backward).to(x.dtype)


def _range(value: object, name: str, owner: str) -> Range:
    """Return `value` as (low, high). The output is divided by the mean of alpha, which must not be negative."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        low, high = number(value[0], name, owner), number(value[1], name, owner)
        if low <= high and (name != "alpha" or low + high >= 0.0):
            return low, high
    mean = ", with a mean of at least 0" if name == "alpha" else ""
    raise ValueError(f"{owner}: {name} must be a range (low, high){mean}, got {value!r}.\n  a constant c is (c, c).")


class ShakeDrop(Regularizer):
    """With probability `p`, multiply a sample by a random alpha, and its gradient by another random number beta.

    For b = 0 with probability `p`, else 1, and alpha and beta uniform, the output is x * (b + alpha - b * alpha) / m
    and the gradient is multiplied by (b + beta - b * beta) / m. All three are drawn for each sample. m is the mean of
    the first factor, 1 - p for the default `alpha`.

    Hook the last layer of a residual branch, before the addition, as for `DropPath`; it should be a batch norm. With
    `p_scale="depth"`, the rate grows from p / L at the first of L sites to p at the last, as in the paper.

    Args:
        p: probability of perturbing a sample, in [0, 1).
        alpha: range (low, high) of the forward factor. Its mean must not be negative.
        beta: range (low, high) of the backward factor.

    Shape: (N, ...).

    Unlike the paper, this divides by m in training instead of multiplying by m in eval mode, so that eval is the
    identity. The authors' code draws b once per batch, and alpha and beta for each element.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.ones(4, 1, requires_grad=True)
        >>> y = ShakeDrop(p=0.5)(x)
        >>> y.sum().backward()
        >>> torch.cat([y.detach(), x.grad], dim=1)
        tensor([[-0.7703,  0.9113],
                [ 2.0000,  2.0000],
                [-0.0396,  0.6978],
                [ 1.5858,  0.8034]])

    Reference: Yamada et al. 2018, "ShakeDrop regularization for deep residual learning", arXiv:1802.02375.
    """

    rate: ClassVar[Rate] = _P_BELOW_1
    axes = "N ..."
    independent_samples = True

    def __init__(self, p: float = 0.5, alpha: Range = (-1.0, 1.0), beta: Range = (0.0, 1.0)) -> None:
        super().__init__()
        self.p = self.rate.valid(p, self.title)
        self.alpha = _range(alpha, "alpha", self.title)
        self.beta = _range(beta, "beta", self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return shake_drop(x, rate, self.alpha, self.beta)
