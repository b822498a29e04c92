"""Arguments of `inject` and `plan`, tables and warnings of plans, and modules that need special treatment."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import ClipActivationGrad, Dropout, InjectionError, LayerError, LinearSchedule, find, inject, layers, plan
from hookdrop.core.inject import place
from hookdrop.recipes import set_dropout
from tests.support.models import Small, toy
from tests.support.training import halve, sgd


class WithWeights(hookdrop.Regularizer):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p, self.weight = p, nn.Parameter(torch.ones(1))

    def regularize(self, x: torch.Tensor, rate: Any) -> torch.Tensor:
        return x * self.weight


class NoRate(hookdrop.Regularizer):
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
    "a lambda in a schedule": (InjectionError, {"schedule": hookdrop.LambdaSchedule(lambda s: 1.0)}),
    "a module with parameters": (InjectionError, {"regularizer": nn.Linear(1, 1)}),
    "a regularizer with parameters": (InjectionError, {"regularizer": WithWeights()}),
    "a regularizer without its rate": (InjectionError, {"regularizer": NoRate()}),
    "a module without a rate scheduled": (InjectionError, {"regularizer": nn.ReLU(), "schedule": RAMP}),
    "an edit without a rate scheduled": (InjectionError, {"regularizer": ClipActivationGrad(1.0), "schedule": RAMP}),
    "p_scale without a rate": (InjectionError, {"regularizer": halve, "p_scale": "depth"}),
    "p_scale twice": (LayerError, {"p_scale": {"layer1.0": 0.5, "**.0": 1}}),
    "p_scale unknown": (ValueError, {"p_scale": "deep"}),
    "p_scale a number": (ValueError, {"p_scale": 0.5}),
    "p_scale negative": (ValueError, {"p_scale": {"layer1.0": -1}}),
    "p_scale not a number": (TypeError, {"p_scale": {"layer1.0": "a"}}),
    "p_scale not a number, with a recipe": (TypeError, mapping("stochastic_depth(p=0.1)") | {"p_scale": {"*.0": True}}),
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
    "a missing tensor index": (hookdrop.ShapeError, {"tensor": 1, "example_input": IMAGE}),
}


@pytest.mark.parametrize(
    ("forward", "example", "says"),
    [
        (lambda m, x: m.fc(x["a"]), {"a": torch.ones(2, 3)}, r"is one argument of the model: pass .*=\(x,\)"),
        (lambda m, pair: m.fc(pair[0]), (torch.ones(2, 3),) * 2, r"pass example_input=\(x,\)"),
        (lambda m, a, b: m.fc(a + b), [torch.ones(2, 3)] * 2, r"is several arguments: pass example_input=tuple\(x\)"),
        (lambda m, x: m.fc(x), (torch.ones(2, 3), torch.ones(2)), r"is a batch with targets: pass x\[0\]"),
        (lambda m, a, b=None: m.fc(a), (torch.ones(2, 2),), "on the model's device"),
    ],
)
def test_an_example_of_one_argument_or_of_several(forward: Any, example: Any, says: str) -> None:
    model = toy(forward, fc=nn.Linear(3, 3))
    for source in (Dropout(0.1), set_dropout()):
        with pytest.raises(InjectionError, match=says):
            plan(model, source, layers="fc" if isinstance(source, Dropout) else None, example_input=example)


def test_a_list_of_models_gets_the_loop(model: Small) -> None:
    for models in ([model], {"a": model}):
        for call in (lambda models: inject(models, Dropout(0.1), layers="fc"), find, layers):
            with pytest.raises(TypeError, match="for several models: for model in models: inject"):
                call(models)


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise_and_change_nothing(model: Small, case: str) -> None:
    error, changes = INVALID[case]
    model.layer2[0].eval()
    settings: dict[str, Any] = {"regularizer": Dropout(0.1), "layers": "layer1.*"} | changes
    flags, rng = [m.training for m in model.modules()], torch.get_rng_state()
    with pytest.raises(error) as caught:
        inject(model, settings.pop("regularizer"), **settings)
    if case != "None as regularizer":
        assert str(caught.value).endswith("No hook was placed; the model is unchanged.")
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

    def test_example_input_and_probe_raise_for_lazy_parameters(self) -> None:
        model, x = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), torch.ones(2, 4)
        with pytest.raises(InjectionError):
            inject(model, Dropout(0.5), layers="0", example_input=x)
        assert not find(model)
        with pytest.raises(InjectionError):
            inject(model, Dropout(0.5), layers="0").probe(x)
        assert isinstance(model[0].weight, nn.UninitializedParameter)
        assert isinstance(model[1].running_mean, nn.UninitializedBuffer)


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
    for use in (find, layers, lambda m: hookdrop.without_hooks(m).__enter__()):
        with pytest.raises(TypeError):
            use("resnet50")


def test_string_regularizers_in_a_mapping(model: Small) -> None:
    drop = inject(model, {"layer1.*": "Dropout2d(p=0.1)", nn.Linear: "Dropout(p=0.5)"}, schedule=LinearSchedule(2))
    assert drop.name == "dropout2d_dropout"
    drop.step(2)
    assert [site.p for site in drop.sites] == [0.1, 0.1, 0.5]


def test_injecting_twice_raises_unless_on_existing_is_set(model: Small) -> None:
    def cell(**kwargs: Any) -> Any:
        return inject(model, hookdrop.DropBlock(0.1, 3), layers="layer?.*", **kwargs)

    cell()
    for settings in ({}, {"on_existing": "stack"}):
        with pytest.raises(InjectionError):
            cell(**settings)
    cell(on_existing="replace")
    assert len(find(model)) == 1
    cell(on_existing="stack", name="second")
    assert [drop.name for drop in find(model)] == ["dropblock", "second"]


def test_a_failure_and_a_warning_as_an_error_leave_no_hook(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(model.layer2[1], "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no more hooks"):
        inject(model, Dropout(0.1), layers="layer?.*")
    assert not find(model)
    with pytest.raises(hookdrop.HookdropWarning):  # an error in tests
        inject(model, Dropout(0.1), layers="layer1.**")
    assert not find(model)


class TestPlans:
    def test_dropout_before_batch_norm_warns(self, model: Small, images: torch.Tensor) -> None:
        """Variance shift, arXiv:1801.05134: the convolution's output is directly before the norm."""
        drafted = plan(model, Dropout(0.5), layers="**.conv1", example_input=images)
        assert "4 sites directly before a batch norm at p >= 0.3: 'layer1.0.conv1'" in drafted.warnings[-1]
        assert plan(model, Dropout(0.1), layers="**.conv1", example_input=images).warnings == []
        assert plan(model, Dropout(0.5), layers="**.bn1", example_input=images).warnings == []

    @pytest.mark.parametrize(
        ("make", "layers", "says"),
        [
            (lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), "linear2", "leaves its fused eval path"),
            (lambda: Small().requires_grad_(False), "layer1.0", "1 site on frozen layers, whose output is still"),
            (Small, "layer1.**", "8 of 10 sites are nested inside other sites(.|\n)*effective rate 0.19"),
        ],
        ids=["fused path", "frozen", "nested"],
    )
    def test_other_warnings(self, make: Callable[[], nn.Module], layers: str, says: str) -> None:
        example = torch.randn(2, 3, 16, 16) if isinstance(model := make(), Small) else None
        (warning,) = (drafted := plan(model, Dropout(0.1), layers=layers, example_input=example)).warnings
        assert re.search(says, warning)
        with pytest.warns(UserWarning, match=says):
            place(drafted)

    def test_plan_table(self, model: Small, images: torch.Tensor) -> None:
        drafted = plan(
            model, hookdrop.DropBlock(0.2, 3), layers=["layer1.*"], schedule=LinearSchedule(9), p_scale="depth",
            example_input=images,
        )  # fmt: skip
        assert str(drafted).splitlines() == [
            "2 sites of Small, LinearSchedule(steps=9)",
            "site      type   shape      read as        calls    p  regularizer",
            "--------  -----  ---------  -------------  -----  ---  ------------------------------",
            "layer1.0  Block  4x8x16x16  C=8 H=16 W=16      1  0.1  DropBlock(p=0.2, block_size=3)",
            "layer1.1  Block  4x8x16x16  C=8 H=16 W=16      1  0.2  DropBlock(p=0.2, block_size=3)",
            "'layer1.*': 2 layers",
        ]
        assert "<table>" in drafted._repr_html_()

    def test_example_input_as_tensor_tuple_or_dict(self) -> None:
        model = toy(lambda m, a, b=None: m.fc(a if b is None else a + b[0]), fc=nn.Linear(3, 3))
        x = torch.ones(2, 3)
        for example in (x, (x,), (x, [x]), {"a": x}, {"a": x, "b": [x]}):
            assert plan(model, Dropout(0.1), layers="fc", example_input=example).sites[0].shape == (2, 3)


