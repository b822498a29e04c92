"""Invalid arguments of `inject` and `plan`, and modules that need special treatment."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    ClipActivationGrad,
    Dropout,
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
from tests.support.training import sgd


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
# tests/support/error_catalog.py has more.
INVALID: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "empty layers": (LayerError, {"layers": []}),
    "a bad range in a glob": (LayerError, {"layers": "[z-a]*"}),
    "None as regularizer": (TypeError, {"regularizer": None}),
    "a number as regularizer": (TypeError, {"regularizer": 0.1}),
    "a lambda in a schedule": (InjectionError, {"schedule": LambdaSchedule(lambda s: 1.0)}),
    "a module with parameters": (InjectionError, {"regularizer": nn.Linear(1, 1)}),
    "a regularizer with parameters": (InjectionError, {"regularizer": WithWeights()}),
    "a regularizer without its rate": (InjectionError, {"regularizer": NoRate()}),
    "a module without a rate scheduled": (InjectionError, {"regularizer": nn.ReLU(), "schedule": RAMP}),
    "an edit without a rate scheduled": (InjectionError, {"regularizer": ClipActivationGrad(1.0), "schedule": RAMP}),
    "p_scale without a rate": (InjectionError, {"regularizer": no_rate, "p_scale": "depth"}),
    "p_scale twice": (LayerError, {"p_scale": {"layer1.0": 0.5, "**.0": 1}}),
    "p_scale unknown": (ValueError, {"p_scale": "deep"}),
    "p_scale a number": (ValueError, {"p_scale": 0.5}),
    "p_scale negative": (ValueError, {"p_scale": {"layer1.0": -1}}),
    "p_scale not a number": (TypeError, {"p_scale": {"layer1.0": "a"}}),
    "p_scale of one site from zero": (ValueError, {"layers": "fc", "p_scale": "depth_from_zero"}),
    "a rate above 1 by p_scale": (ValueError, {"p_scale": {"layer1.0": 20}}),
    "a schedule class": (TypeError, {"schedule": LinearSchedule}),
    "a function as schedule": (TypeError, {"schedule": abs}),
    "at unknown": (ValueError, {"at": "outputs"}),
    "on_existing unknown": (ValueError, {"on_existing": "keep"}),
    "an empty name": (InjectionError, {"name": ""}),
    "a name with a slash": (InjectionError, {"name": "a/b"}),
    "layers and a mapping": (LayerError, {"regularizer": {"fc": Dropout(0.1)}}),
    "an unknown layer as a key": (LayerError, mapping({"layer7": Dropout(0.1)})),
    "an unknown glob as a key": (LayerError, mapping({"fc": Dropout(0.1), "layer1.bn*": Dropout(0.2)})),
    "a number as a key": (LayerError, mapping({3: Dropout(0.1)})),
    "a key of two entries": (LayerError, mapping({("fc", "conv1"): Dropout(0.1), (): Dropout(0.2)})),
    "an empty mapping": (LayerError, mapping({})),
    "a string as example": (InjectionError, {"example_input": "cat.jpg"}),
    "a shape as example": (InjectionError, {"example_input": (4, 3, 8, 8)}),
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


class TestLazyModules:
    """Lazy modules create their parameters in the first forward."""

    def test_lazy_modules_are_hooked_before_their_first_forward(self) -> None:
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
        drop = inject(model, Dropout(0.5), layers="*", schedule=LinearSchedule(10))
        drop.seek(10)
        assert drop.check()
        drop.state_dict()
        print(plan(model, Dropout(0.5), layers="**", on_existing="stack"))
        drop.follow(sgd(model))
        out = model(torch.ones(1000, 4))
        assert isinstance(model[0], nn.Linear)
        assert (out == 0).float().mean() == pytest.approx(0.5, abs=0.05)
        drop.remove()
        assert not any(m._forward_hooks for m in model.modules())

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


P_SCALES = {
    "depth": [0.1, 0.2, 0.3, 0.4],
    "depth_reversed": [0.4, 0.3, 0.2, 0.1],
    "depth_from_zero": torch.linspace(0, 0.4, 4, dtype=torch.float64).tolist(),  # as in timm
    "equal": [0.4] * 4,
}


@pytest.mark.parametrize("p_scale", [*P_SCALES, lambda name, index, count: (index + 1) / count])
def test_p_scale(model: Small, p_scale: Any) -> None:
    drop = inject(model, Dropout(0.4), layers="layer?.*", p_scale=p_scale)
    expected = P_SCALES[p_scale] if isinstance(p_scale, str) else P_SCALES["depth"]
    assert [site.p for site in drop.sites] == pytest.approx(expected)


def test_layers_that_cannot_be_hooked() -> None:
    """Keras never puts its layers in eval mode; these classes are stand-ins."""
    base = type("Layer", (nn.Sequential,), {"__module__": "keras.src.layers.layer"})
    keras = type("Dense", (base,), {"__module__": "keras.src.layers.core"})
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.ReLU(), keras(nn.ReLU()), torch.jit.script(nn.ReLU()))
    inject(model, Dropout(0.1), layers=["0", "1.0"])
    assert len(layers(model[:2])) == 3
    for wrong, entry in ((model, "1"), (model, "2"), (model[2], "*")):
        with pytest.raises(InjectionError):
            inject(wrong, Dropout(0.1), layers=entry)
    for use in (find, layers, lambda m: without_hooks(m).__enter__()):
        with pytest.raises(TypeError):
            use("resnet50")
