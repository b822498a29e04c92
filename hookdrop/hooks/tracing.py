"""What keeps a hook as it is at one moment: traces, exports, symbolic graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy

from hookdrop.errors import warn

_INSTEAD = "in eval mode: model.eval()   or without hooks: with hookdrop.without_hooks(model): ..."

is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # since PyTorch 2.7
"""Whether `torch.export` is at work."""


def traced_text(where: str) -> str:
    """What to say where `torch.jit.trace` records a hook at work."""
    return (
        f"{where} inside torch.jit.trace: the trace would keep it at the rate of this moment, in eval mode too.\n"
        f"  trace {_INSTEAD}"
    )


def tell_of_export(name: str) -> bool:
    """Warn; run while the graph is made (`assume_constant_result`), since from within it nothing can be told."""
    warn(
        f"torch.export in train mode: the program keeps {name!r}, at the rate of this moment for good.\n"
        f"  export {_INSTEAD}"
    )
    return True


def is_symbolic(value: Any) -> bool:
    """Whether `value` stands for what a graph of `torch.fx` will compute."""
    return isinstance(value, Proxy) or (isinstance(value, (tuple, list)) and any(map(is_symbolic, value)))


def left_behind_text(where: str) -> str:
    """What to say of a hook that is called with what stands for a tensor."""
    return (
        f"{where} is not part of the graph: torch.fx traces through a module that has others in it, and leaves its "
        "hooks behind.\n  hook layers without others in them, which keep theirs, or inject into the GraphModule."
    )
