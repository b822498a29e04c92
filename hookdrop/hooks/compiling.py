"""Where hooks meet torch.compile, torch.export, torch.jit.trace and torch.fx.

Compiled code is told to look at hooks before it is reused, so a hook that is placed or removed later takes effect by
PyTorch's own guards, and no unrelated model is compiled again. The compiler takes as long to import as PyTorch itself:
nothing here imports it, and what needs it runs once something else has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Proxy

from hookdrop.errors import InjectionError, warn
from hookdrop.utils import torch_internals

OBSERVED = "measuring() and recording() see tensors.\n  measure the model uncompiled, or use probe(x), which does so."
"""Why a hook leaves the graph while it is observed."""

_INSTEAD = "in eval mode: model.eval()   or without hooks: with hookdrop.without_hooks(model): ..."

is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # since PyTorch 2.7
"""Whether `torch.export` is at work."""


outside_of_graphs: dict[str, Callable[..., Any]] = {}
"""Functions that compiled code leaves its graph for, by the reason, which PyTorch shows under `fullgraph=True`."""

_waiting: dict[str, Callable[..., Any]] | None = {}
"""Those that came before the compiler was imported; None from then on."""


def keep_outside_of_graphs(function: Callable[..., Any], reason: str) -> None:
    """Have `function` among `outside_of_graphs` under this reason; nothing if there is no reason."""
    if not reason or reason in outside_of_graphs:
        return
    if _waiting is None:
        outside_of_graphs[reason] = _disabled(function, reason)
    else:
        _waiting[reason] = function


def _disabled(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    disable: Any = torch.compiler.disable
    known = "reason" in inspect.signature(disable).parameters  # since PyTorch 2.8
    return disable(function, reason=reason) if known else disable(function)  # type: ignore[no-any-return]


_compiled_before = False
"""Whether code was compiled that does not look at hooks."""


def _prepare() -> None:
    """The compiler is imported: have it look at hooks, and mark the functions that it must not trace."""
    global _compiled_before, _waiting
    _compiled_before = torch_internals.guard_hooks()
    waiting, _waiting = _waiting or {}, None
    for reason, function in waiting.items():
        keep_outside_of_graphs(function, reason)
    torch.compiler.assume_constant_result(warn_of_export)  # type: ignore[no-untyped-call]


def notice_changed_hooks() -> None:
    """Have code that was compiled before hookdrop was imported notice its hooks: compile it again, once."""
    global _compiled_before
    if not _compiled_before:
        return
    _compiled_before = False
    torch.compiler.reset()
    warn(
        "some code was compiled by torch.compile before hookdrop was imported, and does not notice hooks: hookdrop "
        "resets the compiler once (torch.compiler.reset()), and the next calls compile again.\n"
        "  import hookdrop before the first compiled call to avoid that."
    )


def not_while_tracing(what: str) -> None:
    """Raise `InjectionError` if this runs inside a trace."""
    if torch.compiler.is_compiling() or torch_internals.is_tracing():
        raise InjectionError(f"{what} inside a trace: call it outside of the compiled or traced function.")


# --- traces, exports and symbolic graphs, which keep a hook as it is at one moment


def traced_text(where: str) -> str:
    """The error for a hook at work that `torch.jit.trace` records."""
    return (
        f"{where} inside torch.jit.trace: the trace would keep it at the rate of this moment, in eval mode too.\n"
        f"  trace {_INSTEAD}"
    )


def warn_of_export(name: str) -> bool:
    """Warn while the graph is made (`assume_constant_result`); a compiled graph itself cannot raise warnings."""
    warn(
        f"torch.export in train mode: the program keeps {name!r}, at the rate of this moment for good.\n"
        f"  export {_INSTEAD}"
    )
    return True


def is_symbolic(value: Any) -> bool:
    """Whether `value` is, or has in it, a stand-in for what a graph of `torch.fx` will compute."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value, Proxy) or (isinstance(value, tuple | list) and any(map(is_symbolic, value)))


def left_behind_text(where: str) -> str:
    """The warning for a hook that is called with a stand-in for a tensor."""
    return (
        f"{where} is not part of the graph: torch.fx traces through a module that has others in it, and leaves its "
        "hooks behind.\n  hook layers without others in them, which keep theirs, or inject into the GraphModule."
    )


torch_internals.when_compiler_is_imported(_prepare)
