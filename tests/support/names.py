"""Names of selected layers."""

from __future__ import annotations

from torch import nn

from hookdrop.injection.select import select


def names(model: nn.Module, layers: object, exclude: object = ()) -> list[str]:
    return [layer.name for layer in select(model, layers, exclude).layers]
