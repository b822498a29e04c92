"""MixStyle and DSU against the code and the formulas of their papers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hookdrop import DSU, HookdropWarning, MixStyle, Regularizer, ShakeDrop, inject
from hookdrop.regularizers.styles import symmetric_beta
from tests.support.tensors import HALF, styled, within

STYLES = pytest.mark.parametrize("cls", [MixStyle, DSU], ids=lambda cls: cls.__name__)


def papers_mix_style(x: Tensor, mixed: bool, lmda: Tensor, perm: Tensor, eps: float = 1e-6) -> Tensor:
    """The code of the paper's repository for given random draws."""
    if not mixed:
        return x
    mu, var = x.mean(dim=[2, 3], keepdim=True), x.var(dim=[2, 3], keepdim=True)
    sig = (var + eps).sqrt()
    mu, sig = mu.detach(), sig.detach()
    x_normed = (x - mu) / sig
    mu2, sig2 = mu[perm], sig[perm]
    mu_mix = mu * lmda + mu2 * (1 - lmda)
    sig_mix = sig * lmda + sig2 * (1 - lmda)
    return x_normed * sig_mix + mu_mix


def papers_dsu(x: Tensor, changed: bool, mean_noise: Tensor, std_noise: Tensor, eps: float = 1e-6) -> Tensor:
    """The formulas of the paper for given random draws, with the epsilons of the authors' code."""
    if not changed:
        return x
    mu = x.mean(dim=(2, 3), keepdim=True)
    sigma = torch.sqrt(x.var(dim=(2, 3), keepdim=True) + eps)
    spread_of_mu = torch.sqrt(mu.var(dim=0, keepdim=True) + eps)
    spread_of_sigma = torch.sqrt(sigma.var(dim=0, keepdim=True) + eps)
    beta = mu + mean_noise * spread_of_mu
    gamma = sigma + std_noise * spread_of_sigma
    return gamma * (x - mu) / sigma + beta


def mixed_with_the_same_draws(x: Tensor) -> Tensor:
    mixed = bool(torch.rand(()) < 0.5)
    lmda, perm = symmetric_beta(0.3, (6, 1, 1, 1), x.device), torch.rand(6).argsort()
    return papers_mix_style(x, mixed, lmda, perm)


def changed_with_the_same_draws(x: Tensor) -> Tensor:
    changed = bool(torch.rand(()) < 0.5)
    return papers_dsu(x, changed, *(torch.randn(6, 3, 1, 1, dtype=torch.float64) for _ in range(2)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("regularizer", "paper"),
    [(MixStyle(0.5, alpha=0.3), mixed_with_the_same_draws), (DSU(0.5), changed_with_the_same_draws)],
    ids=["MixStyle", "DSU"],
)
def test_matches_the_paper_with_the_same_draws(
    regularizer: Regularizer, paper: Callable[[Tensor], Tensor], seed: int
) -> None:
    """Output and gradient; unchanged with probability 1/2."""
    x, weight, results = styled(dtype=torch.float64).requires_grad_(), torch.randn(6, 3, 5, 5), []
    for function in (regularizer, paper):
        torch.manual_seed(seed)
        y = function(x)
        results.append([y, *torch.autograd.grad((y * weight).sum(), x)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5, 1.0, 3.0])
def test_lambda_follows_the_beta_distribution(alpha: float) -> None:
    """Kolmogorov-Smirnov test at 0.001 over 200,000 draws, except very close to 0 and 1."""
    stats = pytest.importorskip("scipy.stats")
    drawn = symmetric_beta(alpha, (200_000, 1), torch.device("cpu")).flatten()
    assert ((drawn >= 0) & (drawn <= 1)).all()
    at = torch.linspace(1e-6, 1 - 1e-6, 999, dtype=torch.float64)
    found = torch.searchsorted(drawn.sort()[0], at) / 200_000
    assert (found - torch.from_numpy(stats.beta(alpha, alpha).cdf(at.numpy()))).abs().max() < 1.95 / math.sqrt(2e5)
    assert within(drawn.mean(), 0.5, 1 / math.sqrt(4 * (2 * alpha + 1)), 200_000)
    assert drawn.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.02)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("regularizer", [MixStyle(1.0), DSU(1.0), ShakeDrop(0.5)], ids=repr)
def test_low_precision_rounds_only_the_result(regularizer: Regularizer, dtype: torch.dtype) -> None:
    """Statistics in float16 would lose a variance of 1e-6, and have a relative error of 1/2,000 in the mean."""
    x = styled(dtype=dtype)
    torch.manual_seed(3)
    found = regularizer(x)
    torch.manual_seed(3)
    torch.testing.assert_close(found, regularizer(x.float()).to(dtype), rtol=0, atol=0)


@STYLES
def test_unchanged_batches_are_bitwise_unchanged(cls: type[Regularizer]) -> None:
    x = (styled() * 1e4 + 0.1).requires_grad_()
    same = [y for y in (cls(0.2)(x) for _ in range(50)) if torch.equal(y, x)]
    assert len(same) > 25
    assert all(torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x)) for y in same)


@STYLES
def test_a_batch_of_one_warns(cls: type[Regularizer]) -> None:
    model, x = nn.Sequential(nn.Identity()), styled(1)
    inject(model, cls(1.0), layers="0")
    with pytest.warns(HookdropWarning, match="a batch of one sample has a single style"):
        torch.testing.assert_close(model(x), x)


@STYLES
def test_constant_maps_stay_finite(cls: type[Regularizer]) -> None:
    x = torch.full((4, 2, 3, 3), 7.0, requires_grad=True)
    y = cls(1.0)(x)
    torch.testing.assert_close(y, x, atol=0.01, rtol=0)
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
