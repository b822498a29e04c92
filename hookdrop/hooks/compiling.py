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
    frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    if frames and _somebody_compiles():
        warn(
            "code compiled by torch.compile does not notice changed hooks: hookdrop resets the compiler "
            "(torch.compiler.reset()), and the next call compiles again.\n"
            "  inject before the first compiled call to save that."
        )


def reset() -> None:
    """Make compiled code see the hooks as they are now."""
    if "torch._dynamo" in sys.modules:
        _somebody_compiles()
        torch.compiler.reset()


_backends_seen = False


def _somebody_compiles() -> bool:
    """Whether torch.compile was ever called: torch.export traces frames, too, but has no backend, or one of its own."""
    global _backends_seen
    # A reset forgets the backends, though not the compiled modules that come back with them.
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {0: "unknown"})
    _backends_seen = _backends_seen or any(map(_is_a_compilers, backends.values()))
    return _backends_seen


def _is_a_compilers(backend: object) -> bool:
    return backend is not None and not getattr(backend, "__qualname__", "").startswith("export.")