def test_plan_at_the_input_shows_input_shapes(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, Dropout(0.1), layers=["conv1", "fc"], at="input", example_input=images)
    assert [site.shape for site in drafted.sites] == [(4, 3, 16, 16), (4, 8)]
    assert "at the input" in str(drafted)
    with pytest.raises(hookdrop.ShapeError, match=r"DropBlock at 'fc' \(input\) got \(4, 8\)"):
        inject(model, hookdrop.DropBlock(0.1), layers="fc", at="input")
        model(images)


@pytest.mark.parametrize(
    ("code", "reading"),
    [("DropPath(p=0.1)", "N=4"), ("Dropout2d(p=0.1)", "C=8 H=16 W=16"), ("FeatureAlphaDropout(p=0.1)", "C=8"),
     ("DropBlock(p=0.1, block_size=3)", "C=8 H=16 W=16"), ("Dropout(p=0.1)", "")],
)  # fmt: skip
def test_plan_shows_how_axes_are_interpreted(model: Small, images: torch.Tensor, code: str, reading: str) -> None:
    assert {site.reading for site in plan(model, code, layers="layer1.*", example_input=images).sites} == {reading}


@pytest.mark.parametrize(("shape", "reading"), [((2, 3, 4), "C=3 L=4"), ((2, 3, 4, 5, 6), "C=3 D=4 H=5 W=6")])
def test_plan_names_the_axes_of_sequences_and_volumes(shape: tuple[int, ...], reading: str) -> None:
    model = nn.Sequential(nn.Identity())
    drafted = plan(model, hookdrop.DropBlock(0.1, 2, channel_dim=1), layers="0", example_input=torch.ones(shape))
    assert drafted.sites[0].reading == reading


