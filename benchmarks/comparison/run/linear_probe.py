"""A linear probe: train only the classifier on the features of a frozen network."""

from __future__ import annotations

from typing import Any

from torch import nn


class LinearProbe(nn.Module):
    """A timm model of which only the classifier is trained; all other layers stay in eval mode.

    Args:
        model: A timm model, which is frozen except for its classifier.

    Raises:
        TypeError: The model does not tell its classifier.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        get_classifier: Any = getattr(model, "get_classifier", None)
        if get_classifier is None:
            raise TypeError(f"a linear probe requires a timm model with get_classifier(), got {type(model).__name__}")
        self.model = model.requires_grad_(False)
        get_classifier().requires_grad_(True)

    def train(self, mode: bool = True) -> LinearProbe:
        """Keep eval mode, so that batch norm uses the statistics of the pretrained network."""
        return super().train(False)

    def forward(self, x_BCHW: Any) -> Any:
        """The model's logits."""
        return self.model(x_BCHW)
