"""MixStyle against the code and the formulas of its paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hookdrop import (
    MixStyle,
)
from hookdrop.regularizers.styles import symmetric_beta
from tests.support.tensors import styled, within


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


class TestMixStyle:
    @pytest.mark.parametrize("seed", range(8))
    def test_matches_the_papers_code_with_the_same_draws(self, seed: int) -> None:
        """Output and gradient."""
        x = styled(dtype=torch.float64).requires_grad_()
        torch.manual_seed(seed)
        mixed = bool(torch.rand(()) < 0.5)
        lmda, perm = symmetric_beta(0.3, (6, 1, 1, 1), x.device), torch.rand(6).argsort()
        expected = papers_mix_style(x, mixed, lmda, perm)
        torch.manual_seed(seed)
        found = MixStyle(0.5, alpha=0.3)(x)
        torch.testing.assert_close(found, expected)
        weight = torch.randn_like(x)
        for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), x) for y in (found, expected)), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert mixed or torch.equal(found, x)

    def test_whole_batches_are_mixed_with_probability_p(self) -> None:
        x = styled()
        changed = torch.tensor([(MixStyle(0.3, alpha=5.0)(x) != x).flatten(1).any(1).sum() for _ in range(3000)])
        assert within((changed > 0).double().mean(), 0.3 * (1 - 1 / math.factorial(6)), math.sqrt(0.21), 3000)
        assert (changed >= 4).sum() > 0.7 * (changed > 0).sum()  # one of six is its own partner, on average

    @pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5, 1.0, 3.0])
    def test_lambda_follows_the_beta_distribution(self, alpha: float) -> None:
        """Kolmogorov-Smirnov test at 0.001 over 200,000 draws, except very close to 0 and 1."""
        stats = pytest.importorskip("scipy.stats")
        drawn = symmetric_beta(alpha, (200_000, 1), torch.device("cpu")).flatten()
        assert ((drawn >= 0) & (drawn <= 1)).all()
        at = torch.linspace(1e-6, 1 - 1e-6, 999, dtype=torch.float64)
        found = torch.searchsorted(drawn.sort()[0], at) / 200_000
        assert (found - torch.from_numpy(stats.beta(alpha, alpha).cdf(at.numpy()))).abs().max() < 1.95 / math.sqrt(2e5)
        assert within(drawn.mean(), 0.5, 1 / math.sqrt(4 * (2 * alpha + 1)), 200_000)
        assert drawn.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.02)

    def test_output_style_interpolates_between_two_samples(self) -> None:
        x = styled(4, 2, 30)
        y = MixStyle(1.0, alpha=1.0)(x)
        means, mixed = x.mean((2, 3)), y.mean((2, 3))
        for i in range(4):
            candidates = [(mixed[i] - means[j]) / (means[i] - means[j]) for j in range(4) if j != i]
            own = torch.allclose(mixed[i], means[i], atol=1e-4)
            assert own or any(abs(c[0] - c[1]) < 1e-3 and 0 <= c[0] <= 1 for c in candidates)

    def test_normalized_content_is_unchanged(self) -> None:
        """Only the mean and the standard deviation of a map change."""
        x = styled(dtype=torch.float64)

        def normed(x: Tensor) -> Tensor:
            return (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)

        torch.testing.assert_close(normed(MixStyle(1.0)(x)), normed(x), rtol=1e-4, atol=1e-4)
