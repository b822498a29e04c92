"""Noise, styles and dropped tokens against the formulas of their papers; tests/integration compares NEFTune with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hookdrop import (
    DSU,
    HookdropWarning,
    LockedDropout,
    MixStyle,
    NEFTune,
    Regularizer,
    ShakeDrop,
    TokenDropout,
    UniformNoise,
    inject,
    plan,
)
from hookdrop.functional import neftune
from hookdrop.regularizers.styles import symmetric_beta
from tests.support.tensors import HALF, styled, within


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


class TestTokenDropout:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(("p", "prefix"), [(0.003, 1), (0.3, 0), (0.5, 4)])
    def test_drops_whole_tokens_at_rate_p_and_scales_the_rest(self, p: float, prefix: int, dtype: torch.dtype) -> None:
        """Within 4 standard errors over a million tokens."""
        y = TokenDropout(p, prefix=prefix)(torch.ones(1000, 1000 + prefix, 2, dtype=dtype))
        assert torch.equal(y[:, :prefix], torch.ones(1000, prefix, 2, dtype=dtype))
        zero = y[:, prefix:] == 0
        assert torch.equal(zero.all(2), zero.any(2))
        assert within(zero.double().mean(), p, math.sqrt(p * (1 - p)), 1e6)
        rest = y[:, prefix:][~zero].unique()
        assert torch.equal(rest, torch.tensor([1 / (1 - p)]).to(dtype))

    def test_p_1_drops_all_but_the_prefix(self) -> None:
        x = torch.randn(3, 5, 4, requires_grad=True)
        y = TokenDropout(1.0, prefix=2)(x)
        assert torch.equal(y[:, :2], x[:, :2])
        assert not y[:, 2:].any()
        y.sum().backward()
        assert torch.equal(x.grad, torch.tensor([1.0, 1, 0, 0, 0])[None, :, None].expand_as(x))


class TestRemovingTokens:
    def test_later_layers_see_fewer_tokens_at_the_rate_of_the_schedule(self) -> None:
        model, x = nn.Sequential(nn.Identity(), nn.Linear(4, 4)), torch.randn(2, 41, 4)
        drop = inject(model, TokenDropout(0.5, remove=True), layers="0", schedule="LinearSchedule(steps=2)")
        lengths = []
        for _ in range(3):
            lengths.append(model(x).shape[1])
            drop.step()
        assert lengths == [41, 31, 21]
        measured = drop.probe(x)  # removed elements are dropped
        assert (measured.dropped, measured.eval_identical) == (20 / 41, True)
        assert measured.mean_ratio == pytest.approx(1.0, abs=0.15)
        shown = plan(nn.Sequential(nn.Identity()), TokenDropout(0.5, remove=True), layers="0", example_input=x)
        assert shown.sites[0].reading == "L=41 (prefix 1, keeps 21) C=4"


class TestLockedDropout:
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_lstm_output_is_masked_and_its_state_is_not(self, batch_first: bool) -> None:
        lstm, time = nn.LSTM(4, 6, batch_first=batch_first), 1 if batch_first else 0
        x = torch.randn(3, 3, 4)
        assert plan(lstm, LockedDropout(0.5), layers=lstm, example_input=x).sites[0].reading == "T=3 (1 of 3 tensors)"
        clean, (state, _) = lstm(x)
        inject(lstm, LockedDropout(0.5, time), layers=lstm)
        locked, (still, _) = lstm(x)
        steps = (locked / clean).unbind(time)
        assert all(torch.allclose(step, steps[0]) for step in steps)
        assert set(steps[0].round(decimals=3).unique().tolist()) == {0.0, 2.0}
        assert torch.equal(state, still)


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
