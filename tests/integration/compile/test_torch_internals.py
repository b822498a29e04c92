"""Canaries for the private names of PyTorch that hookdrop uses.

A failing test shows which name changed, and its docstring says what breaks.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hookdrop.utils import torch_internals as internals


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by dynamo
def test_disable_dynamo() -> None:
    """Without it, the compiler traces into the drawing operations, which read a number from a tensor."""
    seen = []

    @internals.disable_dynamo
    def outside(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    torch.compile(lambda x: outside(x) * 2, backend="eager")(torch.ones(2))
    assert seen == [False]


def run_in_new_process(code: str) -> None:
    """Run `code` in a process where nothing is compiled and the compiler is not imported."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.DEVNULL, check=True)


def test_disable_dynamo_does_not_import_the_compiler() -> None:
    """Importing it takes as long as importing PyTorch, so this is not `torch.compiler.disable`."""
    run_in_new_process(
        "import sys; from hookdrop.utils.torch_internals import disable_dynamo;"
        "disable_dynamo(lambda x: x); sys.exit('torch._dynamo' in sys.modules)"
    )


# --- the compiler

_COMPILER = """
import torch
import torch._dynamo
import torch.export
from torch import nn

import hookdrop
from hookdrop.utils.torch_internals import enable_hook_guards

config, x = torch._dynamo.config, torch.ones(1, 2)
"""


def test_compiled_code_notices_late_hooks() -> None:
    """Without it, a hook that is placed after the first compiled call never runs."""
    run_in_new_process(
        _COMPILER
        + """
assert not config.skip_nnmodule_hook_guards, "set by hookdrop"
layer = nn.Linear(2, 2)
compiled = torch.compile(layer, backend="eager")
compiled(x)
handle = layer.register_forward_hook(lambda *_: torch.zeros(1, 2))
assert not compiled(x).any()
handle.remove()
assert compiled(x).any()
"""
    )


def test_enable_hook_guards_detects_code_compiled_before() -> None:
    """Without the names that it reads, code compiled before importing hookdrop keeps running without hooks.

    `torch.export` must not count as compiled code, or the compiler would be reset needlessly.
    """
    run_in_new_process(
        _COMPILER
        + """
def unguarded():
    config.skip_nnmodule_hook_guards = True  # as it is by default
    return enable_hook_guards()

assert not unguarded()
torch.export.export(nn.Linear(2, 2), (x,), strict=True)
assert not unguarded()
torch.compile(nn.Linear(2, 2), backend="eager")(x)
assert unguarded()
assert not enable_hook_guards(), "hooks are guarded now"
"""
    )


def test_compiler_is_imported() -> None:
    """Without it, a probe imports the compiler needlessly, or misses the hooks of a compiled model."""
    run_in_new_process("""
from hookdrop.utils.torch_internals import compiler_is_imported
assert not compiler_is_imported()
import torch._dynamo
assert compiler_is_imported()
""")


def test_when_compiler_is_imported() -> None:
    """Without `torch._dynamo` as the compiler's name, functions that must stay eager are compiled."""
    run_in_new_process(
        """
import sys
import torch
from hookdrop.utils.torch_internals import when_compiler_is_imported

found, finders = [], len(sys.meta_path)
when_compiler_is_imported(lambda: found.append(callable(torch._dynamo.disable)))
assert found == []
torch.compile(torch.sin, backend="eager")(torch.ones(1))
assert found == [True], "called once, after the module is fully imported"
assert len(sys.meta_path) < finders, "hookdrop's finders were not removed"
when_compiler_is_imported(lambda: found.append("at once"))
assert found == [True, "at once"]
"""
    )
