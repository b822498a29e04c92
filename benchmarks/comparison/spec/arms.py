"""The hooks of an arm: a regularizer, recipe or peer at its rate."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

import hookdrop
from comparison.spec import peers
from comparison.spec.run_spec import Arm
from hookdrop import recipes


def injection(arm: Arm, model: nn.Module, example: Tensor | None) -> hookdrop.InjectionSpec | None:
    """What an arm injects into a model; None for an arm without hooks.

    Raises:
        ValueError, TypeError, hookdrop.HookdropError: The arm is invalid or does not fit the model.
    """
    if not arm.call or model_arguments(arm):
        return None
    made = read(arm.kind, arm.call)
    if arm.kind == "peer" and arm.equal == "fraction" and example is not None:
        assert arm.p is not None
        sites = hookdrop.plan(model, "DropPath(p=0.1)", layers=list(arm.layers), example_input=example).sites
        # The batch has no effect on the fraction.
        shapes = tuple((1, *site.shape[1:]) for site in sites if site.shape)
        made = at_rate(made, peers.rate_for(arm.call, arm.p, shapes))
    else:
        made = at_rate(made, arm.p)
    schedule = None if arm.p is None else read_schedule(arm.schedule)
    return hookdrop.InjectionSpec(made, layers=list(arm.layers) or None, schedule=schedule)


def model_arguments(arm: Arm) -> dict[str, float]:
    """The arguments of the model's constructor that a peer such as `timm.drop_path_rate` sets."""
    made = read(arm.kind, arm.call) if arm.kind == "peer" else None
    if not isinstance(made, peers.ModelArgument):
        return {}
    assert arm.p is not None
    return {made.name: arm.p}


def is_identity_at_0(arm: Arm) -> bool:
    """Whether hooks at rate 0 are the identity, as the A/A control requires; for `ScaleActivationGrad` rate 1 is."""
    if arm.p is None or not arm.call or model_arguments(arm):
        return False
    declared = type(read(arm.kind, arm.call)).rate if arm.kind == "regularizer" else None
    return declared is None or declared.neutral == 0


def text_at_rate(arm: Arm) -> str:
    """The arm's call at its rate; empty for an arm without one."""
    if not arm.call or arm.p in (None, rate_of(made := read(arm.kind, arm.call))):
        return arm.call
    # A module of another library has no text form.
    return f"{arm.call} with {peers.rate_name(made)}={arm.p:g}" if arm.kind == "peer" else repr(at_rate(made, arm.p))


def read(kind: str, text: str) -> Any:
    """The regularizer, recipe or peer that a text describes.

    Raises:
        ValueError, TypeError: It does not exist, or does not accept these settings.
    """
    if kind == "peer":
        return peers.read_peer(text)
    made = hookdrop.parse(text)
    if not isinstance(made, recipes.Recipe if kind == "recipe" else hookdrop.Regularizer):
        raise ValueError(f"{text.partition('(')[0]!r} is not a {kind}.")
    return made


def rate_of(made: Any) -> float | None:
    """The rate of a regularizer, recipe or peer; None if it has none."""
    name = peers.rate_name(made)
    return float(getattr(made, name)) if name else None


def at_rate(made: Any, p: float | None) -> Any:
    """A copy at another rate; the same object for None."""
    if p is None:
        return made
    if isinstance(made, recipes.Recipe):
        return replace(made, p=p)  # type: ignore[type-var]
    twin = copy.deepcopy(made)
    setattr(twin, peers.rate_name(made), p)
    return twin


def read_schedule(text: str) -> hookdrop.Schedule | None:
    """Parse a schedule, in steps or in fractions of the training; None for `none`.

    A bare `LinearSchedule` covers the whole training.

    Raises:
        ValueError: The schedule does not exist or does not accept these settings.
    """
    if text.strip() == "none":
        return None
    try:
        schedule = hookdrop.parse(f"{text}(1.0)" if text.strip().isidentifier() else text)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(schedule, hookdrop.Schedule):
        raise ValueError(f"{text!r} is not a schedule.")
    return schedule
