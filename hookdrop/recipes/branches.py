"""What the DropBlock recipes ask about the modules of a block."""

from __future__ import annotations

from torch import nn


def has_submodules(module: nn.Module, *names: str) -> bool:
    """Whether `module` contains a submodule under each of these names."""
    try:
        return all(module.get_submodule(name) is not None for name in names)
    except AttributeError:
        return False


def norms_follow_convs(block: nn.Module) -> bool:
    """Whether each convolution comes before its norm. A pre-activation block ends with a convolution instead."""
    names = [name for name, _ in block.named_modules(remove_duplicate=False)]
    pairs = [(f"conv{i}", f"bn{i}") for i in (1, 2, 3) if has_submodules(block, f"conv{i}", f"bn{i}")]
    return all(names.index(conv) < names.index(norm) for conv, norm in pairs)
