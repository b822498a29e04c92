"""All regularizers as layers: rates, statistics, settings and invalid arguments."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from hookdrop import (
    AlphaDropout,
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    FeatureAlphaDropout,
    GaussianDropout,
    GaussianNoise,
    Regularizer,
    ShapeError,
)
from hookdrop.regularizers import REGULARIZERS, rows_alone
from tests.support.regularizers import FORWARD, OWN

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


def test_regularizers_without_independent_samples() -> None:
    """They draw once for the batch, mix its samples, or scale by what is kept of the whole batch."""
    dependent = {name for name, case in FORWARD.items() if name in OWN and not rows_alone(case.regularizer)}
    assert {"DropPath (batch)", "MixStyle", "DropBlock (sparse)"} <= dependent
