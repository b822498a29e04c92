"""Gradient edits change only the gradient of the hooked tensor, and leave the forward pass unchanged."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from hookdrop import ClampActivationGrad, ClipActivationGrad, NoiseActivationGrad, ScaleActivationGrad, inject
from hookdrop.functional import scale_activation_grad
from tests.support.models import toy

G = torch.tensor([[3.0, 4.0, 0.0], [0.3, -0.4, 0.0], [0.0, 0.0, 0.0]])
"""A gradient whose samples have norms 5, .5 and 0."""

SAMPLE_NORMS = G.norm(dim=1, keepdim=True)
CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "norm": (ClipActivationGrad(max_norm=1.0), G / G.norm()),
    "norm below the limit": (ClipActivationGrad(max_norm=6.0), G),
    "norm per sample": (ClipActivationGrad(max_norm=1.0, per_sample=True), G / SAMPLE_NORMS.clamp(min=1.0)),
    "value": (ClipActivationGrad(max_value=0.35), G.clamp(-0.35, 0.35)),
    "clamp": (ClampActivationGrad(-0.1, 3.5), G.clamp(-0.1, 3.5)),
    "clamp from below": (ClampActivationGrad(min=0), G.clamp(min=0)),
    "clamp from above": (ClampActivationGrad(max=1), G.clamp(max=1)),
    "halved": (ScaleActivationGrad(0.5), G * 0.5),
    "stopped": (ScaleActivationGrad(0), G * 0),
    "reversed": (ScaleActivationGrad(-1), -G),
}


def doubling(act: nn.Module | None = None) -> nn.Module:
    """`act(inner(2 * x))`. The gradient of x is twice that of the hooked tensor."""
    return toy(lambda m, x: m.act(m.inner(x * 2.0)), inner=nn.Identity(), act=act or nn.Identity())


def gradient(call: Callable[[Tensor], Tensor], g: Tensor = G) -> Tensor:
    """The gradient of the input if `g` is the gradient of the output."""
    x = (torch.rand(g.shape, dtype=torch.float64) + 0.5).to(g.dtype).requires_grad_()
    call(x).backward(g)
    assert x.grad is not None
    return x.grad


NON_FINITE = torch.tensor([math.inf, -math.inf, math.nan, 1.0])

ALL = pytest.mark.parametrize(("regularizer", "expected"), CASES.values(), ids=CASES)
EDITS = [case[0] for case in CASES.values()] + [NoiseActivationGrad(0.5)]
EVERY = pytest.mark.parametrize("regularizer", EDITS, ids=repr)


class TestEdits:
    @ALL
    def test_gradient_matches_the_formula(self, regularizer: nn.Module, expected: Tensor) -> None:
        torch.testing.assert_close(gradient(regularizer), expected)

    @EVERY
    def test_returns_the_input_itself_if_no_gradient_is_needed(self, regularizer: nn.Module) -> None:
        x = torch.randn(5, 4)
        assert regularizer(x) is x
        x.requires_grad_()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert regularizer(x) is x

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_noise_has_the_given_std_and_zero_mean(self, dtype: torch.dtype) -> None:
        """Within 4 standard errors over a million elements, plus rounding in low precision."""
        noise = (gradient(NoiseActivationGrad(0.5), torch.ones(1000, 1000, dtype=dtype)).double() - 1) / 0.5
        assert abs(noise.mean()) < 4 / 1000
        assert noise.std().item() == pytest.approx(1, abs=4 / math.sqrt(2e6) if dtype == torch.float32 else 0.01)
        inside = (noise.abs() <= 1).double().mean()
        assert abs(inside - 0.6827) < 0.005  # the probability within one standard deviation

    def test_noise_is_drawn_in_each_backward_from_the_global_rng(self) -> None:
        x = torch.ones(100, requires_grad=True)
        torch.manual_seed(1)
        y = NoiseActivationGrad(0.5)(x)
        torch.manual_seed(2)
        expected = 1 + torch.randn(100) * 0.5
        torch.manual_seed(2)
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(first, expected)
        assert not torch.equal(first, second)

    @pytest.mark.parametrize("per_sample", [True, False])
    @pytest.mark.parametrize("shape", [(6,), (6, 3, 4, 5)])
    def test_norm_is_clipped_to_the_limit(self, shape: tuple[int, ...], per_sample: bool) -> None:
        g = torch.randn(shape) * torch.logspace(-3, 3, 6).view(-1, *[1] * (len(shape) - 1))
        found = gradient(ClipActivationGrad(max_norm=0.5, per_sample=per_sample), g)
        flat, before = (t.reshape(6 if per_sample else 1, -1) for t in (found, g))
        norms = before.norm(dim=1, keepdim=True)
        torch.testing.assert_close(flat, before * (0.5 / norms).clamp(max=1.0))
        small = norms[:, 0] <= 0.5
        assert torch.equal(flat[small], before[small])  # bitwise

    @pytest.mark.parametrize("per_sample", [True, False])
    @pytest.mark.parametrize(
        ("size", "dtype"),
        [(1000.0, torch.float16), (3e30, torch.float32), (3e38, torch.float32), (1e-30, torch.float32)],
        ids=str,
    )
    def test_norms_that_overflow(self, size: float, dtype: torch.dtype, per_sample: bool) -> None:
        """The squares overflow or underflow; at 3e38 the norm itself overflows."""
        g = (torch.randn(4, 10_000).clamp(-1, 1) * size).to(dtype)
        limit = size / 100 if size < 1 else 1.0
        found = gradient(ClipActivationGrad(max_norm=limit, per_sample=per_sample), g).double()
        true = g.double()
        expected = limit * true / true.norm(dim=(1,) if per_sample else (0, 1), keepdim=True)
        rtol, atol = (2e-3, 1e-7) if dtype == torch.float16 else (1e-5, 0.0)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)

    @pytest.mark.parametrize("factor", [0.0, -0.0], ids=repr)
    def test_factor_0_zeros_non_finite_gradients(self, factor: float) -> None:
        assert torch.equal(gradient(ScaleActivationGrad(factor), NON_FINITE), torch.zeros(4))
        assert gradient(ScaleActivationGrad(-1), NON_FINITE).isfinite().tolist() == [False, False, False, True]
        scaled = lambda x, g: (ScaleActivationGrad(factor)(x * 2) * g).sum()
        assert torch.equal(vmap(grad(scaled))(torch.ones(1, 4), NON_FINITE[None]), torch.zeros(1, 4))

    def test_overflow_is_visible_to_a_grad_scaler(self) -> None:
        for value in (math.inf, math.nan):
            g = torch.tensor([1.0, value, 1.0])
            assert not gradient(ClipActivationGrad(max_norm=1.0), g).isfinite().all()
            finite = gradient(ClipActivationGrad(max_value=2.0), g).isfinite().all()
            assert finite == (value == math.inf)  # as documented


class TestOtherPaths:
    @pytest.mark.parametrize("at", ["output", "input"])
    def test_identity_branch_leaves_the_skip_gradient_unedited(self, at: str) -> None:
        """The skip connection carries the same tensor."""
        branch = nn.Sequential(nn.Identity())
        inject(branch, ScaleActivationGrad(0), layers="0", at=at)
        assert torch.equal(gradient(lambda x: x + branch(x)), G)

    @ALL
    @pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.Hardswish], ids=lambda cls: cls.__name__)
    def test_an_inplace_layer_may_follow(self, act: type[nn.Module], regularizer: nn.Module, expected: Tensor) -> None:
        """An autograd function that returns a view of its input would fail (pytorch#61519)."""

        def plain(x: Tensor) -> Tensor:
            return act()(scale_activation_grad(x * 2.0, 1.0))

        model = doubling(act(inplace=True))
        inject(model, regularizer, layers="inner")
        torch.manual_seed(3)
        x = (torch.rand(3, 3) + 0.5).requires_grad_()
        (before,) = torch.autograd.grad(plain(x), x, G)
        (found,) = torch.autograd.grad(model(x), x, G)
        at_site = before / 2  # the gradient at the site, which is edited and then doubled
        mid = at_site.clone().requires_grad_()
        (edited,) = torch.autograd.grad(regularizer(mid), mid, at_site)
        torch.testing.assert_close(found, edited * 2)


class TestScaleActivationGradFactor:
    def test_linear_schedule_ramps_the_factor_to_minus_one(self) -> None:
        model = doubling()
        drop = inject(model, ScaleActivationGrad(-1), layers="inner", schedule="LinearSchedule(steps=4)")
        for step, factor in enumerate([0.0, -0.25, -0.5, -0.75, -1.0, -1.0]):
            drop.seek(step)
            assert drop.p == drop.sites[0].p == factor
            assert drop.metrics()["hookdrop/scaleactivationgrad/factor"] == factor
            torch.testing.assert_close(gradient(model), 2 * factor * G)
        assert drop.keep_prob is None

    def test_factor_1_returns_the_layers_output_itself(self) -> None:
        model = doubling()
        drop = inject(model, ScaleActivationGrad(0), layers="inner")
        x = torch.ones(3, requires_grad=True)
        assert model.inner(x) is not x
        with drop.disabled():
            assert drop.p == drop.sites[0].p == drop.metrics()["hookdrop/scaleactivationgrad/factor"] == 1.0
            assert model.inner(x) is x
        drop.target_p = 1
        assert model.inner(x) is x
        assert "nothing was dropped: its rate is 1 at step 0" in str(drop.probe(torch.randn(4, 4)))

    def test_target_p_is_the_factor_with_the_largest_magnitude(self) -> None:
        model = nn.Sequential(nn.Identity(), nn.Identity())
        drop = inject(model, {"0": ScaleActivationGrad(-1), "1": ScaleActivationGrad(-0.25)})
        assert drop.target_p == -1
        drop.target_p = 2
        assert [site.p for site in drop.sites] == [2.0, 0.5]


@pytest.mark.parametrize(("regularizer", "rate"), [(ScaleActivationGrad(-1.0), -1.0), (ClipActivationGrad(1.0), None)])
def test_probe_says_that_forwards_are_unchanged(regularizer: nn.Module, rate: Any) -> None:
    model = doubling()
    result = (drop := inject(model, regularizer, layers="inner")).probe(torch.randn(4, 4))
    assert result.rows()[0] == ("inner", "-" if rate is None else "-1.000", "-", "1.000", 3)
    assert (result.dropped, result.eval_identical) == (0.0, True)
    assert "edits gradients in the backward pass, and changes no forward" in str(result)
    assert (drop.p, drop.keep_prob, drop.target_p) == (rate, None, rate)
    assert len(drop.metrics()) == (2 if rate is None else 3)


@pytest.mark.parametrize("cls", [ScaleActivationGrad, NoiseActivationGrad])
def test_backward_uses_the_rate_of_the_forward(cls: type[nn.Module]) -> None:
    """`loss = model(x); drop.step(); loss.backward()`."""
    model = doubling()
    drop = inject(model, cls(1e3), layers="inner", schedule="LinearSchedule(steps=4)")
    drop.seek(1)
    x = torch.ones(1000, requires_grad=True)
    y = model(x)
    drop.seek(4)
    y.sum().backward()
    size = x.grad.mean() if cls is ScaleActivationGrad else x.grad.std()
    assert size.item() == pytest.approx(500, rel=0.1)


# Warnings of PyTorch itself: the compiler of 2.13 and older instantiates autograd functions; the other is of 2.6.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.*should not be instantiated:DeprecationWarning", "ignore:Skipping serialization:UserWarning"
)


