"""Invalid arguments of `inject` and `plan`, and modules that need special treatment."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    ClipActivationGrad,
    DropBlock,
    Dropout,
    Dropout1d,
    DropPath,
    InjectionError,
    LambdaSchedule,
    LayerError,
    LinearSchedule,
    Regularizer,
    ShapeError,
    find,
    inject,
    layers,
    plan,
    without_hooks,
)
from tests.support.injections import UNCHANGED
from tests.support.models import Small


def test_follow_with_a_lazy_first_parameter() -> None:
    """The parameter has no values before the first forward."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 4))
    drop = inject(model, Dropout(0.5), layers="1", schedule=LinearSchedule(10))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    drop.follow(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert (drop.step_count, drop.check()) == (1, [])
    drop.remove()


def no_rate(x: torch.Tensor) -> torch.Tensor:
    return x


class WithWeights(Regularizer):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p, self.weight = p, nn.Parameter(torch.ones(1))

    def regularize(self, x: torch.Tensor, rate: Any) -> torch.Tensor:
        return x * self.weight


class NoRate(Regularizer):
    def regularize(self, x: torch.Tensor, rate: Any) -> torch.Tensor:
        return x


def mapping(keys: Any) -> dict[str, Any]:
    return {"regularizer": keys, "layers": None}


IMAGE = torch.ones(1, 3, 8, 8)
RAMP = LinearSchedule(3)
INVALID: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "unknown layer": (LayerError, {"layers": "layer7"}),
    "unknown glob": (LayerError, {"layers": "layer7.*"}),
    "unknown type": (LayerError, {"layers": nn.LSTM}),
    "unknown instance": (LayerError, {"layers": nn.Linear(1, 1)}),
    "empty layers": (LayerError, {"layers": []}),
    "no layers": (LayerError, {"layers": None}),
    "everything excluded": (LayerError, {"exclude": "**"}),
    "a bad range in a glob": (LayerError, {"layers": "[z-a]*"}),
    "a class as regularizer": (TypeError, {"regularizer": DropBlock}),
    "None as regularizer": (TypeError, {"regularizer": None}),
    "a number as regularizer": (TypeError, {"regularizer": 0.1}),
    "a local lambda": (InjectionError, {"regularizer": lambda x: x}),
    "a lambda in a schedule": (InjectionError, {"schedule": LambdaSchedule(lambda s: 1.0)}),
    "a module with parameters": (InjectionError, {"regularizer": nn.Linear(1, 1)}),
    "a module with buffers": (InjectionError, {"regularizer": nn.BatchNorm2d(3, affine=False)}),
    "a regularizer with parameters": (InjectionError, {"regularizer": WithWeights()}),
    "a regularizer without its rate": (InjectionError, {"regularizer": NoRate()}),
    "a schedule without a rate": (InjectionError, {"regularizer": no_rate, "schedule": RAMP}),
    "a module without a rate scheduled": (InjectionError, {"regularizer": nn.ReLU(), "schedule": RAMP}),
    "an edit without a rate scheduled": (InjectionError, {"regularizer": ClipActivationGrad(1.0), "schedule": RAMP}),
    "p_scale without a rate": (InjectionError, {"regularizer": no_rate, "p_scale": "depth"}),
    "p_scale that matches nothing": (LayerError, {"p_scale": {"fc": 0.5}}),
    "p_scale twice": (LayerError, {"p_scale": {"layer1.0": 0.5, "**.0": 1}}),
    "p_scale unknown": (ValueError, {"p_scale": "deep"}),
    "p_scale a number": (ValueError, {"p_scale": 0.5}),
    "p_scale negative": (ValueError, {"p_scale": {"layer1.0": -1}}),
    "p_scale not a number": (TypeError, {"p_scale": {"layer1.0": "a"}}),
    "p_scale of one site from zero": (ValueError, {"layers": "fc", "p_scale": "depth_from_zero"}),
    "a rate above 1 by p_scale": (ValueError, {"p_scale": {"layer1.0": 20}}),
    "a rate above 1 by schedule": (ValueError, {"schedule": LinearSchedule(5, end=20)}),
    "a number as schedule": (TypeError, {"schedule": 1000}),
    "a schedule class": (TypeError, {"schedule": LinearSchedule}),
    "a function as schedule": (TypeError, {"schedule": abs}),
    "at unknown": (ValueError, {"at": "outputs"}),
    "on_existing unknown": (ValueError, {"on_existing": "keep"}),
    "an empty name": (InjectionError, {"name": ""}),
    "a name with a slash": (InjectionError, {"name": "a/b"}),
    "layers and a mapping": (LayerError, {"regularizer": {"fc": Dropout(0.1)}}),
    "a layer under two keys": (LayerError, mapping({"layer1.*": Dropout(0.1), "**.0": Dropout(0.2)})),
    "an unknown layer as a key": (LayerError, mapping({"layer7": Dropout(0.1)})),
    "an unknown glob as a key": (LayerError, mapping({"fc": Dropout(0.1), "layer1.bn*": Dropout(0.2)})),
    "a number as a key": (LayerError, mapping({3: Dropout(0.1)})),
    "a key of two entries": (LayerError, mapping({("fc", "conv1"): Dropout(0.1), (): Dropout(0.2)})),
    "an empty mapping": (LayerError, mapping({})),
    "code in a string": (ValueError, {"regularizer": "DropBlock(p=__import__('os').getpid())"}),
    "an unknown regularizer": (ValueError, {"regularizer": "Dropoot(p=0.1)"}),
    "an example that the model rejects": (InjectionError, {"example_input": torch.ones(4, 5)}),
    "a string as example": (InjectionError, {"example_input": "cat.jpg"}),
    "a shape as example": (InjectionError, {"example_input": (4, 3, 8, 8)}),
    "a wrong rank in the example": (ShapeError, {"regularizer": Dropout1d(0.1), "example_input": IMAGE}),
    "a missing tensor index": (ShapeError, {"tensor": 1, "example_input": IMAGE}),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise_and_change_nothing(model: Small, case: str) -> None:
    error, changes = INVALID[case]
    model.layer2[0].eval()
    settings: dict[str, Any] = {"regularizer": Dropout(0.1), "layers": "layer1.*"} | changes
    flags, rng = [m.training for m in model.modules()], torch.get_rng_state()
    with pytest.raises(error) as caught:
        inject(model, settings.pop("regularizer"), **settings)
    if case != "None as regularizer":
        assert str(caught.value).endswith(UNCHANGED)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)


