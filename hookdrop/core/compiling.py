"""Integration with torch.compile, torch.export, torch.jit.trace and torch.fx.

Compiled code guards on hooks, so hooks that are placed or removed later take effect without recompiling unrelated
models. Importing the compiler takes as long as importing PyTorch itself, so this module never does: code that needs
the compiler runs after something else has imported it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Proxy

from hookdrop.core import torch_internals
from hookdrop.core.errors import InjectionError, warn

ALTERNATIVES = "in eval mode: model.eval()   or without hooks: with hookdrop.without_hooks(model): ..."


def is_exporting() -> bool:
    """Whether this is `torch.export`: a constant of a trace. PyTorch 2.11 traces its own function as True."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()  # since PyTorch 2.7


class GraphBreak:
    """A function that compiled code calls outside of the graph. PyTorch shows the reason under `fullgraph=True`."""

    def __init__(self, function: Callable[..., Any], reason: str) -> None:
        self.call, self.reason = function, reason
        torch_internals.when_compiler_is_imported(self._disable)

    def _disable(self) -> None:
        disable: Any = torch.compiler.disable
        known = "reason" in inspect.signature(disable).parameters  # since PyTorch 2.8
        self.call = disable(self.call, reason=self.reason) if known else disable(self.call)


graph_break = lru_cache(maxsize=1024)(GraphBreak)
_compiled_before = False  # whether code was compiled without guards on hooks


def _prepare() -> None:
    """Enable guards on hooks and mark the functions that must not be traced, once the compiler is imported."""
    global _compiled_before
    _compiled_before = torch_internals.enable_hook_guards()
    mark_constant: Any = torch.compiler.assume_constant_result
    for function in (is_exporting, warn_of_export, warn_of_redraws, *torch_internals.constants_of_a_trace):
        mark_constant(function)


def reset_stale_compiler() -> None:
    """Reset the compiler once, if code was compiled before hookdrop was imported: such code ignores hooks."""
    global _compiled_before
    if not _compiled_before:
        return
    _compiled_before = False
    torch.compiler.reset()
    warn(
        "some code was compiled by torch.compile before hookdrop was imported, and this code ignores hooks. hookdrop "
        "resets the compiler once (torch.compiler.reset()), so the next calls recompile.\n"
        "  to avoid this, import hookdrop before the first compiled call."
    )


def raise_if_tracing(what: str) -> None:
    if torch.compiler.is_compiling() or torch_internals.is_tracing():
        raise InjectionError(f"{what} cannot run inside a trace: call it outside the compiled or traced function.")


# --- traces, exports and symbolic graphs, which freeze the state of a hook


def warn_of_export(name: str) -> bool:
    """Warn during tracing (`assume_constant_result`), because a compiled graph cannot raise warnings."""
    warn(
        f"torch.export in training mode: the exported program keeps {name!r} at its current rate.\n"
        f"  export {ALTERNATIVES}"
    )
    return True


def warn_of_redraws(where: str) -> bool:
    """Warn during tracing, if the compiled code may recompute a random function of other code in the backward pass."""
    if torch_internals.recomputes_forward():
        warn(
            f"{where}: with an activation_memory_budget below 1, compiled code may recompute it in the backward pass. "
            "If it draws random numbers, the recompute draws others, and the gradients are wrong.\n"
            "  use one of hookdrop's regularizers, or set torch._functorch.config.activation_memory_budget = 1."
        )
    return True


def is_symbolic(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value, Proxy) or (isinstance(value, tuple | list) and any(map(is_symbolic, value)))


torch_internals.when_compiler_is_imported(_prepare)
