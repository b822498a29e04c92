"""Find the modules that are whole residual branches, which can run on a subset of the batch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn

_TIMM = {"drop_path1": ("attn", "norm1"), "drop_path2": ("mlp", "norm2")}
"""The branch that an Identity of timm's transformers ends, and the norm before it."""


def whole_branches(block: nn.Module, ends: tuple[str, ...]) -> tuple[str, ...]:
    """Return the branches of a block as modules; empty unless each branch is one, apart from a norm before it.

    Nothing but a factor may follow them in the branch, because the zeros of dropped samples must stay zeros.
    """
    found = tuple(_branches(block, ends))
    return found if len(found) == len(ends) else ()


def _branches(block: nn.Module, ends: tuple[str, ...]) -> Iterator[str]:
    for end in ends:
        module = block.get_submodule(end)
        if any(True for child in module.children() for _ in child.parameters()):
            yield end
        elif end in _TIMM and _calls_one_after_the_other(block, end, *_TIMM[end]):
            yield _TIMM[end][0]


def _calls_one_after_the_other(block: nn.Module, end: str, branch: str, norm: str) -> bool:
    """Whether the forward computes `x + end(factor * branch(norm(x)))`."""
    factor = r"(self\.ls\d\(|self\.gamma_\d \* )?"
    pattern = rf"self\.{end}\({factor}self\.{branch}\(\s*self\.{norm}\(x\)"
    try:
        return re.search(pattern, inspect.getsource(type(block).forward)) is not None
    except (OSError, TypeError):
        return False
