"""Configs: the JSON round trip, and errors for invalid configs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    LambdaSchedule,
    LayerError,
    LinearSchedule,
    Schedule,
    ShapeError,
    StateError,
    eject,
    find,
    from_config,
    inject,
)
from tests.support.injections import halve, injected
from tests.support.models import Small

CONFIGS = [
    {"regularizer": DropBlock(0.4, (3, 1), normalize=None), "schedule": LinearSchedule(20, delay=3)},
    {"regularizer": GaussianNoise(0.5), "schedule": ChainedSchedule([CosineSchedule(3), ConstantSchedule(0.5)], [9])},
    {"regularizer": Dropout2d(0.4), "schedule": None, "p_scale": "depth", "name": "mine", "portable": True},
    {"regularizer": {"layer1.*": Dropout(0.1), "layer2.0": DropBlock(0.2, 3)}, "layers": None},
    {"regularizer": Dropout(0.1), "layers": "fc", "at": "input", "tensor": 0},
]


@pytest.mark.parametrize("kwargs", CONFIGS, ids=lambda kwargs: repr(kwargs["regularizer"]))
def test_config_round_trip_reproduces_the_injection(kwargs: dict[str, object], images: torch.Tensor) -> None:
    model, drop = injected(**kwargs)
    text = json.dumps(drop.config)
    twin = Small()
    twin.load_state_dict(model.state_dict())
    again = from_config(twin, json.loads(text))
    again.load_state_dict(drop.state_dict())
    assert again.config == drop.config
    drop.seek(7)
    again.seek(7)
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    assert torch.equal(twin(images), expected)


def test_config_contains_the_target_rate_not_the_scheduled_rate() -> None:
    _, drop = injected()
    drop.step(5)
    assert [site["regularizer"]["p"] for site in drop.config["sites"]] == [0.4, 0.4]


def test_config_of_the_root_module() -> None:
    lstm = nn.LSTM(3, 3)
    drop = inject(lstm, Dropout(0.5), layers=lstm)
    assert from_config(nn.LSTM(3, 3), drop.config).sites[0].name == ""


def test_settings_that_are_not_json_serializable_raise() -> None:
    with pytest.raises(StateError, match="can't be saved as a config(.|\n)*keep them in code"):
        _ = injected(schedule=LambdaSchedule(abs))[1].config
    with pytest.raises(StateError, match="not a plain function"):
        _ = injected(regularizer=__import__("functools").partial(torch.mul, other=1.0), schedule=None)[1].config


def test_functions_must_be_in_allow() -> None:
    _, drop = injected(regularizer=halve, schedule=None)
    with pytest.raises(StateError, match=r"which is not part of hookdrop(.|\n)*allow=\[(.|\n)*No hook was placed"):
        from_config(Small(), drop.config)
    assert from_config(Small(), drop.config, allow=[halve]).config == drop.config


MUTATED = [
    *CONFIGS,
    {"regularizer": nn.Dropout2d(0.1), "schedule": EarlySchedule(3, linear=True)},
    {"regularizer": {"layer1.*": GaussianNoise(0.1), "fc": halve}, "layers": None, "schedule": None},
]


DELETE = object()


# Values of every JSON type, and of some other types.
WRONG = [None, True, -1, 0, 3.5, 10**400, math.nan, "x", "", "**.conv1", [], [None], {}, {"type": 5}, object(), DELETE]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all values in a config."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(part, (*path, key))


def mutations(config: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return each config with one value replaced or removed, and the path of the value."""
    for path in paths(config):
        for wrong in WRONG:
            changed = copy.deepcopy(config)
            *to, last = path
            part = functools.reduce(operator.getitem, to, changed)
            if wrong is DELETE:
                del part[last]
            else:
                part[last] = wrong
            yield path, changed


def error_text(model: nn.Module, config: dict[str, Any]) -> str:
    """Return the error message for a config, or an empty string if it is valid."""
    try:
        from_config(model, config, allow=[nn.Dropout2d, halve])
    except (StateError, LayerError) as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")
