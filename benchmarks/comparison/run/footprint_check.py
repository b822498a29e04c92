"""Check that hooks leave a model bit-identical."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import hookdrop
from models import footprint

KEPT = ("class", "repr", "state_dict keys", "modules", "hooks")
"""What neither training nor an injection and its removal may change."""


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the concatenated bytes of the tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def kept(model: nn.Module) -> dict[str, Any]:
    """The parts of the model's footprint that stay."""
    return {name: part for name, part in footprint.footprint(model).items() if name in KEPT}


def changes(model: nn.Module, drop: hookdrop.Injection, x: Tensor, before: dict[str, Any]) -> list[str]:
    """Remove the hooks, and list what is not bit-identical with them and after; `before` is what was `kept`."""
    hooked = _observed(model, x)
    drop.remove()
    removed = _observed(model, x)
    found = [f"{what} with hooks" for what in hooked if hooked[what] != removed[what]]
    return [*found, *(f"{what} after removal" for what in footprint.differences(before, kept(model)))]


@torch.no_grad()
def _observed(model: nn.Module, x: Tensor) -> dict[str, str]:
    model.eval()
    return {"eval output": digest([model(x)]), "state_dict": digest(model.state_dict().values()), "repr": repr(model)}
