"""Saving, resuming, configs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Small
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
    HookdropError,
    HookdropWarning,
    Injection,
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


def injected(**kwargs: object) -> tuple[Small, Injection]:
    torch.manual_seed(0)
    model = Small()
    settings = {"layers": "layer1.*", "schedule": LinearSchedule(20)} | kwargs
    return model, inject(model, settings.pop("regularizer", DropBlock(0.4, 3)), **settings)


def train(model: nn.Module, drop: Injection, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 3, 8, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        drop.step()
        losses.append(loss.item())
    return losses


RESUME = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_state import injected, train
saved = torch.load({path!r}, weights_only=True)
model, drop = injected()
model.load_state_dict(saved["model"])
drop.load_state_dict(saved["drop"])
torch.set_rng_state(saved["rng"])
torch.set_num_threads(1)
losses = []
for _ in range(2):
    losses += train(model, drop, 3)
    drop.enable()
torch.save((losses, model.state_dict(), drop.state_dict()), {out!r})
"""


@pytest.mark.parametrize("at", [0, 1, 7, 19, 25])
def test_a_resumed_run_is_bit_equal(at: int, tmp_path: Path) -> None:
    """In a new process, with a changed target_p and a disable() before the checkpoint."""
    model, drop = injected()
    train(model, drop, at)
    drop.target_p = 0.3
    if at == 7:
        drop.disable()
    path, out = tmp_path / "checkpoint.pt", tmp_path / "out.pt"
    torch.save({"model": model.state_dict(), "drop": drop.state_dict(), "rng": torch.get_rng_state()}, path)
    code = RESUME.format(tests=str(Path(__file__).parent), path=str(path), out=str(out))
    subprocess.run([sys.executable, "-c", code], check=True)
    losses = []
    for _ in range(2):
        losses += train(model, drop, 3)
        drop.enable()
    resumed, weights, state = torch.load(out, weights_only=True)
    assert resumed == losses
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert state == drop.state_dict()


def test_the_state_is_plain_and_small() -> None:
    _, drop = injected()
    drop.step(3)
    assert drop.state_dict() == {
        "version": 1,
        "name": "dropblock",
        "sites": ["layer1.0", "layer1.1"],
        "step_count": 3,
        "target_p": [0.4, 0.4],
        "declared_p": [0.4, 0.4],
        "enabled": True,
        "schedule": "LinearSchedule(steps=20)",
    }
    assert json.loads(json.dumps(drop.state_dict())) == drop.state_dict()


def test_a_state_under_wrappers_has_the_same_names() -> None:
    plain, wrapped = injected()[1], nn.DataParallel(Small())
    drop = inject(wrapped, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(20))
    drop.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"layers": "layer2.*"}, r"only in the state: 'layer1.0'(.|\n)*only here:         'layer2.0'"),
        ({"layers": ["layer1.*", "fc"], "regularizer": Dropout(0.1)}, r"'dropblock' in the state, 'dropout' here"),
        ({"name": "other"}, r"name: *'dropblock' in the state, 'other' here(.|\n)*strict=False"),
    ],
)
def test_a_state_of_other_sites_lists_the_differences_and_changes_nothing(kwargs: dict[str, object], says: str) -> None:
    _, saved = injected()
    saved.step(5)
    _, drop = injected(**kwargs)
    with pytest.raises(StateError, match=says):
        drop.load_state_dict(saved.state_dict())
    assert drop.step_count == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2, this hookdrop reads 1"),
        ({"step_count": -1}, "step_count must be at least 0"),
        ({"step_count": "3"}, "step_count must be a whole number"),
        ({"enabled": 1}, "enabled is 1, not a bool"),
        ({"target_p": [0.4]}, "differ in length"),
        ({"sites": "ab"}, "are not lists"),
        ({"sites": None}, "are not lists"),
        ({"target_p": [0.4, 1.4]}, r"target_p of 'layer1.1': (.|\n)*must lie in \[0, 1\]"),
        ({"target_p": [0.4, None]}, "must be a number"),
    ],
)
def test_a_damaged_state_changes_nothing(change: dict[str, object], says: str) -> None:
    _, drop = injected()
    drop.step(5)
    before = drop.state_dict()
    with pytest.raises(StateError, match=says):
        drop.load_state_dict(before | {"step_count": 9} | change)
    assert drop.state_dict() == before


