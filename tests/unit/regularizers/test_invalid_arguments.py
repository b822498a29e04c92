"""Settings and shapes that regularizers refuse, with what to use instead."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    DSU,
    ClampActivationGrad,
    ClipActivationGrad,
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
    HeadDropout,
    LayerDrop,
    LockedDropout,
    Masksembles,
    MixStyle,
    NEFTune,
    NoiseActivationGrad,
    Regularizer,
    ScaleActivationGrad,
    ShakeDrop,
    ShapeError,
    TokenDropout,
    inject,
)
from hookdrop.functional import drop_block
from hookdrop.regularizers import REGULARIZERS

ZEROING = [cls for cls in REGULARIZERS.values() if "keep_prob" in inspect.signature(cls).parameters]


@pytest.mark.parametrize("cls", ZEROING, ids=lambda cls: cls.__name__)
def test_invalid_rates_raise(cls: type[Regularizer]) -> None:
    for p in (-0.1, 1.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"{cls.__name__}: p must"):
            cls(p)
    for not_a_number in ("0.1", True, [0.1], type(None)):
        with pytest.raises(TypeError, match=rf"{cls.__name__}: p must be"):
            cls(not_a_number)
    with pytest.raises(ValueError, match=r"a percentage\? write p=0.1"):
        cls(10)
    with pytest.raises(ValueError, match="pass p or keep_prob, not both"):
        cls(p=0.1, keep_prob=0.9)
    assert cls(keep_prob=0.9).p == 0.1


SETTINGS: list[tuple[type[Regularizer], Any, str]] = [
    (Dropout, {}, r"how much to drop: Dropout\(p=0.1\)"),
    (Dropout, {"p": torch.tensor([0.1, 0.2])}, "p must be"),
    (Dropout, {"p": 0.1, "shared": (2, 2)}, r"shared must have each axis once, got \(2, 2\)"),
    *((Dropout, {"p": 0.1, "shared": axes}, "shared must be an integer") for axes in (None, "2", (1.0,), [True])),
    (GaussianDropout, {"p": 1.0}, r"must lie in \[0, 1\), got 1"),
    (HeadDropout, {"p": 1.0}, r"p must lie in \[0, 1\), got 1"),
    (LayerDrop, {"p": 1.0}, r"p must lie in \[0, 1\), got 1"),  # the layer would never train
    (ShakeDrop, {"p": 1.0}, r"p must lie in \[0, 1\), got 1"),  # the mean factor would be 0
    (GaussianNoise, {"std": -1}, r"std must lie in \[0, 3.4"),
    (NEFTune, {"alpha": -1}, r"alpha must lie in \[0, 3.40282e\+38\], got -1"),
    *((DropBlock, {"p": 0.1, "normalize": value}, "must be one of") for value in ("mean", True)),
    (DropBlock, {"p": 0.1, "gamma": "approx"}, "must be one of"),
    (DropBlock, {"p": 0.1, "per_channel": "yes"}, "must be one of"),
    *((DropBlock, {"block_size": size}, "block_size must") for size in (0, (0, 3), (), 3.0, "3", True, None)),
    *((DropBlock, {"channel_dim": axis}, "channel_dim must be an integer") for axis in (1.0, "1", True)),
    (DropPath, {"p": 0.1, "mode": "col"}, "'row', 'batch', 'subset', got 'col'"),
    *((Cutout, {"size": size}, "size must") for size in (0, 2.5, "3", (3,), (1, 2, 3), (2, 0), None)),
    *((TokenDropout, {"p": 0.1, "prefix": prefix}, "prefix must") for prefix in (-1, 1.0, None, "1", True)),
    *((MixStyle, {"alpha": alpha}, "alpha must be") for alpha in (0, -1, math.nan, math.inf, "a", None)),
    (ShakeDrop, {"p": 0.5, "alpha": 0.5}, r"alpha must be a range .* got 0.5.\n  a constant c is \(c, c\)"),
    (ShakeDrop, {"p": 0.5, "alpha": (-1.0, 0.5)}, "with a mean of at least 0"),
    (ShakeDrop, {"p": 0.5, "beta": (0.0, 1.0, 2.0)}, r"beta must be a range \(low, high\)"),
    (ShakeDrop, {"p": 0.5, "beta": (1.0, 0.0)}, r"beta must be a range \(low, high\)"),
    (ShakeDrop, {"p": 0.5, "beta": (0.0, math.inf)}, "beta must be finite"),
    (Masksembles, {"n": 1}, "n must be at least 2, got 1"),
    (Masksembles, {"n": 2.5}, "n must be an integer"),
    (Masksembles, {"scale": 0.5}, r"scale must lie in \[1, 6\], got 0.5"),
    (Masksembles, {"scale": 7}, r"scale must lie in \[1, 6\], got 7"),
    (Masksembles, {"scale": "2"}, "scale must be a number"),
    (Masksembles, {"seed": -1}, "seed must be at least 0"),
    (ClipActivationGrad, {}, "pass either max_norm or max_value"),
    (ClipActivationGrad, {"max_norm": 1.0, "max_value": 2.0}, "pass either max_norm or max_value"),
    (ClipActivationGrad, {"max_norm": 0}, r"must be above 0, got 0.\n  to stop the gradient: ScaleActivationGrad\(0\)"),
    (ClipActivationGrad, {"max_value": -1}, "max_value must be above 0, got -1"),
    (ClipActivationGrad, {"max_norm": "1"}, "max_norm must be a number"),
    (ClipActivationGrad, {"max_norm": 1.0, "per_sample": 1}, "per_sample must be one of True, False"),
    (ClipActivationGrad, {"max_value": 1.0, "per_sample": True}, "max_value clips each element"),
    (ClampActivationGrad, {}, "pass min, max or both"),
    (ClampActivationGrad, {"min": 1, "max": -1}, "min must not be above max, got min=1 and max=-1"),
    (ClampActivationGrad, {"min": math.nan}, "min must be finite"),
    (NoiseActivationGrad, {"std": -1}, r"std must lie in \[0, 3.4"),
    (ScaleActivationGrad, {"factor": "x"}, "factor must be a number"),
    (ScaleActivationGrad, {"factor": math.nan}, "factor must be finite"),
]


@pytest.mark.parametrize(("cls", "settings", "says"), SETTINGS)
def test_invalid_settings_raise(cls: type[Regularizer], settings: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        cls(**settings)


@pytest.mark.parametrize("number", [torch.tensor(0.25), torch.tensor([0.25]), 1 / 4, __import__("numpy").float32(0.25)])
def test_tensor_and_numpy_scalars_are_valid_rates(number: object) -> None:
    assert Dropout(number).p == 0.25
    assert GaussianNoise(12.5).std == 12.5, "a std has no upper bound"


def test_block_size_may_be_a_numpy_or_torch_integer() -> None:
    import numpy as np

    for size in (np.int64(3), torch.tensor(3), [3, 3], (np.int32(3), 3)):
        assert (drop_block(torch.ones(4, 8, 12, 12), 0.3, size) == 0).any()


SHAPES: list[tuple[Regularizer, tuple[int, ...], str]] = [
    (Dropout2d(0.1), (8, 197, 384), r"for tokens \(N, L, C\) use TokenDropout(.|\n)*, for a sequence .* Dropout1d"),
    (Dropout1d(0.1), (8, 6, 5, 5), "Dropout2d"),
    (Dropout3d(0.1), (8, 6, 5, 5), "Dropout2d"),
    (FeatureAlphaDropout(0.1), (8,), "Dropout"),
    (DropPath(0.1), (), r"needs \(N, ...\)"),
    (ShakeDrop(0.5), (), r"needs \(N, ...\)"),
    *((DropBlock(0.1), shape, "needs 1 to 3 spatial axes") for shape in ((4,), (2, 5), (2, 3, 4, 5, 6, 7))),
    (DropBlock(), (8, 197, 384), r"tokens have no map(.|\n)*DropPath(.|\n)*channel_dim=-1"),
    (DropBlock(block_size=(3, 3, 3)), (1, 1, 8, 8), "has 3 axes, but the map has 2"),
    (DropBlock(channel_dim=4), (1, 1, 8, 8), "channel_dim=4 is not one of its axes"),
    (Cutout(3), (8, 197, 384), r"needs \(N, C, H, W\).\n  .*use .*TokenDropout"),
    (Cutout(3), (8, 4, 5, 6, 7), "Dropout3d"),
    (Cutout(3), (8, 10), r"Dropout\(p"),
    (TokenDropout(0.1), (8, 64, 14, 14), r"Dropout2d\(p=...\) or DropBlock"),
    (TokenDropout(0.1), (8, 10), r"Dropout\(p"),
    (TokenDropout(0.1), (8, 1, 10), r"prefix=1 leaves no token to drop, since L=1.\n  use a smaller prefix"),
    (TokenDropout(0.1), (8, 4, 2, 5, 5), "Dropout3d"),
    (LockedDropout(0.1), (8, 10), r"needs \(N, T, C, ...\)"),
    (LockedDropout(0.1, 3), (2, 3, 4), r"\(3,\) must be different ones of its axes 0 to 2"),
    (LockedDropout(0.1, -4), (2, 3, 4), r"\(-4,\) must be different ones of its axes 0 to 2, or -3 to -1"),
    (Dropout(0.1, shared=(2, 3)), (8, 197, 384), r"\(2, 3\) must be different ones of its axes 0 to 2"),
    (Dropout(0.1, shared=(1, -2)), (8, 197, 384), r"\(1, -2\) must be different ones"),
    (NEFTune(5), (4, 8), r"neftune needs \(N, L, d\)"),
    (NEFTune(5), (2, 3, 4, 5), r"neftune needs \(N, L, d\)"),
    (HeadDropout(0.2, heads=5), (2, 3, 12), "12 features do not divide into 5 heads"),
    *((cls(), (8, 4, 1, 1), "a 1x1 map has no standard deviation") for cls in (MixStyle, DSU)),
    *((cls(), (8, 197, 384), "needs .N, C, H, W.(.|\n)*TokenDropout") for cls in (MixStyle, DSU)),
    *((cls(), (8, 4), r"Dropout\(p") for cls in (MixStyle, DSU)),
    (Masksembles(n=4), (30, 16), r"30 samples cannot be split into n=4 equal groups(.|\n)*28 or 32 samples"),
    (Masksembles(n=4), (3, 16), r"use a batch of 4 samples; DataLoader\(..., drop_last=True\)"),
    (Masksembles(n=4), (8, 3, 32, 32), "masksembles needs 10 channels"),
    (Masksembles(n=4), (8, 197, 384), r"may be axis 1 or 2.\n  write channel_dim=-1 for tokens"),
    (Masksembles(n=4), (8,), r"masksembles needs \(N, C, ...\)"),
    (Masksembles(n=4, channel_dim=2), (4, 16), "channel_dim=2 is not one of its axes 1 to 1"),
]


@pytest.mark.parametrize(("regularizer", "shape", "says"), SHAPES, ids=lambda value: str(value)[:40])
def test_unsupported_shapes_raise_and_suggest_an_alternative(
    regularizer: Regularizer, shape: tuple[int, ...], says: str
) -> None:
    model = nn.Sequential(nn.Identity())
    with pytest.raises(ShapeError, match=says):
        regularizer(torch.ones(shape))
    if shape and not isinstance(regularizer, HeadDropout):  # no site has a 0-d tensor, and an identity has no heads
        with pytest.raises(ShapeError):
            inject(model, regularizer, layers="0", example_input=(torch.ones(shape),))
        assert not model[0]._forward_hooks


@pytest.mark.parametrize("regularizer", [Cutout(3), DSU(), MixStyle(), Masksembles()], ids=repr)
def test_maps_that_look_like_nhwc_warn(regularizer: Regularizer) -> None:
    (warning,) = regularizer.shape_warnings((8, 14, 14, 96))
    assert "looks like NHWC" in warning


@pytest.mark.parametrize(("sizes", "same"), [((7,), "Dropout1d"), ((7, 7), "Dropout2d"), ((3, 7, 7), "Dropout3d")])
def test_a_block_over_the_whole_map_warns(sizes: tuple[int, ...], same: str) -> None:
    (warning,) = DropBlock(0.1, 7, channel_dim=1).shape_warnings((2, 4, *sizes))
    assert f"blocks of {'x'.join(map(str, sizes))} there, which is {same}." in warning
    (warning,) = DropBlock(0.1, 7, channel_dim=1, per_channel=False).shape_warnings((2, 4, *sizes))
    assert "which is DropPath." in warning


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda x: x.long(), r"got \(2, 3, 8, 8\) torch.int64(.|\n)*pass x.float\(\)"),
        (lambda x: x.bool(), r"torch.bool(.|\n)*pass x.float\(\)"),
        (lambda x: x.to(torch.complex64), r"torch.complex64(.|\n)*torch.view_as_real\(x\)"),
        (lambda x: x.to(torch.float8_e4m3fn), r"torch.float8_e4m3fn(.|\n)*pass x.to\(torch.bfloat16\)"),
        (lambda x: x.to_sparse(), r"sparse_coo \(2, 3, 8, 8\)(.|\n)*pass x.to_dense\(\)"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "got nested (.|\n)*to_padded_tensor"),
        (lambda x: [1.0, 2.0], r"must be a tensor, got \[1.0, 2.0\] \(list\)(.|\n)*torch.as_tensor"),
        (lambda x: None, r"must be a tensor, got None \(NoneType\)"),
    ],
    ids=["int", "bool", "complex", "float8", "sparse", "nested", "list", "None"],
)
def test_input_that_is_not_a_dense_float_tensor_raises(make: Any, fix: str) -> None:
    with pytest.raises(TypeError, match=fix):
        drop_block(make(torch.ones(2, 3, 8, 8)), 0.1, 3)
