"""UniformNoise, NEFTune and ShakeDrop against their formulas; tests/integration compares NEFTune with transformers."""

from __future__ import annotations

import math

import pytest
import torch

from hookdrop import NEFTune, ShakeDrop, UniformNoise
from hookdrop.functional import neftune
from tests.support.tensors import within


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.05, 0.3, 1.0])
def test_uniform_noise_is_uniform_within_plus_minus_beta(beta: float, dtype: torch.dtype) -> None:
    """Mean, variance and deciles over a million draws. Low precision rounds by at most 2**-8."""
    r = (UniformNoise(beta)(torch.ones(1_000_000, dtype=dtype)).double() - 1) / beta
    rounding = torch.finfo(dtype).eps / beta
    assert r.abs().max() <= 1 + rounding
    assert abs(r.mean()) <= 4 / math.sqrt(3e6) + rounding / 4
    assert r.var().item() == pytest.approx(1 / 3, rel=0.01, abs=2 * rounding**2)
    if dtype == torch.float32:
        tenths = torch.histc(r, 10, -1, 1) / 1e6
        assert (tenths - 0.1).abs().max() < 4 * math.sqrt(0.09 / 1e6)


MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_uniform_up_to_alpha_over_the_root_of_the_size(dtype: torch.dtype) -> None:
    """In float32, the mean and the mean square are within 4 standard errors of a million draws."""
    bound = 7 / math.sqrt(1000 * 10)
    noise = NEFTune(7)(torch.zeros(100, 1000, 10, dtype=dtype)).double()
    assert bound * 0.99 < noise.abs().amax() < bound * 1.01
    if dtype == torch.float32:
        assert within(noise.mean(), 0.0, bound / math.sqrt(3), 1e6)
        assert within(noise.square().mean() / bound**2, 1 / 3, math.sqrt(4 / 45), 1e6)


def test_attention_mask_spares_padding_and_scales_by_real_length() -> None:
    """As in the authors' code: U(-1, 1) * mask * alpha / sqrt(real length * d), for the same draws."""
    x = torch.randn(2, 6, 16)
    torch.manual_seed(1)
    found = neftune(x, 5.0, MASK)
    torch.manual_seed(1)
    u = 2 * torch.rand_like(x) - 1
    scale = 5.0 / (MASK.sum(1) * 16).sqrt()
    torch.testing.assert_close(found, x + u * MASK[..., None] * scale[:, None, None])
    assert torch.equal(found[MASK == 0], x[MASK == 0])


def test_a_sample_without_real_tokens_gets_no_noise() -> None:
    x = torch.randn(2, 6, 16)
    assert torch.equal(neftune(x, 5.0, torch.zeros(2, 6)), x)


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
