"""Check that hooks leave a model bit-identical: digests of tensors, and the model's footprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import hookdrop

Footprint = tuple[type, str, list[str]]
_HOOK_TABLES = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the concatenated bytes of the tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def footprint(model: nn.Module) -> Footprint:
    """Class, repr and state_dict keys, which neither training nor an injection may change."""
    return type(model), repr(model), list(model.state_dict())


def changes(model: nn.Module, drop: hookdrop.Injection, x: Tensor, before: Footprint) -> list[str]:
    """Remove the hooks, and list what is not bit-identical with the hooks active, disabled and removed.

    `drop` is the only injection, and `before` the model's `footprint` before it.
    """
    hooked = _observed(model, x)
    with hookdrop.without_hooks(model):
        disabled = _observed(model, x)
    drop.remove()
    removed = _observed(model, x)
    found = [
        f"{what} with hooks {how}"
        for how, bare in (("disabled", disabled), ("removed", removed))
        for what in hooked
        if hooked[what] != bare[what]
    ]
    if any(state["footprint"] != before for state in (hooked, disabled, removed)):
        found.append("class, repr or state_dict keys of the original model")
    if any(getattr(module, table) for module in model.modules() for table in _HOOK_TABLES):
        found.append("hook tables after removal")
    return found


@torch.no_grad()
def _observed(model: nn.Module, x: Tensor) -> dict[str, Any]:
    output, state = digest([model.eval()(x)]), digest(model.state_dict().values())
    return {"footprint": footprint(model), "state_dict": state, "eval output": output}
