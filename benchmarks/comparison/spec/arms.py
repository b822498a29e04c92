"""The hooks of an arm: a regularizer, recipe or peer at its rate."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

import hookdrop
from comparison.spec import peers
from comparison.spec.call_syntax import Call, parse_call, parse_schedule
from comparison.spec.run_spec import Arm
from hookdrop import recipes


def arguments(arm: Arm, model: nn.Module, steps: int, example: Tensor | None) -> dict[str, Any] | None:
    """The arguments of `hookdrop.inject` for a training of `steps` optimizer steps; None for an arm without hooks.

    Raises:
        ValueError, TypeError, hookdrop.HookdropError: The arm is invalid or does not fit the model.
    """
    if arm.kind in ("none", "probe") or model_arguments(arm):
        return None
    return {
        "regularizer": (
            peers.make(parse_call(arm.call), peer_rate(arm, model, example)) if arm.kind == "peer" else full_call(arm)
        ),
        "layers": list(arm.layers) or None,
        "schedule": None if arm.p is None else parse_schedule(arm.schedule),
        "total_steps": steps,
        "example_input": example,
    }


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
    if kind == "peer":
        peer = peers.peer_of(call)
        call = call.bind(*peer.settings)
        peers.check_settings(call)
        rate = _required_rate(call, peer.rate_name)
        return str(call.without(peer.rate_name)), rate
    parsed = hookdrop.parse(text)
    if not isinstance(parsed, recipes.Recipe if kind == "recipe" else hookdrop.Regularizer):
        raise ValueError(f"{call.name!r} is not a {kind}.")
    call = call.bind(*list(inspect.signature(type(parsed)).parameters)[: len(call.args)])
    name = rate_name(kind, call)
    return str(call.without(name, "keep_prob")), getattr(parsed, name, None)


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


def _required_rate(call: Call, name: str) -> float:
    value = call.kwargs.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{call} has no rate: write {call.with_settings(**{name: 0.1})}.")
    if not 0 <= value <= 1:
        raise ValueError(f"{call}: {name} must be in [0, 1], got {value}.")
    return float(value)