@pytest.mark.parametrize("thing", [{}, [], None, {"dropblock": {}}])
def test_something_else_than_a_state(thing: object) -> None:
    _, drop = injected()
    with pytest.raises(StateError, match=r"not the state of an injection(.|\n)*find\(model\).load_state_dict"):
        drop.load_state_dict(thing)


def test_not_strict_loads_what_fits_and_says_what_does_not() -> None:
    _, saved = injected(layers=["layer1.*", "fc"], regularizer=Dropout(0.4))
    saved.target_p = 0.2
    saved.step(5)
    _, drop = injected(layers=["layer1.*", "layer2.0"], regularizer=Dropout(0.4))
    with pytest.warns(HookdropWarning, match="no partner for 1 site here and 1 of the state"):
        drop.load_state_dict(saved.state_dict(), strict=False)
    assert drop.step_count == 5
    assert [site.p for site in drop.sites] == pytest.approx([0.05, 0.05, 0.1])
    _, other = injected(layers="layer2.*", regularizer=Dropout(0.4))
    with pytest.raises(StateError, match="has none of the sites"):
        other.load_state_dict(drop.state_dict() | {"sites": ["a", "b", "c"]}, strict=False)


def test_another_schedule_in_code_wins_with_a_warning() -> None:
    _, saved = injected()
    saved.step(10)
    _, drop = injected(schedule=LinearSchedule(40))
    with pytest.warns(HookdropWarning, match=r"LinearSchedule\(steps=40\) is used; (.|\n)*LinearSchedule\(steps=20\)"):
        drop.load_state_dict(saved.state_dict())
    assert (drop.step_count, drop.p) == (10, 0.1)


def test_another_p_in_code_is_told() -> None:
    """The state's rate goes on, as an optimizer's learning rate does; not silently."""
    _, saved = injected()
    _, drop = injected(regularizer=DropBlock(0.2, 3))
    with pytest.warns(HookdropWarning, match=r"the code says 0.2 now(.|\n)*drop.target_p = 0.2"):
        drop.load_state_dict(saved.state_dict())
    assert drop.target_p == 0.4


def test_many_injections_are_saved_by_name() -> None:
    def both() -> nn.Module:
        model, _ = injected()
        inject(model, Dropout(0.5), layers="fc", schedule=LinearSchedule(10))
        return model

    one, two = both(), both()
    find(one).step(5)
    find(two).load_state_dict(find(one).state_dict())
    assert [drop.p for drop in find(two)] == [0.1, 0.25]
    with pytest.raises(StateError, match=r"only in the states: \[\](.|\n)*only here: *\['dropout'\]"):
        find(two).load_state_dict({"dropblock": find(one)["dropblock"].state_dict()})
    find(two).load_state_dict({"dropblock": find(one)["dropblock"].state_dict()}, strict=False)
    broken = find(one).state_dict() | {"dropout": {}}
    find(one).seek(9)
    broken["dropblock"] = find(one)["dropblock"].state_dict()
    with pytest.raises(StateError):
        find(two).load_state_dict(broken)
    assert [drop.step_count for drop in find(two)] == [5, 5], "a failed load must leave all as it was"
    with pytest.raises(StateError, match="a state for each name"):
        find(two).load_state_dict([])


CONFIGS = [
    {"regularizer": DropBlock(0.4, (3, 1), normalize=None), "schedule": LinearSchedule(20, delay=3)},
    {"regularizer": GaussianNoise(0.5), "schedule": ChainedSchedule([CosineSchedule(3), ConstantSchedule(0.5)], [9])},
    {"regularizer": Dropout2d(0.4), "schedule": None, "p_scale": "depth", "name": "mine"},
    {"regularizer": {"layer1.*": Dropout(0.1), "layer2.0": DropBlock(0.2, 3)}, "layers": None},
    {"regularizer": Dropout(0.1), "layers": "fc", "at": "input", "tensor": 0},
]


