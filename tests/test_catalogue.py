"""What is drawn, against the formula of each paper: UniformNoise, Cutout, TokenDropout, LockedDropout, MixStyle."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookdrop
from hookdrop import (
    Cutout,
    HookdropWarning,
    LinearSchedule,
    LockedDropout,
    MixStyle,
    Regularizer,
    ShapeError,
    TokenDropout,
    UniformNoise,
    inject,
    parse,
    plan,
)
from hookdrop.regularizers import REGULARIZERS
from hookdrop.regularizers.mixstyle import symmetric_beta


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def within(found: Tensor, expected: float, spread: float, draws: float) -> bool:
    """Whether a mean over so many draws of such a spread is within 4 standard errors."""
    return abs(found.double().item() - expected) <= 4 * spread / math.sqrt(draws) + 1e-12


class TestUniformNoise:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("beta", [0.05, 0.3, 1.0])
    def test_is_uniform_between_its_bounds(self, beta: float, dtype: torch.dtype) -> None:
        """Mean, variance and every tenth of the range, over a million draws; low precision rounds by 2**-8 at most."""
        r = (UniformNoise(beta)(torch.ones(1_000_000, dtype=dtype)).double() - 1) / beta
        rounding = torch.finfo(dtype).eps / beta
        assert r.abs().max() <= 1 + rounding
        assert abs(r.mean()) <= 4 / math.sqrt(3e6) + rounding / 4
        assert r.var().item() == pytest.approx(1 / 3, rel=0.01, abs=2 * rounding**2)
        if dtype == torch.float32:
            tenths = torch.histc(r, 10, -1, 1) / 1e6
            assert (tenths - 0.1).abs().max() < 4 * math.sqrt(0.09 / 1e6)

    def test_elements_are_independent(self) -> None:
        """Of neighbours in every axis, within 4 standard errors."""
        r = UniformNoise(0.5)(torch.ones(100, 100, 100)).double() - 1
        for axis in range(3):
            left, right = r.narrow(axis, 0, 99), r.narrow(axis, 1, 99)
            assert abs((left * right).mean() / r.var()) < 4 / math.sqrt(left.numel())

    def test_the_variance_before_a_batch_norm_hardly_grows(self) -> None:
        """The paper's point: by beta^2 / 3 of the mean square."""
        x = torch.randn(1_000_000)
        assert UniformNoise(0.3)(x).var() / x.var() == pytest.approx(1 + 0.3**2 / 3, abs=0.005)

    def test_the_gradient_is_what_x_was_multiplied_by(self) -> None:
        x = torch.randn(50, dtype=torch.float64, requires_grad=True)
        y = UniformNoise(0.3)(x)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0] * x, y)


