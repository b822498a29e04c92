"""What is saved of an injection: the spec, plain values that are placed again, and the state; recipes are such values."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, Dropout2d, InjectionSpec, LinearSchedule, StateError, find, inject, plan
from hookdrop.core.recipe import Recipe, RecipeSite
from tests.support.models import Small, pair
from tests.support.training import halve, injected, seeded

DROPOUT = {"regularizer": "Dropout(p=0.1)", "layers": "0"}
CHAINED = hookdrop.ChainedSchedule([hookdrop.CosineSchedule(3), hookdrop.LateSchedule(2)], [9])


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())


class OwnDropout(Dropout):
    def __init__(self, p: float = 0.1, every: int = 1, **settings: int) -> None:
        super().__init__(p)


class OwnModule(nn.Dropout):
    def __init__(self, p: float = 0.1, every: int = 1) -> None:
        super().__init__(p)


class OwnSchedule(LinearSchedule):
    def __init__(self, every: int) -> None:
        super().__init__(every)


@dataclass(frozen=True)
class OwnRamp(hookdrop.Schedule):
    half: int

    def __call__(self, step: int) -> float:
        return step / (step + self.half)


@dataclass(frozen=True)
class every_linear(Recipe):
    """A toy recipe: two groups of two sites."""

    p: float = 0.2

    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        return [RecipeSite(name, Dropout(self.p), factor=0.5, group=name.partition(".")[0]) for name in linear]


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))


class TestInject:
    def test_it_places_what_inject_places(self) -> None:
        settings: Any = {"layers": ["0", "2"], "exclude": "2", "at": "input", "name": "mine", "portable": True}
        spec = InjectionSpec("DropBlock(p=0.1, block_size=3)", schedule="LinearSchedule(steps=0.5)", **settings)
        placed = inject(model(), spec, total_steps=100)
        expected = inject(model(), DropBlock(0.1, 3), schedule=LinearSchedule(steps=50), **settings)
        assert placed.spec.to_dict() == expected.spec.to_dict()

    def test_a_mapping_and_objects_work_too(self) -> None:
        regularizers = {"0": "Dropout(p=0.1)", "2": Dropout(0.2)}
        spec = InjectionSpec(regularizers, schedule=LinearSchedule(steps=1.0), p_scale="depth")
        assert [site.target for site in plan(model(), spec, total_steps=3).sites] == [0.1, 0.2]

    def test_a_spec_has_all_settings(self) -> None:
        with pytest.raises(TypeError):
            inject(model(), InjectionSpec(**DROPOUT), layers="2")


class TestRoundTrip:
    @pytest.mark.parametrize(
        "settings",
        [
            {"regularizer": DropBlock(0.4, (3, 1), normalize=None), "schedule": LinearSchedule(20, delay=3)},
            {"regularizer": hookdrop.GaussianNoise(0.5), "schedule": CHAINED},
            {"regularizer": Dropout2d(0.4), "schedule": None, "p_scale": "depth", "name": "mine", "portable": True},
            {"regularizer": {"layer1.*": Dropout(0.1), "layer2.0": DropBlock(0.2, 3)}, "layers": None},
            {"regularizer": Dropout(0.1), "layers": "fc", "at": "input", "tensor": 0},
            {"regularizer": nn.Dropout2d(0.1), "schedule": hookdrop.EarlySchedule(3, linear=True)},
            {"regularizer": {"layer1.*": hookdrop.GaussianNoise(0.1), "fc": halve}, "layers": None, "schedule": None},
        ],
        ids=["tuple", "chained", "portable", "mapping", "input", "module", "function"],
    )
    def test_spec_of_a_handle_reproduces_the_injection(self, settings: dict[str, Any], images: torch.Tensor) -> None:
        first, drop = injected(**settings)
        drop.step(2)
        spec = InjectionSpec.from_dict(json.loads(json.dumps(drop.spec.to_dict())), allow=[halve, nn.Dropout2d])
        twin = Small()
        twin.load_state_dict(first.state_dict())
        again = inject(twin, spec)
        again.load_state_dict(drop.state_dict())
        assert again.spec.to_dict() == drop.spec.to_dict()
        assert spec == drop.spec
        drop.seek(7)
        again.seek(7)
        assert torch.equal(seeded(twin, images), seeded(first, images))

    def test_equality(self) -> None:
        spec = InjectionSpec("Dropout(p=0.1)", layers="fc", schedule="LinearSchedule(4)")
        assert spec == InjectionSpec(Dropout(0.1), layers="fc", schedule=LinearSchedule(steps=4))
        assert spec != InjectionSpec("Dropout(p=0.2)", layers="fc", schedule="LinearSchedule(4)")
        assert spec != spec.to_dict()
        assert spec == InjectionSpec("Dropout(p=0.1)", layers=["fc"], schedule="LinearSchedule(4)")
        linear = partial(InjectionSpec, Dropout(0.1), layers=nn.Linear)
        assert linear() == linear(schedule=hookdrop.ConstantSchedule())
        chosen = InjectionSpec("Dropout(p=0.1)", layers=lambda name, module: True)
        assert chosen == copy.copy(chosen)
        assert chosen != InjectionSpec("Dropout(p=0.1)", layers=lambda name, module: True)

    def test_the_root_module(self) -> None:
        lstm = nn.LSTM(3, 3)
        drop = inject(lstm, Dropout(0.5), layers=lstm, p_scale={lstm: 0.5})
        again = inject(nn.LSTM(3, 3), InjectionSpec.from_dict(drop.spec.to_dict()))
        assert [(site.name, site.p) for site in again.sites] == [("", 0.25)]

    def test_a_recipe_runs_again_and_must_choose_the_same_sites(self) -> None:
        drop = inject(blocks(), every_linear(p=0.4), exclude="1.1", p_scale="depth")
        spec = InjectionSpec.from_dict(drop.spec.to_dict(), allow=[every_linear])
        assert [site.p for site in inject(blocks(), spec).sites] == [site.p for site in drop.sites]
        with pytest.raises(StateError):
            inject(blocks().append(nn.Linear(4, 4)), spec)
        for layers in ("0.0", ["0.0"]):
            with pytest.raises(StateError):
                plan(blocks(), InjectionSpec(every_linear(p=0.4), layers=layers))
            one = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
            assert [site.name for site in plan(one, InjectionSpec(every_linear(p=0.4), layers=layers)).sites] == ["0.0"]

    def test_functions_cannot_be_saved(self) -> None:
        own = {"layers": len, "schedule": hookdrop.LambdaSchedule(abs), "regularizer": partial(torch.mul, other=1.0)}
        for name, function in own.items():
            with pytest.raises(StateError):
                InjectionSpec(**DROPOUT | {name: function}).to_dict()

    def test_classes_from_elsewhere_must_be_allowed(self) -> None:
        spec = InjectionSpec("Dropout(p=0.1)", layers="0", schedule=OwnRamp(4))
        with pytest.raises(ValueError):
            InjectionSpec.from_dict(spec.to_dict())
        assert InjectionSpec.from_dict(spec.to_dict(), allow=[OwnRamp]).schedule == OwnRamp(4)
        short = {"regularizer": "Dropout(p=0.5)", "layers": "0", "schedule": "OwnRamp(4)"}
        assert InjectionSpec.from_dict(short, allow=[OwnRamp]).schedule == OwnRamp(4)
        other = type("OwnRamp", (OwnRamp,), {"__module__": "elsewhere"})
        with pytest.raises(ValueError):
            InjectionSpec.from_dict(short, allow=[OwnRamp, other])  # which one?
        with pytest.raises(ValueError, match="write 'torch.nn.modules.dropout.Dropout'"):
            InjectionSpec.from_dict({"regularizer": "nn.Dropout(0.1)"}, allow=[nn.Dropout])
        with pytest.raises(TypeError, match="must be a list"):
            InjectionSpec.from_dict(short, allow=OwnRamp)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("settings", "hidden"),
        [
            ({"regularizer": OwnDropout(every=2)}, "every"),
            ({"regularizer": OwnModule(every=2)}, "every"),
            ({"schedule": OwnSchedule(every=2)}, "every"),
            ({"regularizer": OwnDropout(after=2)}, "**settings"),
        ],
        ids=["regularizer", "module", "schedule", "any arguments"],
    )
    def test_an_argument_that_is_not_stored_raises(self, settings: dict[str, Any], hidden: str) -> None:
        drop = inject(model(), **{"regularizer": Dropout(0.1), "layers": "0"} | settings)
        with pytest.raises(StateError, match=re.escape(hidden)):
            drop.spec.to_dict()
        drop.load_state_dict(drop.state_dict())


class TestErrors:
    """`inject` makes a spec of its arguments: test_resolve.py has those that it refuses."""

    @pytest.mark.parametrize(
        "settings",
        [
            DROPOUT | {"regularizer": "LinearSchedule(steps=3)"},
            DROPOUT | {"layers": [0]},
            DROPOUT | {"exclude": 1.5},
            DROPOUT | {"tensor": 1.5},
            DROPOUT | {"portable": "false"},
            {"regularizer": {0: "Dropout(p=0.1)"}},
            {"regularizer": "set_dropout(p=0.1)", "at": "input"},
            {"regularizer": "set_dropout(p=0.1)", "layers": nn.Dropout},
            {"regularizer": "set_dropout(p=2)"},
        ],
        ids=str,
    )
    def test_invalid_settings_raise_before_there_is_a_model(self, settings: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError, hookdrop.InjectionError)):
            InjectionSpec(**settings)

    @pytest.mark.parametrize(
        "settings",
        [{"layers": "0"}, None, "Dropout(p=0.1)", [], {True: "step", **DROPOUT}, {"regularizer": "Dropout(p=0.1)", "layer": "0"}],
        ids=str,
    )  # fmt: skip
    def test_a_file_with_invalid_settings_raises(self, settings: Any) -> None:
        with pytest.raises(TypeError):
            InjectionSpec.from_dict(settings)

    def test_settings_of_inject_and_a_mapping_of_settings_name_the_call_that_works(self) -> None:
        with pytest.raises(TypeError, match=r"of inject itself: inject\(model, spec, total_steps=N"):
            InjectionSpec.from_dict(DROPOUT | {"total_steps": 10})
        with pytest.raises(TypeError, match=r"write: inject\(model, InjectionSpec\.from_dict\(settings\)\)"):
            inject(nn.Sequential(nn.Linear(2, 2)), DROPOUT)


def test_layers_and_exclude_may_be_generators() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    drop = inject(model, Dropout(0.1), layers=(name for name in ["0", "1"]), exclude=(name for name in ["1"]))
    assert [site.name for site in drop.sites] == ["0"]


class TestRecipe:
    def test_it_takes_the_arguments_of_inject(self) -> None:
        model = blocks()
        drop = inject(model, every_linear(), p_scale="depth", schedule=LinearSchedule(steps=2), exclude="1.1")
        drop.step(2)
        assert {site.name: site.p for site in drop.sites} == pytest.approx({"0.0": 0.05, "0.1": 0.05, "1.0": 0.1})
        assert drop.name == "every_linear"

    def test_exclude_takes_names_of_groups_but_not_of_all_sites(self) -> None:
        assert [site.name for site in plan(blocks(), every_linear(), exclude="0").sites] == ["1.0", "1.1"]
        with pytest.raises(hookdrop.LayerError):
            plan(blocks(), every_linear(), exclude="*")

    @pytest.mark.parametrize("argument", [{"layers": "0"}, {"at": "input"}, {"tensor": 0}])
    def test_it_chooses_its_own_layers(self, argument: dict[str, Any]) -> None:
        model = blocks()
        with pytest.raises(TypeError, match="chooses its layers"):
            inject(model, every_linear(), **argument)
        assert not find(model)


def changed(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return saved | {"injections": {name: one | changes for name, one in saved["injections"].items()}}


def test_state_dict_contents() -> None:
    _, drop = injected()
    drop.step(3)
    drop.target_p = 0.2
    wrapped = inject(nn.DataParallel(Small()), DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(20))
    spec = {"regularizer": "DropBlock(p=0.4, block_size=3)", "layers": ["layer1.0", "layer1.1"]}
    spec |= {"schedule": "LinearSchedule(steps=20)", "name": "dropblock"}
    rates = {"target_p": [0.2, 0.2], "start": [0.0, 0.0]}
    saved = {"step_count": 3, "enabled": True, "sites": ["layer1.0", "layer1.1"], **rates}
    assert drop.state_dict() == {"version": 2, "injections": {"dropblock": saved | {"spec": json.dumps(spec)}}}
    wrapped.load_state_dict(json.loads(json.dumps(drop.state_dict())))
    assert wrapped.state_dict() == drop.state_dict()


INVALID: dict[str, list[object]] = {
    "step_count": [-1, "3"], "enabled": [1], "target_p": [[0.4], [0.4, 1.4], [0.4, None], None], "spec": [None, "{", "[]"],
    "start": [[0.0]],
}  # fmt: skip


class TestState:
    def test_invalid_states_raise_and_change_nothing(self) -> None:
        _, drop = injected()
        drop.step(5)
        before = drop.state_dict()
        for key, value in [(key, value) for key, values in INVALID.items() for value in values]:
            with pytest.raises(StateError):
                drop.load_state_dict(changed(before, **{"step_count": 9} | {key: value}))
            assert drop.state_dict() == before
        for thing in ({}, [], None, {"dropblock": {}}, {"version": 1, "injections": {}}):
            with pytest.raises(StateError):
                drop.load_state_dict(thing)  # type: ignore[arg-type]

    def test_non_strict_load_warns_about_unmatched_sites(self) -> None:
        _, saved = injected(layers=["layer1.*", "fc"], regularizer=Dropout(0.4))
        saved.target_p = 0.2
        saved.step(5)
        _, drop = injected(layers=["layer1.*", "layer2.0"], regularizer=Dropout(0.4))
        with pytest.warns(hookdrop.HookdropWarning, match="1 site only here"):
            drop.load_state_dict(saved.state_dict(), strict=False)
        assert drop.step_count == 5
        assert [site.p for site in drop.sites] == pytest.approx([0.05, 0.05, 0.1])
        for name in (None, "another"):
            _, other = injected(layers="fc" if name is None else "layer1.*", regularizer=Dropout(0.4), name=name)
            with pytest.raises(StateError):
                other.load_state_dict(drop.state_dict(), strict=False)

    @pytest.mark.parametrize(
        ("kwargs", "says"),
        [
            ({"schedule": LinearSchedule(40)}, "schedule: "),
            ({"regularizer": DropBlock(0.2, 5)}, "p=0.2, block_size=5"),
            ({"p_scale": {"layer1.0": 0.5}}, "p_scale: "),
        ],
    )
    def test_loading_keeps_the_settings_of_the_code_and_warns(self, kwargs: dict[str, object], says: str) -> None:
        _, saved = injected()
        saved.step(10)
        _, drop = injected(**kwargs)
        with pytest.warns(hookdrop.HookdropWarning, match=says):
            drop.load_state_dict(saved.state_dict())
        assert (drop.step_count, drop.target_p) == (10, 0.4)

    def test_state_dict_of_all_injections_by_name(self) -> None:
        def both() -> nn.Module:
            model, _ = injected()
            inject(model, Dropout(0.5), layers="fc", schedule=LinearSchedule(10))
            return model

        one, two = both(), both()
        find(one).step(5)
        find(two).load_state_dict(find(one).state_dict())
        assert [drop.p for drop in find(two)] == [0.1, 0.25]
        part = find(one)["dropblock"].state_dict()
        with pytest.raises(StateError):
            find(two).load_state_dict(part)
        find(two).load_state_dict(part, strict=False)
        broken = find(one).state_dict()
        broken["injections"]["dropout"] = {}
        broken["injections"]["dropblock"]["step_count"] = 9
        with pytest.raises(StateError):
            find(two).load_state_dict(broken)
        assert [drop.step_count for drop in find(two)] == [5, 5], "a failed load must change nothing"

    def test_sites_in_a_different_order_are_matched_by_name(self) -> None:
        _, drop = injected()
        drop.load_state_dict(changed(drop.state_dict(), sites=["layer1.1", "layer1.0"], target_p=[0.3, 0.4]))
        assert {sink.site: sink.target for sink in drop._sinks} == {"layer1.0": 0.4, "layer1.1": 0.3}

    def test_state_dict_without_rates(self) -> None:
        """A function and a lambda have no text form, but their state can be saved."""
        _, drop = injected(regularizer=halve, schedule=None)
        assert drop.state_dict()["injections"]["halve"]["target_p"] == [None, None]
        drop.step(3)
        _, again = injected(regularizer=halve, schedule=None)
        again.load_state_dict(drop.state_dict())
        assert again.step_count == 3

    @pytest.mark.parametrize(
        ("regularizer", "settings", "target"), [(torch.relu, {}, 0.1), (Dropout(0.3), {"p_scale": {"0.0": 2.0}}, 0.9)]
    )
    def test_loading_wrong_rates_changes_nothing(self, regularizer: Any, settings: Any, target: float) -> None:
        """The first has no rate, and the second is out of range after p_scale."""
        model = pair()
        drop = inject(model, regularizer, layers="*.0", **settings)
        before = drop.state_dict()
        with pytest.raises(StateError):
            drop.load_state_dict(changed(before, target_p=[target, target], step_count=77, enabled=False))
        assert drop.state_dict() == before