@pytest.mark.parametrize("kwargs", CONFIGS, ids=lambda kwargs: repr(kwargs["regularizer"]))
def test_a_config_makes_the_same_injection_again(kwargs: dict[str, object], images: torch.Tensor) -> None:
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


def test_a_config_has_the_target_not_the_rate_of_the_moment() -> None:
    _, drop = injected()
    drop.step(5)
    assert [site["regularizer"]["p"] for site in drop.config["sites"]] == [0.4, 0.4]


def test_a_config_of_the_model_itself() -> None:
    lstm = nn.LSTM(3, 3)
    drop = inject(lstm, Dropout(0.5), layers=lstm)
    assert from_config(nn.LSTM(3, 3), drop.config).sites[0].name == ""


def test_what_is_not_json_is_a_state_error() -> None:
    with pytest.raises(StateError, match="can't be written as a config(.|\n)*keep it in code"):
        _ = injected(schedule=LambdaSchedule(abs))[1].config
    with pytest.raises(StateError, match="not a plain function"):
        _ = injected(regularizer=__import__("functools").partial(torch.mul, other=1.0), schedule=None)[1].config


def test_foreign_classes_need_to_be_allowed() -> None:
    from timm.layers import DropPath

    for regularizer in (nn.Dropout2d(0.3), DropPath(0.3), torch.relu):
        schedule = None if regularizer is torch.relu else LinearSchedule(20)
        _, drop = injected(regularizer=regularizer, schedule=schedule)
        twin = Small()
        with pytest.raises(StateError, match=r"which is not hookdrop's(.|\n)*allow=\[") as error:
            from_config(twin, drop.config)
        assert "No hook was placed" in str(error.value)
        allowed = regularizer if regularizer is torch.relu else type(regularizer)
        if regularizer is torch.relu:
            continue
        assert from_config(twin, drop.config, allow=[allowed]).config == drop.config


def test_a_function_by_name_needs_to_be_allowed() -> None:
    _, drop = injected(regularizer=halve, schedule=None)
    assert from_config(Small(), drop.config, allow=[halve]).config == drop.config


def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.clear(), "not a config"),
        (lambda c: c.update(version=9), "not a config"),
        (lambda c: c.update(sites=[]), "sites must be a list of at least one site, got \\[\\]"),
        (lambda c: c.pop("at"), "lacks at"),
        (lambda c: c.update(schedule={"type": "LinearSchedul"}), r"did you mean 'LinearSchedule'\?"),
        (lambda c: c.update(schedule="linear"), "must be a mapping with a 'type'"),
        (lambda c: c["sites"][0].update(regularizer={"type": "DropBlok"}), r"did you mean 'DropBlock'\?"),
        (lambda c: c["sites"][0].update(name="layer9"), "does not have"),
        (lambda c: c["sites"][0].update(name="layer1.1"), "a site twice"),
    ],
)
def test_a_bad_config_places_nothing(change: object, says: str) -> None:
    _, drop = injected()
    config = copy.deepcopy(drop.config)
    change(config)
    twin = Small()
    with pytest.raises(HookdropError, match=says) as error:
        from_config(twin, config)
    assert isinstance(error.value, StateError | LayerError)
    assert find(twin) == ()


FUZZED = [
    *CONFIGS,
    {"regularizer": nn.Dropout2d(0.1), "schedule": EarlySchedule(3, linear=True)},
    {"regularizer": {"layer1.*": GaussianNoise(0.1), "fc": halve}, "layers": None, "schedule": None},
]
DELETE = object()
# Of every type that JSON has, and some that it has not.
WRONG = [None, True, -1, 0, 3.5, 10**400, math.nan, "x", "", "**.conv1", [], [None], {}, {"type": 5}, object(), DELETE]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value in a config is."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(part, (*path, key))


