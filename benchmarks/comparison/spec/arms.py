"""The hooks of an arm: a regularizer, a recipe, or a peer from torchvision or timm, at its rate."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import timm.layers
import torch
import torchvision.ops
from torch import Tensor, nn

import hookdrop
from comparison.spec.run_spec import Arm, suggest
from hookdrop import recipes

ELEMENTS, BISECTIONS = 200_000, 16
"""Number of elements per site for measuring a dropped fraction, and of steps to find a rate."""


class ModelArgument(nn.Identity):
    """Stands for an argument of timm's models that sets a rate."""

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        self.name, self.p = name, p


PEERS: dict[str, Callable[..., Any]] = {
    "torchvision.DropBlock2d": lambda p, block_size: torchvision.ops.DropBlock2d(p, block_size),
    "torchvision.StochasticDepth": lambda p, mode="row": torchvision.ops.StochasticDepth(p, mode),
    # Each channel has its own mask, as in the paper and in hookdrop's DropBlock.
    "timm.DropBlock2d": lambda drop_prob, block_size=7, gamma_scale=1.0: timm.layers.DropBlock2d(
        drop_prob, block_size, gamma_scale, couple_channels=False
    ),
    "timm.DropPath": lambda drop_prob: timm.layers.DropPath(drop_prob),
    "timm.drop_path_rate": lambda p: ModelArgument("drop_path_rate", p),
    "timm.drop_block_rate": lambda p: ModelArgument("drop_block_rate", p),
    "timm.drop_rate": lambda p: ModelArgument("drop_rate", p),
}
"""By the names under which configurations call them."""
for _name, _make in PEERS.items():
    _make.__module__, _make.__qualname__ = _name.split(".")


def read(kind: str, text: str) -> Any:
    """The regularizer, recipe, peer module or model argument that a text describes; it is never evaluated as code."""
    if kind == "peer":
        return _read_peer(text)
    made = hookdrop.parse(text)
    if not isinstance(made, recipes.Recipe if kind == "recipe" else hookdrop.Regularizer):
        raise ValueError(f"{text.partition('(')[0]!r} is not a {kind}.")
    return made


def _read_peer(text: str) -> Any:
    name = text.partition("(")[0].strip()
    if name not in PEERS:
        raise ValueError(f"{name!r} is not a peer.\n{suggest(name, PEERS)}")
    as_spec = {"regularizer": text, "layers": "*"}
    made = hookdrop.InjectionSpec.from_dict(as_spec, allow=list(PEERS.values())).regularizer
    if not 0 <= (rate := getattr(made, rate_name(made))) <= 1:
        raise ValueError(f"{text}: {rate_name(made)} must be in [0, 1], got {rate}.")
    return made


def rate_name(made: Any) -> str:
    """The attribute that holds the rate of a regularizer, recipe or peer; empty if it has none."""
    if isinstance(made, hookdrop.Regularizer):
        declared = type(made).rate
        return declared.attribute if declared else ""
    return next((name for name in ("p", "drop_prob") if hasattr(made, name)), "")


def rate_of(made: Any) -> float | None:
    """The rate of a regularizer, recipe or peer; None if it has none."""
    return float(getattr(made, name)) if (name := rate_name(made)) else None


def at_rate(made: Any, p: float | None) -> Any:
    """A copy at another rate; the same object for None."""
    if p is None:
        return made
    if isinstance(made, recipes.Recipe):
        return replace(made, p=p)  # type: ignore[type-var]
    twin = copy.deepcopy(made)
    setattr(twin, rate_name(made), p)
    return twin


def injection(arm: Arm, model: nn.Module, example: Tensor) -> hookdrop.InjectionSpec | None:
    """What an arm injects into a model; None for an arm without hooks."""
    if not arm.call or model_arguments(arm):
        return None
    p = arm.p
    if arm.kind == "peer" and arm.equal == "fraction":
        sites = hookdrop.plan(model, "DropPath(p=0.1)", layers=list(arm.layers), example_input=example).sites
        # The batch has no effect on the fraction.
        p = rate_for(arm.call, arm.p or 0.0, tuple((1, *site.shape[1:]) for site in sites if site.shape))
    schedule = None if arm.p is None else read_schedule(arm.schedule)
    return hookdrop.InjectionSpec(
        at_rate(read(arm.kind, arm.call), p), layers=list(arm.layers) or None, schedule=schedule
    )


def model_arguments(arm: Arm) -> dict[str, float]:
    """The arguments of the model's constructor that a peer such as `timm.drop_path_rate` sets."""
    made = read(arm.kind, arm.call) if arm.kind == "peer" else None
    return {made.name: arm.p or 0.0} if isinstance(made, ModelArgument) else {}


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
    return f"{arm.call} with {rate_name(made)}={arm.p:g}" if arm.kind == "peer" else repr(at_rate(made, arm.p))


def read_schedule(text: str) -> hookdrop.Schedule | None:
    """Parse a schedule, in steps or in fractions of the training; None for `none`.

    A bare `LinearSchedule` covers the whole training.
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


@functools.lru_cache(maxsize=256)
def rate_for(text: str, fraction: float, shapes: Sequence[tuple[int, ...]]) -> float:
    """Find the rate at which a peer drops `fraction` of the elements of all sites, by bisection with a fixed seed."""
    low, high = 0.0, 0.99
    if fraction <= 0:
        return 0.0
    module = _read_peer(text).train()
    if (most := _dropped(module, high, shapes)) < fraction:
        raise ValueError(f"{text} cannot drop {fraction:g}: it drops only {most:.3f} at rate {high}.")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _dropped(module, middle, shapes) < fraction else (low, middle)
    return (low + high) / 2


def _dropped(module: nn.Module, rate: float, shapes: Sequence[tuple[int, ...]]) -> float:
    setattr(module, rate_name(module), rate)
    zeros = elements = 0.0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for _, *shape in sorted(set(shapes)):
            torch.manual_seed(0)
            size, count = torch.Size(shape).numel(), [one[1:] for one in shapes].count(tuple(shape))
            samples = max(1, ELEMENTS // size)
            part = (module(torch.ones(samples, *shape)) == 0).double().mean().item()
            zeros += part * size * count
            elements += size * count
    return zeros / elements
