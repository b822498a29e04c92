"""Shape checks in a plan and at the first forward."""

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
    HookdropWarning,
    LinearSchedule,
    Masksembles,
    ShapeError,
    inject,
    plan,
)
from tests.support.models import Small
from tests.support.training import train


class Tokens(nn.Module):
    """Processes tokens (N, 196, 8), as a ViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class NHWC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage1, self.stage2 = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage2(self.stage1(x)[:, ::2, ::2])


class TestShapes:
    def test_first_forward_checks_shapes_even_at_rate_0(self) -> None:
        model = Tokens()
        inject(model, DropBlock(0.1, 7), layers="blocks.1", schedule=LinearSchedule(100))
        model.eval()(torch.randn(2, 196, 8))
        with pytest.raises(ShapeError, match=r"DropBlock at 'blocks.1' got \(2, 196, 8\): tokens have no map"):
            model.train()(torch.randn(2, 196, 8))

    @pytest.mark.parametrize("regularizer", [DropBlock(0.1, 3), Dropout2d(0.1)], ids=repr)
    def test_plan_warns_about_nhwc_maps(self, regularizer: nn.Module) -> None:
        x = torch.randn(2, 14, 14, 24)
        drafted = plan(NHWC(), regularizer, layers="*", example_input=x)
        assert [site.reading for site in drafted.sites] == ["C=14 H=14 W=24", "C=7 H=7 W=24"]
        (warning,) = drafted.warnings
        assert "'stage1': reads (2, 14, 14, 24) as C=14 H=14 W=24; that looks like NHWC: " in warning
        assert warning.endswith("(and 1 more site like it)")

    def test_first_forward_warns_once_about_nhwc_maps(self) -> None:
        model = NHWC()
        inject(model, DropBlock(0.1, 3), layers="*")
        with pytest.warns(HookdropWarning) as caught:
            train(model, torch.randn(2, 14, 14, 24), 3)
        (warning,) = caught
        assert "DropBlock at 'stage1': reads (2, 14, 14, 24) as C=14 H=14 W=24; that looks like NHWC" in str(
            warning.message
        )
        assert "channel_dim=-1" in str(warning.message)

    def test_first_forward_does_not_repeat_warnings_of_the_plan(self) -> None:
        model, x = NHWC(), torch.randn(2, 14, 14, 24)
        with pytest.warns(HookdropWarning, match="looks like NHWC"):
            inject(model, DropBlock(0.1, 3), layers="*", example_input=x)
        model(x)

    def test_channel_dim_silences_the_nhwc_warning(self) -> None:
        drafted = plan(NHWC(), DropBlock(0.1, 3, channel_dim=-1), layers="*", example_input=torch.randn(2, 14, 14, 24))
        assert [site.reading for site in drafted.sites] == ["C=24 H=14 W=14", "C=24 H=7 W=7"]
        assert drafted.warnings == []

    def test_plan_checks_every_call_of_a_layer(self) -> None:
        """The first of two maps that a head is called with is too small."""

        class Pyramid(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Identity()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(x[:, :, ::4, ::4]).sum() + self.head(x).sum()

        drafted = plan(Pyramid(), DropBlock(0.1, 3), layers="head", example_input=torch.ones(1, 2, 12, 12))
        assert (drafted.sites[0].calls, drafted.sites[0].shape) == (2, (1, 2, 12, 12))
        assert "covers the whole 3x3 map" in drafted.warnings[0]

    def test_function_that_changes_the_shape_is_an_error(self, model: Small, images: torch.Tensor) -> None:
        inject(model, torch.Tensor.sum, layers="fc")
        with pytest.raises(
            ShapeError, match=r"sum at 'fc' got \(4, 10\) torch.float32 and returned \(\) torch.float32"
        ):
            model(images)


def packed(model: nn.Module) -> object:
    return model(nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)]))


@pytest.mark.parametrize("regularizer", [DropPath(0.5), FeatureAlphaDropout(0.5), Masksembles(2, 1.5)])
def test_a_packed_sequence_is_refused_by_what_treats_rows_as_samples(regularizer: nn.Module) -> None:
    model = nn.Sequential(nn.LSTM(3, 16))
    inject(model, regularizer, layers="0")
    with pytest.raises(ShapeError, match=r"got a PackedSequence, whose rows are time steps(.|\n)*pad_packed_sequence"):
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
        with pytest.raises(ShapeError, match=r"got a strided NestedTensor(.|\n)*layout=torch.jagged"):
            model(strided)
    assert model(torch.nested.nested_tensor(parts, layout=torch.jagged)).is_nested
