"""From an arm to hooks: the regularizer, recipe or peer at its rate, planned on a model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

import hookdrop
from comparison.spec import peers
from comparison.spec.call_syntax import Call, read, schedule_of
from comparison.spec.errors import or_nearest
from comparison.spec.run_spec import Arm
from hookdrop import recipes

RECIPES = ("dropblock_resnet", "timm_dropblock", "stochastic_depth", "residual_dropout")


def plan(arm: Arm, model: nn.Module, steps: int, example: Tensor | None) -> hookdrop.Plan | None:
    """What the arm would do to the model, in a training of so many optimizer steps; None without a regularizer.

    Raises:
        ValueError, TypeError, hookdrop.HookdropError: the arm does not fit the model, or is no arm at all.
    """
    if arm.kind == "none":
        return None
    schedule = schedule_of(arm.schedule, steps)
    if arm.kind == "recipe":
        return _plan_recipe(arm, model, schedule, example)
    regularizer = peers.make(read(arm.call), peer_rate(arm, model, example)) if arm.kind == "peer" else spelled(arm)
    if arm.p is None:
        schedule = None
    return hookdrop.plan(model, regularizer, layers=list(arm.layers), schedule=schedule, example_input=example)


def still_at_0(arm: Arm) -> bool:
    """Whether the arm does nothing at the rate 0, as its control has to; `ScaleActivationGrad` is still at 1."""
    if arm.p is None or arm.kind == "none":
        return False
    return arm.kind != "regularizer" or hookdrop.parse(spelled(arm)).neutral == 0


def spelled(arm: Arm) -> str:
    """The arm as it is written, with its rate."""
    if arm.kind == "none":
        return ""
    call = read(arm.call)
    return str(call if arm.p is None else call.having(**{rate_name(arm.kind, call): arm.p}))


def split(kind: str, text: str) -> tuple[str, float | None]:
    """A text without its rate, and the rate: `DropBlock(p=0.1, block_size=3)` is `DropBlock(block_size=3)` and 0.1.

    Raises:
        ValueError, TypeError: no such regularizer, recipe or peer, or it does not take these settings.
    """
    call = read(text)
    if kind == "regularizer":
        regularizer = hookdrop.parse(text)
        takes = inspect.signature(type(regularizer)).parameters
        name = regularizer.rate_name
        call = call.bound(*list(takes)[: len(call.args)])
        return str(call.without(*([name, "keep_prob"] if name else []))), regularizer.rate
    if kind == "peer":
        peer = peers.peer_of(call)
        call = call.bound(*peer.settings)
        peers.make(call, 0.0)
        rate = _wanted(call, peer.rate_name)
        return str(call.without(peer.rate_name)), rate
    takes = _recipe(call.name).parameters
    call = call.bound(*list(takes)[1 : 1 + len(call.args)])
    if unknown := [name for name in call.kwargs if name not in ("p", *_settings(takes))]:
        raise ValueError(
            f"{call.name} takes no {unknown[0]!r} here.\n{or_nearest(unknown[0], ['p', *_settings(takes)])}"
        )
    return str(call.without("p")), _wanted(call, "p")


def rate_name(kind: str, call: Call) -> str:
    """The setting that is the rate."""
    if kind == "peer":
        return peers.peer_of(call).rate_name
    return (getattr(hookdrop, call.name).rate_name or "p") if kind == "regularizer" else "p"


def peer_rate(arm: Arm, model: nn.Module, example: Tensor | None) -> float:
    """The peer's rate: `p` itself, or that at which it drops the fraction `p` at the sites of this model."""
    assert arm.p is not None
    if arm.equal == "p" or example is None:
        return arm.p
    sites = hookdrop.plan(model, "DropPath(p=0.1)", layers=list(arm.layers), example_input=example).sites
    return peers.rate_for(read(arm.call), arm.p, [site.shape for site in sites if site.shape])


def _plan_recipe(arm: Arm, model: nn.Module, schedule: hookdrop.Schedule | None, example: Any) -> hookdrop.Plan:
    call = read(arm.call)
    settings = {**call.kwargs, "p": arm.p, "example_input": example}
    if "schedule" in _recipe(call.name).parameters:
        settings["schedule"] = schedule
    elif isinstance(schedule, hookdrop.LinearSchedule) and (schedule.start, schedule.end, schedule.delay) == (0, 1, 0):
        settings["steps"] = schedule.steps
    elif schedule is not None:
        raise ValueError(f"{call.name} knows LinearSchedule(steps=...) alone and none, not {arm.schedule}.")
    planned: hookdrop.Plan = getattr(recipes, call.name).plan(model, **settings)
    return planned


def _recipe(name: str) -> inspect.Signature:
    if name not in RECIPES:
        raise ValueError(f"no recipe is called {name!r}.\n{or_nearest(name, RECIPES)}")
    return inspect.signature(getattr(recipes, name))


def _settings(takes: Any) -> list[str]:
    return [name for name in takes if name in ("block_size", "mode", "p_scale")]


def _wanted(call: Call, name: str) -> float:
    value = call.kwargs.get(name)
    if isinstance(value, int | float) and not (isinstance(value, bool) or 0 <= value <= 1):
        raise ValueError(f"{call}: {name} must lie in [0, 1], got {value}.")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{call} has no rate: write {call.having(**{name: 0.1})}.")
    return float(value)