def mutations(config: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Every config with one value replaced by another or left out, and where."""
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


def refused(model: nn.Module, config: dict[str, Any]) -> str:
    """What is said of a config; empty if it is taken."""
    try:
        from_config(model, config, allow=[nn.Dropout2d, halve])
    except (StateError, LayerError) as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::hookdrop.HookdropWarning")
@pytest.mark.parametrize("kwargs", FUZZED, ids=range(len(FUZZED)))
def test_a_config_with_any_value_replaced_works_or_is_refused_before_anything_is_placed(
    kwargs: dict[str, Any], images: torch.Tensor
) -> None:
    model = Small()
    for path, config in mutations(injected(**kwargs)[1].config):
        text = refused(model, config)
        assert bool(text) != bool(find(model)), (path, config)
        if text:
            assert text.endswith("No hook was placed; the model is unchanged.")
        else:
            find(model).seek(5)
            with suppress(ShapeError):  # what a layer gives is not known before
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
        (lambda c: c["schedule"].update(steps=0.5), r"schedule is invalid: .*steps must be a whole number, got 0\.5"),
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
        (lambda c: c.update(name="a/b"), "name must be a text without '/', got 'a/b'"),
    ],
)
def test_the_error_names_the_path_and_the_value(change: Callable[[Any], None], says: str) -> None:
    config = copy.deepcopy(injected()[1].config)
    change(config)
    with pytest.raises((StateError, LayerError), match=says) as error:
        from_config(model := Small(), config)
    assert str(error.value).endswith("No hook was placed; the model is unchanged.")
    assert find(model) == ()


def test_a_config_finds_a_site_by_any_name_of_its_layer() -> None:
    relu = nn.ReLU()
    config = inject(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.ReLU()), Dropout(0.5), layers="2").config
    assert from_config(nn.Sequential(nn.Linear(3, 3), relu, relu), config).sites[0].name == "1"


class Steps(Schedule):
    """Not a dataclass: its settings can't be read off."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __repr__(self) -> str:
        return f"Steps({self.at})"

    def __call__(self, step: int) -> float:
        return float(step >= self.at)


@dataclasses.dataclass(frozen=True, repr=False)
class OwnRamp(Schedule):
    """A schedule of one's own."""

    half: int

    def __call__(self, step: int) -> float:
        return step / (step + self.half)


class Forgetful(nn.Module):
    """Takes a setting that it does not keep."""

    def __init__(self, amount: float = 0.5) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_schedule_of_ones_own_needs_to_be_allowed() -> None:
    _, drop = injected(schedule=OwnRamp(4))
    drop.step(4)
    assert drop.p == 0.2
    with pytest.raises(StateError, match=r"allow=\[OwnRamp\]"):
        from_config(Small(), drop.config)
    assert from_config(Small(), drop.config, allow=[OwnRamp]).schedule == OwnRamp(4)


def test_settings_that_can_not_be_read_off() -> None:
    with pytest.raises(StateError, match=r"Steps\(3\) is not a dataclass"):
        _ = injected(schedule=Steps(3))[1].config
    with pytest.raises(StateError, match="Forgetful at 'layer1.0' does not keep its settings"):
        _ = injected(regularizer=Forgetful(), schedule=None)[1].config


def test_an_allowed_class_that_makes_no_schedule() -> None:
    _, drop = injected(schedule=OwnRamp(4))
    config = drop.config
    config["schedule"] = {"type": f"{Small.__module__}.Small"}
    with pytest.raises(StateError, match="makes a Small, not a Schedule"):
        from_config(Small(), config, allow=[Small])


def test_sites_in_another_order_are_another_list() -> None:
    _, drop = injected()
    saved = drop.state_dict()
    with pytest.raises(StateError, match="the same sites in another order"):
        drop.load_state_dict(saved | {"sites": saved["sites"][::-1]})


def test_a_state_without_rates() -> None:
    _, drop = injected(regularizer=halve, schedule=None)
    assert drop.state_dict()["target_p"] == [None, None]
    drop.step(3)
    _, again = injected(regularizer=halve, schedule=None)
    again.load_state_dict(drop.state_dict())
    assert again.step_count == 3
