"""`InjectionSpec`: an injection as plain values, placed when the model and the length of the training are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from hookdrop import DropBlock, Dropout, InjectionError, LinearSchedule, StateError, find, inject
from hookdrop.integrations import InjectionSpec

DROPOUT = {"regularizer": "Dropout(p=0.1)", "layers": "0"}


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())


class TestPlace:
    def test_it_places_what_inject_places(self) -> None:
        settings: dict[str, Any] = {
            "layers": ["0", "2"],
            "exclude": "2",
            "at": "input",
            "name": "mine",
            "portable": True,
        }
        spec = InjectionSpec("DropBlock(p=0.1, block_size=3)", schedule="LinearSchedule(steps=0.5)", **settings)
        placed = spec.place(model(), total_steps=100)
        expected = inject(model(), DropBlock(0.1, 3), schedule=LinearSchedule(steps=50), **settings)
        assert placed.config == expected.config

    def test_a_mapping_and_objects_work_too(self) -> None:
        spec = InjectionSpec(
            {"0": "Dropout(p=0.1)", "2": Dropout(0.2)}, schedule=LinearSchedule(steps=1.0), p_scale="depth"
        )
        assert [site.regularizer.p for site in spec.plan(model(), total_steps=3).sites] == [0.1, 0.2]

    def test_a_recipe_is_placed_with_its_settings(self) -> None:
        torchvision = pytest.importorskip("torchvision")
        spec = InjectionSpec(
            recipe="stochastic_depth(p=0.4)", schedule="LinearSchedule(steps=1.0)", name="depth", portable=True
        )
        placed = spec.place(torchvision.models.resnet18(), total_steps=7)
        assert (placed.name, placed.target_p, placed.schedule) == ("depth", 0.4, LinearSchedule(steps=7))
        assert placed.config["portable"]

    def test_an_unknown_total_names_the_fix_and_places_nothing(self) -> None:
        net = model()
        with pytest.raises(InjectionError, match=r"total_steps=(?s:.)*No hook was placed"):
            InjectionSpec("Dropout(p=0.1)", layers="0", schedule="LinearSchedule(steps=1.0)").place(net)
        assert not find(net)


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({}, "either a regularizer and layers, or a recipe; got neither"),
            ({"regularizer": "Dropout(p=0.1)", "recipe": "stochastic_depth"}, "got both"),
            ({"regularizer": "Dropout(p=0.1)"}, "`layers` is missing"),
            ({"regularizer": "Dropuot(p=0.1)", "layers": "0"}, "did you mean: Dropout"),
            ({"regularizer": {"0": "Dropuot(p=0.1)"}}, "did you mean: Dropout"),
            ({"regularizer": "Dropout(p=2)", "layers": "0"}, "got 2"),
            (DROPOUT | {"schedule": "LinearSchedul(steps=3)"}, "did you mean: LinearSchedule"),
            (DROPOUT | {"schedule": "LinearSchedule(step=3)"}, "signature: LinearSchedule"),
            (DROPOUT | {"schedule": 0.5}, "write: schedule=LinearSchedule"),
            (DROPOUT | {"layers": ""}, "`layers` contains an empty name"),
            (DROPOUT | {"layers": [0]}, "names are strings: write '0'"),
            (DROPOUT | {"exclude": 1.5}, "`exclude` contains 1.5"),
            (DROPOUT | {"at": "inptu"}, "at must be one of"),
            (DROPOUT | {"tensor": 1.5}, "tensor must be"),
            (DROPOUT | {"p_scale": "linear"}, "p_scale must be"),
            (DROPOUT | {"name": "a/b"}, "name must be"),
            (DROPOUT | {"portable": "false"}, "portable must be"),
            (DROPOUT | {"on_existing": "keep"}, "on_existing must be"),
            ({"regularizer": {0: "Dropout(p=0.1)"}}, "names are strings: write '0'"),
            ({"regularizer": {}}, "layers"),
            ({"recipe": "stochastic_depth(p=2)"}, "p must lie in"),
            ({"recipe": "stochastic_depth(p=0.1, total_steps=9)"}, "multiple values(?s:.)*'total_steps'"),
            ({"recipe": "dropblock_resnet(p=0.1, steps=1.5)"}, "steps must be an integer"),
            ({"recipe": "stochastic_depth(p=0.1)", "portable": "false"}, "portable must be"),
            ({"regularizer": "residual_dropout(p=0.1)"}, r"write recipe='residual_dropout\(p=0.1\)'"),
            ({"recipe": "stochastic_dept(p=0.1)"}, "did you mean: stochastic_depth"),
            ({"recipe": "stochastic_depth(q=0.1)"}, "signature: stochastic_depth"),
            ({"recipe": "stochastic_depth(p=0.1)", "layers": "0"}, "does not take 'layers': remove it"),
            ({"recipe": "dropblock_resnet(p=0.1)", "schedule": "LinearSchedule(3)"}, "does not take 'schedule'"),
        ],
    )
    def test_invalid_settings_raise_before_there_is_a_model(self, settings: dict[str, Any], says: str) -> None:
        with pytest.raises((TypeError, ValueError, InjectionError), match=says):
            InjectionSpec(**settings)

    @pytest.mark.parametrize("settings", [None, "Dropout(p=0.1)", ["Dropout(p=0.1)"]])
    def test_settings_that_are_not_a_mapping(self, settings: Any) -> None:
        with pytest.raises(TypeError, match="an InjectionSpec or a mapping of its settings, got"):
            InjectionSpec.from_dict(settings)

    def test_a_key_that_yaml_reads_as_a_boolean(self) -> None:
        with pytest.raises(TypeError, match="no setting True"):
            InjectionSpec.from_dict({True: "step", **DROPOUT})  # type: ignore[dict-item]

    def test_an_unknown_setting_of_a_file_is_named(self) -> None:
        with pytest.raises(TypeError, match=r"no setting 'layer'(?s:.)*layers"):
            InjectionSpec.from_dict({"regularizer": "Dropout(p=0.1)", "layer": "0"})


class TestJSON:
    @pytest.mark.parametrize(
        "spec",
        [
            InjectionSpec(
                "Dropout(p=0.1)", layers=["0", "2"], schedule="LinearSchedule(steps=1.0)", p_scale={"0": 0.5}
            ),
            InjectionSpec(
                recipe="stochastic_depth(p=0.1)", schedule="ChainedSchedule([LinearSchedule(steps=0.5)], [])"
            ),
        ],
    )
    def test_round_trip(self, spec: InjectionSpec) -> None:
        assert InjectionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec

    def test_objects_are_saved_as_text(self) -> None:
        spec = InjectionSpec(DropBlock(0.1, 3), layers="0", schedule=LinearSchedule(steps=1.0))
        text = {"regularizer": "DropBlock(p=0.1, block_size=3)", "layers": "0", "schedule": "LinearSchedule(steps=1.0)"}
        assert spec.to_dict() == text
        assert InjectionSpec(**text).place(model(), 9).config == spec.place(model(), 9).config

    def test_functions_cannot_be_saved(self) -> None:
        with pytest.raises(StateError, match="layers=.* cannot be saved: use a string"):
            InjectionSpec("Dropout(p=0.1)", layers=lambda name, module: True).to_dict()
