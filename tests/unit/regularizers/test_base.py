"""The base class, classes of users, and what regularizers refuse; docs/errors has the texts."""

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookdrop
from hookdrop import Dropout, HeadDropout, InjectionError, LinearSchedule, Rate, Regularizer, ShapeError, inject, plan
from hookdrop.core.parts import REGULARIZERS
from hookdrop.core.spec import as_regularizer
from hookdrop.functional import drop_block
from tests.support.training import halve


class Own(Regularizer):
    """Its attribute has the name of the class attribute that declares it, and its range includes negative numbers."""

    rate: Any = Rate("rate", low=-2.0, high=2.0, neutral=1.0, kind="factor")

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate

    def regularize(self, x: Tensor, rate: float) -> Tensor:
        return x * rate


class TensorRate(Own):
    rate: Any = Rate("p")

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = torch.tensor(p)


class DropsASetting(Own):
    rate: Any = Rate("p")

    def __init__(self, p: float = 0.1, scale: float = 2.0) -> None:
        super().__init__()
        self.p = p


class Missing(Regularizer):
    rate = Rate("amount")


class Counting(nn.Module):
    """A foreign module with its own state."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.calls = p, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 - self.p)


class TestForeignModules:
    def test_at_another_rate_a_copy_runs(self) -> None:
        """Another thread may be running the module."""
        foreign, x = as_regularizer(Counting(0.5)), torch.ones(2)
        module = foreign.module
        assert foreign.regularize(x, 0.5).tolist() == [0.5, 0.5]
        for _ in range(2):
            assert foreign.regularize(x, 0.25).tolist() == [0.75, 0.75]
        assert (module.p, module.calls) == (0.5, 1)

    def test_inplace_is_disabled_on_the_copy_of_each_site(self) -> None:
        given = nn.Dropout(0.4, inplace=True)
        model = nn.Sequential(nn.Sigmoid(), nn.Sigmoid())
        assert [site.p for site in inject(model, given, layers="*", p_scale="depth").sites] == [0.2, 0.4]
        model(torch.randn(8, requires_grad=True)).sum().backward()
        assert given.inplace

    def test_a_function_has_no_rate(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, halve, layers="0")
        assert model(torch.ones(2)).tolist() == [0.5, 0.5]
        assert (drop.p, drop.keep_prob, drop.target_p) == (None, None, None)
        assert drop.metrics() == {"hookdrop/halve/step": 0.0, "hookdrop/halve/enabled": 1.0}
        with pytest.raises(InjectionError):
            drop.target_p = 0.1
        with pytest.raises(InjectionError), drop.sampling(p=0.1):
            pass


class TestUserDefinedClasses:
    def test_any_attribute_name_and_range(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, Own(-1.5), layers="0", schedule=LinearSchedule(2))
        drop.step()
        assert model(torch.ones(1)).item() == drop.sites[0].p == -0.75
        assert drop.metrics()["hookdrop/own/rate"] == -0.75
        assert drop.sites[0].regularizer == "Own(rate=-1.5)"
        for wrong in (lambda: setattr(drop, "target_p", 3.0), lambda: inject(nn.Sequential(), Own(7.0), layers="")):
            with pytest.raises(ValueError):
                wrong()
        with drop.disabled():
            assert drop.p == 1.0
        assert Own(0.25)(torch.ones(1)).item() == 0.25

    def test_a_rate_may_be_a_tensor(self) -> None:
        model = nn.Sequential(nn.Identity())
        drop = inject(model, TensorRate(0.5), layers="0", schedule=LinearSchedule(10))
        drop.seek(5)
        assert (drop.p, type(drop.sites[0].p), model(torch.ones(2)).tolist()) == (0.25, float, [0.25, 0.25])

    def test_a_plan_marks_settings_that_are_not_stored(self) -> None:
        assert "DropsASetting(p=0.2, scale=?)" in str(plan(nn.Sequential(nn.Tanh()), DropsASetting(0.2), layers="0"))

    def test_a_class_without_regularize_or_its_rate_raises(self) -> None:
        class Nothing(Regularizer):
            rate = None

        with pytest.raises(NotImplementedError):
            Nothing()(torch.ones(2))
        for use in (lambda: inject(nn.Sequential(nn.ReLU()), Missing(), layers="0"), lambda: Missing()(torch.ones(2))):
            with pytest.raises(InjectionError, match="no attribute 'amount'"):
                use()


@pytest.mark.parametrize(
    ("rate", "bad", "span"),
    [
        (Rate("p"), 1.5, "[0, 1]"),
        (Rate("p", open_end=True), 1.0, "[0, 1)"),
        (Rate("std", high=math.inf), -1.0, "[0, inf)"),
        (Rate("a", low=-math.inf, high=2.0), 3.0, "(-inf, 2]"),
        (Rate("a", low=-math.inf, high=math.inf), -math.inf, "finite"),
    ],
)
def test_a_rate_states_its_range(rate: Rate, bad: float, span: str) -> None:
    assert rate.valid(0.5, "Own") == 0.5
    with pytest.raises(ValueError) as caught:
        rate.valid(bad, "Own")
    assert span in str(caught.value)
    with pytest.raises(ValueError):
        Rate("factor", neutral=2.0)


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


INVALID: list[tuple[str, str, list[Any]]] = [
    ("Dropout", "p", [None, torch.tensor([0.1, 0.2])]),
    ("Dropout", "shared", [(2, 2), None, "2", (1.0,), [True]]),
    *((name, "p", [1.0]) for name in ("GaussianDropout", "HeadDropout", "LayerDrop", "ShakeDrop")),
    *((name, "std", [-1]) for name in ("GaussianNoise", "NoiseActivationGrad")),
    ("NEFTune", "alpha", [-1]),
    ("DropBlock", "normalize", ["mean", True]),
    ("DropBlock", "gamma", ["approx"]),
    ("DropPath", "samples", ["a"]),
    ("DropBlock", "per_channel", ["yes"]),
    ("DropBlock", "block_size", [0, (0, 3), (), 3.0, "3", True, None]),
    ("DropBlock", "channel_dim", [1.0, "1", True]),
    ("DropPath", "mode", ["col"]),
    ("Cutout", "size", [0, 2.5, "3", (3,), (1, 2, 3), (2, 0), None]),
    ("TokenDropout", "prefix", [-1, 1.0, None, "1", True]),
    ("MixStyle", "alpha", [0, -1, math.nan, math.inf, "a", None]),
    ("ShakeDrop", "alpha", [0.5, (-1.0, 0.5)]),
    ("ShakeDrop", "beta", [(0.0, 1.0, 2.0), (1.0, 0.0), (0.0, math.inf)]),
    ("Masksembles", "n", [1, 2.5]),
    ("Masksembles", "scale", [0.5, 7, "2"]),
    ("Masksembles", "seed", [-1]),
    ("ClipActivationGrad", "max_norm", [None, 0, "1"]),
    ("ClipActivationGrad", "max_value", [None, -1]),
    ("ClampActivationGrad", "min", [None, math.nan]),
    ("ScaleActivationGrad", "factor", ["x", math.nan]),
    *(("ActivationPenalty", name, [-1, math.nan]) for name in ("l2", "slowness", "scale")),
]


@pytest.mark.parametrize(("name", "setting", "values"), INVALID, ids=lambda value: value if type(value) is str else "")
def test_invalid_settings_raise(name: str, setting: str, values: list[Any]) -> None:
    cls = getattr(hookdrop, name)
    rate = {"p": 0.5} if "p" in inspect.signature(cls).parameters else {}
    for value in values:
        with pytest.raises((ValueError, TypeError), match=setting):
            cls(**rate | {setting: value})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ClipActivationGrad", {"max_norm": 1.0, "max_value": 2.0}),
        ("ClipActivationGrad", {"max_norm": 1.0, "per_sample": 1}),
        ("ClipActivationGrad", {"max_value": 1.0, "per_sample": True}),
        ("ClampActivationGrad", {"min": 1, "max": -1}),
        ("ActivationPenalty", {"l2": 0, "slowness": 0}),
    ],
)
def test_settings_that_exclude_each_other_raise(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=list(settings)[1]):
        getattr(hookdrop, name)(**settings)


@pytest.mark.parametrize("number", [torch.tensor(0.25), torch.tensor([0.25]), 1 / 4, np.float32(0.25)])
def test_tensor_and_numpy_scalars_are_valid_rates_and_block_sizes(number: object) -> None:
    assert Dropout(number).p == 0.25
    assert hookdrop.GaussianNoise(12.5).std == 12.5, "a std has no upper bound"
    for size in (np.int64(3), torch.tensor(3), [3, 3], (np.int32(3), 3)):
        assert (drop_block(torch.ones(4, 8, 12, 12), 0.3, size) == 0).any()


SHAPES: list[tuple[str, tuple[int, ...], str]] = [
    ("Dropout2d(0.1)", (8, 197, 384), "TokenDropout"),
    ("Dropout1d(0.1)", (8, 6, 5, 5), "Dropout2d"),
    ("Dropout3d(0.1)", (8, 6, 5, 5), "Dropout2d"),
    ("FeatureAlphaDropout(0.1)", (8,), "Dropout"),
    ("DropPath(0.1)", (), "needs"),
    ("ShakeDrop(0.5)", (), "needs"),
    *(("DropBlock(0.1)", shape, "1 to 3 spatial axes") for shape in ((4,), (2, 5), (2, 3, 4, 5, 6, 7))),
    ("DropBlock()", (8, 197, 384), "channel_dim=-1"),
    ("DropBlock(block_size=(3, 3, 3))", (1, 1, 8, 8), "3 axes"),
    ("DropBlock(channel_dim=4)", (1, 1, 8, 8), "channel_dim=4"),
    ("Cutout(3)", (8, 197, 384), "TokenDropout"),
    ("Cutout(3)", (8, 4, 5, 6, 7), "Dropout3d"),
    ("Cutout(3)", (8, 10), "Dropout(p"),
    ("TokenDropout(0.1)", (8, 64, 14, 14), "DropBlock"),
    ("TokenDropout(0.1)", (8, 10), "Dropout(p"),
    ("TokenDropout(0.1)", (8, 1, 10), "a smaller prefix"),
    ("TokenDropout(0.1)", (8, 4, 2, 5, 5), "Dropout3d"),
    ("LockedDropout(0.1)", (8, 10), "needs"),
    ("LockedDropout(0.1, 3)", (2, 3, 4), "(3,)"),
    ("LockedDropout(0.1, -4)", (2, 3, 4), "(-4,)"),
    ("Dropout(0.1, shared=(2, 3))", (8, 197, 384), "(2, 3)"),
    ("Dropout(0.1, shared=(1, -2))", (8, 197, 384), "(1, -2)"),
    ("NEFTune(5)", (4, 8), "needs"),
    ("NEFTune(5)", (2, 3, 4, 5), "needs"),
    ("HeadDropout(0.2, heads=5)", (2, 3, 12), "5 heads"),
    *((f"{name}()", (8, 4, 1, 1), "1x1") for name in ("MixStyle", "DSU")),
    *((f"{name}()", (8, 197, 384), "TokenDropout") for name in ("MixStyle", "DSU")),
    *((f"{name}()", (8, 4), "Dropout(p") for name in ("MixStyle", "DSU")),
    ("Masksembles(n=4)", (30, 16), "28 or 32 samples"),
    ("Masksembles(n=4)", (3, 16), "a batch of 4 samples"),
    ("Masksembles(n=4)", (8, 3, 32, 32), "10 channels"),
    ("Masksembles(n=4)", (8, 197, 384), "channel_dim=-1"),
    ("Masksembles(n=4)", (8,), "needs"),
    ("Masksembles(n=4, channel_dim=2)", (4, 16), "channel_dim=2"),
]


@pytest.mark.parametrize(("code", "shape", "advice"), SHAPES)
def test_unsupported_shapes_raise_and_suggest_an_alternative(code: str, shape: tuple[int, ...], advice: str) -> None:
    regularizer, model = hookdrop.parse(code), nn.Sequential(nn.Identity())
    with pytest.raises(ShapeError) as caught:
        regularizer(torch.ones(shape))
    assert advice in str(caught.value)
    if shape and not isinstance(regularizer, HeadDropout):  # no site has a 0-d tensor, and an identity has no heads
        with pytest.raises(ShapeError):
            inject(model, regularizer, layers="0", example_input=(torch.ones(shape),))
        assert not model[0]._forward_hooks


@pytest.mark.parametrize("code", ["Cutout(3)", "DSU()", "MixStyle()", "Masksembles()"])
def test_maps_that_look_like_nhwc_warn(code: str) -> None:
    (warning,) = hookdrop.parse(code).shape_warnings((8, 14, 14, 96))
    assert "looks like NHWC" in warning


@pytest.mark.parametrize(("sizes", "same"), [((7,), "Dropout1d"), ((7, 7), "Dropout2d"), ((3, 7, 7), "Dropout3d")])
def test_a_block_over_the_whole_map_warns(sizes: tuple[int, ...], same: str) -> None:
    for per_channel, name in ((True, same), (False, "DropPath")):
        (warning,) = hookdrop.DropBlock(0.1, 7, channel_dim=1, per_channel=per_channel).shape_warnings((2, 4, *sizes))
        assert f"which is {name}." in warning


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (torch.Tensor.long, r"pass x.float\(\)"),
        (torch.Tensor.bool, r"pass x.float\(\)"),
        (lambda x: x.to(torch.complex64), r"torch.view_as_real\(x\)"),
        (lambda x: x.to(torch.float8_e4m3fn), r"pass x.to\(torch.bfloat16\)"),
        (torch.Tensor.to_sparse, r"pass x.to_dense\(\)"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "to_padded_tensor"),
        (lambda x: [1.0, 2.0], "torch.as_tensor"),
        (lambda x: None, "must be a tensor"),
    ],
    ids=["int", "bool", "complex", "float8", "sparse", "nested", "list", "None"],
)
def test_input_that_is_not_a_dense_float_tensor_raises(make: Any, fix: str) -> None:
    with pytest.raises(TypeError, match=fix):
        drop_block(make(torch.ones(2, 3, 8, 8)), 0.1, 3)
