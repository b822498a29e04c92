"""ShakeDrop against the formula of its paper, and the moments of its factors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hookdrop import ShakeDrop, plan
from tests.support.tensors import within

RANGES = [((-1.0, 1.0), (0.0, 1.0)), ((0.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (-0.5, 2.0)), ((0.5, 1.5), (1.0, 1.0))]
"""Ranges of alpha and beta: the paper's two best, and others."""


class TestShakeDrop:
    @pytest.mark.parametrize(("alpha", "beta"), RANGES)
    @pytest.mark.parametrize("seed", range(3))
    def test_matches_the_papers_formula_with_the_same_draws(
        self, seed: int, alpha: tuple[float, float], beta: tuple[float, float]
    ) -> None:
        """(b + alpha - b alpha) x forward, (b + beta - b beta) backward, divided by E[b + alpha - b alpha]."""
        p, x = 0.4, torch.randn(16, 3, 2, 2, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(seed)
        b, a, c = (torch.rand(16, 1, 1, 1) for _ in range(3))
        b = (b >= p).double()
        a, c = (low + (high - low) * u.double() for u, (low, high) in ((a, alpha), (c, beta)))
        mean = 1 - p + p * (alpha[0] + alpha[1]) / 2
        torch.manual_seed(seed)
        y = ShakeDrop(p, alpha, beta)(x)
        torch.testing.assert_close(y, (b + a - b * a) * x / mean, rtol=1e-6, atol=1e-6)
        weight = torch.randn_like(x)
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        torch.testing.assert_close(grad, (b + c - b * c) * weight / mean, rtol=1e-6, atol=1e-6)

    def test_whole_blocks_warn(self) -> None:
        """The output of a residual block contains the skip."""

        class Block(torch.nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return x + super().forward(x)

        model = torch.nn.Sequential(Block(torch.nn.Linear(8, 8)))
        (warning,) = plan(model, ShakeDrop(0.5), layers="0", example_input=torch.randn(64, 8)).warnings
        assert "so ShakeDrop also perturbs the skip connection" in warning

    @pytest.mark.parametrize(("alpha", "beta"), RANGES)
    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_factors_have_the_moments_of_the_paper(
        self, p: float, alpha: tuple[float, float], beta: tuple[float, float]
    ) -> None:
        """Mean 1 forward. All means are within 4 standard errors, from the closed-form variance."""
        n, scale = 100_000, 1 / (1 - p + p * sum(alpha) / 2)
        forward, backward = factors(n, p, alpha, beta)
        for factor, (low, high) in ((forward, alpha), (backward, beta)):
            mean = 1 - p + p * (low + high) / 2
            square = 1 - p + p * (low * low + low * high + high * high) / 3
            fourth = 1 - p + p * sum(low**k * high ** (4 - k) for k in range(5)) / 5
            assert within(factor.mean(), mean * scale, scale * math.sqrt(square - mean**2), n)
            assert within(factor.square().mean(), square * scale**2, scale**2 * math.sqrt(fourth - square**2), n)


def factors(n: int, p: float, alpha: tuple[float, float], beta: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The forward and the backward factors of `n` samples."""
    x = torch.ones(n, 1, dtype=torch.float64, requires_grad=True)
    y = ShakeDrop(p, alpha, beta)(x)
    return y.detach().flatten(), torch.autograd.grad(y.sum(), x)[0].flatten()
