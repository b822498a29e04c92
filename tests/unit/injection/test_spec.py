"""`InjectionSpec`: an injection as plain values, placed when the model and the length of the training are known."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    ChainedSchedule,
    ConstantSchedule,
    CosineSchedule,
    DropBlock,
    Dropout,
    Dropout2d,
    EarlySchedule,
    GaussianNoise,
    InjectionError,
    InjectionSpec,
    LambdaSchedule,
    LinearSchedule,
    Schedule,
    StateError,
    inject,
    plan,
)
from tests.support.injections import halve, injected
from tests.support.models import Small
from tests.unit.recipes.test_base import blocks, every_linear

DROPOUT = {"regularizer": "Dropout(p=0.1)", "layers": "0"}


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


@dataclasses.dataclass(frozen=True)
class OwnRamp(Schedule):
    """A custom schedule."""

    half: int

    def __call__(self, step: int) -> float:
        return step / (step + self.half)


class TestInject:
    def test_it_places_what_inject_places(self) -> None:
        settings: Any = {"layers": ["0", "2"], "exclude": "2", "at": "input", "name": "mine", "portable": True}
        spec = InjectionSpec("DropBlock(p=0.1, block_size=3)", schedule="LinearSchedule(steps=0.5)", **settings)
        placed = inject(model(), spec, total_steps=100)
        expected = inject(model(), DropBlock(0.1, 3), schedule=LinearSchedule(steps=50), **settings)
        assert placed.spec.to_dict() == expected.spec.to_dict()

    def test_a_mapping_and_objects_work_too(self) -> None:
        spec = InjectionSpec(
            {"0": "Dropout(p=0.1)", "2": Dropout(0.2)}, schedule=LinearSchedule(steps=1.0), p_scale="depth"
        )
        assert [site.target for site in plan(model(), spec, total_steps=3).sites] == [0.1, 0.2]

    def test_a_spec_has_all_settings(self) -> None:
        with pytest.raises(TypeError):
            inject(model(), InjectionSpec(**DROPOUT), layers="2")


class TestRoundTrip:
    @pytest.mark.parametrize(
        "settings",
        [
            {"regularizer": DropBlock(0.4, (3, 1), normalize=None), "schedule": LinearSchedule(20, delay=3)},
            {
                "regularizer": GaussianNoise(0.5),
                "schedule": ChainedSchedule([CosineSchedule(3), ConstantSchedule(0.5)], [9]),
            },
            {"regularizer": Dropout2d(0.4), "schedule": None, "p_scale": "depth", "name": "mine", "portable": True},
            {"regularizer": {"layer1.*": Dropout(0.1), "layer2.0": DropBlock(0.2, 3)}, "layers": None},
            {"regularizer": Dropout(0.1), "layers": "fc", "at": "input", "tensor": 0},
            {"regularizer": nn.Dropout2d(0.1), "schedule": EarlySchedule(3, linear=True)},
            {"regularizer": {"layer1.*": GaussianNoise(0.1), "fc": halve}, "layers": None, "schedule": None},
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
        drop.seek(7)
        again.seek(7)
        torch.manual_seed(1)
        expected = first(images)
        torch.manual_seed(1)
        assert torch.equal(twin(images), expected)

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
        functions = {"layers": len, "schedule": LambdaSchedule(abs), "regularizer": partial(torch.mul, other=1.0)}
        for name, function in functions.items():
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
        with pytest.raises((TypeError, ValueError, InjectionError)):
            InjectionSpec(**settings)

    @pytest.mark.parametrize(
        "settings",
        [{"layers": "0"}, None, "Dropout(p=0.1)", [], {True: "step", **DROPOUT}, {"regularizer": "Dropout(p=0.1)", "layer": "0"}],
        ids=str,
    )  # fmt: skip
    def test_a_file_with_invalid_settings_raises(self, settings: Any) -> None:
        with pytest.raises(TypeError):
            InjectionSpec.from_dict(settings)


def test_layers_and_exclude_may_be_generators() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    drop = inject(model, Dropout(0.1), layers=(name for name in ["0", "1"]), exclude=(name for name in ["1"]))
    assert [site.name for site in drop.sites] == ["0"]