class TestModelThatIsOneLayer:
    """A recipe may have a site at the model itself."""

    def test_drop_key(self) -> None:
        model, example = nn.MultiheadAttention(4, 1), torch.randn(3, 5, 2, 4).unbind()
        drop = inject(model, hookdrop.recipes.drop_key(p=0.5), example_input=example)
        assert [(site.name, site.p) for site in drop.sites] == [("", 0.5)]
        assert (model(*example)[1] == 0).any()
        assert not (model.eval()(*example)[1] == 0).any()
        spec = hookdrop.InjectionSpec.from_dict(drop.spec.to_dict())
        assert inject(nn.MultiheadAttention(4, 1), spec, example_input=example).sites[0].name == ""

    def test_one_residual_block_has_the_rate_that_was_asked_for(self) -> None:
        model = toy(lambda m, x: x + m.f(x), f=nn.Linear(4, 4))
        shown = plan(model, hookdrop.recipes.stochastic_depth(p=0.2), example_input=torch.ones(2, 4))
        assert [(site.name, site.p) for site in shown.sites] == [("f", 0.2)]

    @pytest.mark.parametrize("name", hookdrop.recipes.RECIPE_NAMES)
    def test_no_error_is_about_arguments_that_were_not_passed(self, name: str) -> None:
        with pytest.raises(LayerError, match=name) as error:
            plan(nn.Linear(4, 4), getattr(hookdrop.recipes, name)(), example_input=torch.ones(2, 4))
        assert not re.search("`layers`|p_scale", str(error.value))