def expected_fraction(size: int, length: int) -> float:
    """Of one axis, place by place: how much a window lies within, its centre on each place in turn."""
    lengths = [min(centre - size // 2 + size, length) - max(centre - size // 2, 0) for centre in range(length)]
    return sum(lengths) / length**2


class TestCutout:
    @pytest.mark.parametrize(("size", "length"), list(itertools.product([1, 2, 3, 6, 7], [7, 8])))
    def test_the_formula_in_the_docstring(self, size: int, length: int) -> None:
        assert (size * length - size**2 // 4) / length**2 == pytest.approx(expected_fraction(size, length))

    @pytest.mark.parametrize("p", [1.0, 0.3])
    @pytest.mark.parametrize("size", [1, 4, 5, 12, (3, 6)])
    def test_the_expected_fraction_is_zeroed(self, size: int | tuple[int, int], p: float) -> None:
        height, width = (size, size) if isinstance(size, int) else size
        fraction = (Cutout(size, p)(torch.ones(40_000, 1, 8, 10)) == 0).double().mean((1, 2, 3))
        expected = p * expected_fraction(height, 8) * expected_fraction(width, 10)
        assert within(fraction.mean(), expected, fraction.std().item(), 40_000)

    def test_it_is_one_whole_square_in_all_channels_and_nothing_is_scaled(self) -> None:
        y = Cutout(3)(torch.full((500, 4, 9, 9), 2.0))
        assert set(y.unique().tolist()) == {0.0, 2.0}
        assert torch.equal(y, y[:, :1].expand_as(y))
        rows, columns = ((y[:, 0] == 0).any(axis) for axis in (2, 1))
        assert torch.equal(y[:, 0] == 0, rows[:, :, None] & columns[:, None, :])
        for hit in (rows, columns):
            runs = ["".join("01"[cut] for cut in one).strip("0") for one in hit.tolist()]
            assert set(runs) == {"11", "111"}  # at the border one row of three is lost

    def test_every_pixel_is_a_centre_alike(self) -> None:
        """Of size 1 the zeroed pixel is the centre: each of 30 within 5 standard errors."""
        hit = (Cutout(1)(torch.ones(60_000, 1, 5, 6)) == 0)[:, 0].double()
        assert (hit.sum((1, 2)) == 1).all()
        assert (hit.mean(0) - 1 / 30).abs().max() < 5 * math.sqrt(1 / 30 / 60_000)

    def test_samples_are_cut_in_different_places(self) -> None:
        places = {tuple((one == 0).flatten().tolist()) for one in Cutout(2)(torch.ones(200, 1, 8, 8))}
        assert len(places) > 50

    def test_p_is_how_many_samples_are_cut(self) -> None:
        cut = (Cutout(2, p=0.2)(torch.ones(40_000, 1, 4, 4)) == 0).any(3).any(2).any(1).double()
        assert within(cut.mean(), 0.2, 0.4, 40_000)

    def test_a_schedule_drives_it(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, Cutout(2), layers="0", schedule=LinearSchedule(4))
        drop.seek(1)
        cut = (model(torch.ones(40_000, 1, 4, 4)) == 0).any(3).any(2).any(1).double()
        assert within(cut.mean(), 0.25, math.sqrt(0.25 * 0.75), 40_000)

    @pytest.mark.parametrize("size", [0, -1, 2.5, "3", (3,), (1, 2, 3), (2, 0), None])
    def test_sizes_that_are_none(self, size: object) -> None:
        with pytest.raises((ValueError, TypeError), match="Cutout: size must"):
            Cutout(size)

    @pytest.mark.parametrize(
        ("shape", "instead"),
        [((8, 197, 384), "TokenDropout"), ((8, 4, 5, 6, 7), "Dropout3d"), ((8, 10), r"Dropout\(p")],
    )
    def test_other_shapes_are_told_what_to_use(self, shape: tuple[int, ...], instead: str) -> None:
        with pytest.raises(ShapeError, match=rf"Cutout cuts squares of \(N, C, H, W\).\n  .*use .*{instead}"):
            Cutout(3).check(shape)

    def test_doubts(self) -> None:
        assert "looks like NHWC" in Cutout(3).doubts((2, 7, 7, 96))[0]
        for size, length in ((13, 7), (12, 7), (14, 8), (15, 8)):
            covers = bool((Cutout(size)(torch.ones(500, 1, length, length)) == 0).all())
            doubts = Cutout(size).doubts((2, 96, length, length))
            assert covers == (size >= 2 * length - 1) == bool(doubts)
            assert (
                not covers or f"size={size} covers the whole {length}x{length} map wherever its center is" in doubts[0]
            )


class TestTokenDropout:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(("p", "prefix"), [(0.003, 1), (0.3, 0), (0.5, 4)])
    def test_whole_tokens_at_rate_p_and_the_rest_scaled(self, p: float, prefix: int, dtype: torch.dtype) -> None:
        """Within 4 standard errors over a million tokens."""
        y = TokenDropout(p, prefix=prefix)(torch.ones(1000, 1000 + prefix, 2, dtype=dtype))
        assert torch.equal(y[:, :prefix], torch.ones(1000, prefix, 2, dtype=dtype))
        zero = y[:, prefix:] == 0
        assert torch.equal(zero.all(2), zero.any(2))
        assert within(zero.double().mean(), p, math.sqrt(p * (1 - p)), 1e6)
        rest = y[:, prefix:][~zero].unique()
        assert torch.equal(rest, torch.tensor([1 / (1 - p)]).to(dtype))

    def test_low_precision_rounds_the_product_alone(self) -> None:
        """1 / (1 - .003) is 1 in bfloat16: multiplied by that, the mean would be off by .3 %."""
        x = 1 + torch.rand(500, 200, 4).bfloat16()
        y = TokenDropout(0.003, prefix=1)(x)
        kept = y != 0
        kept[:, 0] = False
        assert torch.equal(y[kept], (x.float() * (1 / (1 - 0.003))).bfloat16()[kept])

    def test_all_are_dropped_but_the_prefix(self) -> None:
        x = torch.randn(3, 5, 4, requires_grad=True)
        y = TokenDropout(1.0, prefix=2)(x)
        assert torch.equal(y[:, :2], x[:, :2])
        assert not y[:, 2:].any()
        y.sum().backward()
        assert torch.equal(x.grad, torch.tensor([1.0, 1, 0, 0, 0])[None, :, None].expand_as(x))

    @pytest.mark.parametrize(
        ("shape", "instead"),
        [((8, 64, 14, 14), r"Dropout2d\(p=...\), for its regions DropBlock"), ((8, 10), r"Dropout\(p"),
         ((8, 1, 10), r"prefix=1 spares all tokens there are, L=1.\n  a smaller prefix, such as prefix=0"),
         ((8, 4, 2, 5, 5), "Dropout3d")],
    )  # fmt: skip
    def test_other_shapes_are_told_what_to_use(self, shape: tuple[int, ...], instead: str) -> None:
        model = nn.Sequential(nn.Identity())
        with pytest.raises(ShapeError, match=instead):
            inject(model, TokenDropout(0.1), layers="0", example_input=torch.ones(shape))
        assert not model[0]._forward_hooks

    @pytest.mark.parametrize("prefix", [-1, 1.0, None, "1", True])
    def test_prefixes_that_are_none(self, prefix: object) -> None:
        with pytest.raises((TypeError, ValueError), match="TokenDropout: prefix must"):
            TokenDropout(0.1, prefix)

    def test_a_vision_transformers_class_token_stays(self) -> None:
        timm = pytest.importorskip("timm")
        settings = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
        model = timm.create_model("vit_tiny_patch16_224", **settings).train()
        seen = plan(model, TokenDropout(0.5), layers="norm_pre", example_input=torch.ones(2, 3, 32, 32)).sites
        assert seen[0].reading == "L=17 (1 spared) C=32"
        inject(model, TokenDropout(1.0), layers="norm_pre")
        kept: list[Tensor] = []
        model.norm_pre.register_forward_hook(lambda module, args, output: kept.append(output))
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        assert kept[0][:, 0].any()
        assert not kept[0][:, 1:].any()
        assert model.cls_token.grad.any()
        assert not model.patch_embed.proj.weight.grad.any()


class TestLockedDropout:
    @pytest.mark.parametrize("time_dim", [0, 1, 2, -2])
    def test_one_mask_over_time(self, time_dim: int) -> None:
        """Within 4 standard errors over 250,000 draws."""
        shape = [500, 500, 500]
        shape[time_dim] = 3
        y = LockedDropout(0.3, time_dim)(torch.ones(shape))
        assert torch.equal(y, y.narrow(time_dim, 0, 1).expand_as(y))
        assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
        assert within((y == 0).double().mean(), 0.3, math.sqrt(0.21), 250_000)

    def test_samples_and_features_have_masks_of_their_own(self) -> None:
        dropped = (LockedDropout(0.5)(torch.ones(400, 2, 400))[:, 0] == 0).double() - 0.5
        for axis in (0, 1):
            left, right = dropped.narrow(axis, 0, 399), dropped.narrow(axis, 1, 399)
            assert abs((left * right).mean()) < 4 * 0.25 / math.sqrt(left.numel())

    def test_the_same_as_dropout_of_a_sequence_of_one_step(self) -> None:
        """The mask is that of Dropout1d on (N, C, 1), moved: the layers differ in what they call time."""
        x = torch.randn(64, 5, 32)
        torch.manual_seed(1)
        expected = nn.functional.dropout1d(x.transpose(1, 2), 0.4).transpose(1, 2)
        torch.manual_seed(1)
        torch.testing.assert_close(LockedDropout(0.4)(x), expected)

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_an_lstms_output_is_locked_and_its_state_left_alone(self, batch_first: bool) -> None:
        model = nn.ModuleDict({"lstm": nn.LSTM(4, 6, batch_first=batch_first)})
        x = torch.randn(3, 3, 4)
        (site,) = plan(
            model["lstm"], LockedDropout(0.5), layers=model["lstm"], example_input=torch.randn(2, 7, 4)
        ).sites
        assert site.reading == "T=7 (1 of 3 tensors)"
        clean, (state, _) = model["lstm"](x)
        inject(model, LockedDropout(0.5, 1 if batch_first else 0), layers="lstm")
        locked, (still, _) = model["lstm"](x)
        factor = locked / clean
        steps = factor.unbind(1 if batch_first else 0)
        assert all(torch.allclose(step, steps[0]) for step in steps)
        assert set(factor.round(decimals=3).unique().tolist()) == {0.0, 2.0}
        assert torch.equal(state, still)

    @pytest.mark.parametrize(
        ("time_dim", "shape", "says"),
        [(1, (8, 10), "pad_packed_sequence"), (3, (2, 3, 4), "time_dim=3 is not one of its axes 0 to 2"),
         (-4, (2, 3, 4), "time_dim=-4 is not one")],
    )  # fmt: skip
    def test_where_there_is_no_time_it_is_told(self, time_dim: int, shape: tuple[int, ...], says: str) -> None:
        with pytest.raises(ShapeError, match=says):
            LockedDropout(0.1, time_dim)(torch.ones(shape))

    def test_a_packed_sequence_is_told(self) -> None:
        model = nn.ModuleDict({"lstm": nn.LSTM(4, 6, batch_first=True)})
        inject(model, LockedDropout(0.5), layers="lstm")
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 4), torch.tensor([5, 3]), batch_first=True)
        with pytest.raises(ShapeError, match=r"got \(8, 6\)(.|\n)*pad_packed_sequence first"):
            model["lstm"](packed)


def papers_mix_style(x: Tensor, mixed: bool, lmda: Tensor, perm: Tensor, eps: float = 1e-6) -> Tensor:
    """The code of the paper's repository, given what it draws."""
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


def styled(n: int = 6, channels: int = 3, size: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Samples of styles that differ."""
    return (
        torch.randn(n, channels, size, size) * (1 + torch.rand(n, channels, 1, 1)) + torch.arange(n).view(-1, 1, 1, 1)
    ).to(dtype)


class TestMixStyle:
    @pytest.mark.parametrize("seed", range(8))
    def test_is_the_papers_code_under_the_same_draws(self, seed: int) -> None:
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

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_in_low_precision_only_the_result_is_rounded(self, dtype: torch.dtype) -> None:
        """Of statistics in float16, a variance of 1e-6 would be lost, and a mean off by a part in 2,000."""
        x = styled(dtype=dtype)
        torch.manual_seed(3)
        found = MixStyle(1.0)(x)
        torch.manual_seed(3)
        torch.testing.assert_close(found, MixStyle(1.0)(x.float()).to(dtype), rtol=0, atol=0)

    def test_a_batch_is_mixed_with_probability_p_and_whole(self) -> None:
        x = styled()
        changed = torch.tensor([(MixStyle(0.3, alpha=5.0)(x) != x).flatten(1).any(1).sum() for _ in range(3000)])
        assert within((changed > 0).double().mean(), 0.3 * (1 - 1 / math.factorial(6)), math.sqrt(0.21), 3000)
        assert (changed >= 4).sum() > 0.7 * (changed > 0).sum()  # one of six is its own partner, on average

    @pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5, 1.0, 3.0])
    def test_lambda_has_its_beta_distribution(self, alpha: float) -> None:
        """Kolmogorov-Smirnov at a thousandth over 200,000 draws, but for what a number cannot tell from 0 or 1."""
        stats = pytest.importorskip("scipy.stats")
        drawn = symmetric_beta(alpha, (200_000, 1), torch.device("cpu")).flatten()
        assert ((drawn >= 0) & (drawn <= 1)).all()
        at = torch.linspace(1e-6, 1 - 1e-6, 999, dtype=torch.float64)
        found = torch.searchsorted(drawn.sort()[0], at) / 200_000
        assert (found - torch.from_numpy(stats.beta(alpha, alpha).cdf(at.numpy()))).abs().max() < 1.95 / math.sqrt(2e5)
        assert within(drawn.mean(), 0.5, 1 / math.sqrt(4 * (2 * alpha + 1)), 200_000)
        assert drawn.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.02)

    def test_the_style_of_the_output_lies_between_two_samples(self) -> None:
        x = styled(4, 2, 30)
        y = MixStyle(1.0, alpha=1.0)(x)
        means, mixed = x.mean((2, 3)), y.mean((2, 3))
        for i in range(4):
            candidates = [(mixed[i] - means[j]) / (means[i] - means[j]) for j in range(4) if j != i]
            own = torch.allclose(mixed[i], means[i], atol=1e-4)
            assert own or any(abs(c[0] - c[1]) < 1e-3 and 0 <= c[0] <= 1 for c in candidates)

    def test_content_stays(self) -> None:
        """What is left after a map's own mean and deviation are taken out is what was there."""
        x = styled(dtype=torch.float64)

        def normed(x: Tensor) -> Tensor:
            return (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)

        torch.testing.assert_close(normed(MixStyle(1.0)(x)), normed(x), rtol=1e-4, atol=1e-4)

    def test_what_is_not_mixed_is_bit_for_bit_the_input(self) -> None:
        x = styled() * 1e4 + 0.1
        outputs = [MixStyle(0.2)(x) for _ in range(50)]
        assert sum(torch.equal(y, x) for y in outputs) > 25

    def test_a_batch_of_one_is_told_of(self) -> None:
        model, x = nn.Sequential(nn.Identity()), styled(1)
        inject(model, MixStyle(1.0), layers="0")
        with pytest.warns(HookdropWarning, match="a batch of one has no other sample"):
            y = model(x)
        torch.testing.assert_close(y, x)

    @pytest.mark.parametrize(
        ("shape", "says"),
        [
            ((8, 4, 1, 1), "one pixel has no standard deviation"),
            ((8, 197, 384), "TokenDropout"),
            ((8, 4), r"Dropout\(p"),
        ],
    )
    def test_shapes_without_a_style(self, shape: tuple[int, ...], says: str) -> None:
        with pytest.raises(ShapeError, match=says):
            MixStyle()(torch.ones(shape))

    @pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "a", None])
    def test_bad_alphas(self, alpha: object) -> None:
        with pytest.raises((ValueError, TypeError), match="MixStyle: alpha must be"):
            MixStyle(0.5, alpha)

    def test_maps_without_any_spread_stay_finite(self) -> None:
        x = torch.full((4, 2, 3, 3), 7.0, requires_grad=True)
        y = MixStyle(1.0)(x)
        y.sum().backward()
        torch.testing.assert_close(y, x)
        assert x.grad.isfinite().all()

    def test_it_draws_nothing_but_from_the_global_generators(self) -> None:
        """Of which Python's own is none: the paper's code asks that."""
        import random

        x, state = styled(), random.getstate()
        torch.manual_seed(4)
        first = MixStyle(0.9)(x)
        torch.manual_seed(4)
        assert torch.equal(MixStyle(0.9)(x), first)
        assert random.getstate() == state

    @pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # PyTorch 2.6's own
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_compiled_it_follows_its_schedule(self, backend: str, fresh_compiler: None) -> None:
        """One graph above rate 0; batches mixed within 4 standard errors, and those that are not, bit for bit."""
        model = nn.Sequential(nn.Identity())
        drop = inject(model, MixStyle(1.0, alpha=5.0), layers="0", schedule=LinearSchedule(10))
        fast, x = torch.compile(model, backend=backend, fullgraph=True), styled()
        for step in (3, 7):
            drop.seek(step)
            mixed = sum(not torch.equal(fast(x), x) for _ in range(400))
            assert abs(mixed / 400 - step / 10) < 4 * math.sqrt(0.21 / 400)
        drop.seek(10)
        x.requires_grad_()
        y = fast(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert not torch.equal(y, x)
        assert len(grad.flatten(2).unique(dim=2).shape) == 3
        torch.testing.assert_close(grad, grad[:, :, :1, :1].expand_as(grad))  # one factor a channel
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def resnet() -> tuple[nn.Module, Tensor]:
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18(num_classes=5), torch.randn(4, 3, 32, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    timm = pytest.importorskip("timm")
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **settings), torch.randn(4, 3, 32, 32)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def recurrent() -> tuple[nn.Module, Tensor]:
    return Tagger(), torch.randn(4, 7, 6)


Make = Callable[[], tuple[nn.Module, Tensor]]
GRADS = ["ClipActivationGrad(max_norm=0.01)", "ClipActivationGrad(max_norm=0.01, per_sample=True)",
         "ClampActivationGrad(max=0.0)", "ScaleActivationGrad(-1.0)", "NoiseActivationGrad(0.1)"]  # fmt: skip
USES: list[tuple[str, Make, str]] = [
    *((text, resnet, "layer2") for text in ("UniformNoise(0.3)", "Cutout(2)", "MixStyle(1.0)", *GRADS)),
    *((text, transformer, "blocks.0") for text in ("UniformNoise(0.3)", "TokenDropout(0.5)", "LockedDropout(0.5)", *GRADS)),
    *((text, recurrent, "lstm") for text in ("UniformNoise(0.3)", "TokenDropout(0.5, prefix=0)", "LockedDropout(0.5)", *GRADS)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "make", "layer"), USES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_injected_trained_copied_pickled_and_removed(text: str, make: Make, layer: str) -> None:
    """Training differs from that of the clean model, a copy's is the same, and what is left is the model as it was."""
    model, x = make()
    state = copy.deepcopy(model.state_dict())

    def trained(model: nn.Module) -> list[Tensor]:
        model.load_state_dict(state)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(7)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(map(torch.equal, a, b))

    clean = trained(model)
    regularizer = parse(text)
    schedule = None if regularizer.rate is None else LinearSchedule(2)
    drop = inject(model, text, layers=layer, schedule=schedule, example_input=x)
    drop.seek(2)
    regularized = trained(model)
    assert not same(regularized, clean)
    assert all(p.isfinite().all() for p in regularized)
    assert same(trained(copy.deepcopy(model)), regularized)
    assert same(trained(pickle.loads(pickle.dumps(model))), regularized)
    with drop.disabled():
        assert same(trained(model), clean)
    assert drop.probe(x).eval_identical
    config = drop.config
    drop.remove()
    assert same(trained(model), clean)
    from hookdrop import from_config

    from_config(model, config).seek(2)
    assert same(trained(model), regularized)


@pytest.mark.parametrize("name", REGULARIZERS)
def test_every_regularizer_is_written_as_parse_reads_it(name: str) -> None:
    cls: type[Regularizer] = REGULARIZERS[name]
    made = cls(3) if name == "Cutout" else cls(0.25)
    assert parse(repr(made)).settings() == made.settings()
    assert type(parse(repr(made))) is cls


NEW = """
from torch import Tensor

from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.validation import rate


def shrink(x: Tensor, amount: float, training: bool = True) -> Tensor:
    return x * (1.0 - rate(amount, "amount", "shrink")) if training else x


class Shrink(Regularizer):
    rate_name = "amount"

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = self.valid_rate(amount)

    def regularize_at(self, x, rate):
        return x * (1.0 - rate)
"""
USED = """
import torch, hookdrop, every
from hookdrop import *
from hookdrop import functional

assert "Shrink" in hookdrop.__all__ and "shrink" in functional.__all__
assert repr(hookdrop.parse("Shrink(amount=0.25)")) == "Shrink(amount=0.25)"
assert functional.shrink(torch.ones(1), 0.25).item() == 0.75
assert isinstance(every.EVERY["Shrink"].regularizer, Shrink)
model = torch.nn.Sequential(torch.nn.Identity())
with hookdrop.inject(model, "Shrink(amount=0.5)", layers="0", schedule=LinearSchedule(2)) as drop:
    drop.step()
    assert model(torch.ones(1)).item() == 0.75
    config = drop.config
hookdrop.from_config(model, config)
assert model(torch.ones(1)).item() == 1.0
assert torch.compile(Shrink(0.5), backend="eager", fullgraph=True)(torch.ones(1)).item() == 0.5
"""


def test_a_new_regularizer_is_one_module_one_row_of_the_table_and_one_exported_function(tmp_path: Path) -> None:
    """Nothing else names it: not `hookdrop.__all__`, `parse`, a config, or the tables of these tests."""
    package = Path(shutil.copytree(Path(hookdrop.__file__).parent, tmp_path / "hookdrop"))
    (package / "regularizers" / "shrink.py").write_text(NEW)
    for file, row in (("regularizers/catalog.py", "Shrink"), ("functional.py", "shrink")):
        text = (package / file).read_text()
        imported = f'from hookdrop.regularizers.shrink import {row}\n__all__ = [\n    "{row}",'
        (package / file).write_text(text.replace("__all__ = [", imported, 1))
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    run = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", USED],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
