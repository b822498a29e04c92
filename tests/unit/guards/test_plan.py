"""What a plan and the first forward warn about and refuse."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hookdrop import (
    DropBlock,
    Dropout,
    Dropout2d,
    DropPath,
    FeatureAlphaDropout,
    GaussianNoise,
    LinearSchedule,
    Masksembles,
    Regularizer,
    ShapeError,
    inject,
    plan,
)
from tests.support.models import Small, toy
from tests.support.training import train


@pytest.mark.parametrize("regularizer", [DropBlock(0.95, 3), DropPath(0.8)])
def test_rates_that_look_like_keep_prob_warn(regularizer: Regularizer) -> None:
    (warning,) = plan(nn.Sequential(nn.Identity()), regularizer, layers="0").warnings
    assert f"did you mean keep_prob={regularizer.p:g}?" in warning


@pytest.mark.parametrize("regularizer", [DropPath(0.79), DropPath(0.96), Dropout(0.9), DropPath(keep_prob=0.9)])
def test_other_rates_do_not_warn(regularizer: Regularizer) -> None:
    assert plan(nn.Sequential(nn.Identity()), regularizer, layers="0").warnings == []


def skips() -> nn.Module:
    """Drops whole samples, in training mode."""
    return toy(lambda m, x: x * (torch.rand(len(x), 1) > m.chance) if m.training else x, chance=0.1)


@pytest.mark.parametrize("drops", [nn.Dropout(0.1), skips(), DropPath(0.1)])
@pytest.mark.parametrize("place", ["0", "1", "2"], ids=["layer", "gain", "itself"])
def test_layers_that_already_drop_warn(drops: nn.Module, place: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), toy(lambda m, x: x * torch.ones(4)), drops, nn.Linear(4, 4))
    (warning,) = plan(model, Dropout(0.1), layers=place, example_input=torch.ones(2, 4)).warnings
    assert f"Dropout at '{place}': '2' already drops there" in warning
    assert not plan(model, Dropout(0.1), layers="3", example_input=torch.ones(2, 4)).warnings


@pytest.mark.parametrize("drops", [nn.Dropout(0.0), nn.Identity(), nn.ReLU(), nn.Sequential()])
def test_layers_that_drop_nothing_do_not_warn(drops: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), drops)
    assert not plan(model, Dropout(0.1), layers="*", example_input=torch.ones(2, 4)).warnings


def test_drop_path_on_whole_blocks_warns(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, DropPath(0.1), layers="layer1.*", example_input=images)
    (warning,) = [text for text in drafted.warnings if "whole residual block" in text]
    assert warning.startswith("DropPath at 'layer1.0': the output includes the input")
    assert warning.endswith("such as attn, mlp or bn3. (and 1 more site like it)")


def nhwc() -> nn.Module:
    forward = lambda m, x: m.stage2(m.stage1(x)[:, ::2, ::2])  # noqa: E731
    return toy(forward, stage1=nn.Linear(24, 24), stage2=nn.Linear(24, 24))


X = torch.randn(2, 14, 14, 24)


class TestShapes:
    def test_first_forward_checks_shapes_even_at_rate_0(self) -> None:
        model, tokens = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 196, 8)
        inject(model, DropBlock(0.1, 7), layers="1", schedule=LinearSchedule(100))
        model.eval()(tokens)
        with pytest.raises(ShapeError, match="DropBlock at '1' got"):
            model.train()(tokens)

    @pytest.mark.parametrize("regularizer", [DropBlock(0.1, 3), Dropout2d(0.1)], ids=repr)
    def test_plan_warns_about_nhwc_maps(self, regularizer: nn.Module) -> None:
        drafted = plan(nhwc(), regularizer, layers="*", example_input=X)
        assert [site.reading for site in drafted.sites] == ["C=14 H=14 W=24", "C=7 H=7 W=24"]
        (warning,) = drafted.warnings
        assert "'stage1': reads (2, 14, 14, 24) as C=14 H=14 W=24; that looks like NHWC: " in warning
        assert warning.endswith("(and 1 more site like it)")

    def test_nhwc_maps_warn_once(self) -> None:
        """At the first forward, or before it in the plan."""
        for settings in ({}, {"example_input": X}):
            model = nhwc()
            with warnings.catch_warnings(record=True, action="always") as caught:
                inject(model, DropBlock(0.1, 3), layers="*", **settings)
                train(model, X, 3)
            assert ["looks like NHWC" in str(one.message) for one in caught] == [True]

    def test_channel_dim_silences_the_nhwc_warning(self) -> None:
        drafted = plan(nhwc(), DropBlock(0.1, 3, channel_dim=-1), layers="*", example_input=X)
        assert [site.reading for site in drafted.sites] == ["C=24 H=14 W=14", "C=24 H=7 W=7"]
        assert drafted.warnings == []

    def test_plan_checks_every_call_of_a_layer(self) -> None:
        """The first of two maps that a head is called with is too small."""
        pyramid = toy(lambda m, x: m.head(x[:, :, ::4, ::4]).sum() + m.head(x).sum(), head=nn.Identity())
        drafted = plan(pyramid, DropBlock(0.1, 3), layers="head", example_input=torch.ones(1, 2, 12, 12))
        assert (drafted.sites[0].calls, drafted.sites[0].shape) == (2, (1, 2, 12, 12))
        assert "covers the whole 3x3 map" in drafted.warnings[0]


def packed(model: nn.Module) -> object:
    return model(nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)]))


@pytest.mark.parametrize("regularizer", [DropPath(0.5), FeatureAlphaDropout(0.5), Masksembles(2, 1.5)])
def test_a_packed_sequence_is_refused_by_what_treats_rows_as_samples(regularizer: nn.Module) -> None:
    model = nn.Sequential(nn.LSTM(3, 16))
    inject(model, regularizer, layers="0")
    with pytest.raises(ShapeError):
        packed(model)


@pytest.mark.parametrize("regularizer", [Dropout(0.5), DropPath(0.5, mode="batch"), GaussianNoise(0.1)])
def test_a_packed_sequence_is_regularized_by_what_ignores_samples(regularizer: nn.Module) -> None:
    model = nn.Sequential(nn.LSTM(3, 4))
    drop = inject(model, regularizer, layers="0")
    packed(model)
    assert drop.sites[0].called


def test_a_strided_nested_tensor_is_refused_with_the_layout_that_works() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    inject(model, Dropout(0.5), layers="0")
    parts = [torch.randn(5, 3), torch.randn(2, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of PyTorch, about this layout
        strided = torch.nested.nested_tensor(parts)
        with pytest.raises(ShapeError):
            model(strided)
    assert model(torch.nested.nested_tensor(parts, layout=torch.jagged)).is_nested
