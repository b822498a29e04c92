"""The Triton kernels compile for NVIDIA and AMD GPUs, also on a machine without a GPU."""

from __future__ import annotations

import os

import pytest

from tests.support.programs import run_code

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hookdrop.kernels.triton_kernels import draw_kernel, mask_kernel

def compile(kernel, types, **constants):
    types = {"bits": "*i32", "state": "*i64", "rate": "i64", "scale": "fp32", "count": "i64"} | types
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    print(len(triton.compile(source, target=GPUTarget(*TARGET), options=options).asm[BINARY]) > 1000)

compile(draw_kernel, {}, COUNT=True, LANES=128)
flags = {"COUNTED": True, "ALIGNED": True, "GROUPS_FASTEST": False, "ROWS": 64}
compile(mask_kernel, {"y": "*fp32", "x": "*fp32"}, **flags, stride=1)
flags |= {"ALIGNED": False, "GROUPS_FASTEST": True}
compile(mask_kernel, {"y": "*bf16", "x": "*bf16"}, **flags, group_stride=1)
"""


@pytest.mark.parametrize(
    ("backend", "target", "binary"),
    [
        ("nvidia", ("cuda", 80, 32), "cubin"),
        ("nvidia", ("cuda", 90, 32), "cubin"),
        ("amd", ("hip", "gfx942", 64), "hsaco"),
    ],
    ids=["sm_80", "sm_90", "gfx942"],
)
def test_kernels_compile(backend: str, target: tuple[object, ...], binary: str) -> None:
    language, backends = pytest.importorskip("triton.language"), pytest.importorskip("triton.backends").backends
    if not hasattr(language, "gather") or backend not in backends:
        pytest.skip("this Triton has no gather (PyTorch 2.6), or cannot compile for this GPU")
    # The interpreter replaces the compiler when Triton is imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"TARGET, BINARY = {target!r}, {binary!r}\n{COMPILE}"
    assert run_code(code, env=environment).split() == ["True"] * 3