@ALL
@pytest.mark.parametrize("outside", [True, False], ids=["grad of vmap", "vmap of grad"])
def test_vmap_edits_the_gradient_of_each_slice(outside: bool, regularizer: nn.Module, expected: Tensor) -> None:
    """Norms are per slice. A tensor hook would not be called for a slice."""
    stack = torch.stack([G, 10 * G, G.flip(0)])
    slices = torch.stack([gradient(regularizer, g) for g in stack])

    def loss(x: Tensor, g: Tensor) -> Tensor:
        return (regularizer(x * 2.0) * g).sum()

    x = torch.ones(3, 3, 3)
    found = grad(lambda x: vmap(loss)(x, stack).sum())(x) if outside else vmap(grad(loss))(x, stack)
    torch.testing.assert_close(found, 2 * slices)


def test_vmap_randomness_controls_the_noise() -> None:
    each = grad(lambda x: NoiseActivationGrad(0.5)(x * 1.0).sum())
    different, same = (vmap(each, randomness=how)(torch.ones(4, 50)) for how in ("different", "same"))
    assert len({tuple(row.tolist()) for row in different}) == 4
    assert len({tuple(row.tolist()) for row in same}) == 1


@EVERY
def test_forward_mode_derivative_is_the_identity(regularizer: nn.Module) -> None:
    """Forward mode has no backward pass to edit."""
    y, tangent = jvp(lambda x: regularizer(x * 2.0), (torch.ones(3, 3),), (G,))
    assert torch.equal(y, torch.full((3, 3), 2.0))
    assert torch.equal(tangent, 2 * G)


@pytest.mark.parametrize("regularizer", [case for case in EDITS if not isinstance(case, NoiseActivationGrad)], ids=repr)
def test_second_derivatives_are_finite(regularizer: nn.Module) -> None:
    """Also for a gradient of 0, and through `torch.func`."""
    x = torch.tensor([[0.0, 1.0], [2.0, -3.0]], requires_grad=True)
    (first,) = torch.autograd.grad(regularizer(x * x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    hessians = [outer(jacrev(lambda x: regularizer(x.sin()).sum()))(torch.ones(3)) for outer in (jacrev, jacfwd)]
    assert all(found.isfinite().all() for found in (x.grad, *hessians))


def test_double_backward_through_a_scaled_gradient() -> None:
    """For y = s(x^2) with factor f, the gradient of y^2 is 4 f x^3. The second backward is edited again."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = ScaleActivationGrad(0.5)(x * x)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    torch.testing.assert_close(first, 0.5 * 4 * x**3)
    # first = f * 2 y * 2 x, where y = s(x^2): its derivative is f (4 x * f 2 x + 4 y)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 0.5 * (8 * 0.5 * x**2 + 4 * x**2))
