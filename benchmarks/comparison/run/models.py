"""Build timm and torchvision models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import timm
import torchvision
from torch import nn

from comparison.run.pretrained import load_from_package
from comparison.run.pyramidnet import PyramidNet
from comparison.spec.errors import ConfigError, suggest
from comparison.spec.run_spec import Model

OWN = {"pyramidnet": PyramidNet}


def build(model: Model, classes: int, channels: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model with weights drawn from the global generator, or pretrained ones and a new head.

    Args:
        model: The architecture.
        classes: Number of classes.
        channels: Number of channels of the images.
        arguments: Further arguments of the constructor.

    Raises:
        ConfigError: The model does not exist, does not accept these settings, lacks a module of `identity`, or has no
            pretrained weights.
    """
    make = _maker(model.name, classes, channels)
    downloaded = {"pretrained": True} if model.pretrained is True else {}
    try:
        built = make(**{**model.kwargs, **downloaded, **(arguments or {})})
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, AssertionError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot build the model {model.name!r} with {dict(model.kwargs)}: {reason}") from None
    if model.pretrained == "package":
        load_from_package(built, model.name.removeprefix("timm:"), classes)
    for name in model.identity:
        _replace(built, name, model.name)
    return built


def _maker(name: str, classes: int, channels: int) -> Callable[..., nn.Module]:
    library, _, bare = name.rpartition(":")
    if library in ("", "own") and bare in OWN:
        return lambda **kwargs: OWN[bare](classes=classes, channels=channels, **kwargs)
    if library in ("", "timm") and timm.is_model(bare):
        return lambda **kwargs: timm.create_model(
            bare, **{"num_classes": classes, "in_chans": channels, "pretrained": False, **kwargs}
        )
    known = torchvision.models.list_models(module=torchvision.models)
    if library in ("", "torchvision") and bare in known:
        if channels != 3:
            raise ConfigError(
                f"torchvision's {bare} requires images with 3 channels, got {channels}: use timm:{bare}, which accepts "
                "any number, or other data."
            )
        return lambda **kwargs: torchvision.models.get_model(
            bare, **{"weights": None, "num_classes": classes, **kwargs}
        )
    known = [*OWN, *timm.list_models(), *known]
    raise ConfigError(
        f"no model is named {name!r}.\n{suggest(bare, known)}\n  see all:      timm.list_models(), "
        "torchvision.models.list_models(); timm:NAME and torchvision:NAME select the library"
    )


def _replace(model: nn.Module, name: str, title: str) -> None:
    try:
        model.get_submodule(name)
    except AttributeError:
        known = [found for found, _ in model.named_modules() if found]
        raise ConfigError(f"identity: {title} has no module {name!r}.\n{suggest(name, known)}") from None
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
