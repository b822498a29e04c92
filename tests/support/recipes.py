"""Models for the tests of recipes."""

from __future__ import annotations

from torch import nn


def randomize_norms(model: nn.Module) -> nn.Module:
    """Randomize norms and layer scales, so that no residual branch is initialized to 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "layer_scale" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model
