"""Invalid arguments of `inject` and `plan`, and modules that need special treatment."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
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


INVALID: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown layer": ({"layers": "layer7"}, LayerError, "does not have"),
    "unknown glob": ({"layers": "layer7.*"}, LayerError, "`layers` contains a pattern that matches no module"),
    "unknown type": ({"layers": nn.LSTM}, LayerError, "matches no module"),
    "unknown instance": ({"layers": nn.Linear(1, 1)}, LayerError, "not part of this"),
    "empty layers": ({"layers": []}, LayerError, "is empty"),
    "no layers": ({"layers": None}, LayerError, "`layers` is missing"),
    "everything excluded": ({"exclude": "**"}, LayerError, "nothing is left"),
    "a class as regularizer": ({"regularizer": DropBlock}, TypeError, r"got the class: write DropBlock\(...\)"),
    "None as regularizer": ({"regularizer": None}, TypeError, "regularizer is None"),
    "a number as regularizer": ({"regularizer": 0.1}, TypeError, "must be a module, a function"),
    "a local lambda": ({"regularizer": lambda x: x}, InjectionError, r"can't be pickled(.|\n)*instead of a lambda"),
    "a lambda in a schedule": (
        {"schedule": LambdaSchedule(lambda s: 1.0)}, InjectionError, "the schedule can't be pickled",
    ),
    "a module with parameters": ({"regularizer": nn.Linear(1, 1)}, InjectionError, r"owns parameters or buffers \(weight"),
    "a module with buffers": ({"regularizer": nn.BatchNorm2d(3, affine=False)}, InjectionError, "owns parameters or buffers"),
    "a schedule without a rate": (
        {"regularizer": no_rate, "schedule": LinearSchedule(3)}, InjectionError, "no rate to drive",
    ),
    "a module without a rate scheduled": (
        {"regularizer": nn.ReLU(), "schedule": LinearSchedule(3)}, InjectionError, "no rate to drive",
    ),
    "p_scale without a rate": ({"regularizer": no_rate, "p_scale": "depth"}, InjectionError, "no rate to scale"),
    "p_scale that matches nothing": ({"p_scale": {"fc": 0.5}}, LayerError, r"'fc', which matches none of the 2 selected"),
    "p_scale twice": ({"p_scale": {"layer1.0": 0.5, "**.0": 1}}, LayerError, "matches 'layer1.0' twice"),
    "p_scale unknown": ({"p_scale": "deep"}, ValueError, "must be 'depth', 'depth_from_zero'"),
    "p_scale a number": ({"p_scale": 0.5}, ValueError, "multiply p by it"),
    "p_scale negative": ({"p_scale": {"layer1.0": -1}}, ValueError, "must be at least 0"),
    "p_scale not a number": ({"p_scale": {"layer1.0": "a"}}, TypeError, "must be a number"),
    "p_scale of one site from zero": ({"layers": "fc", "p_scale": "depth_from_zero"}, ValueError, "factor 0"),
    "a rate above 1 by p_scale": ({"p_scale": {"layer1.0": 20}}, ValueError, r"got 2.(.|\n)*at 'layer1.0': p 0.1 x p_scale 20"),
    "a rate above 1 by schedule": ({"schedule": LinearSchedule(5, end=20)}, ValueError, "x schedule 20"),
    "a number as schedule": ({"schedule": 1000}, TypeError, r"write: schedule=LinearSchedule\(steps=N\)"),
    "a schedule class": ({"schedule": LinearSchedule}, TypeError, r"write: schedule=LinearSchedule\(steps=N\)"),
    "a function as schedule": ({"schedule": abs}, TypeError, r"of a function: LambdaSchedule\(function\)"),
    "at unknown": ({"at": "outputs"}, ValueError, "'output', 'input', 'parameters', got 'outputs'"),
    "on_existing unknown": ({"on_existing": "keep"}, ValueError, "'error', 'replace', 'stack'"),
    "an empty name": ({"name": ""}, InjectionError, "name must be a non-empty string"),
    "a name with a slash": ({"name": "a/b"}, InjectionError, "without '/'"),
    "layers and a mapping": ({"regularizer": {"fc": Dropout(0.1)}}, LayerError, "not both"),
    "a layer under two keys": (
        {"regularizer": {"layer1.*": Dropout(0.1), "**.0": Dropout(0.2)}, "layers": None}, LayerError,
        r"'layer1.0' matches more than one key of the mapping: 'layer1.\*' and '\*\*.0'",
    ),
    "an unknown layer as a key": (
        {"regularizer": {"layer7": Dropout(0.1)}, "layers": None}, LayerError, "^a key of the mapping names a module",
    ),
    "an unknown glob as a key": (
        {"regularizer": {"fc": Dropout(0.1), "layer1.bn*": Dropout(0.2)}, "layers": None}, LayerError,
        r"^a key of the mapping contains a pattern that(.|\n)*did you mean: 'layer1.\*.bn\*' \(4 modules\)",
    ),
    "a number as a key": (
        {"regularizer": {3: Dropout(0.1)}, "layers": None}, LayerError, r"^a key of the mapping contains 3 \(int\)",
    ),
    "an empty mapping": ({"regularizer": {}, "layers": None}, LayerError, "is empty"),
    "code in a string": ({"regularizer": "DropBlock(p=__import__('os').getpid())"}, ValueError, "nothing was evaluated"),
    "an unknown regularizer": ({"regularizer": "Dropoot(p=0.1)"}, ValueError, "did you mean: Dropout"),
    "an example that the model rejects": (
        {"example_input": torch.ones(4, 5)}, InjectionError, r"does not accept this example, \(4, 5\) float32",
    ),
    "a string as example": ({"example_input": "cat.jpg"}, InjectionError, "does not accept this example, str"),
    "a shape as example": (
        {"example_input": (4, 3, 8, 8)}, InjectionError, r"pass a tensor, not its shape: torch.randn\(4, 3, 8, 8\)",
    ),
    "a bad range in a glob": ({"layers": "[z-a]*"}, LayerError, "cannot parse the glob"),
    "a custom regularizer with parameters": ({"regularizer": WithWeights()}, InjectionError, "owns parameters"),
    "a custom regularizer without its rate": ({"regularizer": NoRate()}, InjectionError, "no attribute 'p'"),
    "a key of two entries": (
        {"regularizer": {("fc", "conv1"): Dropout(0.1), (): Dropout(0.2)}, "layers": None}, LayerError,
        "a key of the mapping contains",
    ),
    "a wrong rank in the example": (
        {"regularizer": Dropout1d(0.1), "example_input": torch.ones(1, 3, 8, 8)}, ShapeError, "use Dropout2d",
    ),
    "a missing tensor index": ({"tensor": 1, "example_input": torch.ones(1, 3, 8, 8)}, ShapeError, "use tensor=None"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise_and_change_nothing(model: Small, case: str) -> None:
    changes, error, says = INVALID[case]
    model.layer2[0].eval()
    settings: dict[str, Any] = {"regularizer": Dropout(0.1), "layers": "layer1.*"} | changes
    flags, rng = [m.training for m in model.modules()], torch.get_rng_state()
    with pytest.raises(error, match=says) as caught:
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
        assert len(plan(model, layers="**").sites) == 4
        with pytest.raises(InjectionError, match=r"TorchModuleWrapper\) is a Keras layer"):
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
        with pytest.raises(InjectionError, match=r"lazy parameters \('0\.weight'(.|\n)*first: model\(x\)"):
            if method == "probe":
                inject(model, Dropout(0.5), layers="0").probe(x)
            else:
                inject(model, Dropout(0.5), layers="0", example_input=x)
        assert isinstance(model[0].weight, nn.UninitializedParameter)
        assert isinstance(model[1].running_mean, nn.UninitializedBuffer)
        assert len(find(model)) == (method == "probe")


def test_script_modules_raise() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scripted = torch.jit.script(nn.ReLU())
            self.plain = nn.ReLU()

    model = Mixed()
    with pytest.raises(InjectionError, match="'scripted' is a ScriptModule"):
        inject(model, Dropout(0.1), layers="*")
    with pytest.raises(InjectionError, match="does not support Python hooks"):
        inject(model.scripted, Dropout(0.1), layers="*")
    inject(model, Dropout(0.1), layers="plain")


def test_p_scale_as_a_function(model: Small) -> None:
    drop = inject(model, Dropout(0.4), layers="layer?.*", p_scale=lambda name, index, count: (index + 1) / count)
    assert [site.p for site in drop.sites] == [0.1, 0.2, pytest.approx(0.3), 0.4]


@pytest.mark.parametrize("use", [find, lambda m: plan(m, layers="**"), lambda m: without_hooks(m).__enter__()])
def test_model_that_is_not_a_module_raises(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="must be a torch.nn.Module, got str"):
        use("resnet50")


def test_depth_from_zero_scales_rates_like_timms_linspace(model: Small) -> None:
    drop = inject(model, DropPath(0.3), layers="layer?.*", p_scale="depth_from_zero")
    expected = torch.linspace(0, 0.3, 4, dtype=torch.float64).tolist()
    assert [site.p for site in drop.sites] == pytest.approx(expected)
