"""Canaries for the private names of PyTorch that hookdrop uses.

A failing test shows which name changed, and its docstring says what breaks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hookdrop.utils import torch_internals as internals
from tests.support.programs import run_code


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


def test_code_before_the_compiler_is_imported() -> None:
    """Without `torch._dynamo` as the compiler's name, functions that must stay eager are compiled.

    Importing it takes as long as importing PyTorch, so `disable_dynamo` is not `torch.compiler.disable`, which imports it.
    """
    run_code("""
import sys
import torch
from hookdrop.utils.torch_internals import compiler_is_imported, disable_dynamo, when_compiler_is_imported

disable_dynamo(lambda x: x)
found, finders = [], len(sys.meta_path)
when_compiler_is_imported(lambda: found.append(callable(torch._dynamo.disable)))
assert found == []
assert not compiler_is_imported() and "torch._dynamo" not in sys.modules
torch.compile(torch.sin, backend="eager")(torch.ones(1))
assert found == [True], "called once, after the module is fully imported"
assert compiler_is_imported()
assert len(sys.meta_path) < finders, "hookdrop's finders were not removed"
when_compiler_is_imported(lambda: found.append("at once"))
assert found == [True, "at once"]
""")


def test_hook_guards() -> None:
    """Without them, a hook that is placed after the first compiled call never runs.

    Without the names that `enable_hook_guards` reads, code compiled before importing hookdrop keeps running without hooks.
    `torch.export` must not count as compiled code, or the compiler would be reset needlessly, with a warning.
    """
    run_code("""
import torch
import torch._dynamo
import torch.export
from torch import nn

import hookdrop
from hookdrop.utils.torch_internals import enable_hook_guards

config, x = torch._dynamo.config, torch.ones(1, 2)
assert not config.skip_nnmodule_hook_guards, "set by hookdrop"
layer = nn.Linear(2, 2)
compiled = torch.compile(layer, backend="eager")
compiled(x)
handle = layer.register_forward_hook(lambda *_: torch.zeros(1, 2))
assert not compiled(x).any()
handle.remove()
assert compiled(x).any()
torch.compiler.reset()

def unguarded():
    config.skip_nnmodule_hook_guards = True  # as it is by default
    return enable_hook_guards()

assert not unguarded()
torch.export.export(nn.Linear(2, 2), (x,), strict=True)
assert not unguarded()
torch.compile(nn.Linear(2, 2), backend="eager")(x)
assert unguarded()
assert not enable_hook_guards(), "hooks are guarded now"
""")
