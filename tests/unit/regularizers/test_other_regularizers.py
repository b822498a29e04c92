"""Noise, styles, dropped tokens and Masksembles against the formulas and codes of their papers."""

import copy
import math
import pickle
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookdrop
from hookdrop import DSU, LockedDropout, Masksembles, MixStyle, Regularizer, ShakeDrop, TokenDropout, inject, plan
from hookdrop.functional import masksembles, neftune
from hookdrop.kernels.fixed_masks import draw_masks, fixed_masks, ones_per_mask
from hookdrop.regularizers.styles import symmetric_beta
from tests.support.tensors import HALF, all_equal, styled, within
from tests.support.training import seeded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.05, 0.3, 1.0])
def test_uniform_noise_is_uniform_within_plus_minus_beta(beta: float, dtype: torch.dtype) -> None:
    """Mean, variance and deciles over a million draws. Low precision rounds by at most 2**-8."""
    r = (hookdrop.UniformNoise(beta)(torch.ones(1_000_000, dtype=dtype)).double() - 1) / beta
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
    noise = hookdrop.NEFTune(7)(torch.zeros(100, 1000, 10, dtype=dtype)).double()
    assert bound * 0.99 < noise.abs().amax() < bound * 1.01
    if dtype == torch.float32:
        assert within(noise.mean(), 0.0, bound / math.sqrt(3), 1e6)
        assert within(noise.square().mean() / bound**2, 1 / 3, math.sqrt(4 / 45), 1e6)


def test_attention_mask_spares_padding_and_scales_by_real_length() -> None:
    """As in the authors' code: U(-1, 1) * mask * alpha / sqrt(real length * d), for the same draws."""
    x = torch.randn(2, 6, 16)
    found, u = seeded(neftune, x, 5.0, MASK), 2 * seeded(torch.rand_like, x) - 1
    scale = 5.0 / (MASK.sum(1) * 16).sqrt()
    torch.testing.assert_close(found, x + u * MASK[..., None] * scale[:, None, None])
    assert torch.equal(found[MASK == 0], x[MASK == 0])
    assert torch.equal(neftune(x, 5.0, torch.zeros(2, 6)), x), "a sample without real tokens gets no noise"


