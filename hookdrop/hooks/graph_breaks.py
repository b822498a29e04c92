"""A hook's work kept out of compiled graphs, for a reason that PyTorch names where it may not leave one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookdrop.hooks.tracing import tell_of_export

Work = Callable[[Any, Tensor], Tensor]
"""What a hook, the first argument, does with a tensor."""

MEASURING = "measuring() and recording() see tensors.\n  measure the model uncompiled, or use probe(x), which does so."

outside_of_graphs: dict[str, Work] = {}
"""A hook's work by the reason for which it is kept out of graphs."""


def prepare_for_compiling(work: Work, reason: str) -> None:
    """Called with every hook, never while one is traced; not at import, as it loads the compiler."""
    if not outside_of_graphs:
        # Or compiled code of a model without hooks is taken for a like one with them, which then drops nothing.
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        outside_of_graphs[MEASURING] = _disabled(work, MEASURING)
        torch.compiler.assume_constant_result(tell_of_export)  # type: ignore[no-untyped-call]
    if reason and reason not in outside_of_graphs:
        outside_of_graphs[reason] = _disabled(work, reason)


def _disabled(work: Work, reason: str) -> Work:
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:  # before PyTorch 2.8
        return torch.compiler.disable(work)  # type: ignore[no-any-return, no-untyped-call]
    return torch.compiler.disable(work, reason=reason)  # type: ignore[no-any-return, no-untyped-call]