class TestKeras:
    """Keras never puts its layers in eval mode. These classes are stand-ins for Keras classes."""

    @staticmethod
    def layer(name: str, *parts: nn.Module) -> nn.Module:
        base = type("Layer", (nn.Sequential,), {"__module__": "keras.src.layers.layer"})
        return type(name, (base,), {"__module__": "keras.src.layers.core"})(*parts)

    def test_torch_layers_of_a_keras_model_are_hooked(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), self.layer("TorchModuleWrapper", nn.ReLU()), self.layer("Dense"))
        inject(model, Dropout(0.5), layers=["0", "1.0"])
        assert len(layers(model)) == 4
        with pytest.raises(InjectionError):
            inject(model, Dropout(0.5), layers="1")


class TestLazyModules:
    """Lazy modules create their parameters in the first forward."""

    def test_lazy_modules_are_hooked_before_their_first_forward(self) -> None:
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
        drop = inject(model, Dropout(0.5), layers="*", schedule=LinearSchedule(10))
        drop.seek(10)
        assert drop.check()
        drop.state_dict()
        out = model(torch.ones(1000, 4))
        assert isinstance(model[0], nn.Linear)
        assert (out == 0).float().mean() == pytest.approx(0.5, abs=0.05)
        drop.remove()
        assert not any(m._forward_hooks for m in model.modules())

    def test_plan_prints_with_a_lazy_layer(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LazyConv2d(8, 3))
        inject(model, Dropout(0.5), layers="*")
        print(plan(model, Dropout(0.5), layers="**", on_existing="stack"))

    @pytest.mark.parametrize("method", ["example_input", "probe"])
    def test_example_input_and_probe_raise_for_lazy_parameters(self, method: str) -> None:
        model, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), torch.ones(2, 4)
        with pytest.raises(InjectionError):
            if method == "probe":
                inject(model, Dropout(0.5), layers="0").probe(x)
            else:
                inject(model, Dropout(0.5), layers="0", example_input=x)
        assert isinstance(model[0].weight, nn.UninitializedParameter)
        assert isinstance(model[1].running_mean, nn.UninitializedBuffer)
        assert len(find(model)) == (method == "probe")


def test_script_modules_raise() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(torch.jit.script(nn.ReLU()), nn.ReLU())
    for wrong, entry in ((model, "*"), (model[0], "*")):
        with pytest.raises(InjectionError):
            inject(wrong, Dropout(0.1), layers=entry)
    inject(model, Dropout(0.1), layers="1")


def test_p_scale_as_a_function(model: Small) -> None:
    drop = inject(model, Dropout(0.4), layers="layer?.*", p_scale=lambda name, index, count: (index + 1) / count)
    assert [site.p for site in drop.sites] == [0.1, 0.2, pytest.approx(0.3), 0.4]


@pytest.mark.parametrize("use", [find, layers, lambda m: without_hooks(m).__enter__()])
def test_model_that_is_not_a_module_raises(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        use("resnet50")


def test_depth_from_zero_scales_rates_like_timms_linspace(model: Small) -> None:
    drop = inject(model, DropPath(0.3), layers="layer?.*", p_scale="depth_from_zero")
    expected = torch.linspace(0, 0.3, 4, dtype=torch.float64).tolist()
    assert [site.p for site in drop.sites] == pytest.approx(expected)
