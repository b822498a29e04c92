"""Whether a trained model is, bit for bit, what it is without its hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hookdrop

_HOOK_TABLES = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


def face(model: nn.Module) -> tuple[type, str, list[str]]:
    """Class, repr and state_dict keys: what no training changes, and no injection may."""
    return type(model), repr(model), list(model.state_dict())


def changes(model: nn.Module, drop: hookdrop.Injection, x: Tensor, before: tuple[type, str, list[str]]) -> list[str]:
    """Take the hooks off, and name what is not bit-identical with them on, hidden and removed.

    Args:
        model: the trained model.
        drop: its one injection.
        x: a batch of inputs.
        before: the model's `face` before the injection.
    """
    hooked = _seen(model, x)
    with hookdrop.without_hooks(model):
        hidden = _seen(model, x)
    drop.remove()
    removed = _seen(model, x)
    found = []
    for how, bare in (("hidden", hidden), ("removed", removed)):
        found += [f"{what} with hooks {how}" for what in hooked if not _same(hooked[what], bare[what])]
    if any(seen["face"] != before for seen in (hooked, hidden, removed)):
        found.append("class, repr or state_dict keys of the model that came in")
    if any(getattr(module, table) for module in model.modules() for table in _HOOK_TABLES):
        found.append("hook dictionaries after removal")
    return found


def _seen(model: nn.Module, x: Tensor) -> dict[str, Any]:
    model.eval()
    with torch.no_grad():
        output = model(x)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return {"face": face(model), "state_dict": state, "eval output": {"": output}}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)
    return bool(a == b)
