"""Models of timm and torchvision, by name."""

from __future__ import annotations

from collections.abc import Callable

import timm
import torchvision
from torch import nn

from comparison.run.pyramidnet import PyramidNet
from comparison.spec.errors import ConfigError, or_nearest
from comparison.spec.run_spec import Model

OWN = {"pyramidnet": PyramidNet}


def build(model: Model, classes: int, channels: int) -> nn.Module:
    """The model with fresh weights, drawn from the global generator.

    Raises:
        ConfigError: nobody has a model of this name, it does not take these settings, or a module isn't there.
    """
    make = _maker(model.name, classes, channels)
    try:
        built = make(**model.kwargs)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, AssertionError, OSError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the model {model.name!r} can't be made with {dict(model.kwargs)}: {why}") from None
    for name in model.identity:
        _replace(built, name, model.name)
    return built


def _maker(name: str, classes: int, channels: int) -> Callable[..., nn.Module]:
    whose, _, bare = name.rpartition(":")
    if whose in ("", "own") and bare in OWN:
        return lambda **kwargs: OWN[bare](classes=classes, channels=channels, **kwargs)
    if whose in ("", "timm") and timm.is_model(bare):
        return lambda **kwargs: timm.create_model(
            bare, **{"num_classes": classes, "in_chans": channels, "pretrained": False, **kwargs}
        )
    known = torchvision.models.list_models(module=torchvision.models)
    if whose in ("", "torchvision") and bare in known:
        if channels != 3:
            raise ConfigError(
                f"torchvision's {bare} takes images of 3 channels, and these have {channels}: use timm:{bare}, whose "
                "models take any, or other data."
            )
        return lambda **kwargs: torchvision.models.get_model(
            bare, **{"weights": None, "num_classes": classes, **kwargs}
        )
    known = [*OWN, *timm.list_models(), *known]
    raise ConfigError(
        f"no model is called {name!r}.\n{or_nearest(bare, known)}\n  see all:      timm.list_models(), "
        "torchvision.models.list_models(); write timm:NAME or torchvision:NAME to say whose"
    )


def _replace(model: nn.Module, name: str, title: str) -> None:
    try:
        model.get_submodule(name)
    except AttributeError:
        known = [found for found, _ in model.named_modules() if found]
        raise ConfigError(f"identity: {title} has no module {name!r} to replace.\n{or_nearest(name, known)}") from None
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