RANGES = [((-1.0, 1.0), (0.0, 1.0)), ((0.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (-0.5, 2.0)), ((0.5, 1.5), (1.0, 1.0))]
"""Ranges of alpha and beta: the paper's two best, and others."""


class TestShakeDrop:
    @pytest.mark.parametrize(("alpha", "beta"), RANGES)
    @pytest.mark.parametrize("seed", range(3))
    def test_matches_the_papers_formula_with_the_same_draws(self, seed: int, alpha: Any, beta: Any) -> None:
        """(b + alpha - b alpha) x forward, (b + beta - b beta) backward, divided by E[b + alpha - b alpha]."""
        p, x = 0.4, torch.randn(16, 3, 2, 2, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(seed)
        b, a, c = (torch.rand(16, 1, 1, 1) for _ in range(3))
        b = (b >= p).double()
        a, c = (low + (high - low) * u.double() for u, (low, high) in ((a, alpha), (c, beta)))
        mean = 1 - p + p * (alpha[0] + alpha[1]) / 2
        y = seeded(ShakeDrop(p, alpha, beta), x, seed=seed)
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
        assert torch.equal(y[:, prefix:][~zero].unique(), torch.tensor([1 / (1 - p)]).to(dtype))

    def test_p_1_drops_all_but_the_prefix(self) -> None:
        x = torch.randn(3, 5, 4, requires_grad=True)
        y = TokenDropout(1.0, prefix=2)(x)
        assert torch.equal(y[:, :2], x[:, :2])
        assert not y[:, 2:].any()
        y.sum().backward()
        assert torch.equal(x.grad, torch.tensor([1.0, 1, 0, 0, 0])[None, :, None].expand_as(x))

    def test_later_layers_see_fewer_tokens_if_they_are_removed_at_the_rate_of_the_schedule(self) -> None:
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
        kept = TokenDropout(0.8, prefix=0, remove=True)(torch.ones(1, 10, 1))
        assert kept.shape[1] == 2, "10 (1 - 0.8) is not rounded to 1"


class TestLockedDropout:
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_lstm_output_is_masked_and_its_state_is_not(self, batch_first: bool) -> None:
        lstm, time = nn.LSTM(4, 6, batch_first=batch_first), 1 if batch_first else 0
        x = torch.randn(3, 3, 4)
        (site,) = plan(lstm, LockedDropout(0.5, time), layers=lstm, example_input=x).sites
        assert site.reading == "T=3 (1 of 3 tensors)"
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


class TestStyles:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize(
        ("regularizer", "paper"),
        [(MixStyle(0.5, alpha=0.3), mixed_with_the_same_draws), (DSU(0.5), changed_with_the_same_draws)],
    )
    def test_matches_the_paper_with_the_same_draws(self, regularizer: Regularizer, paper: Any, seed: int) -> None:
        """Output and gradient; unchanged with probability 1/2."""
        x, weight, results = styled(dtype=torch.float64).requires_grad_(), torch.randn(6, 3, 5, 5), []
        for function in (regularizer, paper):
            y = seeded(function, x, seed=seed)
            results.append([y, *torch.autograd.grad((y * weight).sum(), x)])
        torch.testing.assert_close(*results)

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

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("regularizer", [MixStyle(1.0), DSU(1.0), ShakeDrop(0.5)], ids=repr)
    def test_low_precision_rounds_only_the_result(self, regularizer: Regularizer, dtype: torch.dtype) -> None:
        """Statistics in float16 would lose a variance of 1e-6, and have a relative error of 1/2,000 in the mean."""
        x = styled(dtype=dtype)
        assert torch.equal(seeded(regularizer, x), seeded(regularizer, x.float()).to(dtype))

    @STYLES
    def test_unchanged_batches_are_bitwise_unchanged(self, cls: type[Regularizer]) -> None:
        x = (styled() * 1e4 + 0.1).requires_grad_()
        same = [y for y in (cls(0.2)(x) for _ in range(50)) if torch.equal(y, x)]
        assert len(same) > 25
        assert all(torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x)) for y in same)

    @STYLES
    def test_a_batch_of_one_warns(self, cls: type[Regularizer]) -> None:
        model, x = nn.Sequential(nn.Identity()), styled(1)
        inject(model, cls(1.0), layers="0")
        with pytest.warns(hookdrop.HookdropWarning, match="a batch of one sample has a single style"):
            torch.testing.assert_close(model(x), x)

    @STYLES
    def test_constant_maps_stay_finite(self, cls: type[Regularizer]) -> None:
        x = torch.full((4, 2, 3, 3), 7.0, requires_grad=True)
        y = cls(1.0)(x)
        torch.testing.assert_close(y, x, atol=0.01, rtol=0)
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def papers_layer(x: Tensor, masks: Tensor) -> Tensor:
    """The batch is split into one part for each mask, and the channels (axis 1) of a part are multiplied by its mask."""
    parts = torch.split(x, len(x) // len(masks))
    return torch.cat([part * mask.view(1, -1, *[1] * (x.dim() - 2)) for part, mask in zip(parts, masks, strict=True)])


@pytest.mark.parametrize(
    ("shape", "channel_dim"),
    [((8, 16), None), ((8, 16, 5, 5), None), ((8, 16, 2, 3, 4), None), ((8, 7, 16), -1), ((8, 16, 7), 1), ((8, 5, 5, 16), 3)],
)  # fmt: skip
@pytest.mark.parametrize("n", [2, 4, 8])
def test_matches_the_papers_layer(n: int, shape: tuple[int, ...], channel_dim: int | None) -> None:
    """Up to the factor C / (ones per mask), which keeps the mean. Also the gradient."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    masks = fixed_masks(16, n, 2.0, "5 ", device=x.device)
    factor = 16 / ones_per_mask(16, n, 2.0)
    expected = factor * papers_layer(x.movedim(channel_dim or 1, 1), masks).movedim(1, channel_dim or 1)
    found = Masksembles(n, seed=5, channel_dim=channel_dim)(x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found, masksembles(x, n, seed=5, channel_dim=channel_dim))
    weight = torch.randn_like(x)
    torch.testing.assert_close(*[torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)])


def test_masks_depend_on_the_name_of_the_layer_only() -> None:
    def masks(model: nn.Module) -> list[Tensor]:
        return [layer(torch.ones(4, 16)) != 0 for layer in model.children()]

    model = nn.Sequential(nn.Identity(), nn.Identity())
    drop = inject(model, Masksembles(seed=2), layers="*")
    before = masks(model)
    assert not torch.equal(*before)
    assert all_equal(masks(copy.deepcopy(model)), before)
    assert all_equal(masks(pickle.loads(pickle.dumps(model))), before)
    spec = drop.spec
    drop.remove()
    with inject(model, Masksembles(seed=2), layers=["1"]):
        assert torch.equal(masks(model)[1], before[1])
    drop = inject(model, spec)
    assert all_equal(masks(model), before)
    assert drop.probe(torch.ones(4, 16)).dropped == pytest.approx(1 - ones_per_mask(16, 4, 2.0) / 16)


CPU = torch.device("cpu")
SETTINGS = [(2, 1.5), (4, 1.0), (4, 1.7), (4, 2.0), (4, 6.0), (8, 1.5), (30, 2.0), (30, 6.0)]


def papers_masks(channels: int, count: int, scale: float) -> Tensor:
    """The algorithm of the paper: random masks with m ones among m * scale positions, without the unused ones.

    As in the authors' code, the number of positions is varied, and masks are drawn again, until `channels` are left.
    """
    ones = int(channels / (scale * (1 - (1 - 1 / scale) ** count)))
    while True:
        positions = int(ones * random.uniform(0.8 * scale, 1.2 * scale))
        if positions < ones:
            continue
        masks = torch.zeros(count, positions, dtype=torch.bool)
        for mask in masks:
            mask[torch.randperm(positions)[:ones]] = True
        masks = masks[:, masks.any(0)]
        if masks.shape[1] == channels:
            return masks


def overlaps(masks: Tensor) -> tuple[int, ...]:
    """The number of channels that each pair of masks shares, sorted."""
    shared = masks.int() @ masks.int().T
    return tuple(sorted(shared[i, j].item() for i in range(len(masks)) for j in range(i)))


class TestMasksOfMasksembles:
    @pytest.mark.parametrize("channels", [10, 11, 16, 23, 64, 257])
    @pytest.mark.parametrize(("count", "scale"), SETTINGS)
    def test_masks_have_the_papers_ones_and_cover_all_channels(self, channels: int, count: int, scale: float) -> None:
        masks = fixed_masks(channels, count, scale, "0", device=CPU)
        assert masks.shape == (count, channels)
        ones = ones_per_mask(channels, count, scale)
        assert masks.sum(1).tolist() == [ones] * count
        assert masks.any(0).all()
        papers = int(channels / (scale * (1 - (1 - 1 / scale) ** count)))
        assert ones == papers or (papers * count < channels <= ones * count)
        assert scale > 1.0 or masks.all()

    @pytest.mark.parametrize("scale", [1.3, 2.0, 3.0, 6.0])
    def test_two_masks_share_1_in_scale_of_their_channels(self, scale: float) -> None:
        """The fraction that the paper's positions have on average, within 3 % for 2,000 channels."""
        ones = ones_per_mask(2000, 4, scale)
        found = overlaps(fixed_masks(2000, 4, scale, "0", device=CPU))
        assert sum(found) / len(found) / ones == pytest.approx(1 / scale, rel=0.03)

    @pytest.mark.parametrize(("channels", "count", "scale"), [(12, 3, 2.0), (10, 4, 1.5), (14, 2, 3.0)])
    def test_overlaps_follow_the_papers_algorithm(self, channels: int, count: int, scale: float) -> None:
        """A chi-squared test of 2,000 sets of masks each at 0.001, and of the channels in each mask."""
        stats = pytest.importorskip("scipy.stats")
        draws = 2000
        random.seed(1)
        torch.manual_seed(1)
        theirs = [papers_masks(channels, count, scale) for _ in range(draws)]
        ours = [torch.tensor(draw_masks(channels, count, scale, str(seed))) for seed in range(draws)]
        counts = [Counter(map(overlaps, masks)) for masks in (ours, theirs)]
        common = [key for key in {*counts[0], *counts[1]} if counts[0][key] + counts[1][key] >= 10]
        if len(common) > 1:
            assert stats.chi2_contingency([[c[key] for key in common] for c in counts]).pvalue > 0.001
        assert sum(c[key] for c in counts for key in common) > 0.95 * 2 * draws
        # Each channel is equally likely in each mask.
        used = torch.stack(ours).double().mean(0)
        expected = ones_per_mask(channels, count, scale) / channels
        assert (used - expected).abs().max() < 5 * (expected * (1 - expected) / draws) ** 0.5

    def test_masks_depend_on_each_setting_and_on_no_global_generator(self) -> None:
        states = random.getstate(), torch.get_rng_state()
        first = draw_masks(16, 4, 2.0, "7")
        assert random.getstate() == states[0]
        assert torch.equal(torch.get_rng_state(), states[1])
        random.seed(3)
        torch.manual_seed(3)
        assert draw_masks(16, 4, 2.0, "7") == first
        settings = [(16, 4, 2.0, "0"), (16, 4, 2.0, "1"), (16, 4, 2.1, "0"), (17, 4, 2.0, "0"), (16, 5, 2.0, "0")]
        assert len({str([row[:16] for row in draw_masks(*each)[:4]]) for each in settings}) == len(settings)

    @pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.device("meta")])
    def test_masks_made_in_a_context_work_outside_and_may_be_modified(self, context: object) -> None:
        seed = f"in {context}"
        with context():
            fixed_masks(16, 4, 2.0, seed, device=CPU)
        x = torch.ones(4, 16, requires_grad=True)
        (x * (masks := fixed_masks(16, 4, 2.0, seed, device=CPU))).sum().backward()
        assert x.grad.sum() == 4 * ones_per_mask(16, 4, 2.0)
        before = masks.clone()
        masks.zero_()
        assert torch.equal(fixed_masks(16, 4, 2.0, seed, device=CPU), before)
