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
    for target, binary in TARGETS:
        assert len(triton.compile(source, target=GPUTarget(*target), options=options).asm[binary]) > 1000

compile(draw_kernel, {}, COUNT=True, LANES=128)
flags = {"COUNTED": True, "ALIGNED": True, "GROUPS_FASTEST": False, "ROWS": 64}
compile(mask_kernel, {"y": "*fp32", "x": "*fp32"}, **flags, stride=1)
flags |= {"ALIGNED": False, "GROUPS_FASTEST": True}
compile(mask_kernel, {"y": "*bf16", "x": "*bf16"}, **flags, group_stride=1)
"""
TARGETS = {
    "nvidia": [(("cuda", 80, 32), "cubin"), (("cuda", 90, 32), "cubin")], "amd": [(("hip", "gfx942", 64), "hsaco")]
}  # fmt: skip


def test_kernels_compile() -> None:
    language, backends = pytest.importorskip("triton.language"), pytest.importorskip("triton.backends").backends
    targets = [target for backend in TARGETS if backend in backends for target in TARGETS[backend]]
    if not hasattr(language, "gather") or not targets:
        pytest.skip("this Triton has no gather (PyTorch 2.6), or cannot compile for these GPUs")
    # The interpreter replaces the compiler when Triton is imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run_code(f"TARGETS = {targets}\n{COMPILE}", env=environment)
