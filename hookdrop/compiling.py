"""Being noticed by compiled code, which skips the hooks that it has not seen."""

from __future__ import annotations

import sys

import torch

from hookdrop.errors import InjectionError, warn


def not_while_tracing(what: str) -> None:
    """Raise `InjectionError` if this runs inside a trace."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        raise InjectionError(f"{what} inside a trace: call it outside of the compiled or traced function.")


def warn_of_recompile() -> None:
    """Say that compiled code is about to be thrown away; nothing if there is none."""
    if getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0):
        warn(
            "code compiled by torch.compile does not notice changed hooks: hookdrop resets the compiler "
            "(torch.compiler.reset()), and the next call compiles again.\n"
            "  inject before the first compiled call to save that."
        )


def reset() -> None:
    """Make compiled code see the hooks as they are now."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