@pytest.mark.parametrize("kwargs", MUTATED, ids=range(len(MUTATED)))
def test_mutated_config_works_or_raises_before_placing_hooks(kwargs: dict[str, Any], images: torch.Tensor) -> None:
    model = Small()
    for path, config in mutations(injected(**kwargs)[1].config):
        text = error_text(model, config)
        assert bool(text) != bool(find(model)), (path, config)
        if text:
            assert text.endswith("No hook was placed; the model is unchanged.")
        else:
            find(model).seek(5)
            with suppress(ShapeError):  # a layer's output shape is not known before
                model(images)
        eject(model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(tensor=3.5), r"tensor must be an index, a key, 'all' or None, got 3\.5 \(float\)"),
        (lambda c: c.update(sites=5), r"sites must be a list of at least one site, got 5 \(int\)"),
        (lambda c: c["sites"][1].update(p_scale="a"), r"sites\[1\]\.p_scale is invalid: .* must be a number, got 'a'"),
        (lambda c: c["sites"][1].update(p_scale=9), r"p must lie in \[0, 1\], got 3\.6(.|\n)*at 'layer1\.1'"),
        (
            lambda c: c["sites"][0]["regularizer"].update(p=3),
            r"sites\[0\]\.regularizer is invalid: DropBlock: p must lie in \[0, 1\], got 3\.(.|\n)*got \{'type': 'DropBlock'",
        ),
        (lambda c: c["sites"][0]["regularizer"].update(size=3), r"sites\[0\]\.regularizer is invalid: .*'size'"),
        (lambda c: c["schedule"].update(steps=0.5), r"relative to the length of the training(?s:.)*total_steps="),
        (
            lambda c: c["sites"][0].update(p_scal=1),
            r"sites\[0\] has an unknown key 'p_scal' \(did you mean 'p_scale'\?\)",
        ),
        (lambda c: c["sites"][0].update(at="skip"), r"sites\[0\]\.branch must be the name of a layer"),
        (lambda c: c["sites"][0].update(at="skip", branch="conv9"), "'layer1.0' has no layer 'conv9'"),
        (lambda c: c["sites"][0].update(name="layer1.*"), r"'layer1\.\*' is a pattern, not the full name"),
        (
            lambda c: c["sites"][0]["regularizer"].update(per_channel="no"),
            "per_channel must be True or False, got 'no'",
        ),
        (lambda c: c.update(name="a/b"), "name must be a non-empty string without '/', got 'a/b'"),
        (lambda c: c.clear(), "not an injection config"),
        (lambda c: c.update(version=9), "not an injection config"),
        (lambda c: c.update(sites=[]), "sites must be a list of at least one site, got \\[\\]"),
        (lambda c: c.pop("at"), "lacks at"),
        (lambda c: c.update(schedule={"type": "LinearSchedul"}), r"did you mean 'LinearSchedule'\?"),
        (lambda c: c.update(schedule="linear"), "must be a mapping with a 'type'"),
        (lambda c: c["sites"][0].update(regularizer={"type": "DropBlok"}), r"did you mean 'DropBlock'\?"),
        (lambda c: c["sites"][0].update(name="layer9"), "does not have"),
        (lambda c: c["sites"][0].update(name="layer1.1"), "two sites on one layer: 'layer1.1' and 'layer1.1'"),
    ],
)
def test_invalid_config_raises_with_path_and_value_and_places_nothing(change: Callable[[Any], None], says: str) -> None:
    config = copy.deepcopy(injected()[1].config)
    change(config)
    with pytest.raises((StateError, LayerError), match=says) as error:
        from_config(model := Small(), config)
    assert str(error.value).endswith("No hook was placed; the model is unchanged.")
    assert find(model) == ()


def test_config_site_may_use_any_name_of_a_shared_layer() -> None:
    relu = nn.ReLU()
    config = inject(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.ReLU()), Dropout(0.5), layers="2").config
    assert from_config(nn.Sequential(nn.Linear(3, 3), relu, relu), config).sites[0].name == "1"


class Steps(Schedule):
    """Not a dataclass, so its settings can't be read."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __repr__(self) -> str:
        return f"Steps({self.at})"

    def __call__(self, step: int) -> float:
        return float(step >= self.at)


@dataclasses.dataclass(frozen=True, repr=False)
class OwnRamp(Schedule):
    """A custom schedule."""

    half: int

    def __call__(self, step: int) -> float:
        return step / (step + self.half)


class Forgetful(nn.Module):
    """Takes a setting that it does not store."""

    def __init__(self, amount: float = 0.5) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_custom_schedules_must_be_in_allow() -> None:
    _, drop = injected(schedule=OwnRamp(4))
    drop.step(4)
    assert drop.p == 0.2
    with pytest.raises(StateError, match=r"allow=\[.*OwnRamp\]"):
        from_config(Small(), drop.config)
    assert from_config(Small(), drop.config, allow=[OwnRamp]).schedule == OwnRamp(4)


def test_schedules_and_modules_without_readable_settings_raise() -> None:
    with pytest.raises(StateError, match=r"Steps\(3\) is not a dataclass"):
        _ = injected(schedule=Steps(3))[1].config
    with pytest.raises(StateError, match="Forgetful at 'layer1.0' does not store its settings"):
        _ = injected(regularizer=Forgetful(), schedule=None)[1].config


def test_allowed_class_that_is_not_a_schedule_raises() -> None:
    _, drop = injected(schedule=OwnRamp(4))
    config = drop.config
    config["schedule"] = {"type": f"{Small.__module__}.Small"}
    with pytest.raises(StateError, match="creates a Small, not a Schedule"):
        from_config(Small(), config, allow=[Small])


def test_a_config_with_fractions_takes_total_steps() -> None:
    config = copy.deepcopy(injected(schedule=LinearSchedule(20))[1].config)
    config["schedule"]["steps"] = 0.5
    assert from_config(Small(), config, total_steps=40).schedule == LinearSchedule(20)
