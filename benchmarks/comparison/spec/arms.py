"""Plan the hooks of an arm on a model: a regularizer, recipe or peer at its rate."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

import hookdrop
from comparison.spec import peers
from comparison.spec.call_syntax import Call, parse_call, parse_schedule
from comparison.spec.errors import suggest
from comparison.spec.run_spec import Arm
from hookdrop import recipes
from hookdrop.regularizers import rate_of

RECIPES = ("dropblock_resnet", "timm_dropblock", "stochastic_depth", "residual_dropout")


def plan(arm: Arm, model: nn.Module, steps: int, example: Tensor | None) -> hookdrop.Plan | None:
    """Plan the arm on the model, for a training of `steps` optimizer steps; None for an arm without hooks.

    Raises:
        ValueError, TypeError, hookdrop.HookdropError: The arm is invalid or does not fit the model.
    """
    if arm.kind in ("none", "probe") or model_arguments(arm):
        return None
    schedule = parse_schedule(arm.schedule)
    if arm.kind == "recipe":
        return _plan_recipe(arm, model, schedule, steps, example)
    regularizer = (
        peers.make(parse_call(arm.call), peer_rate(arm, model, example)) if arm.kind == "peer" else full_call(arm)
    )
    if arm.p is None:
        schedule = None
    return hookdrop.plan(
        model, regularizer, layers=list(arm.layers), schedule=schedule, total_steps=steps, example_input=example
    )


def model_arguments(arm: Arm) -> dict[str, float]:
    """The arguments of the model's constructor that a peer such as `timm.drop_path_rate` sets."""
    if arm.kind != "peer" or not peers.is_model_argument(arm.call):
        return {}
    assert arm.p is not None
    return {parse_call(arm.call).name.removeprefix("timm."): arm.p}


def is_identity_at_0(arm: Arm) -> bool:
    """Whether hooks at rate 0 are the identity, as the A/A control requires; for `ScaleActivationGrad` rate 1 is."""
    if arm.p is None or arm.kind in ("none", "probe") or model_arguments(arm):
        return False
    rate = type(hookdrop.parse(full_call(arm))).rate if arm.kind == "regularizer" else None
    return rate is None or rate.neutral == 0


def full_call(arm: Arm) -> str:
    """The arm's call including its rate."""
    if arm.kind in ("none", "probe"):
        return ""
    call = parse_call(arm.call)
    return str(call if arm.p is None else call.with_settings(**{rate_name(arm.kind, call): arm.p}))


def split_rate(kind: str, text: str) -> tuple[str, float | None]:
    """Split a call into the call without its rate, and the rate.

    `DropBlock(p=0.1, block_size=3)` becomes `DropBlock(block_size=3)` and 0.1.

    Raises:
        ValueError, TypeError: The regularizer, recipe or peer does not exist or does not accept these settings.
    """
    call = parse_call(text)
    if kind == "regularizer":
        regularizer = hookdrop.parse(text)
        takes = inspect.signature(type(regularizer)).parameters
        declared = type(regularizer).rate
        name = None if declared is None else declared.attribute
        call = call.bind(*list(takes)[: len(call.args)])
        return str(call.without(*([name, "keep_prob"] if name else []))), rate_of(regularizer)
    if kind == "peer":
        peer = peers.peer_of(call)
        call = call.bind(*peer.settings)
        peers.check_settings(call)
        rate = _required_rate(call, peer.rate_name)
        return str(call.without(peer.rate_name)), rate
    takes = _recipe(call.name).parameters
    call = call.bind(*[name for name in takes if name != "model"][: len(call.args)])
    if unknown := [name for name in call.kwargs if name not in ("p", *_settings(takes))]:
        raise ValueError(
            f"{call.name} does not accept {unknown[0]!r} here.\n{suggest(unknown[0], ['p', *_settings(takes)])}"
        )
    return str(call.without("p")), _required_rate(call, "p")


def rate_name(kind: str, call: Call) -> str:
    """The name of the setting that holds the rate."""
    if kind == "peer":
        return peers.peer_of(call).rate_name
    declared = getattr(hookdrop, call.name).rate if kind == "regularizer" else None
    return "p" if declared is None else declared.attribute


def peer_rate(arm: Arm, model: nn.Module, example: Tensor | None) -> float:
    """The peer's rate: `p` itself, or the rate at which it drops the fraction `p` at this model's sites."""
    assert arm.p is not None
    if arm.equal == "p" or example is None:
        return arm.p
    sites = hookdrop.plan(model, "DropPath(p=0.1)", layers=list(arm.layers), example_input=example).sites
    return peers.rate_for(parse_call(arm.call), arm.p, [site.shape for site in sites if site.shape])


def _plan_recipe(
    arm: Arm, model: nn.Module, schedule: hookdrop.Schedule | None, steps: int, example: Any
) -> hookdrop.Plan:
    call = parse_call(arm.call)
    if isinstance(getattr(recipes, call.name), type):
        return hookdrop.plan(model, full_call(arm), schedule=schedule, total_steps=steps, example_input=example)
    settings = {**call.kwargs, "p": arm.p, "total_steps": steps, "example_input": example}
    if "schedule" in _recipe(call.name).parameters:
        settings["schedule"] = schedule
    elif isinstance(schedule, hookdrop.LinearSchedule) and (schedule.start, schedule.end, schedule.delay) == (0, 1, 0):
        settings["steps"] = schedule.steps
    elif schedule is not None:
        raise ValueError(f"{call.name} supports only LinearSchedule(steps=...) or none, got {arm.schedule}.")
    planned: hookdrop.Plan = getattr(recipes, call.name).plan(model, **settings)
    return planned


def _recipe(name: str) -> inspect.Signature:
    if name not in RECIPES:
        raise ValueError(f"{name!r} is not a recipe.\n{suggest(name, RECIPES)}")
    return inspect.signature(getattr(recipes, name))


def _settings(takes: Any) -> list[str]:
    return [name for name in takes if name in ("block_size", "mode", "p_scale")]


def _required_rate(call: Call, name: str) -> float:
    value = call.kwargs.get(name)
    if isinstance(value, int | float) and not (isinstance(value, bool) or 0 <= value <= 1):
        raise ValueError(f"{call}: {name} must be in [0, 1], got {value}.")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{call} has no rate: write {call.with_settings(**{name: 0.1})}.")
    return float(value)
