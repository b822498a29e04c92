"""All regularizers as layers: rates, statistics, settings and invalid arguments."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    AlphaDropout,
    Cutout,
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    FeatureAlphaDropout,
    GaussianDropout,
    GaussianNoise,
    LayerDrop,
    Regularizer,
    ShapeError,
    TokenDropout,
    parse,
)
from hookdrop.regularizers import REGULARIZERS, at_rate, rate_of, rows_alone
from hookdrop.regularizers.base import P
from tests.support.regularizers import FORWARD, OWN, Case
from tests.support.tensors import all_equal


@pytest.mark.parametrize("case", OWN.values(), ids=OWN)
class TestEveryRegularizer:
    def test_regularizes_only_in_training_mode(self, case: Case) -> None:
        regularizer, x = case.regularizer, case.input().requires_grad_()
        assert not any(case(x) is x for _ in range(20))
        regularizer.eval()
        assert case(x) is x
        regularizer.train()

    def test_the_neutral_rate_returns_the_input_itself(self, case: Case) -> None:
        regularizer, x = case.regularizer, case.input().requires_grad_()
        declared = type(regularizer).rate
        if declared is None:
            return
        neutral = at_rate(regularizer, declared.neutral)
        assert neutral(x) is x
        assert case.skips_layers or neutral.regularize(x, declared.neutral) is x

    def test_does_not_modify_the_input(self, case: Case) -> None:
        x = case.input()
        before = x.clone()
        case(x)
        assert torch.equal(x, before)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_keeps_dtype_and_shape(self, case: Case, dtype: torch.dtype) -> None:
        x = case.input(dtype)
        assert case(x).dtype == dtype
        assert case(x).shape == x.shape

    def test_gradient_reaches_the_input(self, case: Case) -> None:
        x = case.input().requires_grad_()
        case(x).sum().backward()
        assert x.grad is not None

    def test_global_seed_determines_the_result(self, case: Case) -> None:
        x = case.input().requires_grad_()

        def drawn() -> list[torch.Tensor]:
            torch.manual_seed(5)
            y = case(x)
            return [y, torch.autograd.grad(y.square().sum(), x)[0]]

        assert all_equal(drawn(), drawn())

    def test_parse_reads_its_repr(self, case: Case) -> None:
        again = parse(repr(case.regularizer))
        assert repr(again) == repr(case.regularizer)
        assert type(again) is type(case.regularizer)
        names = inspect.signature(type(again)).parameters.keys() - {"keep_prob"}
        assert [getattr(again, name) for name in names] == [getattr(case.regularizer, name) for name in names]


OWN_FORWARD = {name: case for name, case in FORWARD.items() if name in OWN}


@pytest.mark.parametrize("case", OWN_FORWARD.values(), ids=OWN_FORWARD)
class TestForwardRegularizers:
    def test_changes_the_input(self, case: Case) -> None:
        x = case.input()
        assert not all(torch.equal(case(x), x) for _ in range(20))

    def test_p_1_gives_zero_gradients(self, case: Case) -> None:
        regularizer, x = case.regularizer, case.input().requires_grad_()
        declared = type(regularizer).rate
        if declared != P or isinstance(regularizer, TokenDropout):
            return  # these never drop everything
        y = at_rate(regularizer, 1.0)(x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
        assert y.isfinite().all()

    def test_mean_is_kept(self, case: Case) -> None:
        """Over 2,000 draws of input and mask, within 5 standard errors."""
        unscaled = not getattr(case.regularizer, "scale", True)
        if unscaled or isinstance(case.regularizer, AlphaDropout | FeatureAlphaDropout | Cutout | LayerDrop):
            return  # AlphaDropout keeps mean 0 and variance 1 (tested below); the others do not rescale
        ratios = []
        for _ in range(2000):
            x = case.input().abs() + 1
            ratios.append((case(x).mean() / x.mean()).item())
        ratio = torch.tensor(ratios)
        assert abs(ratio.mean() - 1) < 5 * ratio.std() / math.sqrt(2000) + 1e-6


UNITS = {
    Dropout: ((100, 10_000), None),
    Dropout1d: ((1000, 1000, 2), (2,)),
    Dropout2d: ((1000, 1000, 1, 2), (2, 3)),
    Dropout3d: ((1000, 1000, 1, 1, 2), (2, 3, 4)),
    DropPath: ((1_000_000, 2), (1,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.003, 0.1, 0.5])
@pytest.mark.parametrize("cls", UNITS, ids=lambda cls: cls.__name__)
def test_zeroed_fraction_is_p(cls: type[Regularizer], p: float, dtype: torch.dtype) -> None:
    """Within 4 standard errors over a million independent draws of whole units."""
    shape, inside = UNITS[cls]
    zero = cls(p)(torch.ones(shape, dtype=dtype)) == 0
    units = zero if inside is None else zero.all(inside)
    assert abs(units.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / 1e6)
    assert inside is None or torch.equal(zero.any(inside), units)


def test_bfloat16_keeps_the_mean_unlike_torch() -> None:
    """1 / (1 - .003) rounds to 1 in bfloat16, so torch loses 0.3% of the mean."""
    x = (1 + torch.rand(1_000_000)).bfloat16()
    ours, theirs = (y.double().mean() / x.double().mean() for y in (Dropout(0.003)(x), nn.functional.dropout(x, 0.003)))
    assert theirs == pytest.approx(0.997, abs=5e-4)
    assert ours == pytest.approx(1, abs=1e-3)


def test_drop_path_batch_mode_drops_all_or_nothing() -> None:
    drops = [(DropPath(0.5, mode="batch")(torch.ones(8, 3)) == 0).float().mean().item() for _ in range(200)]
    assert set(drops) == {0.0, 1.0}
    assert 60 < sum(drops) < 140


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(1_000_000)
    y = AlphaDropout(0.2)(x)
    assert y.mean().abs() < 0.01
    assert y.var() == pytest.approx(1, abs=0.01)


def test_gaussian_dropout_has_the_variance_of_dropout() -> None:
    y = GaussianDropout(0.2)(torch.ones(1_000_000))
    assert y.var() == pytest.approx(0.2 / 0.8, rel=0.01)


def test_gaussian_noise_has_the_given_std() -> None:
    y = GaussianNoise(0.7)(torch.full((1_000_000,), 3.0))
    assert y.std() == pytest.approx(0.7, rel=0.01)


@pytest.mark.parametrize(
    ("regularizer", "shape", "instead"),
    [
        (Dropout2d(0.1), (8, 197, 384), "Dropout1d"),
        (Dropout1d(0.1), (8, 6, 5, 5), "Dropout2d"),
        (Dropout3d(0.1), (8, 6, 5, 5), "Dropout2d"),
        (FeatureAlphaDropout(0.1), (8,), "Dropout"),
    ],
    ids=lambda value: repr(value),
)
def test_channel_dropout_of_another_rank_raises(regularizer: Regularizer, shape: tuple[int, ...], instead: str) -> None:
    with pytest.raises(ShapeError, match=rf"{instead}\(p=...\)"):
        regularizer(torch.ones(shape))


def test_drop_path_of_a_0d_tensor_raises() -> None:
    with pytest.raises(ShapeError, match=r"needs \(N, ...\)"):
        DropPath(0.1)(torch.tensor(1.0))


ZEROING = [cls for cls in REGULARIZERS.values() if "keep_prob" in inspect.signature(cls).parameters]


@pytest.mark.parametrize("cls", ZEROING, ids=lambda cls: cls.__name__)
class TestInvalidRates:
    @pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), float("inf")])
    def test_out_of_range(self, cls: type[Regularizer], p: float) -> None:
        with pytest.raises(ValueError, match=rf"{cls.__name__}: p must"):
            cls(p)

    @pytest.mark.parametrize("p", ["0.1", True, [0.1], None.__class__])
    def test_not_a_number(self, cls: type[Regularizer], p: object) -> None:
        with pytest.raises(TypeError, match=rf"{cls.__name__}: p must be"):
            cls(p)

    def test_a_percentage_gets_a_hint(self, cls: type[Regularizer]) -> None:
        with pytest.raises(ValueError, match=r"a percentage\? write p=0.1"):
            cls(10)

    def test_p_with_keep_prob_raises(self, cls: type[Regularizer]) -> None:
        with pytest.raises(ValueError, match="pass p or keep_prob, not both"):
            cls(p=0.1, keep_prob=0.9)

    def test_keep_prob_sets_p(self, cls: type[Regularizer]) -> None:
        assert cls(keep_prob=0.9).p == 0.1


@pytest.mark.parametrize("cls", [Dropout, Dropout2d, DropPath, GaussianDropout], ids=lambda cls: cls.__name__)
def test_missing_rate_error_shows_an_example(cls: type[Regularizer]) -> None:
    with pytest.raises(TypeError, match=rf"how much to drop: {cls.__name__}\(p=0.1\)"):
        cls()


def test_gaussian_dropout_excludes_1() -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\), got 1"):
        GaussianDropout(1.0)


def test_noise_std_is_unbounded_above_and_not_negative() -> None:
    assert GaussianNoise(12.5).std == 12.5
    with pytest.raises(ValueError, match=r"std must lie in \[0, 3.4"):
        GaussianNoise(-1)


@pytest.mark.parametrize("number", [torch.tensor(0.25), torch.tensor([0.25]), 1 / 4, __import__("numpy").float32(0.25)])
def test_tensor_and_numpy_scalars_are_valid_rates(number: object) -> None:
    assert Dropout(number).p == 0.25


def test_a_tensor_of_two_elements_is_not_a_rate() -> None:
    with pytest.raises(TypeError, match="must be"):
        Dropout(torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize(
    "settings", [{"normalize": "mean"}, {"gamma": "approx"}, {"per_channel": "yes"}, {"normalize": True}]
)
def test_invalid_choice_lists_the_valid_ones(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be one of"):
        DropBlock(0.1, 7, **settings)


def test_invalid_drop_path_mode_raises() -> None:
    with pytest.raises(ValueError, match="'row', 'batch', 'subset', got 'col'"):
        DropPath(0.1, "col")


def test_dropout2d_of_3d_input_suggests_token_and_sequence_dropout() -> None:
    with pytest.raises(
        ShapeError, match=r"for tokens \(N, L, C\) use TokenDropout\(p=...\), for a sequence \(N, C, L\)"
    ):
        Dropout2d(0.1)(torch.ones(8, 197, 384))


@pytest.mark.parametrize(("sizes", "same"), [((7,), "Dropout1d"), ((7, 7), "Dropout2d"), ((3, 7, 7), "Dropout3d")])
def test_a_block_over_the_whole_map_warns(sizes: tuple[int, ...], same: str) -> None:
    (warning,) = DropBlock(0.1, 7, channel_dim=1).shape_warnings((2, 4, *sizes))
    assert f"blocks of {'x'.join(map(str, sizes))} there, which is {same}." in warning
    (warning,) = DropBlock(0.1, 7, channel_dim=1, per_channel=False).shape_warnings((2, 4, *sizes))
    assert "which is DropPath." in warning


INDEPENDENT = {
    name: case
    for name, case in FORWARD.items()
    if isinstance(case.regularizer, Regularizer) and rows_alone(case.regularizer) == 1
}


def shared_variance(regularizer: Any, shape: tuple[int, ...]) -> float:
    """The variance of the mean of 8 equal rows, times 8 / the variance of a row: 1 if rows are independent."""
    torch.manual_seed(0)
    row, weights = torch.randn(1, *shape[1:]), torch.randn(1, *shape[1:])
    rows = row.expand(8, *shape[1:]).contiguous()
    values = torch.stack(
        [(regularizer.regularize(rows, rate_of(regularizer)) * weights).flatten(1).sum(1) for _ in range(400)]
    )
    return float(values.mean(1).var() * 8 / values.var())


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_of_regularizers_with_independent_samples_are_independent(name: str) -> None:
    case = INDEPENDENT[name]
    assert shared_variance(case.regularizer, case.shape) == pytest.approx(1.0, abs=5 * (2 / 400) ** 0.5)


def test_regularizers_without_independent_samples() -> None:
    """They draw once for the batch, mix its samples, or scale by what is kept of the whole batch."""
    own = {name: case.regularizer for name, case in FORWARD.items() if isinstance(case.regularizer, Regularizer)}
    assert {"DropPath (batch)", "MixStyle", "DropBlock (sparse)"} <= own.keys() - INDEPENDENT.keys()
    assert shared_variance(own["DropPath (batch)"], (4, 6, 8)) > 6
