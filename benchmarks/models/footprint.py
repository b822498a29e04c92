"""Bit-exact comparison of outputs, parameters, buffers, module structure and hooks."""

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hookdrop

KEPT = ("class", "repr", "state_dict keys", "modules", "hooks")
"""What neither training nor an injection and its removal may change."""


def tensors(value: Any) -> list[Tensor]:
    """Collect all tensors in the output of a model."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def bit_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether all tensors are equal bit for bit, including NaNs; those on the meta device have no bits."""
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and (x.is_meta or torch.equal(_bytes(x), _bytes(y)))
        for x, y in zip(a, b, strict=True)
    )


def fingerprint(model: nn.Module) -> dict[str, int]:
    """Compute a checksum per parameter and buffer; a copy of a large model would not fit in memory."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: zlib.crc32(_bytes(x).numpy().data) for name, x in named if not x.is_meta}


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


def footprint(model: nn.Module) -> dict[str, Any]:
    """Describe everything that injecting must leave unchanged, except the hooks, and that `remove` must restore."""
    modules = list(model.named_modules(remove_duplicate=False))
    return {
        "class": type(model),
        "repr": repr(model),
        "state_dict keys": list(model.state_dict(keep_vars=True)),
        "modules": [(name, type(module), id(module)) for name, module in modules],
        "parameters": [(name, id(p), p.requires_grad, p.grad is None) for name, p in model.named_parameters()],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "attributes": [sorted(vars(module)) for _, module in modules],
        "training flags": [module.training for _, module in modules],
        # The ids in each of PyTorch's tables.
        "hooks": [
            [list(table) for name, table in vars(module).items() if "hooks" in name and isinstance(table, dict)]
            for _, module in modules
        ],
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the parts in which two footprints differ."""
    return [part for part in before if before[part] != after[part]]


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the concatenated bytes of the tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def kept(model: nn.Module) -> dict[str, Any]:
    return {name: part for name, part in footprint(model).items() if name in KEPT}


def changes(model: nn.Module, drop: hookdrop.Injection, x: Tensor, before: dict[str, Any]) -> list[str]:
    """Remove the hooks, and list what is not bit-identical with them and after; `before` is what was `kept`."""
    hooked = _observed(model, x)
    drop.remove()
    removed = _observed(model, x)
    found = [f"{what} with hooks" for what in hooked if hooked[what] != removed[what]]
    return [*found, *(f"{what} after removal" for what in differences(before, kept(model)))]


@torch.no_grad()
def _observed(model: nn.Module, x: Tensor) -> dict[str, str]:
    model.eval()
    return {"eval output": digest([model(x)]), "state_dict": digest(model.state_dict().values()), "repr": repr(model)}
