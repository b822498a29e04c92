"""Build, load and disable the native loops; the Triton kernels compile for GPUs, also on a machine without one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hookdrop.kernels import native as kernel
from tests.support.programs import run_code

SOURCE = Path(kernel.__file__).with_name("_blocks.c")


COMPILER = shutil.which("gcc") or shutil.which("clang")


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="neither gcc nor clang")


def test_environment_variable_disables_native_code() -> None:
    code = """
import torch
from hookdrop.functional import drop_block
from hookdrop.kernels import native as kernel
assert not kernel.available()
y = drop_block(torch.ones(32, 32, 14, 14), 0.2, 5)
print(round((y == 0).float().mean().item(), 1), round(y.mean().item(), 3))
"""
    assert run_code(code, env={**os.environ, "HOOKDROP_KERNEL": "0"}).strip() == "0.2 1.0"


def compiled(source: Path, library: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    return subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], capture_output=True, text=True)


@needs_compiler
@pytest.mark.parametrize(
    "source",
    [
        f"#include <stdint.h>\nint64_t hookdrop_interface(void) {{ return {kernel._INTERFACE + 1}; }}",
        "int something_else(void) { return 1; }",
    ],
    ids=["another version", "something else"],
)
def test_incompatible_library_is_ignored(tmp_path: Path, source: str) -> None:
    """A library of another version, whose functions take other arguments, and an unrelated one."""
    (tmp_path / "other.c").write_text(source)
    built = compiled(tmp_path / "other.c", tmp_path / "library", "-shared", "-fPIC")
    assert built.returncode == 0, built.stderr
    assert kernel._load(tmp_path / "library") is None


@needs_compiler
@pytest.mark.parametrize("openmp", [["-fopenmp"], ["-Wno-unknown-pragmas"]])
def test_source_compiles_without_warnings(tmp_path: Path, openmp: list[str]) -> None:
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared"]
    built = compiled(SOURCE, tmp_path / "library", *flags, *openmp)
    if built.returncode and "omp" in built.stderr and "-fopenmp" in openmp:
        pytest.skip("no OpenMP")
    assert built.returncode == 0, built.stderr


HARNESS = """
#include "%s"
#include <stdio.h>

static uint64_t state = 1;
static int64_t below(int64_t bound) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)(state >> 33) %% bound;
}

int main(void) {
    for (int round = 0; round < 3000; round++) {
        int64_t samples = 1 + below(3), channels = 1 + below(3), threads = 1 + below(5);
        int64_t kind = round %% 2 ? 4 : 8, shared = below(2), odds = 1 + below(20);
        int64_t sizes[3] = {1 + below(3), 1 + below(6), 1 + below(round %% 5 ? 9 : 150)}, edges[3], valid[3];
        for (int axis = 0; axis < 3; axis++) {
            edges[axis] = 1 + below(sizes[axis]);
            valid[axis] = sizes[axis] - edges[axis] + 1;
        }
        int64_t size = sizes[0] * sizes[1] * sizes[2], places = valid[0] * valid[1] * valid[2];
        int64_t masks = samples * (shared ? 1 : channels), maps = samples * channels, count = 0;
        char *x = calloc(maps * size, kind), *y = malloc(maps * size * kind);
        int64_t *seeds = malloc(masks * places * sizeof *seeds), *counts = calloc(samples, sizeof *counts);
        double *scales = calloc(samples, sizeof *scales);
        for (int64_t place = 0; place < masks * places; place++)
            if (below(odds) == 0)
                seeds[count++] = place;
        seeds = realloc(seeds, (count + 1) * sizeof *seeds); /* one more, which must not be read */
        seeds[count] = -1;
        int64_t first_valid[4] = {1, valid[0], valid[1], valid[2]}, first_edges[4] = {1, edges[0], edges[1], edges[2]};
        int64_t first_steps[4] = {0, sizes[1] * sizes[2], sizes[2], 1};
        hookdrop_mask(y, x, kind, scales, channels, maps, size, shared ? channels : 1, seeds, count, 1, places,
                      first_valid, first_steps, first_edges, first_steps, threads);
        int64_t own = shared ? 1 : channels;
        int64_t last_valid[4] = {own, valid[0], valid[1], valid[2]};
        int64_t last_edges[4] = {edges[0], edges[1], edges[2], shared ? channels : 1};
        int64_t corners[4] = {1, sizes[1] * sizes[2] * channels, sizes[2] * channels, channels};
        int64_t last_steps[4] = {sizes[1] * sizes[2] * channels, sizes[2] * channels, channels, 1};
        hookdrop_mask(y, round %% 3 ? x : NULL, kind, scales, 1, samples, size * channels, 1, seeds, count, 1,
                      places * own, last_valid, corners, last_edges, last_steps, threads);
        hookdrop_count(counts, masks, own, seeds, count, 1, places, valid, sizes, edges, threads);
        for (int64_t sample = 0; sample < samples; sample++)
            if (counts[sample] < 0 || counts[sample] > own * size)
                return printf("%%lld of %%lld\\n", (long long)counts[sample], (long long)(own * size)), 1;
        int64_t pitch = own * size + below(3);
        uint8_t *dropped = calloc(samples * pitch, 1);
        hookdrop_clear(y, x, kind, scales, channels * size, samples, channels, size, dropped, pitch, shared, threads);
        free(x), free(y), free(seeds), free(counts), free(scales), free(dropped);
    }
    return 0;
}
"""


@needs_compiler
def test_native_code_does_not_access_memory_out_of_bounds(tmp_path: Path) -> None:
    """3,000 geometries under the address and undefined-behavior sanitizers."""
    flags = ["-std=gnu11", "-g", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    sanitized = [*flags, "-fsanitize=address,undefined"]
    (tmp_path / "nothing.c").write_text("int main(void) { return 0; }")
    if compiled(tmp_path / "nothing.c", tmp_path / "nothing", *sanitized).returncode:
        pytest.skip("the compiler has no sanitizers")
    (tmp_path / "harness.c").write_text(HARNESS % SOURCE)
    built = compiled(tmp_path / "harness.c", tmp_path / "harness", *sanitized, "-fno-sanitize-recover=all")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run([str(tmp_path / "harness")], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr


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
