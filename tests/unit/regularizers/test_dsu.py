"""DSU against the code and the formulas of its paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hookdrop import DSU
from tests.support.tensors import styled, within


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


class TestDSU:
    @pytest.mark.parametrize("seed", range(8))
    def test_matches_the_papers_formulas_with_the_same_draws(self, seed: int) -> None:
        """Output and gradient."""
        x = styled(dtype=torch.float64).requires_grad_()
        torch.manual_seed(seed)
        changed = bool(torch.rand(()) < 0.5)
        noise = [torch.randn(6, 3, 1, 1, dtype=torch.float64) for _ in range(2)]
        expected = papers_dsu(x, changed, *noise)
        torch.manual_seed(seed)
        found = DSU(0.5)(x)
        torch.testing.assert_close(found, expected)
        weight = torch.randn_like(x)
        for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), x) for y in (found, expected)), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert changed or torch.equal(found, x)

    def test_new_statistics_follow_the_paper(self) -> None:
        """The noise of a statistic has mean 0 and the standard deviation of the statistic over the batch."""
        x, draws = styled(dtype=torch.float64), 4000
        outputs = torch.stack([DSU(1.0)(x) for _ in range(draws)])
        mean, std = x.mean((2, 3)), x.std((2, 3))
        new_mean, signed_std = outputs.mean((3, 4)), outputs[..., 0, 0] - outputs[..., 1, 1]
        signed_std = signed_std / (x[..., 0, 0] - x[..., 1, 1]) * std  # a new standard deviation may be negative
        for new, old in ((new_mean, mean), (signed_std, std)):
            spread = old.std(0)
            noise = (new - old) / spread
            assert (noise.mean(0).abs() < 5 / math.sqrt(draws)).all()  # 18 numbers, 5 standard errors
            assert ((noise.var(0) - 1).abs() < 5 * math.sqrt(2 / draws)).all()

    def test_whole_batches_are_changed_with_probability_p(self) -> None:
        x = styled()
        changed = torch.tensor([(DSU(0.3)(x) != x).flatten(1).any(1).sum() for _ in range(3000)])
        assert set(changed.tolist()) == {0, 6}
        assert within((changed > 0).double().mean(), 0.3, math.sqrt(0.21), 3000)

    def test_equal_samples_change_little(self) -> None:
        """Their statistics have no spread: only the epsilon is left."""
        x = torch.randn(1, 3, 5, 5).expand(6, -1, -1, -1)
        assert (DSU(1.0)(x) - x).abs().max() < 0.02
